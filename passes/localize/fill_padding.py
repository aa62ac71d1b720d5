"""Find values whose padded rows must be restored, and prove that no op reads wrong rows.

`lowering/collectives/pad_rows.py` defines the content of a padded row: the nearest valid row. Four kinds of nodes have
other ("loose") padded rows:

    x[:, :-1]             a shorter window is the same local value, and its padded rows are further rows of x
    ring_attention(..)    a padded query attends to nothing (`library.PADDED` is "finite")
    rand_like(x)          each row is an independent draw
    sp::window in a tile  a tile may fill them with ones, see `is_finite_on_ones` of passes/localize/tiles/tile_view.py

A window is the range of valid positions of a value in its sequence. `plan.wants` has the placements that a node demands
of its operands; the origin of a local node is its node in the global graph.

Rows that a window cuts off may be infinite or NaN. Only moves may read them, and sums, which fill their padding first.
All other loose rows are finite. Smooth operators, which are finite with finite derivatives where their operands are,
may read those, too. `sp::window` is inserted before all other readers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch.fx import GraphModule, Node

from sp_compile.lowering.base.errors import SpError, describe_node
from sp_compile.lowering.base.library import PADDED
from sp_compile.lowering.torch_compat import namespace_of
from sp_compile.passes.graph.call import OpCall, is_tensor
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.rank_rng import is_random
from sp_compile.passes.graph.sizes import is_same_size
from sp_compile.passes.sharding.attention_axes import op_strategy
from sp_compile.passes.sharding.placement import Partial, PlacementPlan, Shard
from sp_compile.passes.sharding.rule import rule_of, transfer_of
from sp_compile.passes.sharding.rules.norms import CLASS_LOSSES
from sp_compile.passes.sharding.rules.pointwise import is_pure_move, is_smooth
from sp_compile.passes.sharding.window_rules import SHARD_WINDOWS


def find_loose_padding(gm: GraphModule, plan: PlacementPlan, n: int) -> set[Node]:
    """Return the nodes of a global graph whose local padded rows `Localize` must restore by sp::window.

    They have loose padded rows (not equal to the nearest valid row), and an op may depend on these.
    """
    # Nodes whose padded rows reach an op that depends on them, directly or through other ops, for two kinds of rows.
    # Rows that a window has cut off may be infinite: every op but a move depends on them. On finite rows, smooth ops do
    # not depend, either.
    read_if_cut, read_if_finite = set[Node](), set[Node]()
    for node in reversed(gm.graph.nodes):
        for read_nodes, ignores_padding in ((read_if_cut, is_pure_move), (read_if_finite, is_smooth)):
            if any(_can_reach_reader(node, user, plan, read_nodes, ignores_padding) for user in node.users):
                read_nodes.add(node)
    cut_nodes = {node for node in read_if_cut if _is_cut(node, plan)}
    return cut_nodes | {node for node in read_if_finite if _is_loose(node, plan, n)}


def _can_reach_reader(
    node: Node, user: Node, plan: PlacementPlan, read_nodes: set[Node], ignores_padding: Callable[[Node], bool]
) -> bool:
    """Return True if the user, or a reader of its result, may depend on padded rows of the node.

    Args:
        node: The value.
        user: A user of the value.
        plan: The plan of the graph.
        read_nodes: The later nodes whose padded rows reach a reader that may depend on them.
        ignores_padding: Returns True for ops whose valid rows do not depend on padded rows of this kind.
    """
    if user.op == "output":
        return isinstance(plan.of(node), Shard)  # another graph may read it
    if user.target is operator.getitem:  # it selects one result of the node, with the same rows
        return user in read_nodes
    if not _is_sharded(node, plan) or user not in plan.wants:  # not on shards: rows are gathered without padding
        return False
    if user in read_nodes and not needs_only_valid_rows(user):
        return True  # the user's result has the same padded rows, and a reader of the result depends on them
    indices = [i for i, x in enumerate(OpCall(user).operands) if x is node]
    return any(_can_read_padding(user, i, plan, ignores_padding) for i in indices)


def _is_sharded(node: Node, plan: PlacementPlan) -> bool:
    return any(isinstance(p, Shard) for p in plan.placements.get(node, ()))


def _is_cut(node: Node, plan: PlacementPlan) -> bool:
    """Return True if a window cuts off rows of a sharded value at the node, as x[:, :-1] does.

    The local value keeps these rows as padding. A getitem is cut if its operand, the op with several results, cuts.
    """
    source = node.args[0] if node.target is operator.getitem else node
    return source.op == "call_function" and _is_sharded(source, plan) and is_shorter_window(source, plan)


def _is_loose(node: Node, plan: PlacementPlan, n: int) -> bool:
    """Return True if the node computes finite padded rows that differ from the nearest valid row.

    These are random draws and the ops with "finite" in `PADDED`; rows that a window cuts off are found by `_is_cut`.
    """
    if node.target is operator.getitem:  # a result of an op with several results
        return is_tensor(node) and _is_loose(node.args[0], plan, n)
    placements = [p for p in plan.placements.get(node, ()) if isinstance(p, Shard)]
    # Without shards there is no padding. Nodes without `wants` run on replicated operands.
    if node.op != "call_function" or not placements or node not in plan.wants:
        return False
    has_own_rows = PADDED.get(node.target) == "finite" or is_random(node)
    has_padding = not all(p.frame.is_exact(n) for p in placements)  # exact: n divides the sequence
    return has_own_rows and has_padding


def is_shorter_window(node: Node, plan: PlacementPlan) -> bool:
    """Return True if the node cuts contiguous pieces out of the sharded dim of its operand, as a slice or split does.

    The ranks run no op for it: the local value of a piece is that of the operand.
    """
    rule, wants = rule_of(node), plan.wants.get(node, ())
    if rule is None or not rule.spans or not wants:
        return False
    return isinstance(wants[0], Shard) and wants[0].dim == rule.window_dim


def needs_only_valid_rows(node: Node) -> bool:
    """Return True if the node reads only the valid rows of its operands: exchanges, attention, and some sp:: ops.

    Padded rows of its operands then have no effect on its result.
    """
    if transfer_of(node.target) is not None or op_strategy(node.target) is not None:
        return True
    if node.target in SHARD_WINDOWS:
        return OpCall(node)["frame"] is not None  # without a frame, the op runs on a full tensor
    # Such an op computes the padded rows of its result from valid rows only.
    return PADDED.get(node.target) == "nearest"


def _can_read_padding(user: Node, operand: int, plan: PlacementPlan, ignores_padding: Callable[[Node], bool]) -> bool:
    """Return True if padded rows of an operand of `user` may change valid rows or derivatives, or cause an error.

    Args:
        user: Node that reads the operand.
        operand: Index of the operand.
        plan: The placements.
        ignores_padding: Returns True for ops whose valid rows do not depend on padded rows of this kind, such as
            elementwise ops on finite rows.
    """
    if needs_only_valid_rows(user):  # it reads only valid rows
        return False
    if any(isinstance(p, Partial) for p in plan.placements.get(user, ())):
        return False  # `Localize` fills the operands of a sum
    if user.target in CLASS_LOSSES and OpCall(user).operands[operand] is OpCall(user)["target"]:
        return True  # the operand has the indices of classes, and an invalid index is an error
    return not ignores_padding(user)


def _padding_error(reader: str, operand: Node) -> SpError:
    """Return the error for a node that reads loose padded rows; only a bug of `find_loose_padding` causes it."""
    return SpError("SP924", f"{reader} reads padded rows of {operand.name} that do not repeat a valid row.")


class LooseOperand(NamedTuple):
    """Operand with loose padded rows."""

    operand_index: int  # among the call's tensor operands
    node: Node  # node of the local graph
    is_cut: bool  # True if a window has cut off the rows, which may be infinite or NaN


class PaddingProof:
    """A check that follows loose padded rows through a local graph, in its order."""

    def __init__(self, plan: PlacementPlan, n: int) -> None:
        self.plan, self.n = plan, n
        self.loose: set[Node] = set()  # local nodes with loose padded rows
        self.cut: set[Node] = set()  # loose nodes whose padded rows may be infinite or NaN

    def check(self, node: Node) -> None:
        """Raise SpError if the node may depend on padded rows that differ from the nearest valid row.

        `validate` calls it for each node of the local graph, in order.
        """
        if node.op == "output":
            self._check_output(node)
        elif node.target is operator.getitem:  # its rows are those of its operand
            for nodes in (self.loose, self.cut):  # `cut`: the loose nodes whose padded rows may be infinite or NaN
                if node.args[0] in nodes:
                    nodes.add(node)
        elif node.op == "call_function":
            self._check_call(node)

    def _check_output(self, output: Node) -> None:
        """Raise SpError if a sharded output has loose rows, since another graph may read it."""
        for x in output.all_input_nodes:
            origin = node_info(x).origin
            if x in self.loose and origin is not None and isinstance(self.plan.of(origin), Shard):
                raise _padding_error("the output", x)

    def _check_call(self, node: Node) -> None:
        """Raise SpError if the call may depend on loose rows, and record whether its own padded rows are loose.

        A padded row is loose if it differs from the nearest valid row, and cut if a window has cut it off.
        """
        origin, declared_padding = node_info(node).origin, PADDED.get(node.target)
        if origin is None:  # inserted by `Localize`, such as arithmetic on sizes: the value of no global node
            return
        if _is_sharded(origin, self.plan) and namespace_of(node.target) == "sp" and declared_padding is None:
            raise SpError("SP923", f"{describe_node(node)} returns shards and does not declare its padded rows.")
        # An op that is not on shards has no padded rows. An op declared as "nearest" reads valid rows only, and its own
        # padded rows are right.
        if origin not in self.plan.wants or declared_padding == "nearest":
            return
        loose_operands = list(self._loose_operands(node, origin))
        for operand in loose_operands:
            ignores_padding = is_pure_move if operand.is_cut else is_smooth
            if _can_read_padding(origin, operand.operand_index, self.plan, ignores_padding):
                raise _padding_error(describe_node(node), operand.node)
        passes_padding = loose_operands and not needs_only_valid_rows(
            origin
        )  # its padded rows follow from those it reads
        if passes_padding or _is_loose(origin, self.plan, self.n):
            self.loose.add(node)
        if passes_padding and any(operand.is_cut for operand in loose_operands):
            self.cut.add(node)

    def _loose_operands(self, node: Node, origin: Node) -> Iterator[LooseOperand]:
        """Yield the sharded operands of a local node that have loose padded rows; `origin` is its global node."""
        for i, (operand, want) in enumerate(zip(OpCall(node).operands, self.plan.wants[origin])):
            if isinstance(want, Shard):
                is_cut = operand in self.cut or self._is_longer(operand, want)
                if is_cut or operand in self.loose:
                    yield LooseOperand(i, operand, is_cut)

    def _is_longer(self, operand: Node, want: Shard) -> bool:
        """Return True if the operand has more valid rows than the demanded window.

        A node that cuts off rows, such as x[:, :-1], has no call in the local graph: its reader there has the operand
        x. The windows then differ; the demanded one is always the shorter one.
        """
        origin = node_info(operand).origin
        have = None if origin is None else self.plan.of(origin)
        if not isinstance(have, Shard):
            return False
        # A dim of S * k elements may be S rows of k elements (`inner` k) in one frame, and S * k rows in the other.
        has_same_start = is_same_size(have.frame.start * have.inner, want.frame.start * want.inner)
        return not (has_same_start and is_same_size(have.frame.length * have.inner, want.frame.length * want.inner))
