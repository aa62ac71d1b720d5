"""`explain` and `verify`: what would be done to a model, and whether it is right, with no processes and no GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from sp_compile.graph.record import record
from sp_compile.lowering.simulate import GROUP, run_ranks
from sp_compile.spmd.check_compile import Lockstep
from sp_compile.spmd.inputs import groups_of

from . import _compat
from .backend import joint_passes, lower, note, questions, runs_as_written
from .config import Ranks, SPConfig, resolve, splits_sequence
from .errors import SpError
from .explain import Report
from .joint import JointPasses

ROUNDING = 1e-6  # of the largest gradient, in float64; the square root of the precision of smaller types


def explain(
    model: Callable[..., Any], *args: Any, sp: int = 2, passes: bool = False, **config: Any
) -> Report:
    """What `backend="sp"` would do to `model(*args)` on `sp` ranks: rewrites, collectives with bytes, fallbacks.

    Needs no processes; the model runs once, on one device. A program that is tensor-parallel already needs its groups:
    of processes, all of which ask, or of the "fake" backend; the report then has a line for each of its layers. With a
    `mesh` that has an axis for its sequence too, the ranks of that axis count, and not `sp`. passes: show every pass,
    with its order's words, rewrites, nodes and seconds. config: the fields of SPConfig, and `kwargs`, a dict of keyword
    arguments of the model. Raises SpError as the backend would.
    """
    report = _each_graph(model, args, sp, config, None)
    report.show_passes = passes
    return report


def verify(model: Callable[..., Any], *args: Any, sp: int = 2, **config: Any) -> Report:
    """Run `model(*args)` on `sp` simulated ranks against one device, forward and backward.

    The report's `errors` holds the largest relative error of every result and every gradient over the ranks; a random
    model (dropout) is compared as drawn, so expect its errors to be large. config: as for `explain`.
    """

    for name in ("inputs", "outputs", "param_grads"):
        if config.get(name, default := getattr(SPConfig, name)) != default:
            raise SpError(f"verify compares whole results and gradients, so it needs {name}={default!r}")

    def compare(gm: GraphModule, local: GraphModule, report: Report, inputs: Sequence[Any]) -> None:
        reference = _run(gm, inputs)
        for rank in run_ranks(sp, lambda _: _run(local, inputs)):
            report.errors = _worst(report.errors, _errors(local, reference, rank))

    return _each_graph(model, args, sp, config, compare)


def _each_graph(
    model: Callable[..., Any], args: Any, sp: int, config: dict[str, Any], visit: Callable[..., None] | None
) -> Report:
    """Lower every graph that Dynamo finds in the model, and merge the reports.

    visit: what to do with each, lowered for `sp` simulated ranks; if nothing, tensor-parallel programs are lowered for
    the ranks of their mesh.
    """
    kwargs = config.pop("kwargs", {})
    options = SPConfig.of(config)
    total = Report(sp)
    failure: list[SpError] = []

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            others = groups_of(gm, example_inputs)
            splits = bool(others) and splits_sequence(options.mesh, options.mesh_dim, others)
            sequence = [resolve(options.mesh, options.mesh_dim)] if splits else []
            joint = _joint(gm, example_inputs, options, others, sequence)
            if joint is not None and not splits:
                joint.place(())
                total.merge(_scattered(gm, example_inputs, joint))
                return gm.forward
            if runs_as_written(gm, example_inputs, vars(options)):
                total.add([note()])
                return gm.forward
            if joint is not None and visit is None:
                local, report = lower(gm, example_inputs, options, sequence[0], None, joint.place(sequence))
                total.n = sequence[0].n
                report.merge(_scattered(local, example_inputs, joint))
            else:
                local, report = lower(gm, example_inputs, options, Ranks(sp, GROUP))
        except SpError as error:
            failure.append(error)
            return gm.forward

        def call(*inputs: Any) -> Any:
            if visit is not None:
                visit(gm, local, report, inputs)
            total.merge(report)
            return gm.forward(*inputs)

        return call

    _compat.forget_compiled()
    with _restored_buffers(model):
        torch.compile(model, backend=backend)(*args, **kwargs)
    _compat.forget_compiled()
    if failure:
        raise failure[0]
    return total


def _joint(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: SPConfig,
    groups: Sequence[Ranks],
    sequence: Sequence[Ranks],
) -> JointPasses | None:
    """The passes over a tensor-parallel program's joint graph; its ranks, if there are any, ask together."""
    talk = Lockstep(questions(groups, sequence))
    joint = joint_passes(gm, example_inputs, groups, talk, vars(options))
    if joint is not None:
        joint.configure(options)
        joint.decompose = False
    return joint


def _scattered(gm: GraphModule, example_inputs: Sequence[Any], joint: JointPasses) -> Report:
    """What becomes of a tensor-parallel program, compiled and not run."""
    _compat.joint_compiler("aot_eager", joint, None)(gm, example_inputs)
    return joint.report


@contextmanager
def _restored_buffers(model: Callable[..., Any]) -> Iterator[None]:
    """Running the model is our doing: counters and running averages are put back."""
    buffers = list(model.buffers()) if isinstance(model, torch.nn.Module) else []
    kept = [b.detach().clone() for b in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, kept):
                buffer.copy_(value)


def _run(gm: GraphModule, inputs: Sequence[Any]) -> tuple[list[Any], list[Tensor | None], dict[int, Tensor]]:
    """Results and gradients of a graph for fresh leaves; the cotangents are fixed, so that runs can be compared."""
    leaves = [_leaf(x) for x in inputs]
    with torch.enable_grad():
        results = gm.forward(*leaves)
    wanted = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    outs = [y for y in results if isinstance(y, Tensor) and y.requires_grad]
    grads: list[Tensor | None] = [None] * len(wanted)
    if outs and wanted:
        grads = list(torch.autograd.grad(outs, wanted, [_cotangent(y) for y in outs], allow_unused=True))
    written = {i: x for i, x in enumerate(leaves) if isinstance(x, Tensor) and _compat.version_of(x)}
    return [y.detach() if isinstance(y, Tensor) else y for y in results], grads, written


def _leaf(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return x.detach().clone().requires_grad_(x.requires_grad)


def _cotangent(y: Tensor) -> Tensor:
    """Ones for a scalar (a loss), else fixed pseudo-random numbers."""
    if y.numel() == 1:
        return torch.ones_like(y)
    index = torch.arange(y.numel(), device=y.device, dtype=torch.float64)
    return torch.sin(index * 12.9898).view(y.shape).to(y.dtype)


def _errors(gm: GraphModule, reference: Any, found: Any) -> list[tuple[str, float]]:
    (results, grads, state), (here, here_grads, here_state) = reference, found
    names = [n.name for n in gm.graph.find_nodes(op="placeholder") if record(n).requires_grad]
    # A gradient that is zero but for rounding (a key's bias) is measured against the largest one.
    floor = max(
        (g.abs().max().item() * _rounding(g) for g in grads if g is not None and g.numel()), default=0.0
    )
    rows = [
        (f"result {i}", _error(a, b)) for i, (a, b) in enumerate(zip(results, here)) if isinstance(a, Tensor)
    ]
    rows += [(f"mutated input {i}", _error(a, here_state[i])) for i, a in state.items()]
    rows += [(f"gradient of {name}", _error(a, b, floor)) for name, a, b in zip(names, grads, here_grads)]
    return rows


def _rounding(x: Tensor) -> float:
    return max(ROUNDING, torch.finfo(x.dtype).eps ** 0.5)


def _error(expected: Tensor | None, found: Tensor | None, floor: float = 0.0) -> float:
    if expected is None or found is None:
        missing = found if expected is None else expected
        return 0.0 if missing is None or not missing.any() else float("inf")
    if expected.shape != found.shape:
        return float("inf")
    if not expected.is_floating_point() and not expected.is_complex():
        return 0.0 if torch.equal(expected, found) else float("inf")
    alike = (expected == found) | (expected.isnan() & found.isnan())  # NaN and inf where one device has them
    if alike.all():
        return 0.0
    worst = (expected - found)[~alike].abs().max().item()
    scale = max(
        expected[expected.isfinite()].abs().max().item() if expected.isfinite().any() else 0.0, floor, 1e-30
    )
    return worst / scale if worst == worst else float("inf")


def _worst(old: list[tuple[str, float]], new: list[tuple[str, float]]) -> list[tuple[str, float]]:
    if not old:
        return new
    return [(name, max(a, b)) for (name, a), (_, b) in zip(old, new)]
