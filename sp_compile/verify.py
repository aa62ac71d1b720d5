"""`explain` and `verify`: what would be done to a model, and whether it is right, with no processes and no GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from sp_compile.graph.record import record
from sp_compile.lowering.simulate import GROUP, run_ranks
from sp_compile.passes.job import Note
from sp_compile.passes.report import Report
from sp_compile.spmd.session import Session

from . import _compat
from .backend import NO_PLACE, Lowered, compile_local, lower
from .config import Ranks, SPConfig
from .errors import SpError

ROUNDING = 1e-6  # of the largest gradient, in float64; the square root of the precision of smaller types


def explain(
    model: Callable[..., Any], *args: Any, sp: int | None = None, passes: bool = False, **config: Any
) -> Report:
    """What `backend="sp"` would do to `model(*args)` on `sp` ranks: rewrites, collectives with bytes, fallbacks.

    Needs no processes; the model runs once, on one device. A program that is tensor-parallel already needs its groups:
    of processes, all of which ask, or of the "fake" backend; the report then has a line for each of its layers.
    sp: how many ranks share the sequence; 2, or as many as a `mesh` has along the axis for it. passes: show every pass
    that ran, with its order's words, rewrites, nodes and seconds. config: the fields of SPConfig, and `kwargs`, a dict
    of keyword arguments of the model. Raises SpError as the backend would, and for an option that has no effect on a
    report.
    """
    report = _each_graph("explain", IN_A_LOOK, model, args, sp, config, None)
    report.show_passes = passes
    return report


def verify(model: Callable[..., Any], *args: Any, sp: int | None = None, **config: Any) -> Report:
    """Run `model(*args)` on `sp` simulated ranks against one device, forward and backward.

    The report's `errors` holds the largest relative error of every result and every gradient over the ranks; a random
    model (dropout) is compared as drawn, so expect its errors to be large. sp, config: as for `explain`.
    """

    def compare(gm: GraphModule, lowered: Lowered, inputs: Sequence[Any]) -> None:
        reference = _run(gm, inputs)
        for rank in run_ranks(lowered.ranks.n, lambda _: _run(lowered.graph, inputs)):
            new = _errors(lowered.graph, reference, rank)
            old = lowered.report.errors or new
            lowered.report.errors = [(name, max(a, b)) for (name, a), (_, b) in zip(old, new)]

    return _each_graph("verify", IN_A_COMPARISON, model, args, sp, config, compare)


_WHOLE = "compares whole results and gradients: leave it out"
IN_A_LOOK = {
    "activation_memory_budget": "says nothing of what is kept for a backward: leave it out",
    "check_every": "has one process, with nobody to compare with: leave it out",
}
IN_A_COMPARISON = {**IN_A_LOOK, "inputs": _WHOLE, "outputs": _WHOLE, "param_grads": _WHOLE}
"""Options that `explain` and `verify` refuse, and why."""


def _each_graph(
    entry: str,
    refused: Mapping[str, str],
    model: Callable[..., Any],
    args: Any,
    sp: int | None,
    config: dict[str, Any],
    compare: Callable[..., None] | None,
) -> Report:
    """Lower every graph that Dynamo finds in the model, and merge the reports.

    compare: what to do with each that was split, over simulated ranks; None: the ranks of a mesh are taken as they are.
    """
    kwargs = config.pop("kwargs", {})
    options = SPConfig.of(config)
    options.refuse(entry, **refused)
    if sp is not None and sp < 1:
        raise SpError(f"sp={sp}: expected a number of ranks, 1 or more")
    if options.has_place:
        options = replace(options, compiler="aot_eager")
    total = Report(2 if sp is None else sp)
    failure: list[SpError] = []

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            session = Session(gm, example_inputs, vars(options), measures=False)
            if session.splits:
                total.n = _look(session, options, sp, simulate=compare is not None)
            lowered = lower(gm, example_inputs, vars(options), session)
            if lowered.joint is None and "compiler" in config:
                named = f"compiler={config['compiler']!r}"
                raise SpError(f"{named}: {entry} compiles nothing of a program without exchanges: leave it out")
            _joint_report(lowered, example_inputs)
        except SpError as error:
            failure.append(error)
            return gm.forward

        def call(*inputs: Any) -> Any:
            if compare is not None and session.split:
                compare(gm, lowered, inputs)
            total.merge(lowered.report)
            return gm.forward(*inputs)

        return call

    torch.compiler.reset()
    with _restored_buffers(model):
        torch.compile(model, backend=backend)(*args, **kwargs)
    torch.compiler.reset()
    if failure:
        raise failure[0]
    return total


def _look(session: Session, options: SPConfig, sp: int | None, simulate: bool) -> int:
    """Set the ranks of the sequence for a look without processes; their number."""
    ranks = session.ranks
    if options.mesh is not None and session.problem is None and sp not in (None, ranks.n):
        raise SpError(f"sp={sp}: the mesh has {ranks.n} ranks for the sequence; give one of them")
    if options.mesh is None:
        session.ranks = Ranks(2 if sp is None else sp, GROUP)
    elif simulate:
        session.ranks = replace(ranks, group=GROUP)
    return session.ranks.n


def _joint_report(lowered: Lowered, example_inputs: Sequence[Any]) -> None:
    """Add to the report what becomes of a tensor-parallel program's layers and collectives: compiled and not run."""
    if lowered.joint is None:
        return
    if lowered.config.has_place:
        compile_local(lowered, example_inputs)
        lowered.report.merge(lowered.joint.report)
    else:
        why = NO_PLACE.format(lowered.config.compiler)
        lowered.report.add([Note("not sequence_parallel_linear", "graph", "the whole graph", why)])


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
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs]
    with torch.enable_grad():
        results = gm.forward(*leaves)
    wanted = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    outs = [y for y in results if isinstance(y, Tensor) and y.requires_grad]
    grads: list[Tensor | None] = [None] * len(wanted)
    if outs and wanted:
        grads = list(torch.autograd.grad(outs, wanted, [_cotangent(y) for y in outs], allow_unused=True))
    written = {i: x for i, x in enumerate(leaves) if isinstance(x, Tensor) and _compat.version_of(x)}
    return [y.detach() if isinstance(y, Tensor) else y for y in results], grads, written


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
    known = [g for g in grads if g is not None and g.numel()]
    floor = max((g.abs().max().item() * max(ROUNDING, torch.finfo(g.dtype).eps ** 0.5) for g in known), default=0.0)
    rows = [(f"result {i}", _error(a, b)) for i, (a, b) in enumerate(zip(results, here)) if isinstance(a, Tensor)]
    rows += [(f"mutated input {i}", _error(a, here_state[i])) for i, a in state.items()]
    rows += [(f"gradient of {name}", _error(a, b, floor)) for name, a, b in zip(names, grads, here_grads)]
    return rows


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
    scale = max(expected[expected.isfinite()].abs().max().item() if expected.isfinite().any() else 0.0, floor, 1e-30)
    return worst / scale if worst == worst else float("inf")
