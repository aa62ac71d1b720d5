"""What a rank says of its weights and buffers on every call: how they have moved since the last one, and a few bytes.

Neither reads them all. Where ranks differ in that, they compare the values in the same call, and only these decide: a
rank may load a checkpoint and hand it to the others, or step its share of the weights before all hand theirs around.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy
import torch

from sp_compile._compat import versions
from sp_compile.lowering.collectives.checksums import is_freed

from .message import Message

MOVED = "moves of weights"  # fields of a message
BYTES = "bytes of weights"
FIRST = "unknown"  # of moves, on the first call
LOOKED_AT = 8  # weights a call
LOOKS_AWAY = 4  # weights of a device a call, each of which takes launches
SHOWN = 256  # bytes of each
PLAIN = (torch.Tensor, torch.nn.Parameter)

T = TypeVar("T")


@dataclass(eq=False)
class Moves:
    """How the weights of one program move from call to call.

    counted: by model, how often each was changed in place up to the last call.
    """

    counted: dict[int, numpy.ndarray[Any, Any]] = field(default_factory=dict)

    def fields(self, weights: Sequence[torch.Tensor], model: int, number: int) -> dict[str, str]:
        """What to say of them on the call of this number."""
        some = (some_bytes(x, number) for x in in_turn(weights, LOOKED_AT, number))
        return {MOVED: self._moved(weights, model), BYTES: hashlib.sha256(b"".join(some)).hexdigest()[:16]}

    def _moved(self, weights: Sequence[torch.Tensor], model: int) -> str:
        now, before = versions(weights), self.counted.get(model)
        self.counted[model] = now
        return FIRST if before is None else hashlib.sha256(now - before).hexdigest()[:16]


def suspected(everyone: Sequence[Message], apart: Counter[tuple[str, int]]) -> bool:
    """Do ranks have to compare the values now? They all get the same answer.

    apart: how often they have moved the weights of each program in different ways. Ranks that do and have the same
    values in the end may do so on every step: they are asked on the 1st, 2nd, 4th, 8th, ... of these.
    """
    seen, moved = (len({one.fields.get(name) for one in everyone}) for name in (BYTES, MOVED))
    program = everyone[0].subject, everyone[0].model
    apart[program] += moved > 1
    return seen > 1 or (moved > 1 and apart[program].bit_count() == 1)


def in_turn(things: Sequence[T], most: int, number: int) -> Sequence[T]:
    """Those of them that have their turn on the call of this number."""
    begin = number * most % max(1, len(things))
    return (
        things
        if len(things) <= most
        else [*things[begin : begin + most], *things[: max(0, begin + most - len(things))]]
    )


def some_bytes(x: torch.Tensor, number: int) -> bytes:
    """Some of a tensor's bytes, on the next call the next ones; of one that is not contiguous its first element's.

    None of one that does not lie in the CPU's memory as it is, or whose memory was freed.
    """
    if type(x) not in PLAIN or not x.is_cpu or x.layout != torch.strided or not x.numel() or is_freed(x):
        return b""
    whole = x.nbytes if x.is_contiguous() else x.element_size()
    place = number * SHOWN % whole
    return ctypes.string_at(x.data_ptr() + place, min(SHOWN, whole - place))
