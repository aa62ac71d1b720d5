"""CPU tensors that say they are on the absent GPU: bodies of opaque operators run on them as there, and are watched.

Operators compute in their place on the CPU, kernels of attention too, so results can be compared. What is seen is what
the host does: which attention kernels it launches, and where it waits for the device to tell it a value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from support.cuda.attention import KERNELS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)

WAITS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.is_nonzero.default, aten.equal.default}
"""The host waits for a value, or for a size; so does a copy that blocks, and one from memory that is not pinned."""
PRODUCTS = {aten.mm.default, aten.bmm.default, aten.baddbmm.default, aten.addmm.default}


_pinned: dict[int, Tensor] = {}
"""Memory of the host that the device could read, by its address; it stays."""


def _pin(x: Tensor, device: Any = None) -> Tensor:
    copy = x.clone()
    _pinned[copy.data_ptr()] = copy
    return copy


HERE = KERNELS | {aten._pin_memory.default: _pin, aten.is_pinned.default: lambda x, *_: x.data_ptr() in _pinned}
"""What gives the results of what a CPU cannot do."""


class Borrowed(Tensor):
    """A tensor of the absent GPU, with the values of a CPU tensor."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> Borrowed:
        of = {"strides": values.stride(), "storage_offset": values.storage_offset(), "dtype": values.dtype}
        self = Tensor._make_wrapper_subclass(cls, values.shape, device=CUDA, **of)
        self.values = values
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Borrowed({self.values!r})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@dataclass
class Seen:
    """waits: for the device, by operator. kernels: of attention that are named. products: matrix products of others."""

    waits: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    products: int = 0


class Watch(TorchDispatchMode):
    """Inside, tensors that are made on the GPU are borrowed, and what the host does is written to `seen`."""

    def __init__(self, glue: Mapping[Any, Callable[..., Any]] | None = None) -> None:
        """glue: Python of torch's that takes the place of a kernel, given tensors of the GPU."""
        super().__init__()
        self.seen = Seen()
        self.glue = glue or {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if func in WAITS or (func is aten._to_copy.default and _blocks(args[0], kwargs)) or _copy_blocks(func, *args):
            self.seen.waits.append(name)
        elif func in KERNELS:
            self.seen.kernels.append(name)
        elif func in PRODUCTS:
            self.seen.products += 1
        if func in self.glue:
            with self:
                return self.glue[func](*args, **kwargs)
        return _run(func, args, kwargs)


def borrow(x: Any) -> Any:
    return Borrowed(x) if isinstance(x, Tensor) else x


def give_back(x: Any) -> Any:
    return x.values if isinstance(x, Borrowed) else x


def _blocks(x: Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether the host waits for a copy."""
    device = torch.device(kwargs.get("device") or x.device)
    if device.type == x.device.type:
        return False
    return not kwargs.get("non_blocking") or (device.type == "cuda" and x.data_ptr() not in _pinned)


def _copy_blocks(func: Any, to: Any = None, of: Any = None, non_blocking: bool = False, *_: Any) -> bool:
    """Whether the host waits for a copy into memory that is there: not if it may go on, and its side is pinned."""
    if func is not aten.copy_.default or to.device == of.device:
        return False
    host = to if to.device.type == "cpu" else of
    return not non_blocking or host.data_ptr() not in _pinned


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """On the CPU. A result is on the GPU if it was made there, or of what is there."""
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    there = any(isinstance(x, Borrowed) for x in leaves)
    device = kwargs.get("device")
    if device is not None:
        there = torch.device(device).type == "cuda"
        kwargs = kwargs | ({"device": "cpu"} if there else {})
    assert func not in KERNELS or all(isinstance(x, Borrowed) for x in leaves if isinstance(x, Tensor))
    pinned = kwargs.get("pin_memory")
    given, named = tree_map(give_back, (args, kwargs | ({"pin_memory": False} if pinned else {})))
    out = HERE.get(func, func)(*given, **named)
    if pinned:
        _pinned[out.data_ptr()] = out
    if not there:
        return out
    if func._schema.is_mutable:
        return return_and_correct_aliasing(func, args, kwargs, tree_map(borrow, out))
    return tree_map(borrow, out)
