"""Choose the all_reduces that become reduce_scatters, and their dims.

In a tensor-parallel layer `all_reduce(linear(x, w_shard))`, a rank may keep a part of the rows of the sum: along the
batch, the sequence, or both flattened. These are the axes of rows; the last dim has the features. A sum is such an
all_reduce. An axis is a set of dims of several tensors that have the same rows; an atom is its part of one dim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.graph.closure import reachable_set
from sp_compile.passes.graph.sizes import assume_large, divides, exact_quotient, is_same_size, size_product
from sp_compile.passes.sharding.axes import Atom, Axes, name_axes
from sp_compile.passes.sharding.placement import Frame, PlacementPlan, Replicate, Shard
from sp_compile.passes.sharding.rule import lookup_rule, transfer_of

from .varying import ScatterContext, find_varying_nodes, is_exchange, is_move_op, num_elements

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
    sums = [node for node in job.summed if node.args[0] in differ and num_elements(node.meta["val"])]
    remaining = [node for node in sums if _is_linear_output(node.args[0])]
    chosen: dict[Node, Shard | None] = {}
    while remaining:
        axis = _best_scatter_axis(axes, remaining, n)
        axes.sequences = set() if axis is None else {axis}
        shards = {node: axes.shard(node) for node in remaining}
        scattered = {node: _block_shard(shard, n) for node, shard in shards.items() if shard is not None}
        chosen.update(scattered or dict.fromkeys(remaining))
        remaining = [node for node in remaining if node not in chosen]
    return chosen


def _best_scatter_axis(axes: Axes, nodes: Sequence[Node], n: int) -> int | None:
    """Return the axis of rows along which most sums can be scattered, or None if there are no rows.

    Args:
        axes: The axes of the graph.
        nodes: The sums without a dim so far.
        n: The number of ranks.
    """
    # Atoms of equal axes have equal `axes.find(atom.name)`, the identifier of the axis.
    num_sums = Counter(axes.find(atom.name) for node in nodes for atom in {*_row_axes(axes, node)})
    position: dict[int, tuple[Atom, int]] = {}  # the atom of an axis in its first sum, and its index among the rows
    for node in reversed(nodes):
        position |= {axes.find(atom.name): (atom, i) for i, atom in enumerate(_row_axes(axes, node))}

    def priority(axis: int) -> tuple[int, bool, bool, int]:
        """Return the key of an axis: number of sums, divisible, divisible and outermost, size."""
        atom, index = position[axis]
        is_divided = divides(n, atom.size)
        return num_sums[axis], is_divided, is_divided and index == 0, assume_large(atom.size)

    return max(sorted(num_sums), key=priority, default=None)


def _block_shard(shard: Shard, n: int) -> Shard:
    """Return the shard as a sequence of n blocks of rows if n divides them, since blocks stay together."""
    rows = exact_quotient(shard.frame.size, n) if shard.frame.is_exact(n) else None
    return shard if rows is None else replace(shard, frame=Frame.full(n), inner=size_product((rows, shard.inner)))


def _row_axes(axes: Axes, node: Node) -> Iterator[Atom]:
    """Yield the axes of all dims but the last one, the features, in order."""
    for dim in axes.dims[node, 0][:-1]:
        yield from (a for a in dim if not is_same_size(a.size, 1))


def _is_linear_output(node: Node) -> bool:
    """Return True if the value is that of a linear: a product with a weight, up to bias, moves and casts."""

    def operands_of(node: Node) -> Sequence[Node]:
        """Return the operands of an op that moves, casts or adds values."""
        call, rule = lookup_rule(node) or (None, None)
        if call is None or transfer_of(node.target) is not None:
            return ()
        return call.operands if rule is None or rule.reshapes or not rule.vanishing else ()

    rules = [(lookup_rule(source) or (None, None))[1] for source in reachable_set([node], operands_of)]
    return any(rule is not None and rule.is_contraction for rule in rules)


def count_row_nodes(plan: PlacementPlan, start: Node) -> int:
    """Return the number of nodes that compute on the rows of a scattered value; 0 for an idle scatter."""
    reached = reachable_set([start], lambda node: [user for user in node.users if _runs_on_rows(plan, user)])
    return sum(node in plan.wants and not is_move_op(node) for node in reached - {start})


def _runs_on_rows(plan: PlacementPlan, node: Node) -> bool:
    """Return True if the node runs on shards, or is a getitem of an op on shards."""
    if node not in plan.wants:
        return node.op == "call_function" and any(isinstance(p, Shard) for p in plan.placements.get(node, ()))
    return any(isinstance(w, Shard) for w in plan.wants[node])


def common_inputs(plan: PlacementPlan) -> set[str]:
    """Return the names of the inputs that must be equal on all ranks, so that calls compare them.

    Values computed from them are combined with shards, row by row.
    """
    on_shards = [node for node, wants in plan.wants.items() if any(isinstance(want, Shard) for want in wants)]
    calls = [found[0] for found in map(lookup_rule, on_shards) if found is not None]
    replicated = [x for call in calls for x in call.operands if isinstance(plan.of(x), Replicate)]

    def operands_of(node: Node) -> Sequence[Node]:
        """Return the operands of a node that is not an exchange."""
        return () if is_exchange(node) else node.all_input_nodes

    return {node.name for node in reachable_set(replicated, operands_of) if node.op in ("placeholder", "get_attr")}
