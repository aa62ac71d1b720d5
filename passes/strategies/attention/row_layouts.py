"""The orders in which a whole program may keep its sequence: as it is written, zigzag, or dealt to ranks when it runs.

    layout="auto"    as written; zigzag where nothing else depends on the order; dealt where, moreover, masks say which
                     documents there are, and inputs come whole

Dealing takes the host some milliseconds of every graph (`seconds_to_deal`). Results that stay in shards go on in its
order; a graph that cannot keep that takes them whole (`seconds_to_undo`).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import GraphModule, Node

from sp_compile.lowering.base.errors import at, describe_node
from sp_compile.lowering.base.frames import CONTIGUOUS, DEALT, LAYOUTS, RowOrder, row_order
from sp_compile.passes.boundary.outputs import options_of_results, why_whole
from sp_compile.passes.context import Job, Refusal, RefusalKind, Settings
from sp_compile.passes.cost.attention_cost import Shape
from sp_compile.passes.graph.call import Call
from sp_compile.passes.graph.closure import reached
from sp_compile.passes.graph.mutation import is_pure
from sp_compile.passes.graph.sizes import bytes_now, size
from sp_compile.passes.localize.balance_layout import KEPT_ENDS, dealt_inputs
from sp_compile.passes.sharding.placement import Plan, Replicate, Shard

KEEP_DEALS = ("auto", DEALT.name)
"""The layouts with which a graph keeps the order of rows that an earlier one has dealt."""
ORDERED = ("whole", "no rule", "align", "halo")  # demands of what reads neighbours, as convolutions do
DEAL, DEAL_ROW = 3e-3, 5e-8
"""CPU seconds to deal a sequence to ranks, and of each of its positions: `benchmarks/plans.py`."""


def orders(shapes: Iterable[Shape], plan: Plan, job: Settings) -> list[RowOrder]:
    """Those that are tried, those first that are taken where two are as fast."""
    asked = LAYOUTS.get(job.layout)
    if job.ranks.n == 1:
        return [CONTIGUOUS]
    if dealt_inputs(job):
        return [DEALT]
    if asked is not None and asked.dealt and shapes:
        return [asked]
    for order in (asked, row_order(job.folds)):
        if order is not None and order.chunks > 1:
            return [order]
    if asked is not None:
        return [CONTIGUOUS]
    may = {"dealt": any(shape.documents for shape in shapes), "permuted": _permutable(plan, job)}
    return [order for order in LAYOUTS.values() if order.in_order or may["dealt" if order.dealt else "permuted"]]


def _permutable(plan: Plan, job: Settings) -> bool:
    """May the whole program keep its sequence in another order?"""
    given = not job.inputs and not _returns_shards(job)
    return given and not any(d.kind in ORDERED and d.node.op != "output" for d in plan.demands)


def _returns_shards(job: Settings) -> bool:
    return "local" in ([job.outputs] if isinstance(job.outputs, str) else job.outputs)


def seconds_to_deal(shapes: Iterable[Shape]) -> float:
    """Of one graph, on the host."""
    return DEAL + DEAL_ROW * max(shape.q_len for shape in shapes)


def why_not_dealt(nodes: Iterable[Node], plan: Plan, job: Settings) -> Refusal | None:
    """Return the reason against the balanced order, if there is one. nodes: the attention that would run in it."""
    given = bool(dealt_inputs(job))

    def refuse(code: str, text: str) -> Refusal:
        return Refusal(RefusalKind.ROW_ORDER, code, f"layout={job.layout!r}", text)

    if given and job.layout not in KEEP_DEALS:
        return refuse("SP414", "an earlier graph returned the rows in another order")
    if job.inputs and not given:
        return refuse("SP412", "inputs come in shards of another order")
    if _returns_shards(job):
        return refuse("SP413", "outputs='local' is not supported")
    for vector in (v for node in nodes for name in ("rows", "cols") for v in Call(node).get(name) or []):
        if not all(_at_hand(n, plan) for n in reached([vector], lambda n: n.all_input_nodes)):
            return refuse("SP411", f"{describe_node(vector)}, which a mask looks up, is computed from shards")
    kinds = ORDERED if job.layout == "auto" and not given else ("halo", "align")
    for demand in plan.demands:
        if demand.kind in ("scan", *kinds) and demand.node.op != "output":
            node = describe_node(demand.node)
            return refuse("SP411", f"{node} depends on the order of the sequence: {demand.why}")
    placed = [p for placements in plan.placements.values() for p in placements]
    frames = dict.fromkeys(p.frame for p in placed if isinstance(p, Shard))
    lengths = dict.fromkeys(frame.size for frame in frames)
    if len(lengths) > 1:
        several = " and of ".join(map(str, lengths))
        return refuse("SP411", f"the program has sequences of {several} positions")
    ends = {size(end) for frame in frames for end in (frame.start, frame.size - frame.start - frame.length)}
    if given and not all(isinstance(end, int) and end <= KEPT_ENDS for end in ends):
        return refuse("SP411", f"more than {KEPT_ENDS} positions at an end of the sequence are cut off")
    return None


def _at_hand(node: Node, plan: Plan) -> bool:
    """Has every rank the value, before it has anything in shards?"""
    whole = all(isinstance(p, Replicate) for p in plan.placements.get(node, ()))
    return whole and (node.op in ("placeholder", "get_attr") or is_pure(node))


def seconds_to_undo(gm: GraphModule, plan: Plan, job: Job) -> tuple[float, str]:
    """What it takes if the next graph cannot keep the order: results that stay in shards, and gradients, put together.

    And a word on which that are. A result with which the program itself goes on, as logits beside their loss, is not
    taken to be for another graph.
    """
    output, seconds, found = gm.graph.output_node(), 0.0, ""
    for node, words in options_of_results(output, job.outputs).items():
        value = node.meta["val"]
        stays = isinstance(plan.of(node), Shard) and not why_whole(value, words)
        if stays and (job.fragment or set(node.users) == {output}):
            ways = 2 if value.is_floating_point() else 1
            part = -(-bytes_now(value) // job.ranks.n)
            seconds += ways * job.machine_of(node).seconds("all_gather", part, job.ranks.n)
            found = found or f"{node.name} at {at(node)}, a result that stays in shards"
    return seconds, found
