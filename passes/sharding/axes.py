"""Name the dims of all values, by union-find over the atoms of dims.

A dim is a product of atoms, (class, size): flattening (B, S) creates a dim of two atoms. Atoms join one class if a rule
passes their factor, such as the S of x and of linear(x, w). The classes that attention attends over are the sequence
(`find_sequences.py`); a dim or atom of such a class contains the sequence. Sizes alone identify nothing, because S may
equal the hidden size. Slices and paddings keep the class with another size, because a window of a sequence belongs to
it. An index, an index_select or a slice selects positions of a dim; the result is a new class, and `Axes.selected`
relates it to its source.

A product is a run of several atoms that attention attends over: the tokens of an image are H * W patches, those of a
video T * H * W. `name_axes` then names the dims again with one atom for each product, so that it can be a sequence. A
value with a factor of a product in a dim of its own, such as the image before it is flattened, does not contain it.
A split is the reverse: a reshape of an atom into factors, such as chunks and the positions of a chunk.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch.fx import GraphModule, Node

from sp_compile.passes.graph.call import OpCall, is_tensor, node_shape, result_number
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.sizes import (
    Size,
    as_size,
    assume_large,
    ceil_div,
    divides,
    is_most_of,
    is_same_size,
    size_product,
)

from .attention_axes import ATTENTION_OF_TORCH, all_attention_nodes
from .factors import BoundRule, Dims, dim_factors
from .placement import Frame, Placement, Shard
from .reshape import reshape_rule
from .rule import lookup_rule, transfer_of
from .window_rules import SlidingRows


@dataclass(frozen=True)
class Atom:
    """Factor of a dim."""

    name: int  # name of its class, see `Axes.find`
    size: Size  # number of positions


Dim = tuple[Atom, ...]


class Product(NamedTuple):
    """Run of the atoms of a dim that is one sequence."""

    factors: Dim  # atoms with the representative names of their classes
    start: int  # index of the first factor in the dim
    num_atoms: int  # atoms of the dim before they are fused


class Split(NamedTuple):
    """Split of an atom into factors by a reshape, as of a sequence into chunks."""

    source: Atom  # the atom
    factors: Dim  # the atoms of the factors, slowest first


@dataclass
class Axes:
    """Atoms of every dim of every value, and the classes that are sequences."""

    dims: dict[tuple[Node, int], tuple[Dim, ...]] = field(default_factory=dict)  # dims by (node, result index)
    parent: list[int] = field(default_factory=list)  # union-find forest over class names
    sequences: set[int] = field(default_factory=set)  # names of the classes that are sequences
    # (selected, source): a dim, and the dim that it contains positions of
    selected: list[tuple[Dim, Dim]] = field(default_factory=list)
    lost: dict[int, str] = field(default_factory=dict)  # why a class that may be a sequence is none
    folds: int = 1  # of the frames of sequences, see `RowOrder`
    products: Mapping[tuple[Node, int, int], Product] = field(default_factory=dict)  # by (node, result index, dim)
    fused: dict[Dim, Atom] = field(default_factory=dict)  # the atom of each product, by its factors
    splits: dict[tuple[Size, ...], list[Split]] = field(default_factory=dict)  # by the sizes of their factors
    granules: dict[int, int] = field(default_factory=dict)  # positions of a chunk, by class; see `find_sequences`
    blocks: dict[int, int] = field(default_factory=dict)  # positions of a chunk, by class of the dim of chunks
    strides: dict[tuple[int, Size], int] = field(default_factory=dict)  # of windows, by class and number of rows
    joined: list[tuple[Atom, Size]] = field(default_factory=list)  # parts of concatenations, and their first positions
    n: int = 1  # number of ranks, of which each has complete chunks

    def find(self, name: int) -> int:
        """Return the representative name of the class of `name`."""
        while self.parent[name] != name:
            self.parent[name] = self.parent[self.parent[name]]
            name = self.parent[name]
        return name

    def new_atom(self, size: Size) -> Atom:
        """Create an atom of a new class."""
        self.parent.append(len(self.parent))
        return Atom(len(self.parent) - 1, size)

    def join(self, a: Dim, b: Dim) -> None:
        """Merge the classes of two dims, atom by atom; a no-op if their factor sizes differ."""
        if len(a) == len(b) and all(is_same_size(x.size, y.size) for x, y in zip(a, b)):
            for x, y in zip(a, b):
                self.parent[self.find(x.name)] = self.find(y.name)

    def canonical(self, dim: Dim) -> Dim:
        """Return the atoms of a dim that are longer than 1, named by the representatives of their classes."""
        return tuple(Atom(self.find(a.name), a.size) for a in dim if not is_same_size(a.size, 1))

    def set_result(self, node: Node, index: int, dims: Sequence[Dim]) -> None:
        """Set the atoms of a result's dims, and replace the factors of products by the atom of the product."""
        fused = []
        for d, dim in enumerate(dims):
            product = self.products.get((node, index, d))
            if product is not None and len(dim) == product.num_atoms:  # else an operand has the product already
                if product.factors not in self.fused:
                    self.fused[product.factors] = self.new_atom(size_product(a.size for a in product.factors))
                end = product.start + len(product.factors)
                dim = (*dim[: product.start], self.fused[product.factors], *dim[end:])
            fused.append(dim)
        self.dims[node, index] = tuple(fused)

    def split(self, source: Atom, extents: tuple[Size, ...]) -> Dim:
        """Return the atoms of the factors of an atom; equal splits of a class have the same atoms."""
        for known in self.splits.setdefault(extents, []):
            if known.source.size == source.size and self.find(known.source.name) == self.find(source.name):
                return known.factors
        self.splits[extents].append(Split(source, tuple(self.new_atom(size) for size in extents)))
        return self.splits[extents][-1].factors

    def unsplit(self, dim: Dim) -> Dim:
        """Return the dim with the source of a split in place of its factors."""
        factors = self.canonical(dim)
        for known in self.splits.get(tuple(a.size for a in factors), ()):
            if self.canonical(known.factors) == factors:
                return (known.source,)
        return dim

    def all_splits(self) -> Iterator[Split]:
        """Yield all splits of atoms."""
        return (split for splits in self.splits.values() for split in splits)

    def is_sequence(self, atom: Atom) -> bool:
        """Return True if the class of the atom is a sequence."""
        return self.find(atom.name) in self.sequences

    def sequence_dims(self, node: Node) -> list[int]:
        """Return the dims of a value that contain a sequence."""
        dims = self.dims.get((node, 0), ())
        return [d for d, dim in enumerate(dims) if any(self.is_sequence(a) for a in dim)]

    def longest_sequence(self) -> Size:
        """Return the length of the longest sequence, of which all others are windows."""
        return max((a.size for a in self._atoms() if self.is_sequence(a)), key=assume_large, default=0)

    def shard(self, node: Node) -> Shard | None:
        """Return the shard along the only sequence factor of a value, or None if it has none or several."""
        atoms = [
            (d, i)
            for d in self.sequence_dims(node)
            for i, atom in enumerate(self.dims[node, 0][d])
            if self.is_sequence(atom)
        ]
        if len(atoms) != 1:
            return None
        ((d, i),) = atoms
        sizes = [atom.size for atom in self.dims[node, 0][d]]
        if is_same_size(sizes[i], 1):
            return None
        frame = self._frame(self.dims[node, 0][d][i])
        return Shard(d, frame, size_product(sizes[:i]), size_product(sizes[i + 1 :]))

    def in_chunks(self, node: Node, index: int, placement: Placement) -> Placement:
        """Return the placement of a result with the granule and the block of its sequence.

        Arguments of sp:: ops, which define placements of their own, have neither.
        """
        if not self.granules or not isinstance(placement, Shard) or (node, index) not in self.dims:
            return placement
        frame = placement.frame
        for atom in self.dims[node, index][placement.dim]:
            name = self.find(atom.name)
            granule, block = self.granules.get(name, 1), self.blocks.get(name, 1)
            if max(granule, block) > 1 and divides(granule * self.n * frame.order.chunks, frame.size):
                return replace(placement, frame=replace(frame, granule=granule, block=block))
        return placement

    def _frame(self, atom: Atom) -> Frame:
        """Return the frame of a sequence of which the atom is the only factor."""
        name = self.find(atom.name)
        starts = [start for part, start in self.joined if part.size == atom.size and self.find(part.name) == name]
        if self.n == 1 or not (starts or name in self.granules):
            unit = self.n * self.strides.get((name, atom.size), 1)
            size = unit * ceil_div(atom.size, unit)
            is_strided = unit > self.n and self.folds == 1 and is_most_of(atom.size, size)
            return Frame(size, 0, atom.size) if is_strided else Frame.full(atom.size, self.folds)
        longest = max((a.size for a in self._atoms() if self.find(a.name) == name), key=assume_large)
        frame = Frame.of_chunks(atom.size, longest, self.granules.get(name, 1), self.n, self.folds)
        size = frame.size if name in self.granules else longest
        return replace(frame, size=size, start=starts[0] if starts else 0)

    def _atoms(self) -> Iterator[Atom]:
        """Yield the atoms of all dims."""
        return (a for dims in self.dims.values() for dim in dims for a in dim)


def name_axes(gm: GraphModule) -> Axes:
    """Name every dim of every value of the graph.

    Returns:
        The axes; `sequences` is empty until `find_sequences`.
    """
    axes = _name_axes(gm, Axes())
    products = dict(_find_products(gm, axes))
    return _name_axes(gm, Axes(products=products)) if products else axes


Evidence = Iterable[tuple[Node, Dim]]  # op, and a dim that is a sequence because of it


def attended_dims(gm: GraphModule, axes: Axes) -> Evidence:
    """Yield the token dims of q and k of all attention nodes, the strongest evidence for a sequence."""
    for node in all_attention_nodes(gm):
        yield from ((node, axes.dims[operand, 0][-2]) for operand in OpCall(node).operands[:2])
    for op, dim in ATTENTION_OF_TORCH.items():
        for node in gm.graph.find_nodes(op="call_function", target=op):
            yield from ((node, axes.dims[operand, 0][dim]) for operand in node.args[:2])


def _joined_dims(gm: GraphModule, axes: Axes) -> Evidence:
    """Yield the dims of the parts of concatenations of sequences, along which they are padded."""
    for node in gm.graph.nodes:
        if node_info(node).joins:
            x = OpCall(node).operands[0]
            changed = (not is_same_size(a, b) for a, b in zip(node_shape(x), node_shape(node)))
            yield node, axes.dims[x, 0][list(changed).index(True)]


def _find_products(gm: GraphModule, axes: Axes) -> Iterator[tuple[tuple[Node, int, int], Product]]:
    """Yield every dim, as (node, result index, dim), that contains a product over which attention attends."""
    attended = {axes.canonical(dim) for _, dim in (*attended_dims(gm, axes), *_joined_dims(gm, axes))}
    products = sorted((dim for dim in attended if len(dim) > 1), key=len, reverse=True)
    for (node, index), dims in axes.dims.items() if products else ():
        for d, dim in enumerate(dims):
            atoms = axes.canonical(dim)
            for factors in products if len(atoms) == len(dim) else ():
                starts = range(len(atoms) - len(factors) + 1)
                start = next((i for i in starts if atoms[i : i + len(factors)] == factors), None)
                if start is not None:
                    yield (node, index, d), Product(factors, start, len(dim))
                    break


def _name_axes(gm: GraphModule, axes: Axes) -> Axes:
    """Name every dim of every value in `axes`, and return it."""
    for node in gm.graph.nodes:
        call, rule = lookup_rule(node) or (None, None)
        if call is not None and transfer_of(node.target) is not None:  # the identity, in the global view
            axes.dims.update({(node, i): axes.dims[operand, 0] for i, operand in enumerate(call.operands)})
            if node_info(node).is_apart:
                dims, dim = axes.dims[node, 0], call.dim()
                axes.dims[node, 0] = (*dims[:dim], (axes.new_atom(call.shape()[dim]),), *dims[dim + 1 :])
        elif call is not None and rule is not None:
            _name_results(axes, call, rule)
        elif node.op == "call_function" and node.target in ATTENTION_OF_TORCH:
            query, _, value = node.args[:3]
            axes.dims[node, 0] = (*axes.dims[query, 0][:-1], axes.dims[value, 0][-1])
        elif node.target is operator.getitem:
            source, index = node.args
            if is_tensor(node) and isinstance(index, int) and (source, result_number(node)) in axes.dims:
                axes.dims[node, 0] = axes.dims[source, result_number(node)]
        if is_tensor(node) and (node, 0) not in axes.dims:
            axes.dims[node, 0] = tuple((axes.new_atom(as_size(s)),) for s in node.meta["val"].shape)
    for node in all_attention_nodes(gm):
        _join_vectors(axes, OpCall(node))
    return axes


def _join_vectors(axes: Axes, call: OpCall) -> None:
    """Join the dims of vectors that a predicate indexes by query or key with the attended dims.

    The rule of attention does not relate them, because every rank reads the full vectors.
    """
    for name, operand in (("rows", 0), ("cols", 1)):
        for vector in call.get(name, []):
            axes.join(axes.dims[vector, 0][-1], axes.dims[call.operands[operand], 0][-2])


def _name_results(axes: Axes, call: OpCall, rule: BoundRule) -> None:
    """Set `axes.dims` of the results from the factors of the operands, and record selected dims."""
    factor_dims: dict[str, Dim] = {}  # atoms of each factor
    for i, operand in enumerate(call.operands):
        if i in rule.lenders:
            continue
        for dim, f in value_factors(axes, operand, rule, rule.operands[i]):
            if f in factor_dims:
                axes.join(dim, factor_dims[f])
            if f not in factor_dims or len(dim) > len(factor_dims[f]):  # the finer factorization has more information
                factor_dims[f] = dim
    for i, (shape, names) in enumerate(zip(call.result_shapes(), rule.results)):
        dims = tuple(_result_dim(axes, factor_dims, name, rule, size) for size, name in zip(shape, names))
        axes.set_result(call.node, i, dims)
        for dim, f in zip(axes.dims[call.node, i], names):
            source = factor_dims.get(f if rule.kind(f) == "window" else rule.picks.get(f, ""))
            part = factor_dims.get(f, ())
            if f in rule.slides and len(part) == 1 and node_info(call.node).joins:
                axes.joined.append((part[0], rule.slides[f].before))
            if source is not None and dim != source:
                axes.selected.append((dim, source))


def value_factors(axes: Axes, operand: Node, rule: BoundRule, dims: Dims) -> Iterator[tuple[Dim, str]]:
    """Yield every factor of a value with its atoms; `dims` are the names of its dims in the rule."""
    for dim, name in zip(axes.dims[operand, 0], dims):
        if name[:1] == "(":
            factors = dim_factors(name)
            yield from zip(_split_dim(axes, dim, [rule.extents[f] for f in factors]), factors)
        elif name:
            yield dim, name


def _split_dim(axes: Axes, dim: Dim, extents: Sequence[Size]) -> Iterator[Dim]:
    """Yield the atoms of each factor of a dim; a factor that would split an atom gets a new atom.

    `extents` are the sizes of the factors.
    """
    atoms = [a for a in dim if not is_same_size(a.size, 1)]
    long_extents = [e for e in extents if not is_same_size(e, 1)]
    if len(atoms) == 1 and len(long_extents) > 1 and is_same_size(atoms[0].size, size_product(long_extents)):
        factors = iter(axes.split(atoms[0], tuple(long_extents)))
        yield from ((axes.new_atom(1),) if is_same_size(e, 1) else (next(factors),) for e in extents)
        return
    regroup = reshape_rule(tuple(a.size for a in atoms), tuple(extents))  # atoms as dims -> factors as dims
    atom_of = dict(zip(regroup.operands[0], atoms))  # an atom that is split is a group, which no factor equals
    for name, extent in zip(regroup.results[0], extents):
        parts = [atom_of.get(f) for f in dim_factors(name)]
        complete = tuple(a for a in parts if a is not None)
        yield complete if parts and len(complete) == len(parts) else (axes.new_atom(extent),)


def _result_dim(axes: Axes, factor_dims: Mapping[str, Dim], name: str, rule: BoundRule, size: Size) -> Dim:
    """Return a result dim of this name and size, composed of the factors that are present in full."""
    if name[:1] != "(":
        return _passed_factor(axes, factor_dims.get(name), name, rule, size)
    factors = (_passed_factor(axes, factor_dims.get(f), f, rule, rule.extents[f]) for f in dim_factors(name))
    atoms = tuple(a for dim in factors for a in dim if not is_same_size(a.size, 1))
    return axes.unsplit(atoms) or (axes.new_atom(size),)


def _passed_factor(axes: Axes, dim: Dim | None, factor: str, rule: BoundRule, size: Size) -> Dim:
    """Return the atoms of a factor with this size in a result.

    A window of a sequence remains in its class. `dim` has the atoms of the factor in the operands, or is None if it is
    in none.
    """
    if dim is None:
        return (axes.new_atom(size),)
    rows = size_product(a.size for a in dim)
    if is_same_size(rows, size):
        return dim
    is_window = rule.kind(factor) == "window" or (factor in rule.slides and _keeps_class(rule.slides[factor], rows))
    if is_window and len(dim) == 1 and not is_same_size(size, 1):
        return (Atom(dim[0].name, size),)
    return (axes.new_atom(size),)


def _keeps_class(sliding: SlidingRows, rows: Size) -> bool:
    """Return True if the result of a sliding window is a window of the same sequence: it is no longer, or padded."""
    return sliding.is_within(rows) or (sliding.rolls is None and is_same_size(sliding.width, 1))
