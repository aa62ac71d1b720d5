"""sp::shared: gradients that ranks have to be given alike, for a backward on shards takes each row of one copy.

Where the ranks' copies differ the sum of the rows would be nobody's gradient, so that is an error on all of them.
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
from sp_compile.runtime.control.message import BACKWARD, Field, FieldKind, Message

from .agreement import all_gather_messages, describe_operation_mismatch
from .input_checks import is_on_accelerator


@opaque(
    "shared(Tensor[] xs, str[] names, int n, str group) -> Tensor[]",
    lambda xs, *_: [torch.empty_like(x) for x in xs],
    replays=False,
)
def check_shared_gradients(xs: list[Tensor], names: list[str], n: int, group: str) -> list[Tensor]:
    """Copies of gradients of shared results, once the ranks have found theirs equal. names: of the results.

    Shapes: any -> same. Bytes: those of a message; more only for tensors whose bits differ. Backward: none.
    Raises SpError on every rank of the group if they differ by more than rounding, as kernels that add in any order
    leave it; the next call of the group does for those of a device, which nobody waits for. Ranks of other groups are
    not told: one that waits for this rank in an exchange of its own backward, as data-parallel neighbours do, waits
    until that group's timeout.
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
    """Leave them to the next call, which reads what the device has come to. given: as of `_compare_gradients`."""
    found: defaultdict[torch.device, dict[Field, Tensor]] = defaultdict(dict)
    for (number, name), x in given.items():
        what = f"gradient {number}, of the result {name}, when it {wire.last}"
        found[x.device][Field(FieldKind.EARLIER, what)] = summarize(x)
    wire.later += [(list(each), start_cpu_copy(torch.stack([*each.values()]))) for each in found.values()]


def _compare_gradients(ranks: Ranks, given: Mapping[tuple[int, str], Tensor]) -> None:
    """Raise SpError, on every rank, if they differ. given: by a number and a name."""
    names = dict.fromkeys(name for _, name in given)
    sums = {f"{key}": str(checksum_of(x).item()) for key, x in given.items()}
    everyone = all_gather_messages(ranks, Message(BACKWARD, f"the result {', '.join(names)}", fields=sums))
    if different := describe_operation_mismatch(everyone or ()):
        raise different
    differ = [key for key in given if len({one.fields[f"{key}"] for one in everyone or ()}) > 1]
    wrong = dict.fromkeys(key[1] for key in differ if not _is_within_rounding(given[key], ranks))
    if wrong:
        raise SpError(
            "SP671",
            f"the ranks of this tensor-parallel group share the result {', '.join(wrong)}, but were given different "
            "gradients of it, which a backward on shards cannot add up.",
        )


def _is_within_rounding(x: Tensor, ranks: Ranks) -> bool:
    """Are the ranks' copies the same but for the last bits of each row? Every rank gets the same answer."""
    rows = x.reshape(-1, x.shape[-1] if x.ndim else 1)
    off, long = zip(*(_row_norms(part, ranks) for part in rows.split(max(1, PIECE_ELEMENTS // rows.shape[1]))))
    apart, own = torch.cat(off), torch.cat(long)
    eps = torch.finfo(x.dtype).eps * (64 if x.element_size() >= 4 else 1)  # sums are of 32 bits, and rounded once
    allowed = eps * (own + own.max() / 16)  # of a row that sums to nothing only the noise is left
    return bool((apart <= allowed).all() and own.isfinite().all())


def _row_norms(rows: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Of each row: how far the ranks' copies are from the first one, and the longest of them."""
    copies = current_communicator().all_gather(rows.contiguous(), ranks.n, ranks.group).view(ranks.n, *rows.shape)
    copies = copies.to(torch.complex128 if rows.is_complex() else torch.float64)
    return (copies - copies[0]).norm(dim=-1).amax(0), copies.norm(dim=-1).amax(0)
