"""What one rank hands to all others of a replica, and what is agreed on by all ranks of a mesh, axis by axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.runtime.agreement import all_gather_messages
from sp_compile.runtime.control.channel import channel_of
from sp_compile.runtime.control.message import Message

from .batch_codec import decode_batch, view_as_bytes

Parcel = tuple[bytes, list[torch.Tensor]]
"""A batch as `packed` makes it."""


def spread(
    axes: Sequence[Ranks],
    mine: Message,
    judge: Callable[[Sequence[Message]], SpError | None],
    merge: Callable[[Sequence[Message]], Mapping[str, str]] | None = None,
) -> Mapping[str, str]:
    """Say `mine` along one axis after the other, so that what it comes to is the same on all ranks of the mesh.

    judge: the error of ranks that sent these messages; None without one. merge: what follows from what they said, for
    the next axis; None: nothing, they have to say the same. Returns the fields in the end. Raises SpError on all ranks.
    """
    for ranks in axes:
        everyone = all_gather_messages(ranks, mine) if ranks.exchanges else None
        if everyone is None:
            continue
        problem = judge(everyone)
        if problem is not None:
            mine = replace(mine, error=problem)
        elif merge is not None:
            mine = replace(mine, fields=merge(everyone))
    if mine.error is not None:
        raise mine.error
    return mine.fields


def handed_on(axes: Sequence[Ranks], parcel: Parcel | None, number: int) -> Any:
    """The batch of the rank that is the first on all axes, on every rank. parcel: there, what it hands on.

    Two broadcasts an axis and one for each tensor. Whoever has no batch yet when an axis has its turn hands on nothing.
    """
    saying = Message("hands on", "a batch", number)
    for wire in filter(None, map(channel_of, axes)):
        size = torch.tensor([len(parcel[0]) if parcel is not None else 0])
        wire.broadcast(view_as_bytes(size), 0, saying)
        if not size:
            continue
        text = (
            torch.frombuffer(bytearray(parcel[0]), dtype=torch.uint8)
            if parcel
            else torch.empty(int(size), dtype=torch.uint8)
        )
        wire.broadcast(text, 0, saying)
        if parcel is None:
            told = text.numpy().tobytes()
            parcel = (told, decode_batch(told)[1])
        for tensor in filter(torch.Tensor.numel, parcel[1]):
            wire.broadcast(view_as_bytes(tensor), 0, saying)
    assert parcel is not None
    batch, tensors = decode_batch(parcel[0])
    for mine, sent in zip(tensors, parcel[1], strict=True):
        mine.copy_(sent)
    return batch
