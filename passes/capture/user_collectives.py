"""Collectives in place, as torch.distributed records them outside of Dynamo, become functional ones.

c10d.alltoall_base_(out, x, group, [], [])   ->   out.copy_(wait_tensor(all_to_all_single(x, ...)))
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule, Node

from sp_compile.passes.graph.call import shape_of
from sp_compile.passes.graph.edit import Editor
from sp_compile.passes.graph.sizes import quotient

aten = torch.ops.aten


def functional_collectives(gm: GraphModule) -> None:
    """Edit the graph in place. Left alone: a buffer of another shape, shares that are not known."""
    if not dist.is_available():
        return
    editor = Editor().edit(gm.graph)
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.c10d.alltoall_base_.default):
        holder = node.args[2]
        group = dist.ProcessGroup.unbox(getattr(gm, holder.target))
        shares = _shares(editor, node, group.size())
        if shares is not None and not node.users:
            _exchange(editor, node, (*shares, group.group_name))
            if not holder.users:
                gm.graph.erase_node(holder)


def _shares(editor: Editor, node: Node, n: int) -> list[list[Any]] | None:
    """How many rows come from each rank, and go to it; None where that is not known."""
    out, x, _, *given = node.args[:5]
    shape = shape_of(x)
    each = quotient(shape[0], n)
    if shape_of(out) != shape or (each is None and not all(given)):
        return None
    with editor.graph.inserting_before(node):
        return [list(share) or editor.sizes.list([each] * n) for share in given]


def _exchange(editor: Editor, node: Node, how: tuple[Any, ...]) -> None:
    functional = torch.ops._c10d_functional
    out, x = node.args[:2]
    with editor.graph.inserting_before(node):
        sent = editor.compute(functional.all_to_all_single.default, (x, *how), node)
        received = editor.compute(functional.wait_tensor.default, (sent,), node)
        editor.emit(aten.copy_.default, (out, received), out.meta["val"], node)
    editor.graph.erase_node(node)
