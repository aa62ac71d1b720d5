"""Estimate the memory of a rank outside of attention from the plan, before any rewrite.

weights        parameters and buffers, replicated; with FSDP, a shard with the state of AdamW
gradients      as large as the parameters that require one, or a shard of these
saved          operands of products and attention, results of attention, and logarithms of softmax, once each; for
               a checkpointed region its inputs. A partitioner recomputes everything else from these.
tiled          the part of these that tiles do not save: logarithms of the losses of a product

Saved values are those that the forward stores for the backward. A checkpointed region is marked by "ac_graph_id".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.layers import node_layer
from sp_compile.passes.context import PassContext
from sp_compile.passes.cost.attention_memory import RankMemory
from sp_compile.passes.cost.weight_memory import ModelBytes
from sp_compile.passes.graph.call import is_tensor
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.sizes import current_bytes
from sp_compile.passes.sharding.attention_axes import ATTENTION
from sp_compile.passes.sharding.matchers import move_source
from sp_compile.passes.sharding.placement import PlacementPlan, Shard
from sp_compile.passes.sharding.rule import lookup_rule

aten = torch.ops.aten
# ops whose backward reads their result
OUTPUT_SAVING_OPS = frozenset({*ATTENTION, aten.log_softmax.int, aten.softmax.int, aten._log_softmax.default})
# ops that save log_softmax of their first operand, in float32 or wider, instead of the operand
LOSS_OPS = frozenset({aten.cross_entropy_loss.default})


def memory_needed(
    gm: GraphModule, plan: PlacementPlan, job: PassContext, trained: set[Node], device: float
) -> RankMemory:
    """Return the memory that one rank needs outside of attention, for a graph in the global view.

    `ChooseAttention` reserves the rest of the device's memory for attention.

    Args:
        gm: The graph.
        plan: The placements.
        job: The context.
        trained: The nodes that gradients reach.
        device: The memory of a device, in bytes.

    Returns:
        The bytes of weights, gradients, saved values and tiled values.
    """
    n, options = job.ranks.n, job.options
    inputs = [node for op in ("placeholder", "get_attr") for node in gm.graph.find_nodes(op=op) if is_tensor(node)]
    state = _state_bytes(inputs, plan, n) if job.repeats is None else job.repeats.weights
    weights, gradients = state.sharded_bytes(n) if options.state == "sharded" else (state.parameters, state.trainable)
    saved = Counter[Node]()
    for value, times in _saved_values(trained, job):
        saved[value] = max(times, saved[value])
    losses = [node for node in trained if node.target in LOSS_OPS]
    nbytes = {node: _rank_bytes(node.args[0], plan, n, 4) for node in losses}
    tiled = sum(nbytes[node] for node in losses if options.tiles != "never" and _is_loss_of_product(node, trained))
    known = sum(_rank_bytes(node, plan, n) * saved[node] for node in saved.keys() - inputs) + sum(nbytes.values())
    may = isinstance(options.tiles, str)  # or tiles are used in any case
    return RankMemory(
        device=device,
        state=state,
        weights=weights + state.buffers,
        gradients=gradients,
        saved=known if may else known - tiled,
        tiled=tiled if may else 0,
    )


def _state_bytes(inputs: Iterable[Node], plan: PlacementPlan, n: int) -> ModelBytes:
    """Return the bytes of the weights of a graph on one rank, in total and of the largest layer.

    Args:
        inputs: The inputs and attributes of the graph; numbers in their names identify layers.
        plan: The placements.
        n: The number of ranks.
    """
    weights = {
        node: _rank_bytes(node, plan, n) for node in inputs if node.op == "get_attr" or node_info(node).parameter
    }
    parameters = [node for node in weights if node_info(node).requires_grad or "_parameters_" in node.name]
    units: Counter[str] = Counter()
    for node in parameters:
        found = re.match(r".*?_modules_\d+(?=_)", node.name)
        units[found[0] if found else ""] += weights[node]
    total, rest = sum(weights[node] for node in parameters), units.pop("", 0)
    learned = sum(weights[node] for node in parameters if node_info(node).requires_grad)
    return ModelBytes(total, learned, sum(weights.values()) - total, max(units.values(), default=0), rest)


def _is_loss_of_product(node: Node, trained: set[Node]) -> bool:
    """Return True if a loss reads one product row by row, so that both can run in tiles."""
    while True:
        operands = [operand for operand in node.all_input_nodes if operand in trained]
        if len(operands) != 1 and node.target not in LOSS_OPS:
            return False
        node = operands[0]
        _, rule = lookup_rule(node) or (None, None)
        if node.op != "call_function" or rule is None:
            return False
        if rule.is_contraction:
            return True


def _saved_values(trained: Iterable[Node], job: PassContext) -> Iterator[tuple[Node, int]]:
    """Yield each saved value and its count: shared values of a layer once per reader, all others once."""
    for node in trained:
        region = node.meta.get("ac_graph_id")
        if region is None and node.target in OUTPUT_SAVING_OPS:
            yield node, job.times(node)
        for operand in node.all_input_nodes:
            enters = operand.meta.get("ac_graph_id") != region
            if operand in trained and (enters if region is not None else _backward_reads_operands(node)):
                value = _storage_owner(operand) if region is None else operand
                yield value, job.times(node) if node_layer(value) else 1


def _backward_reads_operands(node: Node) -> bool:
    """Return True if the backward reads the operands, so that they are saved: attention and products."""
    _, rule = lookup_rule(node) or (None, None)
    return node.target in ATTENTION or (rule is not None and rule.is_contraction and node.target not in LOSS_OPS)


def _storage_owner(node: Node) -> Node:
    """Return the value that owns the memory of a node, so that views of it are counted once."""
    while (source := move_source(node)) is not None and is_tensor(source):
        x, y = source.meta["val"], node.meta["val"]
        if x.dtype != y.dtype or x.numel() != y.numel() or source.meta.get("ac_graph_id") is not None:
            return node
        node = source
    return node


def _rank_bytes(node: Node, plan: PlacementPlan, n: int, least: int = 0) -> int:
    """Return the bytes of a value on one rank, with at least `least` bytes per element."""
    value = node.meta["val"]
    if not is_tensor(node):
        return 0
    full = current_bytes(value, least)
    return -(-full // n) if isinstance(plan.of(node), Shard) else full
