// Scans of (outer, length, inner) tensors in one pass over memory. STEPS, a machine of native_steps.cpp, is defined
// ahead of everything; the entry point is `scan`, at the end.

namespace {

constexpr int64_t kPiece = 4096;         // rows worth a thread of their own
constexpr int64_t kLargePage = 1 << 21;  // bytes
constexpr int64_t kLarge = 1 << 22;      // bytes of results that ask for large pages, as NumPy's arrays do

template <class R, class C>
void begin(const R& run, int64_t item, C* states) {
  int64_t count = run.after(item) - run.first(item);
  for (int64_t k = 0; k < count; ++k)
    for (int plane = 0; plane < R::planes; ++plane)
      run.state(states, k, count, plane) = run.initial(run.first(item) + k, plane);
}

template <class R, class C>
void finish(const R& run, int64_t item, C* states) {
  int64_t count = run.after(item) - run.first(item);
  for (int64_t k = 0; run.p.total && k < count; ++k) {
    Vec<C, lanes<C>> own[R::planes];
    for (int plane = 0; plane < R::planes; ++plane) own[plane] = splat(run.state(states, k, count, plane));
    static_cast<C*>(run.p.total)[run.first(item) + k] = run.machine.value(own, own[0])[0];
    if (run.p.factor) static_cast<C*>(run.p.factor)[run.first(item) + k] = own[R::planes - 1][0];
  }
}

template <class R>
void in_one_pass(const R& run) {
#pragma omp parallel for schedule(dynamic) num_threads(run.p.threads) if (run.p.threads > 1)
  for (int64_t item = 0; item < run.items(); ++item) {
    std::vector<typename R::C> states(run.states());
    begin(run, item, states.data());
    run.advance(item, 0, run.p.length, states.data(), true);
    finish(run, item, states.data());
  }
}

// What a piece of an item's rows begins with, from what the piece before it began with and that one's total.
template <class R, class C>
void carry_on(const R& run, int64_t item, int64_t begin, int64_t end, C* states, C* totals, C* next) {
  constexpr int Q = R::Folding::planes;
  int64_t count = run.after(item) - run.first(item);
  for (int64_t k = 0; k < count; ++k) {
    Vec<C, lanes<C>> left[Q], own[Q];
    for (int q = 0; q < Q; ++q) {
      left[q] = splat(q < R::planes ? run.state(states, k, count, q % R::planes) : run.fold.identity(q));
      own[q] = splat(R::Folding::state(totals, k, count, q));
    }
    if (!run.begins(run.first(item) + k, begin, end)) run.fold.join(left, own);
    for (int plane = 0; plane < R::planes; ++plane) run.state(next, k, count, plane) = own[plane][0];
  }
}

// Fewer items than threads: the totals of pieces of the rows first.
template <class R, class C>
void in_two_passes(const R& run, C empty, int64_t pieces) {
  typename R::Folding folding(run.p, empty);
  int64_t items = run.items(), rows = up(up(run.p.length, pieces), kLine) * kLine;
  int64_t size = run.states(), total_size = folding.states();
  std::vector<C> states(items * pieces * size), totals(items * pieces * total_size);
  auto from = [&](int64_t k) { return std::min(k % pieces * rows, run.p.length); };
  auto to = [&](int64_t k) { return std::min((k % pieces + 1) * rows, run.p.length); };
#pragma omp parallel for schedule(dynamic) num_threads(run.p.threads)
  for (int64_t k = 0; k < items * pieces; ++k) {
    if (k % pieces == 0) begin(run, k / pieces, &states[k * size]);
    begin(folding, k / pieces, &totals[k * total_size]);
    folding.advance(k / pieces, from(k), to(k), &totals[k * total_size], false);
  }
  for (int64_t k = 0; k < items * pieces; ++k)
    if (k % pieces + 1 < pieces)
      carry_on(run, k / pieces, from(k), to(k), &states[k * size], &totals[k * total_size], &states[(k + 1) * size]);
#pragma omp parallel for schedule(dynamic) num_threads(run.p.threads)
  for (int64_t k = 0; k < items * pieces; ++k) {
    run.advance(k / pieces, from(k), to(k), &states[k * size], true);
    if (k % pieces + 1 == pieces) finish(run, k / pieces, &states[k * size]);
  }
}

template <class R, class C>
void solve(const Problem& p, C empty) {
  R run(p, empty);
  int64_t pieces = std::min<int64_t>(p.threads / run.items(), p.length / kPiece);
  if (pieces > 1)
    in_two_passes(run, empty, pieces);
  else
    in_one_pass(run);
}

// Of new memory: the system takes longer to give it in small pages than a scan takes to fill it.
void in_large_pages(void* memory, int64_t bytes) {
#if defined(__linux__)
  auto first = reinterpret_cast<uintptr_t>(memory);
  uintptr_t from = (first + kLargePage - 1) / kLargePage * kLargePage;
  uintptr_t to = (first + bytes) / kLargePage * kLargePage;
  if (memory && bytes >= kLarge) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#endif
}

}  // namespace

extern "C" void scan(const Problem* p) {
  using C = STEPS::Compute;
  int64_t elements = p->outer * p->length * p->inner;
  in_large_pages(p->out, elements * size_of(p->result));
  in_large_pages(p->indices, elements * size_of(kInt64));
  C empty = std::is_same_v<C, int64_t> ? C(p->empty_integer) : C(p->empty_number);
  if (p->outer * p->inner == 0) return;
  if (p->inner == 1 && (p->length >= STEPS::short_line || p->outer < lanes<C>))
    solve<Lines<STEPS>>(*p, empty);
  else
    solve<Grid<STEPS>>(*p, empty);
}
