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
from sp_compile.passes.graph.sizes import assume_large, exact_quotient, is_divisor, is_same_size, size_product
from sp_compile.passes.sharding.axes import Atom, Axes, name_axes
from sp_compile.passes.sharding.placement import Frame, PlacementPlan, Replicate, Shard
from sp_compile.passes.sharding.rule import lookup_rule, rule_of, transfer_of

from .varying import ScatterContext, find_varying_nodes, is_exchange, is_move_op, num_elements

sp = torch.ops.sp


def choose_scatter_dims(gm: GraphModule, context: ScatterContext) -> dict[Node, Shard | None]:
    """Choose the dim of rows along which the all_reduce of each linear would become a reduce_scatter.

    The rows are all dims but the last one, the features. An axis is a set of dims of several values with the same rows,
    such as the batch. All sums with an axis are scattered along it, so that residuals need no exchange. The axis that
    most sums have is chosen first, then that of the remaining sums.

    Args:
        gm: The tensor-parallel graph.
        context: The context, with the all_reduces in `summed`.

    Returns:
        The placement of each sum of a linear, or None for one without a suitable dim.
    """
    axes, n = name_axes(gm), context.ranks.n
    varying = find_varying_nodes(gm, axes, context.varying)  # the values that differ between the ranks
    # A sum of values that are equal on all ranks is no sum of partial products; an empty one moves nothing.
    sums = [node for node in context.summed if node.args[0] in varying and num_elements(node.meta["val"])]
    remaining = [node for node in sums if _is_linear_output(node.args[0])]
    chosen: dict[Node, Shard | None] = {}
    while remaining:
        axis = _best_scatter_axis(axes, remaining, n)
        # `Axes.shard` returns shards along the dims of `sequences`: here those of the chosen axis.
        axes.sequences = set() if axis is None else {axis}
        shards = {node: axes.shard(node) for node in remaining}
        scattered = {node: _block_shard(shard, n) for node, shard in shards.items() if shard is not None}
        chosen.update(scattered or dict.fromkeys(remaining))  # None for all if no sum has a shard
        remaining = [node for node in remaining if node not in chosen]
    return chosen


def _best_scatter_axis(axes: Axes, nodes: Sequence[Node], n: int) -> int | None:
    """Return the axis of rows along which most sums can be scattered, or None if there are no rows.

    An axis is a set of dims with the same rows, identified by `axes.find`. Of axes with equally many sums, one that n
    divides is preferred, then one that is the outermost dim, where shards are contiguous, then the longest.

    Args:
        axes: The axes of the graph.
        nodes: The sums (all_reduces) without a dim so far.
        n: The number of ranks.
    """
    # By axis, the number of sums that have a dim of rows along it.
    num_sums = Counter(axes.find(atom.name) for node in nodes for atom in {*_row_axes(axes, node)})
    position: dict[int, tuple[Atom, int]] = {}  # by axis, in its first sum: the dim, and its index among the rows
    for node in reversed(nodes):  # the first sum replaces the entries of later ones
        position |= {axes.find(atom.name): (atom, i) for i, atom in enumerate(_row_axes(axes, node))}

    def priority(axis: int) -> tuple[int, bool, bool, int]:
        """Return (number of sums, n divides the axis, n divides it and it is outermost, size): the largest is best."""
        atom, index = position[axis]  # index 0: the outermost dim of rows
        is_divided = is_divisor(n, atom.size)
        return num_sums[axis], is_divided, is_divided and index == 0, assume_large(atom.size)

    return max(sorted(num_sums), key=priority, default=None)


def _block_shard(shard: Shard, n: int) -> Shard:
    """Return the same shard in units of n blocks of rows, one for each rank, if n divides the rows.

    For 8 rows on 2 ranks, it has 2 positions with an inner factor of 4 rows. Ops that keep the blocks together, such as
    a view of batch * sequence rows as two dims, then keep the sharding.
    """
    rows = exact_quotient(shard.frame.size, n) if shard.frame.is_exact(n) else None
    if rows is None:
        return shard
    return replace(shard, frame=Frame.full(n), inner=size_product((rows, shard.inner)))


def _row_axes(axes: Axes, node: Node) -> Iterator[Atom]:
    """Yield the factors of the dims of rows in order: all dims longer than 1 but the last one, the features."""
    result_dims = axes.dims[node, 0]  # of result 0, the only one
    for dim in result_dims[:-1]:
        yield from (atom for atom in dim if not is_same_size(atom.size, 1))


def _is_linear_output(node: Node) -> bool:
    """Return True if the value is computed from a matrix product by ops that sum over no dim, as a view or a cast."""

    def operands_of(node: Node) -> Sequence[Node]:
        """Return the operands of an op that sums over no dim, or has no rule; () for products and other reductions."""
        call, rule = lookup_rule(node) or (None, None)
        if call is None or transfer_of(node.target) is not None:  # an input, or an exchange between ranks
            return ()
        # A factor of an operand that no result has (`vanishing`) is summed, except in a reshape, which regroups dims.
        return call.operands if rule is None or rule.reshapes or not rule.vanishing else ()

    rules = map(rule_of, reachable_set([node], operands_of))
    return any(rule is not None and rule.is_contraction for rule in rules)


def count_row_nodes(plan: PlacementPlan, start: Node) -> int:
    """Return the number of nodes that compute on shards of the rows of a scattered sum.

    With 0, the scatter is idle: the rows are gathered again before any op computes on them. The keys of `plan.wants`
    are the ops that run on shards; those that only move elements, such as views, are not counted (`is_move_op`).
    """
    reached = reachable_set([start], lambda node: [user for user in node.users if _is_on_rows(plan, user)])
    return sum(node in plan.wants and not is_move_op(node) for node in reached - {start})


def _is_on_rows(plan: PlacementPlan, node: Node) -> bool:
    """Return True if the node runs on shards, or is a getitem of an op on shards.

    `plan.wants` has the placements that a node needs of its operands, for nodes that run on shards.
    """
    if node not in plan.wants:  # a getitem has no such placements
        return node.op == "call_function" and any(isinstance(p, Shard) for p in plan.placements.get(node, ()))
    return any(isinstance(want, Shard) for want in plan.wants[node])


def common_inputs(plan: PlacementPlan) -> set[str]:
    """Return the names of the inputs that must be equal on all ranks; callers compare them at run time.

    A value computed from them is replicated and is combined with shards, so that each rank uses its part of it.
    """
    on_shards = [node for node, wants in plan.wants.items() if any(isinstance(want, Shard) for want in wants)]
    calls = [ruled_call.call for ruled_call in map(lookup_rule, on_shards) if ruled_call is not None]
    replicated = [x for call in calls for x in call.operands if isinstance(plan.of(x), Replicate)]
    ancestors = reachable_set(replicated, lambda node: () if is_exchange(node) else node.all_input_nodes)
    return {node.name for node in ancestors if node.op in ("placeholder", "get_attr")}
