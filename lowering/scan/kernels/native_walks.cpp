// The two ways to go through rows in scan order: down the columns of a matrix, or along one line.

namespace {

// Where `out` is null the states alone are wanted.
template <class C>
struct Rows {
  const void *x, *b;
  void *out, *index;
  const uint8_t* starts;  // or null
  C row, row_step;
};

// Steps in elements.
template <class C>
struct Columns : Rows<C> {
  int64_t rows, step, starts_step;
  bool starts_wide;  // one for every column, or one for all
};

// V vectors of columns from one state to the next. E, O, I: elements of the inputs, the output, the indices.
template <class M, class E, class O, class I, int V>
void down(const M& machine, const Columns<typename M::Compute>& at, typename M::Compute* states) {
  using C = typename M::Compute;
  using Mask = Vec<Bits<C>, lanes<C>>;
  constexpr int L = lanes<C>, P = M::planes;
  const E *x = static_cast<const E*>(at.x), *b = static_cast<const E*>(at.b);
  O* out = static_cast<O*>(at.out);
  I* index = static_cast<I*>(at.index);
  Vec<C, L> state[V][P];
  each<V * P>([&](auto k) INLINE_LAMBDA {
    state[k / P][k % P] = load<C, L>(states + (k % P * V + k / P) * L);
  });
  C row = at.row;
  for (int64_t i = 0; i < at.rows; ++i, row += at.row_step) {
    const uint8_t* starts = at.starts ? at.starts + i * at.starts_step : nullptr;
    each<V>([&](auto v) INLINE_LAMBDA {
      int64_t place = i * at.step + v * L;
      Vec<C, L>* s = state[v];
      if (M::cut && starts) {
        Mask begins = (at.starts_wide ? load<Bits<C>, L>(starts + v * L) : Mask{} + Bits<C>(*starts)) != 0;
        each<P>([&](auto p) INLINE_LAMBDA { s[p] = begins ? splat(machine.identity(p)) : s[p]; });
      }
      auto first = load<C, L>(x + place), second = first;
      if constexpr (M::inputs == 2) second = load<C, L>(b + place);
      auto result = machine.step(s, first, second, splat(row));
      if (!out) return;
      store<C, L>(out + place, result);
      if constexpr (M::outputs == 2) store<C, L>(index + place, s[1]);
    });
  }
  each<V * P>([&](auto k) INLINE_LAMBDA {
    store<C, L>(states + (k % P * V + k / P) * L, state[k / P][k % P]);
  });
}

// Whole vectors of neighbours, the first place lowest in memory whatever the order; out may be x.
template <class C>
struct Line : Rows<C> {
  int64_t vectors;
};

// One vector of a line after the other: log2(L) joins make it a scan of its own, one more joins what came before it.
template <class M, bool shift, bool segmented>
struct Carrying {
  using C = typename M::Compute;
  using V = Vec<C, lanes<C>>;
  using Mask = Vec<Bits<C>, lanes<C>>;
  static constexpr int L = lanes<C>, Q = M::Fold::planes;

  const M& machine;
  const typename M::Fold& fold;
  V carry[Q];

  template <int width>
  INLINE void spread(V* s, Mask& begun) const {
    if constexpr (width < L) {
      V before[Q];
      each<Q>([&](auto q) INLINE_LAMBDA { before[q] = later<width>(s[q], splat(fold.identity(q))); });
      join(before, s, begun);
      if (segmented) begun |= later<width>(begun, Mask{});
      spread<width * 2>(s, begun);
    }
  }
  INLINE void join(const V* left, V* s, Mask begun) const {
    V joined[Q];
    each<Q>([&](auto q) INLINE_LAMBDA { joined[q] = s[q]; });
    fold.join(left, joined);
    each<Q>([&](auto q) INLINE_LAMBDA { s[q] = segmented ? (begun ? s[q] : joined[q]) : joined[q]; });
  }
  // The states that come out; the carry becomes that of the next vector.
  INLINE void step(V x, V b, V row, Mask starts, V* out) {
    // Most often no element is a new extreme.
    if constexpr (M::outputs == 2 && !segmented)
      if (!any(machine.wins(x, carry[0]))) return each<Q>([&](auto q) INLINE_LAMBDA { out[q] = carry[q]; });
    Mask begun = starts, all_begun;
    V s[Q];
    fold.lift(s, x, b, row);
    spread<1>(s, begun);
    all_begun = begun;
    if (shift && segmented) begun = later<1>(begun, Mask{});
    each<Q>([&](auto q) INLINE_LAMBDA {
      out[q] = shift ? later<1>(s[q], splat(fold.identity(q))) : s[q];
      s[q] = last_of(s[q]);
    });
    join(carry, out, begun);
    join(carry, s, last_of(all_begun));
    each<Q>([&](auto q) INLINE_LAMBDA {
      if (shift && segmented) out[q] = starts ? splat(fold.identity(q)) : out[q];
      carry[q] = s[q];
    });
  }
};

// E, O, I as for `down`; states: one, of `Fold::planes` numbers.
template <class M, class E, class O, class I, bool shift, bool segmented, bool reverse>
void along(const M& machine, const typename M::Fold& fold, const Line<typename M::Compute>& at,
           typename M::Compute* states) {
  using C = typename M::Compute;
  using Scanned = Carrying<M, shift, segmented>;
  constexpr int L = lanes<C>, Q = Scanned::Q;
  Scanned scanned{machine, fold, {}};
  typename Scanned::V ramp, out[Q];
  each<Q>([&](auto q) INLINE_LAMBDA { scanned.carry[q] = splat(states[q]); });
  each<L>([&](auto l) INLINE_LAMBDA { ramp[int(l)] = C(l); });
  auto turned = [](auto value) INLINE_LAMBDA { return reverse ? backwards(value) : value; };
  for (int64_t k = 0; k < at.vectors; ++k) {
    int64_t place = (reverse ? at.vectors - 1 - k : k) * L;
    auto x = turned(load<C, L>(static_cast<const E*>(at.x) + place)), b = x;
    if constexpr (M::inputs == 2) b = turned(load<C, L>(static_cast<const E*>(at.b) + place));
    typename Scanned::Mask starts{};
    if (segmented) starts = turned(load<Bits<C>, L>(at.starts + place)) != 0;
    scanned.step(x, b, at.row + (ramp + C(k * L)) * at.row_step, starts, out);
    if (!at.out) continue;
    store<C, L>(static_cast<O*>(at.out) + place, turned(machine.value(out, b)));
    if constexpr (M::outputs == 2) store<C, L>(static_cast<I*>(at.index) + place, turned(out[1]));
  }
  each<Q>([&](auto q) INLINE_LAMBDA { states[q] = scanned.carry[q][0]; });
}

// Rows of n neighbours, by way of numbers to compute with.
template <class C, class From, class To>
void copy(const void* source, int64_t from_step, void* target, int64_t to_step, int64_t rows, int64_t n) {
  constexpr int L = lanes<C>;
  const From* from = static_cast<const From*>(source);
  To* to = static_cast<To*>(target);
  int64_t whole = n / L * L;
  for (int64_t i = 0; whole && i < rows; ++i)
    for (int64_t j = 0; j < whole; j += L) store<C, L>(to + i * to_step + j, load<C, L>(from + i * from_step + j));
  for (int64_t j = whole; j < n; ++j)
    for (int64_t i = 0; i < rows; ++i) store<C, 1>(to + i * to_step + j, load<C, 1>(from + i * from_step + j));
}

}  // namespace
