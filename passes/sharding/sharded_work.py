"""Count the work of a graph, and the share of it that runs on shards.

Work is the FLOPs of products, convolutions, attention, recurrences and triangular solves, 2 for each multiply-add, of
the forward in the global view. Activations are the results that need a gradient, in bytes; a view counts once, with the
value that it views. A node runs on shards if one of its results is sharded or partial; otherwise every rank computes
all of it. Shards contain padding where n ranks do not divide the rows, such as 5 of 8 rows for a sequence of 3 on 8
ranks. It is work of a rank, too: the FLOPs of a rank are those that every rank computes, and an n-th of those on shards
with their padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.dtypes import has_gradient_dtype
from sp_compile.lowering.base.errors import node_line
from sp_compile.lowering.scan.linear_attention import LINEAR_ATTENTION_OPS, chunk_tokens
from sp_compile.lowering.torch_compat import autograd_function_apply
from sp_compile.passes.graph.call import OpCall, node_shape, node_tensors
from sp_compile.passes.graph.sizes import Size, as_sizes, assume_large, ceil_div, size_product

from .attention_axes import ATTENTION, ATTENTION_OF_TORCH, op_strategy
from .axes import Atom, Axes, Evidence
from .factors import BoundRule, dim_factors, flatten_dims
from .placement import PlacementPlan, Replicate, Shard
from .rule import cache_lookups, lookup_rule, transfer_of

SOLVE_OPS = (torch.ops.aten.linalg_solve_triangular.default, torch.ops.aten.linalg_solve.default)
LARGE_SHARE = 0.05  # of the FLOPs of a graph, from which on the report names a line that every rank computes

JOINT_PADDING = (
    "Layers of one part of a joint sequence, such as the image tokens beside a text, compute the rows of the other "
    "parts as padding. Use fewer ranks, or shorter other parts."
)

MAX_LINES = 3  # lines that the report names of the work that every rank does, and inputs of a sequence
ATTENTION_EVIDENCE = ("attention", "a softmax and a product")  # kinds of evidence by attention


class ReplicatedPart(NamedTuple):
    """A large part of the FLOPs or activations, which every rank has in full."""

    is_flops: bool  # of the FLOPs; else of the activations
    share: float  # of all FLOPs or activations, from 0 to 1
    lines: tuple[tuple[str, float], ...]  # (line of the program, share) of the largest ones, at most `MAX_LINES`
    others: int  # number of other lines

    def describe(self) -> str:
        """Return a sentence on the part, with its lines."""
        subject = "the FLOPs run unsharded" if self.is_flops else "the activations are full tensors"
        lines = ", ".join(f"{line} ({share:.0%})" for line, share in self.lines)
        more = f", and {self.others} other lines" if self.others else ""
        return f"{self.share:.0%} of {subject} on every rank: {lines}{more}"


@dataclass
class ShardedWork:
    """FLOPs and bytes of activations of a graph, in total and on shards."""

    flops: float = 0.0  # of the forward
    sharded_flops: float = 0.0  # of the nodes that run on shards, without padding
    rank_flops: float = 0.0  # of one rank, with padding
    window_flops: float = 0.0  # of one rank, for rows of other parts of a joint sequence; a part of `rank_flops`
    activations: float = 0.0  # bytes
    sharded_activations: float = 0.0  # bytes of the values that are sharded
    replicated: Counter[str] = field(default_factory=Counter)  # FLOPs that every rank computes, by the user's line
    replicated_activations: Counter[str] = field(default_factory=Counter)  # bytes that every rank has, by line

    def merge(self, other: ShardedWork) -> None:
        """Add the work of another graph of the same program.

        Args:
            other: The work, which is not changed.
        """
        for name, amount in vars(other).items():
            setattr(self, name, getattr(self, name) + amount)

    def add_replicated(self, line: str, flops: float, nbytes: float) -> None:
        """Add work that every rank does in full.

        Args:
            line: The user's line.
            flops: FLOPs.
            nbytes: Bytes of activations.
        """
        self.flops += flops
        self.rank_flops += flops
        self.activations += nbytes
        if flops:
            self.replicated.update({line: flops})  # adds
        if nbytes:
            self.replicated_activations.update({line: nbytes})

    def describe(self, saved: float | None = None) -> str:
        """Return text for the report, such as "98% of the FLOPs and 95% of the activations ... are on shards; ...".

        Args:
            saved: The share of the bytes that the backward reads, if known, which replaces that of the activations.
        """
        activations = ""
        if saved is not None:
            activations = f" and {saved:.0%} of the bytes saved for the backward"
        elif self.activations:
            activations = f" and {self.activations_share:.0%} of the activations (results that need a gradient)"
        on_shards = f"{self.flops_share:.0%} of the FLOPs{activations} are on shards"
        return f"{on_shards}; a rank computes {self.rank_share:.0%} of the FLOPs"

    def large_replicated_lines(self) -> list[tuple[str, float]]:
        """Return (line of the program, share of all FLOPs) for lines that every rank computes in full.

        Only lines with at least `LARGE_SHARE` are returned, the largest first.
        """
        by_flops = self.replicated.most_common()
        return [(line, flops / self.flops) for line, flops in by_flops if flops >= LARGE_SHARE * self.flops]

    def describe_excess(self, n: int) -> list[str]:
        """Return sentences for the report on work that more ranks do not reduce: padding, and work of every rank.

        Kinds of work with less than `LARGE_SHARE` are omitted. At most `MAX_LINES` lines of the program are named.

        Args:
            n: Number of ranks.
        """
        texts = []
        unpadded_flops = (self.flops - self.sharded_flops) + self.sharded_flops / n
        padding = self.rank_flops - unpadded_flops
        if padding >= LARGE_SHARE * self.rank_flops and padding:
            is_joint = 2 * self.window_flops > padding
            fix = JOINT_PADDING if is_joint else f"Use fewer ranks, or lengths that {n} ranks divide."
            texts.append(f"{padding / self.rank_flops:.0%} of the FLOPs of a rank are for padding. {fix}")
        return texts + [part.describe() for part in self.large_replicated_parts()]

    def large_replicated_parts(self) -> list[ReplicatedPart]:
        """Return the work of every rank, in FLOPs and in activations; parts below `LARGE_SHARE` are omitted."""
        parts = []
        for is_flops, by_line, total in (
            (True, self.replicated, self.flops),
            (False, self.replicated_activations, self.activations),
        ):
            share = sum(by_line.values()) / total if total else 0.0
            if share >= LARGE_SHARE:
                lines = tuple((line, amount / total) for line, amount in by_line.most_common(MAX_LINES))
                parts.append(ReplicatedPart(is_flops, share, lines, len(by_line) - len(lines)))
        return parts

    @property
    def flops_share(self) -> float:
        """Return the share of the FLOPs that runs on shards, from 0 to 1; 1 without FLOPs."""
        return self.sharded_flops / self.flops if self.flops else 1.0

    @property
    def rank_share(self) -> float:
        """Return the FLOPs of one rank, with padding, as a share of those of the graph; 1 without FLOPs."""
        return self.rank_flops / self.flops if self.flops else 1.0

    @property
    def activations_share(self) -> float:
        """Return the share of the bytes of activations on shards, from 0 to 1; 1 without activations."""
        return self.sharded_activations / self.activations if self.activations else 1.0


@cache_lookups()
def count_work(
    gm: GraphModule, plan: PlacementPlan, trained: set[Node], times: Callable[[Node], int], n: int
) -> ShardedWork:
    """Return the FLOPs and the bytes of activations of a graph, in total, on shards, and on every rank.

    Args:
        gm: Graph in the global view, after all demands are met.
        plan: Placements of its values.
        trained: Nodes with results that need a gradient.
        times: Returns the number of nodes that a node represents, if the graph has only some of equal layers.
        n: Number of ranks.
    """
    work = ShardedWork()
    for node in gm.graph.nodes:
        if node.op != "call_function" or transfer_of(node.target) is not None:  # an exchange computes nothing
            continue
        flops, nbytes = contraction_flops(node) + _body_flops(gm, node), _activation_bytes(node, trained)
        flops, nbytes = times(node) * flops, times(node) * nbytes
        # A node with a frame runs on shards, also if its result is replicated, as that of an sp:: op with an exchange.
        if has_frame(node) or any(not isinstance(p, Replicate) for p in plan.placements.get(node, ())):
            work.flops += flops
            work.sharded_flops += flops
            share, window_share = _shares_of_rank(node, plan, n) if flops else (0.0, 0.0)
            work.rank_flops += flops * share
            work.window_flops += flops * window_share
            work.activations += nbytes
            work.sharded_activations += nbytes
        else:
            work.add_replicated(node_line(node), flops, nbytes)
    return work


def _shares_of_rank(node: Node, plan: PlacementPlan, n: int) -> tuple[float, float]:
    """Return the share of a node's work that one rank computes, and the part of it that is for rows of other parts.

    The share is the rows of the rank, with padding, divided by all rows: 2 / 5 for 5 rows on 4 ranks, as each rank has
    2 rows. It is 1 / n if no frame is known, its length is symbolic, or its order is balanced at run time. If the value
    is a part of a joint sequence, the rank has the number of rows that it has of the sequence. Of 8 image tokens
    after 4 text tokens, 2 ranks have 6 rows each. The share is 6 / 8, of which 6 / 8 - 6 / 12 is for rows of the text.
    """
    values = (node, *node.all_input_nodes)  # the result of a node on shards may be partial, without a frame
    placements = [placement for value in values for placement in plan.placements.get(value, ())]
    frames = [placement.frame for placement in placements if isinstance(placement, Shard)]
    if not frames or frames[0].order.is_balanced or not isinstance(frames[0].length, int):
        return 1 / n, 0.0
    frame = frames[0]
    local_rows, size = assume_large(frame.local_length(n)), assume_large(frame.size)
    share = max(local_rows / max(frame.length, 1), 1 / n)
    # Fewer rows than a chunk on each rank complete the sequence to chunks, or are those that x[:, :-1] omits.
    is_part = size - frame.length >= frame.granule * n * frame.order.chunks
    return share, share - local_rows / size if is_part else 0.0


class NodeWork(NamedTuple):
    """Work of one node that has FLOPs, and the dims that it runs over, as atoms."""

    flops: float  # of the node
    operands: Set[Atom]  # atoms of its operands
    results: Set[Atom]  # atoms of its first result
    rule: BoundRule | None  # its rule; that of a product has the dims that it sums over in its operands

    @property
    def is_contraction(self) -> bool:
        """Return True for a product."""
        return self.rule is not None and self.rule.is_contraction


class RowWork:
    """FLOPs of the products of a graph by the dims that they run over, to compare dims along which to shard.

    An atom is a dim, or a factor of a flattened one. Its name is a class: dims of one class have the same rows.

    Args:
        gm: The graph.
        axes: Its axes.
    """

    def __init__(self, gm: GraphModule, axes: Axes) -> None:
        """Count the FLOPs of each node with its dims, as atoms: a dim, or a factor of a flattened one."""
        self.total = 0.0  # FLOPs of the graph
        self.by_rows: Counter[Atom] = Counter()  # for each atom, FLOPs of the products whose result has it
        self.products: list[NodeWork] = []
        for node in gm.graph.nodes:
            flops = contraction_flops(node) if node.op == "call_function" else 0.0
            self.total += flops
            if flops:
                operands = self._atoms_of(node.all_input_nodes, axes)
                results = self._atoms_of([node], axes)
                _, rule = lookup_rule(node) or (None, None)
                self.products.append(NodeWork(flops, operands, results, rule))
                self.by_rows.update(dict.fromkeys(results, flops))  # adds the FLOPs for each dim of the result

    @staticmethod
    def _atoms_of(values: Sequence[Node], axes: Axes) -> set[Atom]:
        """Return the atoms of all dims of the values (of the first result, if a node has several)."""
        return {a for x in values for dim in axes.dims.get((x, 0), ()) for a in axes.canonical(dim)}

    def multiplied_classes(self) -> set[int]:
        """Return the classes of the dims of operands of products, and of other ops with many FLOPs.

        A class counts as one of other ops, such as convolutions, if these ops with a dim of the class have at least
        `LARGE_SHARE` of the FLOPs of the graph. `find_sequences` places complete chunks of a sequence on each rank only
        if the dim of chunks is among the results.
        """
        multiplied: set[int] = set()
        other_flops: Counter[int] = Counter()  # by class
        for product in self.products:
            classes = {a.name for a in product.operands}
            if product.is_contraction:
                multiplied |= classes
            elif product.rule is not None:  # a convolution, for example
                other_flops.update(dict.fromkeys(classes, product.flops))
        return multiplied | {name for name, flops in other_flops.items() if flops >= LARGE_SHARE * self.total}

    def rank_flops(self, shares: Mapping[int, float]) -> float:
        """Return the FLOPs of a rank that has a share of the rows of some classes, and all of the other work.

        Args:
            shares: The share of each class, at most 1.
        """
        total = self.total
        for product in self.products:
            atoms = product.results | product.operands if product.is_contraction else product.results
            total -= (1 - min((shares.get(a.name, 1.0) for a in atoms), default=1.0)) * product.flops
        return total

    def flops_of_rows(self, names: Set[int]) -> float:
        """Return the FLOPs that ranks divide if a dim is sharded: those of products that have the dim.

        A matrix product divides dims of its result, and those that it sums over; attention and convolutions only dims
        of their results.

        Args:
            names: The classes of the dim, and of the two dims if the program splits it in chunks (chunks x chunk).
        """
        total = 0.0
        for product in self.products:
            atoms = product.results | product.operands if product.is_contraction else product.results
            if any(a.name in names for a in atoms):
                total += product.flops
        return total


def has_frame(node: Node) -> bool:
    """Return True for a call of an sp:: op whose frame argument is set, so that it runs on shards.

    Its result may be replicated or partial.
    """
    ruled_call = lookup_rule(node)
    return ruled_call is not None and ruled_call.call.get("frame") is not None


def contraction_flops(node: Node) -> float:
    """Return the FLOPs of a product, a convolution, an attention, a recurrence or a solve in the global view, else 0.

    Attention counts all pairs of queries and keys, as masks are not evaluated. `assume_large` replaces symbolic sizes
    by a large number.
    """
    is_attention = node.target in ATTENTION or node.target in ATTENTION_OF_TORCH or op_strategy(node.target)
    if node.op == "call_function" and is_attention:
        q, k, v = map(node_shape, node.args[:3])
        token_dim = ATTENTION_OF_TORCH.get(node.target, -2)
        return 2.0 * assume_large(size_product(q[:-1]) * k[token_dim] * (q[-1] + v[-1]))  # q @ k.T and weights @ v
    call, rule = lookup_rule(node) or (None, None)
    if call is None or not call.operands:
        return 0.0
    if call.node.target in LINEAR_ATTENTION_OPS:
        return _linear_attention_flops(call)
    if call.node.target is torch.ops.sp.affine_scan.default or call.node.target in SOLVE_OPS:
        return _matrix_flops(call)
    if call.get("weight") is not None and "stride" in call.args:  # a convolution
        return _convolution_flops(call)
    # Ops with fixed placements are the sp:: ops on shards; those with FLOPs are counted above.
    is_product = rule is not None and rule.is_contraction and rule.operand_placements is None
    return _summed_flops(call, rule) if rule is not None and is_product else 0.0


def _summed_flops(call: OpCall, rule: BoundRule) -> float:
    """Return the FLOPs of a product: for "n i, i m -> n m", twice the product of the sizes of n, i and m.

    It is 0 if an index is summed over, as in index_copy. A dim that only one operand has, and no result, is not
    counted: in a product with experts, each row reads the matrix of one expert.
    """
    summed = set(rule.vanishing)
    multiplied = [x for x, dims in zip(call.operands, rule.operands) if not summed.isdisjoint(flatten_dims(dims))]
    if len({has_gradient_dtype(x.meta["val"]) for x in multiplied}) > 1:
        return 0.0
    has_factor = [set(flatten_dims(dims)) for dims in (*rule.operands, *rule.results)]
    lone = {f for f in rule.vanishing if sum(f in factors for factors in has_factor) == 1}
    size_of_factor = {f: size for f, size in _sized_factors(call, rule) if f not in lone}
    return 2.0 * assume_large(size_product(size_of_factor.values()))


def _body_flops(gm: GraphModule, node: Node) -> float:
    """Return the FLOPs of the forward of a torch.autograd.Function, which is a graph of its own; 0 for other nodes."""
    body = node.args[0] if node.target is autograd_function_apply else None
    if not isinstance(body, Node) or body.op != "get_attr":
        return 0.0
    forward = gm.get_submodule(body.target)
    calls = [n for n in forward.graph.nodes if n.op == "call_function" and "val" in n.meta]
    return sum(contraction_flops(n) + _body_flops(forward, n) for n in calls)


def _convolution_flops(call: OpCall) -> float:
    """Return the FLOPs of a convolution: each element of the result sums over the kernel and the channels of its group.

    In a transposed convolution, each element of the operand is added to the same number of elements of the result.
    """
    # conv_transpose1d and the like have an output padding; aten.convolution has one, too, and a flag `transposed`.
    is_transposed = "output_padding" in call.args and call.get("transposed", True)
    shape = call.shape() if is_transposed else as_sizes(call.results()[0].shape)
    return 2.0 * assume_large(size_product(shape) * size_product(call.shape("weight")[1:]))


def convolved_dims(gm: GraphModule, axes: Axes) -> Evidence:
    """Yield (convolution, dim of its operand) for convolutions along one dim, each of whose windows has several rows.

    Those along several dims, as over images, are no evidence for one of these.

    Args:
        gm: Graph.
        axes: Its axes.
    """
    for node in gm.graph.nodes:
        call, rule = lookup_rule(node) or (None, None)
        if call is None or rule is None or "weight" not in call.args or len(rule.slides) != 1:
            continue
        ((factor, sliding),) = rule.slides.items()
        if call.ndim("weight") == 3 and sliding.width > 1 and factor in rule.operands[0]:
            yield node, axes.dims[call.operands[0], 0][rule.operands[0].index(factor)]


def _matrix_flops(call: OpCall) -> float:
    """Return the FLOPs of an op with batches of square matrices of size k, as a recurrence or a solve.

    A recurrence multiplies each row of its result by a matrix: 2 k FLOPs for each element. A triangular solve takes
    half of that. A solve with a full matrix, which factorizes it first, is counted as a product, too.
    """
    result = call.results()[0]
    matrix_size = call.shape(0)[-1]
    is_triangular = call.node.target is torch.ops.aten.linalg_solve_triangular.default
    return (1.0 if is_triangular else 2.0) * assume_large(size_product(as_sizes(result.shape)) * matrix_size)


def _linear_attention_flops(call: OpCall) -> float:
    """Return the FLOPs of linear attention with a state of (k, v) elements for each head.

    A token is multiplied with the other tokens of its chunk, and reads and updates the state: chunk * (k + v) + 2 k v
    multiply-adds. With a delta rule (`beta` or `a`), each chunk also solves a triangular system, and has a transition
    of its state, (k, k): `solve` more for each token.
    """
    (*tokens, k), v = call.shape("k"), call.shape("v")[-1]
    chunk = chunk_tokens(call.shape("decay")[-1])  # smaller with a decay for each of k than with one for each head
    has_delta_rule = call["beta"] is not None or call["a"] is not None
    solve = chunk * (2 * k + v) + k * k if has_delta_rule else 0
    return 2.0 * assume_large(size_product(tokens) * (chunk * (k + v) + 2 * k * v + solve))


def _sized_factors(call: OpCall, rule: BoundRule) -> Iterator[tuple[str, int]]:
    """Yield (factor, size) for every factor of the operands, also of those in groups such as "(b s)"."""
    for i, dims in enumerate(rule.operands):
        for name, size in zip(dims, call.shape(i)):
            if name[:1] == "(":
                yield from ((factor, rule.extents[factor]) for factor in dim_factors(name))
            elif name:  # "" is a dim of size 1 that broadcasts
                yield name, size


def _activation_bytes(node: Node, trained: set[Node]) -> float:
    """Return the bytes of the floating-point results of a node that needs a gradient, else 0.

    Views and other moves of data count 0, because their values are counted where they are computed.
    """
    ruled_call = lookup_rule(node)
    if node not in trained or ruled_call is None:
        return 0.0
    if ruled_call.rule is not None and ruled_call.rule.lazy:
        return 0.0
    results = filter(has_gradient_dtype, node_tensors(node))
    return float(sum(assume_large(size_product(as_sizes(x.shape))) * x.dtype.itemsize for x in results))


class SequenceCandidate(NamedTuple):
    """Dim that may be a sequence, with the ops because of which it may be one, for the report."""

    size: Size  # positions
    evidence: str  # the kind of the strongest evidence
    ops: int  # number of ops that are evidence
    is_input: bool  # True if an input has the dim
    is_chosen: bool  # False if another candidate has stronger evidence, or is in the same values
    # True if a value is sharded along the dim, as a sequence or as a side region; known after placement
    is_split: bool = True
    share: float = 1.0  # of the FLOPs of the graph, that shards of the dim divide
    why: str = ""  # the reason for which it is or is not chosen; "" for the only candidate
    inputs: tuple[str, ...] = ()  # the inputs that have the dim, such as "ids dim 1"

    def __str__(self) -> str:
        ops = "op" if self.ops == 1 else "ops"
        is_apart = self.is_split and not self.is_chosen
        prefix = "split apart from the sequences: " if is_apart else "" if self.is_chosen else "not chosen: "
        reason = f": {self.why}" if self.why and not is_apart else ""
        others = len(self.inputs) - MAX_LINES
        names = ", ".join([*self.inputs[:MAX_LINES], *([f"{others} others"] if others > 0 else [])])
        where = f" of {names}" if names else ", not an input dim"
        text = f"{self.size} positions{where}, with {self.evidence} in {self.ops} {ops}, {self.share:.0%} of the FLOPs"
        return f"{prefix}{text}{reason}"

    @property
    def is_attended(self) -> bool:
        """Return True for a dim that attention attends over."""
        return self.evidence in ATTENTION_EVIDENCE


def largest_share(size: Size, n: int) -> float:
    """Return the largest share of the rows of a dim that one of n ranks has: 5 rows on 4 ranks give 2 / 5."""
    rows = assume_large(size)
    return ceil_div(rows, n) / rows
