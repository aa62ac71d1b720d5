"""Preserve torch's thread state, which a failed trace does not restore.

Entering `torch.no_grad()`, `torch.autocast()`, a torch.func transform, forward-mode AD or `sdpa_kernel` changes the
state of the thread, and leaving it restores the state. A trace that fails in between does not leave it, and Dynamo
falls back to eager code that would run in the wrong state. Each function `_restore_x` sets one part of the state.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.attention


@contextmanager
def preserve_thread_state() -> Iterator[None]:
    """Restore torch's thread state at the end of the block, also after an error.

    Dynamo's graphs change state in one node and restore it in a later one, which a failed trace does not reach.
    """
    functorch, hooks = torch._C._functorch, torch._C._autograd
    with ExitStack() as stack:  # calls the callbacks at the end, the last one first
        restore = stack.callback
        restore(torch.set_grad_enabled, torch.is_grad_enabled())
        restore(_restore_attention_backends, _attention_backends())
        restore(_restore_autocast_nesting, _autocast_nesting())
        restore(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        for device in filter(torch.amp.is_autocast_available, torch._C._autocast_supported_devices()):
            restore(torch.set_autocast_dtype, device, torch.get_autocast_dtype(device))
            restore(torch.set_autocast_enabled, device, torch.is_autocast_enabled(device))
        restore(_restore_saved_tensor_hooks, hooks._saved_tensors_hooks_get_disabled_error_message())
        restore(
            functorch.set_single_level_autograd_function_allowed, functorch.get_single_level_autograd_function_allowed()
        )
        restore(functorch.set_inplace_requires_grad_allowed, functorch.get_inplace_requires_grad_allowed())
        restore(torch._C._set_fwd_grad_enabled, torch._C._is_fwd_grad_enabled())
        restore(_restore_forward_mode, _is_forward_mode_open())
        restore(_restore_transforms, functorch.get_dynamic_layer_stack_depth())
        stack.enter_context(torch._C._PreserveDispatchKeyGuard())
        yield


def _restore_transforms(depth: int) -> None:
    """Remove the levels of torch.func transforms above `depth`."""
    if torch._C._functorch.get_dynamic_layer_stack_depth() > depth:
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)


def _restore_forward_mode(was_open: bool) -> None:
    """Close the level of forward-mode AD (`torch.autograd.forward_ad`) if it was not open before."""
    if _is_forward_mode_open() and not was_open:
        torch._C._exit_dual_level(level=0)


def _restore_saved_tensor_hooks(message: str | None) -> None:
    """Enable hooks on saved tensors if the message is None, else disable them with this error message."""
    hooks = torch._C._autograd
    if message is None:
        hooks._saved_tensors_hooks_enable()
    elif hooks._saved_tensors_hooks_get_disabled_error_message() != message:
        hooks._saved_tensors_hooks_disable(message)


def _restore_autocast_nesting(nesting: int) -> None:
    """Close autocast regions until `nesting` of them are open.

    The end of the outermost one clears the cache of cast weights.
    """
    while _autocast_nesting() > nesting:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def _restore_attention_backends(backends: Any) -> None:
    """Enable these backends of attention, in this order of priority."""
    if _attention_backends() != backends:
        torch.nn.attention._sdpa_kernel(backends, set_priority=True)


def _attention_backends() -> Any:
    """Return the enabled backends of attention in their order of priority."""
    return torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)


def _autocast_nesting() -> int:
    """Return the number of open autocast regions. torch returns it only when one is entered or left."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _is_forward_mode_open() -> bool:
    """Return True if a level of forward-mode AD is open.

    torch permits one level, so that entering a second one fails; it has no query.
    """
    try:
        level = torch._C._enter_dual_level()
    except RuntimeError:
        return True
    torch._C._exit_dual_level(level=level)
    return False


@contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Disable hooks on saved tensors inside the block, such as those of a checkpoint around the call.

    The hooks are removed and restored at the end. Adding a hook that does nothing would also disable them, but torch
    forbids torch.func, which the trace may contain, under any hook.
    """
    hooks, removed_hooks = torch._C._autograd, []
    innermost = hooks._top_saved_tensors_default_hooks(True)  # True: also while torch traces
    while innermost is not None:
        removed_hooks.append(innermost)
        hooks._pop_saved_tensors_default_hooks()
        innermost = hooks._top_saved_tensors_default_hooks(True)
    try:
        yield
    finally:
        for pack, unpack in reversed(removed_hooks):
            hooks._push_saved_tensors_default_hooks(pack, unpack)
