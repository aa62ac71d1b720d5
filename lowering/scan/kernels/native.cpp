// Scans of contiguous (outer, length, inner) tensors in one pass over memory, for GCC and Clang.
// native.py defines before this file: MACHINE, such as Scan<float, Add>; IN and OUT, the types of operands and result.
// A chain is the rows of one (outer, inner) pair. Adjacent chains are scanned together; where inner is 1, a chain is
// scanned vector by vector. N is a number of lanes, V a vector type.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif

#define INLINE_LAMBDA __attribute__((always_inline))
#define INLINE inline INLINE_LAMBDA

namespace {

// ---- Vectors of GCC and Clang: loads and stores of all element types, exp and log1p.

struct Half { uint16_t bits; };
struct BFloat { uint16_t bits; };

template <class T, int N> struct VectorOf { typedef T type __attribute__((vector_size(sizeof(T) * N))); };
template <class T, int N> using Vec = typename VectorOf<T, N>::type;
template <class V> constexpr int size_of = sizeof(V) / sizeof(std::declval<V>()[0]);
template <class C> using Bits = std::conditional_t<sizeof(C) == 8, int64_t, int32_t>;  // elements of comparisons of C

// Call f(0), ..., f(N - 1) with constants, so that arrays of vectors become registers.
template <class F, int... i>
INLINE void each(F f, std::integer_sequence<int, i...>) { (f(std::integral_constant<int, i>{}), ...); }
template <int N, class F> INLINE void each(F f) { each(f, std::make_integer_sequence<int, N>{}); }
template <int N> INLINE Vec<float, N> widen(Vec<int32_t, N> bits, BFloat) { return (Vec<float, N>)(bits << 16); }
// The product scales halves to the exponents of floats, subnormal ones too.
template <int N>
INLINE Vec<float, N> widen(Vec<int32_t, N> bits, Half) {
  auto size = (bits & 0x7fff) << 13, scaled = (Vec<int32_t, N>)((Vec<float, N>)size * 0x1p112f);
  return (Vec<float, N>)((size >= 0xf800000 ? size | 0x7f800000 : scaled) | (bits & 0x8000) << 16);
}

template <int N> INLINE Vec<int32_t, N> narrow(Vec<int32_t, N> bits, BFloat) {
  auto value = (Vec<float, N>)bits;
  return value != value ? (bits >> 16) | 0x40 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
// Below 2^-14 the sum with 1/2 rounds to a multiple of the smallest half; from 2^16 on all is infinite or NaN.
template <int N>
INLINE Vec<int32_t, N> narrow(Vec<int32_t, N> bits, Half) {
  auto size = bits & 0x7fffffff, tiny = (Vec<int32_t, N>)((Vec<float, N>)size + 0.5f) - 0x3f000000;
  auto normal = (size + 0xfff - 0x38000000 + ((size >> 13) & 1)) >> 13;
  auto huge = size > 0x7f800000 ? size * 0 + 0x7e00 : size * 0 + 0x7c00;
  return (size < 0x38800000 ? tiny : size >= 0x47800000 ? huge : normal) | (bits >> 16 & 0x8000);
}

template <class E> constexpr bool is_packed = std::is_same_v<E, Half> || std::is_same_v<E, BFloat>;
template <class V, class E>
using Raw = Vec<std::conditional_t<is_packed<E>, uint16_t, E>, size_of<V>>;

template <class V, class E, int N = size_of<V>>
INLINE V load(const E* from) {
  Raw<V, E> raw;
  std::memcpy(&raw, from, sizeof(raw));
  if constexpr (is_packed<E>)
    return __builtin_convertvector(widen<N>(__builtin_convertvector(raw, Vec<int32_t, N>), E{}), V);
  else
    return __builtin_convertvector(raw, V);
}

template <class V, class E, int N = size_of<V>>
INLINE void store(E* to, V value) {
  Raw<V, E> raw;
  if constexpr (is_packed<E>)
    raw = __builtin_convertvector(
        narrow<N>((Vec<int32_t, N>)__builtin_convertvector(value, Vec<float, N>), E{}), Raw<V, E>);
  else
    raw = __builtin_convertvector(value, Raw<V, E>);
  std::memcpy(to, &raw, sizeof(raw));
}

// Lane i of the result is lane `lane(i)` of a and, after those, of b.
template <class V, class F, int... i>
INLINE V shuffle(V a, V b, F lane, std::integer_sequence<int, i...>) {
  return V{(lane(i) < size_of<V> ? a[lane(i) % size_of<V>] : b[lane(i) % size_of<V>])...};
}
template <class V, class F>
INLINE V shuffle(V a, V b, F lane) { return shuffle(a, b, lane, std::make_integer_sequence<int, size_of<V>>{}); }

// The lanes of a, shifted up by `width`; the first lanes are the last ones of `previous`.
template <int width, class V>
INLINE V shift_lanes(V a, V previous) {
  return shuffle(a, previous, [](int i) { return i < width ? 2 * size_of<V> - width + i : i - width; });
}
// The last lane in all lanes; the lanes in reverse order.
template <class V> INLINE V last_of(V a) { return shuffle(a, a, [](int) { return size_of<V> - 1; }); }
template <class V> INLINE V reversed(V a) { return shuffle(a, a, [](int i) { return size_of<V> - 1 - i; }); }

template <class V> INLINE V polynomial(V x, std::initializer_list<double> factors) {
  V sum{};
  for (double factor : factors) sum = sum * x + factor;
  return sum;
}

// exp(x) for x <= 0 to one unit in the last place; 0 below -708, NaN for NaN.
template <class V, class Longs = Vec<int64_t, size_of<V>>>
INLINE V exp_of_negative(V x) {
  V clamped = x < -708.0 ? V{} - 708.0 : x, shifted = clamped * 0x1.71547652b82fep0 + 0x1.8p52;
  V exponent = shifted - 0x1.8p52, r = (clamped - exponent * 0x1.62e42fee00000p-1) - exponent * 0x1.a39ef35793c76p-33;
  V sum = polynomial(r, {2.511003761756205e-08, 2.763263965412376e-07, 2.7557240918547625e-06, 2.480148548228773e-05,
                         1.9841269890047143e-04, 1.3888888952314812e-03, 8.333333333319601e-03, 4.166666666648809e-02,
                         1.666666666666668e-01, 5.000000000000019e-01, 1.0, 1.0});
  return x < -708.0 ? V{} : sum * (V)(((Longs)shifted + 1023) << 52);
}

// log(1 + x) for x >= 0 to one unit in the last place; NaN for NaN. The rounding error of 1 + x is corrected.
template <class V, class Longs = Vec<int64_t, size_of<V>>>
INLINE V log1p_of_positive(V x) {
  V sum1 = 1.0 + x, error = x - (sum1 - 1.0);
  Longs power = ((Longs)sum1 - 0x3fe6a09e667f3bcd) >> 52;
  V exponent = (V)(power + 0x4338000000000000) - 0x1.8p52, f = (V)((Longs)sum1 - (power << 52)) - 1.0;
  V s = f / (2.0 + f), z = s * s, half = 0.5 * f * f;
  V sum = polynomial(z, {1.479819860511658591e-01, 1.531383769920937332e-01, 1.818357216161805012e-01,
                         2.222219843214978396e-01, 2.857142874366239149e-01, 3.999999999940941908e-01,
                         6.666666666666735130e-01});
  V low = exponent * 0x1.a39ef35793c76p-33 + error * (V)((1023 - power) << 52) * (1.0 - f + f * f);
  return exponent * 0x1.62e42fee00000p-1 - ((half - (s * (half + sum * z) + low)) - f);
}

// ---- Machines, the operations. A state has `planes` vectors, of which scans row after row use `carried`. `lift` makes
// the state of one element, x and b of a row; `join` combines s with `left`, the state before it. The result is `value`
// of the state after an element or, if the scan is exclusive or lagged, `before` of the state before it.

struct Add { template <class V> static INLINE V combine(V a, V b) { return a + b; } };
struct Multiply { template <class V> static INLINE V combine(V a, V b) { return a * b; } };
// NaN wins and stays; of equal elements the later one.
template <bool larger>
struct Select {
  template <class V> static INLINE auto wins(V b, V a) { return (larger ? b >= a : b <= a) | (b != b); }
  template <class V> static INLINE V combine(V a, V b) { return wins(b, a) ? b : a; }
};

template <class Compute>
struct Machine {
  using C = Compute;
  static constexpr int inputs = 1, planes = 1, carried = 1, outputs = 1, vectors = 8;
  static C identity(int plane, C empty) { return plane ? C(0) : empty; }
  template <class V> static INLINE void lift(V* s, V x, V, V) { s[0] = x; }
  template <class V> static INLINE V value(const V* s) { return s[0]; }
  template <class V> static INLINE V before(const V* s, V) { return s[0]; }
  template <class V> static INLINE bool is_same(const V*, V) { return false; }  // no lane of x changes the state s
};

template <class C, class Op>
struct Scan : Machine<C> {
  template <class V> static INLINE void join(const V* left, V* s) { s[0] = Op::combine(left[0], s[0]); }
};

// The extreme and its row; a double holds every row below 2^53.
template <class C, class Op>
struct Extremes : Machine<C>, Op {
  static constexpr int planes = 2, carried = 2, outputs = 2, vectors = 4;
  template <class V> static INLINE void lift(V* s, V x, V, V row) { s[0] = x, s[1] = row; }
  template <class V> static INLINE bool is_same(const V* s, V x) {
    auto later = Op::wins(x, s[0]);
    each<4>([&](auto i) INLINE_LAMBDA {  // rotations by half of the lanes, a quarter, and so on
      if constexpr ((size_of<V> >> (i + 1)) > 0) later |= shift_lanes<(size_of<V> >> (i + 1))>(later, later);
    });
    return later[0] == 0;
  }
  template <class V> static INLINE void join(const V* left, V* s) {
    auto later = Op::wins(s[0], left[0]);
    s[0] = later ? s[0] : left[0], s[1] = later ? s[1] : left[1];
  }
};

// The largest element m, and the sum of exp(x - m) over all others.
struct LogSumExp : Machine<double> {
  static constexpr int planes = 2, carried = 2, vectors = 4;
  template <class V> static INLINE void lift(V* s, V x, V, V) { s[0] = x, s[1] = V{}; }
  template <class V> static INLINE V value(const V* s) { return s[0] + log1p_of_positive(s[1]); }
  template <class V> static INLINE V before(const V* s, V) { return value(s); }
  // Equal ones may be infinite, and their difference is then not 0.
  template <class V> static INLINE void join(const V* left, V* s) {
    V gap = s[0] - left[0];
    auto larger = s[0] > left[0];
    V e = s[0] == left[0] ? V{} + 1.0 : exp_of_negative(larger ? -gap : gap);
    s[1] = larger ? (left[1] + 1.0) * e + s[1] : left[1] + (s[1] + 1.0) * e;
    s[0] = larger ? s[0] : left[0];
  }
};

// The map carry -> s[1] * carry + s[0] of all elements; of one it is a * carry + b or, if lagged, a * (carry + b).
template <class C, bool lagged, bool total>
struct Linear : Machine<C> {
  static constexpr int inputs = 2, planes = 2, carried = 1 + total, outputs = !total;
  static C identity(int plane, C) { return C(plane); }
  // The step from state 0 as it is computed elsewhere: a * 0 is NaN for an infinite a.
  template <class V> static INLINE void lift(V* s, V a, V b, V) { s[0] = lagged ? a * b : a * V{} + b, s[1] = a; }
  template <class V> static INLINE V before(const V* s, V b) { return s[0] + b; }
  // A product that overflows does not meet a state of 0.
  template <class V> static INLINE void join(const V* left, V* s) {
    s[0] = left[0] == 0 ? s[0] : s[1] * left[0] + s[0];
    s[1] = s[1] * left[1];
  }
};

using M = MACHINE; using C = M::C;
constexpr int L = kBytes / int(sizeof(C)), P = M::planes, W = M::vectors * L;  // W: chains of a tile, a power of 2
constexpr int64_t kTiles = 16, kBlock = 16384;  // tiles that a thread scans in turn, and elements of all in each round

// The arguments, as native.py packs them. starts_*: strides of starts. before: the scan is exclusive or lagged.
// states (planes, outer, inner): on entry before all rows, on return after them. empty: the neutral element.
struct Problem {
  const IN *x, *b;
  const uint8_t* starts;
  OUT* out;
  int64_t* indices;
  C* states;
  int64_t outer, length, inner, starts_outer, starts_row, starts_inner, before, reverse, threads;
  std::conditional_t<std::is_same_v<C, int64_t>, int64_t, double> empty;
};

// Adjacent chains from `column` on, with rows i in scan order.
struct Walk {
  const Problem p;
  int64_t outer, column;

  int64_t row(int64_t i) const { return p.reverse ? p.length - 1 - i : i; }
  int64_t place(int64_t i) const { return (outer * p.length + row(i)) * p.inner + column; }
  const uint8_t* start(int64_t i) const {
    return p.starts + outer * p.starts_outer + row(i) * p.starts_row + column * p.starts_inner;
  }
  C* state(int plane) const { return p.states + (plane * p.outer + outer) * p.inner + column; }
  template <class V> INLINE void emit(int64_t offset, V value, V index) const {
    if constexpr (M::outputs > 0) store(p.out + offset, value);
    if constexpr (M::outputs > 1) store(p.indices + offset, index);
  }

  // Scan N * vectors adjacent chains, row after row.
  template <int N, int vectors>
  void walk_columns(int64_t begin, int64_t end) const {
    using V = Vec<C, N>;
    using Mask = Vec<Bits<C>, N>;
    const Walk w = *this;  // no write through `out` changes the copy, so that it is in registers
    V states[vectors][P];
    each<M::carried>([&](auto q) INLINE_LAMBDA {
      each<vectors>([&](auto v) INLINE_LAMBDA { states[v][q] = load<V>(state(q) + v * N); });
    });
    int64_t offset = place(begin), step = p.reverse ? -p.inner : p.inner;
    for (int64_t i = begin; i < end; ++i, offset += step)
      each<vectors>([&](auto v) INLINE_LAMBDA {
        V next[P], *s = states[v], x = load<V>(w.p.x + offset + v * N), b = x;
        if (w.p.starts) {
          const uint8_t* starts = w.start(i);
          Mask begun = (w.p.starts_inner ? load<Mask>(starts + v * N) : Mask{} + Bits<C>(*starts)) != 0;
          each<M::carried>([&](auto q) INLINE_LAMBDA { s[q] = begun ? V{} + M::identity(q, w.p.empty) : s[q]; });
        }
        if constexpr (M::inputs == 2) b = load<V>(w.p.b + offset + v * N);
        M::lift(next, x, b, V{} + C(w.row(i)));
        M::join(s, next);
        w.emit(offset + v * N, w.p.before ? M::before(s, b) : M::value(next), next[P - 1]);
        each<M::carried>([&](auto q) INLINE_LAMBDA { s[q] = next[q]; });
      });
    each<M::carried>([&](auto q) INLINE_LAMBDA {
      each<vectors>([&](auto v) INLINE_LAMBDA { store(state(q) + v * N, states[v][q]); });
    });
  }

  // Scan vectors of one chain with inner 1: log2(L) joins scan a vector, one more joins the carry from the rows before.
  template <bool segmented>
  void walk_line(int64_t begin, int64_t end) const {
    using V = Vec<C, L>;
    using Mask = Vec<Bits<C>, L>;
    const int64_t step = p.reverse ? -L : L;
    auto in_scan_order = [=](auto v) INLINE_LAMBDA { return step < 0 ? reversed(v) : v; };
    auto join = [](const V* left, V* s, Mask begun) INLINE_LAMBDA {
      V right[P];
      each<P>([&](auto q) INLINE_LAMBDA { right[q] = s[q]; });
      M::join(left, s);
      if constexpr (segmented) each<P>([&](auto q) INLINE_LAMBDA { s[q] = begun ? right[q] : s[q]; });
    };
    V carry[P], empty[P], s[P], left[P], rows;
    each<P>([&](auto q) INLINE_LAMBDA { carry[q] = V{} + *state(q), empty[q] = V{} + M::identity(q, p.empty); });
    each<L>([&](auto l) INLINE_LAMBDA { rows[int(l)] = C(row(begin + l)); });
    int64_t offset = place(begin + (step < 0) * (L - 1));
    for (int64_t i = begin; i < end; i += L, offset += step, rows += C(step)) {
      V x = in_scan_order(load<V>(p.x + offset)), b = x;
      if constexpr (M::inputs == 2) b = in_scan_order(load<V>(p.b + offset));
      if (!segmented && M::is_same(carry, x)) { emit(offset, carry[0], carry[P - 1]); continue; }
      Mask begins{}, begun{};
      if constexpr (segmented) begun = begins = in_scan_order(load<Mask>(start(i + (step < 0) * (L - 1)))) != 0;
      M::lift(s, x, b, rows);
      each<5>([&](auto power) INLINE_LAMBDA {
        constexpr int width = 1 << power;
        if constexpr (width < L) {
          each<P>([&](auto q) INLINE_LAMBDA { left[q] = shift_lanes<width>(s[q], empty[q]); });
          join(left, s, begun);
          if constexpr (segmented) begun |= shift_lanes<width>(begun, Mask{});
        }
      });
      join(carry, s, begun);
      if (p.before)
        each<P>([&](auto q) INLINE_LAMBDA {
          left[q] = shift_lanes<1>(s[q], carry[q]);
          if constexpr (segmented) left[q] = begins ? empty[q] : left[q];
        });
      emit(offset, in_scan_order(p.before ? M::before(left, b) : M::value(s)), in_scan_order(s[P - 1]));
      each<P>([&](auto q) INLINE_LAMBDA { carry[q] = last_of(s[q]); });
    }
    each<P>([&](auto q) INLINE_LAMBDA { *state(q) = carry[q][0]; });
  }

  // Scan `count` chains, fewer than 2 * width: the first `width` together if count >= width, then the others.
  template <int width = W>
  void walk(int64_t count, int64_t begin, int64_t end) const {
    Walk remaining = *this;
    if (p.inner == 1 && width > 1) {
      int64_t vectors_end = begin + (end - begin) / L * L;
      p.starts ? walk_line<true>(begin, vectors_end) : walk_line<false>(begin, vectors_end);
      return walk<1>(1, vectors_end, end);
    }
    if (count >= width) {
      walk_columns<std::min(width, L), width / std::min(width, L)>(begin, end);
      remaining.column += width, count -= width;
    }
    if constexpr (width > 1)
      if (count) remaining.template walk<width / 2>(count, begin, end);
  }
};

}  // namespace

extern "C" void scan(const void* problem) {
  const Problem& p = *static_cast<const Problem*>(problem);
  int64_t width = kTiles * W;
  while (width > L && p.outer * ((p.inner + width - 1) / width) < p.threads) width /= 2;
  int64_t across = (p.inner + width - 1) / width;
#pragma omp parallel for num_threads(p.threads) if (p.threads > 1)
  for (int64_t item = 0; item < p.outer * across; ++item) {
    int64_t first = item % across * width, end = std::min(first + width, p.inner);
    int64_t rows = end - first > W ? std::clamp<int64_t>(kBlock / (end - first), 8, 64) : p.length;
    for (int64_t i = 0; i < p.length; i += rows)
      for (int64_t column = first; column < end; column += W)
        Walk{p, item / across, column}.walk(std::min<int64_t>(W, end - column), i, std::min(i + rows, p.length));
  }
}
