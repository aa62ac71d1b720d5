// Vectors of GCC and Clang: elements as they lie in tensors, as numbers to compute with, and exp and log1p of them.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif

#define INLINE inline __attribute__((always_inline))

namespace {

template <class T, int N>
struct VectorOf {
  typedef T type __attribute__((vector_size(sizeof(T) * N)));
};
template <class T, int N>
using Vec = typename VectorOf<T, N>::type;

template <class C>
constexpr int lanes = kBytes / int(sizeof(C));

// The integers that compare and shift along with C.
template <class C>
using Bits = std::conditional_t<sizeof(C) == 8, int64_t, int32_t>;

struct Half { uint16_t bits; };
struct BFloat { uint16_t bits; };

template <class C>
INLINE Vec<C, lanes<C>> splat(C value) { return value - Vec<C, lanes<C>>{}; }

template <class To, class From>
INLINE To cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// f(0), ..., f(N - 1) with constants, so that arrays of vectors become registers.
template <int N, class F>
INLINE void each(F f) {
  [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
    (f(std::integral_constant<int, i>{}), ...);
  }(std::make_integer_sequence<int, N>{});
}

template <int N>
INLINE Vec<float, N> widen(Vec<uint16_t, N> raw, BFloat) {
  return cast<Vec<float, N>>(__builtin_convertvector(raw, Vec<uint32_t, N>) << 16);
}

// The product brings halves of every size to a float's exponent, subnormal ones too.
template <int N>
INLINE Vec<float, N> widen(Vec<uint16_t, N> raw, Half) {
  auto bits = __builtin_convertvector(raw, Vec<int32_t, N>);
  auto size = bits & 0x7fff, sign = (bits & 0x8000) << 16;
  auto scaled = cast<Vec<int32_t, N>>(cast<Vec<float, N>>(size << 13) * 0x1p112f);
  return cast<Vec<float, N>>((size >= 0x7c00 ? (size << 13) | 0x7f800000 : scaled) | sign);
}

template <int N>
INLINE Vec<uint16_t, N> narrow(Vec<float, N> value, BFloat) {
  auto bits = cast<Vec<uint32_t, N>>(value);
  auto rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector(value != value ? (bits >> 16) | 0x40 : rounded, Vec<uint16_t, N>);
}

// Below 2^-14 the sum with 1/2 rounds to a multiple of the smallest half; from 2^16 on all is infinite or NaN.
template <int N>
INLINE Vec<uint16_t, N> narrow(Vec<float, N> value, Half) {
  auto bits = cast<Vec<int32_t, N>>(value);
  auto size = bits & 0x7fffffff, sign = (bits >> 16) & 0x8000;
  auto tiny = cast<Vec<int32_t, N>>(cast<Vec<float, N>>(size) + 0.5f) - 0x3f000000;
  auto normal = (size + 0xfff - 0x38000000 + ((size >> 13) & 1)) >> 13;
  auto huge = size > 0x7f800000 ? 0x7e00 + (size & 0) : 0x7c00 + (size & 0);
  auto found = size < 0x38800000 ? tiny : (size >= 0x47800000 ? huge : normal);
  return __builtin_convertvector(found | sign, Vec<uint16_t, N>);
}

template <class E>
constexpr bool packed = std::is_same_v<E, Half> || std::is_same_v<E, BFloat>;

template <class C, int N, class E>
INLINE Vec<C, N> load(const E* from) {
  if constexpr (packed<E>) {
    Vec<uint16_t, N> raw;
    std::memcpy(&raw, from, sizeof(raw));
    return __builtin_convertvector(widen<N>(raw, E{}), Vec<C, N>);
  } else {
    Vec<E, N> raw;
    std::memcpy(&raw, from, sizeof(raw));
    return __builtin_convertvector(raw, Vec<C, N>);
  }
}

template <class C, int N, class E>
INLINE void store(E* to, Vec<C, N> value) {
  if constexpr (packed<E>) {
    auto raw = narrow<N>(__builtin_convertvector(value, Vec<float, N>), E{});
    std::memcpy(to, &raw, sizeof(raw));
  } else {
    auto raw = __builtin_convertvector(value, Vec<E, N>);
    std::memcpy(to, &raw, sizeof(raw));
  }
}

#if defined(__clang__)
template <int width, class V, int... i>
INLINE void exchange(V& a, V& b, std::integer_sequence<int, i...>) {
  V low = __builtin_shufflevector(a, b, (i & width ? int(sizeof...(i)) + i - width : i)...);
  b = __builtin_shufflevector(a, b, (i & width ? int(sizeof...(i)) + i : i + width)...);
  a = low;
}
#else
template <int width, class V, int... i>
INLINE void exchange(V& a, V& b, std::integer_sequence<int, i...>) {
  using Index = Vec<Bits<std::decay_t<decltype(a[0])>>, sizeof...(i)>;
  V low = __builtin_shuffle(a, b, Index{(i & width ? int(sizeof...(i)) + i - width : i)...});
  b = __builtin_shuffle(a, b, Index{(i & width ? int(sizeof...(i)) + i : i + width)...});
  a = low;
}
#endif

// Square of L rows by L lanes, transposed in place.
template <class C, int L = lanes<C>, int width = L / 2>
INLINE void transpose(Vec<C, L>* rows) {
  each<L>([&](auto i) __attribute__((always_inline)) {
    if constexpr (!(i & width)) exchange<width>(rows[i], rows[i + width], std::make_integer_sequence<int, L>{});
  });
  if constexpr (width > 1) transpose<C, L, width / 2>(rows);
}

using Doubles = Vec<double, lanes<double>>;
using Longs = Vec<int64_t, lanes<double>>;

// exp(x) for x <= 0 to one unit in the last place; 0 below -708, NaN for NaN.
INLINE Doubles exp_of_negative(Doubles x) {
  constexpr double shift = 0x1.8p52;
  Doubles inside = x < -708.0 ? splat(-708.0) : x;
  Doubles shifted = inside * 0x1.71547652b82fep0 + shift, times = shifted - shift;
  Doubles r = (inside - times * 0x1.62e42fee00000p-1) - times * 0x1.a39ef35793c76p-33;
  Doubles sum = splat(1.0 / 6227020800);
  for (double term : {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
                      1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0})
    sum = sum * r + term;
  Doubles scale = cast<Doubles>((cast<Longs>(shifted) + 1023) << 52);
  return x < -708.0 ? splat(0.0) : sum * scale;
}

// log(1 + x) for x >= 0 to one unit in the last place; NaN for NaN. The quotient is what 1 + x has lost.
INLINE Doubles log1p_of_positive(Doubles x) {
  Doubles whole = 1.0 + x;
  Longs bits = cast<Longs>(whole) - 0x3fe6a09e667f3bcd;
  Longs power = bits >> 52;
  Doubles times = cast<Doubles>(power + 0x4338000000000000) - 0x1.8p52;
  Doubles f = cast<Doubles>(cast<Longs>(whole) - (power << 52)) - 1.0;
  Doubles s = f / (2.0 + f), z = s * s, half = 0.5 * f * f;
  Doubles sum = splat(1.479819860511658591e-01);
  for (double term : {1.531383769920937332e-01, 1.818357216161805012e-01, 2.222219843214978396e-01,
                      2.857142874366239149e-01, 3.999999999940941908e-01, 6.666666666666735130e-01})
    sum = sum * z + term;
  Doubles low = times * 0x1.a39ef35793c76p-33 + (x - (whole - 1.0)) / whole;
  return times * 0x1.62e42fee00000p-1 - ((half - (s * (half + sum * z) + low)) - f);
}

}  // namespace
