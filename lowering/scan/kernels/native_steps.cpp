// What a scan does at one element, and how it joins the states of two parts. A state is some vectors of C, the type
// to compute in: of `planes` in a walk over rows, of `Fold::planes` where parts are joined. Lines of
// fewer than `short_line` elements are walked side by side, as columns.

namespace {

template <class C>
struct Machine {
  using Compute = C;
  using V = Vec<C, lanes<C>>;
  static constexpr int inputs = 1, planes = 1, outputs = 1, vectors = 8, short_line = 16;
  static constexpr bool cut = true, shifted = true;  // by starts; where the flag is set

  C empty;
  bool flag;  // exclusive, or lagged

  C identity(int) const { return empty; }
  C neutral(int) const { return empty; }  // as an input
  // What comes out where the state is s.
  static INLINE V value(const V* s, V) { return s[0]; }
};

struct Add {
  template <class T> static INLINE T combine(T a, T b) { return a + b; }
};
struct Multiply {
  template <class T> static INLINE T combine(T a, T b) { return a * b; }
};
// NaN wins and stays; of equal elements the later one.
struct Larger {
  template <class T> static INLINE auto wins(T b, T a) { return (b >= a) | (b != b); }
  template <class T> static INLINE T combine(T a, T b) { return wins(b, a) ? b : a; }
};
struct Smaller {
  template <class T> static INLINE auto wins(T b, T a) { return (b <= a) | (b != b); }
  template <class T> static INLINE T combine(T a, T b) { return wins(b, a) ? b : a; }
};

template <class C, class Op>
struct Scan : Machine<C> {
  using Fold = Scan;
  using typename Machine<C>::V;

  static INLINE void lift(V* s, V x, V, V) { s[0] = x; }
  static INLINE void join(const V* left, V* s) { s[0] = Op::combine(left[0], s[0]); }
  INLINE V step(V* s, V x, V, V) const {
    V before = s[0];
    s[0] = Op::combine(before, x);
    return this->flag ? before : s[0];
  }
};

// The state is the largest element m and the sum of exp(x - m) over all others.
struct LogSumExp : Machine<double> {
  using Fold = LogSumExp;
  static constexpr int planes = 2, vectors = 4, short_line = 64;

  double identity(int plane) const { return plane ? 0.0 : empty; }
  static INLINE Doubles value(const Doubles* s, Doubles) { return s[0] + log1p_of_positive(s[1]); }
  static INLINE void lift(Doubles* s, Doubles x, Doubles, Doubles) { s[0] = x, s[1] = Doubles{}; }
  // Equal ones may be infinite, and their difference is then not 0.
  static INLINE void join(const Doubles* left, Doubles* s) {
    Doubles gap = s[0] - left[0];
    auto more = s[0] > left[0];
    Doubles e = s[0] == left[0] ? splat(1.0) : exp_of_negative(more ? -gap : gap);
    s[1] = more ? (left[1] + 1.0) * e + s[1] : left[1] + (s[1] + 1.0) * e;
    s[0] = more ? s[0] : left[0];
  }
  INLINE Doubles step(Doubles* s, Doubles x, Doubles, Doubles) const {
    Doubles next[2] = {x, Doubles{}};
    join(s, next);
    Doubles out = value(flag ? s : next, x);
    s[0] = next[0], s[1] = next[1];
    return out;
  }
};

// The state is the extreme and its index; a double holds every index below 2^53.
template <class C, class Op>
struct Extremes : Machine<C> {
  using Fold = Extremes;
  using typename Machine<C>::V;
  static constexpr int planes = 2, outputs = 2, vectors = 4;
  static constexpr bool shifted = false;

  C identity(int plane) const { return plane ? C(0) : this->empty; }
  static INLINE auto wins(V later, V earlier) { return Op::wins(later, earlier); }
  static INLINE void lift(V* s, V x, V, V row) { s[0] = x, s[1] = row; }
  static INLINE void join(const V* left, V* s) {
    auto wins = Op::wins(s[0], left[0]);
    s[0] = wins ? s[0] : left[0], s[1] = wins ? s[1] : left[1];
  }
  INLINE V step(V* s, V x, V, V row) const {
    V next[2] = {x, row};
    join(s, next);
    s[0] = next[0], s[1] = next[1];
    return s[0];
  }
};

// The map carry -> s[1] * carry + s[0] of all elements.
template <class C>
struct LinearTotal : Machine<C> {
  using Fold = LinearTotal;
  using typename Machine<C>::V;
  static constexpr int inputs = 2, planes = 2;
  static constexpr bool cut = false, shifted = false;

  C identity(int plane) const { return C(plane); }
  C neutral(int input) const { return C(1 - input); }
  INLINE V step(V* s, V a, V b, V) const {
    s[0] = this->flag ? a * (s[0] + b) : a * s[0] + b;
    s[1] = a * s[1];
    return s[0];
  }
  // From 0, as a walk would: an infinite a shows.
  INLINE void lift(V* s, V a, V b, V) const { s[0] = this->flag ? a * b : a * V{} + b, s[1] = a; }
  // A product that overflows is not asked for what it makes of 0.
  static INLINE void join(const V* left, V* s) {
    s[0] = left[0] == 0 ? s[0] : s[1] * left[0] + s[0];
    s[1] = s[1] * left[1];
  }
};

template <class C>
struct Linear : Machine<C> {
  using Fold = LinearTotal<C>;
  using typename Machine<C>::V;
  static constexpr int inputs = 2;
  static constexpr bool cut = false;

  C identity(int) const { return C(0); }
  C neutral(int input) const { return C(1 - input); }
  INLINE V value(const V* s, V b) const { return this->flag ? s[0] + b : s[0]; }
  INLINE V step(V* s, V a, V b, V) const {
    V h = this->flag ? s[0] + b : a * s[0] + b;
    s[0] = this->flag ? a * h : h;
    return h;
  }
};

}  // namespace
