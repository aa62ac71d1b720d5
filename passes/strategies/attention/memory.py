"""What a rank holds beside an attention, read off the plan: before any rewrite, every value and where it lies.

weights        parameters and buffers, whole on every rank
gradients      as large as the parameters that want one
kept           operands of products and attention, results of attention, and logarithms of weights, once each; of
               a checkpointed region what goes into it. All else a partitioner computes again from these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.fx import GraphModule, Node

from sp_compile.cost.memory import Memory
from sp_compile.graph.call import is_tensor
from sp_compile.graph.record import record
from sp_compile.graph.sizes import bytes_now
from sp_compile.sharding.attention import ATTENTION
from sp_compile.sharding.matchers import source_of
from sp_compile.sharding.placement import Plan, Shard
from sp_compile.sharding.rule import lookup

aten = torch.ops.aten
OF_RESULTS = frozenset({*ATTENTION, aten.log_softmax.int, aten.softmax.int, aten._log_softmax.default})
"""Ops whose backward reads what they gave."""
LOSSES = frozenset({aten.cross_entropy_loss.default})
"""Ops that keep log_softmax of their first operand, in float32 or wider."""


def memory_needed(gm: GraphModule, plan: Plan, n: int, trained: set[Node], device: float) -> Memory:
    """Of one of n ranks, for a graph in the global view. trained: the nodes that gradients reach."""
    inputs = [node for op in ("placeholder", "get_attr") for node in gm.graph.find_nodes(op=op) if is_tensor(node)]
    weights = [node for node in inputs if node.op == "get_attr" or record(node).parameter]
    learned = [node for node in weights if record(node).requires_grad]
    kept = set(_kept(trained)) - set(inputs)
    losses = sum(_share(node.args[0], plan, n, 4) for node in trained if node.target in LOSSES)
    return Memory(
        device=device,
        weights=_bytes(weights, plan, n),
        gradients=_bytes(learned, plan, n),
        kept=_bytes(kept, plan, n) + losses,
    )


def _kept(trained: Iterable[Node]) -> Iterator[Node]:
    for node in trained:
        region = node.meta.get("ac_graph_id")
        if region is None and node.target in OF_RESULTS:
            yield node
        for operand in node.all_input_nodes:
            enters = operand.meta.get("ac_graph_id") != region
            if operand in trained and (enters if region is not None else _reads_operands(node)):
                yield _moved(operand) if region is None else operand


def _reads_operands(node: Node) -> bool:
    """Does its backward read its operands? That of an attention does, and that of a product."""
    _, rule = lookup(node) or (None, None)
    return node.target in ATTENTION or (rule is not None and rule.contracts)


def _moved(node: Node) -> Node:
    """The value in whose memory it lies."""
    while (source := source_of(node)) is not None and is_tensor(source):
        x, y = source.meta["val"], node.meta["val"]
        if x.dtype != y.dtype or x.numel() != y.numel() or source.meta.get("ac_graph_id") is not None:
            return node
        node = source
    return node


def _bytes(nodes: Iterable[Node], plan: Plan, n: int) -> int:
    return sum(_share(node, plan, n) for node in nodes)


def _share(node: Node, plan: Plan, n: int, least: int = 0) -> int:
    """The bytes of a value on one rank, elements of `least` bytes or more."""
    value = node.meta["val"]
    if not is_tensor(node):
        return 0
    whole = bytes_now(value, least)
    return -(-whole // n) if isinstance(plan.of(node), Shard) else whole
