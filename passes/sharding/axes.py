"""Name the dims of all values and find the sequence, by union-find over the atoms of dims.

A dim is a product of atoms, (class, size): flattening (B, S) creates a dim of two atoms. Atoms are joined if a rule
passes their factor. The classes that attention attends over are the sequence. Sizes alone identify nothing, because S
may equal the hidden size. Slices keep the class with another size, because a window of a sequence belongs to it.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.torch_compat import argument_name
from sp_compile.passes.graph.call import OpCall, is_tensor, node_shape, result_number
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.sizes import Size, as_size, assume_large, is_same_size, size_product

from .attention_axes import ATTENTION_OF_TORCH, all_attention_nodes
from .factors import BoundRule, Dims, dim_factors
from .placement import Frame, Shard
from .reshape import reshape_rule
from .rule import lookup_rule, transfer_of


@dataclass(frozen=True)
class Atom:
    """Factor of a dim."""

    name: int  # name of its class, see `Axes.find`
    size: Size  # number of positions


Dim = tuple[Atom, ...]


@dataclass
class Axes:
    """Atoms of every dim of every value, and the classes that are sequences."""

    dims: dict[tuple[Node, int], tuple[Dim, ...]] = field(default_factory=dict)  # dims by (node, result index)
    parent: list[int] = field(default_factory=list)  # union-find forest over class names
    sequences: set[int] = field(default_factory=set)  # names of the classes that are sequences
    selected: list[tuple[Dim, Dim]] = field(
        default_factory=list
    )  # (selected, source): a dim, and the dim that it contains positions of
    folds: int = 1  # of the frames of sequences, see `RowOrder`

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

    def is_sequence(self, atom: Atom) -> bool:
        """Return True if the class of the atom is a sequence."""
        return self.find(atom.name) in self.sequences

    def sequence_dims(self, node: Node) -> list[int]:
        """Return the dims of a value that contain a sequence."""
        dims = self.dims.get((node, 0), ())
        return [d for d, dim in enumerate(dims) if any(self.is_sequence(a) for a in dim)]

    def longest_sequence(self) -> Size:
        """Return the length of the longest sequence, of which all others are windows."""
        atoms = (a for dims in self.dims.values() for dim in dims for a in dim if self.is_sequence(a))
        return max((a.size for a in atoms), key=assume_large, default=0)

    def shard(self, node: Node) -> Shard | None:
        """Return the shard along the only sequence factor of a value, or None if it has none or several."""
        found = self.sequence_dims(node)
        if len(found) != 1:
            return None
        dim = self.dims[node, 0][found[0]]
        at = [i for i, a in enumerate(dim) if self.is_sequence(a)]
        if len(at) != 1 or is_same_size(dim[at[0]].size, 1):
            return None
        before, after = size_product(a.size for a in dim[: at[0]]), size_product(a.size for a in dim[at[0] + 1 :])
        return Shard(found[0], Frame.full(dim[at[0]].size, self.folds), before, after)


def name_axes(gm: GraphModule) -> Axes:
    """Name every dim of every value of the graph.

    Returns:
        The axes; `sequences` is empty until `find_sequences`.
    """
    axes = Axes()
    for node in gm.graph.nodes:
        found = lookup_rule(node)
        if found is not None and transfer_of(node.target) is not None:  # the identity, in the global view
            axes.dims.update({(node, i): axes.dims[operand, 0] for i, operand in enumerate(found[0].operands)})
        elif found is not None and found[1] is not None:
            _name_results(axes, found[0], found[1])
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
    """Derive the dims of the results from the factors of the operands."""
    known: dict[str, Dim] = {}
    for i, operand in enumerate(call.operands):
        if i in rule.lenders:
            continue
        for dim, f in _value_factors(axes, operand, rule, rule.operands[i]):
            if f in known:
                axes.join(dim, known[f])
            if f not in known or len(dim) > len(known[f]):  # the finer factorization has more information
                known[f] = dim
    for i, (shape, dims) in enumerate(zip(call.result_shapes(), rule.results)):
        axes.dims[call.node, i] = tuple(_result_dim(axes, known, d, rule, s) for s, d in zip(shape, dims))
        for dim, f in zip(axes.dims[call.node, i], dims):
            source = known.get(f if rule.kind(f) == "window" else rule.picks.get(f, ""))
            if source is not None and dim != source:
                axes.selected.append((dim, source))


def _value_factors(axes: Axes, operand: Node, rule: BoundRule, dims: Dims) -> Iterator[tuple[Dim, str]]:
    """Yield every factor of a value with its atoms."""
    for dim, name in zip(axes.dims[operand, 0], dims):
        if name[:1] == "(":
            yield from zip(_split_dim(axes, dim, [rule.extents[f] for f in dim_factors(name)]), dim_factors(name))
        elif name:
            yield dim, name


def _split_dim(axes: Axes, dim: Dim, extents: Sequence[Size]) -> Iterator[Dim]:
    """Yield the atoms of each factor of a dim; a factor that would split an atom gets a new atom."""
    atoms = [a for a in dim if not is_same_size(a.size, 1)]
    ours = reshape_rule(tuple(a.size for a in atoms), tuple(extents))
    owner = dict(zip(ours.operands[0], atoms))
    for name, extent in zip(ours.results[0], extents):
        found = [owner.get(f) for f in dim_factors(name)]
        yield tuple(a for a in found if a) if found and all(found) else (axes.new_atom(extent),)


def _result_dim(axes: Axes, known: Mapping[str, Dim], name: str, rule: BoundRule, new: Size) -> Dim:
    """Return a result dim, composed of the factors that are present in full."""
    if name[:1] != "(":
        return _passed_factor(axes, known.get(name), name, rule, new)
    each = (_passed_factor(axes, known.get(f), f, rule, rule.extents[f]) for f in dim_factors(name))
    return tuple(a for dim in each for a in dim if not is_same_size(a.size, 1)) or (axes.new_atom(new),)


def _passed_factor(axes: Axes, dim: Dim | None, factor: str, rule: BoundRule, new: Size) -> Dim:
    """Return the dim of an operand's factor in a result; a window of a sequence remains in its class."""
    if dim is None:
        return (axes.new_atom(new),)
    rows = size_product(a.size for a in dim)
    if is_same_size(rows, new):
        return dim
    follows = rule.kind(factor) == "window" or (factor in rule.slides and rule.slides[factor].is_within(rows))
    return (
        (Atom(dim[0].name, new),) if follows and len(dim) == 1 and not is_same_size(new, 1) else (axes.new_atom(new),)
    )


def find_sequences(gm: GraphModule, axes: Axes, seq_dims: dict[Node, int] | None = None, picks: bool = True) -> None:
    """Set `axes.sequences`: the user's dims, or else the attended dims, or else the scanned dims.

    Args:
        gm: Graph.
        axes: Axes from `name_axes`; updated.
        seq_dims: Sequence dims by input node.
        picks: Positions selected from a sequence are a sequence, too, unless a value has both. Pass False for
            load-balanced layouts, which distribute only one sequence.

    Raises:
        SpError: If an input does not have its dim in seq_dims.
    """
    _find_sequences(gm, axes, seq_dims)
    for dim, source in axes.selected if picks else ():
        names = {axes.find(a.name) for a in dim if not is_same_size(a.size, 1)} - axes.sequences
        if len(names) == 1 and any(axes.is_sequence(a) for a in source) and not _has_rivals(axes, *names):
            axes.sequences |= names


def _has_rivals(axes: Axes, name: int) -> bool:
    """Return True if a value has a dim of this class and a dim of a sequence."""
    values = ({axes.find(a.name) for dim in dims for a in dim} for dims in axes.dims.values())
    return any(name in classes and not axes.sequences.isdisjoint(classes) for classes in values)


def _find_sequences(gm: GraphModule, axes: Axes, seq_dims: dict[Node, int] | None) -> None:
    if seq_dims is not None:
        for node, dim in seq_dims.items():
            shape = node_shape(node)
            if not -len(shape) <= dim < len(shape):
                raise SpError("SP303", f"seq_dims: {argument_name(node)!r} has {len(shape)} dims, so no dim {dim}.")
            axes.sequences.update(axes.find(a.name) for a in axes.dims[node, 0][dim % len(shape)])
        return
    for tier in (_attended_dims, _softmax_attended_dims, _scanned_dims, _combined_dims):
        found = list(tier(gm, axes))
        atoms = [a for _, dim in found for a in dim]
        longer = [a for a in atoms if not is_same_size(a.size, 1)]
        if atoms:  # a sequence of one token (decoding) is a sequence, too, but cannot be sharded
            axes.sequences = {axes.find(a.name) for a in longer or atoms}
            _drop_rivals(axes, dict.fromkeys(node for node, _ in found))
            return


def _drop_rivals(axes: Axes, values: Iterable[Node]) -> None:
    """Keep one class per value if attention or scans run along several axes (axial): the most frequent one."""
    weight = Counter(
        axes.find(a.name)
        for dims in axes.dims.values()
        for a in {a for dim in dims for a in dim}
        if axes.is_sequence(a)
    )
    for node in values:
        rivals = {axes.find(a.name) for dim in axes.dims[node, 0] for a in dim if axes.is_sequence(a)}
        axes.sequences -= set(sorted(rivals, key=lambda c: (weight[c], -c))[:-1])


EvidenceFunction = Iterable[tuple[Node, Dim]]  # op, and a dim that is a sequence because of it


def _attended_dims(gm: GraphModule, axes: Axes) -> EvidenceFunction:
    """Yield the token dims of q and k of all attention nodes."""
    for node in all_attention_nodes(gm):
        yield from ((node, axes.dims[operand, 0][-2]) for operand in OpCall(node).operands[:2])
    for op, dim in ATTENTION_OF_TORCH.items():
        for node in gm.graph.find_nodes(op="call_function", target=op):
            yield from ((node, axes.dims[operand, 0][dim]) for operand in node.args[:2])


def _softmax_attended_dims(gm: GraphModule, axes: Axes) -> EvidenceFunction:
    """Yield dims that a softmax normalizes over and a later matmul contracts (decomposed attention)."""
    normalised: set[int] = set()
    for call, rule in _ruled_calls(gm):
        for dim, kind in _classify_factors(axes, call, rule):
            names = {axes.find(a.name) for a in dim}
            if rule.normalizes and kind == "whole":
                normalised |= names
            elif kind == "sum" and len(call.operands) > 1 and names & normalised:
                yield call.node, tuple(a for a in dim if axes.find(a.name) in normalised)


def _scanned_dims(gm: GraphModule, axes: Axes) -> EvidenceFunction:
    """Yield scanned dims; for sequences flattened into one dim with the batch, the longest factor."""
    for call, rule in (found for found in _ruled_calls(gm) if not node_info(found[0].node).is_aside):
        for dim, kind in _classify_factors(axes, call, rule):
            if kind == "scan" and dim:
                yield call.node, (max(reversed(dim), key=lambda a: assume_large(a.size)),)


def _combined_dims(gm: GraphModule, axes: Axes) -> EvidenceFunction:
    """Yield the dims of scans that have no rule."""
    for node in gm.graph.nodes:
        if (scanned := node_info(node).scanned) is not None:
            declared, dim = node.args[scanned[0]], scanned[1]
            for x in declared if isinstance(declared, list | tuple) else [declared]:
                yield x, axes.dims[x, 0][dim]


def _ruled_calls(gm: GraphModule) -> Iterable[tuple[OpCall, BoundRule]]:
    for node in gm.graph.nodes:
        found = lookup_rule(node)
        if found is not None and found[1] is not None:
            yield found[0], found[1]


def _classify_factors(axes: Axes, call: OpCall, rule: BoundRule) -> Iterable[tuple[Dim, str]]:
    """Yield every factor of the operands with its kind."""
    for operand, dims in zip(call.operands, rule.operands):
        for dim, f in _value_factors(axes, operand, rule, dims):
            yield dim, rule.kind(f)
