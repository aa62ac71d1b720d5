"""View a local graph as one of `tiles` ranks, so that the sharding rules apply to tiles.

A tile is a part of a rank's rows (tokens), as a rank's rows are a part of the sequence. The local graph is the program
of one rank. The view is a copy of it in which `TokenView.plan` places each value: rows, which a tile has a part of; a
sum over the rows, which tiles add up; or a replicated value. `to_local` and `to_view` map nodes from one to the other.

The plan of the global view contains the placement of the rows of every local value. Propagation runs again on the local
shapes, with tiles as ranks, between nodes that mix rows: exchanges, attention, scans, and nodes without a rule or with
a state. A node without demands is token-wise: a tile can compute it from its own rows. All others are inputs of the
view.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from sp_compile.lowering.torch_compat import size_hint
from sp_compile.passes.graph.call import OpCall, is_tensor, parse_overloads
from sp_compile.passes.graph.modes import no_grad_nodes
from sp_compile.passes.graph.mutation import is_pure
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.rank_rng import is_random
from sp_compile.passes.graph.sizes import Size, as_size, as_sizes, exact_quotient, size_product
from sp_compile.passes.propagation.propagate import propagate
from sp_compile.passes.sharding.axes import Axes
from sp_compile.passes.sharding.matchers import skip_ops
from sp_compile.passes.sharding.placement import REPLICATE, Frame, Partial, Placement, PlacementPlan, Shard
from sp_compile.passes.sharding.rule import rule_of, transfer_of
from sp_compile.passes.sharding.rules.exchange_rules import call_frame
from sp_compile.passes.sharding.rules.expert_rules import SORTED_ROWS
from sp_compile.passes.sharding.rules.pointwise import is_pure_move, is_smooth

sp, aten = torch.ops.sp, torch.ops.aten
MASKING_OPS = (sp.mask.default, sp.window.default)
CUTTING_OPS = (sp.shard.default, *MASKING_OPS)
DIVISION_OPS = parse_overloads("div.Scalar div.Tensor")
CHOICE_OPS = parse_overloads("where.ScalarOther where.self")
# ops that move or select elements, and reductions that are at least as large as each element
SELECTION_OPS = parse_overloads("gather index_select")
UPPER_BOUND_OPS = parse_overloads("logsumexp amax")
# ops that are, like smooth ones, finite with finite derivatives on rows computed from a row of ones
FINITE_ON_ONES = parse_overloads("""
    abs argmax clamp eq.Scalar eq.Tensor ge.Scalar ge.Tensor gather gt.Scalar gt.Tensor index_select kl_div le.Scalar
    le.Tensor log_sigmoid logsumexp lt.Scalar lt.Tensor maximum minimum ne.Scalar ne.Tensor softplus square
""")


@dataclass
class TokenView:
    """A copy of a local graph in which all nodes that are not token-wise are inputs."""

    gm: GraphModule  # the copy
    local: Graph  # the local graph
    to_local: dict[Node, Node]  # node of the view -> node of the local graph, for inputs and calls
    flags: set[Node]  # inputs with the rows that a mask fills, which the local graph does not contain
    plan: PlacementPlan  # the placement of the rows of each value
    # Nodes in no_grad, whose values are read through a detach, so that they may be in a tile with gradients.
    without_grad: set[Node]

    def checkpoint(self, node: Node) -> Any:
        """Return an id of the node's checkpointed region, or None. All nodes of a tile have the same one."""
        return self.to_local[node].meta.get("ac_graph_id")

    def rows(self, node: Node) -> Shard | None:
        """Return the placement of a value's rows, or None for a value without rows."""
        placement = self.plan.of(node)
        return placement if isinstance(placement, Shard) else None

    def is_sum(self, node: Node) -> bool:
        """Return True if the value is a sum over the rows, so that the values of tiles add up to it."""
        return isinstance(self.plan.of(node), Partial)

    @cached_property
    def to_view(self) -> dict[Node, Node]:
        """Map nodes of the local graph to their copies in the view; nodes that are inputs of the view are absent."""
        return {old: new for new, old in self.to_local.items() if new.op == "call_function"}

    @cached_property
    def size_hints(self) -> dict[Size, int]:
        """Return the value of each symbolic size in the call that is being compiled."""
        shapes = (node.meta["val"].shape for node in self.gm.graph.nodes if is_tensor(node))
        return {as_size(x): size_hint(x) for shape in shapes for x in shape if isinstance(x, torch.SymInt)}

    def is_inside(self, node: Node) -> bool:
        """Return True if a region may contain the node: a token-wise call, not an input of the view.

        Propagation has found required placements (`plan.wants`) for the operands of every such call.
        """
        if node.target is operator.getitem:
            return self.is_inside(node.args[0])
        return node.op == "call_function" and node in self.plan.wants


def is_dropout(node: Node) -> bool:
    """Return True for dropout, the only random op of a tile: a backward draws it again from the same seed."""
    return node.target is aten.dropout.default and is_random(node)


def token_view(local: GraphModule, planned: PlacementPlan, n: int, tiles: int) -> TokenView:
    """Return the view of a local graph: a copy in which all nodes that are not token-wise are inputs.

    A token-wise node computes each row (token) of its result from the same row of its operands, so that it can run on
    a tile, a part of the rows. Propagation decides it, with tiles in the role of ranks: a call with a demand (an
    operand that is not placed as needed) mixes rows. Such calls become inputs, and propagation runs again until there
    is none.

    Args:
        local: The local graph, the program of one rank.
        planned: The placements of the global view, from which the local graph was created.
        n: The number of ranks.
        tiles: The number of tiles.
    """
    without_grad = no_grad_nodes(local.graph)
    rejected: set[Node] = set()  # nodes that mix rows
    while True:
        view = _TokenViewBuilder(local, planned, n, rejected).build(tiles, without_grad)
        demanding = {view.to_local[demand.node] for demand in view.plan.demands if demand.node.op != "output"}
        if not demanding:
            return view
        rejected |= demanding


def is_finite_on_ones(window: Node) -> bool:
    """Return True if padded rows of a value may be filled with ones: all values computed from them are then finite.

    sp::window fills padded rows with a copy of a valid row, which a tile may not have. A tile fills them with ones
    instead, if these rows and their derivatives stay finite until a sum over the rows, which ignores padded rows.

    Args:
        window: An sp::window of the local graph.
    """
    # Dependents that are known to be finite; those whose padded rows still are ones; and a queue of those to follow.
    finite_nodes, ones, queue = {window}, {window}, [window]
    for node in queue:  # which grows in this loop
        for user in node.users:
            if user.target is sp.mask.default or user in finite_nodes:  # a mask fills the padded rows again
                continue
            if user.op == "output":  # later code may read the padded rows
                return False
            if not (user.target is operator.getitem or is_smooth(user) or _is_finite(user, finite_nodes, ones)):
                return False
            finite_nodes.add(user)
            if node in ones and is_pure_move(user):
                ones.add(user)
            if not is_tensor(user) or user.meta["val"].ndim:  # a 0-dim value is a sum
                queue.append(user)
    return True


def _is_finite(node: Node, finite_nodes: Set[Node], ones: Set[Node]) -> bool:
    """Return True if the result of a call, and its derivative, is finite on padded rows that were filled with ones.

    In `where(condition, a, b)` with a condition on such a row, either value may be selected, so both must be finite.

    Args:
        node: The call.
        finite_nodes: Nodes that depend on the padded rows, and are finite.
        ones: Those among them whose padded rows are still ones.
    """
    call = OpCall(node)
    if node.target in DIVISION_OPS:  # by a constant other than 0
        return isinstance(call["other"], (int, float)) and call["other"] != 0
    if node.target is aten.pow.Tensor_Scalar:  # with a whole exponent of at least 1, for a base of any sign
        exponent = call["exponent"]
        return isinstance(exponent, (int, float)) and exponent >= 1 and exponent % 1 == 0
    if node.target is aten.exp.default:  # exp of other values, such as scaled logits, may overflow
        (x,) = node.all_input_nodes
        return x in ones or _is_log_probability(x) or _is_log_ratio(x, finite_nodes)
    if node.target in CHOICE_OPS:
        choices = call["self"], call["other"]
        are_finite = [x in finite_nodes if isinstance(x, Node) else math.isfinite(x) for x in choices]
        return call["condition"] not in finite_nodes or all(are_finite)
    return node.target in FINITE_ON_ONES


def _is_log_probability(node: Node) -> bool:
    """Return True for elements of log_softmax(z), of z - logsumexp(z) or of z - amax(z), which are at most 0."""
    source = _skip_selections(node)
    if source.target is aten.log_softmax.int:
        return True
    if source.target is not aten.sub.Tensor or OpCall(source)["alpha"] != 1 or not is_tensor(source.args[1]):
        return False
    z, bound = (_skip_selections(x) for x in source.args)
    return bound.target in UPPER_BOUND_OPS and _skip_selections(bound.args[0]) is z


def _is_log_ratio(node: Node, finite_nodes: Set[Node]) -> bool:
    """Return True for the difference of log-probabilities, of which one may be data that no padded row changes."""
    if node.target is not aten.sub.Tensor or OpCall(node)["alpha"] != 1:
        return False
    operands = [OpCall(node)[name] for name in ("self", "other")]
    are_known = [is_tensor(x) and _is_log_probability(x) for x in operands]
    return any(are_known) and all(known or x not in finite_nodes for known, x in zip(are_known, operands))


def _skip_selections(node: Node) -> Node:
    """Return the first value, upwards, that is not the result of an op that only moves or selects elements."""
    return skip_ops(node, lambda x: x.target in SELECTION_OPS or (len(x.all_input_nodes) == 1 and is_pure_move(x)))


def local_shard(node: Node, planned: PlacementPlan, n: int) -> Placement:
    """Return the placement that a local value has as an input of the token view.

    In the view, tiles have the role of ranks: a value that is sharded over ranks has rows that are sharded over tiles,
    and the rows of this rank are the complete sequence. Values without rows are replicated.

    Args:
        node: A node of the local graph.
        planned: The plan from which the local graph was created.
        n: The number of ranks.
    """
    origin = node_info(node).origin  # node of the global view, or None for a node that localization inserted
    shard = planned.of(origin) if origin is not None else REPLICATE
    if isinstance(shard, Shard):
        return Shard(shard.dim, Frame.full(shard.frame.local_length(n)), shard.outer, shard.inner)
    # An inserted sp::shard or the like cuts the rows of this rank out of a full tensor.
    return _framed_placement(node) if origin is None and node.target in CUTTING_OPS else REPLICATE


def _framed_placement(node: Node) -> Placement:
    """Return the placement of a rank's rows in the result of an op with a frame argument, such as sp::shard.

    As in `local_shard`, the rows of this rank are the complete sequence. The dim is outer * rows * inner; the result is
    REPLICATE if this does not hold provably.
    """
    call = OpCall(node)
    dim, frame, outer = call.dim(), call_frame(call), as_size(call["frame"][0])
    rows = frame.local_length(call["n"])  # if symbolic, the expression that is a factor in the shape
    inner = exact_quotient(as_sizes(node.meta["val"].shape)[dim], size_product((outer, rows)))
    return Shard(dim, Frame.full(rows), outer, inner) if inner is not None else REPLICATE


@dataclass
class _TokenViewBuilder:
    """Builder of a view, whose fields `to_local` and `flags` are those of `TokenView`."""

    local: GraphModule  # the local graph
    planned: PlacementPlan  # the plan from which it was created
    n: int  # number of ranks
    rejected: set[Node]  # local nodes that have rules and mix rows, and are therefore inputs of the view
    copies: dict[Node, Node] = field(default_factory=dict)  # local node -> node of the view
    to_local: dict[Node, Node] = field(default_factory=dict)  # as in `TokenView`
    flags: set[Node] = field(default_factory=set)  # as in `TokenView`
    inputs: dict[Node, Placement] = field(default_factory=dict)  # placement of the view's inputs

    def build(self, tiles: int, without_grad: set[Node]) -> TokenView:
        """Return the view for this number of tiles. `token_view` rejects the nodes for which its plan has demands."""
        graph = Graph()
        for node in self.local.graph.nodes:
            if node.op == "output":
                graph.output(tuple(self.copies[n] for n in node.all_input_nodes))
            else:
                copy = self.copies[node] = self._add_copy(graph, node)
                self.to_local[copy] = node
        gm = GraphModule({}, graph)
        # "local": the outputs are not gathered. starts_sequences=False: only inputs start with rows, and no replicated
        # value is sharded for the sake of its readers.
        plan = propagate(gm, Axes(), n=tiles, inputs=self.inputs, outputs="local", starts_sequences=False)
        return TokenView(gm, self.local.graph, self.to_local, self.flags, plan, without_grad)

    def _add_copy(self, graph: Graph, node: Node) -> Node:
        """Add and return the view's node for a local node: a copy, a fill, or an input if it is not token-wise."""
        if self._is_fill(node):
            return self._add_fill(graph, node)
        if not self._can_be_inside(node):
            return self._add_input(graph, node, node.meta.get("val"), local_shard(node, self.planned, self.n))
        return graph.node_copy(node, self.copies.__getitem__)

    def _add_input(self, graph: Graph, node: Node, value: Any, placement: Placement) -> Node:
        """Add and return an input of the view, with this value and placement, in place of a local node."""
        placeholder = graph.placeholder(node.name)
        placeholder.meta.update(node.meta, val=value)
        self.inputs[placeholder] = placement
        return placeholder

    def _can_be_inside(self, node: Node) -> bool:
        """Return True if the view may contain a copy of the node: an op with a rule, no exchange and no side effect."""
        if node.op != "call_function" or node in self.rejected:
            return False
        if node.target is operator.getitem:
            return is_tensor(node) and self.copies[node.args[0]].op == "call_function"  # a copy, no input of the view
        rule = rule_of(node)
        # Not an op without a rule, with fixed placements of its operands, or with an exchange.
        if rule is None or rule.operand_placements is not None or transfer_of(node.target) is not None:
            return False
        # Operators of the package depend on the frame of their rows, except those on rows sorted by a key.
        if node.target.namespace == "sp" and node.target not in SORTED_ROWS:
            return False
        # A dropout is random, but each tile sets one seed for its forward and its backward, which draw the same mask.
        return is_pure(node) or node.target is aten.dropout.default

    def _is_fill(self, node: Node) -> bool:
        """Return True if the node fills padded rows, for which the view has a masked_fill (`_add_fill`).

        sp::mask fills them with a constant. sp::window fills them with a copy of a valid row, which a tile may not
        have: it fills them with ones instead, if all values computed from these are finite (`is_finite_on_ones`).
        """
        if node in self.rejected or node.target not in MASKING_OPS or not node.meta["val"].is_floating_point():
            return False
        return node.target is sp.mask.default or is_finite_on_ones(node)

    def _add_fill(self, graph: Graph, node: Node) -> Node:
        """Add and return a masked_fill in place of an sp::mask or sp::window.

        Its mask is a new input of the view, bool flags that are True in padded rows. The value is that of the sp::mask,
        or 1 for an sp::window.
        """
        call, x = OpCall(node), node.meta["val"]
        shape = [extent if d == call.dim() else 1 for d, extent in enumerate(x.shape)]
        flags = self._add_input(graph, node, x.new_empty(shape, dtype=torch.bool), _framed_placement(node))
        self.flags.add(flags)
        self.to_local[flags] = node
        filled = graph.call_function(aten.masked_fill.Scalar, (self.copies[node.args[0]], flags, call.get("value", 1)))
        filled.meta.update(node.meta)
        return filled
