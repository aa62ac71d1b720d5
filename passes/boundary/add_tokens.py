"""Add a local program's extra outputs: balanced orders, operands of deferred outputs, gradient tokens.

    return (loss, logits)   ->   return (loss, logits.detach(), token)

The local program is the graph of one rank, before AOTAutograd. The runtime wraps its sharded outputs as `Sharded`
values and uses the extra outputs for that; `GraphBoundary` records their numbers, the indices among the outputs
(leaves).

A balanced order is a permutation of the rows that is computed at run time, so that ranks share the work of attention
equally. A deferred output is computed from other values, its operands, when the caller reads it. A gradient token is a
one-element tensor; its gradient refers to the gradient of an output that the runtime has stored.
"""

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
from .graph_boundary import first_balanced


class ReturnPermutation(Pass):
    """Pass that returns the balanced order, its inverse and its chunks along with balanced outputs.

    The runtime needs them to restore the order of the rows when the caller reads such an output. Does nothing if the
    graph receives the order as an input.
    """

    requires = frozenset({"validated"})
    provides = frozenset({"row orders"})

    def apply(self, gm: GraphModule, context: BoundaryContext) -> int:
        """Append the three tensors of a `RowPermutation` to the outputs if one is balanced; return 1 or 0."""
        boundary = context.boundary
        is_balanced = any(output.layout.is_balanced for output in boundary.results.values())
        if first_balanced(boundary.layouts) is not None or not is_balanced:
            return 0
        (balance,) = gm.graph.find_nodes(op="call_function", target=torch.ops.sp.deal.default)
        with gm.graph.inserting_before(gm.graph.output_node()):
            tensors = [self.emit(operator.getitem, (balance, i), balance.meta["val"][i], balance) for i in range(3)]
        leaves = output_leaves(gm)
        context.boundary = replace(boundary, balanced_order=tuple(range(len(leaves), len(leaves) + 3)))
        set_outputs(gm, [*leaves, *tensors])
        return 1


class AddGradientTokens(Pass):
    """Pass that returns gradient tokens for differentiable outputs that the program also uses.

    An example is logits from which the program computes a loss. If the caller does not read them, AOTAutograd would
    compute a full-size gradient of zeros. The token carries their gradient only if the caller reads them, see
    `lowering/collectives/grad_tokens.py`.
    """

    requires = frozenset({"validated", "deferred outputs"})

    @classmethod
    def of(cls, context: BoundaryContext) -> Pass | None:
        """Create the pass for training on several ranks without collectives of the program, else return None."""
        return cls() if context.is_split_only and context.trains and context.ranks.n > 1 else None

    def apply(self, gm: GraphModule, context: BoundaryContext) -> int:
        """Detach outputs that the program also uses, append a token for each, and return the number of tokens."""
        leaves, output, tokens = output_leaves(gm), gm.graph.output_node(), dict[int, int]()
        storage_counts = Counter(storage_of(x.meta["val"]) for x in leaves if is_tensor(x))
        for i in context.differentiable(gm):
            node = leaves[i]
            if context.boundary.results[i].deferred is not None or node.op != "call_function":
                continue
            if storage_counts[storage_of(node.meta["val"])] > 1:
                continue  # AOTAutograd treats outputs that share memory as one
            if any(user is not output for user in node.users):
                token = insert_tap(node)
                leaves[i] = insert_detach(node)
                tokens[i] = len(leaves)
                leaves.append(token)
        set_outputs(gm, leaves)
        context.update_outputs(grad_token=tokens)
        return len(tokens)


LOCAL_PROPERTIES = CAPTURED_PROPERTIES | {"validated", "tiled"}  # properties of the program of one rank


class BoundaryPasses(Passes):
    """Passes that add the outputs that the sharded outputs of a local program need, before compilation."""

    steps = (ReturnPermutation, DeferOutputs, AddGradientTokens)

    def __init__(self, context: BoundaryContext) -> None:
        check_pass_order(iterate_passes(BoundaryPasses), LOCAL_PROPERTIES)
        super().__init__(context)

    def apply(self, gm: GraphModule, context: BoundaryContext) -> int:
        """Run the passes, and update `context.boundary` with the shapes of its results and the added outputs.

        Outputs from `num_program_outputs` on are tokens and operands, which the runtime does not return.
        """
        shapes = {i: tuple(as_sizes(gm.meta[OUTPUT_RULES][i].value.shape)) for i in context.boundary.results}
        context.update_outputs(shape=shapes)
        num_outputs = len(output_leaves(gm))
        changes = super().apply(gm, context)
        num_outputs += len(context.boundary.balanced_order)
        added = range(num_outputs, len(output_leaves(gm)))  # tokens, and rows of deferred outputs' operands
        rows = context.boundary.rows.union(added)
        context.boundary = replace(context.boundary, num_program_outputs=num_outputs, rows=rows)
        return changes
