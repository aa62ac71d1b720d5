"""The passes, in order, over one captured graph; lints, re-analyses, times and records after every one."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from sp_compile.capture.capture import capture_export
from sp_compile.cost.decision import merged
from sp_compile.cost.exchanges import exchanges_of
from sp_compile.cost.machine import Machine
from sp_compile.graph.sizes import divides, same
from sp_compile.graph.strides import restore_strides
from sp_compile.lowering.simulate import GROUP
from sp_compile.passes.canonical.associative_scan import Trees
from sp_compile.passes.canonical.canonicalize import Canonicalize
from sp_compile.passes.localize.localize import localize
from sp_compile.passes.localize.prove import validate
from sp_compile.passes.rewrite import Note, Rewrite, Settings, analyse
from sp_compile.passes.strategies.attention.base import attention_passes
from sp_compile.passes.strategies.attention.choose import choose_attention
from sp_compile.passes.strategies.attention.expand_heads import ExpandHeads
from sp_compile.passes.strategies.draws import Draws
from sp_compile.passes.strategies.gather import Gather, Undo
from sp_compile.passes.strategies.local_scan import SlowScans
from sp_compile.passes.strategies.pick import Pick
from sp_compile.passes.strategies.reduce import Means, Reduce
from sp_compile.passes.strategies.scan import NestedScan, Scan
from sp_compile.passes.strategies.windows import Halo
from sp_compile.sharding.axes import Axes
from sp_compile.sharding.placement import Plan, Shard
from sp_compile.spmd.inputs import mark_across

from ._compat import argument_name, size_hint, trace_structured
from .config import Ranks, SPConfig, resolve
from .errors import SpError, at
from .explain import Report

log = logging.getLogger(__name__)

MAX_ROUNDS = 8  # every round discharges at least one demand of every kind it met; real models take two


def strategies() -> list[type[Rewrite]]:
    """Strategies first; what they leave is gathered. Each claims demands by kind and may be run alone, by hand."""
    return [Undo, NestedScan, Means, Pick, *attention_passes(), Scan, Halo, Reduce, Gather, Draws]


def run_pipeline(gm: GraphModule, job: Settings, fragment: bool = False) -> tuple[GraphModule, Report]:
    """Captured graph in the global view -> (graph of one rank, report).

    fragment: the graph is a piece of a model (a graph break), so it need not contain a sequence.
    Raises SpError when no sequence is found in a whole model, or when a pass refuses.
    """
    if job.ranks.n == 1:  # whatever way attention is asked to be split, it is not
        job = replace(job, attention="auto", layout="auto")
    report = Report(job.ranks.n)
    clock = _Clock(gm, report)
    axes, plan = _begin(gm, job, fragment, report, clock)
    chosen = choose_attention(gm, plan, job)
    report.attention = merged(chosen.decisions)
    if chosen.folds != job.folds:
        job = replace(job, folds=chosen.folds)
        axes, plan = analyse(gm, job)
    clock.lap("choose")
    axes, plan = _discharge(gm, job, axes, plan, clock)
    for last in (SlowScans(job), ExpandHeads(job)):
        if last.discharge(gm, plan):
            axes, plan = analyse(gm, job)
        report.add(last.notes)
    if not job.gather_outputs:
        _check_local_outputs(gm, plan, job.ranks.n)
    report.constraints = _constraints(gm, axes, plan, job.ranks.n)
    local = _localized(gm, plan, job, clock)
    report.exchanges = exchanges_of(local, job.ranks.n)
    report.sharded_outputs = [
        node.name for node in gm.graph.output_node().all_input_nodes if isinstance(plan.of(node), Shard)
    ]
    return local, report


def _begin(
    gm: GraphModule, job: Settings, fragment: bool, report: Report, clock: _Clock
) -> tuple[Axes, Plan]:
    """Canonicalize the graph, find its sequences and say of each input where it has them; refuse if there are none."""
    Canonicalize()(gm)
    if job.aligned is not None:
        mark_across(gm, job.aligned)
    clock.lap("canonicalize")
    axes, plan = analyse(gm, job)
    if _fix_short_lengths(gm, axes, job.ranks.n):
        axes, plan = analyse(gm, job)
    report.inputs = {
        argument_name(node): axes.sequence_dims(node)
        for node in gm.graph.find_nodes(op="placeholder")
        if axes.sequence_dims(node) and not node.meta.get("sp_param", False)
    }
    if not axes.sequences and job.ranks.n > 1:
        _no_sequence(gm, report, fragment)
    elif job.ranks.n > 1 and not any(isinstance(p, Shard) for ps in plan.placements.values() for p in ps):
        _nothing_sharded(job, report)
    clock.lap("propagate")
    return axes, plan


def _localized(gm: GraphModule, plan: Plan, job: Settings, clock: _Clock) -> GraphModule:
    """The checked graph of one rank."""
    local = localize(gm, plan, job)
    Trees(local).run()
    clock.lap("localize")
    validate(local, plan, job.ranks.n)
    restore_strides(local)
    local.graph.lint()
    clock.lap("validate")
    return local


def _discharge(gm: GraphModule, job: Settings, axes: Axes, plan: Plan, clock: _Clock) -> tuple[Axes, Plan]:
    """Run the strategies until no demand is left; the axes and the plan of the graph that they made."""
    for _ in range(MAX_ROUNDS):
        if not plan.demands:
            break
        for strategy in strategies():
            one = strategy(job)
            if one.discharge(gm, plan):
                axes, plan = analyse(gm, job)
            clock.report.add(one.notes)
            clock.lap(one.name)
    assert not plan.demands, f"demands that no pass discharged: {plan.demands}"
    return axes, plan


def parallelize(program: ExportedProgram | GraphModule, sp: int | None = None, **config: Any) -> GraphModule:
    """Every pass on an exported program: the module that each rank runs, with the program's calling convention.

    sp: the number of ranks, for a look or a simulation without processes; None takes config's mesh or the default
    group. config: the fields of SPConfig; seq_dims names inputs of the exported graph. The report is in
    `meta["sp_report"]`. Raises SpError as the backend would.
    """
    options = SPConfig(**config)
    gm = capture_export(program)
    job = Settings(
        resolve(options.mesh, options.mesh_dim) if sp is None else Ranks(sp, GROUP),
        seq_dims=None if isinstance(options.seq_dims, str) else options.seq_dims,
        gather_outputs=options.outputs == "gather",
        attention=options.attention,
        layout=options.layout,
        machine=_machine(options),
        fallback=options.fallback,
        param_grads=options.param_grads,
    )
    if options.inputs == "local":
        raise SpError(
            "inputs='local' is for torch.compile: an exported program has its sequence length already"
        )
    local, report = run_pipeline(gm, job)
    local.meta["sp_report"] = report
    return local


def _machine(options: SPConfig) -> Machine | None:
    """The constants that the user gave; whoever has processes measures them (backend.py)."""
    if options.cost is None:
        return None
    return Machine.of("cuda" if torch.cuda.is_available() else "cpu", options.cost)


def _fix_short_lengths(gm: GraphModule, axes: Axes, n: int) -> bool:
    """Make symbolic sequences of at most n positions constants: shapes of 1 are special to fake tensors."""
    fixed = False
    for node in gm.graph.find_nodes(op="placeholder"):
        for dim in axes.sequence_dims(node):
            extent = node.meta["val"].shape[dim]
            if n > 1 and isinstance(extent, torch.SymInt) and size_hint(extent) <= n:
                int(extent)  # a guard: another length is compiled anew
                fixed = True
    return fixed


def _check_local_outputs(gm: GraphModule, plan: Plan, n: int) -> None:
    for node in gm.graph.output_node().all_input_nodes:
        have = plan.of(node)
        if isinstance(have, Shard) and not (have.frame.exact(n) or _guard_divisible(node, have, n)):
            raise SpError(
                f"outputs='local': {node.name} at {at(node)} has {have.frame.length} of {have.frame.size} positions "
                f"on {n} ranks, so some rank's shard holds padding; use a length that the ranks divide, "
                "or outputs='gather'"
            )


def _guard_divisible(node: Node, have: Shard, n: int) -> bool:
    """For a symbolic length: does n divide it now? Asking makes it a guard, so another length is compiled anew."""
    length = node.meta["val"].shape[have.dim]
    whole = same(have.frame.start, 0) and same(have.frame.length, have.frame.size)
    plain = same(have.outer, 1) and same(have.inner, 1)
    return isinstance(length, torch.SymInt) and whole and plain and bool(length % n == 0)


def _constraints(gm: GraphModule, axes: Axes, plan: Plan, n: int) -> list[str]:
    """What the plan relies on: how sequences are cut, and what the ranks must divide."""
    out: dict[str, None] = {}
    for node in gm.graph.nodes:
        have = plan.of(node)
        if isinstance(have, Shard) and have.dim in axes.sequence_dims(node):
            size, local = have.frame.size, have.frame.local(n)
            padded = "" if divides(n, size) else f", padded to {n} * {local}"
            out[f"sequence of {size}: {local} positions a rank{padded}"] = None
        elif isinstance(have, Shard):
            out[f"{n} ranks divide the {have.frame.size} heads (dim {have.dim})"] = None
    return list(out)


def _nothing_sharded(job: Settings, report: Report) -> None:
    why = "no value has the sequence in exactly one dim of more than one position; every rank runs the whole"
    if job.fallback == "error":
        raise SpError(f"{why}. fallback='error' forbids that; name the sequence with seq_dims")
    report.add([Note("replicated", "graph", "the whole graph", why)])


def _no_sequence(gm: GraphModule, report: Report, fragment: bool) -> None:
    inputs = [n.name for n in gm.graph.find_nodes(op="placeholder") if not n.meta.get("sp_param", False)]
    if not fragment:
        raise SpError(
            "no sequence found: the model has no attention or scan whose dim could be followed to an input. "
            f"Name it: options={{'seq_dims': {{'<input>': <dim>}}}} with an input out of {inputs}"
        )
    where, why = "a piece between graph breaks", "it has no sequence; every rank runs it whole"
    report.add([Note("replicated", "graph", where, why)])


class _Clock:
    """Seconds per pass, and the graph after each, for `TORCH_LOGS=+sp_compile` and tlparse."""

    def __init__(self, gm: GraphModule, report: Report) -> None:
        self.gm, self.report, self.last = gm, report, time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.report.seconds[name] = self.report.seconds.get(name, 0.0) + now - self.last
        self.last = now
        log.debug("after %s: %d nodes", name, len(self.gm.graph.nodes))
        trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": f"sp_{name}", "encoding": "string"},
            payload_fn=lambda: self.gm.print_readable(print_output=False),
            expect_trace_id=False,
        )
