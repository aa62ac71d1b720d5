"""Find the sequences of a graph: the classes of dims that attention, scans or recurrences run along.

Evidence is an op, such as attention, and the dim that is a sequence because of it; the user's dims come first. Two
classes are rivals if one value has both: only one of its dims can be sharded. The one with which a rank has the least
work is chosen: the FLOPs that its shards do not divide, and the rows of a rank of the others. Classes that are equal
within `LARGE_SHARE` are decided by the kind of their evidence and by the values that have them. Weaker evidence, such
as a scan beside attention, is considered only for rivals. A program that splits a dim into chunks
and relates the chunks, as linear attention does, has evidence on a factor of the dim; the sequence is the dim itself,
of which each rank has complete chunks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from torch.fx import GraphModule, Node

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.torch_compat import argument_name
from sp_compile.passes.graph.call import OpCall, collect_nodes, is_tensor, node_shape
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.sizes import Size, assume_large, ceil_div, is_same_size, size_product

from .axes import Atom, Axes, Dim, Evidence, Split, attended_dims, value_factors
from .factors import BoundRule
from .rule import lookup_rule
from .sharded_work import LARGE_SHARE, RowWork

ATTENTION_EVIDENCE = ("attention", "a softmax and a product")  # kinds of evidence by attention


class SequenceCandidate(NamedTuple):
    """Dim that may be a sequence, with the evidence for it."""

    size: Size  # positions
    evidence: str  # the kind of the strongest evidence
    ops: int  # number of ops that are evidence
    is_input: bool  # True if an input has the dim
    is_chosen: bool  # False if another candidate has stronger evidence, or is in the same values
    is_split: bool = True  # True if a value is sharded along the dim; known after placement
    share: float = 1.0  # of the FLOPs of the graph, that shards of the dim divide
    why: str = ""  # the reason for which it is not chosen

    def __str__(self) -> str:
        ops = "op" if self.ops == 1 else "ops"
        chosen, why = "" if self.is_chosen else "not chosen: ", f": {self.why}" if self.why else ""
        text = f"{self.size} positions, with {self.evidence} in {self.ops} {ops}, {self.share:.0%} of the FLOPs"
        return f"{chosen}{text}{why}"

    @property
    def is_attended(self) -> bool:
        """Return True for a dim that attention attends over."""
        return self.evidence in ATTENTION_EVIDENCE


CHUNK_RELATIONS = ("scan", "halo", "whole", "window", "attend")  # kinds of factors whose positions an op relates


def find_sequences(
    gm: GraphModule,
    axes: Axes,
    seq_dims: dict[Node, int] | None = None,
    picks: bool = True,
    sharded: Mapping[Node, int] | None = None,
) -> None:
    """Set `axes.sequences`: the user's dims, or else the attended dims, or else the scanned dims.

    Args:
        gm: Graph.
        axes: Axes from `name_axes`; updated.
        seq_dims: Sequence dims by input node.
        picks: Positions selected from a sequence are a sequence, too, unless a value has both. Pass False for
            load-balanced layouts, which distribute only one sequence.
        sharded: The sharded dims of inputs, which are chosen over their rivals.

    Raises:
        SpError: If an input does not have its dim in seq_dims.
    """
    _find_evidence(gm, axes, seq_dims, sharded or {})
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
    splits: dict[int, list[Split]] = {}  # by the class of the dim of chunks
    for split in axes.all_splits():
        splits.setdefault(axes.find(split.factors[0].name), []).append(split)
    related: dict[int, Atom] = {}
    for call, rule in _ruled_calls(gm) if splits else ():
        for dim, kind in _classify_factors(axes, call, rule):
            if kind in CHUNK_RELATIONS or (kind == "sum" and rule.is_contraction):
                for split in (s for a in dim for s in splits.get(axes.find(a.name), ())):
                    for factor in split.factors:
                        related.setdefault(axes.find(factor.name), split.source)
    return related


def _find_granules(gm: GraphModule, axes: Axes) -> None:
    """Set `axes.granules`: the positions of the chunks of each sequence of which products are computed in chunks.

    So are convolutions over the rows of an image, if they have `LARGE_SHARE` of the FLOPs. Complete chunks make shards
    less equal. Other ops on a split dim, such as those on the pixels that the tokens of an image predict, are too cheap
    for that.
    """
    splits = list(axes.all_splits())
    multiplied = RowWork(gm, axes).multiplied_classes() if splits else set()
    for split in splits:
        name, granule = axes.find(split.source.name), size_product(a.size for a in split.factors[1:])
        chunks = axes.find(split.factors[0].name)
        if name in axes.sequences and chunks in multiplied and isinstance(granule, int):
            axes.granules[name] = math.lcm(granule, axes.granules.get(name, 1))
            axes.blocks[chunks] = granule


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


def _find_evidence(gm: GraphModule, axes: Axes, seq_dims: dict[Node, int] | None, sharded: Mapping[Node, int]) -> None:
    """Set `axes.sequences` to the classes of the user's dims, or of dims found by evidence.

    Only the first kind of evidence that exists counts, except among rivals.
    """
    if seq_dims is not None:
        for node, dim in seq_dims.items():
            shape = node_shape(node)
            if not -len(shape) <= dim < len(shape):
                raise SpError("SP303", f"seq_dims: {argument_name(node)!r} has {len(shape)} dims, so no dim {dim}.")
            axes.sequences.update(axes.find(a.name) for a in axes.dims[node, 0][dim % len(shape)])
        return
    sources, found = _chunk_sources(gm, axes), list[FoundDim]()
    for kind, find_evidence in _evidence_by_kind().items():
        for node, atoms in find_evidence(gm, axes):
            found += [FoundDim(node, sources.get(axes.find(a.name), a), kind) for a in atoms]
    long = [x for x in found if not is_same_size(x.atom.size, 1)]
    if not found:
        return
    # a sequence of one token (decoding) is a sequence, too, but cannot be sharded
    strongest = [x for x in long if x.kind == found[0].kind] or [x for x in found if x.kind == found[0].kind]
    axes.sequences = {axes.find(x.atom.name) for x in strongest}
    named = {axes.find(a.name) for node, index in sharded.items() for a in axes.dims[node, 0][index]}
    _RivalChoice(gm, axes, long, sources, named).apply()


class FoundDim(NamedTuple):
    """Evidence for a sequence."""

    node: Node  # the op
    atom: Atom  # the dim, or the one that is split into its chunks
    kind: str  # the kind of evidence, a key of `_evidence_by_kind`


class _RivalChoice:
    """Choice of one class of `axes.sequences` per value, with the reasons in `axes.lost`.

    A value has several if attention or scans run along several of its dims (axial attention).

    Args:
        gm: Graph.
        axes: Axes, updated.
        found: The evidence for dims of several positions, the strongest first.
        sources: The atoms that are split into chunks, by the classes of their factors.
        named: Classes that are chosen over any other.
    """

    def __init__(
        self, gm: GraphModule, axes: Axes, found: list[FoundDim], sources: dict[int, Atom], named: set[int]
    ) -> None:
        self.gm, self.axes, self.found, self.named = gm, axes, found, named
        self.rows: dict[int, set[int]] = {}  # the classes of a candidate and of its chunks
        self.sizes: dict[int, Size] = {}  # positions of a candidate
        self.kinds: dict[int, str] = {}  # its strongest evidence
        for x in found:
            name = axes.find(x.atom.name)
            self.rows.setdefault(name, {name})
            self.sizes.setdefault(name, x.atom.size)
            self.kinds.setdefault(name, x.kind)
        for name, rows in self.rows.items():
            rows |= _chunk_classes(axes, sources, name)
        self.counts: Counter[int] = Counter()  # dims of values by class

    def apply(self) -> None:
        """Choose one class of the candidates that each value with evidence has."""
        strongest = set(self.axes.sequences)
        values = [self._candidates(node) for node in dict.fromkeys(y for x in self.found for y in _rival_values(x))]
        values = [names for names in values if len(names) > 1]
        rivals = [names for names in values if not strongest.isdisjoint(names)]
        if not rivals:
            return
        self.counts.update(
            self.axes.find(a.name) for dims in self.axes.dims.values() for a in {a for dim in dims for a in dim}
        )
        self.work = RowWork(self.gm, self.axes)
        chosen = strongest.union(*rivals)
        for names in values:
            if len(left := names & chosen) > 1:
                chosen -= left - {self._choose(left)}
        self.axes.sequences = chosen

    def _candidates(self, node: Node) -> set[int]:
        """Return the candidates of which a value has a dim."""
        names = {self.axes.find(a.name) for dim in self.axes.dims[node, 0] for a in dim}
        return {name for name, rows in self.rows.items() if not rows.isdisjoint(names)}

    def _choose(self, rivals: set[int]) -> int:
        """Return the class with which a rank has the least work, and set the reasons against the others."""
        divided = {name: self.work.flops_of_rows(self.rows[name]) for name in rivals}
        total = max(divided.values())
        times = {x: total - divided[x] * (1 - _largest_share(self.sizes[x], self.axes.n)) for x in rivals}
        least = min(times.values())
        equal = [x for x in rivals if x in self.named] or [x for x in rivals if times[x] <= (1 + LARGE_SHARE) * least]
        kinds = list(_evidence_by_kind())
        best = max(equal, key=lambda x: (-kinds.index(self.kinds[x]), self.counts[x], -x))
        for x in rivals - {best}:
            if x in equal or not total:
                why = f"less is computed along it than along the {self.sizes[best]}"
            elif best in self.named:
                why = f"an input is split into the {self.sizes[best]}"
            else:
                ranks = f"each of {self.axes.n} ranks"
                shares = f"{times[x] / total:.0%} of them instead of {times[best] / total:.0%}"
                why = f"{ranks} would compute {shares} with the {self.sizes[best]}"
            self.axes.lost[x] = why
        return best


def _chunk_classes(axes: Axes, sources: Mapping[int, Atom], name: int) -> set[int]:
    """Return the classes of the dims of the chunks of a class: ranks can split these, but no chunk."""
    chunks = {axes.find(split.factors[0].name) for split in axes.all_splits()}
    return {chunk for chunk in chunks & sources.keys() if axes.find(sources[chunk].name) == name}


def _rival_values(found: FoundDim) -> list[Node]:
    """Return the values of which only one dim can be sharded: the result of the op, and its queries and keys."""
    operands = [x for x in found.node.all_input_nodes if is_tensor(x)]
    return [found.node, *(operands[:2] if found.kind == ATTENTION_EVIDENCE[0] else ())]


def _largest_share(size: Size, n: int) -> float:
    """Return the largest share of the rows of a dim that one of n ranks has."""
    rows = assume_large(size)
    return ceil_div(rows, n) / rows


def _evidence_by_kind() -> dict[str, Callable[[GraphModule, Axes], Evidence]]:
    """Return the functions that find evidence, the strongest first, by its text for reports."""
    return {
        ATTENTION_EVIDENCE[0]: attended_dims,
        ATTENTION_EVIDENCE[1]: _softmax_attended_dims,
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
    work = RowWork(gm, axes)
    candidates = []
    for name, (size, kind, nodes) in evidence.items():
        rows = {name, *_chunk_classes(axes, sources, name)}
        share = work.flops_of_rows(rows) / work.total if work.total else 1.0
        is_chosen = name in axes.sequences
        why = "" if is_chosen else axes.lost.get(name, "the others have stronger evidence, or are named by seq_dims")
        candidates.append(
            SequenceCandidate(size, kind, len(nodes), name in input_names, is_chosen, is_chosen, share, why)
        )
    return sorted(candidates, key=lambda c: (not c.is_chosen, -assume_large(c.size)))


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
