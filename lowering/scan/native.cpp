// Scans of (outer, length, inner) tensors in one pass over memory. The entry point is `scan`, at the end.

enum Element { kFloat, kDouble, kBFloat, kHalf, kInt8, kInt16, kInt32, kInt64, kByte };
enum Work { kSum, kProd, kMax, kMin, kLogSumExp, kArgMax, kArgMin, kLinear, kLinearTotal };

// As native.py's _Problem. initial, total and factor (outer, inner) are of the type to compute in.
struct Problem {
  const void *x, *b, *initial;
  const uint8_t* starts;
  void* out;
  int64_t* indices;
  void *total, *factor;
  int64_t outer, length, inner, starts_outer, starts_length, starts_inner, empty_integer;
  double empty_number;
  int32_t work, element, result, compute, flag, reverse, threads;  // flag: exclusive or lagged
};

namespace {

constexpr int64_t kSlab = 1024;   // columns that are walked together, a few rows at a time
constexpr int64_t kPiece = 4096;  // rows worth a thread of their own

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
using Walk = void (*)(const M&, const Span<typename M::Compute>&, typename M::Compute*);

// Walks that need no buffer, for the usual pairs of elements.
template <class M>
Walk<M> direct(int element, int result) {
  using C = typename M::Compute;
  constexpr int V = M::vectors;
  if constexpr (!std::is_same_v<C, int64_t>)
    if (element == kFloat && result == kFloat) return walk<M, float, float, int64_t, V>;
  if constexpr (std::is_same_v<C, double>)
    if (element == kDouble && result == kDouble) return walk<M, double, double, int64_t, V>;
  if constexpr (std::is_same_v<C, float>)
    if (element == kBFloat && result == kBFloat) return walk<M, BFloat, BFloat, int64_t, V>;
  if constexpr (std::is_same_v<C, int64_t>)
    if (element == kInt64 && result == kInt64) return walk<M, int64_t, int64_t, int64_t, V>;
  return nullptr;
}

template <class M>
class Run {
  using C = typename M::Compute;
  using Fold = typename M::Fold;
  static constexpr int L = lanes<C>, V = M::vectors, W = V * L, P = M::planes;

  const Problem& p;
  const M machine;
  const Fold fold;
  const bool wide;      // tiles are neighbours in a row
  const bool in_parts;  // a chain is cut into lanes, block by block
  int64_t slab, slabs;  // columns of an item, items in a row
  Walk<M> walk_in_place;
  decltype(&gather<C, float>) load_rows;
  decltype(&scatter<C, float>) store_rows;
  int64_t size_in, size_out;

  struct Buffer {
    alignas(64) C x[kRows * W], b[kRows * W], index[kRows * W];
    uint8_t starts[kRows * W];
  };

 public:
  Run(const Problem& problem, C empty)
      : p(problem), machine{{empty}}, fold{{empty}}, wide(p.inner >= L),
        in_parts(M::outputs == 1 && p.inner == 1 && p.outer < W / 2 && p.length >= 8 * W) {
    load_rows = with_element(p.element, [](auto e) { return &gather<C, decltype(e)>; });
    store_rows = with_element(p.result, [](auto e) { return &scatter<C, decltype(e)>; });
    size_in = with_element(p.element, [](auto e) { return int64_t(sizeof(e)); });
    size_out = with_element(p.result, [](auto e) { return int64_t(sizeof(e)); });
    walk_in_place = direct<M>(p.element, p.result);
    int64_t row = wide ? p.inner : p.outer * p.inner, shares = (p.threads + p.outer - 1) / p.outer;
    int64_t share = ((row + shares - 1) / shares + W - 1) / W * W;
    slab = in_parts ? 1 : wide ? std::clamp<int64_t>(share, W, kSlab) : W;
    slabs = (row + slab - 1) / slab;
  }

  int64_t items() const { return wide ? slabs * p.outer : slabs; }
  int64_t first(int64_t item) const { return wide ? item / slabs * p.inner + item % slabs * slab : item * slab; }
  int64_t after(int64_t item) const {
    int64_t end = wide ? (item / slabs + 1) * p.inner : p.outer * p.inner;
    return std::min(first(item) + slab, end);
  }
  int64_t states() const { return (slab + W - 1) / W * W * P; }

  // Of chain number k of an item that has `count`.
  static C& at(C* states, int64_t k, int64_t count, int plane) {
    int64_t width = count - k / W * W > L ? W : L;
    return states[k / W * W * P + plane * width + k % W];
  }

  void begin(int64_t item, C* states) const {
    int64_t count = after(item) - first(item);
    for (int64_t tile = 0; tile < count; tile += W)
      for (int plane = 0; plane < P; ++plane)
        std::fill_n(&at(states, tile, count, plane), count - tile > L ? W : L, machine.identity(plane));
    if (p.initial)
      for (int64_t k = 0; k < count; ++k)
        at(states, k, count, 0) = static_cast<const C*>(p.initial)[first(item) + k];
  }

  void finish(int64_t item, C* states) const {
    int64_t count = after(item) - first(item);
    for (int64_t k = 0; p.total && k < count; ++k) {
      C own[P];
      for (int plane = 0; plane < P; ++plane) own[plane] = at(states, k, count, plane);
      static_cast<C*>(p.total)[first(item) + k] = machine.total(own);
      if (p.factor) static_cast<C*>(p.factor)[first(item) + k] = own[P - 1];
    }
  }

  // Rows begin to end, in scan order, of an item's chains.
  void advance(int64_t item, int64_t begin, int64_t end, C* states, bool emit) const {
    int64_t k = first(item), stop = after(item);
    if (in_parts) begin = cut(k, begin, end, states, emit);
    int64_t block = stop - k > W ? kRows : std::max<int64_t>(end - begin, 1);
    for (; begin < end; begin += block)
      for (int64_t tile = k; tile < stop; tile += W)
        rows(tile, int(std::min<int64_t>(W, stop - tile)), begin, std::min(end, begin + block),
             states + (tile - k) * P, emit);
  }

  bool begins(int64_t chain, int64_t begin, int64_t end) const {
    if (!p.starts) return false;
    int64_t base = chain / p.inner * p.starts_outer + chain % p.inner * p.starts_inner;
    for (int64_t i = begin; i < end; ++i)
      if (p.starts[base + (p.reverse ? p.length - 1 - i : i) * p.starts_length]) return true;
    return false;
  }

 private:
  // The lanes of chains of x, or of starts; count of them, filled up to width.
  Lanes place(int64_t chain, int count, int64_t outer, int64_t length, int64_t inner) const {
    Lanes lanes;
    lanes.step = p.reverse ? -length : length;
    lanes.count = count;
    lanes.width = count > L ? W : L;
    lanes.adjacent = wide && inner == 1;
    int64_t o = chain / p.inner, c = chain % p.inner;
    for (int l = 0; l < lanes.width; ++l) {
      lanes.base[l] = l < count ? o * outer + c * inner + (p.reverse ? (p.length - 1) * length : 0) : lanes.base[0];
      if (++c == p.inner) ++o, c = 0;
    }
    return lanes;
  }
  Lanes place(int64_t chain, int count) const { return place(chain, count, p.length * p.inner, p.inner, 1); }
  Lanes place_starts(int64_t chain, int count) const {
    return place(chain, count, p.starts_outer, p.starts_length, p.starts_inner);
  }

  void rows(int64_t chain, int count, int64_t begin, int64_t end, C* states, bool emit) const {
    Lanes at = place(chain, count), starts = place_starts(chain, count);
    if (wide && count == W && walk_in_place && (emit || std::is_same_v<M, Fold>)) {
      Span<C> span = spanned(begin, end - begin);
      int64_t start = at.base[0] + begin * at.step;
      span.x = static_cast<const char*>(p.x) + start * size_in;
      span.b = static_cast<const char*>(p.b) + start * size_in;
      span.out = emit && p.out ? static_cast<char*>(p.out) + start * size_out : nullptr;
      span.index = p.indices + start;
      span.step = at.step;
      if (p.starts) span.starts = p.starts + starts.base[0] + begin * starts.step;
      span.starts_step = starts.step;
      span.starts_wide = p.starts_inner != 0;
      return walk_in_place(machine, span, states);
    }
    Buffer buffer;
    for (; begin < end; begin += kRows) {
      int64_t n = std::min<int64_t>(kRows, end - begin);
      fill(buffer, at, starts, begin, n);
      bool wants = emit && p.out;
      if (at.width == W)
        step<M, V>(machine, buffer, begin, n, states, wants);
      else
        step<M, 1>(machine, buffer, begin, n, states, wants);
      if (wants) drain(buffer, at, begin, n);
    }
  }

  Span<C> spanned(int64_t begin, int64_t rows) const {
    Span<C> span{};
    span.rows = rows;
    span.row = C(p.reverse ? p.length - 1 - begin : begin);
    span.row_step = C(p.reverse ? -1 : 1);
    return span;
  }

  void fill(Buffer& buffer, const Lanes& at, const Lanes& starts, int64_t begin, int64_t n) const {
    load_rows(at, p.x, begin, n, buffer.x);
    if (M::inputs == 2) load_rows(at, p.b, begin, n, buffer.b);
    if (p.starts)
      for (int64_t i = 0; i < n; ++i)
        for (int l = 0; l < at.width; ++l)
          buffer.starts[i * at.width + l] = p.starts[starts.base[l] + (begin + i) * starts.step];
  }

  template <class S, int vectors>
  void step(const S& machine, Buffer& buffer, int64_t begin, int64_t n, C* states, bool emit) const {
    Span<C> span = spanned(begin, n);
    span.x = buffer.x, span.b = buffer.b, span.index = buffer.index;
    span.out = emit ? buffer.x : nullptr;
    span.step = span.starts_step = vectors * L;
    span.starts = p.starts ? buffer.starts : nullptr;
    span.starts_wide = true;
    walk<S, C, C, C, vectors>(machine, span, states);
  }

  void drain(const Buffer& buffer, const Lanes& at, int64_t begin, int64_t n) const {
    store_rows(at, buffer.x, begin, n, p.out);
    if constexpr (M::outputs == 2) scatter<C, int64_t>(at, buffer.index, begin, n, p.indices);
  }

  // One chain: blocks of W parts, whose totals say what each part begins with. Returns the first row not done.
  int64_t cut(int64_t chain, int64_t begin, int64_t end, C* states, bool emit) const {
    constexpr int Q = Fold::planes;
    Buffer buffer;
    C carry[P], own[Q], totals[Q * W], initial[P * W];
    for (int plane = 0; plane < P; ++plane) carry[plane] = states[plane * L];
    for (int64_t n; (n = std::min<int64_t>(kRows, (end - begin) / W)) >= 8; begin += n * W) {
      Lanes at = parts(place(chain, 1), n), starts = parts(place_starts(chain, 1), n);
      fill(buffer, at, starts, begin, n);
      for (int k = 0; k < Q * W; ++k) totals[k] = fold.identity(k / W);
      step<Fold, V>(fold, buffer, begin, n, totals, false);
      for (int l = 0; l < W; ++l) {
        for (int plane = 0; plane < P; ++plane) initial[plane * W + l] = carry[plane];
        for (int plane = 0; plane < Q; ++plane) own[plane] = totals[plane * W + l];
        if (begins(chain, begin + l * n, begin + (l + 1) * n))
          std::copy_n(own, P, carry);
        else
          machine.extend(carry, own);
      }
      if (!emit || !p.out) continue;
      step<M, V>(machine, buffer, begin, n, initial, true);
      store_rows(at, buffer.x, begin, n, p.out);
    }
    for (int plane = 0; plane < P; ++plane) states[plane * L] = carry[plane];
    return begin;
  }

  static Lanes parts(Lanes lanes, int64_t rows) {
    for (int l = 1; l < W; ++l) lanes.base[l] = lanes.base[0] + l * rows * lanes.step;
    lanes.count = lanes.width = W;
    lanes.adjacent = false;
    return lanes;
  }
};

template <class M>
void in_one_pass(const Problem& p, const Run<M>& run) {
  using C = typename M::Compute;
#pragma omp parallel for schedule(dynamic) num_threads(p.threads) if (p.threads > 1)
  for (int64_t item = 0; item < run.items(); ++item) {
    std::vector<C> states(run.states());
    run.begin(item, states.data());
    run.advance(item, 0, p.length, states.data(), true);
    run.finish(item, states.data());
  }
}

// Fewer items than threads: the totals of pieces of the length first.
template <class M>
void in_two_passes(const Problem& p, const Run<M>& run, typename M::Compute empty, int64_t pieces) {
  using C = typename M::Compute;
  using Fold = typename M::Fold;
  Run<Fold> folding(p, empty);
  int64_t items = run.items(), length = (p.length + pieces - 1) / pieces;
  std::vector<C> totals(items * pieces * folding.states()), states(items * pieces * run.states());
  auto total = [&](int64_t k) { return totals.data() + k * folding.states(); };
  auto state = [&](int64_t k) { return states.data() + k * run.states(); };
#pragma omp parallel for schedule(dynamic) num_threads(p.threads)
  for (int64_t k = 0; k < items * pieces; ++k) {
    folding.begin(k / pieces, total(k));
    int64_t begin = k % pieces * length;
    folding.advance(k / pieces, begin, std::min(begin + length, p.length), total(k), false);
  }
  for (int64_t item = 0; item < items; ++item) {
    run.begin(item, state(item * pieces));
    int64_t count = run.after(item) - run.first(item);
    for (int64_t k = item * pieces; k + 1 < (item + 1) * pieces; ++k)
      for (int64_t lane = 0; lane < count; ++lane) {
        C carry[M::planes], own[Fold::planes];
        for (int plane = 0; plane < M::planes; ++plane) carry[plane] = run.at(state(k), lane, count, plane);
        for (int plane = 0; plane < Fold::planes; ++plane) own[plane] = folding.at(total(k), lane, count, plane);
        int64_t begin = k % pieces * length;
        if (run.begins(run.first(item) + lane, begin, begin + length))
          std::copy_n(own, M::planes, carry);
        else
          M::extend(carry, own);
        for (int plane = 0; plane < M::planes; ++plane) run.at(state(k + 1), lane, count, plane) = carry[plane];
      }
  }
#pragma omp parallel for schedule(dynamic) num_threads(p.threads)
  for (int64_t k = 0; k < items * pieces; ++k) {
    int64_t begin = k % pieces * length;
    run.advance(k / pieces, begin, std::min(begin + length, p.length), state(k), true);
    if ((k + 1) % pieces == 0) run.finish(k / pieces, state(k));
  }
}

template <class M>
int run(const Problem& p, typename M::Compute empty) {
  if (p.outer * p.inner == 0) return 0;
  Run<M> run(p, empty);
  int64_t pieces = std::min<int64_t>(p.threads / run.items(), p.length / kPiece);
  if (pieces > 1)
    in_two_passes(p, run, empty, pieces);
  else
    in_one_pass(p, run);
  return 0;
}

template <class C, template <class, bool> class M>
int flagged(const Problem& p, C empty) {
  return p.flag ? run<M<C, true>>(p, empty) : run<M<C, false>>(p, empty);
}

template <class C, class Op>
int combine(const Problem& p, C empty) {
  return p.flag ? run<Scan<C, Op, true>>(p, empty) : run<Scan<C, Op, false>>(p, empty);
}

template <class C>
int solve(const Problem& p, C empty) {
  switch (p.work) {
    case kSum: return combine<C, Add>(p, empty);
    case kProd: return combine<C, Multiply>(p, empty);
    case kMax: return combine<C, Larger>(p, empty);
    case kMin: return combine<C, Smaller>(p, empty);
  }
  if constexpr (!std::is_same_v<C, int64_t>) {
    if (p.work == kLinear) return flagged<C, Linear>(p, empty);
    if (p.work == kLinearTotal) return flagged<C, LinearTotal>(p, empty);
  }
  if constexpr (!std::is_same_v<C, float>) {
    if (p.work == kArgMax) return run<Extremes<C, Larger>>(p, empty);
    if (p.work == kArgMin) return run<Extremes<C, Smaller>>(p, empty);
  }
  if constexpr (std::is_same_v<C, double>)
    if (p.work == kLogSumExp) return p.flag ? run<LogSumExp<true>>(p, empty) : run<LogSumExp<false>>(p, empty);
  return 1;
}

}  // namespace

extern "C" int scan(const Problem* p) {
  switch (p->compute) {
    case kFloat: return solve<float>(*p, float(p->empty_number));
    case kDouble: return solve<double>(*p, p->empty_number);
    case kInt64: return solve<int64_t>(*p, p->empty_integer);
  }
  return 1;
}
