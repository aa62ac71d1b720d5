// A problem, and where its elements lie. Chain k of (outer, length, inner) tensors is [k / inner, :, k % inner].

enum Element { kFloat, kDouble, kBFloat, kHalf, kInt8, kInt16, kInt32, kInt64, kByte };

// As native.py packs it. initial, total and factor (outer, inner) are of the type to compute in.
struct Problem {
  const void *x, *b, *initial;
  const uint8_t* starts;
  void *out, *indices, *total, *factor;
  int64_t outer, length, inner, starts_outer, starts_length, starts_inner, empty_integer;
  double empty_number;
  int32_t element, result, flag, reverse, threads;  // flag: exclusive, or lagged
};

namespace {

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

int64_t size_of(int element) {
  return with_element(element, [](auto e) { return int64_t(sizeof(e)); });
}

// Number of a pair of elements, of inputs and output, for which there are kernels without a buffer.
constexpr int pair(int element, int result) { return element * 16 + result; }

template <class M>
struct Tensors {
  using C = typename M::Compute;

  const Problem& p;
  M machine;
  typename M::Fold fold;
  int64_t size_in, size_out;
  decltype(&copy<C, C, C>) read, write;

  Tensors(const Problem& problem, C empty)
      : p(problem), machine{{empty, p.flag != 0}}, fold{{empty, p.flag != 0}},
        size_in(size_of(p.element)), size_out(size_of(p.result)) {
    read = with_element(p.element, [](auto e) { return &copy<C, decltype(e), C>; });
    write = with_element(p.result, [](auto e) { return &copy<C, C, decltype(e)>; });
  }

  const void* in(int input, int64_t place) const {
    return static_cast<const char*>(input ? p.b : p.x) + place * size_in;
  }
  void* out(int64_t place) const { return static_cast<char*>(p.out) + place * size_out; }
  int64_t* index(int64_t place) const { return static_cast<int64_t*>(p.indices) + place; }

  // Row i in scan order: its number, and the places of a chain's element and start.
  int64_t row(int64_t i) const { return p.reverse ? p.length - 1 - i : i; }
  int64_t place(int64_t chain, int64_t i) const {
    return (chain / p.inner * p.length + row(i)) * p.inner + chain % p.inner;
  }
  int64_t start(int64_t chain, int64_t i) const {
    return chain / p.inner * p.starts_outer + row(i) * p.starts_length + chain % p.inner * p.starts_inner;
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

}  // namespace
