"""Which collectives a local graph issues, and the bytes that one rank sends in each, forward and backward.

Makes the routes of a local graph's exchanges known: a cache may bring its program back without tracing it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import GraphModule, Node, map_arg

from sp_compile.lowering.attention.op_args import HEADS
from sp_compile.lowering.base.errors import PARAMETERS_LINE, RESULTS_LINE, at
from sp_compile.lowering.base.frames import edges_elsewhere, rows_held
from sp_compile.lowering.base.layers import layer_of
from sp_compile.lowering.base.library import MOVES
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.comm import routes
from sp_compile.lowering.torch_compat import namespace_of
from sp_compile.passes.graph.call import Call, is_tensor, tensors_of
from sp_compile.passes.graph.node_info import record
from sp_compile.passes.graph.sizes import Size, product, same, size, sizes
from sp_compile.passes.sharding.attention_axes import strategy_of
from sp_compile.passes.sharding.window_rules import SHARD_WINDOWS, shifts_of

from .collective_time import bytes_of
from .scan_cost import SCAN_OPS, bytes_to_send, message_bytes, offsets_of_steps

sp = torch.ops.sp
ENDS_IN_WINDOW = (sp.window.default, *SCAN_OPS, *SHARD_WINDOWS)
GRADIENT_MOVES = sp.reduce_grad.default, sp.broadcast_grad.default


@dataclass(frozen=True)
class Exchange:
    """One collective of the local graph. Bytes are those that one rank sends, each way. layer: by its path.

    shares: what a bucket of gradients sends for each layer whose they are. of_attention: whether it is an attention.
    """

    op: str
    node: str
    where: str
    shape: str
    forward: Size
    backward: Size
    layer: str = ""
    shares: tuple[tuple[str, Size], ...] = ()
    of_attention: bool = False

    def of_all(self, times: Mapping[str, int]) -> list[Exchange]:
        """The exchanges that this one stands for where each layer is so many. Of a bucket of several, their bytes."""
        if len(self.shares) < 2:
            return [self] * times.get(self.layer, 1)
        return [replace(self, backward=sum((sent * times.get(layer, 1) for layer, sent in self.shares), 0))]


def collectives_of(exchange: Exchange) -> tuple[str, str]:
    """Forward and backward, as the cost model calls them; "" for none. What is no such op shifts rows."""
    return MOVES.get(getattr(sp, exchange.op).default, ("shift", "shift"))


def exchanges_of(local: GraphModule, n: int) -> list[Exchange]:
    """Every collective of a validated local graph, in order."""
    calls = [Call(c) for c in local.graph.nodes if c.op == "call_function" and namespace_of(c.target) == "sp"]
    exchanges = []
    for call in calls:
        if (found := _sent(call, n)) is not None:
            exchanges.append(_exchange(call, *found))
        if nbytes := _bytes_of_edges(call, n):
            exchanges.append(replace(_exchange(call, [call.operands[0]], nbytes, 0), op="window"))
    return exchanges


def _bytes_of_edges(call: Call, n: int) -> Size:
    """What a rank sends to restore padded rows of a result whose nearest valid row is on another rank."""
    op = call.node.target
    frame = call.get("result") or call.get("frame") if op in ENDS_IN_WINDOW else None
    if frame is None:
        return 0
    values = map_arg(frame, lambda node: node.meta["val"])
    if not any(edges_elsewhere(values, n)):
        return 0
    edges = (not same(values[2], 0)) + (not same(values[2] + values[3], n * rows_held(values, n)))
    rows = _bytes([call.node]) if is_tensor(call.node) else sum(map(_bytes_of, tensors_of(call.node)), 0)
    return bytes_of("all_gather", rows * edges // rows_held(values, n), n)


def _sent(call: Call, n: int) -> tuple[list[Node], Size, Size] | None:
    """What an op exchanges, and its bytes forward and backward; None of one that does not talk to other ranks."""
    op = call.node.target
    strategy = strategy_of(op)
    if strategy is not None and strategy.sends is not None:
        return call.operands[:3], *strategy.sends(call, n)
    if op in SCAN_OPS and call["frame"] is not None:
        folds = call["frame"][4] if len(call["frame"]) == 5 else 1
        there, back = (bytes_to_send(call["exchange"], nbytes, n) for nbytes in message_bytes(call, folds))
        return call.operands[:1], there, back
    if shifts := shifts_of(call, n):
        at = call.dim() if "dim" in call.args else call.ndim() - 1
        others = product(s for d, s in enumerate(call.shape()) if d != at)
        row = others * call.operands[0].meta["val"].element_size()
        nbytes = bytes_of("shift", sum((size(rows) for _, rows in shifts), 0) * row, n)
        return call.operands[:1], nbytes, nbytes
    if op not in MOVES or op is sp.window.default:
        return None
    operands = [call.node] if op is sp.shard.default else call.operands
    there, back = (bytes_of(kind, _bytes(operands), n) if kind else 0 for kind in MOVES[op])
    return operands, there, back


def _exchange(call: Call, operands: list[Node], there: Size, back: Size) -> Exchange:
    node, values = call.node, [v.meta["val"] for v in operands]
    partial = "partial" in node.args  # of sp::reduce_grad: whoever averages the gradients sends them
    if partial or not all(v.is_floating_point() for v in values) or record(node).requires_grad is False:
        back = 0
    shapes = [" x ".join(map(str, sizes(v.shape))) for v in values]
    shown = ", ".join(shapes[:3]) + (f", ... ({len(shapes)} tensors)" if len(shapes) > 3 else "")
    name = node.target.__name__.split(".")[0]
    shares = _shares(node, back, values) if node.target is sp.reduce_grad.default else ()
    layer = shares[0][0] if len(shares) == 1 else layer_of(node)
    attends = strategy_of(node.target) is not None
    return Exchange(name, node.name, _where(node), shown, there, back, layer, shares, attends)


def _shares(node: Node, back: Size, values: Sequence[Tensor]) -> tuple[tuple[str, Size], ...]:
    """Of a bucket's bytes, those of each layer: a gradient is of the layer that first reads its parameter."""
    nbytes: dict[str, Size] = dict.fromkeys(layers := [_first_layer(node, i) for i in range(len(values))], 0)
    for layer, value in zip(layers, values):
        nbytes[layer] += value.numel() * value.element_size()
    whole = sum(nbytes.values(), 0) or 1
    return tuple((layer, back * part // whole) for layer, part in nbytes.items())


def _first_layer(bucket: Node, index: int) -> str:
    readers = (user for item in bucket.users if item.args[1] == index for user in item.users)
    return next(map(layer_of, readers), "")


def _where(node: Node) -> str:
    """The user's line; what belongs to no line belongs to the model's parameters, inputs or results."""
    if node.meta.get("stack_trace") or node.target not in MOVES:
        return at(node)
    if node.target in GRADIENT_MOVES:
        return PARAMETERS_LINE
    return "the inputs" if node.target is sp.shard.default else RESULTS_LINE


def _bytes(operands: Iterable[Node]) -> Size:
    return sum((_bytes_of(operand.meta["val"]) for operand in operands), 0)


def _bytes_of(value: Tensor) -> Size:
    return product(sizes(value.shape)) * value.element_size()


class Heads:
    """The bytes of an attention's operands: queries with the result, keys with values, and these in float32."""

    def __init__(self, call: Call) -> None:
        self.call = call
        q, k, v = call.operands[:3]
        self.queries, self.keys = _bytes([q, call.node]), _bytes([k, v])
        element = k.meta["val"].element_size()
        self.widening = max(4, element) // element

    def repeated(self, ranks: int) -> Size:
        """Of keys and values, repeated so that so many ranks divide their heads."""
        heads = self.call.shape(1)[HEADS]
        return self.keys * (math.lcm(heads, ranks) // heads) if isinstance(heads, int) else self.keys

    def moved(self, n: int, keys: bool) -> Size:
        """Of the exchanges to the zigzag layout and back, if it is made inside."""
        return bytes_of("fold", self.queries + (self.keys if keys else 0), n) if self.call["balance"] else 0


def declare_routes(local: GraphModule, ranks: Ranks) -> None:
    """Declare, for every op of the graph that talks to some of the ranks only, whom it talks to."""
    for node in local.graph.nodes:
        if strategy := strategy_of(node.target):
            strategy.declare(Call(node), ranks)
        elif node.target in SCAN_OPS:
            call = Call(node)
            stepped = call["frame"] is not None and call["exchange"] == "steps"
            routes.declare_shifts(ranks.group, offsets_of_steps(ranks.n) if stepped else [])
        elif node.target in SHARD_WINDOWS:
            routes.declare_shifts(ranks.group, [further for further, _ in shifts_of(Call(node), ranks.n)])
