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

from sp_compile.graph.call import Call
from sp_compile.graph.sizes import Size, product, quotient, same
from sp_compile.sharding.matchers import order_of, piece_of

aten, c10d = torch.ops.aten, torch.ops._c10d_functional

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

    def pieces(self, x: Arrangement, dim: int, count: int, keep: bool) -> list[Arrangement] | None:
        """Equal pieces along a dim; unless keep, each is one position, and the dim goes."""
        cut = self.take(x.dims[dim], count)
        if cut is None or (not keep and self.resolve(cut[1])):
            return None
        dims = [*x.dims[:dim], *([cut[1]] if keep else []), *x.dims[dim + 1 :]]
        return [Arrangement(tuple(dims), (*x.fixed, (cut[0], i))) for i in range(count)]

    def join(self, parts: Sequence[Arrangement], dim: int, new: bool) -> Arrangement | None:
        """Undo `pieces`, perhaps along another dim, a `new` one or one that is there."""
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


def _ops(names: str) -> frozenset[Any]:
    return frozenset(getattr(aten, name) for name in names.split())


REGROUPS = _ops(
    "view reshape _unsafe_view _reshape_alias flatten unflatten ravel unsqueeze squeeze view_as reshape_as alias "
    "contiguous clone expand expand_as"
) | {c10d.wait_tensor}
PERMUTES = _ops("permute transpose movedim moveaxis swapaxes swapdims t mT numpy_T")
PIECES = _ops("chunk split split_with_sizes tensor_split unsafe_chunk unsafe_split hsplit vsplit dsplit unbind")
ONE_PIECE = _ops("slice narrow select")
JOINS = _ops("cat concat concatenate stack hstack vstack dstack row_stack")
MOVES = REGROUPS | PERMUTES | PIECES | ONE_PIECE | JOINS
COPIES = JOINS | _ops("contiguous clone reshape flatten ravel reshape_as _unsafe_view")
"""Ops that make, or may make, another tensor in memory."""
DIMS = {
    op: d
    for names, d in (("vsplit vstack row_stack", 0), ("hsplit hstack", 1), ("dsplit dstack", 2))
    for op in _ops(names)
}

Arrangements = Arrangement | list[Arrangement]


def op_of(node: Node) -> Any:
    """The ATen op that the node calls, whichever of its overloads; None if it calls none."""
    return getattr(node.target, "overloadpacket", None) if node.op == "call_function" else None


def is_move(node: Node) -> bool:
    """Might it only move data?"""
    op = op_of(node)
    return op in MOVES or _is_getitem(node) or (op is aten.einsum and _order(node) is not None)


def operands(node: Node) -> list[Node]:
    """The tensors, or pieces of one, that it moves. Others only lend their shape."""
    if _is_getitem(node):
        return [node.args[0]]
    found = Call(node).operands
    return found if op_of(node) in JOINS else found[:1]


def _is_getitem(node: Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def _order(node: Node) -> Sequence[int] | None:
    """The dims of the operand in the order of the result's; None of an einsum that does more than that."""
    if op_of(node) is not aten.einsum:
        return order_of(node)
    given, _, made = str(Call(node)["equation"]).replace(" ", "").partition("->")
    once = given.isalpha() and len(set(given)) == len(given)
    return [given.index(letter) for letter in made] if once and sorted(given) == sorted(made) else None


class Mover:
    """Arrangements of the nodes that move what the leaves hold."""

    def __init__(self, index: IndexMap, leaves: Mapping[Node, Arrangement]) -> None:
        self.index = index
        self.known: dict[Node, Arrangements | None] = dict(leaves)

    def tensor(self, node: Node) -> Arrangement | None:
        """Where the leaves' elements are in this tensor; None if it holds others, or that is not known."""
        found = self._value(node)
        return found if isinstance(found, Arrangement) else None

    def _value(self, node: Node) -> Arrangements | None:
        if node not in self.known:
            self.known[node] = self._moved(node) if is_move(node) else None
        return self.known[node]

    def _moved(self, node: Node) -> Arrangements | None:
        given = [self._value(x) for x in operands(node)]
        if any(x is None for x in given):
            return None
        if _is_getitem(node):
            return given[0][node.args[1]] if isinstance(given[0], list) else None
        parts = [x for x in given if isinstance(x, Arrangement)]
        op, call = op_of(node), Call(node)
        if op in JOINS:
            return self._join(call, op, parts)
        (x,) = parts
        if op in REGROUPS:
            # An expand that repeats has more elements than there are atoms.
            moved = node.meta["val"].dtype == call.operands[0].meta["val"].dtype
            return self.index.reshape(x, call.result_shapes()[0]) if moved else None
        if op in PERMUTES or op is aten.einsum:
            order = _order(node)
            return Arrangement(tuple(x.dims[d] for d in order), x.fixed) if order is not None else None
        return self._pieces(call, op, x)

    def _join(self, call: Call, op: Any, parts: Sequence[Arrangement]) -> Arrangement | None:
        new = op is aten.stack
        ndim, dim = len(parts[0].dims), DIMS[op] if op in DIMS else call["dim"]
        return None if dim >= ndim + new else self.index.join(parts, dim % (ndim + new), new)

    def _pieces(self, call: Call, op: Any, x: Arrangement) -> Arrangements | None:
        dim = DIMS[op] if op in DIMS else call["dim"]
        if dim >= len(x.dims):
            return None
        dim %= len(x.dims)
        if op in ONE_PIECE:
            return self._one_piece(call, x)
        shapes, keep = call.result_shapes(), op is not aten.unbind
        equal = not keep or len({shape[dim] for shape in shapes}) == 1
        return self.index.pieces(x, dim, len(shapes), keep) if equal else None

    def _one_piece(self, call: Call, x: Arrangement) -> Arrangement | None:
        """One of several equal pieces, as AOTAutograd writes chunk."""
        piece = piece_of(call.node)
        if piece is None or piece.step != 1 or not isinstance(piece.start, int):
            return None
        count, at = quotient(call.shape()[piece.dim], piece.length), quotient(piece.start, piece.length)
        pieces = self.index.pieces(x, piece.dim, count, piece.keeps) if isinstance(count, int) else None
        return pieces[at] if pieces is not None and isinstance(at, int) else None
