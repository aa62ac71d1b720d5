"""Replace an autograd.Function that only reduces by sp::reduce_pair, which runs on shards.

    f: x -> x, dy -> all_reduce(dy)        sp.reduce_pair(x, [], ["sum g"])
    g: x -> all_reduce(x), dy -> dy        sp.reduce_pair(x, ["sum g"], [])

Megatron's pairs have this form. A Function is one call in the graph, with its forward and backward as *bodies*, which
are graphs. An all_reduce is written as its op and its group, "sum g". Any other Function remains one call, and its
operands are gathered.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.torch_compat import autograd_function_apply, pytree, set_grad_enabled
from sp_compile.passes.base import CanonicalPass, register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import is_tensor
from sp_compile.passes.sharding.matchers import skip_widening_cast, steps_between, value_origin

aten, c10d, sp = torch.ops.aten, torch.ops._c10d_functional, torch.ops.sp
PASSTHROUGH_OPS = (c10d.all_reduce.default, c10d.wait_tensor.default, aten.detach.default)


@register_pass
class ReplaceReducePairs(CanonicalPass):
    """Replacement of every autograd.Function that only reduces."""

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Replace Functions whose forward and backward are all_reduces of one tensor by sp::reduce_pair."""
        functions = gm.graph.find_nodes(op="call_function", target=autograd_function_apply)
        return sum(self._rewrite(node) for node in functions)

    def _rewrite(self, node: Node) -> bool:
        """Replace a call of an autograd.Function that only reduces one tensor; return False for others.

        A Function that contains an all_reduce and is not replaced is reported.
        """
        bodies = function_bodies(node)
        operands = [a for a in node.args[2:] if is_tensor(a)]  # the first two arguments are the bodies
        # The call returns a tuple. Find the only result that is read: all users are getitems with one index (an int).
        # A user that is no getitem may read all results; it is in the set itself, so that `index` is then no int.
        read_indices = {user.args[1] if user.target is operator.getitem else user for user in node.users}
        index = read_indices.pop() if len(read_indices) == 1 else None
        if len(bodies) != 2 or len(operands) != 1 or not isinstance(index, int):
            return False
        output, gradients = (body.graph.output_node().args[0] for body in bodies)
        forward, backward = (
            _match_reductions(bodies[0], result_at(output, index)),
            _match_reductions(bodies[1], gradients),
        )
        if forward is None or backward is None:
            direction = "forward" if forward is None else "backward"
            if any(body.graph.find_nodes(op="call_function", target=c10d.all_reduce.default) for body in bodies):
                self.note_refusal(node, f"its operand is gathered: its {direction} does more than reduce one tensor")
            return False
        with self.graph.inserting_before(node):
            args = (operands[0], forward, backward)
            self.replace(node, {index: self.emit(sp.reduce_pair.default, args, node.meta["val"][index], node)})
        return True


def function_bodies(node: Node) -> list[GraphModule]:
    """Return the graphs of the forward and the backward of an autograd.Function; [] for an operator."""
    body_nodes = node.args[:2] if node.target is autograd_function_apply else ()
    modules = [node.graph.owning_module.get_submodule(str(x.target)) for x in body_nodes if isinstance(x, Node)]
    return [module for module in modules if isinstance(module, GraphModule)]


def result_at(output: Any, index: int) -> Any:
    """Return the result of an autograd.Function at an index, as a node of its forward.

    `output` is what the forward returns: (results, saved values). In torch 2.11, `results` has all values of the body,
    and the getitems of the call index this longer list; so `index` is right in every version.
    """
    results = output[0]
    return results[index] if isinstance(results, tuple | list) else results


def _match_reductions(body: GraphModule, results: Any) -> list[str] | None:
    """Return the all_reduces from the only tensor input of a body to its only tensor result, in order.

    A body is the graph of a forward or backward. Each all_reduce is its op and its group, such as "sum g"; an identity
    has none. The result is None if the body does anything else, so that its Function is not replaced.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(results) if is_tensor(leaf)]
    if len(tensors) != 1:
        return None
    # Go back from the result to the input through copies, casts to a wider dtype and back, all_reduces and their waits.
    value = tensors[0]
    chain: list[Node] = []  # the nodes from `value` (exclusive) to the result
    while True:
        source = skip_widening_cast(value) or value_origin(value)
        if source is not value:
            chain = [*steps_between(value, source), *chain]
            value = source
        elif value.target in PASSTHROUGH_OPS:
            chain.insert(0, value)
            value = value.args[0]
        else:
            break
    inputs = [n for n in body.graph.find_nodes(op="placeholder") if is_tensor(n) and n.users]
    calls = [n for n in body.graph.nodes if n.op == "call_function" and n.target is not set_grad_enabled]
    reductions = [n.args for n in chain if n.target is c10d.all_reduce.default]
    has_other_work = inputs != [value] or len(calls) != len(chain)
    # The arguments of an all_reduce are (tensor, op, group).
    if has_other_work or any(op not in ("sum", "avg") for _, op, _ in reductions):
        return None
    return [f"{op} {group}" for _, op, group in reductions]
