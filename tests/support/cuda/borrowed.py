"""CPU tensors that report the absent GPU as their device: opaque operators run on them as on a GPU, and are recorded.

Operators and attention kernels compute on the CPU instead, so results can be compared. The attention kernels that the
host launches and its waits for values of the device are recorded.
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
"""Operators that wait for a value or a size. Blocking copies and copies from unpinned memory wait, too."""
PRODUCTS = {aten.mm.default, aten.bmm.default, aten.baddbmm.default, aten.addmm.default}


_pinned: dict[int, Tensor] = {}
"""Pinned memory of the host by its address; it is never freed."""


def _pin(x: Tensor, device: Any = None) -> Tensor:
    copy = x.clone()
    _pinned[copy.data_ptr()] = copy
    return copy


HERE = KERNELS | {aten._pin_memory.default: _pin, aten.is_pinned.default: lambda x, *_: x.data_ptr() in _pinned}
"""Implementations of operators that a CPU does not have."""


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
    """Recorded operations of the host."""

    waits: list[str] = field(default_factory=list)  # operators that wait for the device
    kernels: list[str] = field(default_factory=list)  # attention kernels
    products: int = 0  # other matrix products


class Watch(TorchDispatchMode):
    """A mode in which new tensors of the GPU are borrowed, and operations of the host are recorded in `seen`."""

    def __init__(self, glue: Mapping[Any, Callable[..., Any]] | None = None) -> None:
        """glue: Python functions of torch that replace a kernel and take tensors of the GPU."""
        super().__init__()
        self.seen = Seen()
        self.glue = glue or {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if (
            func in WAITS
            or (func is aten._to_copy.default and _is_blocking(args[0], kwargs))
            or _is_blocking_copy(func, *args)
        ):
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


def _is_blocking(x: Tensor, kwargs: dict[str, Any]) -> bool:
    """Return True if the host waits for a copy."""
    device = torch.device(kwargs.get("device") or x.device)
    if device.type == x.device.type:
        return False
    return not kwargs.get("non_blocking") or (device.type == "cuda" and x.data_ptr() not in _pinned)


def _is_blocking_copy(func: Any, to: Any = None, of: Any = None, non_blocking: bool = False, *_: Any) -> bool:
    """Return True if the host waits for a copy into a tensor; a non-blocking copy of pinned memory does not wait."""
    if func is not aten.copy_.default or to.device == of.device:
        return False
    host = to if to.device.type == "cpu" else of
    return not non_blocking or host.data_ptr() not in _pinned


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the CPU. Results are borrowed if an operand or the requested device is the GPU."""
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
