"""Validate captured graphs: calls of ops on fake values, without mutation."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.torch_compat import HigherOrderOperator, OpOverload, namespace_of
from sp_compile.passes.graph.call import is_tensor
from sp_compile.passes.graph.mutation import functional_form, is_mutation

aten = torch.ops.aten
STRICT_EXPORT = "Export the program with strict=True, where collectives are functional."


def require_ops(gm: GraphModule, name: str) -> None:
    """Check that the graph calls ops on fake values; mutations are permitted.

    Args:
        gm: Graph.
        name: Prefix of the error message.

    Raises:
        SpError: If a node is a method, a module or a Python function.
    """
    for node in gm.graph.nodes:
        if call := _non_op_reason(node):
            raise SpError("SP204", f"{name}: {node.name} is {call}.")


def require_functional(gm: GraphModule, name: str) -> None:
    """Check that no op mutates a value, except an input at the end of the program.

    Args:
        gm: Graph.
        name: Prefix of the error message.

    Raises:
        SpError: If an op mutates a value.
    """
    for node in gm.graph.nodes:
        if _mutation_reason(node):
            fix = STRICT_EXPORT if namespace_of(node.target) == "c10d" else None
            raise SpError("SP206", f"{name}: {node.name}: {node.target} works in place.", fix)


def _non_op_reason(node: Node) -> str:
    """Return the reason why a node is not an op, as in graphs of Dynamo and torch.fx.symbolic_trace, or ""."""
    if node.op in ("call_method", "call_module"):
        return f"a call of the {node.op.removeprefix('call_')} {node.target}"
    if node.op != "call_function" or isinstance(node.target, OpOverload | HigherOrderOperator):
        return ""
    is_result = is_tensor(node) and node.target is not operator.getitem
    unknown = "example_value" in node.meta or not all("val" in i.meta for i in node.all_input_nodes)
    if is_result or unknown:
        return f"a call of the Python function {getattr(node.target, '__name__', node.target)}"
    return ""


def _mutation_reason(node: Node) -> bool:
    """Return True if the node may mutate a value that is read elsewhere.

    Writing an input back at the end of the program does not count.
    """
    target: Any = node.target
    if namespace_of(target) == "c10d":
        return True
    written_back = target is aten.copy_.default and node.args[0].op in ("placeholder", "get_attr")
    in_place = is_mutation(node) and functional_form(target) is not None and not written_back
    return in_place or str(target) == "triton_kernel_wrapper_mutation"
