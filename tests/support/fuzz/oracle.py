"""Compare a model on simulated ranks with the unmodified model: results, gradients and written inputs.

The complete path of a user's call runs, including Dynamo, except for the compiler of the rank's graph and the exchange
before it, which simulated ranks do not have. One trace by Dynamo serves all numbers of ranks. A `direct` case is captured
without Dynamo first, and with Dynamo only if that fails. A case that fails for all numbers of ranks together is run for
each number.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any, TypeVar
from unittest import mock

import torch
from support.fuzz.outcomes import Outcome, Result
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from sp_compile import SpError
from sp_compile.backend import lower_or_keep
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.comm.communicator import FunctionalCommunicator, current_communicator
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, run_ranks
from sp_compile.lowering.torch_compat import keep_source
from sp_compile.passes.capture import graph_inputs as inputs_of_backend
from sp_compile.passes.capture.capture import capture
from sp_compile.passes.capture.user_program import UserProgram
from sp_compile.passes.capture.view_writes import VIEW_OPS
from sp_compile.passes.graph.edit import copy_graph
from sp_compile.passes.graph.rank_rng import has_random_ops
from sp_compile.passes.report import Report
from sp_compile.rank_program import RankProgram
from sp_compile.runtime.fingerprint import graph_digest
from sp_compile.runtime.session import CompileSession
from sp_compile.runtime.sharded_values import rebuild_views

TOLERANCES = {torch.float32: 1e-3, torch.complex64: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}
TOLERANCE = 1e-9  # of float64
NUDGES = 3  # runs of a single device with inputs that differ in their last bits
LAST_BITS = 1e-14
SLACK = 100.0  # allowed multiple of the effect of that change
ROUNDING = 1e-6  # of the largest gradient: smaller gradients are rounding errors of zero
RIGHT = (Outcome.EXACT, Outcome.GATHERED, Outcome.COVERED)
BY_WEIGHT = list(Outcome)
SESSION = 10**6  # numbers of random programs, of one session of the fuzzer: `--seed`
E = TypeVar("E", bound=Exception)
_SEEN: set[str] = set()  # the graphs of direct cases that have come out right


@dataclass(frozen=True)
class Case:
    """model(*inputs) on each of these numbers of ranks. options: the fields of SPConfig. dynamic: sizes are symbols.

    direct: without Dynamo at first, and not at all where a case with the same graph has come out right.
    """

    model: Callable[..., Any]
    inputs: Sequence[Tensor]
    ranks: Sequence[int]
    options: Mapping[str, Any] = field(default_factory=dict)
    dynamic: bool = False
    direct: bool = False

    def without_gradients(self) -> Case:
        return replace(self, inputs=[x.detach() for x in self.inputs])


@dataclass
class Run:
    """The values of one run, by what they are called in words; floors: below which they are rounding errors."""

    values: dict[str, Any]
    floors: dict[str, float]

    @classmethod
    def of(cls, values: dict[str, Any]) -> Run:
        """Gradients are those values that are called so."""
        smooth = {name: y for name, y in values.items() if isinstance(y, Tensor) and y.is_floating_point()}
        # Values that are zero except for rounding, such as canceling sums, have the rounding of values around one.
        floors = {name: LAST_BITS / TOLERANCE for name, y in smooth.items() if largest_entry(y) <= SLACK * LAST_BITS}
        gradients = [name for name, y in values.items() if name.startswith("gradient") and isinstance(y, Tensor)]
        largest = {name: largest_entry(values[name]) for name in gradients}
        # Where all gradients are zero but for rounding, that of numbers around one.
        floor = max(ROUNDING * max(largest.values(), default=0.0), LAST_BITS / TOLERANCE)
        return cls(values, floors | dict.fromkeys(largest, floor))

    @property
    def results(self) -> list[Any]:
        return [x for name, x in self.values.items() if name.startswith("result")]


class _Covered(Exception):
    """A case with an equal graph was right."""


class _Apart(Exception):
    """Guards on symbols for one number of ranks would affect the next number."""


def outcome(case: Case) -> Result:
    """Return the worst outcome of a case over its numbers of ranks."""
    try:
        expected = run_model(case.model, case.inputs)
    except Exception as error:
        return Result(Outcome.SKIPPED, f"a single device raises: {first_line(error)}")
    return _outcome(case, expected)


def _outcome(case: Case, expected: Run) -> Result:
    result = _compared(case, expected)
    if result.outcome in RIGHT:
        return result
    if case.direct and result.outcome is not Outcome.WRONG:
        return _outcome(replace(case, direct=False), expected)
    return _each(case, expected) if len(case.ranks) > 1 else result


def _each(case: Case, expected: Run) -> Result:
    """Run each number of ranks separately."""
    results = [_outcome(replace(case, ranks=(n,)), expected) for n in case.ranks]
    return max(results, key=lambda result: BY_WEIGHT.index(result.outcome))


def _compared(case: Case, expected: Run) -> Result:
    """Run all numbers of ranks in one trace."""
    ranks = _SimulatedRanks(case)
    try:
        found = ranks.run_direct(len(expected.results)) if case.direct else ranks.run()
    except _Covered:
        return Result(Outcome.COVERED)
    except Exception as error:
        if cause(error, _Apart) is not None:
            return Result(Outcome.RAW, "each number of ranks alone")
        refused = ranks.refused or cause(error, SpError)
        if refused is not None:
            return Result(Outcome.REFUSED, first_line(refused))
        if not case.direct and _fails_without_us(case):
            return Result(Outcome.SKIPPED, f"torch.compile cannot: {first_line(error)}")
        return Result(Outcome.RAW, f"{type(error).__name__}: {error}"[:2000])
    wrong = differences(expected, found)
    if wrong and not _is_determined(case, expected):
        return Result(Outcome.SKIPPED, "random on a single device, too")
    if wrong and _fails_without_us(case, expected):
        return Result(Outcome.SKIPPED, "torch.compile differs without ranks, too")
    if wrong and is_rounding(partial(run_model, case.model), case.inputs, expected, wrong):
        return Result(
            Outcome.SKIPPED, f"one device is as far off where inputs differ in their last bits: {listed(wrong)}"
        )
    if wrong:
        return Result(Outcome.WRONG, f"{case.ranks} ranks{' without Dynamo' * case.direct}: {listed(wrong)}")
    _SEEN.add(ranks.graph)
    return Result(Outcome.GATHERED if ranks.fallbacks else Outcome.EXACT, ranks.fallbacks)


def can_run(case: Case) -> bool:
    """Return True if the model and its gradients run on a single device."""
    try:
        run_model(case.model, case.inputs)
    except Exception:
        return False
    return True


class _SimulatedRanks:
    """A backend of torch.compile that lowers each graph for one of the ranks, and what it was asked. graph: a direct
    case's, as a key."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.n = 0
        self.graph = ""
        self.refused: SpError | None = None
        self.reports: list[Report] = []
        self.captured: dict[GraphModule, GraphModule] = {}

    @property
    def fallbacks(self) -> str:
        return ", ".join(dict.fromkeys(f"{note.label} {note.node}" for one in self.reports for note in one.fallbacks))

    def run(self) -> list[Run]:
        """Every rank's values."""
        torch._dynamo.reset()
        dynamic = {"assume_static_by_default": not self.case.dynamic, "automatic_dynamic_shapes": self.case.dynamic}
        with torch._dynamo.config.patch(dynamic):
            compiled = torch.compile(copy.deepcopy(self.case.model), backend=self)
            run_model(compiled, self.case.inputs)  # Dynamo compiles here, and the ranks find it compiled
            return self._on_ranks(compiled)

    def run_direct(self, results: int) -> list[Run]:
        """Run without Dynamo: the model with `results` results is one node. Raises _Covered if the graph was seen."""
        graph = Graph()
        inputs = [graph.placeholder(f"x{i}") for i in range(len(self.case.inputs))]
        called = graph.call_function(lambda *xs: tuple(pytree.tree_leaves(self.case.model(*xs))), tuple(inputs))
        graph.output(tuple(graph.call_function(operator.getitem, (called, i)) for i in range(results)))
        gm, leaves = GraphModule({}, graph), _leaves(self.case.inputs)
        with tracing(TracingContext(FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True))), self.once():
            captured = inputs_of_backend.capture(gm, leaves)
            if has_random_ops(captured):
                raise ValueError("sets a seed, perhaps, at which Dynamo would break the graph")
            self.graph = _key(captured, leaves)
            if self.graph in _SEEN:
                raise _Covered
            return self._on_ranks(self(gm, leaves))

    def _on_ranks(self, compiled: Callable[..., Any]) -> list[Run]:
        found = []
        for n in self.case.ranks:
            self.n = n
            found += run_ranks(n, lambda _: run_model(compiled, self.case.inputs))
        return found

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        programs: dict[int, RankProgram] = {}
        known = _known()
        with self.once():
            for n in self.case.ranks:
                if known != _known():
                    raise _Apart
                programs[n] = self.lowered(gm, example_inputs, n)

        def call(*args: Any) -> Any:
            if isinstance(current_communicator(), FunctionalCommunicator):
                return gm.forward(*args)
            program = programs[self.n]
            values = [_no_view_of_a_function(y) for y in program.graph.forward(*args)]
            return rebuild_views(values, args, program.boundary)

        return call

    def lowered(self, gm: GraphModule, example_inputs: Sequence[Any], n: int) -> RankProgram:
        """Lower a graph for n ranks."""
        options = {"compiler": "aot_eager", "cost": {}, **self.case.options}
        try:
            session = CompileSession(gm, example_inputs, options, measures=False)
            session.ranks = Ranks(n, SIMULATED_GROUP)
            lowered, _ = lower_or_keep(
                UserProgram(gm, tuple(example_inputs)), {"outputs": "gather", **options}, session, lambda _: None
            )
        except SpError as error:
            self.refused = error
            raise
        self.reports.append(lowered.report)
        return lowered

    @contextmanager
    def once(self) -> Iterator[None]:
        """Capture each graph once, and return copies for every number of ranks."""

        def known(gm: GraphModule, example_inputs: Sequence[Any]) -> GraphModule:
            if gm not in self.captured:
                self.captured[gm] = capture(gm, example_inputs)
            given = self.captured[gm]
            if any(isinstance(child, GraphModule) for child in given.children()):
                return capture(gm, example_inputs)
            made = copy_graph(given)
            made.meta.update(given.meta)  # facts of capture about the program
            for new, old in zip(*(g.graph.find_nodes(op="placeholder") for g in (made, given)), strict=True):
                keep_source(new, old)
            return made

        with mock.patch.object(inputs_of_backend, "capture", known):
            yield


def _known() -> tuple[int, int]:
    """Return the numbers of guards and replacements of symbols in the running compilation."""
    mode = TracingContext.get().fake_mode
    symbols = mode.shape_env if mode is not None else None
    return (len(symbols.guards), len(symbols.replacements)) if symbols is not None else (0, 0)


def _key(graph: GraphModule, inputs: Sequence[Tensor]) -> str:
    """Return a key that is equal for equal graphs, constants included."""
    constants = {name: (x.tolist() if x.layout == torch.strided else str(x)) for name, x in graph.named_buffers()}
    text = f"{graph_digest(graph)} {graph.meta[VIEW_OPS]} {[x.requires_grad for x in inputs]} {constants}"
    return hashlib.sha256(text.encode()).hexdigest()


def _no_view_of_a_function(y: Any) -> Any:
    """Return a result as a compiler does, so that it may be changed in place after a graph break."""
    return y.clone() if isinstance(y, Tensor) and y._is_view() and y.requires_grad else y


def run_model(model: Callable[..., Any], inputs: Sequence[Tensor]) -> Run:
    """Run forward and backward on new leaves, with fixed cotangents so that runs can be compared."""
    leaves = _leaves(inputs)
    with torch.enable_grad():  # restored if the model fails after it disabled gradients
        results = pytree.tree_leaves(model(*leaves))
    values: dict[str, Any] = {f"result {i}": y for i, y in enumerate(results)}
    outs = [y for y in results if isinstance(y, Tensor) and y.requires_grad]
    wanted = {f"gradient {i}": x for i, x in enumerate(leaves) if x.requires_grad}
    if wanted:
        # A view of a leaf that is created under no_grad requires a gradient but passes none on. If no other result
        # requires one, the gradients are zero in both cases.
        grads = [torch.zeros_like(x) for x in wanted.values()]
        if outs:
            given = list(map(_cotangent, outs))
            grads = torch.autograd.grad(outs, list(wanted.values()), given, materialize_grads=True)
        values |= zip(wanted, grads)
    values |= {f"input {i} afterwards": x for i, x in enumerate(leaves)}
    return Run.of({name: x.detach() if isinstance(x, Tensor) else x for name, x in values.items()})


def _leaves(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]


def _cotangent(y: Tensor) -> Tensor:
    if y.numel() == 1:
        return torch.ones_like(y)
    return torch.sin(12.9898 * torch.arange(y.numel(), dtype=torch.float64)).view(y.shape).to(y.dtype)


def largest_entry(x: Tensor) -> float:
    known = x[x.isfinite()]
    return known.abs().max().double().item() if known.numel() else 0.0


def differences(expected: Run, found: Sequence[Run]) -> dict[str, float]:
    """Return the largest error of each value whose error on some rank exceeds rounding."""
    worst: dict[str, float] = {}
    for one in found:
        for (name, a), (other, b) in zip_longest(expected.values.items(), one.values.items(), fillvalue=("", None)):
            error = _error(a, b, expected.floors.get(name, 0.0)) if name == other else float("inf")
            tolerance = TOLERANCES.get(getattr(a, "dtype", None), TOLERANCE)
            if not error <= tolerance:
                worst[name] = max(worst.get(name, 0.0), error)
        worst |= dict.fromkeys(_sharing(one) - _sharing(expected), float("inf"))
    return worst


def _sharing(run: Run) -> set[str]:
    """Return the pairs of results and inputs that share memory."""
    strided = [(n, x) for n, x in run.values.items() if isinstance(x, Tensor) and x.layout == torch.strided]
    named = [(name, x.untyped_storage().data_ptr()) for name, x in strided if x.numel() and "gradient" not in name]
    return {f"memory of {a} and {b}" for (a, x), (b, y) in itertools.combinations(named, 2) if x == y}


def _error(expected: Any, found: Any, floor: float) -> float:
    """Return the error relative to the largest entry; infinite if type, shape or dtype differ."""
    if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
        return 0.0 if expected is found or expected == found else float("inf")
    if (expected.shape, expected.dtype, expected.layout) != (found.shape, found.dtype, found.layout):
        return float("inf")
    if expected.layout != torch.strided:
        return _error(expected.to_dense(), found.to_dense(), floor)
    equal = (expected == found) | (expected.isnan() & found.isnan())
    if equal.all():
        return 0.0
    if not expected.is_floating_point() and not expected.is_complex():
        return float("inf")
    error = (expected - found)[~equal].abs().max().double().item()
    return float("inf") if math.isnan(error) else error / (max(largest_entry(expected), floor) or 1e-30)


def is_rounding(
    run: Callable[[Sequence[Tensor]], Run], inputs: Sequence[Tensor], expected: Run, wrong: Mapping[str, float]
) -> bool:
    """Return True if changes of the inputs in their last bits explain all wrong values on a single device.

    run: returns the values of a single device for inputs.
    """
    worst = dict.fromkeys(expected.values, 0.0)
    for seed in range(NUDGES):
        generator = torch.Generator().manual_seed(seed)
        other = run([nudged(x, generator) for x in inputs])
        for (name, a), b in zip(expected.values.items(), other.values.values()):
            worst[name] = max(worst[name], 0.0 if "afterwards" in name else _error(a, b, expected.floors.get(name, 0)))
    return all(error <= SLACK * worst.get(name, 0.0) for name, error in wrong.items())


def listed(wrong: Mapping[str, float]) -> str:
    return ", ".join(f"{name}: {error:.1e}" for name, error in wrong.items())


def nudged(x: Tensor, generator: torch.Generator) -> Tensor:
    if x.dtype != torch.float64:
        return x
    signs = torch.randint(-1, 2, x.shape, generator=generator)
    return (x.detach() * (1 + LAST_BITS * signs)).requires_grad_(x.requires_grad)


def _is_determined(case: Case, expected: Run) -> bool:
    """Return True if a single device computes equal values with another seed."""
    with torch.random.fork_rng():
        torch.manual_seed(1234)
        return not differences(expected, [run_model(case.model, case.inputs)])


def _fails_without_us(case: Case, expected: Run | None = None) -> bool:
    """Return True if torch.compile with an eager backend fails, or computes other values."""
    for backend in ("aot_eager", "eager"):
        torch._dynamo.reset()
        try:
            with torch._dynamo.config.patch(assume_static_by_default=not case.dynamic):
                found = run_model(torch.compile(case.model, backend=backend), case.inputs)
        except Exception:
            return True
        if expected is not None and differences(expected, [found]):
            return True
    return False


def cause(error: BaseException | None, kind: type[E]) -> E | None:
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or getattr(error, "inner_exception", None)
    return error


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
