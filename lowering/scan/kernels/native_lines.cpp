// Chains that lie along the last dim are lines of memory.

namespace {

constexpr int64_t kLine = 1024;  // elements in a buffer
constexpr int64_t kChains = 64;  // that one thread takes at a time

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
  int64_t chains;  // of an item

  Lines(const Problem& problem, C empty) : Tensors<M>(problem, empty) {
    walk = straight_for(pair(p.element, p.result));
    walk_buffer = choose<C, C, C>();
    chains = std::clamp<int64_t>(p.outer / p.threads, 1, kChains);
  }

  int64_t items() const { return up(p.outer, chains); }
  int64_t first(int64_t item) const { return item * chains; }
  int64_t after(int64_t item) const { return std::min(first(item) + chains, p.outer); }
  int64_t states() const { return chains * planes; }
  static C& state(C* states, int64_t k, int64_t, int plane) { return states[k * planes + plane]; }

  void advance(int64_t item, int64_t begin, int64_t end, C* states, bool emit) const {
    Buffer buffer;
    for (int64_t chain = first(item); chain < after(item); ++chain, states += planes) {
      int64_t i = begin;
      if (walk && end - i >= L) i = straight_on(chain, i, end, states, emit);
      for (; i < end; i += kLine) buffered(buffer, chain, i, std::min(kLine, end - i), states, emit);
    }
  }

  Line<C> line(int64_t begin, int64_t vectors) const {
    Line<C> at{};
    at.vectors = vectors;
    at.row = C(this->row(begin)), at.row_step = C(p.reverse ? -1 : 1);
    return at;
  }
  // In memory.
  int64_t lowest(int64_t chain, int64_t begin, int64_t count) const {
    return chain * p.length + this->row(p.reverse ? begin + count - 1 : begin);
  }

  const uint8_t* starts(int64_t chain, int64_t low) const {
    return p.starts + chain * (p.starts_outer - p.length) + low;
  }

  // Whole vectors; returns the first row that is left.
  int64_t straight_on(int64_t chain, int64_t begin, int64_t end, C* states, bool emit) const {
    int64_t count = (end - begin) / L * L, low = lowest(chain, begin, count);
    Line<C> at = line(begin, count / L);
    at.x = this->in(0, low), at.b = this->in(1, low);
    if (p.starts) at.starts = starts(chain, low);
    if (emit && p.out) at.out = this->out(low), at.index = this->index(low);
    walk(this->machine, this->fold, at, states);
    return begin + count;
  }

  void buffered(Buffer& buffer, int64_t chain, int64_t begin, int64_t count, C* states, bool emit) const {
    int64_t low = lowest(chain, begin, count), whole = up(count, L) * L, pad = whole - count;
    int64_t shift = p.reverse ? pad : 0, rest = p.reverse ? 0 : count;
    Line<C> at = line(begin, whole / L);
    at.x = buffer.x, at.b = buffer.b, at.index = buffer.index;
    for (int input = 0; input < M::inputs; ++input) {
      C* to = input ? buffer.b : buffer.x;
      this->read(this->in(input, low), 0, to + shift, 0, 1, count);
      std::fill_n(to + rest, pad, this->machine.neutral(input));
    }
    if (p.starts) {
      std::memcpy(buffer.starts + shift, starts(chain, low), count);
      std::memset(buffer.starts + rest, 0, pad);
      at.starts = buffer.starts;
    }
    if (emit && p.out) at.out = buffer.x;
    walk_buffer(this->machine, this->fold, at, states);
    if (!at.out) return;
    this->write(buffer.x + shift, 0, this->out(low), 0, 1, count);
    if (M::outputs == 2) copy<C, C, int64_t>(buffer.index + shift, 0, this->index(low), 0, 1, count);
  }

  // The walk that needs no buffer, if there is one.
  Along straight_for(int elements) const {
    constexpr int own = std::is_same_v<C, double> ? kDouble : std::is_same_v<C, float> ? kFloat : kInt64;
    if (elements == pair(own, own)) return choose<C, C, int64_t>();
    if constexpr (std::is_same_v<C, double>)
      if (elements == pair(kFloat, kFloat)) return choose<float, float, int64_t>();
    if constexpr (std::is_same_v<C, int64_t> && M::outputs == 2)
      if (elements == pair(kInt32, kInt32)) return choose<int32_t, int32_t, int64_t>();
    return nullptr;
  }
  template <class E, class O, class I>
  Along choose() const {
    if constexpr (M::shifted)
      if (p.flag) return p.reverse ? choose<E, O, I, true, true>() : choose<E, O, I, true, false>();
    return p.reverse ? choose<E, O, I, false, true>() : choose<E, O, I, false, false>();
  }
  template <class E, class O, class I, bool shift, bool reverse>
  Along choose() const {
    if constexpr (M::cut)
      if (p.starts) return along<M, E, O, I, shift, true, reverse>;
    return along<M, E, O, I, shift, false, reverse>;
  }
};

}  // namespace
