"""Preserve torch's thread state, which a failed trace does not restore."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def preserve_thread_state() -> Iterator[None]:
    """Restore torch's thread state at the end of the block, also after an error.

    Dynamo's graphs change state in one node and restore it in a later one, which a failed trace does not reach: grad
    mode, autocast with the nesting that clears its cache, transforms of torch.func, forward mode, disabled hooks on
    saved tensors, the backends of attention.
    """
    functorch, hooks = torch._C._functorch, torch._C._autograd
    devices = [d for d in torch._C._autocast_supported_devices() if torch.amp.is_autocast_available(d)]
    grad, forward = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()
    casts = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
    cache, nesting = torch.is_autocast_cache_enabled(), _autocast_nesting()
    depth, dual = functorch.get_dynamic_layer_stack_depth(), _is_forward_mode_open()
    in_place, single = (
        functorch.get_inplace_requires_grad_allowed(),
        functorch.get_single_level_autograd_function_allowed(),
    )
    message = hooks._saved_tensors_hooks_get_disabled_error_message()
    attention = _attention_state()
    try:
        with torch._C._PreserveDispatchKeyGuard():
            yield
    finally:
        if functorch.get_dynamic_layer_stack_depth() > depth:
            functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        if _is_forward_mode_open() and not dual:
            torch._C._exit_dual_level(level=0)
        torch._C._set_fwd_grad_enabled(forward)
        functorch.set_inplace_requires_grad_allowed(in_place)
        functorch.set_single_level_autograd_function_allowed(single)
        if message is None:
            hooks._saved_tensors_hooks_enable()
        elif hooks._saved_tensors_hooks_get_disabled_error_message() != message:
            hooks._saved_tensors_hooks_disable(message)
        for device, enabled, dtype in casts:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(cache)
        while _autocast_nesting() > nesting:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
        if _attention_state() != attention:
            torch.nn.attention._sdpa_kernel(*attention)
        torch.set_grad_enabled(grad)


def _autocast_nesting() -> int:
    """Return the number of open autocast regions, which only entering one returns."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _is_forward_mode_open() -> bool:
    """Return True if a level of forward mode is open. There is at most one; only entering one shows it."""
    try:
        level = torch._C._enter_dual_level()
    except RuntimeError:
        return True
    torch._C._exit_dual_level(level=level)
    return False


def _attention_state() -> tuple[Any, bool]:
    """Return the enabled attention backends in order, as arguments of `_sdpa_kernel`."""
    return torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True), True


@contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Disable hooks on saved tensors inside the block, such as those of a checkpoint around the call.

    The hooks are removed and restored: another hook on top of them would forbid torch.func inside of the trace.
    """
    hooks, removed = torch._C._autograd, []
    while (top := hooks._top_saved_tensors_default_hooks(True)) is not None:
        removed.append(top)
        hooks._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(removed):
            hooks._push_saved_tensors_default_hooks(pack, unpack)
