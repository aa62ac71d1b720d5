"""Estimate the memory of a rank outside of attention from the plan, before any rewrite.

weights        parameters and buffers, replicated; with FSDP, a shard with the state of AdamW
gradients      as large as the parameters that require one, or a shard of these
saved          operands of products and attention, results of attention, and logarithms of softmax, once each; for
               a checkpointed region its inputs. A partitioner recomputes everything else from these.
tiled          the part of these that tiles do not save: logarithms of the losses of a product

Saved values are those that the forward stores for the backward. A checkpointed region is marked by "ac_graph_id".

This model runs before the graphs of a rank exist, since the choices that read it (of attention, checkpoints and tiles)
determine them. The more precise model, `cost/walk/`, walks the kernels of AOTAutograd's graphs, which exist only
afterwards, for offload, `explain(memory=True)` and `plan`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.layers import node_layer
from sp_compile.passes.context import PassContext
from sp_compile.passes.cost.attention_memory import RankMemory
from sp_compile.passes.cost.weight_memory import ModelBytes
from sp_compile.passes.graph.call import is_tensor
from sp_compile.passes.graph.node_info import is_weight, node_info
from sp_compile.passes.graph.sizes import current_bytes
from sp_compile.passes.sharding.attention_axes import ATTENTION
from sp_compile.passes.sharding.matchers import move_source
from sp_compile.passes.sharding.placement import PlacementPlan, Shard
from sp_compile.passes.sharding.rule import rule_of

aten = torch.ops.aten
# ops whose backward reads their result
OUTPUT_SAVING_OPS = frozenset({*ATTENTION, aten.log_softmax.int, aten.softmax.int, aten._log_softmax.default})
# ops that save log_softmax of their first operand, in float32 or wider, instead of the operand
LOSS_OPS = frozenset({aten.cross_entropy_loss.default})


def memory_needed(
    gm: GraphModule, plan: PlacementPlan, context: PassContext, trained: set[Node], device: float
) -> RankMemory:
    """Estimate the memory that one rank needs outside of attention, for a graph in the global view.

    `ChooseAttention` then chooses attention that fits into the rest of the device's memory.

    Args:
        gm: The graph.
        plan: The placements.
        context: The context.
        trained: The nodes that gradients reach.
        device: The memory of a device, in bytes.

    Returns:
        The bytes of weights, gradients, saved values and tiled values.
    """
    n, options = context.ranks.n, context.options
    inputs = [node for op in ("placeholder", "get_attr") for node in gm.graph.find_nodes(op=op) if is_tensor(node)]
    # A graph of a few layers may represent one of many (`context.repeats`), whose weights are known.
    state = _weight_bytes(inputs, plan, n) if context.repeats is None else context.repeats.weights
    weights, gradients = state.parameters, state.trainable
    if options.state == "sharded":  # FSDP
        weights, gradients = state.sharded_bytes(n)
    counts = Counter[Node]()  # of saved values; above 1 for a node that represents equal layers
    for value, count in _saved_values(trained, context):
        counts[value] = max(count, counts[value])
    losses = [node for node in trained if node.target in LOSS_OPS]
    loss_bytes = {node: _rank_bytes(node.args[0], plan, n, least=4) for node in losses}  # of their log_softmax
    tileable = [node for node in losses if options.tiles != "never" and _is_loss_of_product(node, trained)]
    tiled_bytes = sum(loss_bytes[node] for node in tileable)
    # Inputs are in memory in any case.
    saved_bytes = sum(_rank_bytes(value, plan, n) * counts[value] for value in counts.keys() - inputs)
    saved_bytes += sum(loss_bytes.values())
    uses_tiles = not isinstance(options.tiles, str)  # requested by number; else they are used if memory is short
    return RankMemory(
        device=device,
        state=state,
        weights=weights + state.buffers,
        gradients=gradients,
        saved=saved_bytes - tiled_bytes if uses_tiles else saved_bytes,
        tiled=0 if uses_tiles else tiled_bytes,
    )


def _weight_bytes(inputs: Iterable[Node], plan: PlacementPlan, n: int) -> ModelBytes:
    """Return the bytes of the parameters and buffers of a graph on one rank.

    Args:
        inputs: The inputs and attributes of the graph; an attribute is a constant of the program, counted as a buffer.
        plan: The placements.
        n: The number of ranks.
    """
    weights = {node: _rank_bytes(node, plan, n) for node in inputs if is_weight(node)}
    parameters = [node for node in weights if node_info(node).parameter and not node_info(node).is_buffer]
    layer_bytes: Counter[str] = Counter()  # by the path of the layer
    for node in parameters:
        layer_bytes[node_info(node).layer] += weights[node]
    outside_layers = layer_bytes.pop("", 0)
    largest_layer = max(layer_bytes.values(), default=0)
    total = sum(weights[node] for node in parameters)
    trainable = sum(weights[node] for node in parameters if node_info(node).requires_grad)
    buffers = sum(weights.values()) - total
    # FSDP gathers one layer at a time, its unit.
    return ModelBytes(total, trainable, buffers, unit=largest_layer, outside_layers=outside_layers)


def _is_loss_of_product(node: Node, trained: set[Node]) -> bool:
    """Return True if a loss reads the result of one product, directly or through ops with one operand.

    Both can then run in tiles. An example is cross_entropy(linear(h, w).float(), targets).

    Args:
        node: The loss.
        trained: The nodes that gradients reach.
    """
    while True:
        operands = [operand for operand in node.all_input_nodes if operand in trained]
        if len(operands) != 1 and node.target not in LOSS_OPS:
            return False
        node = operands[0]  # of a loss the logits, also if its class weights are trained
        rule = rule_of(node)
        if node.op != "call_function" or rule is None:
            return False
        if rule.is_contraction:
            return True


def _saved_values(trained: Iterable[Node], context: PassContext) -> Iterator[tuple[Node, int]]:
    """Yield (value, count) for the values that the forward saves for the backward; a value may be repeated.

    These are operands of products and attention, and results of attention and softmax. A checkpointed region saves the
    values that enter it. The count is the number of equal layers that the node represents, or 1 for a value that all
    layers share.

    Args:
        trained: The nodes that gradients reach.
        context: The context.
    """
    for node in trained:
        region = node.meta.get("ac_graph_id")  # the checkpointed region of the node
        if region is None and node.target in OUTPUT_SAVING_OPS:
            yield node, context.times(node)
        for operand in node.all_input_nodes:
            if operand not in trained:
                continue
            if region is None:
                value, is_saved = _storage_owner(operand), _has_saved_operands(node)
            else:
                value, is_saved = operand, operand.meta.get("ac_graph_id") != region  # it enters the region
            if is_saved:
                yield value, context.times(node) if node_layer(value) else 1


def _has_saved_operands(node: Node) -> bool:
    """Return True for attention and products, whose backward reads their operands."""
    rule = rule_of(node)
    is_product = rule is not None and rule.is_contraction and node.target not in LOSS_OPS
    return node.target in ATTENTION or is_product


def _storage_owner(node: Node) -> Node:
    """Return the value of which a node is a view or a copy without a cast, so that saved views are counted once.

    A value in a checkpointed region is not saved, so a view of it counts by itself.
    """
    source = move_source(node)
    while source is not None and is_tensor(source):
        x, y = source.meta["val"], node.meta["val"]
        if x.dtype != y.dtype or x.numel() != y.numel() or source.meta.get("ac_graph_id") is not None:
            return node
        node, source = source, move_source(source)
    return node


def _rank_bytes(node: Node, plan: PlacementPlan, n: int, least: int = 0) -> int:
    """Return the bytes of a value on one rank, 0 for a value that is no tensor.

    Args:
        node: The node of the value.
        plan: The placements.
        n: The number of ranks.
        least: The minimum number of bytes of an element: 4 for values that an op computes in float32.
    """
    if not is_tensor(node):
        return 0
    full_bytes = current_bytes(node.meta["val"], least)
    return -(-full_bytes // n) if isinstance(plan.of(node), Shard) else full_bytes  # a shard: rounded up
