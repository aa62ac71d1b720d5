"""Track the position of elements through views, permutes and copies, as an arrangement of factors.

    x                              (b, s, n * h, d)       dims [0], [1], [2], [3]       one factor per dim
    x.unflatten(2, (n, h))         (b, s, n, h, d)        [0], [1], [4], [5], [3]       factor 2 is split into 4 and 5
    .permute(2, 0, 1, 3, 4)        (n, b, s, h, d)        [4], [0], [1], [5], [3]
    .flatten(1, 2)                 (n, b * s, h, d)       [4], [0, 1], [5], [3]

A factor is a dim of the first tensor, or a part of it; numbers identify factors. A piece is one of several equal slices
along a dim: it lacks the outer factor of the dim, which is fixed in its arrangement. Two chains of such ops move data
equally if they arrange the factors of one tensor equally, in any form of code. Sizes may be symbolic; a size that does
not provably factor has no arrangement.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch.fx import Node

from sp_compile.lowering.torch_compat import OpOverload, schema_of
from sp_compile.passes.graph.call import WAIT_OP, OpCall, parse_overloads
from sp_compile.passes.graph.sizes import Size, as_sizes, exact_quotient, is_same_size, size_product
from sp_compile.passes.sharding import matchers
from sp_compile.passes.sharding.factors import dim_factors
from sp_compile.passes.sharding.reshape import reshape_rule

FactorIds = tuple[int, ...]  # numbers of the factors of a dim in a `FactorTable`, outermost first


class FixedFactors(NamedTuple):
    """Factors of a dim that a piece of a tensor does not have, since a slice or select has removed them."""

    factors: FactorIds  # the removed factors, outermost first
    piece: int  # index of the piece along these factors


@dataclass(frozen=True)
class Arrangement:
    """The factors of each dim of a tensor, or of a piece of a tensor."""

    dims: tuple[FactorIds, ...]  # factors of each dim
    fixed: tuple[FixedFactors, ...] = ()  # removed factors of a piece, the last removed ones last


@dataclass
class FactorTable:
    """The sizes of all factors, and the factors that each was split into.

    Arrangements refer to factors by number. A later reshape may split these, so the methods resolve them to compare.
    """

    _sizes: list[Size] = field(default_factory=list)  # by factor
    _splits: dict[int, FactorIds] = field(default_factory=dict)  # factors of a split factor, outermost first

    def new_factor(self, size: Size) -> int:
        """Create a factor (a dim of a tensor, or a part of one) of the given size, and return its number."""
        self._sizes.append(size)
        return len(self._sizes) - 1

    def new_tensor(self, shape: Sequence[Size]) -> Arrangement:
        """Return the arrangement (the factors of each dim) of a new tensor, with one new factor per dim."""
        return Arrangement(tuple((self.new_factor(size),) for size in shape))

    def resolve(self, factors: Sequence[int]) -> list[int]:
        """Return the factors in the form for comparisons: split factors as their parts, and none of size 1.

        If a reshape has split factor 2 into 4 and 5, [0, 2] becomes [0, 4, 5].
        """
        resolved: list[int] = []
        for factor in factors:
            if factor in self._splits:
                resolved += self.resolve(self._splits[factor])
            elif not is_same_size(self._sizes[factor], 1):
                resolved.append(factor)
        return resolved

    def order(self, x: Arrangement) -> list[int]:
        """Return the factors of all dims in order: the order of elements in memory, which reshapes preserve."""
        return [factor for dim in x.dims for factor in self.resolve(dim)]

    def are_same_factors(self, a: Sequence[int], b: Sequence[int]) -> bool:
        """Return True if both are the same factors in the same order."""
        return self.resolve(a) == self.resolve(b)

    def are_equal(self, a: Arrangement, b: Arrangement) -> bool:
        """Return True if two values have the same elements at the same positions."""
        if len(a.dims) != len(b.dims) or len(a.fixed) != len(b.fixed):
            return False
        same_piece = all(
            x.piece == y.piece and self.are_same_factors(x.factors, y.factors) for x, y in zip(a.fixed, b.fixed)
        )
        return same_piece and all(map(self.are_same_factors, a.dims, b.dims))

    def split_leading(self, dim: FactorIds, size: Size) -> tuple[FactorIds, FactorIds] | None:
        """Return (leading factors of a dim, whose sizes have the product `size`; remaining factors).

        A factor that is partly in both is split. Returns None if the size does not provably divide the dim.
        """
        inner = exact_quotient(size_product(self._sizes[factor] for factor in dim), size)
        split = None if inner is None else self.reshape(Arrangement((dim,)), (size, inner))
        return None if split is None else (split.dims[0], split.dims[1])

    # The effects of ops; None if the result has no arrangement.

    def reshape(self, x: Arrangement, shape: Sequence[Size]) -> Arrangement | None:
        """Return the arrangement of x after a reshape, or None if the sizes do not provably factor.

        A factor that is then in several dims is split.
        """
        order = self.order(x)
        # The rule of a reshape from one dim per factor to the shape; its letters are the factors after the reshape.
        rule = reshape_rule(tuple(self._sizes[factor] for factor in order), tuple(shape))
        if rule.kinds:  # only factors that are not complete in both shapes, as of (6, 10) -> (4, 15), have a kind
            return None
        factor_of: dict[str, int] = {}  # number of each factor by its letter
        for factor, dim in zip(order, rule.operands[0]):
            names = dim_factors(dim)
            if len(names) > 1:
                self._splits[factor] = tuple(self.new_factor(rule.extents[name]) for name in names)
            factor_of |= zip(names, self._splits.get(factor, (factor,)))
        dims = tuple(tuple(factor_of[name] for name in dim_factors(dim)) for dim in rule.results[0])
        return Arrangement(dims, x.fixed)

    def piece(self, x: Arrangement, dim: int, count: int, index: int, keeps_dim: bool) -> Arrangement | None:
        """Return the arrangement of piece `index` of x, one of `count` equal pieces along a dim.

        With `keeps_dim` the piece is a slice; otherwise it is a select of one position, which removes the dim. Returns
        None if the dim does not provably have that many equal pieces.
        """
        split = self.split_leading(x.dims[dim], count)
        if split is None:
            return None
        leading, rest = split  # the factors that count the pieces, and those inside of a piece
        if not keeps_dim and self.resolve(rest):  # not a select: a piece has more than one position
            return None
        dims = (*x.dims[:dim], *([rest] if keeps_dim else []), *x.dims[dim + 1 :])
        return Arrangement(dims, (*x.fixed, FixedFactors(leading, index)))

    def join(self, pieces: Sequence[Arrangement], dim: int, is_new_dim: bool) -> Arrangement | None:
        """Return the arrangement of a cat, or of a stack (`is_new_dim`), of all pieces of a tensor in order.

        It undoes `piece`, possibly along another dim: the removed factors become the outer ones of that dim, or a new
        dim. None if the operands are not all pieces in order.
        """
        if not pieces[0].fixed:  # not a piece
            return None
        *outer_fixed, (factors, _) = pieces[0].fixed  # the last removed factors count the pieces
        if not is_same_size(size_product(self._sizes[factor] for factor in self.resolve(factors)), len(pieces)):
            return None
        dims = list(pieces[0].dims)
        expected = (Arrangement(tuple(dims), (*outer_fixed, FixedFactors(factors, i))) for i in range(len(pieces)))
        if not all(map(self.are_equal, pieces, expected)):
            return None
        if is_new_dim:
            dims.insert(dim, factors)
        else:
            dims[dim] = (*factors, *dims[dim])
        return Arrangement(tuple(dims), tuple(outer_fixed))


PASSTHROUGH_MOVES = (operator.getitem, WAIT_OP)  # they return their operand, or one of its values
# Ops that return a view or a copy, depending on the strides.
MAY_COPY = parse_overloads("contiguous reshape reshape_as flatten.using_ints ravel")


def is_view(node: Node) -> bool:
    """Return True if the value of the node shares the storage of its first operand, for all strides of the operand."""
    if node.target in PASSTHROUGH_MOVES:
        return True
    if not isinstance(node.target, OpOverload) or node.target in MAY_COPY:
        return False
    return all(result.alias_info for result in schema_of(node.target).returns)


def is_move(node: Node) -> bool:
    """Return True if the op of the node only moves data: a view, permute, copy, slice, cat or stack."""
    moves = node.target in PASSTHROUGH_MOVES or matchers.is_rearrangement(node)
    return moves or matchers.match_join(node) is not None or matchers.nth_result(node, 0) is not None


def moved_operands(node: Node) -> list[Node]:
    """Return the operands whose data a node (see `is_move`) moves: the pieces of a cat or stack, else the first one."""
    if node.target in PASSTHROUGH_MOVES:
        return [node.args[0]]
    operands = OpCall(node).operands
    return operands if matchers.match_join(node) is not None else operands[:1]


class ArrangementTracker:
    """The arrangements of nodes that move the elements of some tensors, computed when they are first read.

    Args:
        table: The factors of all arrangements; splits are added to it.
        known: The arrangements of the tensors.
    """

    def __init__(self, table: FactorTable, known: Mapping[Node, Arrangement]) -> None:
        self.table = table
        self._arrangements: dict[Node, Arrangement | None] = dict(known)

    def arrangement(self, node: Node) -> Arrangement | None:
        """Return the arrangement of this node's elements as factors of the known tensors, or None if it is unknown."""
        if node not in self._arrangements:
            self._arrangements[node] = self._move(node)
        return self._arrangements[node]

    def _move(self, node: Node) -> Arrangement | None:
        """Return the arrangement of a move (a node that only moves data) from those of its operands, else None."""
        join = matchers.match_join(node)
        if join is not None:
            pieces = [self.arrangement(operand) for operand in moved_operands(node)]
            known = [piece for piece in pieces if piece is not None]
            dim, is_new_dim = join
            return self.table.join(known, dim, is_new_dim) if len(known) == len(pieces) else None
        if matchers.is_rearrangement(node):
            x, order = self.arrangement(OpCall(node).operands[0]), matchers.permutation_of(node)
            if x is None:
                return None
            if order is None:  # a reshape
                return self.table.reshape(x, as_sizes(node.meta["val"].shape))
            return Arrangement(tuple(x.dims[dim] for dim in order), x.fixed)
        piece = matchers.match_piece(node)
        if piece is not None:
            return self._move_piece(piece)
        # The wait for a collective returns the value that it waits for.
        return self.arrangement(node.args[0]) if node.target is WAIT_OP else None

    def _move_piece(self, piece: matchers.SlicePiece) -> Arrangement | None:
        """Return the arrangement of a slice or select if it is one of several equal pieces, else None."""
        x = self.arrangement(piece.source)
        extent = as_sizes(piece.source.meta["val"].shape)[piece.dim]
        count, index = exact_quotient(extent, piece.length), exact_quotient(piece.start, piece.length)
        if x is None or piece.step != 1 or not isinstance(count, int) or not isinstance(index, int):
            return None
        return self.table.piece(x, piece.dim, count, index, piece.keeps_dim)
