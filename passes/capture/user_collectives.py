"""Convert in-place collectives, which torch.distributed records outside of Dynamo, to functional ones.

c10d.alltoall_base_(out, x, group, [], [])   ->   out.copy_(wait_tensor(all_to_all_single(x, ...)))

The two lists are the split sizes: the numbers of rows received from and sent to each rank; empty ones mean equal
numbers. `capture_export` converts the collectives before it functionalizes the copies.
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
    """Convert the in-place all-to-alls of an exported graph in place.

    Those with an output tensor of another shape than the input, or with unknown split sizes, are not changed;
    `require_functional` reports them later.
    """
    if not dist.is_available():
        return
    editor = GraphEditor().edit(gm.graph)
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.c10d.alltoall_base_.default):
        group_node = node.args[2]  # get_attr of a process group
        group = dist.ProcessGroup.unbox(getattr(gm, group_node.target))
        split_sizes = _split_sizes(editor, node, group.size())
        if split_sizes is not None and not node.users:  # a user reads the Work handle, which has no functional form
            _replace_exchange(editor, node, split_sizes, group.group_name)
            if not group_node.users:
                gm.graph.erase_node(group_node)


def _split_sizes(editor: GraphEditor, node: Node, n: int) -> list[list[Any]] | None:
    """Return the split sizes of an all-to-all among n ranks: [rows received from each, rows sent to each rank].

    Empty lists mean equal numbers, which are returned explicitly; nodes before the all-to-all compute symbolic ones.
    Returns None for calls that are not converted: those without sizes whose rows n does not divide, and those whose
    output has another shape than the input.
    """
    out, x, _, *split_sizes = node.args[:5]
    shape = node_shape(x)
    equal_size = exact_quotient(shape[0], n)
    if node_shape(out) != shape or (equal_size is None and not all(split_sizes)):
        return None
    with editor.graph.inserting_before(node):
        return [list(sizes) or editor.sizes.list([equal_size] * n) for sizes in split_sizes]


def _replace_exchange(editor: GraphEditor, node: Node, split_sizes: list[list[Any]], group_name: str) -> None:
    """Replace an in-place all-to-all by the functional one, a wait and a copy to its output tensor."""
    functional = torch.ops._c10d_functional
    out, x = node.args[:2]
    with editor.graph.inserting_before(node):
        sent = editor.compute(functional.all_to_all_single.default, (x, *split_sizes, group_name), node)
        received = editor.compute(functional.wait_tensor.default, (sent,), node)
        editor.emit(aten.copy_.default, (out, received), out.meta["val"], node)
    editor.graph.erase_node(node)
