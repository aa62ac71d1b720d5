"""Find chains of collectives that reduce, gather or scatter a value over several groups in turn.

    all_reduce(a) -> wait -> view, permute, scale, cast -> all_reduce(b) -> wait

Each collective is a link of the chain. The nodes in between must commute with the collectives, so that the earlier
links can move to the last one. A node f commutes with a collective c if c(f(x)) == f(c(x)).

Programs gather and scatter along another dim than the first by moving chunks next to the collective:

    all_gather(x) -> wait -> split(dim 0) -> cat(dim d)
    split(x, dim d) -> cat(dim 0) -> reduce_scatter -> wait
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from sp_compile.lowering.base.errors import SpError, describe_node
from sp_compile.lowering.torch_compat import statically_known_true
from sp_compile.passes.cost.group_names import exchange_group
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.mutation import is_mutation
from sp_compile.passes.sharding.matchers import is_cast_op, is_copy, is_order_preserving, is_wider_dtype, permutation_of
from sp_compile.passes.sharding.rule import rule_of

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


@dataclass(frozen=True)
class ChunkMove:
    """A move of equal chunks of one dim to another dim: cat(split(x, dim=split_dim), dim=cat_dim)."""

    split: Node  # the split of `source` along `split_dim`
    pieces: tuple[Node, ...]  # the chunks, results of the split
    cat: Node  # the concatenation of the pieces along `cat_dim`
    split_dim: int  # the dim that is split, not negative
    cat_dim: int  # the dim of the concatenation, not negative

    @property
    def source(self) -> Node:
        """Return the value that is split: the operand of the move."""
        return OpCall(self.split)["self"]


def match_chunks(cat: Node) -> ChunkMove | None:
    """Return the move of chunks, cat(split(x, dim=a), dim=b), that ends with this node, or None.

    The node must be a cat of all chunks of a split, in order and of equal size, which nothing else reads.
    """
    if cat.target is not aten.cat.default:
        return None
    call = OpCall(cat)
    pieces = tuple(call["tensors"])
    split = pieces[0].args[0] if pieces[0].target is operator.getitem else None
    rule = rule_of(split) if isinstance(split, Node) else None
    # The rule of a split has the dim that it splits (window), and the position of each chunk (spans).
    if split is None or rule is None or rule.window_dim is None:
        return None
    if not len(rule.spans) == len(split.users) == len(pieces):  # some chunks are missing
        return None
    in_order = all(p.target is operator.getitem and p.args == (split, i) for i, p in enumerate(pieces))
    if not in_order or any(len(p.users) != 1 for p in pieces):
        return None
    first_rows, *other_rows = (p.meta["val"].shape[rule.window_dim] for p in pieces)
    is_equal = all(statically_known_true(rows == first_rows) for rows in other_rows)
    return ChunkMove(split, pieces, cat, rule.window_dim, call.dim()) if is_equal else None


def _match_chunks_after(node: Node) -> ChunkMove | None:
    """Return the move of chunks, cat(split(node)), whose split is the only reader of the node, or None."""
    if len(node.users) != 1:
        return None
    # The first reader of the first piece of the only reader, which is the cat if the node is split into chunks.
    cat = next((cat for split in node.users for piece in split.users for cat in piece.users), None)
    move = match_chunks(cat) if cat is not None else None
    return move if move is not None and move.source is node else None


autograd = torch.ops._c10d_functional_autograd

# Kinds of links by op.
COLLECTIVES = {
    c10d.all_reduce.default: "all_reduce",
    c10d.reduce_scatter_tensor.default: "reduce_scatter",
    c10d.all_gather_into_tensor.default: "all_gather",
    autograd.reduce_scatter_tensor.default: "reduce_scatter",
    autograd.all_gather_into_tensor.default: "all_gather",
}

# Families of reductions by `reduce_op`; two of one family, over different groups, commute.
FAMILIES = {"sum": "linear", "avg": "linear", "max": "max", "min": "min", "product": "product"}
UNMERGED_REDUCTIONS = ("band", "bor", "bxor", "premul_sum")

# Maximum number of links. No mesh has more axes; 6 links have 203 partitions into blocks.
MAX_CHAIN = 6

MULTIPLICATIONS = frozenset({aten.mul.Tensor, aten.mul.Scalar})
DIVISIONS = frozenset({aten.div.Tensor, aten.div.Scalar})


@dataclass(frozen=True)
class ChainLink:
    """A collective of a chain."""

    node: Node  # the collective
    kind: str  # "all_reduce", "reduce_scatter" or "all_gather"
    op: str  # the reduction; "" for an all_gather
    group: str  # name of the process group
    chunks: ChunkMove | None = None  # the move that makes it a collective along another dim than 0

    @property
    def operand(self) -> Node:
        """Return the operand of the collective itself, which may be the result of a move of chunks."""
        return OpCall(self.node)["input"]

    @property
    def source(self) -> Node:
        """Return the value that is reduced, gathered or scattered, before its chunks are moved."""
        if self.chunks is not None and self.kind == "reduce_scatter":
            return self.chunks.source
        return self.operand

    @property
    def dim(self) -> int:
        """Return the dim that is gathered or scattered, with the move of the chunks; 0 for all_reduces."""
        if self.chunks is None:
            return 0
        return self.chunks.split_dim if self.kind == "reduce_scatter" else self.chunks.cat_dim


@dataclass(frozen=True)
class CollectiveChain:
    """A chain of collectives of one kind."""

    links: list[ChainLink]  # in order
    steps: list[list[Node]]  # steps[i]: the nodes between links[i] and links[i + 1], in order, without chunk moves


def find_chains(graph: Graph) -> tuple[list[CollectiveChain], list[tuple[Node, str]]]:
    """Find the longest chains of two and more collectives of one kind, each on the result of the one before it.

    Args:
        graph: A graph of functional collectives.

    Returns:
        The chains, and (collective, reason) for each collective that cannot be joined to the one of its kind before
        it. The report shows the reason.

    Raises:
        SpError: torch does not know a reduction.
    """
    chains: list[CollectiveChain] = []
    refused: list[tuple[Node, str]] = []
    in_chains: set[Node] = set()
    for node in reversed(graph.nodes):
        link = match_link(node)
        if link is None or node in in_chains:
            continue
        # `link` is the last one of a new chain; prepend earlier ones.
        chain = CollectiveChain([link], [])
        previous = _previous_link(link)
        while isinstance(previous, tuple) and len(chain.links) < MAX_CHAIN:
            previous_link, steps = previous
            chain.links.insert(0, previous_link)
            chain.steps.insert(0, steps)
            in_chains.add(previous_link.node)
            previous = _previous_link(previous_link)
        if isinstance(previous, str):  # a reason
            refused.append((chain.links[0].node, previous))
        if len(chain.links) > 1:
            chains.append(chain)
    return chains[::-1], refused[::-1]


def check_reductions(graph: Graph) -> None:
    """Raise SpError for a reduction that torch does not know, before any pass over collectives runs.

    It would fail on this rank during the run, and the other ranks would wait.
    """
    for node in graph.nodes:
        match_link(node)  # raises


def match_link(node: Node) -> ChainLink | None:
    """Return a collective with its kind, reduction, group and move of chunks, as a link of a chain.

    Returns None for another op or a group without a name.

    Raises:
        SpError: torch does not know the reduction.
    """
    kind = COLLECTIVES.get(node.target) if node.op == "call_function" else None
    if kind is None:
        return None
    call = OpCall(node)
    op = str(call.get("reduce_op", "")).lower()  # "" for an all_gather
    # Reductions of one family commute over different groups; unmerged ones are valid, but end a chain.
    if op and op not in FAMILIES and op not in UNMERGED_REDUCTIONS:
        reductions = ", ".join((*FAMILIES, *UNMERGED_REDUCTIONS))
        raise SpError("SP561", f"reduce_op: expected one of {reductions}, got {op!r} in {describe_node(node)}.")
    group = exchange_group(node)
    return None if group is None else ChainLink(node, kind, op, group, _link_chunks(call, kind))


def _link_chunks(call: OpCall, kind: str) -> ChunkMove | None:
    """Return the move of one chunk per rank before a reduce_scatter or after an all_gather, or None without one.

    These collectives scatter and gather along dim 0. With a move, cat(split(x, dim=a), dim=b), the program does so
    along another dim.

    Args:
        call: The collective.
        kind: Its kind, as in `ChainLink`.
    """
    if kind == "all_reduce":
        return None
    if kind == "reduce_scatter":
        move = match_chunks(call["input"])
    else:
        users = list(call.node.users)
        is_waited = len(users) == 1 and users[0].target is c10d.wait_tensor.default
        move = _match_chunks_after(users[0] if is_waited else call.node)
    # A merged collective has more ranks, and thus more chunks. Only aten.split.Tensor, which has the size of a chunk as
    # its argument, then splits into more; the other splits list the sizes of all chunks.
    if move is None or move.split.target is not aten.split.Tensor:
        return None
    collective_dim = move.cat_dim if kind == "reduce_scatter" else move.split_dim
    return move if collective_dim == 0 and len(move.pieces) == call["group_size"] else None


def _previous_link(link: ChainLink) -> tuple[ChainLink, list[Node]] | str | None:
    """Return the collective before this one in its chain, and the nodes in between, in order.

    For the last link of all_reduce(a) -> wait -> view -> all_reduce(b), these are the all_reduce of a and [wait, view].
    If the chain ends here, return the reason for the report, or None if no collective of the same kind precedes.
    """
    # Follow operands up to a collective, through nodes that commute with this one.
    visited, steps = [link.source], []
    move: ChunkMove | None = None  # move of chunks after the previous all_gather, which is a part of that link
    while match_link(visited[-1]) is None:
        node = visited[-1]
        if link.kind == "all_gather" and move is None:
            move = match_chunks(node)
            if move is not None:
                visited.append(move.source)
                continue
        operand = _commuting_operand(node, link)
        if operand is None:
            return None
        steps.append(node)
        visited.append(operand)
    # Compare the two collectives.
    previous = match_link(visited[-1])
    assert previous is not None, "the loop ends at a collective"
    if (previous.kind, previous.dim) != (link.kind, link.dim):
        return None
    # The move of chunks between must be that of the previous all_gather, one chunk per rank, and not another one.
    if link.kind == "all_gather" and previous.chunks != move:
        return None
    for op in (previous.op, link.op):
        if op in UNMERGED_REDUCTIONS:
            return f"reductions by {op!r} are not merged"
    if FAMILIES.get(previous.op) != FAMILIES.get(link.op):
        return f"{previous.op!r} over {previous.group!r}, then {link.op!r} over {link.group!r}: the order matters"
    # The previous collective is moved to this one, which must not change other values.
    shared = next((node for node in visited if len(node.users) > 1), None)
    if shared is not None:
        return f"{shared.name} has other users"
    if any(previous.node < node < link.node and is_mutation(node) for node in link.node.graph.nodes):
        return f"an op writes in place between {previous.node.name} and {link.node.name}"
    return previous, steps[::-1]


def _commuting_operand(node: Node, link: ChainLink) -> Node | None:
    """Return the operand x of the node if its op commutes with the collective `link`, else None.

    They commute if link(node(x)) == node(link(x)).
    """
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return None
    if node.target is aten.copy.default:  # copy(buffer, x) is x in the dtype of the buffer
        return node.args[1] if _can_commute(node.args[1], node, link) else None
    x = node.args[0]
    if is_copy(node) or node.target in (c10d.wait_tensor.default, aten.detach.default):
        commutes = True
    elif is_cast_op(node):
        commutes = _can_commute(x, node, link)
    elif node.target in MULTIPLICATIONS or node.target in DIVISIONS:
        commutes = _is_scaled(node, link)
    elif node.target is aten.neg.default:
        commutes = FAMILIES.get(link.op, "linear") == "linear"  # an all_gather, without a reduction, counts as linear
    else:  # a gather and a scatter depend on the order of rows
        moves_elements = (
            is_order_preserving(node) or permutation_of(node) is not None or node.target is aten.expand.default
        )
        commutes = moves_elements and link.kind == "all_reduce"
    return x if commutes else None


def _can_commute(x: Node, node: Node, link: ChainLink) -> bool:
    """Return True if a cast or copy of x commutes with the link.

    With a reduction it does if the result has exactly the values of x, possibly in a wider dtype. An all_gather only
    moves values, so that any cast commutes with it.
    """
    before, after = x.meta["val"], node.meta["val"]
    if before.device != after.device or before.shape != after.shape:
        return False
    if before.dtype == after.dtype or link.kind == "all_gather":
        return True
    # A sum or product of ints may overflow in the narrow dtype and not in the wide one.
    if link.op in ("max", "min") and _is_int(before.dtype) and _is_int(after.dtype):
        narrow, wide = torch.iinfo(before.dtype), torch.iinfo(after.dtype)
        return wide.min <= narrow.min and narrow.max <= wide.max
    return before.is_floating_point() and is_wider_dtype(after.dtype, before.dtype)


def _is_int(dtype: torch.dtype) -> bool:
    """Return True for integer dtypes, which `torch.iinfo` supports; False for bool."""
    return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool


def _is_scaled(node: Node, link: ChainLink) -> bool:
    """Return True if the node multiplies or divides by a Python scalar, and this commutes with the collective.

    Sums commute with any factor, max and min with a positive one, which keeps the order of values, products with none.
    """
    x, number = node.args[0], node.args[1]
    if not isinstance(number, int | float) or isinstance(number, bool) or not math.isfinite(number):
        return False
    if node.target in DIVISIONS and number == 0:
        return False
    family = FAMILIES.get(link.op, "linear")  # an all_gather commutes with all factors
    commutes = number > 0 if family in ("max", "min") else family == "linear"
    return commutes and x.meta["val"].dtype == node.meta["val"].dtype
