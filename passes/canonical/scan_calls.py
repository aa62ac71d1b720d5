"""Replace torch's scans by sp::scan and sp::extremes without a frame, which return the same values."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from sp_compile.lowering.scan.monoids import is_scannable, result_dtype
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.edit import GraphEditor

aten, sp = torch.ops.aten, torch.ops.sp
CUMULATIVE_OPS = {aten.cumsum.default: "sum", aten.cumprod.default: "prod", aten.logcumsumexp.default: "logsumexp"}
EXTREME_OPS = {aten.cummax.default: "max", aten.cummin.default: "min"}
TORCH_SCANS = {**CUMULATIVE_OPS, **EXTREME_OPS}
SP_SCANS = (sp.scan.default, sp.extremes.default, sp.linear_scan.default)


def to_sp_scan(editor: GraphEditor, node: Node) -> Node:
    """Replace a scan by an op of the package; ops of the package are unchanged.

    A running maximum without readers of its indices becomes an sp::scan.

    Args:
        editor: The editor of the graph.
        node: The scan.

    Returns:
        The new node.
    """
    if node.target in SP_SCANS:
        return node
    call, value = OpCall(node), node.meta["val"]
    x, op = call.operands[0], TORCH_SCANS[node.target]
    with editor.graph.inserting_before(node):
        if node.target in CUMULATIVE_OPS:
            fresh = emit_scan(editor, x, call.dim(), op, value, node)
        elif has_index_reader(node):
            fresh = editor.emit(sp.extremes.default, (x, call.dim(), op), value, node)
        else:
            fresh = emit_scan(editor, x, call.dim(), op, value[0], node)
            editor.replace(node, (fresh, fresh))
            return fresh
    editor.replace(node, fresh)
    return fresh


def emit_scan(
    editor: GraphEditor,
    x: Node,
    dim: int,
    op: str,
    value: torch.Tensor,
    like: Node,
    exclusive: bool = False,
    reverse: bool = False,
) -> Node:
    """Emit sp.scan of `x`, with an explicit dtype if it differs from the default for `x`.

    Args:
        editor: The editor of the graph.
        x: Any shape, the operand.
        dim: The dim of the scan.
        op: The operation, such as "sum".
        value: The fake tensor of the result.
        like: The node whose metadata the scan copies.
        exclusive: Exclude the element itself.
        reverse: Scan from the last row to the first.

    Returns:
        The new node.
    """
    dtype = None if result_dtype(op, x.meta["val"].dtype) == value.dtype else value.dtype
    flags: tuple[Any, ...] = (exclusive, reverse, dtype)
    while flags and not flags[-1]:
        flags = flags[:-1]
    return editor.emit(sp.scan.default, (x, None, dim, op, *flags), value, like)


def flips_along(node: Node, dim: int) -> bool:
    """Return True if the op flips this dim and no other."""
    return flipped_dims(node) == [dim]


def flipped_dims(node: Node) -> list[int]:
    """Return the flipped dims, [] for any other op."""
    return [int(d) % node.meta["val"].ndim for d in node.args[1]] if node.target is aten.flip.default else []


def is_scannable_call(call: OpCall) -> bool:
    """Return True if the package has scans of the operand in the dtype of the result."""
    return all(is_scannable(x.dtype) for x in (call.operands[0].meta["val"], call.results()[0]))


def has_index_reader(node: Node) -> bool:
    """Return True if the indices of torch's running maximum or minimum have a reader."""
    pieces = [u for u in node.users if u.target is operator.getitem]
    return len(pieces) < len(node.users) or any(u.args[1] != 0 and u.users for u in pieces)
