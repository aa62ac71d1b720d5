"""Replace a torch.autograd.Function of elementwise ops by sp::token_function, which has a sharding rule.

    class Bounded(torch.autograd.Function):
        forward:   sqrt(x)                                   ->  sp.token_function([x], name)
        backward:  dy / sqrt(clip(4 * x, min=1e-6))

Both bodies remain as they are. Bytes moved: none. Unchanged: bodies with other ops, several results, constants as
operands, and operands of different shapes, whose gradients are sums.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.token_functions import FunctionBodies, register_bodies
from sp_compile.lowering.torch_compat import OpOverload, autograd_function_apply, schema_of, set_grad_enabled
from sp_compile.passes.base import CanonicalPass, register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import is_tensor, node_shape, node_tensors
from sp_compile.passes.sharding.matchers import is_copy
from sp_compile.passes.sharding.rule import POINTWISE

from .reduce_pairs import function_bodies

sp = torch.ops.sp


@register_pass
class ReplaceTokenFunctions(CanonicalPass):
    """Replacement of every elementwise autograd.Function."""

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Replace the Functions with one result whose forward and backward are elementwise."""
        functions = gm.graph.find_nodes(op="call_function", target=autograd_function_apply)
        return sum(self._rewrite(node) for node in functions)

    def _rewrite(self, node: Node) -> bool:
        """Replace a call of an autograd.Function if it is elementwise with one result; return False if not."""
        bodies = function_bodies(node)
        operands, values = list(node.args[2:]), node_tensors(node)  # the first two arguments are the bodies
        if len(bodies) != 2 or len(values) != 1 or not operands or not all(map(is_tensor, operands)):
            return False
        getitems = [user for user in node.users if user.target is operator.getitem]  # each is replaced by the new node
        if len(getitems) < len(node.users) or {getitem.args[1] for getitem in getitems} != {0}:
            return False
        shape = tuple(values[0].shape)
        if any(node_shape(x) not in (shape, ()) for x in operands):
            return False
        if not all(_has_only_pointwise_ops(body, shape) for body in bodies):
            return False
        with self.graph.inserting_before(node):
            name = register_bodies(FunctionBodies(bodies[0], bodies[1], dict(node.kwargs)))
            self.replace(node, {0: self.emit(sp.token_function.default, (operands, name), values[0], node)})
        return True


def _has_only_pointwise_ops(body: GraphModule, shape: tuple[Any, ...]) -> bool:
    """Return True if every op of a body, the graph of a forward or backward, is elementwise.

    Each tensor of the body must have the given shape or be a number, a tensor without dims.
    """
    for node in body.graph.nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            return False
        if node.target is set_grad_enabled:  # computes nothing
            continue
        if any(tuple(x.shape) not in (shape, ()) for x in node_tensors(node)):
            return False
        if node.op == "call_function" and not (is_copy(node) or is_pure_pointwise(node.target)):
            return False
    return True


def is_pure_pointwise(target: Any) -> bool:
    """Return True for an elementwise ATen op that draws no random numbers and writes to no argument."""
    if not isinstance(target, OpOverload) or schema_of(target).is_mutable:
        return False
    return POINTWISE in target.tags and torch.Tag.nondeterministic_seeded not in target.tags
