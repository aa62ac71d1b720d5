"""Access torch's private operators and schemas.

Higher-order operators have sub-graphs as arguments, such as the body of a scan. A packet (torch.ops.aten.add) is the
set of overloads of an operator (torch.ops.aten.add.Tensor). The other names are the functions that Dynamo calls in its
graphs to change grad mode, autocast and the backend of attention.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.attention
from torch._functorch.autograd_function import autograd_function_apply
from torch._higher_order_ops.associative_scan import associative_scan_op, generic_associative_scan
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._higher_order_ops.flex_attention import flex_attention as flex_attention_op
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch._higher_order_ops.scan import scan_op
from torch._higher_order_ops.wrap import (
    tag_activation_checkpoint,
    wrap,
    wrap_activation_checkpoint,
    wrap_with_autocast,
    wrap_with_set_grad_enabled,
)
from torch._ops import HigherOrderOperator, OpOverload
from torch.amp.autocast_mode import _enter_autocast as enter_autocast
from torch.amp.autocast_mode import _exit_autocast as exit_autocast
from torch.autograd.grad_mode import _enter_inference_mode as enter_inference_mode
from torch.autograd.grad_mode import _exit_inference_mode as exit_inference_mode
from torch.utils._sympy.functions import FloorDiv, Max

try:
    from torch._higher_order_ops.register_hook import register_hook_op
except ImportError:  # 2.11 and 2.12: Dynamo writes a hook as an autograd function
    register_hook_op = None

try:
    import torch.nn.attention.varlen  # registers the operator

    varlen_attention: Any = torch.ops.torch_attn._varlen_attn.default
except (ImportError, AttributeError):
    varlen_attention = None

set_grad_enabled = torch._C._set_grad_enabled  # the function in Dynamo's graphs

# Calls that change Python state around attention. Dynamo keeps them in its graph; dispatchers do not see them.
PYTHON_STATE_CALLS = frozenset({torch.nn.attention._backend_from_string, torch.nn.attention._sdpa_kernel})


def active_flash_attention() -> str:
    """Return the name of the flash attention that the user has activated, or "" for torch's own.

    An example is "FA3". It replaces the kernels of aten's flash attention ops.
    """
    get_name = getattr(torch.nn.attention, "current_flash_attention_impl", None)  # exists from 2.11 or 2.12 on
    if get_name is None:
        return ""
    return get_name() or ""  # torch returns None for its own


def schema_of(op: OpOverload) -> Any:
    """Return the schema of an operator: arguments, returns, is_mutable."""
    return op._schema


def namespace_of(target: Any) -> str:
    """Return the namespace of an operator or packet, such as `aten`; "" for other values."""
    return getattr(target, "namespace", "") or str(getattr(target, "_qualified_op_name", "")).partition("::")[0]


def has_derivative(target: Any) -> bool:
    """Return True if autograd may differentiate a call of an operator or function.

    Operators outside of torch need a registration: a kernel for the dispatch key Autograd.
    """
    if not isinstance(target, OpOverload) or namespace_of(target) in ("aten", "prims", "_c10d_functional"):
        return True
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has_kernel(target.name(), key) for key in ("Autograd", "CompositeImplicitAutograd"))


def has_autocast_kernel(op: OpOverload, device_type: str) -> bool:
    """Return True if autocast changes the dtype in which `op` computes on this type of device.

    False for devices without autocast.
    """
    return torch.amp.is_autocast_available(device_type) and torch._C._dispatch_has_kernel_for_dispatch_key(
        op.name(), f"Autocast{device_type.upper()}"
    )


@contextmanager
def enable_losses_on_meta() -> Iterator[None]:
    """Compute nll_loss by nll_loss_forward on the meta device inside the block, and nll_loss2d likewise, for dry runs.

    Autograd has the derivative of nll_loss_forward. Without it, tested on 2.13, AOTAutograd records zeros as the
    gradient of the loss on this device, so that the joint graph has no backward.
    """
    key = torch._C.DispatchKey.AutogradMeta
    aten: Any = torch.ops.aten
    # loss -> the op with a derivative that computes (loss, total weight)
    forwards = {aten.nll_loss.default: aten.nll_loss_forward, aten.nll_loss2d.default: aten.nll_loss2d_forward}
    added_ops = [op for op in forwards if key not in op.py_kernels]
    for op in added_ops:
        op.py_kernels[key] = _take_first_result(forwards[op])
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op in added_ops:
            del op.py_kernels[key]
            op._dispatch_cache.clear()


def _take_first_result(forward: Any) -> Any:
    """Return the function that calls `forward` and drops the second result, the total weight."""

    def run(x: Any, y: Any, weight: Any = None, reduction: int = 1, ignore_index: int = -100) -> Any:
        """Return the loss without the total weight."""
        return forward(x, y, weight, reduction, ignore_index)[0]

    return run
