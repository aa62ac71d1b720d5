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
from sp_compile.passes.sharding.output_rules import OUTPUT_INFOS

from .boundary_context import BoundaryContext, insert_detach, insert_tap, output_leaves, set_outputs
from .defer_outputs import DeferOutputs
from .graph_boundary import first_balanced


class ReturnPermutation(Pass):
    """Pass that returns the balanced order as three additional outputs, if an output has balanced rows.

    The runtime needs it to restore the order of the rows when the caller reads such an output. The pass does nothing
    if an input has balanced rows already: its order is then that of the outputs, and the runtime has it.
    """

    requires = frozenset({"validated"})
    provides = frozenset({"row orders"})

    def apply(self, gm: GraphModule, context: BoundaryContext) -> int:
        """Append the order, its inverse and its chunks, a `RowPermutation`, to the outputs.

        Returns 1, or 0 if no output needs them.
        """
        boundary = context.boundary
        has_balanced_output = any(output.layout.is_balanced for output in boundary.results.values())
        has_balanced_input = first_balanced(boundary.layouts) is not None
        if has_balanced_input or not has_balanced_output:
            return 0
        # The op that computes the order; its first three results are the RowPermutation.
        (balance,) = gm.graph.find_nodes(op="call_function", target=torch.ops.sp.balance_rows.default)
        with gm.graph.inserting_before(gm.graph.output_node()):
            tensors = [self.emit(operator.getitem, (balance, i), balance.meta["val"][i], balance) for i in range(3)]
        leaves = output_leaves(gm)
        context.boundary = replace(boundary, balanced_order=tuple(range(len(leaves), len(leaves) + 3)))
        set_outputs(gm, [*leaves, *tensors])
        return 1


class AddGradientTokens(Pass):
    """Pass that returns gradient tokens for differentiable outputs that the program also uses.

    An example is logits from which the program computes a loss. AOTAutograd compiles one backward, in which each output
    has a gradient: if the caller does not read the logits, a full-size tensor of zeros. The pass returns the logits
    detached, next to a token of one element. Its gradient refers to the gradient of the logits, if there is one, see
    `lowering/collectives/grad_tokens.py`.
    """

    requires = frozenset({"validated", "deferred outputs"})

    @classmethod
    def of(cls, context: BoundaryContext) -> Pass | None:
        """Create the pass for training on several ranks, or return None.

        It also returns None for a program with collectives of its own: passes over these identify gradients by the
        position of outputs, which this pass changes. (`is_split_only`: the program has no such collectives.)
        """
        return cls() if context.is_split_only and context.trains and context.ranks.n > 1 else None

    def apply(self, gm: GraphModule, context: BoundaryContext) -> int:
        """Detach outputs that the program also uses, append a token for each, and return the number of tokens."""
        leaves, output = output_leaves(gm), gm.graph.output_node()
        tokens: dict[int, int] = {}  # number of an output -> number of its token
        storage_counts = Counter(storage_of(x.meta["val"]) for x in leaves if is_tensor(x))
        for i in context.differentiable(gm):
            node = leaves[i]
            if context.boundary.results[i].deferred is not None or node.op != "call_function":
                continue  # operands of deferred outputs have tokens already, and arguments are not computed here
            if storage_counts[storage_of(node.meta["val"])] > 1:
                continue  # AOTAutograd treats outputs that share memory as one
            if any(user is not output for user in node.users):
                token = insert_tap(node)  # an op that adds the stored gradient of the output to the node's gradient
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
        """Run the passes, update `context.boundary`, and return the number of changes.

        The outputs are then those of the program, the balanced order, and the tokens and operands of deferred outputs.
        The runtime does not return the last group, which starts at `num_program_outputs`.
        """
        # The runtime makes a sharded result of a rank's rows and the shape of the full tensor. The shapes are recorded
        # before the passes replace outputs.
        full_shapes = {i: tuple(as_sizes(gm.meta[OUTPUT_INFOS][i].value.shape)) for i in context.boundary.results}
        context.update_outputs(shape=full_shapes)
        num_outputs = len(output_leaves(gm))
        changes = super().apply(gm, context)
        num_outputs += len(context.boundary.balanced_order)
        tokens_and_operands = range(num_outputs, len(output_leaves(gm)))
        # `rows` has the outputs that contain only the part of one rank. Tokens and operands are such outputs, too.
        rows = context.boundary.rows.union(tokens_and_operands)
        context.boundary = replace(context.boundary, num_program_outputs=num_outputs, rows=rows)
        return changes
