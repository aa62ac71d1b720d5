// Scans of (outer, length, inner) tensors in one pass over memory. STEPS, a machine of native_steps.cpp, is defined
// ahead of this; the entry point is `scan`, at the end.

enum Element { kFloat, kDouble, kBFloat, kHalf, kInt8, kInt16, kInt32, kInt64, kByte };

// As native.py's _Problem. initial, total and factor (outer, inner) are of the type to compute in.
struct Problem {
  const void *x, *b, *initial;
  const uint8_t* starts;
  void *out, *indices, *total, *factor;
  int64_t outer, length, inner, starts_outer, starts_length, starts_inner, empty_integer;
  double empty_number;
  int32_t element, result, flag, reverse, threads;
};

namespace {

constexpr int64_t kRows = 32;     // of a buffer, or that tiles of a row take in turn
constexpr int64_t kSlab = 1024;   // columns that one thread walks
constexpr int64_t kLine = 1024;   // elements of a line in a buffer
constexpr int64_t kChains = 64;   // lines that one thread takes
constexpr int64_t kPiece = 4096;  // rows worth a thread of their own
constexpr uintptr_t kLarge = 1 << 21;  // bytes of a large page

template <class F>
auto with_element(int element, F f) {
  switch (element) {
    case kFloat: return f(float{});
    case kDouble: return f(double{});
    case kBFloat: return f(BFloat{});
    case kHalf: return f(Half{});
    case kInt8: return f(int8_t{});
    case kInt16: return f(int16_t{});
    case kInt32: return f(int32_t{});
    case kInt64: return f(int64_t{});
    default: return f(uint8_t{});
  }
}

template <class M>
using Walk = void (*)(const M&, const Columns<typename M::Compute>&, typename M::Compute*);

template <class M, class E, class O>
constexpr Walk<M> straight = down<M, E, O, int64_t, M::vectors>;

// Walks that need no buffer, for the usual pairs of elements.
template <class M>
Walk<M> direct(int element, int result) {
  using C = typename M::Compute;
  int pair = element * 16 + result;
  if constexpr (std::is_same_v<C, int64_t>) {
    if (pair == kInt64 * 17) return straight<M, int64_t, int64_t>;
    if (pair == kInt32 * 16 + kInt64) return straight<M, int32_t, int64_t>;
  } else if (pair == kFloat * 17) {
    return straight<M, float, float>;
  }
  if constexpr (std::is_same_v<C, double>)
    if (pair == kDouble * 17) return straight<M, double, double>;
  if constexpr (std::is_same_v<C, float>) {
    if (pair == kBFloat * 17) return straight<M, BFloat, BFloat>;
    if (pair == kBFloat * 16 + kFloat) return straight<M, BFloat, float>;
  }
  return nullptr;
}

// What both kinds of walks know of the tensors.
template <class M>
struct Tensors {
  using C = typename M::Compute;
  const Problem& p;
  M machine;
  typename M::Fold fold;
  decltype(&read<C, float>) load_rows;
  decltype(&write<C, float>) store_rows;
  int64_t size_in, size_out;

  Tensors(const Problem& problem, C empty) : p(problem), machine{{empty, problem.flag != 0}}, fold{{empty, problem.flag != 0}} {
    load_rows = with_element(p.element, [](auto e) { return &read<C, decltype(e)>; });
    store_rows = with_element(p.result, [](auto e) { return &write<C, decltype(e)>; });
    size_in = with_element(p.element, [](auto e) { return int64_t(sizeof(e)); });
    size_out = with_element(p.result, [](auto e) { return int64_t(sizeof(e)); });
  }
  const void* in(const void* x, int64_t place) const { return static_cast<const char*>(x) + place * size_in; }
  void* out(int64_t place) const { return static_cast<char*>(p.out) + place * size_out; }
  int64_t* index(int64_t place) const { return static_cast<int64_t*>(p.indices) + place; }

  // Where row i in scan order of a chain lies.
  int64_t at(int64_t i) const { return p.reverse ? p.length - 1 - i : i; }
  int64_t place(int64_t chain, int64_t i) const {
    return (chain / p.inner * p.length + at(i)) * p.inner + chain % p.inner;
  }
  int64_t start(int64_t chain, int64_t i) const {
    return chain / p.inner * p.starts_outer + at(i) * p.starts_length + chain % p.inner * p.starts_inner;
  }
  bool begins(int64_t chain, int64_t begin, int64_t end) const {
    for (int64_t i = begin; p.starts && i < end; ++i)
      if (p.starts[start(chain, i)]) return true;
    return false;
  }
  C initial(int64_t chain, int plane) const {
    return p.initial && plane == 0 ? static_cast<const C*>(p.initial)[chain] : machine.identity(plane);
  }
};

// Neighbouring chains walk down together, a tile of W at a time. An item is a part of one row, or where rows are
// shorter than a vector W chains of several.
template <class M>
struct Grid : Tensors<M> {
  using typename Tensors<M>::C;
  using Folding = Grid<typename M::Fold>;
  using Tensors<M>::p;
  static constexpr int L = lanes<C>, V = M::vectors, W = V * L, planes = M::planes;

  bool wide;
  Walk<M> walk;
  int64_t row, slab, slabs;

  struct Buffer {
    alignas(kBytes) C x[kRows * W], b[kRows * W], index[kRows * W];
    uint8_t starts[kRows * W];
  };

  Grid(const Problem& problem, C empty)
      : Tensors<M>(problem, empty), wide(problem.inner >= L), walk(direct<M>(problem.element, problem.result)) {
    row = wide ? p.inner : p.outer * p.inner;
    int64_t shares = (p.threads + p.outer - 1) / p.outer, share = ((row + shares - 1) / shares + W - 1) / W * W;
    slab = wide ? std::clamp<int64_t>(share, W, kSlab) : W;
    slabs = (row + slab - 1) / slab;
  }

  int64_t items() const { return wide ? slabs * p.outer : slabs; }
  int64_t first(int64_t item) const { return item / slabs * row + item % slabs * slab; }
  int64_t after(int64_t item) const { return std::min(first(item) + slab, (item / slabs + 1) * row); }
  int64_t states() const { return (slab + W - 1) / W * W * planes; }

  // In the states of an item of `count` chains; its last tile may be one vector wide.
  static C& state(C* states, int64_t k, int64_t count, int plane) {
    int64_t tile = k / W * W;
    return states[tile * planes + plane * (count - tile > L ? W : L) + k - tile];
  }

  void advance(int64_t item, int64_t begin, int64_t end, C* states, bool emit) const {
    int64_t chain = first(item), stop = after(item), block = stop - chain > W ? kRows : p.length;
    Buffer buffer;
    int64_t rest = (stop - chain) % W;
    if (rest) clear(buffer, std::min(kRows, end - begin) * (rest > L ? W : L));
    for (; begin < end; begin += block)
      for (int64_t tile = chain; tile < stop; tile += W) {
        int count = int(std::min<int64_t>(W, stop - tile));
        int64_t rows = std::min(end - begin, block);
        C* own = states + (tile - chain) * planes;
        if (wide && count == W && walk)
          straight_on(tile, begin, rows, own, emit);
        else if (count > L)
          buffered<V>(buffer, tile, count, begin, rows, own, emit);
        else
          buffered<1>(buffer, tile, count, begin, rows, own, emit);
      }
  }

  Columns<C> columns(int64_t chain, int64_t begin, int64_t rows) const {
    Columns<C> at{};
    at.rows = rows;
    at.row = C(this->at(begin)), at.row_step = C(p.reverse ? -1 : 1);
    if (p.starts) at.starts = p.starts + this->start(chain, begin);
    at.starts_step = p.reverse ? -p.starts_length : p.starts_length;
    at.starts_wide = p.starts_inner != 0;
    return at;
  }

  void straight_on(int64_t chain, int64_t begin, int64_t rows, C* states, bool emit) const {
    int64_t place = this->place(chain, begin);
    Columns<C> at = columns(chain, begin, rows);
    at.x = this->in(p.x, place), at.b = this->in(p.b, place);
    at.step = p.reverse ? -p.inner : p.inner;
    if (emit && p.out) at.out = this->out(place), at.index = this->index(place);
    walk(this->machine, at, states);
  }

  template <int vectors>
  void buffered(Buffer& buffer, int64_t chain, int count, int64_t begin, int64_t rows, C* states, bool emit) const {
    constexpr int width = vectors * L;
    for (int64_t end = begin + rows; begin < end; begin += kRows) {
      Columns<C> at = columns(chain, begin, std::min(kRows, end - begin));
      fill(buffer, at, chain, count, width, begin);
      at.x = buffer.x, at.b = buffer.b, at.index = buffer.index, at.step = width;
      if (emit && p.out) at.out = buffer.x;
      down<M, C, C, C, vectors>(this->machine, at, states);
      if (at.out) drain(buffer, at.rows, chain, count, width, begin);
    }
  }

  // Lanes that no chain fills are computed too.
  static void clear(Buffer& buffer, int64_t size) {
    std::fill_n(buffer.x, size, C(0));
    std::fill_n(buffer.b, M::inputs == 2 ? size : 0, C(0));
    std::fill_n(buffer.starts, size, 0);
  }

  // f(lane, chain, number) for chains that are neighbours.
  template <class F>
  void each_run(int64_t chain, int count, F f) const {
    for (int lane = 0; lane < count;) {
      int64_t run = std::min<int64_t>(p.inner - (chain + lane) % p.inner, count - lane);
      f(lane, chain + lane, run);
      lane += int(run);
    }
  }

  void fill(Buffer& buffer, Columns<C>& at, int64_t chain, int count, int width, int64_t begin) const {
    int64_t step = p.reverse ? -p.inner : p.inner;
    bool shared = !p.starts || (p.starts_inner == 0 && (wide || p.starts_outer == 0));
    each_run(chain, count, [&](int lane, int64_t first, int64_t run) {
      int64_t place = this->place(first, begin);
      this->load_rows(this->in(p.x, place), step, at.rows, run, buffer.x + lane, width);
      if (M::inputs == 2) this->load_rows(this->in(p.b, place), step, at.rows, run, buffer.b + lane, width);
      for (int64_t i = 0; !shared && i < at.rows; ++i)
        for (int64_t j = 0; j < run; ++j)
          buffer.starts[i * width + lane + j] = p.starts[this->start(first + j, begin + i)];
    });
    if (!shared) at.starts = buffer.starts, at.starts_step = width, at.starts_wide = true;
  }

  void drain(const Buffer& buffer, int64_t rows, int64_t chain, int count, int width, int64_t begin) const {
    int64_t step = p.reverse ? -p.inner : p.inner;
    each_run(chain, count, [&](int lane, int64_t first, int64_t run) {
      int64_t place = this->place(first, begin);
      this->store_rows(buffer.x + lane, width, rows, run, this->out(place), step);
      if (M::outputs == 2) write<C, int64_t>(buffer.index + lane, width, rows, run, this->index(place), step);
    });
  }
};

// Chains that lie along the last dim, each a line.
template <class M>
struct Lines : Tensors<M> {
  using typename Tensors<M>::C;
  using Folding = Lines<M>;
  using Tensors<M>::p;
  static constexpr int L = lanes<C>, planes = M::Fold::planes;

  struct Buffer {
    alignas(kBytes) C x[kLine], b[kLine], index[kLine];
    uint8_t starts[kLine];
  };

  using Along = void (*)(const M&, const typename M::Fold&, const Line<C>&, C*);
  Along walk, walk_buffer;

  Lines(const Problem& problem, C empty) : Tensors<M>(problem, empty) {
    walk = direct(p.element * 16 + p.result);
    walk_buffer = choose<C, C, C>();
  }

  int64_t items() const { return (p.outer + kChains - 1) / kChains; }
  int64_t first(int64_t item) const { return item * kChains; }
  int64_t after(int64_t item) const { return std::min(first(item) + kChains, p.outer); }
  int64_t states() const { return kChains * planes; }
  static C& state(C* states, int64_t k, int64_t, int plane) { return states[k * planes + plane]; }

  void advance(int64_t item, int64_t begin, int64_t end, C* states, bool emit) const {
    Buffer buffer;
    for (int64_t chain = first(item); chain < after(item); ++chain, states += planes) {
      int64_t i = walk ? straight_on(chain, begin, end, states, emit) : begin;
      for (; i < end; i += kLine) buffered(buffer, chain, i, std::min(kLine, end - i), states, emit);
    }
  }

  Line<C> line(int64_t begin, int64_t vectors) const {
    Line<C> at{};
    at.vectors = vectors;
    at.row = C(this->at(begin)), at.row_step = C(p.reverse ? -1 : 1);
    return at;
  }
  int64_t lowest(int64_t chain, int64_t begin, int64_t count) const {
    return this->place(chain, p.reverse ? begin + count - 1 : begin);
  }

  // Whole vectors; returns the first row that is left.
  int64_t straight_on(int64_t chain, int64_t begin, int64_t end, C* states, bool emit) const {
    int64_t count = (end - begin) / L * L, low = lowest(chain, begin, count);
    Line<C> at = line(begin, count / L);
    at.x = this->in(p.x, low), at.b = this->in(p.b, low);
    if (p.starts) at.starts = p.starts + chain * p.starts_outer + low - chain * p.length;
    if (emit && p.out) at.out = this->out(low), at.index = this->index(low);
    walk(this->machine, this->fold, at, states);
    return begin + count;
  }

  void buffered(Buffer& buffer, int64_t chain, int64_t begin, int64_t count, C* states, bool emit) const {
    int64_t low = lowest(chain, begin, count), whole = (count + L - 1) / L * L, pad = whole - count;
    int64_t shift = p.reverse ? pad : 0, rest = p.reverse ? 0 : count;
    Line<C> at = line(begin, whole / L);
    at.x = buffer.x, at.b = buffer.b, at.index = buffer.index;
    for (int input = 0; input < M::inputs; ++input) {
      C* to = input ? buffer.b : buffer.x;
      this->load_rows(this->in(input ? p.b : p.x, low), 0, 1, count, to + shift, 0);
      std::fill_n(to + rest, pad, this->machine.neutral(input));
    }
    if (p.starts) {
      std::memcpy(buffer.starts + shift, p.starts + chain * p.starts_outer + low - chain * p.length, count);
      std::memset(buffer.starts + rest, 0, pad);
      at.starts = buffer.starts;
    }
    if (emit && p.out) at.out = buffer.x;
    walk_buffer(this->machine, this->fold, at, states);
    if (!at.out) return;
    this->store_rows(buffer.x + shift, 0, 1, count, this->out(low), 0);
    if (M::outputs == 2) write<C, int64_t>(buffer.index + shift, 0, 1, count, this->index(low), 0);
  }

  Along direct(int pair) const {
    if constexpr (std::is_same_v<C, double>) {
      if (pair == kFloat * 17) return choose<float, float, int64_t>();
      if (pair == kDouble * 17) return choose<double, double, int64_t>();
    } else if (pair == (std::is_same_v<C, float> ? kFloat : kInt64) * 17) {
      return choose<C, C, int64_t>();
    }
    return nullptr;
  }
  template <class E, class O, class I>
  Along choose() const {
    if (p.flag) return p.reverse ? choose<E, O, I, true, true>() : choose<E, O, I, true, false>();
    return p.reverse ? choose<E, O, I, false, true>() : choose<E, O, I, false, false>();
  }
  template <class E, class O, class I, bool shift, bool reverse>
  Along choose() const {
    return p.starts ? along<M, E, O, I, shift, true, reverse> : along<M, E, O, I, shift, false, reverse>;
  }
};

template <class R, class C>
void begin(const R& run, int64_t item, C* states) {
  int64_t count = run.after(item) - run.first(item);
  for (int64_t k = 0; k < count; ++k)
    for (int plane = 0; plane < R::planes; ++plane)
      run.state(states, k, count, plane) = run.initial(run.first(item) + k, plane);
}

template <class R, class C>
void finish(const R& run, int64_t item, C* states) {
  int64_t count = run.after(item) - run.first(item);
  for (int64_t k = 0; run.p.total && k < count; ++k) {
    Vec<C, lanes<C>> own[R::planes];
    for (int plane = 0; plane < R::planes; ++plane) own[plane] = splat(run.state(states, k, count, plane));
    static_cast<C*>(run.p.total)[run.first(item) + k] = run.machine.value(own, own[0])[0];
    if (run.p.factor) static_cast<C*>(run.p.factor)[run.first(item) + k] = own[R::planes - 1][0];
  }
}

template <class R>
void in_one_pass(const R& run) {
#pragma omp parallel for schedule(dynamic) num_threads(run.p.threads) if (run.p.threads > 1)
  for (int64_t item = 0; item < run.items(); ++item) {
    std::vector<typename R::C> states(run.states());
    begin(run, item, states.data());
    run.advance(item, 0, run.p.length, states.data(), true);
    finish(run, item, states.data());
  }
}

// What a piece of an item's rows begins with, from what the piece before it began with and that one's total.
template <class R, class C>
void carry_on(const R& run, int64_t item, int64_t begin, int64_t end, C* states, C* totals, C* next) {
  constexpr int Q = R::Folding::planes;
  int64_t count = run.after(item) - run.first(item);
  for (int64_t k = 0; k < count; ++k) {
    Vec<C, lanes<C>> left[Q], own[Q];
    for (int q = 0; q < Q; ++q) {
      left[q] = splat(q < R::planes ? run.state(states, k, count, q % R::planes) : run.fold.identity(q));
      own[q] = splat(R::Folding::state(totals, k, count, q));
    }
    if (!run.begins(run.first(item) + k, begin, end)) run.fold.join(left, own);
    for (int plane = 0; plane < R::planes; ++plane) run.state(next, k, count, plane) = own[plane][0];
  }
}

// Fewer items than threads: the totals of pieces of the rows first.
template <class R, class C>
void in_two_passes(const R& run, C empty, int64_t pieces) {
  typename R::Folding folding(run.p, empty);
  int64_t items = run.items(), rows = (run.p.length + pieces - 1) / pieces;
  rows = (rows + kLine - 1) / kLine * kLine;
  int64_t size = run.states(), total_size = folding.states();
  std::vector<C> states(items * pieces * size), totals(items * pieces * total_size);
  auto end = [&](int64_t piece) { return std::min((piece + 1) * rows, run.p.length); };
#pragma omp parallel for schedule(dynamic) num_threads(run.p.threads)
  for (int64_t k = 0; k < items * pieces; ++k) {
    bool first = k % pieces == 0;
    if (first) begin(run, k / pieces, &states[k * size]);
    begin(folding, k / pieces, &totals[k * total_size]);
    folding.advance(k / pieces, k % pieces * rows, end(k % pieces), &totals[k * total_size], false);
  }
  for (int64_t k = 0; k < items * pieces; ++k)
    if (k % pieces + 1 < pieces)
      carry_on(run, k / pieces, k % pieces * rows, end(k % pieces), &states[k * size], &totals[k * total_size],
               &states[(k + 1) * size]);
#pragma omp parallel for schedule(dynamic) num_threads(run.p.threads)
  for (int64_t k = 0; k < items * pieces; ++k) {
    run.advance(k / pieces, k % pieces * rows, end(k % pieces), &states[k * size], true);
    if (k % pieces + 1 == pieces) finish(run, k / pieces, &states[k * size]);
  }
}

template <class R, class C>
void solve(const Problem& p, C empty) {
  R run(p, empty);
  int64_t pieces = std::min<int64_t>(p.threads / run.items(), p.length / kPiece);
  if (pieces > 1)
    in_two_passes(run, empty, pieces);
  else
    in_one_pass(run);
}

// New memory comes in large pages, if the system has them: it takes longer to get it in small ones than to scan.
void in_large_pages(void* memory, int64_t bytes) {
#if defined(__linux__)
  uintptr_t from = (reinterpret_cast<uintptr_t>(memory) + kLarge - 1) / kLarge * kLarge;
  uintptr_t to = (reinterpret_cast<uintptr_t>(memory) + bytes) / kLarge * kLarge;
  if (memory && bytes >= 2 * kLarge && to > from) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#endif
}

}  // namespace

extern "C" void scan(const Problem* p) {
  using C = STEPS::Compute;
  int64_t elements = p->outer * p->length * p->inner;
  in_large_pages(p->out, elements * with_element(p->result, [](auto e) { return int64_t(sizeof(e)); }));
  in_large_pages(p->indices, elements * sizeof(int64_t));
  C empty = std::is_same_v<C, int64_t> ? C(p->empty_integer) : C(p->empty_number);
  if (p->outer * p->inner == 0) return;
  if (p->inner == 1)
    solve<Lines<STEPS>>(*p, empty);
  else
    solve<Grid<STEPS>>(*p, empty);
}
