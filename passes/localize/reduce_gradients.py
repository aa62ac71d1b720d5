"""Find replicated nodes that can have partial gradients, and bucket parameter reductions.

`x @ w.t()` with a sharded x demands w.t() with a partial gradient. Converting w in place of w.t() gives the same
gradient and lets parameters share a reduction, one for each of the `make_buckets`. A node can be lifted if no user
needs its gradient to be replicated.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, GraphModule, Node

from sp_compile.lowering.torch_compat import OpOverload, set_grad_enabled
from sp_compile.passes.graph.call import is_tensor
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.sizes import as_size
from sp_compile.passes.propagate import demanded_placements
from sp_compile.passes.sharding.placement import REPLICATE, Placement, PlacementPlan, Replicate
from sp_compile.passes.sharding.rule import transfer_of

# The size of DDP's buckets: large enough for bandwidth, small enough to overlap with the rest of the backward.
BUCKET_BYTES = 25 << 20
# A bucket is a second copy of its gradients while it is filled. This limits its share of all summed bytes, unless it
# is small.
BUCKET_SHARE = 1 / 16
SMALL_BUCKET = 1 << 20


def differentiable_nodes(gm: GraphModule) -> set[Node]:
    """Return floating values that depend on an input or parameter which requires a gradient."""
    out: set[Node] = set()
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if node.op in ("placeholder", "get_attr"):
            passes = is_tensor(node) and node_info(node).requires_grad is not False
        else:
            passes = node.op == "call_function" and node.target is not torch.ops.aten.detach.default
            passes = passes and any(a in out for a in node.all_input_nodes)
        if passes and (not is_tensor(node) or value.is_floating_point() or value.is_complex()):
            out.add(node)
    return out


def lifted_nodes(gm: GraphModule, plan: PlacementPlan, differentiable: set[Node]) -> set[Node]:
    """Return replicated nodes whose every use accepts a partial gradient."""
    lifted: set[Node] = set()
    for node in reversed(gm.graph.nodes):
        if (
            node in differentiable
            and _is_liftable(node, plan)
            and node.users
            and all(_accepts_summand(node, u, plan, lifted) for u in node.users)
        ):
            lifted.add(node)
    # One of several results is lifted only if all are: operands are converted before the op, or each result after it.
    return {n for n in lifted if n.target is not operator.getitem or n.args[0] in lifted}


def _is_liftable(node: Node, plan: PlacementPlan) -> bool:
    if node.op != "call_function" or node in plan.wants or transfer_of(node.target) is not None:
        return False
    if node.target is not operator.getitem and not isinstance(node.target, OpOverload):
        return False
    return all(p == REPLICATE for p in plan.placements.get(node, ()))


def _accepts_summand(node: Node, user: Node, plan: PlacementPlan, lifted: set[Node]) -> bool:
    wants = demanded_placements(node, user, plan)
    return user in lifted or (bool(wants) and all(_is_summand(w) for w in wants))


def has_sharded_user(node: Node, plan: PlacementPlan, lifted: set[Node]) -> bool:
    """Return True if a user demands a replicated value with a partial gradient."""
    return any(user in lifted or any(map(_is_summand, demanded_placements(node, user, plan))) for user in node.users)


def _is_summand(want: Placement) -> bool:
    return isinstance(want, Replicate) and want.partial_grad


def make_buckets(sources: list[Node]) -> list[list[Node]]:
    """Return runs of parameters, in the order of their use, of at most `_bucket_bytes` each.

    A parameter that exceeds the limit has its own bucket.
    """
    out: list[list[Node]] = []
    most = _bucket_bytes(sources)
    filled = most + 1
    for source in sources:
        nbytes = _static_bytes(source)
        if filled + nbytes > most and filled:
            out.append([])
            filled = 0
        out[-1].append(source)
        filled += nbytes
    return out


def _bucket_bytes(sources: list[Node]) -> int:
    share = int(sum(map(_static_bytes, sources)) * BUCKET_SHARE)
    return min(BUCKET_BYTES, max(SMALL_BUCKET, share))


def _static_bytes(source: Node) -> int:
    value = source.meta["val"]
    numel = as_size(value.numel())
    return numel * value.element_size() if isinstance(numel, int) else 0


def move_before_use(sums: list[Node], graph: Graph) -> None:
    """Move ops on inputs and parameters before the first reader of their results.

    A reader in a no_grad region counts as the start of that region.

    Autograd runs in reverse order, so that the gradients of a layer are summed as soon as they are complete.
    """
    region: Node | None = None
    readers: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.target is set_grad_enabled:
            region = None if node.args[0] else region or node
        elif node.target is not operator.getitem:
            for emitted in [x.args[0] for x in node.all_input_nodes if x.target is operator.getitem]:
                readers.setdefault(emitted, region or node)
    for emitted in sums:
        for node in (emitted, *emitted.users):
            readers[emitted].prepend(node)
