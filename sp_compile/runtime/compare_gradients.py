"""Compare gradients of shared results over the ranks (sp::shared).

A backward on shards takes each row from one copy of the gradient. If the copies differ, the sum of the rows is not the
gradient of any rank, so every rank raises an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.library import opaque
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.collectives.checksums import PIECE_ELEMENTS, checksum_of, start_cpu_copy, summarize
from sp_compile.lowering.comm.communicator import current_communicator
from sp_compile.runtime.control.channel import ControlChannel, channel_of
from sp_compile.runtime.control.message import BACKWARD, Message

from .agreement import require_agreement
from .input_checks import is_on_accelerator


@opaque(
    "shared(Tensor[] xs, str[] names, int n, str group) -> Tensor[]",
    lambda xs, *_: [torch.empty_like(x) for x in xs],
    replays=False,
)
def check_shared_gradients(xs: list[Tensor], names: list[str], n: int, group: str) -> list[Tensor]:
    """Return copies of the gradients of shared results, and check that they are equal on all ranks.

    Shapes: any -> same. Bytes: those of a message; more only for tensors whose bits differ. Backward: none.

    Ranks of other groups are not notified. A rank that waits for this one in a collective of its own backward, as a
    data-parallel neighbor does, waits until the timeout of that group.

    Args:
        xs: Gradients of any shape and floating dtype.
        names: Names of the results, one for each gradient.
        n: Number of ranks of the group.
        group: Name of the group.

    Raises:
        SpError: On every rank of the group, if the gradients differ by more than the rounding of an arbitrary order of
            additions. For tensors on an accelerator the next call of the group raises, so that the CPU does not wait.
    """
    ranks = Ranks(n, group)
    wire, given = channel_of(ranks), dict(zip(enumerate(names), xs, strict=True))
    away = {key: x for key, x in given.items() if wire is not None and is_on_accelerator(x)}
    if wire is not None and away:
        _compare_on_next_call(wire, away)
    here = {key: x for key, x in given.items() if key not in away}
    if here:
        _compare_gradients(ranks, here)
    return [x.clone() for x in xs]


def _compare_on_next_call(wire: ControlChannel, given: Mapping[tuple[int, str], Tensor]) -> None:
    """Schedule the comparison of checksums for the next call, when the device has computed them.

    Args:
        wire: The control channel of the group.
        given: Gradients by number and name of the result.
    """
    found: defaultdict[torch.device, dict[str, Tensor]] = defaultdict(dict)
    for (number, name), x in given.items():
        found[x.device][f"value of gradient {number}, of the result {name}, when it {wire.last}"] = summarize(x)
    wire.later += [(list(each), start_cpu_copy(torch.stack([*each.values()]))) for each in found.values()]


def _compare_gradients(ranks: Ranks, given: Mapping[tuple[int, str], Tensor]) -> None:
    """Raise SpError, on every rank, if the gradients differ.

    Args:
        ranks: The ranks of the group.
        given: Gradients by number and name of the result.
    """
    names = dict.fromkeys(name for _, name in given)
    sums = {f"{key}": str(checksum_of(x).item()) for key, x in given.items()}
    everyone = require_agreement(ranks, Message(BACKWARD, f"the result {', '.join(names)}", fields=sums))
    differ = [key for key in given if len({one.fields[f"{key}"] for one in everyone}) > 1]
    wrong = dict.fromkeys(key[1] for key in differ if not _is_within_rounding(given[key], ranks))
    if wrong:
        raise SpError(
            "SP671",
            f"the ranks of this tensor-parallel group share the result {', '.join(wrong)}, but were given different "
            "gradients of it, which a backward on shards cannot add up.",
        )


def _is_within_rounding(x: Tensor, ranks: Ranks) -> bool:
    """Return True if the copies of the ranks are equal up to the last bits of each row.

    The result is the same on every rank.
    """
    rows = x.reshape(-1, x.shape[-1] if x.ndim else 1)
    off, long = zip(*(_row_norms(part, ranks) for part in rows.split(max(1, PIECE_ELEMENTS // rows.shape[1]))))
    apart, own = torch.cat(off), torch.cat(long)
    eps = torch.finfo(x.dtype).eps * (64 if x.element_size() >= 4 else 1)  # accumulated in 32 bits and rounded once
    allowed = eps * (own + own.max() / 16)  # a row that sums to zero contains only noise
    return bool((apart <= allowed).all() and own.isfinite().all())


def _row_norms(rows: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Return the largest distance to the first copy and the largest norm, for each row."""
    copies = current_communicator().all_gather(rows.contiguous(), ranks.n, ranks.group).view(ranks.n, *rows.shape)
    copies = copies.to(torch.complex128 if rows.is_complex() else torch.float64)
    return (copies - copies[0]).norm(dim=-1).amax(0), copies.norm(dim=-1).amax(0)
