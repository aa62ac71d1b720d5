"""Track the position of elements through views, permutes and copies, as an arrangement of factors.

Splitting x (b, s, n * h, d) as (b, s, n, h, d) splits the factor of its third dim in two. A permute reorders factors,
and a flatten combines several in one dim. Two chains move data equally if they arrange the factors of one tensor
equally, in any form of code. Sizes may be symbolic; a size that does not provably factor has no arrangement.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from sp_compile.lowering.torch_compat import OpOverload, schema_of
from sp_compile.passes.graph.call import WAIT_OPS, OpCall, parse_overloads
from sp_compile.passes.graph.sizes import Size, as_sizes, exact_quotient, is_same_size, size_product
from sp_compile.passes.sharding.factors import dim_factors
from sp_compile.passes.sharding.matchers import (
    SlicePiece,
    is_rearrangement,
    match_join,
    match_piece,
    nth_result,
    permutation_of,
)
from sp_compile.passes.sharding.reshape import reshape_rule

FactorIds = tuple[int, ...]
"""Numbers of the factors of a dim, outermost first."""


@dataclass(frozen=True)
class Arrangement:
    """The factors of each dim of a tensor."""

    dims: tuple[FactorIds, ...]  # factors of each dim
    fixed: tuple[tuple[FactorIds, int], ...] = ()  # for a piece of a larger tensor: removed factors and their index


@dataclass
class IndexMap:
    """The factors of some tensors, and how they were split."""

    _sizes: list[Size] = field(default_factory=list)
    _parts: dict[int, FactorIds] = field(default_factory=dict)

    def factor(self, size: Size) -> int:
        """Create a factor of the given size."""
        self._sizes.append(size)
        return len(self._sizes) - 1

    def tensor(self, shape: Sequence[Size]) -> Arrangement:
        """Return the arrangement of a new tensor, with one factor per dim."""
        return Arrangement(tuple((self.factor(size),) for size in shape))

    def resolve(self, factors: Sequence[int]) -> list[int]:
        """Return the current parts of the factors, without those of size 1."""
        out: list[int] = []
        for factor in factors:
            if factor in self._parts:
                out += self.resolve(self._parts[factor])
            elif not is_same_size(self._sizes[factor], 1):
                out.append(factor)
        return out

    def order(self, x: Arrangement) -> list[int]:
        """Return all factors in the order of a row-major copy."""
        return [factor for dim in x.dims for factor in self.resolve(dim)]

    def size(self, factors: Sequence[int]) -> Size:
        """Return the product of the factors."""
        return size_product(self._sizes[factor] for factor in factors)

    def same_factors(self, a: Sequence[int], b: Sequence[int]) -> bool:
        """Return True if both are the same factors in the same order."""
        return self.resolve(a) == self.resolve(b)

    def equal(self, a: Arrangement, b: Arrangement) -> bool:
        """Return True if both have the same elements at the same positions."""
        equal = len(a.dims) == len(b.dims) and all(map(self.same_factors, a.dims, b.dims))
        return equal and not a.fixed and not b.fixed

    def take(self, dim: FactorIds, length: Size) -> tuple[FactorIds, FactorIds] | None:
        """Return the leading factor of this size and the rest, and split a larger factor; None if impossible."""
        rest = exact_quotient(self.size(dim), length)
        found = self.reshape(Arrangement((dim,)), (length, rest)) if rest is not None else None
        return None if found is None else (found.dims[0], found.dims[1])

    # The effects of ops; None if the result has no arrangement.

    def reshape(self, x: Arrangement, shape: Sequence[Size]) -> Arrangement | None:
        """Return the same row-major order in other dims; a factor in several of them is split."""
        order = self.order(x)
        rule = reshape_rule(tuple(self._sizes[factor] for factor in order), tuple(shape))
        if rule.kinds:
            return None
        known: dict[str, int] = {}
        for factor, dim in zip(order, rule.operands[0]):
            names = dim_factors(dim)
            if len(names) > 1:
                self._parts[factor] = tuple(self.factor(rule.extents[name]) for name in names)
            known |= zip(names, self._parts.get(factor, (factor,)))
        return Arrangement(tuple(tuple(known[name] for name in dim_factors(dim)) for dim in rule.results[0]), x.fixed)

    def piece(self, x: Arrangement, dim: int, count: int, at: int, keep: bool) -> Arrangement | None:
        """Return one of `count` equal pieces of a dim, or None.

        Without `keep` the piece is one position, and the dim is removed.
        """
        cut = self.take(x.dims[dim], count)
        if cut is None or (not keep and self.resolve(cut[1])):
            return None
        dims = (*x.dims[:dim], *([cut[1]] if keep else []), *x.dims[dim + 1 :])
        return Arrangement(dims, (*x.fixed, (cut[0], at)))

    def join(self, parts: Sequence[Arrangement], dim: int, new: bool) -> Arrangement | None:
        """Undo `piece`, possibly along another dim: a `new` one or an existing one."""
        first = parts[0]
        if not first.fixed:
            return None
        (factors, _), others = first.fixed[-1], first.fixed[:-1]
        if not is_same_size(self.size(self.resolve(factors)), len(parts)):
            return None
        for i, part in enumerate(parts):
            if len(part.dims) != len(first.dims) or len(part.fixed) != len(first.fixed):
                return None
            if not self._same_place(part.fixed, (*others, (factors, i))) or not all(
                map(self.same_factors, part.dims, first.dims)
            ):
                return None
        dims = list(first.dims)
        if new:
            dims.insert(dim, factors)
        else:
            dims[dim] = (*factors, *dims[dim])
        return Arrangement(tuple(dims), others)

    def _same_place(self, a: Sequence[tuple[FactorIds, int]], b: Sequence[tuple[FactorIds, int]]) -> bool:
        return all(i == j and self.same_factors(x, y) for (x, i), (y, j) in zip(a, b))


PASSTHROUGH_MOVES = (operator.getitem, WAIT_OPS)
MAY_COPY = parse_overloads("contiguous reshape reshape_as flatten.using_ints ravel")


def is_view(node: Node) -> bool:
    """Return True if the value shares the storage of its first operand for all strides."""
    if node.target in PASSTHROUGH_MOVES or not isinstance(node.target, OpOverload):
        return node.target in PASSTHROUGH_MOVES
    return node.target not in MAY_COPY and all(result.alias_info for result in schema_of(node.target).returns)


def is_move(node: Node) -> bool:
    """Return True if the node may only move data."""
    moves = node.target in PASSTHROUGH_MOVES or is_rearrangement(node)
    return moves or match_join(node) is not None or nth_result(node, 0) is not None


def moved_operands(node: Node) -> list[Node]:
    """Return the operands, or pieces of one, that the node moves. Other operands only provide a shape."""
    if node.target in PASSTHROUGH_MOVES:
        return [node.args[0]]
    found = OpCall(node).operands
    return found if match_join(node) is not None else found[:1]


class ArrangementTracker:
    """The arrangements of nodes that move the elements of the leaves."""

    def __init__(self, index: IndexMap, leaves: Mapping[Node, Arrangement]) -> None:
        self.index = index
        self.known: dict[Node, Arrangement | None] = dict(leaves)

    def tensor(self, node: Node) -> Arrangement | None:
        """Return the arrangement of the leaves' elements in this tensor, or None if it is unknown."""
        if node not in self.known:
            self.known[node] = self._move(node)
        return self.known[node]

    def _move(self, node: Node) -> Arrangement | None:
        join = match_join(node)
        if join is not None:
            parts = [self.tensor(operand) for operand in moved_operands(node)]
            known = [part for part in parts if part is not None]
            return self.index.join(known, *join) if len(known) == len(parts) else None
        if is_rearrangement(node):
            x, order = self.tensor(OpCall(node).operands[0]), permutation_of(node)
            if order is None:
                return x and self.index.reshape(x, as_sizes(node.meta["val"].shape))
            return x and Arrangement(tuple(x.dims[d] for d in order), x.fixed)
        piece = match_piece(node)
        if piece is not None:
            x = self.tensor(piece.source)
            return x and self._piece(x, piece)
        return self.tensor(node.args[0]) if node.target is WAIT_OPS else None

    def _piece(self, x: Arrangement, piece: SlicePiece) -> Arrangement | None:
        """Return the arrangement of one of several equal pieces, or None."""
        extent = as_sizes(piece.source.meta["val"].shape)[piece.dim]
        count, at = exact_quotient(extent, piece.length), exact_quotient(piece.start, piece.length)
        if piece.step != 1 or not isinstance(count, int) or not isinstance(at, int):
            return None
        return self.index.piece(x, piece.dim, count, at, piece.keeps_dim)
