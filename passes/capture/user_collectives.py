"""Convert in-place collectives, which torch.distributed records outside of Dynamo, to functional ones.

c10d.alltoall_base_(out, x, group, [], [])   ->   out.copy_(wait_tensor(all_to_all_single(x, ...)))
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule, Node

from sp_compile.passes.graph.call import node_shape
from sp_compile.passes.graph.edit import GraphEditor
from sp_compile.passes.graph.sizes import exact_quotient

aten = torch.ops.aten


def functionalize_collectives(gm: GraphModule) -> None:
    """Convert the collectives of a graph in place.

    Nodes with a buffer of another shape or unknown split sizes are not changed.
    """
    if not dist.is_available():
        return
    editor = GraphEditor().edit(gm.graph)
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.c10d.alltoall_base_.default):
        holder = node.args[2]
        group = dist.ProcessGroup.unbox(getattr(gm, holder.target))
        shares = _rows_per_rank(editor, node, group.size())
        if shares is not None and not node.users:
            _emit_exchange(editor, node, (*shares, group.group_name))
            if not holder.users:
                gm.graph.erase_node(holder)


def _rows_per_rank(editor: GraphEditor, node: Node, n: int) -> list[list[Any]] | None:
    """Return the rows received from and sent to each rank, or None if they are unknown."""
    out, x, _, *shares = node.args[:5]
    shape = node_shape(x)
    each = exact_quotient(shape[0], n)
    if node_shape(out) != shape or (each is None and not all(shares)):
        return None
    with editor.graph.inserting_before(node):
        return [list(share) or editor.sizes.list([each] * n) for share in shares]


def _emit_exchange(editor: GraphEditor, node: Node, how: tuple[Any, ...]) -> None:
    functional = torch.ops._c10d_functional
    out, x = node.args[:2]
    with editor.graph.inserting_before(node):
        sent = editor.compute(functional.all_to_all_single.default, (x, *how), node)
        received = editor.compute(functional.wait_tensor.default, (sent,), node)
        editor.emit(aten.copy_.default, (out, received), out.meta["val"], node)
    editor.graph.erase_node(node)
