"""Offload activations to host memory and reload them for the backward, on separate streams.

    h = offload(x); ...; offloaded(h, x)        ...        y = reload(h, device); ...; reloaded(y); reads of y

The first operator of each pair starts a copy and returns. The second makes the device's current stream wait for the
copy. From there on the memory of the source may be reused: a compiler reuses buffers by their readers, and is not aware
of streams. On a CPU the copies are synchronous. Pinned buffers come from torch's cache, which rounds sizes up to powers
of two.
"""

import torch
from torch import Tensor

from sp_compile.lowering.base.library import opaque

_streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}
_pending_copies: dict[int, torch.cuda.Event] = {}  # events of running copies, by the address of their target


def _start_copy(target: Tensor, source: Tensor, device: torch.device) -> Tensor:
    """Start a copy on a separate stream, after all work queued on the device so far, and return its target.

    There is one stream per device and direction. `_wait_for_copy` waits for the copy.

    Args:
        target: Target of the copy.
        source: Source of the copy, of equal shape and dtype.
        device: The GPU among the two devices.
    """
    key = device, source.device.type  # the type of the source's device is the direction of the copy
    if key not in _streams:
        _streams[key] = torch.cuda.Stream(device)
    stream = _streams[key]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        _pending_copies[target.data_ptr()] = stream.record_event()
    return target


def _wait_for_copy(written: Tensor, device: torch.device) -> None:
    """Make the current stream of the device wait for the copy whose target is `written`."""
    torch.cuda.current_stream(device).wait_event(_pending_copies.pop(written.data_ptr()))


@opaque(
    "offload(Tensor x) -> Tensor",
    lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu"),
    replays=False,
)
def offload(x: Tensor) -> Tensor:
    """Start to copy a tensor to host memory.

    Shapes: any, without gaps in memory -> same, with the same strides. Bytes: all of x, to the host. The result is
    valid after ``offloaded``; until then `x` must not change.
    """
    host = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
    return _start_copy(host, x, x.device) if x.is_cuda else host.copy_(x)


@opaque("offloaded(Tensor(a!) host, Tensor x) -> ()", lambda host, x: None, replays=False)
def offloaded(host: Tensor, x: Tensor) -> None:
    """Make the device of x wait for the copy of x to `host`, which ``offload`` started. This is the last use of x."""
    if x.is_cuda:
        _wait_for_copy(host, x.device)


@opaque(
    "reload(Tensor host, Device device) -> Tensor",
    lambda host, device: torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device),
    replays=False,
)
def reload(host: Tensor, device: torch.device) -> Tensor:
    """Start to copy a tensor from host memory to a device.

    Shapes: any -> same, with the same strides. Bytes: all of it, from the host. The result is valid after ``reloaded``.
    """
    x = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
    return _start_copy(x, host, x.device) if x.is_cuda else x.copy_(host)


@opaque("reloaded(Tensor(a!) x) -> ()", lambda x: None, replays=False)
def reloaded(x: Tensor) -> None:
    """Make the device of x wait for the copy to x, which ``reload`` started."""
    if x.is_cuda:
        _wait_for_copy(x, x.device)
