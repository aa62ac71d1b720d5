"""Add a local program's extra outputs: balanced orders, operands of deferred outputs, gradient tokens."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import replace

import torch
from torch.fx import GraphModule

from sp_compile.lowering.torch_compat import storage_of
from sp_compile.passes.base import CAPTURED_PROPERTIES, Pass, Passes, check_pass_order, iterate_passes
from sp_compile.passes.graph.call import is_tensor
from sp_compile.passes.graph.sizes import as_sizes
from sp_compile.passes.sharding.output_rules import OUTPUT_RULES

from .boundary_context import BoundaryContext, insert_detach, insert_tap, output_leaves, set_outputs
from .defer_outputs import DeferOutputs


class ReturnPermutation(Pass):
    """Pass that returns the balanced order, its inverse and its chunks along with balanced outputs.

    Does nothing if the graph receives the order as an input.
    """

    requires = frozenset({"validated"})
    provides = frozenset({"row orders"})

    def apply(self, gm: GraphModule, job: BoundaryContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        if job.edges.order_input is not None or not any(one.layout.is_balanced for one in job.edges.results.values()):
            return 0
        (balanced,) = gm.graph.find_nodes(op="call_function", target=torch.ops.sp.deal.default)
        with gm.graph.inserting_before(gm.graph.output_node()):
            orders = [self.emit(operator.getitem, (balanced, i), balanced.meta["val"][i], balanced) for i in range(3)]
        leaves = output_leaves(gm)
        job.edges = replace(job.edges, balanced_order=tuple(range(len(leaves), len(leaves) + 3)))
        set_outputs(gm, [*leaves, *orders])
        return 1


class AddGradientTokens(Pass):
    """Pass that returns gradient tokens for differentiable outputs that the program also uses.

    An example is logits from which the program computes a loss. The token carries the gradient of the output only if
    the caller reads the output; see `lowering/collectives/grad_tokens.py`.
    """

    requires = frozenset({"validated", "deferred outputs"})

    @classmethod
    def of(cls, job: BoundaryContext) -> Pass | None:
        """Create the pass for a job, or return None if it does not apply."""
        return cls() if job.is_split_only and job.trains and job.ranks.n > 1 else None

    def apply(self, gm: GraphModule, job: BoundaryContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        leaves, output, found = output_leaves(gm), gm.graph.output_node(), dict[int, int]()
        memory = Counter(storage_of(x.meta["val"]) for x in leaves if is_tensor(x))
        for i in job.differentiable(gm):
            node = leaves[i]
            if job.edges.results[i].late is not None or node.op != "call_function":
                continue
            if memory[storage_of(node.meta["val"])] > 1:  # AOTAutograd treats outputs that share memory as one
                continue
            if any(user is not output for user in node.users):
                ticket = insert_tap(node)
                leaves[i] = insert_detach(node)
                found[i] = len(leaves)
                leaves.append(ticket)
        set_outputs(gm, leaves)
        job.update_outputs(ticket=found)
        return len(found)


VALIDATED = CAPTURED_PROPERTIES | {"validated", "tiled"}
"""Properties of the program of one rank."""


class BoundaryPasses(Passes):
    """Passes that add the outputs that the sharded outputs of a local program need."""

    steps = (ReturnPermutation, DeferOutputs, AddGradientTokens)

    def __init__(self, job: BoundaryContext) -> None:
        check_pass_order(iterate_passes(BoundaryPasses), VALIDATED)
        super().__init__(job)

    def apply(self, gm: GraphModule, job: BoundaryContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        shapes = {i: tuple(as_sizes(gm.meta[OUTPUT_RULES][i].value.shape)) for i in job.edges.results}
        job.update_outputs(shape=shapes)
        own = len(output_leaves(gm))
        changes = super().apply(gm, job)
        own += len(job.edges.balanced_order)
        order_outputs = range(own, len(output_leaves(gm)))
        job.edges = replace(job.edges, own_ranks=own, rows=job.edges.rows.union(order_outputs))
        return changes
