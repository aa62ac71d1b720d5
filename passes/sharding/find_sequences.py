"""Find the sequences of a graph: the classes of dims that attention, scans or recurrences run along.

Evidence is an op, such as attention, and the dim that is a sequence because of it; the user's dims come first. Two
classes are rivals if one value has both: only one of its dims can be sharded. A program that splits a dim into chunks
and relates the chunks, as linear attention does, has evidence on a factor of the dim; the sequence is the dim itself,
of which each rank has complete chunks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch.fx import GraphModule, Node

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.torch_compat import argument_name
from sp_compile.passes.graph.call import OpCall, collect_nodes, node_shape
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.sizes import Size, assume_large, is_same_size, size_product

from .axes import Atom, Axes, Dim, Evidence, attended_dims, value_factors
from .factors import BoundRule
from .rule import lookup_rule
from .sharded_work import LARGE_SHARE, contraction_flops


class SequenceCandidate(NamedTuple):
    """Dim that may be a sequence, with the evidence for it."""

    size: Size  # positions
    evidence: str  # the kind of the strongest evidence
    ops: int  # number of ops that are evidence
    is_input: bool  # True if an input has the dim
    is_chosen: bool  # False if another candidate has stronger evidence, or is in the same values

    def __str__(self) -> str:
        ops = "op" if self.ops == 1 else "ops"
        return (
            f"{'' if self.is_chosen else 'not chosen: '}{self.size} positions, with {self.evidence} in {self.ops} {ops}"
        )


CHUNK_RELATIONS = ("scan", "halo", "whole", "window", "attend")  # kinds of factors whose positions an op relates


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
    _add_parts(gm, axes)
    _find_granules(gm, axes)
    _find_strides(gm, axes)
    for dim, source in axes.selected if picks else ():
        names = {axes.find(a.name) for a in dim if not is_same_size(a.size, 1)} - axes.sequences
        if len(names) == 1 and any(axes.is_sequence(a) for a in source) and not _has_rivals(axes, *names):
            axes.sequences |= names


def _chunk_sources(gm: GraphModule, axes: Axes) -> dict[int, Atom]:
    """Return the atom that is split into chunks, by the classes of its factors, if an op relates the chunks.

    An op that relates them scans, sums or selects along the dim of the chunks. Without one, the chunks are independent,
    such as the sequences of a batch that was flattened.
    """
    firsts = {axes.find(split.factors[0].name): split for split in axes.all_splits()}
    related: dict[int, Atom] = {}
    for call, rule in _ruled_calls(gm) if firsts else ():
        for dim, kind in _classify_factors(axes, call, rule):
            names = {axes.find(a.name) for a in dim}
            if kind in CHUNK_RELATIONS or (kind == "sum" and rule.is_contraction):
                related.update(
                    (axes.find(a.name), firsts[n].source) for n in names & firsts.keys() for a in firsts[n].factors
                )
    return related


def _find_granules(gm: GraphModule, axes: Axes) -> None:
    """Set `axes.granules`: the positions of the chunks of each sequence of which products are computed in chunks.

    So are convolutions over the rows of an image, if they have `LARGE_SHARE` of the FLOPs. Complete chunks make shards
    less equal. Other ops on a split dim, such as those on the pixels that the tokens of an image predict, are too cheap
    for that.
    """
    splits = list(axes.all_splits())
    multiplied = _multiplied_classes(gm, axes) if splits else set()
    for split in splits:
        name, granule = axes.find(split.source.name), size_product(a.size for a in split.factors[1:])
        chunks = axes.find(split.factors[0].name)
        if name in axes.sequences and chunks in multiplied and isinstance(granule, int):
            axes.granules[name] = math.lcm(granule, axes.granules.get(name, 1))
            axes.blocks[chunks] = granule


def _multiplied_classes(gm: GraphModule, axes: Axes) -> set[int]:
    """Return the classes of the dims of products, and of those of images that most convolutions read."""
    multiplied: set[int] = set()
    convolved: Counter[int] = Counter()  # FLOPs of convolutions, by class
    total = 0.0
    for call, rule in _ruled_calls(gm):
        classes = {axes.find(a.name) for x in call.operands for dim in axes.dims[x, 0] for a in dim}
        total += (flops := contraction_flops(call.node))
        if rule.is_contraction:
            multiplied |= classes
        elif flops:
            convolved.update(dict.fromkeys(classes, flops))
    return multiplied | {name for name, flops in convolved.items() if flops >= LARGE_SHARE * total}


def _add_parts(gm: GraphModule, axes: Axes) -> None:
    """Add the parts of concatenations that have frames of their own, and the concatenations of such parts."""
    pairs = []  # classes of the rows of a part, and of the same rows in a concatenation
    for node in gm.graph.nodes:
        if node_info(node).is_apart:
            call = OpCall(node)
            pairs.append([{axes.find(a.name) for a in axes.dims[x, 0][call.dim()]} for x in (node, call.operands[0])])
    for _ in pairs:  # a part may have parts
        linked = [(a, b) for a, b in pairs if not axes.sequences.isdisjoint(a | b)]
        names = {name for pair in linked for names in pair if len(names) == 1 for name in names} - axes.sequences
        new = {name for name in names if not _has_rivals(axes, name)}
        if not new:
            break
        axes.sequences |= new


def _find_strides(gm: GraphModule, axes: Axes) -> None:
    """Set `axes.strides`: the product of the strides of the windows that read the rows of a sequence one after another.

    A rank then has the rows of complete strides, so that its shard of the result needs few rows of its neighbors.
    """
    windows = [(call.node, call.operands[0], rule) for call, rule in _ruled_calls(gm) if rule.slides]
    if all(sliding.stride == 1 for _, _, rule in windows for sliding in rule.slides.values()):
        return
    for node, x, rule in reversed(windows):
        for factor, sliding in rule.slides.items():
            if factor not in rule.operands[0] or factor not in rule.results[0]:
                continue
            dims = axes.dims[x, 0][rule.operands[0].index(factor)], axes.dims[node, 0][rule.results[0].index(factor)]
            read, result = (tuple((axes.find(a.name), a.size) for a in dim) for dim in dims)
            if len(read) == len(result) == 1 and read[0][0] in axes.sequences:
                stride = sliding.stride * axes.strides.get(result[0], 1)
                if stride > 1:
                    axes.strides[read[0]] = math.lcm(stride, axes.strides.get(read[0], 1))


def _has_rivals(axes: Axes, name: int) -> bool:
    """Return True if a value has a dim of this class and a dim of a sequence."""
    values = ({axes.find(a.name) for dim in dims for a in dim} for dims in axes.dims.values())
    return any(name in classes and not axes.sequences.isdisjoint(classes) for classes in values)


def _find_sequences(gm: GraphModule, axes: Axes, seq_dims: dict[Node, int] | None) -> None:
    """Set `axes.sequences` to the classes of the user's dims, or of dims found by evidence.

    Only the first kind of evidence that exists counts.
    """
    if seq_dims is not None:
        for node, dim in seq_dims.items():
            shape = node_shape(node)
            if not -len(shape) <= dim < len(shape):
                raise SpError("SP303", f"seq_dims: {argument_name(node)!r} has {len(shape)} dims, so no dim {dim}.")
            axes.sequences.update(axes.find(a.name) for a in axes.dims[node, 0][dim % len(shape)])
        return
    sources = _chunk_sources(gm, axes)
    for find_evidence in _evidence_by_kind().values():
        evidence = list(find_evidence(gm, axes))
        atoms = [sources.get(axes.find(a.name), a) for _, dim in evidence for a in dim]
        long_atoms = [a for a in atoms if not is_same_size(a.size, 1)]
        if atoms:  # a sequence of one token (decoding) is a sequence, too, but cannot be sharded
            axes.sequences = {axes.find(a.name) for a in long_atoms or atoms}
            _drop_rivals(axes, dict.fromkeys(node for node, _ in evidence))
            return


def _evidence_by_kind() -> dict[str, Callable[[GraphModule, Axes], Evidence]]:
    """Return the functions that find evidence, the strongest first, by its text for reports."""
    return {
        "attention": attended_dims,
        "a softmax and a product": _softmax_attended_dims,
        "scans": _scanned_dims,
        "scans with a function": _combined_dims,
    }


def sequence_candidates(gm: GraphModule, axes: Axes) -> list[SequenceCandidate]:
    """Return the dims that may be a sequence, those of `axes.sequences` first, then the longest first.

    Args:
        gm: Graph.
        axes: Axes after `find_sequences`.
    """
    sources, evidence = _chunk_sources(gm, axes), dict[int, tuple[Size, str, set[Node]]]()
    for kind, find_evidence in _evidence_by_kind().items():
        for node, dim in find_evidence(gm, axes):
            for atom in (sources.get(axes.find(a.name), a) for a in dim if not is_same_size(a.size, 1)):
                evidence.setdefault(axes.find(atom.name), (atom.size, kind, set()))[2].add(node)
    inputs = (node for node in gm.graph.find_nodes(op="placeholder") if not node_info(node).parameter)
    input_names = {axes.find(a.name) for node in inputs for dim in axes.dims.get((node, 0), ()) for a in dim}
    candidates = [
        SequenceCandidate(size, kind, len(nodes), name in input_names, name in axes.sequences)
        for name, (size, kind, nodes) in evidence.items()
    ]
    return sorted(candidates, key=lambda c: (not c.is_chosen, -assume_large(c.size)))


def _drop_rivals(axes: Axes, values: Iterable[Node]) -> None:
    """Reduce `axes.sequences` to one class per value, the most frequent one.

    A value has several if attention or scans run along several of its dims (axial attention).
    """
    counts = Counter(axes.find(a.name) for dims in axes.dims.values() for a in {a for dim in dims for a in dim})
    for node in values:
        rivals = {axes.find(a.name) for dim in axes.dims[node, 0] for a in dim if axes.is_sequence(a)}
        by_count = sorted(rivals, key=lambda name: (counts[name], -name))
        axes.sequences.difference_update(by_count[:-1])


def _softmax_attended_dims(gm: GraphModule, axes: Axes) -> Evidence:
    """Yield dims that a softmax normalizes over and a later matmul contracts (decomposed attention)."""
    normalized: set[int] = set()  # classes that a softmax normalizes over
    for call, rule in _ruled_calls(gm):
        for dim, kind in _classify_factors(axes, call, rule):
            names = {axes.find(a.name) for a in dim}
            if rule.normalizes and kind == "whole":
                normalized |= names
            elif kind == "sum" and len(call.operands) > 1 and names & normalized:
                yield call.node, tuple(a for a in dim if axes.find(a.name) in normalized)


def _scanned_dims(gm: GraphModule, axes: Axes) -> Evidence:
    """Yield scanned dims; for sequences flattened into one dim with the batch, the longest factor."""
    for call, rule in _ruled_calls(gm):
        for dim, kind in _classify_factors(axes, call, rule):
            if kind == "scan" and dim and not node_info(call.node).is_aside:
                yield call.node, (max(reversed(dim), key=lambda a: assume_large(a.size)),)


def _combined_dims(gm: GraphModule, axes: Axes) -> Evidence:
    """Yield the dims of scans that have no rule (`NodeInfo.scanned`), the weakest evidence."""
    for node in gm.graph.nodes:
        scanned = node_info(node).scanned
        if scanned is not None:
            argument, dim = scanned
            for x in collect_nodes(node.args[argument]):
                yield x, axes.dims[x, 0][dim]


def _ruled_calls(gm: GraphModule) -> Iterable[tuple[OpCall, BoundRule]]:
    for node in gm.graph.nodes:
        call, rule = lookup_rule(node) or (None, None)
        if call is not None and rule is not None:
            yield call, rule


def _classify_factors(axes: Axes, call: OpCall, rule: BoundRule) -> Iterable[tuple[Dim, str]]:
    """Yield the atoms of every factor of the operands with its kind in the rule, such as "scan"."""
    for operand, dims in zip(call.operands, rule.operands):
        for dim, f in value_factors(axes, operand, rule, dims):
            yield dim, rule.kind(f)
