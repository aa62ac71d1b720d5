// Vectors of GCC and Clang: elements as they lie in tensors, as numbers to compute with, and exp and log1p of them.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif

#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))

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

// The quotient of whole numbers, rounded up.
inline int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class To, class From>
INLINE To cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// f(0), ..., f(N - 1) with constants, so that arrays of vectors become registers.
template <class F, int... i>
INLINE void each(F f, std::integer_sequence<int, i...>) {
  (f(std::integral_constant<int, i>{}), ...);
}
template <int N, class F>
INLINE void each(F f) { each(f, std::make_integer_sequence<int, N>{}); }

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

// Lane i of the result is lane(i, L) of a and, after those, of b.
template <int (*lane)(int, int), class V, int... i>
INLINE V shuffle(V a, V b, std::integer_sequence<int, i...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, lane(i, sizeof...(i))...);
#else
  return __builtin_shuffle(a, b, Vec<Bits<std::decay_t<decltype(a[0])>>, sizeof...(i)>{lane(i, sizeof...(i))...});
#endif
}
template <int (*lane)(int, int), class V>
INLINE V shuffle(V a, V b) { return shuffle<lane>(a, b, std::make_integer_sequence<int, sizeof(V) / sizeof(a[0])>{}); }

template <int width>
constexpr int moved(int i, int n) { return i < width ? n : i - width; }
template <int width>
constexpr int turned(int i, int n) { return (i + width) % n; }
constexpr int last(int, int n) { return n - 1; }
constexpr int opposite(int i, int n) { return n - 1 - i; }

// Every lane moved on by `width`; the first ones are those of fill.
template <int width, class V>
INLINE V later(V a, V fill) { return shuffle<moved<width>>(a, fill); }
// The last lane, in all of them.
template <class V>
INLINE V last_of(V a) { return shuffle<last>(a, a); }
template <class V>
INLINE V backwards(V a) { return shuffle<opposite>(a, a); }
// Is a lane not 0?
template <class V, int width = sizeof(V) / sizeof(std::declval<V>()[0]) / 2>
INLINE bool any(V mask) {
  if constexpr (width == 0) return mask[0] != 0;
  else return any<V, width / 2>(mask | shuffle<turned<width>>(mask, mask));
}

using Doubles = Vec<double, lanes<double>>;
using Longs = Vec<int64_t, lanes<double>>;

// exp(x) for x <= 0 to one unit in the last place; 0 below -708, NaN for NaN.
INLINE Doubles exp_of_negative(Doubles x) {
  constexpr double shift = 0x1.8p52;
  Doubles inside = x < -708.0 ? splat(-708.0) : x;
  Doubles shifted = inside * 0x1.71547652b82fep0 + shift, times = shifted - shift;
  Doubles r = (inside - times * 0x1.62e42fee00000p-1) - times * 0x1.a39ef35793c76p-33;
  Doubles sum = splat(2.511003761756205e-08);
  for (double factor : {2.763263965412376e-07, 2.7557240918547625e-06, 2.480148548228773e-05,
                        1.9841269890047143e-04, 1.3888888952314812e-03, 8.333333333319601e-03,
                        4.166666666648809e-02, 1.666666666666668e-01, 5.000000000000019e-01, 1.0, 1.0})
    sum = sum * r + factor;
  Doubles scale = cast<Doubles>((cast<Longs>(shifted) + 1023) << 52);
  return x < -708.0 ? splat(0.0) : sum * scale;
}

// log(1 + x) for x >= 0 to one unit in the last place; NaN for NaN. What 1 + x has lost is divided by 1 + x roughly.
INLINE Doubles log1p_of_positive(Doubles x) {
  Doubles whole = 1.0 + x, lost = x - (whole - 1.0);
  Longs power = (cast<Longs>(whole) - 0x3fe6a09e667f3bcd) >> 52;
  Doubles times = cast<Doubles>(power + 0x4338000000000000) - 0x1.8p52;
  Doubles f = cast<Doubles>(cast<Longs>(whole) - (power << 52)) - 1.0;
  Doubles s = f / (2.0 + f), z = s * s, half = 0.5 * f * f;
  Doubles sum = splat(1.479819860511658591e-01);
  for (double factor : {1.531383769920937332e-01, 1.818357216161805012e-01, 2.222219843214978396e-01,
                        2.857142874366239149e-01, 3.999999999940941908e-01, 6.666666666666735130e-01})
    sum = sum * z + factor;
  Doubles scale = cast<Doubles>((1023 - power) << 52);
  Doubles low = times * 0x1.a39ef35793c76p-33 + lost * scale * (1.0 - f + f * f);
  return times * 0x1.62e42fee00000p-1 - ((half - (s * (half + sum * z) + low)) - f);
}

}  // namespace
