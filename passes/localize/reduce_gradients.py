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
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.sizes import as_size
from sp_compile.passes.propagation.demanded_shards import demanded_placements
from sp_compile.passes.propagation.node_steps import SUMMAND_GRAD
from sp_compile.passes.sharding.placement import REPLICATE, PlacementPlan
from sp_compile.passes.sharding.rule import transfer_of
from sp_compile.passes.sharding.rules.indexing_rules import has_sparse_gradient

sp = torch.ops.sp
# The size of DDP's buckets: large enough for bandwidth, small enough to overlap with the rest of the backward.
BUCKET_BYTES = 25 << 20
# A bucket is a second copy of its gradients while it is filled. This limits its share of all summed bytes, unless it
# is small.
BUCKET_SHARE = 1 / 16
SMALL_BUCKET = 1 << 20
# ops with a backward of the user's, or one that rounds its gradient to a low precision
NONLINEAR_BACKWARDS = (
    sp.scaled_linear.default, sp.subclass_linear.default, sp.packed_linear.default, sp.token_function.default
)  # fmt: skip


def find_partial_grad_nodes(gm: GraphModule, plan: PlacementPlan, differentiable: set[Node]) -> set[Node]:
    """Return the replicated nodes whose gradient may remain partial: each rank has a summand of it.

    All their users compute only such summands. In `x @ w.t()` with a sharded x, w.t() is one: `Localize` sums the
    gradient of w over the ranks in place of that of w.t(), so the reduction moves from such a node to its operands.
    """
    partial_grad_nodes: set[Node] = set()
    for node in reversed(gm.graph.nodes):
        can_be_partial = node in differentiable and node.users and _can_move_reduction(node, plan)
        if can_be_partial and all(_has_partial_grad(node, user, plan, partial_grad_nodes) for user in node.users):
            partial_grad_nodes.add(node)
    # A result (getitem) of an op with several is included only with the op, and so with all results: the reduction is
    # at the operands of the op, or at each result.
    return {n for n in partial_grad_nodes if n.target is not operator.getitem or n.args[0] in partial_grad_nodes}


def _can_move_reduction(node: Node, plan: PlacementPlan) -> bool:
    """Return True if summands of the gradient of an op's result give summands of the gradients of its operands.

    The op is replicated, no exchange, and has a linear backward.
    """
    # A node in `plan.wants` runs on shards.
    if node.op != "call_function" or node in plan.wants or transfer_of(node.target) is not None:
        return False
    if node.target is not operator.getitem and not _has_linear_backward(node):
        return False
    return all(p == REPLICATE for p in plan.placements.get(node, ()))


def _has_linear_backward(node: Node) -> bool:
    """Return True if the backward of an op maps the sum of two gradients of its result to the sum of those it returns.

    Those of torch's ops do. A custom op or autograd Function may clip or round its gradients. False also for an op that
    returns a sparse gradient, which cannot be summed over the ranks.
    """
    if not isinstance(node.target, OpOverload) or node.target in NONLINEAR_BACKWARDS:
        return False
    return node.target.namespace in ("aten", "prims", "sp") and not has_sparse_gradient(OpCall(node))


def _has_partial_grad(node: Node, user: Node, plan: PlacementPlan, partial_grad_nodes: set[Node]) -> bool:
    """Return True if each rank's gradient of the node from this user is a summand, to be added over the ranks.

    It is one if the user is a partial-gradient node itself, whose backward maps summands to summands, or if the user
    runs on shards and demands `Replicate(partial_grad=True)` of the node.
    """
    wants = demanded_placements(node, user, plan)
    return user in partial_grad_nodes or set(wants) == {SUMMAND_GRAD}


def needs_grad_sum(node: Node, plan: PlacementPlan, partial_grad_nodes: set[Node]) -> bool:
    """Return True if the gradient of a value must be summed over the ranks: a user computes a summand on each rank.

    Args:
        node: The replicated value, an input or parameter.
        plan: The plan of its graph.
        partial_grad_nodes: The nodes of `find_partial_grad_nodes`.
    """
    wants = [want for user in node.users for want in demanded_placements(node, user, plan)]
    # SUMMAND_GRAD is Replicate(partial_grad=True), the demand of a user that computes a summand. A user in
    # `partial_grad_nodes` has a partial gradient itself, and so gives the value one.
    return not partial_grad_nodes.isdisjoint(node.users) or SUMMAND_GRAD in wants


def make_buckets(sources: list[Node]) -> list[list[Node]]:
    """Group parameters or inputs into buckets: runs in their order, with a limited number of bytes each.

    One collective reduces the gradients of a bucket. The limit is a share of all bytes, between SMALL_BUCKET and
    BUCKET_BYTES. A parameter that exceeds it has its own bucket.
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


def move_before_use(reductions: list[Node], graph: Graph) -> None:
    """Move reductions of gradients, with their getitems, before the first reader of their results.

    Autograd runs in reverse order, so it then sums the gradients of a layer as soon as they are complete.

    Args:
        reductions: Calls of sp::reduce_grad on inputs and parameters.
        graph: The local graph.
    """
    no_grad_start: Node | None = None  # the call that starts the no_grad region which the loop is in
    # op with several results -> their first reader; for a reader in a no_grad region, the start of that region, because
    # autograd ignores an op inside of it
    first_readers: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.target is set_grad_enabled:
            enables_grad = node.args[0]
            if enables_grad:
                no_grad_start = None
            elif no_grad_start is None:
                no_grad_start = node
        elif node.target is not operator.getitem:
            for read_op in [x.args[0] for x in node.all_input_nodes if x.target is operator.getitem]:
                first_readers.setdefault(read_op, no_grad_start or node)
    for reduction in reductions:
        for node in (reduction, *reduction.users):
            first_readers[reduction].prepend(node)
