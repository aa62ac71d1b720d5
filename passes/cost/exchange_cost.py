"""List the collectives of a local graph with the bytes that one rank sends, forward and backward.

A local graph is the program of one rank: its collectives are `sp::` ops. Each becomes an `Exchange` of the report.
A frame describes the rows that are valid on the ranks; others are padding (`lowering/base/frames.py`). A bucket is one
`sp::reduce_grad` of the gradients of several parameters. A carry is what a scan adds to the rows of later ranks.

Also declare the routes of a local graph's exchanges, because a cache may restore its program without a trace. A route
is the communicator of an exchange between some of the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node, map_arg

from sp_compile.lowering.attention.op_args import HEADS
from sp_compile.lowering.base.errors import PARAMETERS_LINE, RESULTS_LINE, node_line
from sp_compile.lowering.base.frames import frame_folds, has_remote_edges, local_row_count
from sp_compile.lowering.base.layers import node_layer
from sp_compile.lowering.base.library import MOVE_OPS
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.comm import routes
from sp_compile.lowering.torch_compat import namespace_of
from sp_compile.passes.graph.call import OpCall, node_tensors
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.sizes import Size, as_size, as_sizes, is_same_size, size_product
from sp_compile.passes.sharding.attention_axes import op_strategy
from sp_compile.passes.sharding.window_rules import SHARD_WINDOWS, window_shift_sizes

from .collective_time import HeadBytes, collective_bytes
from .scan_cost import COSTED_SCAN_OPS, bytes_to_send, message_bytes, step_offsets

sp = torch.ops.sp
# ops that fill the padding of their result with the nearest valid row, which may be on another rank
ENDS_IN_WINDOW = (sp.window.default, *COSTED_SCAN_OPS, *SHARD_WINDOWS)
# ops whose backward exchanges the gradients of parameters
GRADIENT_MOVES = sp.reduce_grad.default, sp.broadcast_grad.default


@dataclass(frozen=True)
class Exchange:
    """Collective of a local graph; bytes are those that one rank sends."""

    op: str  # name of the op
    node: str  # name of the node
    where: str  # line of the user's code
    shape: str  # shapes of the operands
    forward: Size  # bytes
    backward: Size  # bytes
    layer: str = ""  # path of the layer
    shares: tuple[tuple[str, Size], ...] = ()  # bytes by layer, for a bucket of gradients
    of_attention: bool = False  # True for attention

    def repeat(self, times: Mapping[str, int]) -> list[Exchange]:
        """Return the exchanges of the full model, of which this graph contains only some layers.

        An exchange of one layer is repeated. A bucket, one reduction of the gradients of several layers, gets more
        bytes instead.

        Args:
            times: Number of layers that the layer of each path represents; 1 for paths without entry.
        """
        if len(self.shares) < 2:
            return [self] * times.get(self.layer, 1)
        backward = sum((nbytes * times.get(layer, 1) for layer, nbytes in self.shares), 0)
        return [replace(self, backward=backward)]


def exchange_collectives(exchange: Exchange) -> tuple[str, str]:
    """Return the collectives of forward and backward, as named by `collective_bytes`; "" for none.

    Ops that are not in `MOVE_OPS` shift rows between neighbors.
    """
    return MOVE_OPS.get(getattr(sp, exchange.op).default, ("shift", "shift"))


class _SentBytes(NamedTuple):
    """Bytes that one rank sends in an exchange."""

    operands: list[Node]  # exchanged values, or the first ones of these
    forward: Size  # bytes
    backward: Size  # bytes, if the operands have gradients


def find_exchanges(local: GraphModule, n: int) -> list[Exchange]:
    """Return every collective of a local graph (the program of one rank) in order, for its report."""
    calls = [OpCall(c) for c in local.graph.nodes if c.op == "call_function" and namespace_of(c.target) == "sp"]
    exchanges = []
    for call in calls:
        sent = _sent_bytes(call, n)
        if sent is not None:
            exchanges.append(_make_exchange_entry(call, sent))
        edge_bytes = _edge_bytes(call, n)  # rows for the padding of the result
        if edge_bytes:
            edge_exchange = _make_exchange_entry(call, _SentBytes([call.operands[0]], forward=edge_bytes, backward=0))
            exchanges.append(replace(edge_exchange, op="window"))
    return exchanges


def _edge_bytes(call: OpCall, n: int) -> Size:
    """Return the bytes sent to fill the padding of a result with the nearest valid row of another rank.

    That is one row for each end with padding, and 0 if no rank needs one. In the frame of the result, (outer, size,
    start, length, ...), the rows [start, start + length) are valid.
    """
    if call.node.target not in ENDS_IN_WINDOW:  # only these ops fill the padding of their result
        return 0
    frame = call.get("result") or call.get("frame")  # `result` is the frame of the result if it has another one
    if frame is None:
        return 0
    frame_values = map_arg(frame, lambda node: node.meta["val"])  # numbers in place of the nodes of sizes
    if not any(has_remote_edges(frame_values, n)):
        return 0
    rows = local_row_count(frame_values, n)
    start, length = frame_values[2:4]
    # The n * rows positions of all ranks start and end with padding, unless the first or the last one is valid.
    has_padding_before = not is_same_size(start, 0)
    has_padding_after = not is_same_size(start + length, n * rows)
    num_padded_ends = has_padding_before + has_padding_after
    result_bytes = _value_bytes([call.node])  # of `rows` rows
    return collective_bytes("all_gather", result_bytes * num_padded_ends // rows, n)


def _sent_bytes(call: OpCall, n: int) -> _SentBytes | None:
    """Return the bytes that one of n ranks sends in a call, or None if the op is not an exchange."""
    op = call.node.target
    strategy = op_strategy(op)
    if strategy is not None and strategy.sends is not None:
        forward, backward = strategy.sends(call, n)
        return _SentBytes(call.operands[:3], forward, backward)  # of q, k and v
    if op in COSTED_SCAN_OPS and call["frame"] is not None:  # without a frame a rank scans all rows
        messages = message_bytes(call, frame_folds(call["frame"]))  # of forward and backward
        forward, backward = (bytes_to_send(call["exchange"], nbytes, n) for nbytes in messages)
        return _SentBytes(call.operands[:1], forward, backward)
    shifts = window_shift_sizes(call, n)  # (rank offset, rows) of the rows that windows read from other ranks
    if shifts:  # an op without an argument `dim`, such as a convolution, has its rows in the last dim
        row_dim = call.dim() if "dim" in call.args else call.ndim() - 1
        row_elements = size_product(size for dim, size in enumerate(call.shape()) if dim != row_dim)
        row_bytes = row_elements * call.operands[0].meta["val"].element_size()
        nbytes = collective_bytes("shift", sum((as_size(rows) for _, rows in shifts), 0) * row_bytes, n)
        return _SentBytes(call.operands[:1], nbytes, nbytes)  # the backward sends the gradients of the same rows
    if op not in MOVE_OPS or op is sp.window.default:  # the rows of sp::window are those of `_edge_bytes`
        return None
    # The bytes of these two follow from the shard, which is their result (see `collective_bytes`).
    operands = [call.node] if op in (sp.shard.default, sp.reduce_scatter.default) else call.operands
    nbytes = _value_bytes(operands)
    collectives = MOVE_OPS[op]  # of forward and backward; "" for none
    forward, backward = (collective_bytes(kind, nbytes, n) if kind else 0 for kind in collectives)
    return _SentBytes(operands, forward, backward)


def _make_exchange_entry(call: OpCall, sent: _SentBytes) -> Exchange:
    """Return the entry of the report for a call; its backward has no bytes if no gradient is sent."""
    node, values = call.node, [operand.meta["val"] for operand in sent.operands]
    is_summed_later = "partial" in node.args  # of sp::reduce_grad: DDP or FSDP sums the gradients in its place
    has_gradient = node_info(node).requires_grad is not False and all(v.is_floating_point() for v in values)
    backward = sent.backward if has_gradient and not is_summed_later else 0
    shapes = [" x ".join(map(str, as_sizes(v.shape))) for v in values]
    shown = ", ".join(shapes[:3]) + (f", ... ({len(shapes)} tensors)" if len(shapes) > 3 else "")
    name = node.target.__name__.split(".")[0]
    # A reduction of gradients belongs to the layers of its parameters; another exchange to the layer of its node.
    shares = _layer_shares(node, backward, values) if node.target is sp.reduce_grad.default else ()
    layer = shares[0][0] if len(shares) == 1 else node_layer(node)
    attends = op_strategy(node.target) is not None  # an sp:: op that contains both attention and exchanges
    return Exchange(
        op=name,
        node=node.name,
        where=_exchange_line(node),
        shape=shown,
        forward=sent.forward,
        backward=backward,
        layer=layer,
        shares=shares,
        of_attention=attends,
    )


def _layer_shares(bucket: Node, sent: Size, values: Sequence[Tensor]) -> tuple[tuple[str, Size], ...]:
    """Return the `sent` bytes of a bucket (one reduction of several gradients) as (path of a layer, bytes).

    `Exchange.repeat` needs them. A gradient belongs to the layer that first reads its parameter; the parameters are the
    results of the node, whose values are `values`.
    """
    nbytes: dict[str, Size] = {}
    for index, value in enumerate(values):
        items = (item for item in bucket.users if item.args[1] == index)  # getitem(bucket, index)
        readers = (user for item in items for user in item.users)
        layer = next(map(node_layer, readers), "")
        nbytes[layer] = nbytes.get(layer, 0) + value.numel() * value.element_size()
    total = sum(nbytes.values(), 0) or 1
    return tuple((layer, sent * layer_bytes // total) for layer, layer_bytes in nbytes.items())


def _exchange_line(node: Node) -> str:
    """Return the user's line of an exchange.

    For those that the compiler adds without a line, return a text for parameters, inputs or results.
    """
    if node.meta.get("stack_trace") or node.target not in MOVE_OPS:
        return node_line(node)
    if node.target in GRADIENT_MOVES:
        return PARAMETERS_LINE
    return "the inputs" if node.target is sp.shard.default else RESULTS_LINE


def _value_bytes(nodes: Iterable[Node]) -> Size:
    """Return the bytes of all tensors in the values of nodes, a number or an expression of symbols."""
    tensors = (x for node in nodes for x in node_tensors(node))
    return sum((size_product(as_sizes(x.shape)) * x.element_size() for x in tensors), 0)


def head_bytes(call: OpCall) -> HeadBytes:
    """Return the bytes of the operands and the result of an attention op on one rank, for `Strategy.sends`."""
    q, k, v = call.operands[:3]
    return HeadBytes(
        queries=_value_bytes([q]),
        results=_value_bytes([call.node]),
        keys=_value_bytes([k, v]),
        key_heads=call.shape(1)[HEADS],
        element_size=k.meta["val"].element_size(),
    )


def relayout_bytes(call: OpCall, nbytes: Size, n: int) -> Size:
    """Return the bytes sent to move `nbytes` to zigzag order and back; 0 for a call that does not (`balance` False)."""
    return collective_bytes("fold", nbytes, n) if call["balance"] else 0


def declare_routes(local: GraphModule, ranks: Ranks) -> None:
    """Declare the routes of all ops that communicate with some of the ranks only, before the graph runs.

    A route is the communicator of an exchange between some of the ranks.
    """
    for node in local.graph.nodes:
        strategy = op_strategy(node.target)
        if strategy:
            strategy.declare(OpCall(node), ranks)
        elif node.target in COSTED_SCAN_OPS:
            # "steps" shifts carries by 1, 2, 4, ... ranks. Other exchanges are collectives of all ranks: no routes.
            call = OpCall(node)
            stepped = call["frame"] is not None and call["exchange"] == "steps"
            routes.declare_shift_routes(ranks.group, step_offsets(ranks.n) if stepped else [])
        elif node.target in SHARD_WINDOWS:
            shifts = window_shift_sizes(OpCall(node), ranks.n)
            routes.declare_shift_routes(ranks.group, [distance for distance, _ in shifts])
