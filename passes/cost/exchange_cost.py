"""List the collectives of a local graph with the bytes that one rank sends, forward and backward.

Also declare the routes of a local graph's exchanges, because a cache may restore its program without a trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import GraphModule, Node, map_arg

from sp_compile.lowering.attention.op_args import HEADS
from sp_compile.lowering.base.errors import PARAMETERS_LINE, RESULTS_LINE, node_line
from sp_compile.lowering.base.frames import has_remote_edges, local_row_count
from sp_compile.lowering.base.layers import node_layer
from sp_compile.lowering.base.library import MOVE_OPS
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.comm import routes
from sp_compile.lowering.torch_compat import namespace_of
from sp_compile.passes.graph.call import OpCall, is_tensor, node_tensors
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.sizes import Size, as_size, as_sizes, is_same_size, size_product
from sp_compile.passes.sharding.attention_axes import op_strategy
from sp_compile.passes.sharding.window_rules import SHARD_WINDOWS, window_shift_sizes

from .collective_time import HeadBytes, collective_bytes
from .scan_cost import COSTED_SCAN_OPS, bytes_to_send, message_bytes, step_offsets

sp = torch.ops.sp
ENDS_IN_WINDOW = (sp.window.default, *COSTED_SCAN_OPS, *SHARD_WINDOWS)
GRADIENT_MOVES = sp.reduce_grad.default, sp.broadcast_grad.default


@dataclass(frozen=True)
class Exchange:
    """Collective of a local graph; bytes are those that one rank sends."""

    op: str  # name of the op
    node: str  # name of the node
    where: str  # user's line
    shape: str  # shapes of the operands
    forward: Size  # bytes
    backward: Size  # bytes
    layer: str = ""  # path of the layer
    shares: tuple[tuple[str, Size], ...] = ()  # bytes by layer, for a bucket of gradients
    of_attention: bool = False  # True for attention

    def repeat(self, times: Mapping[str, int]) -> list[Exchange]:
        """Return copies of the exchange, if each layer is repeated `times`; a bucket is scaled."""
        if len(self.shares) < 2:
            return [self] * times.get(self.layer, 1)
        return [replace(self, backward=sum((sent * times.get(layer, 1) for layer, sent in self.shares), 0))]


def exchange_collectives(exchange: Exchange) -> tuple[str, str]:
    """Return the collectives of forward and backward in the cost model, "" for none; other ops shift rows."""
    return MOVE_OPS.get(getattr(sp, exchange.op).default, ("shift", "shift"))


def find_exchanges(local: GraphModule, n: int) -> list[Exchange]:
    """Return every collective of a validated local graph, in order."""
    calls = [OpCall(c) for c in local.graph.nodes if c.op == "call_function" and namespace_of(c.target) == "sp"]
    exchanges = []
    for call in calls:
        if (found := _sent_bytes(call, n)) is not None:
            exchanges.append(_make_exchange(call, *found))
        if nbytes := _edge_bytes(call, n):
            exchanges.append(replace(_make_exchange(call, [call.operands[0]], nbytes, 0), op="window"))
    return exchanges


def _edge_bytes(call: OpCall, n: int) -> Size:
    """Return the bytes to restore padded rows of a result whose nearest valid row is on another rank."""
    op = call.node.target
    frame = call.get("result") or call.get("frame") if op in ENDS_IN_WINDOW else None
    if frame is None:
        return 0
    values = map_arg(frame, lambda node: node.meta["val"])
    if not any(has_remote_edges(values, n)):
        return 0
    edges = (not is_same_size(values[2], 0)) + (not is_same_size(values[2] + values[3], n * local_row_count(values, n)))
    rows = _operand_bytes([call.node]) if is_tensor(call.node) else sum(map(_value_bytes, node_tensors(call.node)), 0)
    return collective_bytes("all_gather", rows * edges // local_row_count(values, n), n)


def _sent_bytes(call: OpCall, n: int) -> tuple[list[Node], Size, Size] | None:
    """Return operands and forward and backward bytes of an exchange, or None for local ops."""
    op = call.node.target
    strategy = op_strategy(op)
    if strategy is not None and strategy.sends is not None:
        return call.operands[:3], *strategy.sends(call, n)
    if op in COSTED_SCAN_OPS and call["frame"] is not None:
        folds = call["frame"][4] if len(call["frame"]) == 5 else 1
        there, back = (bytes_to_send(call["exchange"], nbytes, n) for nbytes in message_bytes(call, folds))
        return call.operands[:1], there, back
    if shifts := window_shift_sizes(call, n):
        at = call.dim() if "dim" in call.args else call.ndim() - 1
        others = size_product(s for d, s in enumerate(call.shape()) if d != at)
        row = others * call.operands[0].meta["val"].element_size()
        nbytes = collective_bytes("shift", sum((as_size(rows) for _, rows in shifts), 0) * row, n)
        return call.operands[:1], nbytes, nbytes
    if op not in MOVE_OPS or op is sp.window.default:
        return None
    operands = [call.node] if op is sp.shard.default else call.operands
    there, back = (collective_bytes(kind, _operand_bytes(operands), n) if kind else 0 for kind in MOVE_OPS[op])
    return operands, there, back


def _make_exchange(call: OpCall, operands: list[Node], there: Size, back: Size) -> Exchange:
    node, values = call.node, [v.meta["val"] for v in operands]
    partial = "partial" in node.args  # sp::reduce_grad: the averaging of gradients sends them
    if partial or not all(v.is_floating_point() for v in values) or node_info(node).requires_grad is False:
        back = 0
    shapes = [" x ".join(map(str, as_sizes(v.shape))) for v in values]
    shown = ", ".join(shapes[:3]) + (f", ... ({len(shapes)} tensors)" if len(shapes) > 3 else "")
    name = node.target.__name__.split(".")[0]
    shares = _layer_shares(node, back, values) if node.target is sp.reduce_grad.default else ()
    layer = shares[0][0] if len(shares) == 1 else node_layer(node)
    attends = op_strategy(node.target) is not None
    return Exchange(name, node.name, _exchange_line(node), shown, there, back, layer, shares, attends)


def _layer_shares(node: Node, back: Size, values: Sequence[Tensor]) -> tuple[tuple[str, Size], ...]:
    """Return the bytes of a gradient bucket by layer: the layer that first reads the parameter."""
    nbytes: dict[str, Size] = dict.fromkeys(layers := [_first_layer(node, i) for i in range(len(values))], 0)
    for layer, value in zip(layers, values):
        nbytes[layer] += value.numel() * value.element_size()
    total = sum(nbytes.values(), 0) or 1
    return tuple((layer, back * part // total) for layer, part in nbytes.items())


def _first_layer(bucket: Node, index: int) -> str:
    readers = (user for item in bucket.users if item.args[1] == index for user in item.users)
    return next(map(node_layer, readers), "")


def _exchange_line(node: Node) -> str:
    """Return the user's line, or the model's parameters, inputs or results if there is none."""
    if node.meta.get("stack_trace") or node.target not in MOVE_OPS:
        return node_line(node)
    if node.target in GRADIENT_MOVES:
        return PARAMETERS_LINE
    return "the inputs" if node.target is sp.shard.default else RESULTS_LINE


def _operand_bytes(operands: Iterable[Node]) -> Size:
    return sum((_value_bytes(operand.meta["val"]) for operand in operands), 0)


def _value_bytes(value: Tensor) -> Size:
    return size_product(as_sizes(value.shape)) * value.element_size()


def head_bytes(call: OpCall) -> HeadBytes:
    """Return the bytes of the operands of a call of attention, and of its result."""
    q, k, v = call.operands[:3]
    sizes = _operand_bytes([q]), _operand_bytes([call.node]), _operand_bytes([k, v])
    return HeadBytes(*sizes, call.shape(1)[HEADS], k.meta["val"].element_size())


def relayout_bytes(call: OpCall, nbytes: Size, n: int) -> Size:
    """Return the bytes of moving `nbytes` to the zigzag layout and back, if the call does this."""
    return collective_bytes("fold", nbytes, n) if call["balance"] else 0


def declare_routes(local: GraphModule, ranks: Ranks) -> None:
    """Declare the routes of all ops that communicate with some of the ranks only."""
    for node in local.graph.nodes:
        if strategy := op_strategy(node.target):
            strategy.declare(OpCall(node), ranks)
        elif node.target in COSTED_SCAN_OPS:
            call = OpCall(node)
            stepped = call["frame"] is not None and call["exchange"] == "steps"
            routes.declare_shift_routes(ranks.group, step_offsets(ranks.n) if stepped else [])
        elif node.target in SHARD_WINDOWS:
            routes.declare_shift_routes(
                ranks.group, [further for further, _ in window_shift_sizes(OpCall(node), ranks.n)]
            )
