"""Find the sequences of a graph: the classes of dims that attention, scans or convolutions run along.

Evidence is an op, such as attention, and the dim that is a sequence because of it; the user's dims come first. Two
classes are rivals if one value has both: only one of its dims can be sharded. The one with which a rank has the least
work is chosen: the FLOPs that its shards do not divide, and a rank's share of the others. Classes that are equal
within `LARGE_SHARE` are decided by the kind of their evidence and by the values that have them. Weaker evidence, such
as a scan beside attention, is considered for rivals, and for classes with a large part of the FLOPs that no value has
beside a sequence: values of both are sharded. A program that splits a dim into chunks and relates these, as linear
attention does, has evidence on a factor of the dim; the sequence is the dim, in complete chunks on each rank.

A `Dim` is the tuple of its factors (`Atom`), the slowest first, as (batch, sequence) of a flattened dim; () if its size
is 1. `Axes` has the dims of all values of the graph, and the classes of their factors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from functools import cached_property
from typing import NamedTuple

from torch.fx import GraphModule, Node

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.torch_compat import argument_name
from sp_compile.passes.graph.call import OpCall, collect_nodes, is_tensor, node_shape, parse_overloads
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.sizes import Size, assume_large, is_same_size, size_product

from .attention_axes import softmax_attended_dims
from .axes import Atom, Axes, Dim, Evidence, Split, attended_dims, value_factors
from .factors import BoundRule
from .rule import lookup_rule
from .sharded_work import ATTENTION_EVIDENCE, LARGE_SHARE, RowWork, SequenceCandidate, convolved_dims, largest_share

WINDOWED_EVIDENCE = "attention in windows of its positions"  # the rows of windows, which `choose_rows` may choose
SELECTIONS = parse_overloads("gather index_select index.Tensor")  # of keys and values
CHUNK_RELATIONS = ("scan", "halo", "replicate", "window", "attend")  # kinds of factors whose positions an op relates


def find_sequences(
    gm: GraphModule,
    axes: Axes,
    seq_dims: dict[Node, int] | None = None,
    picks: bool = True,
    sharded: Mapping[Node, int] | None = None,
) -> None:
    """Set `axes.sequences`: the user's dims, or else the dims that attention reads, or else those of scans.

    A sequence is a class of dims with the same rows, named by `axes.find`. Values are sharded along sequences.

    Args:
        gm: Graph.
        axes: Axes from `name_axes`; updated.
        seq_dims: Sequence dims by input node.
        picks: True if rows that an op selects from a sequence, and dims with weaker evidence, are sequences, too,
            unless a value has both. Pass False for load-balanced layouts, which distribute only one sequence.
        sharded: The sharded dims of inputs, which are chosen over other dims of the same values.

    Raises:
        SpError: If an input does not have its dim in seq_dims.
    """
    _find_evidence(gm, axes, seq_dims, picks, sharded or {})
    complete_sequences(gm, axes, picks)


def complete_sequences(gm: GraphModule, axes: Axes, picks: bool) -> None:
    """Add sequences that belong to `axes.sequences`, and set the chunks and strides of all of them.

    Args:
        gm: Graph.
        axes: Axes with sequences; updated.
        picks: True to add the dims of results that slices or indices select from a sequence.
    """
    _add_parts(gm, axes)
    _find_granules(gm, axes)
    _find_strides(gm, axes)
    for dim, source in axes.selected if picks else ():  # (dim of the result, dim of the operand) of a slice or index
        names = {axes.find(a.name) for a in dim if not is_same_size(a.size, 1)} - axes.sequences
        if len(names) == 1 and any(map(axes.is_sequence, source)) and not _share_values(axes, names, axes.sequences):
            axes.sequences |= names


def _chunk_sources(gm: GraphModule, axes: Axes) -> dict[int, Atom]:
    """Map the class of each factor of a dim that is split into chunks to the dim before the split.

    For 12 rows that are reshaped to (3 chunks, 4 rows) and scanned chunk by chunk, as in linear attention, it maps the
    classes of both factors to the 12 rows: evidence on a factor is then evidence for the 12 rows. Only splits whose
    chunks an op relates count, by a scan, sum or selection along the dim of chunks; others, as of a batch, are
    independent. Patches do not count: chunks that attention attends over, without FLOPs on the rows themselves.
    """
    splits: dict[int, list[Split]] = {}  # by the class of the dim of chunks, the first factor of a split
    attended = {axes.find(a.name) for _, dim in attended_dims(gm, axes) for a in dim}
    work: RowWork | None = None  # counted once, if a split needs it
    for split in axes.all_splits():
        chunks, rows = axes.find(split.factors[0].name), axes.find(split.source.name)
        if chunks in attended:
            work = work or RowWork(gm, axes)
        if chunks not in attended or (work is not None and work.flops_of_rows({rows})):
            splits.setdefault(chunks, []).append(split)
    sources: dict[int, Atom] = {}
    for call, rule in _ruled_calls(gm) if splits else ():
        # A sum relates chunks in a product of two operands only: a sum of one operand may be over a flattened batch.
        for dim, kind in _classify_factors(axes, call, rule):
            if kind in CHUNK_RELATIONS or (kind == "sum" and rule.is_contraction):
                splits_of_dim = (s for a in dim for s in splits.get(axes.find(a.name), ()))
                for split in splits_of_dim:
                    for factor in split.factors:
                        sources.setdefault(axes.find(factor.name), split.source)
    return sources


def _find_granules(gm: GraphModule, axes: Axes) -> None:
    """Set `axes.granules` and `axes.blocks`, the rows of a chunk, for sequences that are computed in chunks.

    `blocks` maps the class of a dim of chunks to the rows of a chunk. `granules` maps the class of a sequence to the
    least common multiple of these over its splits, so that each rank has complete chunks. Only splits count whose
    chunks are in products, or in convolutions with `LARGE_SHARE` of the FLOPs: complete chunks make shards less equal,
    and other ops, such as those on the pixels of predicted patches, are too cheap for that.
    """
    splits = list(axes.all_splits())
    multiplied = RowWork(gm, axes).multiplied_classes() if splits else set()
    for split in splits:
        name, rows = axes.find(split.source.name), size_product(a.size for a in split.factors[1:])
        chunks = axes.find(split.factors[0].name)
        is_apart = bool(axes.windowed) and chunks in axes.sequences  # as tokens of windows that are joined with a text
        if name in axes.sequences and chunks in multiplied and isinstance(rows, int) and not is_apart:
            axes.granules[name] = math.lcm(rows, axes.granules.get(name, 1))
            axes.blocks[chunks] = rows
    for name in axes.windowed:
        _find_nested_granules(axes, name)


def _find_nested_granules(axes: Axes, name: int) -> None:
    """Set the granules of a sequence whose chunks are split into chunks again, and those of its dims of chunks.

    An example is an image of which 2 rows are merged to one, and windows of 4 of these: each rank has complete windows
    of 8 rows of the image.

    Args:
        axes: The axes with `chunk_blocks`, updated.
        name: The class of the sequence.
    """
    blocks = axes.chunk_blocks[name]
    axes.granules[name] = granule = math.lcm(*blocks.values(), axes.granules.get(name, 1))
    for chunks, block in blocks.items():
        axes.granules[chunks], axes.blocks[chunks] = granule // block, block  # chunks of a granule, rows of a chunk


def _add_parts(gm: GraphModule, axes: Axes) -> None:
    """Add to `axes.sequences` parts of a sequence that have frames of their own, and the sequences of such parts.

    Such a part, as the text in cat([text, image]), is sharded by itself. An sp::rows or index op, marked `is_apart`,
    moves its rows from one frame to the other. If its operand or its result is a sequence, so is the other one.
    """
    moves: list[tuple[set[int], set[int]]] = []  # classes of the rows of the result and of the operand
    for node in gm.graph.nodes:
        if node_info(node).is_apart:
            call = OpCall(node)
            result_dim, operand_dim = (axes.dims[x, 0][call.dim()] for x in (node, call.operands[0]))
            moves.append(({axes.find(a.name) for a in result_dim}, {axes.find(a.name) for a in operand_dim}))
    for _ in moves:  # each round may add a sequence whose own parts are added next
        candidates: set[int] = set()
        for result, operand in moves:
            if not axes.sequences.isdisjoint(result | operand):
                # A flattened dim has several classes.
                candidates |= {name for classes in (result, operand) if len(classes) == 1 for name in classes}
        # A value with two sequences can be sharded along one only, so that the earlier sequence remains.
        new = {name for name in candidates - axes.sequences if not _share_values(axes, {name}, axes.sequences)}
        if not new:
            break
        axes.sequences |= new


def _find_strides(gm: GraphModule, axes: Axes) -> None:
    """Set `axes.strides`: for rows that windows read, the product of the strides of all windows from there on.

    For two convolutions of stride 2 one after the other, it is 4 for the rows of the first operand and 2 for those of
    the second. Each rank then has a multiple of 4 rows, so that its shard of each result needs few rows of neighbors.
    The keys are (class, number of rows), because the results belong to the class of the operand, with fewer rows.
    """
    windows = [(call.node, call.operands[0], rule) for call, rule in _ruled_calls(gm) if rule.slides]
    if all(sliding.stride == 1 for _, _, rule in windows for sliding in rule.slides.values()):
        return
    for node, x, rule in reversed(windows):  # so that the strides after a window are known
        operand_names, result_names = rule.operands[0], rule.results[0]
        for factor, sliding in rule.slides.items():
            if factor not in operand_names or factor not in result_names:
                continue
            operand_dim = axes.dims[x, 0][operand_names.index(factor)]
            result_dim = axes.dims[node, 0][result_names.index(factor)]
            if len(operand_dim) != 1 or len(result_dim) != 1:
                continue
            (read,), (result,) = operand_dim, result_dim
            if axes.is_sequence(read):
                read_key, result_key = ((axes.find(a.name), a.size) for a in (read, result))
                stride = sliding.stride * axes.strides.get(result_key, 1)
                if stride > 1:
                    axes.strides[read_key] = math.lcm(stride, axes.strides.get(read_key, 1))


def _share_values(axes: Axes, names: Set[int], others: Set[int]) -> bool:
    """Return True if some value has dims of classes of both sets: it can be sharded along only one of them."""
    classes_of_values = ({axes.find(a.name) for dim in dims for a in dim} for dims in axes.dims.values())
    return any(classes & names and classes & others for classes in classes_of_values)


def _find_evidence(
    gm: GraphModule, axes: Axes, seq_dims: dict[Node, int] | None, picks: bool, sharded: Mapping[Node, int]
) -> None:
    """Set `axes.sequences` to the user's dims, or else to the dims for which ops are evidence, such as attention.

    The strongest kind of evidence in the graph counts. Weaker kinds are considered by `_RivalChoice`.

    Args:
        gm: Graph.
        axes: Axes, updated.
        seq_dims: The user's dims by input; None to find them.
        picks: True if there may be sequences of several lengths.
        sharded: The sharded dims of inputs, which are chosen over other dims of the same values.

    Raises:
        SpError: An input does not have its dim in seq_dims (SP303).
    """
    if seq_dims is not None:
        for node, dim in seq_dims.items():
            shape = node_shape(node)
            if not -len(shape) <= dim < len(shape):
                cause = f"seq_dims: expected a dim of {argument_name(node)!r}, which has {len(shape)} dims, got {dim}."
                raise SpError("SP303", cause)
            axes.sequences.update(axes.find(a.name) for a in axes.dims[node, 0][dim % len(shape)])
        return
    chunk_sources = _chunk_sources(gm, axes)
    if not (found := list(_found_dims(gm, axes, chunk_sources))):
        return
    # `found` is ordered by kind, the strongest one first.
    strongest = [x for x in found if x.kind == found[0].kind]
    long = [x for x in found if not is_same_size(x.atom.size, 1)]
    # A dim of size 1, as in decoding, cannot be sharded: it is used if no dim of several tokens has such evidence.
    long_strongest = [x for x in long if x.kind == found[0].kind]
    axes.sequences = {axes.find(x.atom.name) for x in long_strongest or strongest}
    preferred = {axes.find(a.name) for node, index in sharded.items() for a in axes.dims[node, 0][index]}
    choice = _RivalChoice(gm, axes, long, chunk_sources, preferred)
    choice.apply()  # keeps one of several dims of the same value
    if picks:
        choice.add_apart()


class FoundDim(NamedTuple):
    """Evidence for a sequence: an op, and a dim that is a sequence because of it."""

    node: Node  # the op
    atom: Atom  # the dim; for a dim of chunks, or of rows of a chunk, the dim that was split into chunks
    kind: str  # the kind of evidence, a key of `EVIDENCE`


class _RivalChoice:
    """Choice of one sequence for values that have several, because a value can be sharded along only one dim.

    A value has several candidates if attention or scans run along several of its dims (axial attention). Candidates are
    classes of dims with the same rows, named by `axes.find`. `axes.reasons` gets the reasons for or against each.

    Args:
        gm: Graph.
        axes: Axes, whose `sequences` are the candidates with the strongest evidence; updated.
        found: The evidence for dims of several positions, the strongest first.
        chunk_sources: The atoms (factors of dims) that are split into chunks, by the classes of their factors: for a
            dim s that is reshaped to (c t), c and t each map to s.
        preferred: Classes that are chosen over any other.
    """

    def __init__(
        self, gm: GraphModule, axes: Axes, found: list[FoundDim], chunk_sources: dict[int, Atom], preferred: set[int]
    ) -> None:
        """Collect the candidates: the classes of dims with evidence, by the name of the class (`Axes.find`)."""
        self.gm, self.axes, self.found, self.preferred = gm, axes, found, preferred
        self.rows: dict[int, set[int]] = {}  # by candidate: its class, and those of its dims of chunks
        self.sizes: dict[int, Size] = {}  # positions of a candidate
        self.kinds: dict[int, str] = {}  # its strongest evidence
        for _, atom, kind in found:
            name = axes.find(atom.name)
            self.rows.setdefault(name, {name})
            self.sizes.setdefault(name, atom.size)
            self.kinds.setdefault(name, kind)
        for name, rows in self.rows.items():
            rows |= _chunk_classes(axes, chunk_sources, name)
        self.counts: Counter[int] = Counter()  # number of values that have a dim of a class

    @cached_property
    def work(self) -> RowWork:
        """Return the FLOPs of the graph by the dims that they run over."""
        return RowWork(self.gm, self.axes)

    def apply(self) -> None:
        """Set `axes.sequences` so that no value of the evidence has dims of two sequences.

        A candidate with weaker evidence is considered here beside one with the strongest evidence in the same value.
        """
        strongest = set(self.axes.sequences)
        values = dict.fromkeys(value for evidence in self.found for value in _rival_values(evidence))
        # The candidates of each value that has several of them.
        rival_sets = [names for names in map(self._candidates, values) if len(names) > 1]
        with_strongest = [names for names in rival_sets if not strongest.isdisjoint(names)]
        if not with_strongest:
            return
        for dims in self.axes.dims.values():
            self.counts.update({self.axes.find(a.name) for dim in dims for a in dim})
        chosen = strongest.union(*with_strongest)
        for names in rival_sets:
            remaining = names & chosen  # an earlier value may have excluded some
            if len(remaining) > 1:
                chosen -= remaining - {self._choose(remaining)}
        self.axes.sequences = chosen

    def add_apart(self) -> None:
        """Add candidates with weaker evidence to `axes.sequences` that no value has beside a dim of a sequence.

        Each has at least `LARGE_SHARE` of the FLOPs, as scans of audio beside attention over a text. Others, such as
        sums of lengths, are not worth their exchanges.
        """
        sequences = self.axes.sequences
        for name in [x for x in self.rows if x not in sequences and x not in self.axes.reasons]:
            chosen = set().union(*(self.rows.get(x, {x}) for x in sequences))
            if _share_values(self.axes, self.rows[name], chosen):
                continue
            if self.work.total and self.work.flops_of_rows(self.rows[name]) >= LARGE_SHARE * self.work.total:
                sequences.add(name)
                self.axes.reasons[name] = "no value has it beside another sequence"
            else:
                self.axes.reasons[name] = f"it has less than {LARGE_SHARE:.0%} of the FLOPs, and weaker evidence"

    def _candidates(self, node: Node) -> set[int]:
        """Return the candidates of which a value has a dim, or a dim of their chunks."""
        names = {self.axes.find(a.name) for dim in self.axes.dims[node, 0] for a in dim}
        return {name for name, rows in self.rows.items() if not rows.isdisjoint(names)}

    def _choose(self, rivals: set[int]) -> int:
        """Return the candidate with which a rank computes the fewest FLOPs, and set the reasons against the others.

        Of about equal ones, it is the one with the strongest evidence, then the one that most values have. A dim along
        which an input is sharded already is chosen in any case.
        """
        # A rank computes its share of the FLOPs that shards along the candidate divide, and all others. `total` is the
        # most that a candidate divides: FLOPs that none divides are equal for all, and not counted.
        divided = {x: self.work.flops_of_rows(self.rows[x]) for x in rivals}
        total = max(divided.values())
        flops = {x: total - divided[x] * (1 - largest_share(self.sizes[x], self.axes.n)) for x in rivals}
        about_least = [x for x in rivals if flops[x] <= (1 + LARGE_SHARE) * min(flops.values())]
        eligible = [x for x in rivals if x in self.preferred] or about_least
        kinds = list(EVIDENCE)  # the strongest first; `counts` are numbers of values, -x only makes the choice definite
        best = max(eligible, key=lambda x: (-kinds.index(self.kinds[x]), self.counts[x], -x))
        losers = rivals - {best}
        self.axes.reasons[best] = f"a rank computes the least with it, {flops[best] / max(total, 1.0):.0%} of them"
        for x in losers:
            if best in self.preferred and x not in self.preferred:
                why = f"an input is split into the {self.sizes[best]}"
                self.axes.reasons[best] = "an input is split along it"
            elif x in eligible or not total:  # not total: there are no FLOPs to compare
                why = self._explain_tie(x, best)
                self.axes.reasons[best] = f"a rank has about as much work with the {self.sizes[x]}; {why}"
            else:
                shares = f"{flops[x] / total:.0%} of them instead of {flops[best] / total:.0%}"
                why = f"each of {self.axes.n} ranks would compute {shares} with the {self.sizes[best]}"
            self.axes.reasons[x] = why
        return best

    def _explain_tie(self, lost: int, best: int) -> str:
        """Return the reason against a candidate along which about as much is computed as along the best one."""
        if self.kinds[lost] != self.kinds[best]:
            return f"{self.kinds[best]} along the {self.sizes[best]} is stronger evidence"
        if self.counts[lost] != self.counts[best]:
            return f"more values have the {self.sizes[best]}"
        return "of equal ones, the first is chosen"


def _chunk_classes(axes: Axes, chunk_sources: Mapping[int, Atom], name: int) -> set[int]:
    """Return the classes of the dims of chunks into which the sequence `name` is split, from `_chunk_sources`.

    A shard of the sequence is a shard of its chunks, because each rank has complete chunks.
    """
    chunks = {axes.find(split.factors[0].name) for split in axes.all_splits()}
    return {chunk for chunk in chunks & chunk_sources.keys() if axes.find(chunk_sources[chunk].name) == name}


def _rival_values(evidence: FoundDim) -> list[Node]:
    """Return the values of an op that have rival candidates: its result and, for attention, its queries and keys."""
    operands = [x for x in evidence.node.all_input_nodes if is_tensor(x)]
    return [evidence.node, *(operands[:2] if evidence.kind == ATTENTION_EVIDENCE[0] else ())]


def _found_dims(gm: GraphModule, axes: Axes, chunk_sources: Mapping[int, Atom]) -> Iterator[FoundDim]:
    """Yield a `FoundDim` per factor, the strongest kind first; factors of chunks become the dim that was split."""
    is_found = False
    for kind, find_evidence in EVIDENCE.items():
        if kind == LAST_EVIDENCE and is_found:  # a contrastive loss relates the samples of a batch
            return
        for node, dim in find_evidence(gm, axes):
            is_found = True
            yield from (FoundDim(node, chunk_sources.get(axes.find(a.name), a), kind) for a in dim)


def sequence_candidates(gm: GraphModule, axes: Axes, user_dims: Mapping[str, int]) -> list[SequenceCandidate]:
    """Return the dims that may be a sequence, those of `axes.sequences` first, then the longest first, for the report.

    Args:
        gm: Graph.
        axes: Axes after `find_sequences`.
        user_dims: The dims that the user names, by input; none if they were found.
    """
    chunk_sources = _chunk_sources(gm, axes)
    evidence: dict[int, tuple[Size, str, set[Node]]] = {}  # by class: positions, strongest kind of evidence, and ops
    for node, atom, kind in _found_dims(gm, axes, chunk_sources):
        if not is_same_size(atom.size, 1):
            _, _, ops = evidence.setdefault(axes.find(atom.name), (atom.size, kind, set()))
            ops.add(node)
    for name, nodes in axes.windowed.items():
        size = max((a.size for a in axes.atoms() if axes.find(a.name) == name), key=assume_large)
        evidence[name] = (size, WINDOWED_EVIDENCE, nodes)
    input_dims: dict[int, dict[str, None]] = {}  # by class: the inputs with their dims, such as "ids dim 1"
    for node in gm.graph.find_nodes(op="placeholder"):
        for d, dim in enumerate(() if node_info(node).parameter else axes.dims.get((node, 0), ())):
            for atom in dim:
                input_dims.setdefault(axes.find(atom.name), {})[f"{argument_name(node)} dim {d}"] = None
    kinds = [kind for name, (_, kind, _) in evidence.items() if name in axes.sequences]
    strongest = min(kinds, key=[*EVIDENCE, WINDOWED_EVIDENCE].index, default="an input on shards")
    reason = f"{strongest} is stronger evidence" if not user_dims else f"seq_dims={dict(user_dims)} names another one"
    chosen_reason = f"seq_dims={dict(user_dims)} names it" if user_dims else f"{strongest} is the strongest evidence"
    work, candidates = RowWork(gm, axes), list[SequenceCandidate]()
    for name, (size, kind, nodes) in evidence.items():
        classes = {name, *_chunk_classes(axes, chunk_sources, name), *axes.chunk_blocks.get(name, {})}
        share = work.flops_of_rows(classes) / work.total if work.total else 1.0
        is_chosen = name in axes.sequences
        why = axes.reasons.get(name, chosen_reason if is_chosen else reason) if len(evidence) > 1 else ""
        inputs = tuple(input_dims.get(name, ()))
        args = size, kind, len(nodes), bool(inputs), is_chosen, is_chosen, share, why, inputs  # split if chosen, so far
        candidates.append(SequenceCandidate(*args))
    return sorted(candidates, key=lambda c: (not c.is_chosen, -assume_large(c.size)))


def _scanned_dims(gm: GraphModule, axes: Axes) -> Evidence:
    """Yield (scan, scanned dim); for a sequence that is flattened with the batch, only the longest factor."""
    for call, rule in _ruled_calls(gm):
        for dim, kind in _classify_factors(axes, call, rule):
            if kind == "scan" and dim and not node_info(call.node).is_aside:  # is_aside: along batch or choices
                longest = max(reversed(dim), key=lambda a: assume_large(a.size))  # of equals, the last
                yield call.node, (longest,)


def _combined_dims(gm: GraphModule, axes: Axes) -> Evidence:
    """Yield (operand, scanned dim) for scans with a function, such as torch.scan, which have no rule."""
    for node in gm.graph.nodes:
        scanned = node_info(node).scanned  # (argument, dim)
        if scanned is not None:
            argument, dim = scanned
            for x in collect_nodes(node.args[argument]):
                yield x, axes.dims[x, 0][dim]


def _related_dims(gm: GraphModule, axes: Axes) -> Evidence:
    """Yield (product, dim) for products of positions with positions, such as q @ k.mT, whose values are then read."""
    related: dict[frozenset[int], tuple[Node, Dim]] = {}  # by the classes of a dim
    for call, rule in _ruled_calls(gm):
        dims = axes.dims.get((call.node, 0), ())
        classes = [frozenset(axes.find(a.name) for a in dim) for dim in dims]
        if rule.is_contraction and len(dims) > 2:
            related |= {x: (call.node, dim) for i, (x, dim) in enumerate(zip(classes, dims)) if x and x in classes[:i]}
        if not related or not (rule.is_contraction or call.node.target in SELECTIONS):
            continue
        for dim, kind in _classify_factors(axes, call, rule):
            found = related.get(frozenset(axes.find(a.name) for a in dim))
            if found is not None and found[0] is not call.node and kind in ("sum", "replicate"):
                yield found


LAST_EVIDENCE = "products of positions with positions"  # only if there is no other evidence
# Functions that yield (op, dim) for ops along whose dim rows are combined, by evidence, the strongest first.
EVIDENCE: dict[str, Callable[[GraphModule, Axes], Evidence]] = {
    ATTENTION_EVIDENCE[0]: attended_dims,
    ATTENTION_EVIDENCE[1]: softmax_attended_dims,
    "scans": _scanned_dims,
    "scans with a function": _combined_dims,
    "convolutions along one dim": convolved_dims,
    LAST_EVIDENCE: _related_dims,
}


def _ruled_calls(gm: GraphModule) -> Iterable[tuple[OpCall, BoundRule]]:
    """Yield the calls of ops that have a sharding rule, with the rule, in graph order."""
    for node in gm.graph.nodes:
        call, rule = lookup_rule(node) or (None, None)
        if call is not None and rule is not None:
            yield call, rule


def _classify_factors(axes: Axes, call: OpCall, rule: BoundRule) -> Iterable[tuple[Dim, str]]:
    """Yield (atoms, kind) for every factor of the operands, such as the scanned dim of cumsum and "scan"."""
    for operand, dims in zip(call.operands, rule.operands):
        for dim, f in value_factors(axes, operand, rule, dims):
            yield dim, rule.kind(f)
