// How chains become lanes. Chain k of x (outer, length, inner) is x[k / inner, :, k % inner]; a tile is up to
// M::width of them, walked row by row in scan order: where they lie, or in a buffer of numbers to compute with.

namespace {

constexpr int kRows = 32;  // of a buffer, which so fits into the nearest cache

// Elements of a tensor, a lane each, and the distance to the next row.
struct Lanes {
  int64_t base[16 * kBytes], step;
  int count, width;  // lanes from count on repeat the first
  bool adjacent;
};

template <class C, class E>
void gather(const Lanes& at, const void* source, int64_t row, int64_t rows, C* to) {
  constexpr int L = lanes<C>;
  const E* from = static_cast<const E*>(source) + row * at.step;
  auto one = [&](int64_t i, int l) { to[i * at.width + l] = load<C, 1>(from + at.base[l] + i * at.step)[0]; };
  int64_t done = 0;
  if (at.adjacent) {
    for (int64_t i = 0; i < rows; ++i) {
      int l = 0;
      for (; l + L <= at.count; l += L)
        store<C, L>(to + i * at.width + l, load<C, L>(from + at.base[0] + l + i * at.step));
      for (; l < at.width; ++l) one(i, l);
    }
    return;
  }
  if (at.step == 1 || at.step == -1) {
    for (; done + L <= rows; done += L)
      for (int l = 0; l < at.width; l += L) {
        Vec<C, L> square[L];
        int64_t first = at.step == 1 ? done : -(done + L - 1);
        each<L>([&](auto k) __attribute__((always_inline)) {
          square[k] = load<C, L>(from + at.base[l + k] + first);
        });
        transpose<C>(square);
        each<L>([&](auto k) __attribute__((always_inline)) {
          store<C, L>(to + (done + (at.step == 1 ? k : L - 1 - k)) * at.width + l, square[k]);
        });
      }
  }
  for (int64_t i = done; i < rows; ++i)
    for (int l = 0; l < at.width; ++l) one(i, l);
}

template <class C, class E>
void scatter(const Lanes& at, const C* from, int64_t row, int64_t rows, void* target) {
  constexpr int L = lanes<C>;
  E* to = static_cast<E*>(target) + row * at.step;
  auto one = [&](int64_t i, int l) {
    store<C, 1>(to + at.base[l] + i * at.step, Vec<C, 1>{from[i * at.width + l]});
  };
  int64_t done = 0;
  int whole = at.count / L * L;
  if (at.adjacent) {
    for (int64_t i = 0; i < rows; ++i) {
      for (int l = 0; l < whole; l += L)
        store<C, L>(to + at.base[0] + l + i * at.step, load<C, L>(from + i * at.width + l));
      for (int l = whole; l < at.count; ++l) one(i, l);
    }
    return;
  }
  if (at.step == 1 || at.step == -1) {
    for (; done + L <= rows; done += L) {
      for (int l = 0; l < whole; l += L) {
        Vec<C, L> square[L];
        int64_t first = at.step == 1 ? done : -(done + L - 1);
        each<L>([&](auto k) __attribute__((always_inline)) {
          square[k] = load<C, L>(from + (done + (at.step == 1 ? k : L - 1 - k)) * at.width + l);
        });
        transpose<C>(square);
        each<L>([&](auto k) __attribute__((always_inline)) {
          store<C, L>(to + at.base[l + k] + first, square[k]);
        });
      }
      for (int64_t i = done; i < done + L; ++i)
        for (int l = whole; l < at.count; ++l) one(i, l);
    }
  }
  for (int64_t i = done; i < rows; ++i)
    for (int l = 0; l < at.count; ++l) one(i, l);
}

// What a walk goes over, in scan order; steps in elements.
template <class C>
struct Span {
  const void *x, *b;
  void* out;  // may be null: states alone are wanted
  void* index;
  const uint8_t* starts;  // may be null
  int64_t rows, step, starts_step;
  bool starts_wide;  // one for each lane
  C row, row_step;
};

// V vectors of lanes from one state to the next. E, O, I: elements of inputs, of the output, of indices.
template <class M, class E, class O, class I, int V>
void walk(const M& machine, const Span<typename M::Compute>& span, typename M::Compute* states) {
  using C = typename M::Compute;
  constexpr int L = lanes<C>, P = M::planes;
  const E *x = static_cast<const E*>(span.x), *b = static_cast<const E*>(span.b);
  O* out = static_cast<O*>(span.out);
  I* index = static_cast<I*>(span.index);
  Vec<C, L> state[V][P];
  each<V * P>([&](auto k) __attribute__((always_inline)) {
    state[k / P][k % P] = load<C, L>(states + (k % P * V + k / P) * L);
  });
  C row = span.row;
  for (int64_t i = 0; i < span.rows; ++i, row += span.row_step) {
    const uint8_t* starts = span.starts ? span.starts + i * span.starts_step : nullptr;
    each<V>([&](auto v) __attribute__((always_inline)) {
      Vec<C, L>* s = state[v];
      if (starts) {
        auto begins = span.starts_wide ? load<Bits<C>, L>(starts + v * L) : Vec<Bits<C>, L>{} + Bits<C>(*starts);
        for (int plane = 0; plane < P; ++plane) s[plane] = begins != 0 ? splat(machine.identity(plane)) : s[plane];
      }
      auto in = load<C, L>(x + i * span.step + v * L), where = in, second = in;
      if constexpr (M::inputs == 2) second = load<C, L>(b + i * span.step + v * L);
      auto result = machine.step(s, in, second, row, &where);
      if (out) store<C, L>(out + i * span.step + v * L, result);
      if constexpr (M::outputs == 2)
        if (out) store<C, L>(index + i * span.step + v * L, where);
    });
  }
  each<V * P>([&](auto k) __attribute__((always_inline)) {
    store<C, L>(states + (k % P * V + k / P) * L, state[k / P][k % P]);
  });
}

}  // namespace
