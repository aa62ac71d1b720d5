"""Count the work of a graph, and the share of it that runs on shards.

Work is the FLOPs of products, convolutions and attention, 2 for each multiply-add, of the forward in the global view.
Activations are the results that need a gradient, in bytes; a view counts once, with the value that it views. A node
runs on shards if one of its results is sharded or partial; otherwise every rank computes all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from sp_compile.lowering.base.errors import node_line
from sp_compile.lowering.scan.linear_attention import LINEAR_ATTENTION_OPS, chunk_tokens
from sp_compile.passes.graph.call import OpCall, node_shape, node_tensors
from sp_compile.passes.graph.sizes import as_sizes, assume_large, size_product
from sp_compile.passes.sharding.attention_axes import ATTENTION, ATTENTION_OF_TORCH, op_strategy
from sp_compile.passes.sharding.factors import BoundRule, dim_factors
from sp_compile.passes.sharding.placement import PlacementPlan, Replicate
from sp_compile.passes.sharding.rule import lookup_rule, transfer_of

LARGE_SHARE = 0.05  # of the FLOPs of a graph, from which on the report names a line that every rank computes


@dataclass
class ShardedWork:
    """FLOPs and bytes of activations of a graph, in total and on shards."""

    flops: float = 0.0  # of the forward
    sharded_flops: float = 0.0  # of the nodes that run on shards
    activations: float = 0.0  # bytes
    sharded_activations: float = 0.0  # bytes of the values that are sharded
    replicated: dict[str, float] = field(default_factory=dict)  # FLOPs that every rank computes, by the user's line

    def merge(self, other: ShardedWork) -> None:
        """Add the work of another graph.

        Args:
            other: The work, which is not changed.
        """
        self.flops += other.flops
        self.sharded_flops += other.sharded_flops
        self.activations += other.activations
        self.sharded_activations += other.sharded_activations
        for line, flops in other.replicated.items():
            self.replicated[line] = self.replicated.get(line, 0.0) + flops

    def describe(self) -> str:
        """Return text with both shares, as in "98% of the FLOPs and 95% of the activations are on shards"."""
        return f"{self.flops_share:.0%} of the FLOPs and {self.activations_share:.0%} of the activations are on shards"

    def large_replicated_lines(self) -> list[tuple[str, float]]:
        """Return the lines with at least `LARGE_SHARE` of all FLOPs that every rank computes, with their shares."""
        by_flops = sorted(self.replicated.items(), key=lambda item: -item[1])
        return [(line, flops / self.flops) for line, flops in by_flops if flops >= LARGE_SHARE * self.flops]

    @property
    def flops_share(self) -> float:
        """Return the share of the FLOPs that runs on shards, from 0 to 1; 1 without FLOPs."""
        return self.sharded_flops / self.flops if self.flops else 1.0

    @property
    def activations_share(self) -> float:
        """Return the share of the bytes of activations on shards, from 0 to 1; 1 without activations."""
        return self.sharded_activations / self.activations if self.activations else 1.0


def count_work(gm: GraphModule, plan: PlacementPlan, trained: set[Node], times: Callable[[Node], int]) -> ShardedWork:
    """Return the work of a graph.

    Args:
        gm: Graph in the global view, after all demands are met.
        plan: Placements of its values.
        trained: Nodes with results that need a gradient.
        times: Returns the number of nodes that a node represents.
    """
    work = ShardedWork()
    for node in gm.graph.nodes:
        if node.op != "call_function" or transfer_of(node.target) is not None:
            continue
        flops, nbytes = times(node) * contraction_flops(node), times(node) * _activation_bytes(node, trained)
        is_sharded = has_frame(node) or any(not isinstance(p, Replicate) for p in plan.placements.get(node, ()))
        work.flops += flops
        work.activations += nbytes
        if is_sharded:
            work.sharded_flops += flops
            work.sharded_activations += nbytes
        elif flops:
            line = node_line(node)
            work.replicated[line] = work.replicated.get(line, 0.0) + flops
    return work


def has_frame(node: Node) -> bool:
    """Return True if a call processes shards of its operands; its result may be replicated."""
    ruled_call = lookup_rule(node)
    return ruled_call is not None and ruled_call.call.get("frame") is not None


def contraction_flops(node: Node) -> float:
    """Return the FLOPs of a product, a convolution or an attention in the global view, else 0.

    Attention counts all pairs of queries and keys, as masks are not evaluated.
    """
    if node.op == "call_function" and (
        node.target in ATTENTION or node.target in ATTENTION_OF_TORCH or op_strategy(node.target)
    ):
        q, k, v = map(node_shape, node.args[:3])
        tokens = ATTENTION_OF_TORCH.get(node.target, -2)
        return 2.0 * assume_large(size_product(q[:-1]) * k[tokens] * (q[-1] + v[-1]))
    call, rule = lookup_rule(node) or (None, None)
    if call is None or not call.operands:
        return 0.0
    if call.node.target in LINEAR_ATTENTION_OPS:
        return _linear_attention_flops(call)
    if call.get("weight") is not None and "stride" in call.args:
        return _convolution_flops(call)
    if rule is None or not rule.is_contraction or rule.operand_placements is not None:
        return 0.0
    return 2.0 * assume_large(size_product(dict(_sized_factors(call, rule)).values()))


def _convolution_flops(call: OpCall) -> float:
    """Return the FLOPs of a convolution: each result sums over the kernel and the channels of its group."""
    is_transposed = "output_padding" in call.args and call.get("transposed", True)
    positions = call.shape() if is_transposed else as_sizes(call.results()[0].shape)
    return 2.0 * assume_large(size_product(positions) * size_product(call.shape("weight")[1:]))


def _linear_attention_flops(call: OpCall) -> float:
    """Return the FLOPs of linear attention: products within chunks, and of each token with the state."""
    (*tokens, size), columns = call.shape("k"), call.shape("v")[-1]
    chunk = chunk_tokens(call.shape("decay")[-1])
    solves = 0 if call["beta"] is None and call["a"] is None else chunk * (2 * size + columns) + size * size
    return 2.0 * assume_large(size_product(tokens) * (chunk * (size + columns) + 2 * size * columns + solves))


def _sized_factors(call: OpCall, rule: BoundRule) -> Iterator[tuple[str, int]]:
    """Yield every factor of the operands with its size."""
    for i, dims in enumerate(rule.operands):
        for name, size in zip(dims, call.shape(i)):
            if name[:1] == "(":
                yield from ((factor, rule.extents[factor]) for factor in dim_factors(name))
            elif name:
                yield name, size


def _activation_bytes(node: Node, trained: set[Node]) -> float:
    """Return the bytes of the results that need a gradient, except for views and other moves of data."""
    ruled_call = lookup_rule(node)
    if node not in trained or ruled_call is None or (ruled_call.rule is not None and ruled_call.rule.lazy):
        return 0.0
    results = (x for x in node_tensors(node) if x.is_floating_point() or x.is_complex())
    return float(sum(assume_large(size_product(as_sizes(x.shape))) * x.dtype.itemsize for x in results))
