"""Where a graph that is not functional writes to memory: reads do not cross that.

y = x.movedim(2, 0).contiguous(); x.add_(1); all_to_all_single(y)   sends x as it was before
"""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from sp_compile._compat import HigherOrderOperator, OpOverload, OpOverloadPacket, schema_of
from sp_compile.graph.mutation import is_mutation

from .arrangement import name_of

# x += 1 and the like, and x[i] = y.
_ASSIGNMENTS = frozenset(
    getattr(operator, f"i{name}")
    for name in "add and concat floordiv lshift matmul mod mul or pow rshift sub truediv xor".split()
) | {operator.setitem, setattr}
_ASSIGNING_METHODS = frozenset(f"__{function.__name__}__" for function in _ASSIGNMENTS)
# Their underscore keeps them apart from Python's keywords.
_KEYWORDS = frozenset({operator.and_, operator.or_, operator.not_, operator.is_})

# What their schemas do not say: they update running statistics, the first ones if the sixth argument has them do it.
_NORMS = frozenset(
    "batch_norm instance_norm native_batch_norm cudnn_batch_norm miopen_batch_norm _batch_norm_impl_index".split()
)
_UPDATES = frozenset(
    "batch_norm_gather_stats batch_norm_gather_stats_with_counts batch_norm_update_stats "
    "fused_moving_avg_obs_fake_quant".split()
)

# Where Python functions are from that change only what their names or arguments say.
_MODULES = frozenset(
    "torch torch.functional torch.nn.functional torch._tensor torch._C._nn torch._C._linalg torch._C._fft "
    "torch._C._special torch._C._functorch torch.amp.autocast_mode torch.nn.attention _operator builtins math".split()
)
_STATE = frozenset("_set_grad_enabled _get_data_attr _log_api_usage_once __get__".split())

# Higher-order ops that are given no graph, and write nothing.
_FUNCTIONAL = frozenset(
    "auto_functionalized auto_functionalized_v2 triton_kernel_wrapper_functional run_and_save_rng_state "
    "run_with_rng_state graphsafe_run_with_rng_state".split()
)


def writes_of(graph: Graph) -> frozenset[Node]:
    """The nodes that change memory, or may."""
    return frozenset(node for node in graph.nodes if is_write(node))


def is_write(node: Node) -> bool:
    """Might it change a tensor that it is given? Of ops, functions, methods and modules; unknown ones might."""
    if node.op == "call_module":
        return True
    if node.op not in ("call_function", "call_method"):
        return False
    if isinstance(node.target, HigherOrderOperator):
        return _writes_inside(node)
    name = name_of(node)
    named = name.endswith("_") and not name.endswith("__") and node.target not in _KEYWORDS
    named |= name in _ASSIGNING_METHODS
    if named or is_mutation(node) or node.target in _ASSIGNMENTS or _updates(node) or _inplace(node):
        return True
    return "out" in node.kwargs or not _is_known(node)


def _writes_inside(node: Node) -> bool:
    """Of a higher-order op: does one of the graphs that it is given write?"""
    owner = node.graph.owning_module
    if name_of(node) in _FUNCTIONAL:
        return False
    named = [i for i in node.all_input_nodes if i.op == "get_attr"]
    found = [operator.attrgetter(str(i.target))(owner) for i in named] if owner is not None else []
    bodies = [body for body in found if isinstance(body, GraphModule)]
    return not bodies or any(writes_of(body.graph) for body in bodies)


def _updates(node: Node) -> bool:
    """Of running statistics."""
    name = name_of(node)
    if name not in _NORMS:
        return name in _UPDATES
    default = node.kwargs.get("training", node.kwargs.get("use_input_stats", name == "instance_norm"))
    return (node.args[5] if len(node.args) > 5 else default) is not False


def _inplace(node: Node) -> bool:
    """As torch.nn.functional has it; max_norm: of an embedding's rows, too."""
    if not inspect.isfunction(node.target):
        return False
    try:
        given = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments
    except (TypeError, ValueError):
        return False
    return bool(given.get("inplace")) or given.get("max_norm") is not None


def _is_known(node: Node) -> bool:
    """Would its name or its arguments say that it writes?"""
    target: Any = node.target
    if isinstance(target, str):
        return hasattr(torch.Tensor, target)
    if isinstance(target, OpOverload):
        return True
    if isinstance(target, OpOverloadPacket):
        return not any(_may_be(node, getattr(target, overload)) for overload in target.overloads())
    of_tensors = getattr(target, "__objclass__", None) in torch.Tensor.__mro__
    return of_tensors or getattr(target, "__module__", None) in _MODULES or name_of(node) in _STATE


def _may_be(node: Node, overload: OpOverload) -> bool:
    """Would the op write, if this is the overload that is called?"""
    written = [x for x in schema_of(overload).arguments if x.is_write]
    return any(not x.kwarg_only or x.name in node.kwargs for x in written)


def between(writes: frozenset[Node], first: Node, last: Node) -> bool:
    """Is anything written from the first node on, before the last?"""
    node = first
    while writes and node is not last:
        if node in writes:
            return True
        node = node.next
    return False
