// A problem, and where its elements lie: chain k of (outer, length, inner) tensors is [k / inner, :, k % inner].

enum Element { kFloat, kDouble, kBFloat, kHalf, kInt8, kInt16, kInt32, kInt64, kByte };

// As native.py's _Problem. initial, total and factor (outer, inner) are of the type to compute in.
struct Problem {
  const void *x, *b, *initial;
  const uint8_t* starts;
  void *out, *indices, *total, *factor;
  int64_t outer, length, inner, starts_outer, starts_length, starts_inner, empty_integer;
  double empty_number;
  int32_t element, result, flag, reverse, threads;
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

// What both kinds of walks know of the tensors.
template <class M>
struct Tensors {
  using C = typename M::Compute;
  const Problem& p;
  M machine;
  typename M::Fold fold;
  decltype(&read<C, float>) load_rows;
  decltype(&write<C, float>) store_rows;
  int64_t size_in, size_out;

  Tensors(const Problem& problem, C empty) : p(problem), machine{{empty, problem.flag != 0}}, fold{{empty, problem.flag != 0}} {
    load_rows = with_element(p.element, [](auto e) { return &read<C, decltype(e)>; });
    store_rows = with_element(p.result, [](auto e) { return &write<C, decltype(e)>; });
    size_in = with_element(p.element, [](auto e) { return int64_t(sizeof(e)); });
    size_out = with_element(p.result, [](auto e) { return int64_t(sizeof(e)); });
  }
  const void* in(const void* x, int64_t place) const { return static_cast<const char*>(x) + place * size_in; }
  void* out(int64_t place) const { return static_cast<char*>(p.out) + place * size_out; }
  int64_t* index(int64_t place) const { return static_cast<int64_t*>(p.indices) + place; }

  // Where row i in scan order of a chain lies.
  int64_t at(int64_t i) const { return p.reverse ? p.length - 1 - i : i; }
  int64_t place(int64_t chain, int64_t i) const {
    return (chain / p.inner * p.length + at(i)) * p.inner + chain % p.inner;
  }
  int64_t start(int64_t chain, int64_t i) const {
    return chain / p.inner * p.starts_outer + at(i) * p.starts_length + chain % p.inner * p.starts_inner;
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
