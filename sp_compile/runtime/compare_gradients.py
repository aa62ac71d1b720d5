"""Compare gradients of shared results over the ranks (sp::shared).

Ranks of a tensor-parallel group may share a result y, which is equal on all of them, and each receives a copy of its
gradient. A backward on shards takes each row from one of the copies. If the copies differ, the rows together are the
gradient of no rank, so all raise an error.
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
from sp_compile.runtime.control.message import BACKWARD_VERB, EarlierValue, Message

from .agreement import require_agreement
from .input_checks import is_on_accelerator

GradientKey = tuple[int, str]  # number of a gradient in a call of the op, and the name of its result


@opaque(
    "shared(Tensor[] xs, str[] names, int n, str group) -> Tensor[]",
    lambda xs, *_: [torch.empty_like(x) for x in xs],
    replays=False,
)
def check_shared_gradients(xs: list[Tensor], names: list[str], n: int, group: str) -> list[Tensor]:
    """Return copies of the gradients of shared results, after a check that they are equal on all ranks.

    Shapes: any -> same. Bytes: those of a message; more only for tensors whose bits differ. Backward: none.

    If the check fails, ranks of other groups are not notified: a data-parallel neighbor, which waits for this rank in a
    collective of its backward, waits until the timeout of that group.

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
    # None without other processes, as for simulated ranks: these compare at once, also on an accelerator.
    channel = channel_of(ranks)
    compared_later: dict[GradientKey, Tensor] = {}
    compared_now: dict[GradientKey, Tensor] = {}
    for key, x in zip(enumerate(names), xs, strict=True):
        group_of_x = compared_later if channel is not None and is_on_accelerator(x) else compared_now
        group_of_x[key] = x
    if channel is not None and compared_later:
        _compare_on_next_call(channel, compared_later)
    if compared_now:
        _compare_gradients(ranks, compared_now)
    return [x.clone() for x in xs]  # an operator may not return its inputs


def _compare_on_next_call(channel: ControlChannel, gradients: Mapping[GradientKey, Tensor]) -> None:
    """Add checksums of gradients to `channel.later`, which the ranks compare at the next call of the group.

    Their copies to the CPU are complete by then, so that the CPU does not wait for the device.
    """
    by_device: defaultdict[torch.device, dict[EarlierValue, Tensor]] = defaultdict(dict)  # checksums by device
    for (number, name), x in gradients.items():
        # `channel.last` is the current operation, such as "calls Decoder (number 3)".
        by_device[x.device][EarlierValue("shared gradient", name, channel.last, number)] = summarize(x)
    for checksums in by_device.values():
        channel.later.append((list(checksums), start_cpu_copy(torch.stack([*checksums.values()]))))


def _compare_gradients(ranks: Ranks, gradients: Mapping[GradientKey, Tensor]) -> None:
    """Raise SpError, on every rank, if the gradients differ by more than rounding.

    The ranks first compare checksums, and gather only the gradients whose checksums differ.
    """
    # A key is (number of the gradient, name of the result).
    names = dict.fromkeys(name for _, name in gradients)
    checksums = {str(key): str(checksum_of(x).item()) for key, x in gradients.items()}
    # Without `mismatch=`, the fields may differ. The result is [] if all messages are equal.
    messages = require_agreement(ranks, Message(BACKWARD_VERB, f"the result {', '.join(names)}", fields=checksums))
    differing = [key for key in gradients if len({message.fields[str(key)] for message in messages}) > 1]
    wrong = [key for key in differing if not _is_within_rounding(gradients[key], ranks)]
    wrong_names = dict.fromkeys(name for _, name in wrong)
    if wrong_names:
        raise SpError(
            "SP671",
            f"the ranks of this tensor-parallel group share the result {', '.join(wrong_names)}, but were given "
            "different gradients of it. A backward on shards takes each row of the gradient from one rank.",
        )


def _is_within_rounding(x: Tensor, ranks: Ranks) -> bool:
    """Return True if the gradients of the ranks are equal up to the rounding of an arbitrary order of additions.

    The result is the same on every rank. The gradients are gathered in pieces of rows, to bound the memory.

    Args:
        x: The gradient of this rank.
        ranks: The ranks that share the result.
    """
    rows = x.reshape(-1, x.shape[-1] if x.ndim else 1)
    pieces = rows.split(max(1, PIECE_ELEMENTS // rows.shape[1]))
    results = [_distances_and_norms(piece, ranks) for piece in pieces]
    distances, norms = torch.cat([distance for distance, _ in results]), torch.cat([norm for _, norm in results])
    # Half types are accumulated in float32 and rounded once; other types are rounded at each addition: 64 roundings
    # are allowed.
    eps = torch.finfo(x.dtype).eps * (64 if x.element_size() >= 4 else 1)
    allowed = eps * (norms + norms.max() / 16)  # relative to other rows, too: a row that sums to zero is only noise
    return bool((distances <= allowed).all() and norms.isfinite().all())


def _distances_and_norms(rows: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Gather rows of a gradient over the ranks; compare the copies of each row.

    Args:
        rows: Rows of the gradient of this rank, (rows, elements).
        ranks: The ranks that share the result.

    Returns:
        For each row the largest distance of a rank's copy to that of the first rank, and the largest norm of a copy.
    """
    copies = current_communicator().all_gather(rows.contiguous(), ranks.n, ranks.group).view(ranks.n, *rows.shape)
    copies = copies.to(torch.complex128 if rows.is_complex() else torch.float64)
    return (copies - copies[0]).norm(dim=-1).amax(0), copies.norm(dim=-1).amax(0)
