"""Where data that is only moved ends up: a chain of views, permutes and copies as an arrangement of atoms.

An atom is a factor of a dim: splitting x (b, s, n * h, d) as (b, s, n, h, d) splits its third atom in two, a permute
orders atoms, a flatten puts several into one dim. Two chains move data alike if they arrange the atoms of one tensor
alike, however they are spelled. Sizes may be symbolic; what does not provably factor has no arrangement.

What a node that only moves data does to an arrangement of atoms, in graphs of ATen ops and of Dynamo's calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from sp_compile._compat import OpOverload, schema_of
from sp_compile.graph.sizes import Size, product, quotient, same, sizes

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
                outer, inner = self._split(atom, need, rest)
                taken.append(outer)
                waiting.append(inner)
                need = 1
            else:
                return None
        return tuple(taken), tuple(waiting[::-1])

    def _split(self, atom: int, outer: Size, inner: Size) -> Atoms:
        self._parts[atom] = (self.atom(outer), self.atom(inner))
        return self._parts[atom]

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

    def permute(self, x: Arrangement, order: Sequence[int]) -> Arrangement:
        """Result dim i is dim order[i]."""
        return Arrangement(tuple(x.dims[d] for d in order), x.fixed)

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


REGROUPS = frozenset(
    "view reshape _unsafe_view _reshape_alias flatten unflatten ravel unsqueeze squeeze view_as reshape_as alias "
    "contiguous clone expand expand_as wait_tensor".split()
)
PERMUTES = frozenset("permute transpose movedim moveaxis swapaxes swapdims t mT T numpy_T".split())
DIMS = {"hsplit": 1, "vsplit": 0, "dsplit": 2, "hstack": 1, "vstack": 0, "dstack": 2, "row_stack": 0}
PIECES = frozenset(
    "chunk split split_with_sizes tensor_split unsafe_chunk unsafe_split hsplit vsplit dsplit".split()
)
JOINS = frozenset("cat concat concatenate stack hstack vstack dstack row_stack".split())
COPIES = frozenset("contiguous clone reshape flatten ravel reshape_as _unsafe_view".split()) | JOINS
"""Ops that make, or may make, another tensor in memory."""

Value = Arrangement | list[Arrangement]


def name_of(node: Node) -> str:
    """The op's name without its overload, whether it is an ATen op, a torch function, a method or an attribute."""
    if isinstance(node.target, OpOverload):
        return schema_of(node.target).name.split("::")[1]
    if node.target is getattr:
        return str(node.args[1])
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")


def value_of(node: Node) -> Any:
    """The fake result: of ATen graphs "val", of Dynamo's "example_value"."""
    return node.meta["val"] if "val" in node.meta else node.meta.get("example_value")


def is_move(node: Node) -> bool:
    """Might it only move data?"""
    if node.op not in ("call_function", "call_method"):
        return False
    name = name_of(node)
    return (
        name in REGROUPS | PERMUTES | PIECES | JOINS
        or name
        in (
            "getitem",
            "unbind",
            "select",
            "slice",
            "narrow",
            "copy",
        )
        or (name == "einsum" and bool(_letters(node)))
    )


def operands(node: Node) -> list[Node]:
    """The tensors, or pieces of one, that it moves."""
    if name_of(node) == "copy":
        return [node.args[1]]
    if name_of(node) in JOINS:
        return list(_argument(node, 0, "tensors"))
    if name_of(node) == "einsum":
        return [node.args[1][0] if isinstance(node.args[1], list | tuple) else node.args[1]]
    return [node.args[0] if node.args else node.kwargs["input"]]


def _letters(node: Node) -> tuple[str, str] | None:
    """Of the dims before and after, if an einsum does nothing but permute."""
    one = len(node.args) == 2 and (not isinstance(node.args[1], list | tuple) or len(node.args[1]) == 1)
    given, _, made = str(node.args[0]).replace(" ", "").partition("->")
    permuted = given.isalpha() and len(set(given)) == len(given) and sorted(given) == sorted(made)
    return (given, made) if one and permuted else None


def _argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


class Mover:
    """Arrangements of the nodes that move what the leaves hold."""

    def __init__(self, index: IndexMap, leaves: Mapping[Node, Arrangement]) -> None:
        self.index = index
        self.known: dict[Node, Value | None] = dict(leaves)

    def tensor(self, node: Node) -> Arrangement | None:
        """Where the leaves' elements are in this tensor; None if it holds others, or that is not known."""
        found = self._value(node)
        return found if isinstance(found, Arrangement) else None

    def _value(self, node: Node) -> Value | None:
        if node not in self.known:
            self.known[node] = self._moved(node) if is_move(node) else None
        return self.known[node]

    def _moved(self, node: Node) -> Value | None:
        given = [self._value(x) if isinstance(x, Node) else None for x in operands(node)]
        if any(x is None for x in given):
            return None
        name, (first, *_) = name_of(node), given
        if name in JOINS:
            return self._join(node, given)
        if isinstance(first, list):
            index = node.args[1]
            return first[index] if name == "getitem" and isinstance(index, int) else None
        assert first is not None
        result = value_of(node)
        if name in REGROUPS | {"copy"} and isinstance(result, Tensor):
            # An expand that repeats has more elements than there are atoms, a copy into a larger tensor too.
            moved = result.dtype == value_of(operands(node)[0]).dtype
            return self.index.reshape(first, sizes(result.shape)) if moved else None
        if name == "einsum":
            before, after = _letters(node) or ("", "")
            return self.index.permute(first, [before.index(letter) for letter in after])
        if name in PERMUTES:
            return self.index.permute(first, _order(node, len(first.dims)))
        return self._pieces(node, name, first)

    def _join(self, node: Node, given: Sequence[Any]) -> Arrangement | None:
        if not all(isinstance(x, Arrangement) for x in given):
            return None
        new = name_of(node) == "stack"
        ndim, dim = len(given[0].dims), _dim(node, 1)
        return None if dim >= ndim + new else self.index.join(given, dim % (ndim + new), new)

    def _pieces(self, node: Node, name: str, x: Arrangement) -> Value | None:
        result = value_of(node)
        if name in PIECES and isinstance(result, list | tuple):
            dim = _dim(node, 2)
            if dim >= len(x.dims):
                return None
            dim %= len(x.dims)
            alike = {sizes(piece.shape)[dim] for piece in result}
            return self.index.pieces(x, dim, len(result), keep=True) if len(alike) == 1 else None
        if name == "unbind" and isinstance(result, list | tuple):
            return self.index.pieces(x, _argument(node, 1, "dim", 0) % len(x.dims), len(result), keep=False)
        if (
            name in ("slice", "narrow", "getitem")
            and isinstance(result, Tensor)
            and result.ndim == len(x.dims)
        ):
            return self._slice(node, x, sizes(result.shape))
        if name in ("select", "getitem"):
            dim, at = (0, node.args[1]) if name == "getitem" else (node.args[1], node.args[2])
            count = sizes(value_of(operands(node)[0]).shape)[dim]
            if isinstance(at, int) and isinstance(count, int):
                pieces = self.index.pieces(x, dim % len(x.dims), count, keep=False)
                return pieces[at] if pieces is not None else None
        return None

    def _slice(self, node: Node, x: Arrangement, shape: Sequence[Size]) -> Arrangement | None:
        """One of several equal pieces, as AOTAutograd writes chunk."""
        dim, start, step = _cut(node)
        count = quotient(sizes(value_of(operands(node)[0]).shape)[dim], shape[dim])
        at = quotient(start, shape[dim]) if isinstance(start, int) else None
        if step != 1 or not isinstance(count, int) or not isinstance(at, int):
            return None
        dim %= len(x.dims)
        pieces = self.index.pieces(x, dim, count, keep=True)
        return pieces[at] if pieces is not None else None


def _dim(node: Node, position: int) -> int:
    """Along which dim it cuts or joins."""
    dim = DIMS.get(name_of(node))
    return _argument(node, position, "dim", 0) if dim is None else dim


def _cut(node: Node) -> tuple[int, Any, Any]:
    """The dim, the start and the step of a slice; step 0: of several dims, or of none."""
    name = name_of(node)
    if name != "getitem":
        step = _argument(node, 4, "step", 1) if name == "slice" else 1
        return _argument(node, 1, "dim", 0), _argument(node, 2, "start", 0) or 0, step
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    cut = [d for d, part in enumerate(index) if part != slice(None)]
    if len(cut) != 1 or not isinstance(index[cut[0]], slice):
        return 0, 0, 0
    part = index[cut[0]]
    return cut[0], part.start or 0, 1 if part.step is None else part.step


def _order(node: Node, ndim: int) -> list[int]:
    """Which dim each dim of the result was: tried on a tensor whose dims all differ."""
    probe = torch.empty(tuple(range(2, 2 + ndim)), device="meta")
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: probe)
    if node.op == "call_method":
        result = getattr(probe, str(node.target))(*args[1:], **kwargs)
    else:
        result = node.target(*args, **kwargs)
    return [size - 2 for size in result.shape]
