// Chains that are neighbours go down the rows together.

namespace {

constexpr int64_t kRows = 32;      // of a buffer
constexpr int64_t kSlab = 4096;    // columns that one thread walks
constexpr int64_t kBlock = 16384;  // elements that their tiles take in turn, so that these read whole pages

template <class M>
using Walk = void (*)(const M&, const Columns<typename M::Compute>&, typename M::Compute*);

template <class M, class E, class O = E>
constexpr Walk<M> straight = down<M, E, O, int64_t, M::vectors>;

// The walk that needs no buffer, if there is one.
template <class M>
Walk<M> straight_for(int elements) {
  using C = typename M::Compute;
  if constexpr (std::is_same_v<C, int64_t>) {
    if (elements == pair(kInt64, kInt64)) return straight<M, int64_t>;
    if (elements == pair(kInt32, kInt64)) return straight<M, int32_t, int64_t>;
  } else if (elements == pair(kFloat, kFloat)) {
    return straight<M, float>;
  }
  if constexpr (std::is_same_v<C, double>)
    if (elements == pair(kDouble, kDouble)) return straight<M, double>;
  if constexpr (std::is_same_v<C, float>) {
    if (elements == pair(kBFloat, kBFloat)) return straight<M, BFloat>;
    if (elements == pair(kBFloat, kFloat)) return straight<M, BFloat, float>;
  }
  return nullptr;
}

// An item is a part of a row, walked in tiles of W chains; or W chains of several rows, if these are shorter than a
// vector.
template <class M>
struct Grid : Tensors<M> {
  using typename Tensors<M>::C;
  using Folding = Grid<typename M::Fold>;
  using Tensors<M>::p;
  static constexpr int L = lanes<C>, V = M::vectors, W = V * L, planes = M::planes;

  bool wide;
  Walk<M> walk;
  int64_t across, slab, slabs;  // chains in a row, of an item, and items in a row

  struct Buffer {
    alignas(kBytes) C x[kRows * W], b[kRows * W], index[kRows * W];
    uint8_t starts[kRows * W];
  };

  Grid(const Problem& problem, C empty)
      : Tensors<M>(problem, empty), wide(p.inner >= L), walk(straight_for<M>(pair(p.element, p.result))) {
    across = wide ? p.inner : p.outer * p.inner;
    int64_t shares = up(p.threads, p.outer);
    slab = wide ? std::clamp<int64_t>(up(up(across, shares), W) * W, W, kSlab) : W;
    slabs = up(across, slab);
  }

  int64_t items() const { return wide ? slabs * p.outer : slabs; }
  int64_t first(int64_t item) const { return item / slabs * across + item % slabs * slab; }
  int64_t after(int64_t item) const { return std::min(first(item) + slab, (item / slabs + 1) * across); }
  int64_t states() const { return up(slab, W) * W * planes; }

  // In the states of an item of `count` chains; its last tile may be one vector wide.
  static C& state(C* states, int64_t k, int64_t count, int plane) {
    int64_t tile = k / W * W;
    return states[tile * planes + plane * (count - tile > L ? W : L) + k - tile];
  }

  void advance(int64_t item, int64_t begin, int64_t end, C* states, bool emit) const {
    int64_t chain = first(item), stop = after(item), block = p.length;
    if (stop - chain > W) block = std::clamp<int64_t>(kBlock / (stop - chain), 8, 64);
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
    at.row = C(this->row(begin)), at.row_step = C(p.reverse ? -1 : 1);
    if (p.starts) at.starts = p.starts + this->start(chain, begin);
    at.starts_step = p.reverse ? -p.starts_length : p.starts_length;
    at.starts_wide = p.starts_inner != 0;
    return at;
  }

  void straight_on(int64_t chain, int64_t begin, int64_t rows, C* states, bool emit) const {
    int64_t place = this->place(chain, begin);
    Columns<C> at = columns(chain, begin, rows);
    at.x = this->in(0, place), at.b = this->in(1, place);
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

  // f(lane, number, chain, place) for chains that are neighbours, and the place of the first one's row i.
  template <class F>
  void each_run(int64_t chain, int count, int64_t i, F f) const {
    int64_t column = chain % p.inner, place = this->place(chain, i);
    for (int64_t lane = 0, run; lane < count; lane += run) {
      run = std::min(p.inner - column, count - lane);
      f(lane, run, chain + lane, place);
      place += p.length * p.inner - column;
      column = 0;
    }
  }

  void fill(Buffer& buffer, Columns<C>& at, int64_t chain, int count, int width, int64_t begin) const {
    int64_t step = p.reverse ? -p.inner : p.inner;
    each_run(chain, count, begin, [&](int64_t lane, int64_t run, int64_t, int64_t place) {
      this->read(this->in(0, place), step, buffer.x + lane, width, at.rows, run);
      if (M::inputs == 2) this->read(this->in(1, place), step, buffer.b + lane, width, at.rows, run);
    });
    if (!p.starts || (p.starts_inner == 0 && (wide || p.starts_outer == 0))) return;
    each_run(chain, count, begin, [&](int64_t lane, int64_t run, int64_t first, int64_t) {
      for (int64_t i = 0; i < at.rows; ++i)
        for (int64_t j = 0; j < run; ++j)
          buffer.starts[i * width + lane + j] = p.starts[this->start(first + j, begin + i)];
    });
    at.starts = buffer.starts, at.starts_step = width, at.starts_wide = true;
  }

  void drain(const Buffer& buffer, int64_t rows, int64_t chain, int count, int width, int64_t begin) const {
    int64_t step = p.reverse ? -p.inner : p.inner;
    each_run(chain, count, begin, [&](int64_t lane, int64_t run, int64_t, int64_t place) {
      this->write(buffer.x + lane, width, this->out(place), step, rows, run);
      if (M::outputs == 2) copy<C, C, int64_t>(buffer.index + lane, width, this->index(place), step, rows, run);
    });
  }
};

}  // namespace
