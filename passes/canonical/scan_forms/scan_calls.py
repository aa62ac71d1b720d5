"""Replace torch's scans by sp::scan and sp::extremes without a frame, which return the same values.

    cumsum(x, 1)      ->  sp.scan(x, None, 1, "sum")
    cummax(x, 1)      ->  sp.extremes(x, 1, "max"), or sp.scan(x, None, 1, "max") if its indices have no reader

A *frame* is the position of a shard in the sequence; a call without one is of the global view. cummax and cummin also
return the *indices* of the extremes. Used by canonical passes, and by the strategies of scans before they add a frame.
"""

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
RECURRENCES = {  # with their names in the report
    sp.linear_scan.default: "linear recurrence",
    sp.affine_scan.default: "recurrence of matrices",
    sp.linear_attention.default: "linear attention",
    sp.linear_attention_state.default: "state of linear attention",
}
SP_SCANS = (sp.scan.default, sp.extremes.default, *RECURRENCES)


def to_sp_scan(editor: GraphEditor, node: Node) -> Node:
    """Replace a torch scan by the sp op that returns the same, and return the new node.

    A strategy of scans calls it before it adds a frame, the position of a shard in the sequence, to the op.

    Args:
        editor: The editor of the graph.
        node: The scan.

    Returns:
        The sp op, or `node` if it is one.
    """
    if node.target in SP_SCANS:
        return node
    call, value, op = OpCall(node), node.meta["val"], TORCH_SCANS[node.target]
    x, dim = call.operands[0], call.dim()
    has_indices = node.target in EXTREME_OPS  # cummax and cummin return (values, indices)
    needs_indices = has_indices and has_index_reader(node)
    with editor.graph.inserting_before(node):
        if needs_indices:
            scan = editor.emit(sp.extremes.default, (x, dim, op), value, node)
        else:
            scan = emit_scan(editor, x, dim, op, value[0] if has_indices else value, node)
    # In place of a pair, `scan` replaces both results, of which only the values are read.
    editor.replace(node, (scan, scan) if has_indices and not needs_indices else scan)
    return scan


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
    """Emit sp.scan of `x` without a frame: in the global view, on the full dim.

    Args:
        editor: The editor of the graph.
        x: Any shape, the operand.
        dim: The dim of the scan.
        op: The operation, such as "sum".
        value: The fake tensor of the result, which may have another dtype than the default for `x`.
        like: The node whose metadata the scan copies.
        exclusive: Row i of the result leaves out row i of the operand.
        reverse: Scan from the last row to the first.

    Returns:
        The new node.
    """
    dtype = None if result_dtype(op, x.meta["val"].dtype) == value.dtype else value.dtype
    flags: tuple[Any, ...] = (exclusive, reverse, dtype)
    while flags and not flags[-1]:  # trailing defaults are omitted
        flags = flags[:-1]
    return editor.emit(sp.scan.default, (x, None, dim, op, *flags), value, like)


def is_flip_along(node: Node, dim: int) -> bool:
    """Return True if the op flips this dim and no other."""
    return flipped_dims(node) == [dim]


def flipped_dims(node: Node) -> list[int]:
    """Return the dims that a flip reverses, [] for any other op and for a tensor without dims."""
    ndim = node.meta["val"].ndim
    return [int(d) % ndim for d in node.args[1]] if node.target is aten.flip.default and ndim else []


def is_scannable_call(call: OpCall) -> bool:
    """Return True if sp ops support the dtypes of the operand and the result; other scans run on gathered operands."""
    return all(is_scannable(x.dtype) for x in (call.operands[0].meta["val"], call.results()[0]))


def has_index_reader(node: Node) -> bool:
    """Return True if a cummax or cummin has a reader of its indices (its second result), which sp.scan lacks.

    Another user than a getitem may read both results.
    """
    getitems = [user for user in node.users if user.target is operator.getitem]
    return len(getitems) < len(node.users) or any(user.args[1] != 0 and user.users for user in getitems)
