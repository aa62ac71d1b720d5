"""The form of a captured graph: calls of ops on fake values, of which none ever changes."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile._compat import HigherOrderOperator, OpOverload, namespace_of
from sp_compile.errors import SpError
from sp_compile.graph.call import is_tensor
from sp_compile.graph.mutation import functional_form, is_mutation

aten = torch.ops.aten


def require_captured(gm: GraphModule, name: str) -> None:
    """Raises SpError, in the name of a pass, unless the graph is captured IR or one that AOTAutograd made of it."""
    for node in gm.graph.nodes:
        why = _is_no_op(node) or _changes(node)
        if why:
            raise SpError(
                f"{name}: {node.name}: {why}; give it the graph of sp_compile.capture_export(program)"
            )


def require_ops(gm: GraphModule) -> None:
    """Raises SpError unless the graph calls ops on fake values; they may change some."""
    for node in gm.graph.nodes:
        why = _is_no_op(node)
        if why:
            raise SpError(
                f"capture_export: {node.name}: {why}; give it what torch.export or make_fx made of the program, or "
                "capture a graph of Dynamo in a backend of torch.compile"
            )


def _is_no_op(node: Node) -> str:
    """Why the node is none of a graph of ops: as Dynamo has it before capture, and torch.fx.symbolic_trace."""
    if node.op in ("call_method", "call_module"):
        return f"a call of the {node.op.removeprefix('call_')} {node.target}"
    if node.op != "call_function" or isinstance(node.target, OpOverload | HigherOrderOperator):
        return ""
    made = is_tensor(node) and node.target is not operator.getitem
    if made or "example_value" in node.meta or "val" not in node.meta:
        return f"a call of the Python function {getattr(node.target, '__name__', node.target)}"
    return ""


def _changes(node: Node) -> str:
    """Why the node may change a value that is read elsewhere; an input is written back at the end of the program."""
    target: Any = node.target
    if namespace_of(target) == "c10d":
        return (
            f"{target} works in place: export the program with strict=True, where collectives are functional"
        )
    written_back = target is aten.copy_.default and node.args[0].op in ("placeholder", "get_attr")
    in_place = is_mutation(node) and functional_form(target) is not None and not written_back
    return f"{target} works in place" if in_place or str(target) == "triton_kernel_wrapper_mutation" else ""
