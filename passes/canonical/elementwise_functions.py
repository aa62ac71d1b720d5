"""Replace a torch.autograd.Function of elementwise ops by sp::token_function, which has a sharding rule.

    class Bounded(torch.autograd.Function):
        forward:   sqrt(x)                                   ->  sp.token_function([x], name)
        backward:  dy / sqrt(clip(4 * x, min=1e-6))

Both bodies remain as they are. Bytes moved: none. Unchanged: bodies with other ops, several results, constants as
operands, operands of different shapes, whose gradients are sums, and backwards that are not provably 0 for a gradient
of 0, such as `dy + 0.1 * sign(x)`: the gradients of padded rows must be 0, and those of numbers are added over ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.token_functions import FunctionBodies, register_bodies
from sp_compile.lowering.torch_compat import OpOverload, autograd_function_apply, pytree, schema_of, set_grad_enabled
from sp_compile.passes.base import CanonicalPass, register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, is_tensor, node_packet, node_shape, node_tensors, parse_overloads
from sp_compile.passes.sharding.matchers import constant_value, is_copy, move_source
from sp_compile.passes.sharding.rule import POINTWISE

from .reduce_pairs import function_bodies

aten, sp = torch.ops.aten, torch.ops.sp
IsZero = Callable[[str], bool]  # of the argument with a name
# Ops that return 0 if some arguments are 0: which ones, as a condition.
_ZERO_RULES: dict[Any, Callable[[IsZero], bool]] = {
    **dict.fromkeys((aten.mul, aten.multiply), lambda is_zero: is_zero("self") or is_zero("other")),
    **dict.fromkeys(
        (aten.add, aten.sub, aten.rsub, aten.maximum, aten.minimum, aten.where),
        lambda is_zero: is_zero("self") and is_zero("other"),
    ),
    aten.masked_fill: lambda is_zero: is_zero("self") and is_zero("value"),
    **dict.fromkeys(
        (
            getattr(aten, name)
            for name in "abs div neg relu round sign sin sinh tan tanh nan_to_num true_divide".split()
        ),
        lambda is_zero: is_zero("self"),
    ),
    **dict.fromkeys(
        (getattr(aten, f"{name}_backward") for name in "gelu sigmoid silu tanh threshold".split()),
        lambda is_zero: is_zero("grad_output"),
    ),
}
_CLAMPS = parse_overloads("clamp clip")


@register_pass
class ReplaceTokenFunctions(CanonicalPass):
    """Replacement of every elementwise autograd.Function."""

    def apply(self, gm: GraphModule, context: PassContext) -> int:
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
        if not _is_zero_preserving(bodies[1]):
            self.note_refusal(node, "its operands are gathered: its backward may not be 0 for a gradient of 0")
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


def _is_zero_preserving(backward: GraphModule) -> bool:
    """Return True if all gradients that a backward returns are provably 0 where the gradient of the result is 0.

    The rows of a rank include padded ones, whose gradients are 0. A number, such as a loss, would get its gradient from
    every rank if that does not depend on the gradient of the result.
    """
    placeholders = backward.graph.find_nodes(op="placeholder")
    zeros = {next(node for node in placeholders if is_tensor(node))}  # the first one is the gradient of the result
    for node in backward.graph.nodes:
        if (
            node.op == "call_function"
            and is_tensor(node)
            and (constant_value(node) == 0 or _is_zero_result(node, zeros))
        ):
            zeros.add(node)
    gradients = pytree.tree_leaves(backward.graph.output_node().args[0])  # None for an operand without a gradient
    return all(gradient in zeros for gradient in gradients if is_tensor(gradient))


def _is_zero_result(node: Node, zeros: set[Node]) -> bool:
    """Return True if the result of an op is 0 where the values `zeros` are 0."""
    if move_source(node) in zeros or (node.target is aten.detach.default and node.args[0] in zeros):
        return True
    if not isinstance(node.target, OpOverload):
        return False
    args = OpCall(node).args

    def is_zero(name: str) -> bool:
        """Return True if an argument is 0, a tensor or a number."""
        x = args.get(name)
        return x in zeros if isinstance(x, Node) else isinstance(x, int | float) and x == 0

    if node.target in _CLAMPS:  # by numbers; None is no limit
        limits = [(x, sign) for x, sign in ((args.get("min"), -1), (args.get("max"), 1)) if x is not None]
        return is_zero("self") and all(isinstance(x, int | float) and x * sign >= 0 for x, sign in limits)
    rule = _ZERO_RULES.get(node_packet(node))
    return rule is not None and rule(is_zero)
