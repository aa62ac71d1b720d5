"""Trace the operations of a program compiled for a GPU, and its memory over time.

A wrapper of Inductor is run on fake tensors: its allocations, operator calls, kernel launches and the lifetime of each
value are those of the GPU; only numbers are missing. Allocations within opaque operators are not traced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAIT = torch.ops._c10d_functional.wait_tensor.default
SILENT = {torch.ops.aten.as_strided.default, torch.ops.aten.detach.default, torch.ops.prim.device.default}
"""Operators of a wrapper's checks and views."""
KERNEL, PRODUCT = "kernel", "product"
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}


@dataclass
class Trace:
    """Operations of one rank in order, and the peak of its values.

    Inputs of a forward belong to the caller and do not count; saved values count in a backward until they are freed.
    """

    events: list[str] = field(default_factory=list)
    peak: int = 0  # bytes
    at: str = ""  # event of the peak
    alive: dict[str, int] = field(default_factory=dict)  # bytes at the peak by their producer
    buffers: list[list[int]] = field(default_factory=list)  # shapes of the allocations for kernels

    def text(self) -> str:
        """Return one event a line; runs of kernels and products are counted."""
        lines = []
        for event, same in groupby(self.events):
            count = len(list(same))
            lines += [event if count == 1 else f"{event} x {count}"] if event in (KERNEL, PRODUCT) else [event] * count
        return "\n".join(lines)

    def count(self, *beginnings: str) -> int:
        """Return the number of events that begin with one of the texts."""
        return sum(event.startswith(beginnings) for event in self.events)


class Tracer(TorchDispatchMode):
    """A mode that traces operators. given: (label, tensor) pairs that are in memory at the start."""

    def __init__(self, given: Iterable[tuple[str, Tensor]] = ()) -> None:
        super().__init__()
        self.trace = Trace()
        self._live: dict[int, _Storage] = {}
        self._exchanges = 0
        for label, x in given:
            self._remember(x, label)

    def launch(self) -> None:
        """A Triton kernel of Inductor's."""
        self.trace.events.append(KERNEL)
        self._weigh(KERNEL)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._forget()  # before the result reuses freed memory
        # A wait returns a new fake tensor; on a GPU it is the same.
        result = args[0] if func is WAIT else func(*args, **(kwargs or {}))
        if func in SILENT:
            return result
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        event = self._event(func, args, kwargs or {}, made)
        for x in made:
            self._remember(x, event or f"buffer of {_shape(x)}")
        if event:
            self.trace.events.append(event)
        self._weigh(event or "allocation")
        return result

    def _forget(self) -> None:
        self._live = {key: known for key, known in self._live.items() if not known.alive.expired()}

    def _remember(self, x: Tensor, label: str, exchange: int | None = None) -> None:
        if x.device.type != "cuda":
            return  # the host's
        storage = x.untyped_storage()
        self._live.setdefault(key_of(x), _Storage(StorageWeakRef(storage), label, storage.nbytes(), exchange))

    def _weigh(self, event: str) -> None:
        self._forget()
        total = sum(known.size for known in self._live.values())
        if total > self.trace.peak:
            sizes: Counter[str] = Counter()
            for known in self._live.values():
                sizes[known.label] += known.size
            self.trace.peak, self.trace.at, self.trace.alive = total, event, dict(sizes.most_common())

    def _event(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], made: list[Tensor]) -> str:
        """Return the line of an operator, "" for operators that are not shown."""
        namespace, name = func._schema.name.split("::")
        if func is WAIT:
            return f"wait {self._arrived(args)[0]}"
        if namespace == "_c10d_functional":
            self._exchanges += 1
            event = f"{self._exchanges} = {str(args[-1]).partition('/')[2] or name.strip('_')} {_shape(made[0])}"
            self._live.pop(key_of(made[0]), None)  # memory that is reduced in place belongs to the exchange
            self._remember(made[0], event, self._exchanges)
            return event
        of = f" of {', '.join(map(str, self._arrived(args)))}" if self._arrived(args) else ""
        if namespace == "sp":
            named = dict(zip((a.name for a in func._schema.arguments), args)) | kwargs
            step = f" step {named['k_span'][3]}" if named.get("k_span") else ""
            return f"{name}{step}{of}"
        if namespace == "aten" and name in PRODUCTS:
            return PRODUCT
        if func is torch.ops.aten.empty_strided.default:
            self.trace.buffers.append(list(made[0].shape))
            return ""
        return "" if name == "empty" else name + of

    def _arrived(self, args: Sequence[Any]) -> list[int]:
        """Return the exchanges whose results an operator reads."""
        known = [self._live.get(key_of(x)) for x in tree_leaves(args) if isinstance(x, Tensor)]
        return list(dict.fromkeys(one.exchange for one in known if one is not None and one.exchange is not None))


class _Storage(NamedTuple):
    """Memory of a trace. exchange: number of the exchange that fills it."""

    alive: StorageWeakRef
    label: str
    size: int
    exchange: int | None


def key_of(x: Tensor) -> int:
    """Return the address of a tensor's storage object."""
    return int(x.untyped_storage()._cdata)


def _shape(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
