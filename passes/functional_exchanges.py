"""dist.all_to_all_single as make_fx records it, in place -> the functional collective and a copy into its buffer.

c10d.alltoall_base_(out, x, group, [], [])   ->   out.copy_(wait_tensor(all_to_all_single(x, ...)))
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.fx import GraphModule, Node

from ..shapes import sizes
from .moves import value_of
from .restride import infer

aten, functional = torch.ops.aten, torch.ops._c10d_functional


def make_functional(gm: GraphModule) -> bool:
    """Edit the graph in place; whether there was one. Left alone: symbolic shares, and a buffer of another shape."""
    if not dist.is_available():
        return False
    found = gm.graph.find_nodes(op="call_function", target=torch.ops.c10d.alltoall_base_.default)
    return sum(_rewritten(gm, node) for node in found) > 0


def _rewritten(gm: GraphModule, node: Node) -> bool:
    out, x, holder, received, sent = node.args[:5]
    group = dist.ProcessGroup.unbox(getattr(gm, str(holder.target)))
    rows, n = sizes(value_of(x).shape), group.size()
    shares = (
        [list(given) or [rows[0] // n] * n for given in (received, sent)] if isinstance(rows[0], int) else []
    )
    fits = sizes(value_of(out).shape) == rows and all(sum(share) == rows[0] for share in shares)
    if node.users or not shares or not fits:
        return False
    with gm.graph.inserting_before(node):
        arrived: Node = node
        for target, args in (
            (functional.all_to_all_single.default, (x, *shares, group.group_name)),
            (functional.wait_tensor.default, ()),
            (aten.copy_.default, (out,)),
        ):
            given = args if target is functional.all_to_all_single.default else (*args, arrived)
            arrived = gm.graph.call_function(target, given)
            arrived.meta["val"] = (
                infer(target, given, {}) if target is not aten.copy_.default else value_of(out)
            )
    gm.graph.erase_node(node)
    if not holder.users:
        gm.graph.erase_node(holder)
    return True
