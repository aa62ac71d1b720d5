"""Validate captured graphs: calls of ops on fake values, without mutation."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.errors import CaptureError, SpError, node_line
from sp_compile.lowering.torch_compat import HigherOrderOperator, OpOverload, is_functorch_tensor, namespace_of
from sp_compile.passes.graph.call import is_tensor, parse_overloads
from sp_compile.passes.graph.mutation import functional_form, is_mutation
from sp_compile.passes.graph.sizes import as_size, is_same_size
from sp_compile.passes.graph.strides import has_other_strides

aten = torch.ops.aten
# Ops that address the memory of their first argument, not its elements.
_MEMORY_READERS = parse_overloads("as_strided as_strided_ as_strided_copy as_strided_scatter")
STRICT_EXPORT = "Export the program with strict=True, where collectives are functional."


def require_ops(gm: GraphModule, name: str) -> None:
    """Check that the graph calls only ops on fake values, as passes expect; mutations are permitted.

    Args:
        gm: Graph.
        name: Prefix of the error message.

    Raises:
        SpError: If a node is a method, a module or a Python function.
    """
    for node in gm.graph.nodes:
        reason = _non_op_reason(node)
        if reason:
            raise SpError("SP204", f"{name}: expected a graph of ops, got {reason} ({node.name}).")


def require_functional(gm: GraphModule, name: str) -> None:
    """Check that no op mutates a value that other nodes read, which passes may assume.

    Copies of new values to inputs at the end of the graph are permitted.

    Args:
        gm: Graph.
        name: Prefix of the error message.

    Raises:
        SpError: If an op mutates a value.
    """
    for node in gm.graph.nodes:
        if _can_mutate_shared_value(node):
            # c10d collectives write in place; with strict=True, Dynamo replaces them by functional ones.
            fix = STRICT_EXPORT if namespace_of(node.target) == "c10d" else None
            cause = f"{name}: expected a graph without in-place ops, got {node.target} ({node.name})."
            raise SpError("SP206", cause, fix)


def require_whole_memory(gm: GraphModule) -> None:
    """Check that as_strided and its variants are called on tensors that fill their memory without a gap.

    Of a part of a tensor, such as h[:, 2:], they may read elements of h outside of the part. A rank stores the rows of
    h and of the part in separate memory.

    Args:
        gm: Graph, before functionalization.

    Raises:
        CaptureError: If one is called on a part of the memory.
    """
    for node in gm.graph.nodes:
        if node.target in _MEMORY_READERS and not _is_dense_memory(node.args[0].meta["val"]):
            raise CaptureError(
                "SP228",
                f"{node.name}: {node.target} at {node_line(node)} reads the memory of {node.args[0].name}, which is a "
                "part of the memory of another tensor.",
            )


def _is_dense_memory(x: torch.Tensor) -> bool:
    """Return True if the elements of a tensor are provably all elements of its memory, each of them once."""
    if is_functorch_tensor(x):  # it has no memory of its own; torch.func reads that of the tensor that it wraps
        return True
    has_no_gap = not has_other_strides(torch.empty_like(x), x)
    starts_at_0 = is_same_size(as_size(x.storage_offset()), 0)
    return has_no_gap and starts_at_0 and is_same_size(as_size(x.untyped_storage().nbytes()), as_size(x.nbytes))


def _non_op_reason(node: Node) -> str:
    """Return the reason why a node is not an op, such as "a call of the method view", or "" for an op.

    Graphs of Dynamo and of torch.fx.symbolic_trace have such nodes. Python functions of numbers, as arithmetic on
    sizes, are permitted.
    """
    if node.op in ("call_method", "call_module"):
        return f"a call of the {node.op.removeprefix('call_')} {node.target}"
    if node.op != "call_function" or isinstance(node.target, OpOverload | HigherOrderOperator):
        return ""
    computes_tensor = is_tensor(node) and node.target is not operator.getitem
    # Nodes of such graphs, and their operands, have no fake values under the key "val".
    is_untraced = "example_value" in node.meta or not all("val" in x.meta for x in node.all_input_nodes)
    if computes_tensor or is_untraced:
        return f"a call of the Python function {getattr(node.target, '__name__', node.target)}"
    return ""


def _can_mutate_shared_value(node: Node) -> bool:
    """Return True if the node may mutate a value that other nodes read.

    Two mutations of captured graphs do not count: a write-back, the copy of a new value to an input at the end of the
    program, and an op without functional form, which mutates a clone that only it reads.
    """
    target: Any = node.target
    # Collectives of c10d and this higher-order op, which calls a Triton kernel, write to their operands.
    if namespace_of(target) == "c10d" or str(target) == "triton_kernel_wrapper_mutation":
        return True
    is_write_back = target is aten.copy_.default and node.args[0].op in ("placeholder", "get_attr")
    return is_mutation(node) and functional_form(target) is not None and not is_write_back
