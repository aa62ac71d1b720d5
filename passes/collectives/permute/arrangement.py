"""Where data that is only moved ends up: a chain of views, permutes and copies as an arrangement of atoms.

An atom is a factor of a dim: splitting x (b, s, n * h, d) as (b, s, n, h, d) splits its third atom in two, a permute
orders atoms, a flatten puts several into one dim. Two chains move data alike if they arrange the atoms of one tensor
alike, however they are spelled. Sizes may be symbolic; what does not provably factor has no arrangement.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from sp_compile._compat import OpOverload, schema_of
from sp_compile.graph.call import Call, overloads
from sp_compile.graph.sizes import Size, product, quotient, same, sizes
from sp_compile.sharding.matchers import Piece, join_of, nth_piece, order_of, piece_of, rearranges

Atoms = tuple[int, ...]
"""Outermost first."""


@dataclass(frozen=True)
class Arrangement:
    """The atoms of each dim; fixed: at which index of which atoms this piece of a larger tensor was taken."""

    dims: tuple[Atoms, ...]
    fixed: tuple[tuple[Atoms, int], ...] = ()


@dataclass
class IndexMap:
    """The atoms of some tensors, and how they were split."""

    _sizes: list[Size] = field(default_factory=list)
    _parts: dict[int, Atoms] = field(default_factory=dict)

    def atom(self, size: Size) -> int:
        """A new one."""
        self._sizes.append(size)
        return len(self._sizes) - 1

    def tensor(self, shape: Sequence[Size]) -> Arrangement:
        """One atom a dim."""
        return Arrangement(tuple((self.atom(size),) for size in shape))

    def resolve(self, atoms: Sequence[int]) -> list[int]:
        """As they are split by now, without those of size 1."""
        out: list[int] = []
        for atom in atoms:
            if atom in self._parts:
                out += self.resolve(self._parts[atom])
            elif not same(self._sizes[atom], 1):
                out.append(atom)
        return out

    def order(self, x: Arrangement) -> list[int]:
        """All atoms as they follow each other in a row-major copy."""
        return [atom for dim in x.dims for atom in self.resolve(dim)]

    def size(self, atoms: Sequence[int]) -> Size:
        """Their product."""
        return product(self._sizes[atom] for atom in atoms)

    def alike(self, a: Sequence[int], b: Sequence[int]) -> bool:
        """Are these the same atoms in the same order?"""
        return self.resolve(a) == self.resolve(b)

    def equal(self, a: Arrangement, b: Arrangement) -> bool:
        """Do both hold the same elements at the same places?"""
        alike = len(a.dims) == len(b.dims) and all(map(self.alike, a.dims, b.dims))
        return alike and not a.fixed and not b.fixed

    def take(self, atoms: Sequence[int], size: Size) -> tuple[Atoms, Atoms] | None:
        """The leading factor of this size, and the rest; an atom is split where it holds more."""
        waiting, taken, need = self.resolve(atoms)[::-1], [], size
        while not same(need, 1):
            if not waiting:
                return None
            atom = waiting.pop()
            have = self._sizes[atom]
            if (left := quotient(need, have)) is not None:
                taken.append(atom)
                need = left
            elif (rest := quotient(have, need)) is not None:
                outer, inner = self._parts[atom] = self.atom(need), self.atom(rest)
                taken.append(outer)
                waiting.append(inner)
                need = 1
            else:
                return None
        return tuple(taken), tuple(waiting[::-1])

    # What ops do. None: it cannot be said.

    def reshape(self, x: Arrangement, shape: Sequence[Size]) -> Arrangement | None:
        """The same row-major order in other dims."""
        rest: Atoms = tuple(self.order(x))
        dims = []
        for size in shape:
            cut = self.take(rest, size)
            if cut is None:
                return None
            dims.append(cut[0])
            rest = cut[1]
        return None if self.resolve(rest) else Arrangement(tuple(dims), x.fixed)

    def piece(self, x: Arrangement, dim: int, count: int, at: int, keep: bool) -> Arrangement | None:
        """One of `count` equal pieces along a dim; unless keep, it is one position, and the dim goes."""
        cut = self.take(x.dims[dim], count)
        if cut is None or (not keep and self.resolve(cut[1])):
            return None
        dims = (*x.dims[:dim], *([cut[1]] if keep else []), *x.dims[dim + 1 :])
        return Arrangement(dims, (*x.fixed, (cut[0], at)))

    def join(self, parts: Sequence[Arrangement], dim: int, new: bool) -> Arrangement | None:
        """Undo `piece`, perhaps along another dim, a `new` one or one that is there."""
        first = parts[0]
        if not first.fixed:
            return None
        (atoms, _), others = first.fixed[-1], first.fixed[:-1]
        if not same(self.size(self.resolve(atoms)), len(parts)):
            return None
        for i, part in enumerate(parts):
            if len(part.dims) != len(first.dims) or len(part.fixed) != len(first.fixed):
                return None
            if not self._same_place(part.fixed, (*others, (atoms, i))) or not all(
                map(self.alike, part.dims, first.dims)
            ):
                return None
        dims = list(first.dims)
        if new:
            dims.insert(dim, atoms)
        else:
            dims[dim] = (*atoms, *dims[dim])
        return Arrangement(tuple(dims), others)

    def _same_place(self, a: Sequence[tuple[Atoms, int]], b: Sequence[tuple[Atoms, int]]) -> bool:
        return all(i == j and self.alike(x, y) for (x, i), (y, j) in zip(a, b))


WAIT = torch.ops._c10d_functional.wait_tensor.default
PASSED_ON = (operator.getitem, WAIT)
MAY_COPY = overloads("contiguous reshape reshape_as flatten.using_ints ravel")


def op_of(node: Node) -> Any:
    """The ATen op that the node calls, whichever of its overloads; None if it calls none."""
    return getattr(node.target, "overloadpacket", None) if node.op == "call_function" else None


def is_view(node: Node) -> bool:
    """Does the value lie in the memory of its first operand, whatever the strides?"""
    if node.target in PASSED_ON or not isinstance(node.target, OpOverload):
        return node.target in PASSED_ON
    return node.target not in MAY_COPY and all(result.alias_info for result in schema_of(node.target).returns)


def is_move(node: Node) -> bool:
    """Might it only move data?"""
    moves = node.target in PASSED_ON or rearranges(node)
    return moves or join_of(node) is not None or nth_piece(node, 0) is not None


def operands(node: Node) -> list[Node]:
    """The tensors, or pieces of one, that it moves. Others only lend their shape."""
    if node.target in PASSED_ON:
        return [node.args[0]]
    found = Call(node).operands
    return found if join_of(node) is not None else found[:1]


class Mover:
    """Arrangements of the nodes that move what the leaves hold."""

    def __init__(self, index: IndexMap, leaves: Mapping[Node, Arrangement]) -> None:
        self.index = index
        self.known: dict[Node, Arrangement | None] = dict(leaves)

    def tensor(self, node: Node) -> Arrangement | None:
        """Where the leaves' elements are in this tensor; None if it holds others, or that is not known."""
        if node not in self.known:
            self.known[node] = self._moved(node)
        return self.known[node]

    def _moved(self, node: Node) -> Arrangement | None:
        join = join_of(node)
        if join is not None:
            parts = [self.tensor(operand) for operand in operands(node)]
            known = [part for part in parts if part is not None]
            return self.index.join(known, *join) if len(known) == len(parts) else None
        if rearranges(node):
            x, order = self.tensor(Call(node).operands[0]), order_of(node)
            if order is None:
                return x and self.index.reshape(x, sizes(node.meta["val"].shape))
            return x and Arrangement(tuple(x.dims[d] for d in order), x.fixed)
        piece = piece_of(node)
        if piece is not None:
            x = self.tensor(piece.source)
            return x and self._piece(x, piece)
        return self.tensor(node.args[0]) if node.target is WAIT else None

    def _piece(self, x: Arrangement, piece: Piece) -> Arrangement | None:
        """One of several equal pieces."""
        extent = sizes(piece.source.meta["val"].shape)[piece.dim]
        count, at = quotient(extent, piece.length), quotient(piece.start, piece.length)
        if piece.step != 1 or not isinstance(count, int) or not isinstance(at, int):
            return None
        return self.index.piece(x, piece.dim, count, at, piece.keeps)
