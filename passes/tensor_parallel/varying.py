"""Mark the results of collectives in a tensor-parallel graph, and find values that differ by rank.

Placements on the axis of one process group: the result of an all_reduce or all_gather is replicated; values computed
from a sharded weight differ by rank (Varying). All other placements follow from the inputs. Weights are not matched
by name or shape. A matrix that multiplies tokens in a contraction is assumed to be sharded. It is not if its
values and its gradient are known to be equal on all ranks, since an optimizer step then keeps them equal.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
from sp_compile.passes.propagate import propagate
from sp_compile.passes.sharding.axes import Axes, name_axes
from sp_compile.passes.sharding.matchers import skip_ops
from sp_compile.passes.sharding.placement import REPLICATE, VARYING, Placement, PlacementPlan, Shard
from sp_compile.passes.sharding.rule import BoundRule, cache_lookups, lookup_rule, transfer_of

c10d, sp = torch.ops._c10d_functional, torch.ops.sp
REPLICATED_RESULTS = ("all_reduce", "all_gather_into_tensor", "broadcast")
SYMBOL_REASON = (torch.SymInt, torch.SymFloat, torch.SymBool)
# Draws do not change, and without autograd a gathered value suits every use.
IGNORED_OPS = ("draw", "invariant")


@dataclass(frozen=True)
class LinearLayer:
    """The mode of one all_reduce of the program: a row of `explain`'s table."""

    node: str  # name of the all_reduce
    where: str  # the user's line
    mode: str  # "scattered" (rows / n up to the next gather) or "full"
    shape: tuple[object, ...]
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
    def find_scattered(self) -> list[Node]:
        """Return the nodes of the scattered layers."""
        return [node for node, layer in self.layers.items() if layer.mode == "scattered"]

    @cache_lookups()
    def analyze(self, gm: GraphModule) -> tuple[Axes, PlacementPlan]:
        """Return the axes and the placement of every value, with the scattered ones as they are."""
        axes = name_axes(gm)
        inputs = dict.fromkeys(self.varying, VARYING)
        plan = propagate(gm, axes, self.ranks.n, inputs, begin=False, declines=decline_product)
        plan.demands = [d for d in plan.demands if d.kind not in IGNORED_OPS]
        return axes, plan


def decline_product(call: OpCall, rule: BoundRule | None, have: Sequence[Placement]) -> str | None:
    """Return the reason for which a product should run on all rows, or None.

    Its operands are then fewer bytes to gather than its result is to exchange: a result on shards may have to be
    gathered later, and a sum over rows is all-reduced, which is twice its bytes.
    """
    if rule is None:
        return None
    if rule.vanishing and all(is_same_size(size_product(shape), 1) for shape in call.result_shapes()):
        return "the result of the last layer is reduced to one number, so it has no rows to scatter"
    if not rule.is_contraction:
        return None
    shards = {i: p for i, p in enumerate(have) if isinstance(p, Shard)}
    read = sum(num_elements(call.operands[i].meta["val"]) for i in shards)
    created = sum(map(num_elements, call.results()))
    lost = any(rule.local_part(rule.operands[i], p)[0] in rule.vanishing for i, p in shards.items())
    if (2 * created if lost else created) > read:
        return "its operands are smaller to gather than its result would be to " + ("sum" if lost else "gather")
    return None


def num_elements(value: torch.Tensor) -> int:
    """Return the number of elements, with typical sizes for symbols."""
    return assume_large(size_product(as_sizes(value.shape)))


def find_reductions(gm: GraphModule, group: str) -> list[Node]:
    """Return every all_reduce(sum) over the group whose only user is a wait."""
    found = gm.graph.find_nodes(op="call_function", target=c10d.all_reduce.default)
    return [n for n in found if exchange_group(n) == group and n.args[1] == "sum" and find_wait(n) is not None]


def find_wait(node: Node) -> Node | None:
    """Return the wait that is the node's only user, or None."""
    users = list(node.users)
    alone = len(users) == 1 and users[0].target is c10d.wait_tensor.default
    return users[0] if alone else None


class MarkVarying(Pass):
    """Pass that marks the placements of collectives and of varying values, and finds varying inputs."""

    requires = frozenset({"captured", "no overwrites"})
    provides = frozenset({"known differences"})

    def apply(self, gm: GraphModule, job: ScatterContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        mark_collectives(gm, job.ranks.group, job.facts.grid)
        mark_numbers(gm, job.facts)
        for node in gm.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                set_node_info(node, requires_grad=False)
        job.varying = varying_inputs(gm, name_axes(gm), job.summed, job.facts)
        return 0


def mark_collectives(gm: GraphModule, group: str, grid: GroupGrid | None = None) -> None:
    """Mark the placement of each collective's result; propagation then gathers its sharded operands.

    Args:
        gm: The graph; edited in place.
        group: The group's name.
        grid: The arrangement of the other groups; None if they are the axes of a mesh.
    """
    for node in gm.graph.nodes:
        node.meta.setdefault("val", None)  # AOTAutograd's assertions have none
        over = exchange_group(node) if namespace_of(node.target) == c10d.name else None
        left: Placement | None = None
        if over is not None:
            is_full = node.target.__name__.partition(".")[0] in REPLICATED_RESULTS
            if over.partition("/")[0] == group:
                left = REPLICATE if over == group and is_full else VARYING
            elif grid is not None:
                left = grid.placement_after(over, is_full)
        elif node.target is sp.rank.default:
            left = None if grid is not None and node.args[0] in grid.level else VARYING
        if left is not None:
            set_node_info(node, result=left)


def mark_numbers(gm: GraphModule, facts: InputFacts) -> None:
    """Mark values as varying that depend on a scalar which differs between ranks."""
    own: set[Node] = set()
    for node in gm.graph.nodes:
        if node.name in facts.differing or any(i in own for i in node.all_input_nodes):
            value = node.meta.get("val")
            if node.op == "call_function" and not isinstance(value, SYMBOL_REASON):
                set_node_info(node, result=VARYING)
                if node.target is operator.getitem:
                    set_node_info(node.args[0], result=VARYING)  # the chosen piece determines the placement of all
            elif isinstance(value, SYMBOL_REASON):
                own.add(node)


def varying_inputs(gm: GraphModule, axes: Axes, summed: Iterable[Node], facts: InputFacts) -> set[Node]:
    """Return the inputs whose values differ by rank, or will differ after a training step."""
    reduced = list(summed)
    sources = {n.name: n for n in gm.graph.nodes if n.op in ("placeholder", "get_attr") and is_tensor(n)}
    known = {sources[name] for name in facts.differing if name in sources}
    tokens = {axes.find(a.name) for node in reduced for dim in axes.dims[node, 0][:-1] for a in dim}
    matrices = set(_weight_inputs(gm, axes, tokens))
    varying = _close_over_training(
        gm, axes, known | {m for m in matrices if not _remains_equal(m, facts)}, sources, facts
    )
    types = find_varying_nodes(gm, axes, varying)
    if any(r.args[0] in types for r in reduced):
        return varying
    parts = known | (matrices & _exchange_ancestors(gm, facts))  # equal by chance, or not compared
    return _close_over_training(gm, axes, parts, sources, facts)


def _exchange_ancestors(gm: GraphModule, facts: InputFacts) -> set[Node]:
    """Return the ancestors of the program's collectives, without those of its backward."""
    backward = reachable_set((n for n in gm.graph.nodes if n.name in facts.tangents), lambda n: n.users)
    exchanges = [n for n in gm.graph.nodes if _is_exchange(n) and n not in backward]
    return reachable_set(exchanges, lambda n: n.all_input_nodes)


def _remains_equal(matrix: Node, facts: InputFacts) -> bool:
    """Return True if the matrix is equal on all ranks, and has a gradient or is not constant."""
    equal = facts.equal is not None and matrix.name in facts.equal
    return equal and (matrix.name in facts.gradients or matrix.name not in facts.constants)


def _close_over_training(
    gm: GraphModule, axes: Axes, varying: set[Node], sources: Mapping[str, Node], facts: InputFacts
) -> set[Node]:
    """Add the inputs whose gradients differ by rank, and the gradients of outputs that differ.

    All other inputs are equal on all ranks and have equal gradients, so that an optimizer step keeps them equal.
    """
    while True:
        types = find_varying_nodes(gm, axes, varying)
        apart = {sources[name] for name, gradient in facts.gradients.items() if gradient in types}
        theirs = {sources[name] for name, results in facts.tangents.items() if any(r in types for r in results)}
        if (apart | theirs) <= varying:
            return varying
        varying = varying | apart | theirs


def _is_exchange(node: Node) -> bool:
    return node_info(node).result is not None or transfer_of(node.target) is not None


def find_varying_nodes(gm: GraphModule, axes: Axes, varying: Collection[Node]) -> set[Node]:
    """Return all values that differ by rank if the `varying` inputs do."""
    plan = propagate(gm, axes, 2, dict.fromkeys(varying, VARYING), begin=False)
    return {node for node, placements in plan.placements.items() if VARYING in placements}


def _weight_inputs(gm: GraphModule, axes: Axes, tokens: set[int]) -> Iterator[Node]:
    """Yield the inputs of contractions that have no token axis in any dim."""
    for node in gm.graph.nodes:
        found = lookup_rule(node)
        if found is not None and found[1] is not None and found[1].is_contraction:
            for operand in found[0].operands:
                source = before_moves(operand)
                if source.op in ("placeholder", "get_attr") and source.meta["val"].ndim > 1:
                    classes = {axes.find(a.name) for dim in axes.dims[source, 0] for a in dim}
                    if not classes & tokens:
                        yield source


def is_move_op(node: Node) -> bool:
    """Return True if the node only moves or casts the values of its one tensor operand."""
    found = lookup_rule(node)
    if found is None or len(found[0].operands) != 1:
        return False
    rule = found[1]
    return rule is not None and rule.lazy and not rule.spans


def before_moves(node: Node) -> Node:
    """Return the value of which this one is a view, permutation or cast."""
    return skip_ops(node, is_move_op)
