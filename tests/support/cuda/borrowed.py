"""CPU tensors that say they are on the absent GPU: bodies of opaque operators run on them as there, and are watched.

Operators compute in their place on the CPU, kernels of attention too, so results can be compared. What is seen is what
the host does: which attention kernels it launches, and where it waits for the device to tell it a value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)

WAITS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.is_nonzero.default, aten.equal.default}
"""The host waits for a value, or for a size; so does a copy to the CPU that blocks."""
PRODUCTS = {aten.mm.default, aten.bmm.default, aten.baddbmm.default, aten.addmm.default}


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

    def __init__(self) -> None:
        super().__init__()
        self.seen = Seen()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if func in WAITS or (func is aten._to_copy.default and _blocks(kwargs)):
            self.seen.waits.append(name)
        elif func in KERNELS:
            self.seen.kernels.append(name)
        elif func in PRODUCTS:
            self.seen.products += 1
        return _run(func, args, kwargs)


def borrow(x: Any) -> Any:
    return Borrowed(x) if isinstance(x, Tensor) else x


def give_back(x: Any) -> Any:
    return x.values if isinstance(x, Borrowed) else x


def _blocks(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("device") == torch.device("cpu") and not kwargs.get("non_blocking")


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """On the CPU. A result is on the GPU if it was made there, or of what is there."""
    there = any(isinstance(x, Borrowed) for x in torch.utils._pytree.tree_leaves((args, kwargs)))
    device = kwargs.get("device")
    if device is not None:
        there = torch.device(device).type == "cuda"
        kwargs = kwargs | ({"device": "cpu"} if there else {})
    given, named = tree_map(give_back, (args, kwargs))
    out = KERNELS.get(func, func)(*given, **named)
    if not there:
        return out
    if func._schema.is_mutable:
        return return_and_correct_aliasing(func, args, kwargs, tree_map(borrow, out))
    return tree_map(borrow, out)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, debug: bool = False, **named: Any
) -> tuple[Any, ...]:
    """FlashAttention's results, by the CPU's kernel."""
    assert not debug
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout_p, is_causal, **named)
    return out, lse, None, None, q.shape[2], k.shape[2], torch.zeros(2), torch.zeros(()), torch.zeros(())


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, _q: Any, _k: Any, _most_q: int,
    _most_k: int, dropout_p: float, is_causal: bool, _seed: Tensor, _offset: Tensor, **named: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Its gradients, by the CPU's kernel."""
    heads = k.shape[1]
    k, v = (x.repeat_interleave(q.shape[1] // heads, 1) for x in (k, v))
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, dropout_p, is_causal, **named
    )
    return dq, *(x.unflatten(1, (heads, -1)).sum(2) for x in (dk, dv))


KERNELS: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention.default: _forward,
    aten._scaled_dot_product_flash_attention_backward.default: _backward,
}
"""Kernels of a GPU that attention is, and what gives their results here."""
