"""Find replicated nodes that can have partial gradients, and bucket parameter reductions.

A replicated value is equal on all ranks. Its gradient is partial if each rank computes a summand of it; a sum over the
ranks (a reduction, sp::reduce_grad) makes it complete. The plan demands `Replicate(partial_grad=True)` of an operand
where a node computes such a summand, and `Localize` inserts the reductions.

In `x @ w.t()` with a sharded x, each rank computes a summand of the gradient of w.t(). Summing the gradient of w in
place of that of w.t() gives the same result and lets parameters share a reduction, one for each of the `make_buckets`.
w.t() is then a partial-gradient node: no user needs its gradient to be summed.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, GraphModule, Node

from sp_compile.lowering.torch_compat import OpOverload, set_grad_enabled
from sp_compile.passes.graph.call import is_tensor
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.sizes import as_size
from sp_compile.passes.propagation.demanded_shards import demanded_placements
from sp_compile.passes.sharding.placement import REPLICATE, Placement, PlacementPlan, Replicate
from sp_compile.passes.sharding.rule import transfer_of

# The size of DDP's buckets: large enough for bandwidth, small enough to overlap with the rest of the backward.
BUCKET_BYTES = 25 << 20
# A bucket is a second copy of its gradients while it is filled. This limits its share of all summed bytes, unless it
# is small.
BUCKET_SHARE = 1 / 16
SMALL_BUCKET = 1 << 20


def differentiable_nodes(gm: GraphModule) -> set[Node]:
    """Return floating values that depend on an input or parameter which requires a gradient.

    The gradients of all others are never computed, so they need no reduction.
    """
    differentiable: set[Node] = set()
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if node.op in ("placeholder", "get_attr"):
            has_grad = is_tensor(node) and node_info(node).requires_grad is not False
        else:
            has_grad = node.op == "call_function" and node.target is not torch.ops.aten.detach.default
            has_grad = has_grad and not differentiable.isdisjoint(node.all_input_nodes)
        if has_grad and (not is_tensor(node) or value.is_floating_point() or value.is_complex()):
            differentiable.add(node)
    return differentiable


def find_partial_grad_nodes(gm: GraphModule, plan: PlacementPlan, differentiable: set[Node]) -> set[Node]:
    """Return the partial-gradient nodes: replicated nodes whose every use accepts a partial gradient.

    `Localize` moves the reduction from such a node to its operands.
    """
    partial_grad_nodes: set[Node] = set()
    for node in reversed(gm.graph.nodes):
        can_be_partial = node in differentiable and node.users and _is_replicated_call(node, plan)
        if can_be_partial and all(_accepts_partial_grad(node, user, plan, partial_grad_nodes) for user in node.users):
            partial_grad_nodes.add(node)
    # One of several results is included only if all are: operands are converted before the op, or each result after it.
    return {n for n in partial_grad_nodes if n.target is not operator.getitem or n.args[0] in partial_grad_nodes}


def _is_replicated_call(node: Node, plan: PlacementPlan) -> bool:
    """Return True if the node computes replicated values from replicated operands, and is no exchange."""
    if node.op != "call_function" or node in plan.wants or transfer_of(node.target) is not None:
        return False
    if node.target is not operator.getitem and not isinstance(node.target, OpOverload):
        return False
    return all(p == REPLICATE for p in plan.placements.get(node, ()))


def _accepts_partial_grad(node: Node, user: Node, plan: PlacementPlan, partial_grad_nodes: set[Node]) -> bool:
    """Return True if the user reads the node only where it demands a partial gradient, or has one itself."""
    wants = demanded_placements(node, user, plan)
    return user in partial_grad_nodes or (bool(wants) and all(map(_is_partial_grad_demand, wants)))


def needs_grad_sum(node: Node, plan: PlacementPlan, partial_grad_nodes: set[Node]) -> bool:
    """Return True if the gradient of a value must be reduced over the ranks.

    It must if a user computes only a summand of it on each rank.

    Args:
        node: The replicated value, an input or parameter.
        plan: The plan of its graph.
        partial_grad_nodes: The nodes of `find_partial_grad_nodes`.
    """
    wants = [want for user in node.users for want in demanded_placements(node, user, plan)]
    return not partial_grad_nodes.isdisjoint(node.users) or any(map(_is_partial_grad_demand, wants))


def _is_partial_grad_demand(want: Placement) -> bool:
    """Return True if a demanded placement is a replicated value with a partial gradient."""
    return isinstance(want, Replicate) and want.partial_grad


def make_buckets(sources: list[Node]) -> list[list[Node]]:
    """Return runs of parameters of a limited number of bytes each; one collective reduces each run.

    The sources are in the order of the graph. The limit is a share of all bytes, between SMALL_BUCKET and BUCKET_BYTES.
    A parameter that exceeds it has its own bucket.
    """
    buckets: list[list[Node]] = []
    limit = min(BUCKET_BYTES, max(SMALL_BUCKET, int(sum(map(_static_bytes, sources)) * BUCKET_SHARE)))
    bucket_bytes = 0
    for source in sources:
        nbytes = _static_bytes(source)
        if not buckets or (bucket_bytes and bucket_bytes + nbytes > limit):
            buckets.append([])
            bucket_bytes = 0
        buckets[-1].append(source)
        bucket_bytes += nbytes
    return buckets


def _static_bytes(source: Node) -> int:
    """Return the bytes of a value; 0 if its size is symbolic."""
    value = source.meta["val"]
    numel = as_size(value.numel())
    return numel * value.element_size() if isinstance(numel, int) else 0


def move_before_use(sums: list[Node], graph: Graph) -> None:
    """Move reductions of inputs and parameters before the first reader of their results.

    Their getitems move with them. `sums` are the sp::reduce_grad calls of the local graph. A reader in a no_grad region
    counts as the start of that region. Autograd runs in reverse order, so that the gradients of a layer are summed as
    soon as they are complete.
    """
    no_grad_start: Node | None = None  # call that starts the no_grad region of the node
    first_readers: dict[Node, Node] = {}  # by op with several results
    for node in graph.nodes:
        if node.target is set_grad_enabled:
            no_grad_start = None if node.args[0] else no_grad_start or node
        elif node.target is not operator.getitem:
            for read_op in [x.args[0] for x in node.all_input_nodes if x.target is operator.getitem]:
                first_readers.setdefault(read_op, no_grad_start or node)
    for reduction in sums:
        for node in (reduction, *reduction.users):
            first_readers[reduction].prepend(node)
