"""What a rank says of its weights and buffers: how they have moved, and a few bytes, on every call; on request, all.

The former does not read them all. Where ranks differ in that, they compare the values in the same call, and only these
decide: a rank may load a checkpoint and hand it to the others, or step its share of the weights before all hand theirs
around.
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
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from sp_compile._compat import versions
from sp_compile.config import Ranks, resolve
from sp_compile.errors import SpError
from sp_compile.lowering.collectives.checksums import is_freed

from .agree import different_work, exchanged, rows_by_rank, saying_why, what_differs
from .control.message import Message
from .fingerprint import digest
from .inputs import local_of

MOVED = "moves of weights"  # fields of a message
BYTES = "bytes of weights"
FIRST = "unknown"  # of moves, on the first call
LOOKED_AT = 8  # weights a call
LOOKS_AWAY = 4  # weights of a device a call, each of which takes launches
SHOWN = 256  # bytes of each
PLAIN = (torch.Tensor, torch.nn.Parameter)

TRAIN_ALIKE = (
    "every rank begins with the same weights and changes them alike. Look for a seed, a checkpoint, a step of the "
    "optimizer or a change of a weight that only some ranks have made"
)

T = TypeVar("T")


def compare_weights(model: torch.nn.Module, mesh: DeviceMesh | None = None, mesh_dim: str | None = None) -> None:
    """Compare all weights and buffers of `model` over the ranks that share its sequence: now, every bit.

    The backend does so by itself on a model's first call, every `check_every` calls, and where a few bytes show a
    drift. This is for what lies between: in front of a checkpoint, behind one that was loaded, while a drift is looked
    for. Every rank of the mesh calls it, at the same place of its program; mesh and mesh_dim are those of the options.
    Of a DTensor each rank's part is compared, unless it is cut up over these ranks. It reads every weight once, and
    waits for the device.

    Raises SpError, on every rank: weights or buffers differ in a value, a shape, a dtype or a name, with the first of
    them and what each rank has; a rank is at another place of its program, or does not come; the model holds nothing
    that could be compared. Where the mesh of one rank alone has no such axis, the others hear of it while they wait.
    """
    with saying_why():
        ranks = resolve(mesh, mesh_dim)
    inner = getattr(model, "_orig_mod", model)
    held = [*inner.named_parameters(), *inner.named_buffers()]
    fields = {name: digest(local_of(x.detach())) for name, x in held if not _is_cut_over(x, ranks)}
    error = "" if fields else f"compare_weights: {type(inner).__name__} holds nothing that these ranks hold alike"
    everyone = exchanged(
        ranks, Message("compares", f"the weights of {type(inner).__name__}", fields=fields, error=error)
    )
    if everyone is None:
        return
    failed = next((one.error for one in everyone if one.error), "") or different_work(everyone)
    names = dict.fromkeys(name for one in everyone for name in one.fields)
    other = [name for name in names if len({one.fields.get(name) for one in everyone}) > 1]
    raise SpError(
        failed
        or what_differs(
            "the ranks of this group hold different weights",
            TRAIN_ALIKE,
            rows_by_rank([one.fields for one in everyone], other),
        )
    )


def _is_cut_over(x: torch.Tensor, ranks: Ranks) -> bool:
    """Is it a DTensor of which each of these ranks has another part?"""
    if not isinstance(x, DTensor) or ranks.process_group is None:
        return False
    ours = {*dist.get_process_group_ranks(ranks.process_group)}
    axes = [i for i, placement in enumerate(x.placements) if not placement.is_replicate()]
    return any(len(ours.intersection(dist.get_process_group_ranks(x.device_mesh.get_group(i)))) > 1 for i in axes)


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


def must_compare(everyone: Sequence[Message], apart: Counter[tuple[str, int]]) -> bool:
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
