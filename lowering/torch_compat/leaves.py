"""Trace programs that mark an intermediate as a leaf of autograd, without a graph break.

    h = x[:, None]                 # x: an input without a gradient
    h.requires_grad = True         # models of audio; `enable_input_require_grads()` calls h.requires_grad_(True)
    return conv(h)

Such a mark lets checkpoints that check their inputs find one with a gradient. Nothing is before the leaf, so that no
other gradient changes, and nothing outside of the graph can read the leaf's own unless it is a result. Dynamo does not
trace the assignment, and traces the method only if no result depends on the leaf. Here it traces both, unless the leaf
or a value that has a gradient only by the mark is a result: AOTAutograd drops the mark, so that the result would lack
the gradient. Dynamo then breaks the graph, as without this module.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables import TensorVariable, builtin
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from .folded_reads import find_backend

_backends: list[Callable[..., Any]] = []  # for which Dynamo traces marks


def trace_leaves(backend: Callable[..., Any]) -> None:
    """Make Dynamo trace leaves that programs of this backend mark.

    Dynamo has no hook for this, so the first call wraps two of its functions. Older versions of torch than 2.13, which
    do not trace `requires_grad_()`, are unchanged.

    Args:
        backend: The backend, a function; for a method, the function of its class.

    Returns:
        None.
    """
    setter: Any = getattr(builtin, "SetAttrBuiltinVariable", None)
    check = "_check_requires_grad_intermediate_outputs"
    if not _backends and hasattr(setter, "_call_setattr") and hasattr(OutputGraph, check):
        setter._call_setattr = _mark_leaves(setter._call_setattr)
        setattr(OutputGraph, check, _check_results(getattr(OutputGraph, check)))
    _backends.append(backend)


def _mark_leaves(assign: Callable[..., Any]) -> Callable[..., Any]:
    """Return Dynamo's function that sets an attribute, which traces `x.requires_grad = True` as the method."""

    @functools.wraps(assign)
    def set_attribute(self: Any, tx: Any, obj: Any, name: Any, value: Any) -> Any:
        """Set an attribute, and return the value."""
        # In a region of its own, such as that of a checkpoint, Dynamo does not find leaves that its results depend on.
        can_trace = isinstance(obj, TensorVariable) and len(tx.output.tracers) == 1 and not obj.source
        is_mark = can_trace and all(x.is_python_constant() for x in (name, value))
        is_mark = is_mark and (name.as_python_constant(), value.as_python_constant()) == ("requires_grad", True)
        if is_mark and _can_have_gradient(obj.as_proxy().node) and find_backend(tx)[0] in _backends:
            obj.call_method(tx, "requires_grad_", [value], {})
            return value
        return assign(self, tx, obj, name, value)

    return set_attribute


def _can_have_gradient(node: Node) -> bool:
    """Return True for a tensor with a dtype of gradients."""
    example = node.meta.get("example_value")
    return isinstance(example, Tensor) and (example.is_floating_point() or example.is_complex())


def _check_results(check: Callable[..., Any]) -> Callable[..., Any]:
    """Return Dynamo's check that no result depends on a marked leaf, for results with a gradient by the mark alone."""

    @functools.wraps(check)
    def check_results(self: Any, results: list[Any], tx: Any) -> None:
        """Raise an exception on which Dynamo breaks the graph at the mark."""
        if find_backend(tx)[0] in _backends:
            leaves = {x.as_proxy().node for x in self.leaf_var_creation_order if isinstance(x, TensorVariable)}
            others = _nodes_with_gradient(self.graph, leaves) if leaves else set()
            results = [x for x in results if not (isinstance(x, TensorVariable) and x.as_proxy().node in others)]
        check(self, results, tx)

    return check_results


def _nodes_with_gradient(graph: Any, leaves: set[Node]) -> set[Node]:
    """Return the nodes whose values would have a gradient if nothing were marked."""
    found = set[Node]()
    for node in graph.nodes:
        has_source = node.op in ("placeholder", "get_attr") or not found.isdisjoint(node.all_input_nodes)
        examples = tree_leaves(node.meta.get("example_value"))
        if has_source and node not in leaves and any(isinstance(x, Tensor) and x.requires_grad for x in examples):
            found.add(node)
    return found
