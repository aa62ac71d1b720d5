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
    is_divisor,
    is_most_of,
    is_same_size,
    size_product,
)

from .attention_axes import ATTENTION_OF_TORCH, all_attention_nodes, softmax_attended_dims
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
    num_atoms: int  # number of atoms of the dim, before the factors are fused to one


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
    selected: list[tuple[Dim, Dim]] = field(default_factory=list)  # (dim of a result, dim whose positions it selects)
    reasons: dict[int, str] = field(default_factory=dict)  # why a class with evidence is a sequence, or is none
    folds: int = 1  # of the frames of sequences, see `RowOrder`
    products: Mapping[tuple[Node, int, int], Product] = field(default_factory=dict)  # by (node, result index, dim)
    fused: dict[Dim, Atom] = field(default_factory=dict)  # the atom of each product, by its factors
    splits: dict[tuple[Size, ...], list[Split]] = field(default_factory=dict)  # by the sizes of their factors
    granules: dict[int, int] = field(default_factory=dict)  # positions of a chunk, by class; see `find_sequences`
    blocks: dict[int, int] = field(default_factory=dict)  # positions of a chunk, by class of the dim of chunks
    chunk_blocks: dict[int, dict[int, int]] = field(default_factory=dict)  # `blocks` of each sequence, by class
    # product of the strides of successive windows that read a dim, by its class and number of rows
    strides: dict[tuple[int, Size], int] = field(default_factory=dict)  # by (class, size); see `_find_strides`
    joined: list[tuple[Atom, Size]] = field(default_factory=list)  # parts of concatenations, and their first positions
    n: int = 1  # number of ranks, of which each has complete chunks
    keeps_strided: bool = True  # False: the rows of windows with strides are no rows of the operand's class
    flat: set[tuple[int, ...]] = field(default_factory=set)  # classes of products that attention reads, by their rows
    windowed: dict[int, set[Node]] = field(default_factory=dict)  # attentions in windows of a class of rows

    def find(self, name: int) -> int:
        """Return the representative name of a class (union-find); two dims have the same rows if theirs are equal."""
        while self.parent[name] != name:
            self.parent[name] = self.parent[self.parent[name]]  # shorten the path for later calls
            name = self.parent[name]
        return name

    def new_atom(self, size: Size) -> Atom:
        """Create an atom (a dim, or a factor of one) whose class has no other atoms, until `join` merges classes."""
        self.parent.append(len(self.parent))
        return Atom(len(self.parent) - 1, size)

    def join(self, a: Dim, b: Dim) -> None:
        """Record that two dims have the same rows: merge their classes, atom by atom, if these have the same sizes."""
        if len(a) == len(b) and all(is_same_size(x.size, y.size) for x, y in zip(a, b)):
            for x, y in zip(a, b):
                self.parent[self.find(x.name)] = self.find(y.name)

    def rank_detail(self, dim: Dim) -> tuple[bool, int]:
        """Return a rank of what is known of a dim: a product that attention reads is first, then more factors."""
        fused = {atom.name for atom in self.fused.values()}
        return any(atom.name in fused for atom in dim), len(dim)

    def canonical(self, dim: Dim) -> Dim:
        """Return a form of a dim that is equal for equal dims: its factors longer than 1, with the names of `find`."""
        return tuple(Atom(self.find(a.name), a.size) for a in dim if not is_same_size(a.size, 1))

    def set_result(self, node: Node, index: int, dims: Sequence[Dim]) -> None:
        """Set the dims of a result; the factors of a product become one atom.

        A product is a run of factors that attention reads as one sequence, such as the H and W of an image. A dim
        (batch, H, W) becomes (batch, H * W), so that H * W can be sharded.

        Args:
            node: The node.
            index: The index of the result.
            dims: The atoms of each dim.
        """
        fused_dims = []
        for d, dim in enumerate(dims):
            product = self.products.get((node, index, d))
            # A dim with fewer atoms has the fused atom already: a rule passed it from an operand.
            if product is not None and len(dim) == product.num_atoms:
                if product.factors not in self.fused:
                    self.fused[product.factors] = self.new_atom(size_product(a.size for a in product.factors))
                end = product.start + len(product.factors)
                dim = (*dim[: product.start], self.fused[product.factors], *dim[end:])
            fused_dims.append(dim)
        self.dims[node, index] = tuple(fused_dims)

    def split(self, source: Atom, extents: tuple[Size, ...]) -> Dim:
        """Return the atoms of the factors into which a reshape splits an atom, such as 12 rows into 3 chunks of 4.

        Equal splits of the same rows have the same atoms, so that their results match.

        Args:
            source: The atom that is split.
            extents: The sizes of the factors, slowest first.
        """
        splits = self.splits.setdefault(extents, [])
        for known in splits:
            if known.source.size == source.size and self.find(known.source.name) == self.find(source.name):
                return known.factors
        splits.append(Split(source, tuple(self.new_atom(size) for size in extents)))
        return splits[-1].factors

    def unsplit(self, dim: Dim) -> Dim:
        """Return the atom that was split into the atoms of a dim, or the dim unchanged if it is no complete split.

        A reshape back from (3 chunks, 4 rows) to 12 rows then has the same atom as before the split.
        """
        factors = self.canonical(dim)
        for known in self.splits.get(tuple(a.size for a in factors), ()):
            if self.canonical(known.factors) == factors:
                return (known.source,)
        return dim

    def all_splits(self) -> Iterator[Split]:
        """Yield all splits of atoms by reshapes, such as of a sequence into chunks."""
        return (split for splits in self.splits.values() for split in splits)

    def is_sequence(self, atom: Atom) -> bool:
        """Return True if the atom, a dim or a factor of one, has the rows of a sequence."""
        return self.find(atom.name) in self.sequences

    def sequence_dims(self, node: Node) -> list[int]:
        """Return the indices of the dims of a value that are a sequence, or have one as a factor."""
        dims = self.dims.get((node, 0), ())
        return [d for d, dim in enumerate(dims) if any(self.is_sequence(a) for a in dim)]

    def longest_sequence(self) -> Size:
        """Return the length of the longest sequence of the graph; others are usually windows of it, as x[:, 1:]."""
        return max((a.size for a in self.atoms() if self.is_sequence(a)), key=assume_large, default=0)

    def shard(self, node: Node) -> Shard | None:
        """Return the placement of a value that is sharded along its sequence.

        The sequence is a dim, or one of the factors of a flattened dim. The result is None if the value has no
        sequence or several, or if the sequence has one row, which cannot be divided.
        """
        dims = self.dims.get((node, 0), ())
        # (dim, index of the factor in the dim) of each sequence
        positions = [(d, i) for d, dim in enumerate(dims) for i, atom in enumerate(dim) if self.is_sequence(atom)]
        if len(positions) != 1:
            return None
        ((d, i),) = positions
        sizes = [atom.size for atom in dims[d]]
        if is_same_size(sizes[i], 1):
            return None
        return Shard(d, self.frame(dims[d][i]), outer=size_product(sizes[:i]), inner=size_product(sizes[i + 1 :]))

    def with_chunks(self, node: Node, index: int, placement: Placement) -> Placement:
        """Return the placement of a result, with `granule` and `block` of its frame set if its sequence has chunks.

        Each rank has complete chunks. The granule is the number of rows of a chunk, for a dim of rows; the block is the
        same number, for a dim of chunks. Rules do not set them.

        Args:
            node: The node.
            index: The index of the result.
            placement: The placement of the result.
        """
        if not self.granules or not isinstance(placement, Shard) or (node, index) not in self.dims:
            return placement
        frame = placement.frame
        for atom in self.dims[node, index][placement.dim]:
            name = self.find(atom.name)
            granule, block = self.granules.get(name, 1), self.blocks.get(name, 1)
            # In a frame whose size is no multiple of (granule * ranks * chunks of a rank), a chunk may be on two ranks.
            if max(granule, block) > 1 and is_divisor(granule * self.n * frame.order.chunks, frame.size):
                return replace(placement, frame=replace(frame, granule=granule, block=block))
        return placement

    def frame(self, atom: Atom) -> Frame:
        """Return the frame in which a sequence with the rows of an atom is sharded.

        By default, it has the size of the sequence. One that convolutions with strides read is padded to complete
        strides on each rank: 10 rows that are read with stride 2 have the size 12 on 3 ranks, unless most rows would be
        padding. One that is computed in chunks is padded to complete chunks on each rank. A part of a concatenation is
        a window of the result: for cat([a, b]) with 2 and 6 rows, b has the frame of 8 rows, and starts at 2.
        """
        name = self.find(atom.name)  # `starts`: the first positions of this part in concatenations
        starts = [start for part, start in self.joined if part.size == atom.size and self.find(part.name) == name]
        is_chunked = name in self.granules
        if self.n == 1 or not (starts or is_chunked):
            # `folds` is 1 for contiguous rows; other row orders are not padded to strides.
            stride = self.strides.get((name, atom.size), 1)
            size = self.n * stride * ceil_div(atom.size, self.n * stride)
            is_padded = stride > 1 and self.folds == 1 and is_most_of(atom.size, size)
            return Frame(size, 0, atom.size) if is_padded else Frame.full(atom.size, self.folds)
        # Rows of the longest value of the class, such as a concatenation. A dim of chunks has many rows per position.
        rows_of_position = {name: 1, **self.chunk_blocks.get(name, {})}  # by class
        classes = ((self.find(a.name), a.size) for a in self.atoms())
        longest = max((rows_of_position[c] * s for c, s in classes if c in rows_of_position), key=assume_large)
        frame = Frame.of_chunks(atom.size, longest, self.granules.get(name, 1), self.n, self.folds)
        # `of_chunks` pads to a multiple of the ranks, too, which a part that is not chunked does not need.
        size = frame.size if is_chunked else longest
        return replace(frame, size=size, start=starts[0] if starts else 0)

    def atoms(self) -> Iterator[Atom]:
        """Yield the atoms of all dims of all values."""
        return (a for dims in self.dims.values() for dim in dims for a in dim)


def name_axes(gm: GraphModule) -> Axes:
    """Identify the dims of all values: two dims have the same name if they have the same rows.

    Returns:
        The axes; `sequences` is empty until `find_sequences`.
    """
    axes = _name_dims(gm, Axes())
    # Factors that attention reads as one sequence, such as the H and W of an image, are known only now. With them, all
    # dims are named again.
    products = dict(_find_products(gm, axes))
    return _name_dims(gm, Axes(products=products)) if products else axes


def name_factors(gm: GraphModule) -> Axes:
    """Identify the dims as `name_axes` does, with the factors of products and the rows of strided windows apart."""
    return _name_dims(gm, Axes(keeps_strided=False))


Evidence = Iterable[tuple[Node, Dim]]  # op, and a dim that is a sequence because of it


def attended_dims(gm: GraphModule, axes: Axes) -> Evidence:
    """Yield (attention, token dim of its q or k) for all attention nodes, the strongest evidence for a sequence."""
    for node in all_attention_nodes(gm):
        yield from ((node, axes.dims[operand, 0][-2]) for operand in OpCall(node).operands[:2])
    for op, dim in ATTENTION_OF_TORCH.items():
        for node in gm.graph.find_nodes(op="call_function", target=op):
            yield from ((node, axes.dims[operand, 0][dim]) for operand in node.args[:2])


def _joined_dims(gm: GraphModule, axes: Axes) -> Evidence:
    """Yield (pad, padded dim of its operand) for the pads by which `JoinSequences` joins sequences.

    It replaces cat([a, b]) by pads of a and b to the length of the result, and a selection between them.
    """
    for node in gm.graph.nodes:
        if node_info(node).joins:
            x = OpCall(node).operands[0]
            is_padded = [not is_same_size(a, b) for a, b in zip(node_shape(x), node_shape(node))]
            yield node, axes.dims[x, 0][is_padded.index(True)]


def _find_products(gm: GraphModule, axes: Axes) -> Iterator[tuple[tuple[Node, int, int], Product]]:
    """Yield ((node, result index, dim), product) for every dim with a product of factors that attention reads as one.

    For the patches of an image, attention reads a dim (H, W). Then every dim (H, W) or (batch, H, W) has this product.
    """
    evidence = (*attended_dims(gm, axes), *softmax_attended_dims(gm, axes), *_joined_dims(gm, axes))
    attended = {axes.canonical(dim) for _, dim in evidence}
    products = sorted((dim for dim in attended if len(dim) > 1), key=len, reverse=True)  # the longest match first
    if not products:
        return
    for (node, index), dims in axes.dims.items():
        for d, dim in enumerate(dims):
            atoms = axes.canonical(dim)
            if len(atoms) != len(dim):  # it has a factor of size 1, so that indices would differ
                continue
            for factors in products:
                starts = range(len(atoms) - len(factors) + 1)
                start = next((i for i in starts if atoms[i : i + len(factors)] == factors), None)
                if start is not None:
                    yield (node, index, d), Product(factors, start, len(dim))
                    break


def _name_dims(gm: GraphModule, axes: Axes) -> Axes:
    """Set `axes.dims`, the atoms of every dim of every value, in the order of the graph; return `axes`.

    A dim of a result has the atoms of the operands' dims that the op's rule passes to it, and new ones otherwise.
    """
    for node in gm.graph.nodes:
        call, rule = lookup_rule(node) or (None, None)
        if call is not None and transfer_of(node.target) is not None:  # an exchange: the identity, in the global view
            axes.dims.update({(node, i): axes.dims[operand, 0] for i, operand in enumerate(call.operands)})
            if node_info(node).is_apart:  # its result has another frame, so its rows are another sequence
                dims, dim = axes.dims[node, 0], call.dim()
                axes.dims[node, 0] = (*dims[:dim], (axes.new_atom(call.shape()[dim]),), *dims[dim + 1 :])
        elif call is not None and rule is not None:
            _name_results(axes, call, rule)
        elif node.op == "call_function" and node.target in ATTENTION_OF_TORCH:
            query, _, value = node.args[:3]
            axes.dims[node, 0] = (*axes.dims[query, 0][:-1], axes.dims[value, 0][-1])
        elif node.target is operator.getitem:
            source, index = node.args  # `result_number` is the index among the results that are tensors
            if is_tensor(node) and isinstance(index, int) and (source, result_number(node)) in axes.dims:
                axes.dims[node, 0] = axes.dims[source, result_number(node)]
        if is_tensor(node) and (node, 0) not in axes.dims:  # an input, or an op without a rule
            axes.dims[node, 0] = tuple((axes.new_atom(as_size(s)),) for s in node.meta["val"].shape)
    for node in all_attention_nodes(gm):
        _join_vectors(axes, OpCall(node))
    return axes


def _join_vectors(axes: Axes, call: OpCall) -> None:
    """Record that vectors that a mask indexes by query or key, such as document ids, have the rows of q or k.

    The rule of attention does not relate their dims, because every rank reads the full vectors.
    """
    queries, keys = call.operands[:2]
    for argument, indexed_by in (("rows", queries), ("cols", keys)):
        for vector in call.get(argument, []):
            axes.join(axes.dims[vector, 0][-1], axes.dims[indexed_by, 0][-2])  # S of (..., S) and of (..., S, D)


def _name_results(axes: Axes, call: OpCall, rule: BoundRule) -> None:
    """Set `axes.dims` of the results of a call: a factor that an operand and a result share has the same rows in both.

    Operands that share a factor have the same rows, too: their classes are merged.
    """
    factor_dims: dict[str, Dim] = {}  # atoms of each factor of the operands
    for i, operand in enumerate(call.operands):
        if i in rule.lenders:  # only its shape is read
            continue
        for dim, f in value_factors(axes, operand, rule, rule.operands[i]):
            if f in factor_dims:
                axes.join(dim, factor_dims[f])
            if f not in factor_dims or axes.rank_detail(dim) > axes.rank_detail(factor_dims[f]):
                factor_dims[f] = dim
    for i, (shape, names) in enumerate(zip(call.result_shapes(), rule.results)):
        dims = tuple(_result_dim(axes, factor_dims, name, rule, size) for size, name in zip(shape, names))
        axes.set_result(call.node, i, dims)
        _relate_dims(axes, factor_dims, call.node, i, rule)


def _relate_dims(axes: Axes, factor_dims: Mapping[str, Dim], node: Node, index: int, rule: BoundRule) -> None:
    """Record the dims of a result that select rows of an operand's dim, and the parts of a concatenation.

    `axes.selected` gets (dim of the result, dim of the operand) for a slice or an index. `axes.joined` gets (part, its
    first position) for a pad of a part to the length of a concatenation (`NodeInfo.joins`).

    Args:
        axes: The axes of the graph.
        factor_dims: The atoms of each factor of the operands.
        node: The node.
        index: The index of the result.
        rule: The rule of the op.
    """
    for dim, f in zip(axes.dims[node, index], rule.results[index]):
        operand_dim = factor_dims.get(f, ())
        if f in rule.slides and len(operand_dim) == 1 and node_info(node).joins:
            axes.joined.append((operand_dim[0], rule.slides[f].before))
        selected_factor = f if rule.kind(f) == "window" else rule.picks.get(f, "")  # of a slice, or of an index
        source = factor_dims.get(selected_factor)
        if source is not None and dim != source:
            axes.selected.append((dim, source))


def value_factors(axes: Axes, operand: Node, rule: BoundRule, dims: Dims) -> Iterator[tuple[Dim, str]]:
    """Yield (atoms, factor) for every factor of an operand: its rows as known in the graph, and its name in the rule.

    Args:
        axes: The axes of the graph.
        operand: The operand.
        rule: The rule of the op that reads it.
        dims: The dims of the operand in the rule; a group "(b s)" has two factors.
    """
    for dim, name in zip(axes.dims[operand, 0], dims):
        if name[:1] == "(":
            factors = dim_factors(name)
            yield from zip(_split_dim(axes, dim, [rule.extents[f] for f in factors]), factors)
        elif name:  # "" is a dim of size 1 that broadcasts
            yield dim, name


def _split_dim(axes: Axes, dim: Dim, extents: Sequence[Size]) -> Iterator[Dim]:
    """Yield the atoms of each factor of a dim, for factors of the sizes `extents`.

    For a dim with the atoms (batch 2, sequence 6) and the sizes 2 and 6, these are batch and sequence. A dim of one
    atom with 12 rows is split into the sizes 3 and 4 by `Axes.split`. A factor that is no product of atoms gets a new
    atom, as for the atoms (4, 3) and the sizes 2 and 6.
    """
    atoms = [a for a in dim if not is_same_size(a.size, 1)]
    long_extents = [e for e in extents if not is_same_size(e, 1)]
    if len(atoms) == 1 and len(long_extents) > 1 and is_same_size(atoms[0].size, size_product(long_extents)):
        factors = iter(axes.split(atoms[0], tuple(long_extents)))
        yield from ((axes.new_atom(1),) if is_same_size(e, 1) else (next(factors),) for e in extents)
        return
    # A reshape from the sizes of the atoms to those of the factors shows which atoms a factor has: for the atoms
    # (2, 3, 4) and the sizes (6, 4), its rule is "d0 d1 d2 -> (d0 d1) d2".
    regroup = reshape_rule(tuple(a.size for a in atoms), tuple(extents))
    atom_of_name = dict(zip(regroup.operands[0], atoms))  # an atom that the reshape splits has a group for a name
    for name, extent in zip(regroup.results[0], extents):
        parts = [atom_of_name.get(f) for f in dim_factors(name)]  # None for a part of an atom
        complete = tuple(a for a in parts if a is not None)
        yield complete if parts and len(complete) == len(parts) else (axes.new_atom(extent),)


def _result_dim(axes: Axes, factor_dims: Mapping[str, Dim], name: str, rule: BoundRule, size: Size) -> Dim:
    """Return the atoms of a dim of a result.

    Args:
        axes: The axes of the graph.
        factor_dims: The atoms of each factor of the operands.
        name: The dim in the rule, a factor or a group of factors.
        rule: The rule of the op.
        size: The size of the dim.
    """
    if name[:1] != "(":
        return _passed_factor(axes, factor_dims.get(name), name, rule, size)
    factors = (_passed_factor(axes, factor_dims.get(f), f, rule, rule.extents[f]) for f in dim_factors(name))
    atoms = tuple(a for dim in factors for a in dim if not is_same_size(a.size, 1))
    return axes.unsplit(atoms) or (axes.new_atom(size),)  # `unsplit` undoes a split; () if all factors have size 1


def _passed_factor(axes: Axes, dim: Dim | None, factor: str, rule: BoundRule, size: Size) -> Dim:
    """Return the atoms of a factor of a result: those of the operands, or a new atom if it has other rows.

    Args:
        axes: The axes of the graph.
        dim: The atoms of the factor in the operands, or None if no operand has it.
        factor: The name of the factor.
        rule: The rule of the op.
        size: The size of the factor in the result.
    """
    if dim is None:
        return (axes.new_atom(size),)
    rows = size_product(a.size for a in dim)
    if is_same_size(rows, size):
        return dim
    # A window of a sequence, such as x[:, 1:], belongs to the same sequence: it has the class of x with another size.
    # A single row, such as x[:, :1], is no sequence.
    sliding = rule.slides.get(factor)
    has_other_rows = sliding is not None and sliding.stride > 1 and not axes.keeps_strided  # for `name_factors`
    is_window = rule.kind(factor) == "window" or (sliding is not None and _is_same_class(sliding, rows))
    if is_window and not has_other_rows and len(dim) == 1 and not is_same_size(size, 1):
        return (Atom(dim[0].name, size),)
    return (axes.new_atom(size),)


def _is_same_class(sliding: SlidingRows, rows: Size) -> bool:
    """Return True if the result of an op with sliding windows belongs to the same sequence as its operand.

    It does if it is no longer than the operand, as for a convolution, or if the op is a pad: each row of the result
    reads one row of the operand (`width`), and the op is no roll.

    Args:
        sliding: The windows.
        rows: The number of rows of the operand.
    """
    return sliding.is_within(rows) or (sliding.rolls is None and is_same_size(sliding.width, 1))
