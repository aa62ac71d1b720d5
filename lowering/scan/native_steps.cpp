// What a scan does at one element. C: the type to compute in; a state is `planes` vectors.

namespace {

template <class C>
struct Machine {
  using Compute = C;
  using V = Vec<C, lanes<C>>;
  static constexpr int inputs = 1, planes = 1, outputs = 1, vectors = 8;
  C empty;
};

struct Add {
  template <class T> static INLINE T combine(T a, T b) { return a + b; }
};
struct Multiply {
  template <class T> static INLINE T combine(T a, T b) { return a * b; }
};
// NaN wins and stays; of equal elements the later one.
struct Larger {
  template <class T> static INLINE auto wins(T later, T earlier) { return (later >= earlier) | (later != later); }
  template <class T> static INLINE T combine(T a, T b) { return wins(b, a) ? b : a; }
};
struct Smaller {
  template <class T> static INLINE auto wins(T later, T earlier) { return (later <= earlier) | (later != later); }
  template <class T> static INLINE T combine(T a, T b) { return wins(b, a) ? b : a; }
};

template <class C, class Op, bool exclusive>
struct Scan : Machine<C> {
  using Fold = Scan;
  using V = typename Machine<C>::V;

  C identity(int) const { return this->empty; }
  INLINE V step(V* state, V x, V, C, V*) const {
    V before = state[0];
    state[0] = Op::combine(before, x);
    return exclusive ? before : state[0];
  }
  static void extend(C* carry, const C* part) { carry[0] = Op::combine(carry[0], part[0]); }
  static C total(const C* state) { return state[0]; }
};

// The state is the largest element m and the sum of exp(x - m) over all others.
template <bool exclusive>
struct LogSumExp : Machine<double> {
  using Fold = LogSumExp;
  static constexpr int planes = 2, vectors = 4;

  double identity(int plane) const { return plane ? 0.0 : -std::numeric_limits<double>::infinity(); }
  static INLINE Doubles value(const Doubles* state) { return state[0] + log1p_of_positive(state[1]); }
  INLINE Doubles step(Doubles* state, Doubles x, Doubles, double, Doubles*) const {
    Doubles out = exclusive ? value(state) : x;
    join(state, x, Doubles{});
    return exclusive ? out : value(state);
  }
  // Equal ones may be infinite, so that their difference is not 0.
  static INLINE void join(Doubles* state, Doubles top, Doubles rest) {
    Doubles m = state[0], s = state[1], gap = top - m;
    Doubles e = top == m ? splat(1.0) : exp_of_negative(gap > 0.0 ? -gap : gap);
    state[1] = top > m ? (s + 1.0) * e + rest : s + (rest + 1.0) * e;
    state[0] = top > m ? top : m;
  }
  static void extend(double* carry, const double* part) {
    Doubles state[2] = {splat(carry[0]), splat(carry[1])};
    join(state, splat(part[0]), splat(part[1]));
    carry[0] = state[0][0], carry[1] = state[1][0];
  }
  static double total(const double* state) {
    Doubles both[2] = {splat(state[0]), splat(state[1])};
    return value(both)[0];
  }
};

// The state is the extreme and its index; a double holds an index below 2^53.
template <class C, class Op>
struct Extremes : Machine<C> {
  using Fold = Extremes;
  using V = typename Machine<C>::V;
  static constexpr int planes = 2, outputs = 2, vectors = 4;

  C identity(int plane) const { return plane ? C(0) : this->empty; }
  INLINE V step(V* state, V x, V, C row, V* index) const {
    auto wins = Op::wins(x, state[0]);
    state[0] = wins ? x : state[0];
    *index = state[1] = wins ? splat(row) : state[1];
    return state[0];
  }
  static void extend(C* carry, const C* part) {
    if (Op::wins(part[0], carry[0])) carry[0] = part[0], carry[1] = part[1];
  }
  static C total(const C* state) { return state[0]; }
};

// The map carry -> state[1] * carry + state[0] of all elements.
template <class C, bool lagged>
struct LinearTotal : Machine<C> {
  using Fold = LinearTotal;
  using V = typename Machine<C>::V;
  static constexpr int inputs = 2, planes = 2;

  C identity(int plane) const { return C(plane); }
  INLINE V step(V* state, V a, V b, C, V*) const {
    state[0] = lagged ? a * (state[0] + b) : a * state[0] + b;
    state[1] = a * state[1];
    return state[0];
  }
  static void extend(C* carry, const C* part) {
    carry[0] = part[1] * carry[0] + part[0], carry[1] = part[1] * carry[1];
  }
  static C total(const C* state) { return state[0]; }
};

template <class C, bool lagged>
struct Linear : Machine<C> {
  using Fold = LinearTotal<C, lagged>;
  using V = typename Machine<C>::V;
  static constexpr int inputs = 2;

  C identity(int) const { return C(0); }
  INLINE V step(V* state, V a, V b, C, V*) const {
    V h = lagged ? state[0] + b : a * state[0] + b;
    state[0] = lagged ? a * h : h;
    return h;
  }
  static void extend(C* carry, const C* part) { carry[0] = part[1] * carry[0] + part[0]; }
  static C total(const C* state) { return state[0]; }
};

}  // namespace
