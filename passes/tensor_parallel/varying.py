"""Mark the results of collectives in a tensor-parallel graph, and find values that differ by rank.

A value is varying if it differs between the ranks of a group and is no shard of rows, such as x @ w_shard. Placements
on the axis of one process group: the result of an all_reduce or all_gather is replicated; values computed
from a sharded weight differ by rank (Varying). All other placements follow from the inputs. Weights are not matched
by name or shape. A matrix that multiplies tokens in a contraction is assumed to be sharded. It is not if its
values and its gradient are known to be equal on all ranks, since an optimizer step then keeps them equal.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.torch_compat import namespace_of
from sp_compile.passes.base import Pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.cost.group_names import GroupGrid, exchange_group
from sp_compile.passes.cost.input_facts import InputFacts
from sp_compile.passes.graph.call import OpCall, is_tensor
from sp_compile.passes.graph.closure import reachable_set
from sp_compile.passes.graph.node_info import node_info, set_node_info
from sp_compile.passes.graph.sizes import as_sizes, assume_large, is_same_size, size_product
from sp_compile.passes.propagation.propagate import propagate
from sp_compile.passes.sharding.axes import Axes, name_axes
from sp_compile.passes.sharding.matchers import skip_ops
from sp_compile.passes.sharding.placement import REPLICATE, VARYING, Placement, PlacementPlan, Shard
from sp_compile.passes.sharding.rule import BoundRule, cache_lookups, lookup_rule, transfer_of

c10d, sp = torch.ops._c10d_functional, torch.ops.sp
REPLICATED_RESULTS = ("all_reduce", "all_gather_into_tensor", "broadcast")
SYMBOL_TYPES = (torch.SymInt, torch.SymFloat, torch.SymBool)
# Demands that need no pass: draws do not change, and without autograd a gathered value suits every use.
IGNORED_DEMANDS = ("draw", "invariant")


@dataclass(frozen=True)
class LinearLayer:
    """The mode of one all_reduce of the program: a row of `explain`'s table."""

    node: str  # name of the all_reduce
    where: str  # the user's line
    mode: str  # "scattered" (rows / n up to the next gather) or "full"
    shape: tuple[object, ...]  # of the sum
    dim: int | None  # dim of the scatter
    ops: int  # number of nodes that run on its rows
    why: str = ""  # reason of the mode "full"


@dataclass
class ScatterContext(PassContext):
    """The context of the passes over one group, that of `ranks`, and their results for later passes."""

    facts: InputFacts = field(default_factory=InputFacts)  # about the inputs
    summed: list[Node] = field(default_factory=list)  # the program's all_reduces
    varying: set[Node] = field(default_factory=set)  # inputs whose values differ by rank
    layers: dict[Node, LinearLayer] = field(default_factory=dict)  # by the current node of each all_reduce
    gathered: dict[Node, Node] = field(default_factory=dict)  # the gathered values, by sharded value

    @property
    def scattered_nodes(self) -> list[Node]:
        """Return the nodes of the scattered layers."""
        return [node for node, layer in self.layers.items() if layer.mode == "scattered"]

    @cache_lookups()
    def analyze(self, gm: GraphModule) -> tuple[Axes, PlacementPlan]:
        """Return the axes and the placement of every value; only the results of reduce_scatters start shards.

        Inputs are replicated or varying, so that none of their dims is sharded as a sequence (`starts_sequences`).
        """
        axes = name_axes(gm)
        inputs = dict.fromkeys(self.varying, VARYING)
        plan = propagate(gm, axes, self.ranks.n, inputs=inputs, starts_sequences=False, declines=decline_shards)
        plan.demands = [d for d in plan.demands if d.kind not in IGNORED_DEMANDS]
        return axes, plan


def decline_shards(call: OpCall, rule: BoundRule | None, have: Sequence[Placement]) -> str | None:
    """Return the reason why a call should run on gathered operands, although its rule allows shards; None otherwise.

    On shards, the result of a product may have to be gathered later, or all-reduced (twice its bytes) if it sums over
    the sharded dim. Shards are declined if this is more than a gather of the operands. They are declined, too, for a
    sum or mean of all elements, in practice the end of a loss, whose result has no rows.

    Args:
        call: The call of a node.
        rule: The rule of its op, if any.
        have: The placements of its operands.
    """
    if rule is None:
        return None
    if rule.vanishing and all(is_same_size(size_product(shape), 1) for shape in call.result_shapes()):
        return "the result of the last layer is reduced to one number, so it has no rows to scatter"
    if not rule.is_contraction:
        return None
    shards = {i: placement for i, placement in enumerate(have) if isinstance(placement, Shard)}
    operand_elements = sum(num_elements(call.operands[i].meta["val"]) for i in shards)
    result_elements = sum(map(num_elements, call.results()))
    # (factor of the rule that is sharded, the shard of this factor) of each sharded operand
    parts = [rule.local_part(rule.operands[i], shard) for i, shard in shards.items()]
    # A vanishing factor is in no result: the product sums over the sharded dim. An all-reduce sends its bytes twice.
    is_summed = any(factor in rule.vanishing for factor, _ in parts)
    exchange, times = ("sum", 2) if is_summed else ("gather", 1)
    if times * result_elements > operand_elements:
        return f"its operands are smaller to gather than its result would be to {exchange}"
    return None


def num_elements(value: torch.Tensor) -> int:
    """Return the number of elements, with a large number for each symbolic size, to compare the bytes of exchanges."""
    return assume_large(size_product(as_sizes(value.shape)))


def find_reductions(gm: GraphModule, group: str) -> list[Node]:
    """Return the all_reduces of sums over the group whose only user is a wait, so that they can be scattered."""
    reductions = gm.graph.find_nodes(op="call_function", target=c10d.all_reduce.default)
    sums = [node for node in reductions if node.args[1] == "sum" and exchange_group(node) == group]
    return [node for node in sums if find_wait(node) is not None]


def find_wait(node: Node) -> Node | None:
    """Return the wait_tensor that is the only user of a collective, or None."""
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is c10d.wait_tensor.default else None


class MarkVarying(Pass):
    """Pass that marks the placements of collectives and of varying values, and finds varying inputs."""

    requires = frozenset({"captured", "no overwrites"})
    provides = frozenset({"known differences"})

    def apply(self, gm: GraphModule, context: ScatterContext) -> int:
        """Mark the placements of collectives' results, and set `context.varying`, the inputs that differ by rank.

        `context.summed` has the program's all_reduces, before which values are assumed to differ by rank. Return 0, as
        no op is changed.
        """
        mark_collectives(gm, context.ranks.group, context.facts.grid)
        mark_readers_of_varying_scalars(gm, context.facts)
        for node in gm.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                # No gradient leaves the graph through autograd: a joint graph computes those of its inputs by nodes.
                set_node_info(node, requires_grad=False)
        context.varying = varying_inputs(gm, name_axes(gm), context.summed, context.facts)
        return 0


def mark_collectives(gm: GraphModule, group: str, grid: GroupGrid | None = None) -> None:
    """Mark the placement of the result of each collective of the program, with respect to one group of ranks.

    The result of an all_reduce over this group is replicated, that of an all_to_all varies between its ranks. Later
    passes gather the sharded operands of marked nodes.

    Args:
        gm: The graph; edited in place.
        group: The group's name.
        grid: The arrangement of the other groups. If it is None, it is unknown: the collectives of other groups are not
            marked, and every number of a rank is varying.
    """
    for node in gm.graph.nodes:
        node.meta.setdefault("val", None)  # AOTAutograd's assertions have none
        op_group = exchange_group(node) if namespace_of(node.target) == c10d.name else None
        result: Placement | None = None
        if op_group is not None:
            is_replicating = node.target.__name__.partition(".")[0] in REPLICATED_RESULTS
            if op_group.partition("/")[0] == group:  # this group, or a part of it, "group/part"
                result = REPLICATE if op_group == group and is_replicating else VARYING
            elif grid is not None:
                result = grid.placement_after(op_group, is_replicating)
        elif node.target is sp.rank.default:
            # A rank along another axis of the grid is equal on all ranks of this group.
            is_equal = grid is not None and node.args[0] in grid.level
            result = None if is_equal else VARYING
        if result is not None:
            set_node_info(node, result=result)


def mark_readers_of_varying_scalars(gm: GraphModule, facts: InputFacts) -> None:
    """Mark results as varying if their ops read a scalar that differs between ranks, such as the offset of a slice.

    Args:
        gm: The graph; edited in place.
        facts: Facts about the inputs, with the names of those that differ.
    """
    varying_scalars: set[Node] = set()  # inputs, and scalars computed from them
    for node in gm.graph.nodes:
        if node.name not in facts.differing and varying_scalars.isdisjoint(node.all_input_nodes):
            continue
        if isinstance(node.meta.get("val"), SYMBOL_TYPES):
            varying_scalars.add(node)
        elif node.op == "call_function":
            set_node_info(node, result=VARYING)
            if node.target is operator.getitem:
                set_node_info(node.args[0], result=VARYING)  # each rank reads another one of its results


def varying_inputs(gm: GraphModule, axes: Axes, summed: Sequence[Node], facts: InputFacts) -> set[Node]:
    """Return the inputs whose values differ by rank, or will differ after a training step.

    Weights, matrices that multiply tokens, are assumed to be shards, unless it is known that they and their gradients
    are equal on all ranks.

    Args:
        gm: The graph.
        axes: The axes of the graph.
        summed: The program's all_reduces over the group.
        facts: Facts about the inputs.
    """
    inputs = {n.name: n for n in gm.graph.nodes if n.op in ("placeholder", "get_attr") and is_tensor(n)}
    known = {inputs[name] for name in facts.differing if name in inputs}
    # The dims of tokens are all dims of the sums but the last, the features. `axes` stores a dim as a tuple of atoms,
    # its factors, and `find` returns the same name for all dims with the same rows.
    token_axes = {axes.find(atom.name) for node in summed for dim in axes.dims[node, 0][:-1] for atom in dim}
    weights = set(_weight_inputs(gm, axes, token_axes))
    sharded = known | {weight for weight in weights if not _is_always_equal(weight, facts)}
    varying = _close_over_training(gm, axes, sharded, inputs, facts)
    varying_nodes = find_varying_nodes(gm, axes, varying)
    if any(node.args[0] in varying_nodes for node in summed):
        return varying
    # No all_reduce adds values that differ, although the program sums them: the shards of weights are equal by chance
    # (as zeros are), or were not compared. Then the weights from which collectives are computed must be shards.
    sharded = known | (weights & _exchange_ancestors(gm, facts))
    return _close_over_training(gm, axes, sharded, inputs, facts)


def _exchange_ancestors(gm: GraphModule, facts: InputFacts) -> set[Node]:
    """Return the nodes from which the collectives of the forward are computed.

    The backward of a joint graph is computed from its tangents, the inputs for gradients of outputs.
    """
    backward = reachable_set((n for n in gm.graph.nodes if n.name in facts.tangents), lambda n: n.users)
    exchanges = [n for n in gm.graph.nodes if is_exchange(n) and n not in backward]
    return reachable_set(exchanges, lambda n: n.all_input_nodes)


def _is_always_equal(matrix: Node, facts: InputFacts) -> bool:
    """Return True if a weight is known to be equal on all ranks, also after an optimizer step.

    Equal values prove nothing for a weight with one value for all elements, such as zeros: it may be a shard of a
    matrix of zeros, whose shards differ after an optimizer step. If the graph has the gradient of the weight, that
    gradient decides (`_close_over_training`).
    """
    is_equal = facts.equal is not None and matrix.name in facts.equal
    return is_equal and (matrix.name in facts.gradients or matrix.name not in facts.constants)


def _close_over_training(
    gm: GraphModule, axes: Axes, varying: set[Node], inputs: Mapping[str, Node], facts: InputFacts
) -> set[Node]:
    """Return the varying inputs, and those that vary because of them in training.

    These are parameters whose gradients vary, which an optimizer step makes different, and tangents (inputs for the
    gradients of outputs) of outputs that vary. All other inputs are equal on all ranks and remain so.

    Args:
        gm: The graph.
        axes: The axes of the graph.
        varying: The inputs that vary at first.
        inputs: All inputs by name.
        facts: Facts about the inputs: the nodes of gradients, and the outputs of tangents.
    """
    while True:
        nodes = find_varying_nodes(gm, axes, varying)
        trained = {inputs[name] for name, gradient in facts.gradients.items() if gradient in nodes}
        tangents = {inputs[name] for name, results in facts.tangents.items() if not nodes.isdisjoint(results)}
        if (trained | tangents) <= varying:
            return varying
        varying = varying | trained | tangents


def is_exchange(node: Node) -> bool:
    """Return True if the node is a collective: one of the program, which has a mark, or an sp:: exchange."""
    return node_info(node).result is not None or transfer_of(node.target) is not None


def find_varying_nodes(gm: GraphModule, axes: Axes, varying: Collection[Node]) -> set[Node]:
    """Return all nodes with results that differ by rank if the `varying` inputs do, by propagation."""
    inputs = dict.fromkeys(varying, VARYING)
    plan = propagate(gm, axes, n=2, inputs=inputs, starts_sequences=False)  # the result is equal for any n > 1
    return {node for node, placements in plan.placements.items() if VARYING in placements}


def _weight_inputs(gm: GraphModule, axes: Axes, token_axes: set[int]) -> Iterator[Node]:
    """Yield the weights: inputs of two or more dims that a product reads, also by views, and that have no tokens.

    Args:
        gm: The graph.
        axes: The axes of the graph.
        token_axes: The classes of dims of tokens (`Axes.find`).
    """
    for node in gm.graph.nodes:
        call, rule = lookup_rule(node) or (None, None)
        if call is None or rule is None or not rule.is_contraction:
            continue
        for source in (skip_ops(x, is_move_op) for x in call.operands):  # the value of which x is a view or cast
            if source.op in ("placeholder", "get_attr") and source.meta["val"].ndim > 1:
                matrix_axes = {axes.find(atom.name) for dim in axes.dims[source, 0] for atom in dim}
                if not matrix_axes & token_axes:
                    yield source


def is_move_op(node: Node) -> bool:
    """Return True if the node only moves or casts the values of its one tensor operand, without cutting it."""
    call, rule = lookup_rule(node) or (None, None)
    if call is None or rule is None:
        return False
    return len(call.operands) == 1 and rule.lazy and not rule.spans  # lazy: moves data only; spans: the pieces of a cut
