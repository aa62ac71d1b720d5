"""``sp::offload`` and ``sp::reload``: a value waits in the host's memory for the backward, on streams of their own.

    h = offload(x); ...; offloaded(h, x)        ...        y = reload(h, device); ...; reloaded(y); reads of y

The first of each pair begins a copy and returns; the second lets the device's own stream wait for it, and is where the
memory of what was copied may be written again: a compiler reuses buffers by what reads them, and knows no streams.
On a CPU the copies are made at once. Pinned buffers come from torch's cache, which rounds them up to powers of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sp_compile.lowering.base.library import opaque

_streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}
_pending_copies: dict[int, torch.cuda.Event] = {}
"""By the address of what is written, from the begin of a copy to the wait for it."""


def _start_copy(to: Tensor, of: Tensor, device: torch.device) -> Tensor:
    """Begin a copy behind all that the device has been given so far. device: the GPU among both."""
    key = device, of.device.type
    way = _streams[key] = _streams.get(key) or torch.cuda.Stream(device)
    way.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(way):
        to.copy_(of, non_blocking=True)
        _pending_copies[to.data_ptr()] = way.record_event()
    return to


def _wait_for_copy(written: Tensor, device: torch.device) -> None:
    """What the device is given from now on runs when the copy is made."""
    torch.cuda.current_stream(device).wait_event(_pending_copies.pop(written.data_ptr()))


@opaque(
    "offload(Tensor x) -> Tensor",
    lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu"),
    replays=False,
)
def offload(x: Tensor) -> Tensor:
    """The value in the host's memory, once ``offloaded`` has returned; until then `x` stays as it is.

    Shapes: any, without gaps -> the same, with the same strides. Bytes: all of x, to the host.
    """
    host = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
    return _start_copy(host, x, x.device) if x.is_cuda else host.copy_(x)


@opaque("offloaded(Tensor(a!) host, Tensor x) -> ()", lambda host, x: None, replays=False)
def offloaded(host: Tensor, x: Tensor) -> None:
    """What follows on the device of x runs when `host` holds it: the last use of x."""
    if x.is_cuda:
        _wait_for_copy(host, x.device)


@opaque(
    "reload(Tensor host, Device device) -> Tensor",
    lambda host, device: torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device),
    replays=False,
)
def reload(host: Tensor, device: torch.device) -> Tensor:
    """The value on a device again, once ``reloaded`` has returned.

    Shapes: any -> the same, with the same strides. Bytes: all of it, from the host.
    """
    x = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
    return _start_copy(x, host, x.device) if x.is_cuda else x.copy_(host)


@opaque("reloaded(Tensor(a!) x) -> ()", lambda x: None, replays=False)
def reloaded(x: Tensor) -> None:
    """What follows on the device runs when `x` is there."""
    if x.is_cuda:
        _wait_for_copy(x, x.device)
