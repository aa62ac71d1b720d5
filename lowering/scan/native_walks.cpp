// The two ways to go through rows in scan order: down the columns of a matrix, or along one line.

namespace {

// Steps in elements. Where `out` is null the states alone are wanted.
template <class C>
struct Columns {
  const void *x, *b;
  void* out;
  void* index;
  const uint8_t* starts;  // or null
  int64_t rows, step, starts_step;
  bool starts_wide;  // one for every column, or one for all
  C row, row_step;
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
      if (starts) {
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

// Neighbours, filled up with neutral ones to whole vectors, where the scan ends; out may be x.
template <class C>
struct Line {
  const void *x, *b;
  void *out, *index;
  const uint8_t* starts;
  int64_t vectors;
  C row, row_step;
};

template <class F, int width, bool segmented, class V, class Mask>
INLINE void spread(const F& fold, V* s, Mask& begun) {
  if constexpr (width < int(sizeof(V) / sizeof(s[0][0]))) {
    V before[F::planes], joined[F::planes];
    each<F::planes>([&](auto p) INLINE_LAMBDA {
      before[p] = later<width>(s[p], splat(fold.identity(p)));
      joined[p] = s[p];
    });
    fold.join(before, joined);
    each<F::planes>([&](auto p) INLINE_LAMBDA { s[p] = segmented ? (begun ? s[p] : joined[p]) : joined[p]; });
    if (segmented) begun |= later<width>(begun, Mask{});
    spread<F, width * 2, segmented>(fold, s, begun);
  }
}

// log2(L) joins make each vector a scan of its own; joined with what came before it, the carry, it is done.
template <class M, class E, class O, class I, bool shift, bool segmented, bool reverse>
void along(const M& machine, const typename M::Fold& fold, const Line<typename M::Compute>& at,
           typename M::Compute* states) {
  using C = typename M::Compute;
  using V = Vec<C, lanes<C>>;
  using Mask = Vec<Bits<C>, lanes<C>>;
  constexpr int L = lanes<C>, Q = M::Fold::planes;
  const E *x_at = static_cast<const E*>(at.x), *b_at = static_cast<const E*>(at.b);
  O* out = static_cast<O*>(at.out);
  I* index = static_cast<I*>(at.index);
  V carry[Q], s[Q], ramp;
  Mask begun{};
  each<Q>([&](auto q) INLINE_LAMBDA { carry[q] = splat(states[q]); });
  each<L>([&](auto l) INLINE_LAMBDA { ramp[int(l)] = C(l); });
  auto join_carry = [&] () INLINE_LAMBDA {
    V joined[Q];
    each<Q>([&](auto q) INLINE_LAMBDA { joined[q] = s[q]; });
    fold.join(carry, joined);
    each<Q>([&](auto q) INLINE_LAMBDA { s[q] = segmented ? (begun ? s[q] : joined[q]) : joined[q]; });
  };
  for (int64_t k = 0; k < at.vectors; ++k) {
    int64_t place = (reverse ? at.vectors - 1 - k : k) * L;
    auto turned = [](auto value) INLINE_LAMBDA { return reverse ? backwards(value) : value; };
    V x = turned(load<C, L>(x_at + place)), b = x, local[Q];
    if constexpr (M::inputs == 2) b = turned(load<C, L>(b_at + place));
    Mask starts{};
    if (segmented) begun = starts = turned(load<Bits<C>, L>(at.starts + place)) != 0;
    fold.lift(s, x, b, at.row + (ramp + C(k * L)) * at.row_step);
    spread<typename M::Fold, 1, segmented>(fold, s, begun);
    Mask all_begun = begun;
    each<Q>([&](auto q) INLINE_LAMBDA { local[q] = s[q]; });
    if (shift) {
      each<Q>([&](auto q) INLINE_LAMBDA { s[q] = later<1>(s[q], splat(fold.identity(q))); });
      begun = later<1>(begun, Mask{});
    }
    join_carry();
    if (shift && segmented)
      each<Q>([&](auto q) INLINE_LAMBDA { s[q] = starts ? splat(fold.identity(q)) : s[q]; });
    if (out) store<C, L>(out + place, turned(machine.value(s, b)));
    if constexpr (M::outputs == 2)
      if (out) store<C, L>(index + place, turned(s[1]));
    each<Q>([&](auto q) INLINE_LAMBDA { s[q] = last_of(local[q]); });
    begun = last_of(all_begun);
    join_carry();
    each<Q>([&](auto q) INLINE_LAMBDA { carry[q] = s[q]; });
  }
  each<Q>([&](auto q) INLINE_LAMBDA { states[q] = carry[q][0]; });
}

// Rows of n neighbours as numbers to compute with, and back.
template <class C, class E>
void read(const void* source, int64_t step, int64_t rows, int64_t n, C* to, int64_t width) {
  constexpr int L = lanes<C>;
  const E* from = static_cast<const E*>(source);
  for (int64_t i = 0; i < rows; ++i, from += step, to += width) {
    int64_t j = 0;
    for (; j + L <= n; j += L) store<C, L>(to + j, load<C, L>(from + j));
    for (; j < n; ++j) to[j] = load<C, 1>(from + j)[0];
  }
}
template <class C, class E>
void write(const C* from, int64_t width, int64_t rows, int64_t n, void* target, int64_t step) {
  constexpr int L = lanes<C>;
  E* to = static_cast<E*>(target);
  for (int64_t i = 0; i < rows; ++i, from += width, to += step) {
    int64_t j = 0;
    for (; j + L <= n; j += L) store<C, L>(to + j, load<C, L>(from + j));
    for (; j < n; ++j) store<C, 1>(to + j, Vec<C, 1>{from[j]});
  }
}

}  // namespace
