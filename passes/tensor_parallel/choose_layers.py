"""Choose the all_reduces that become reduce_scatters, and their dims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.graph.closure import reachable_set
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.sizes import assume_large, divides, exact_quotient, is_same_size, size_product
from sp_compile.passes.sharding.axes import Atom, Axes, name_axes
from sp_compile.passes.sharding.placement import Frame, PlacementPlan, Replicate, Shard
from sp_compile.passes.sharding.rule import lookup_rule, transfer_of

from .varying import ScatterContext, find_varying_nodes, is_move_op, num_elements

sp = torch.ops.sp


def choose_scatter_dims(gm: GraphModule, job: ScatterContext) -> dict[Node, Shard | None]:
    """Choose the dim along which each linear's sum would be scattered.

    All sums that share an axis of rows are scattered along it, so that residuals need no exchange. The axis that most
    sums share is chosen. Of equals, one that n divides and that is outermost, where shards are contiguous; else the
    longest.

    Args:
        gm: The tensor-parallel graph.
        job: The context, with the all_reduces in `summed`.

    Returns:
        The placement of each sum of a linear, or None for one without a suitable dim.
    """
    axes, n = name_axes(gm), job.ranks.n
    differ = find_varying_nodes(gm, axes, job.varying)
    left = [
        n for n in job.summed if n.args[0] in differ and num_elements(n.meta["val"]) and _is_linear_output(n.args[0])
    ]
    chosen: dict[Node, Shard | None] = {}
    while left:
        best = _best_scatter_axis(axes, left, n)
        if best is None:
            return {**chosen, **dict.fromkeys(left)}
        axes.sequences = {best}
        found = {node: axes.shard(node) for node in left}
        cut = {node: _block_shard(shard, n) for node, shard in found.items() if shard is not None}
        chosen.update(cut or dict.fromkeys(left))
        left = [node for node in left if node not in chosen]
    return chosen


def _best_scatter_axis(axes: Axes, nodes: Sequence[Node], n: int) -> int | None:
    """Return the axis of rows to scatter along, or None if there are no rows."""
    votes = Counter(axes.find(a.name) for node in nodes for a in {*_row_axes(axes, node)})
    atoms = {axes.find(a.name): (a, i) for node in reversed(nodes) for i, a in enumerate(_row_axes(axes, node))}

    def merit(name: int) -> tuple[int, bool, bool, int]:
        """Return a key: votes, divisible, divisible and outermost, size."""
        atom, place = atoms[name]
        divided = divides(n, atom.size)
        return votes[name], divided, divided and place == 0, assume_large(atom.size)

    return max(sorted(votes), key=merit, default=None)


def _block_shard(shard: Shard, n: int) -> Shard:
    """Return the shard as n blocks of rows if n divides the rows; the structure of a block is irrelevant."""
    rows = exact_quotient(shard.frame.size, n) if shard.frame.is_exact(n) else None
    return shard if rows is None else replace(shard, frame=Frame.full(n), inner=size_product((rows, shard.inner)))


def _row_axes(axes: Axes, node: Node) -> Iterator[Atom]:
    """Yield the axes of all dims but the last one, the features, in order."""
    for dim in axes.dims[node, 0][:-1]:
        yield from (a for a in dim if not is_same_size(a.size, 1))


def _is_linear_output(node: Node) -> bool:
    """Return True if the value is a product with a weight, up to a bias, moves and casts."""

    def operands_of(node: Node) -> Sequence[Node]:
        """Return the operands of an op that moves, casts or adds values."""
        found = lookup_rule(node)
        if found is None or transfer_of(node.target) is not None:
            return ()
        call, rule = found
        return call.operands if rule is None or rule.reshapes or not rule.vanishing else ()

    rules = [found[1] for source in reachable_set([node], operands_of) if (found := lookup_rule(source)) is not None]
    return any(rule is not None and rule.is_contraction for rule in rules)


def count_row_nodes(plan: PlacementPlan, start: Node) -> int:
    """Return the number of nodes that compute on the rows of a scattered value."""
    reached = reachable_set([start], lambda node: [user for user in node.users if _runs_on_rows(plan, user)])
    return sum(node in plan.wants and not is_move_op(node) for node in reached - {start})


def _runs_on_rows(plan: PlacementPlan, node: Node) -> bool:
    if node not in plan.wants:
        return node.op == "call_function" and any(isinstance(p, Shard) for p in plan.placements.get(node, ()))
    return any(isinstance(w, Shard) for w in plan.wants[node])


def common_inputs(plan: PlacementPlan) -> set[str]:
    """Return the names of the inputs that must be equal on all ranks.

    Values computed from them are combined with shards, row by row.
    """
    full = [
        operand
        for node, wants in plan.wants.items()
        if any(isinstance(w, Shard) for w in wants) and (found := lookup_rule(node)) is not None
        for operand in found[0].operands
        if isinstance(plan.of(operand), Replicate)
    ]

    def operands_of(node: Node) -> Sequence[Node]:
        """Return the operands of a node that is not an exchange."""
        exchanged = node_info(node).result is not None or transfer_of(node.target) is not None
        return () if exchanged else node.all_input_nodes

    return {n.name for n in reachable_set(full, operands_of) if n.op in ("placeholder", "get_attr")}
