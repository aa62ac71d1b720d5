"""Compare messages and gather them, over the channel of a group, or between simulated ranks by their communicator."""

from __future__ import annotations

import torch

from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.comm.communicator import FunctionalCommunicator, current_communicator
from sp_compile.lowering.torch_compat import use_real_tensors

from .channel import ControlChannel
from .message import Message


def are_messages_equal(mine: Message, ranks: Ranks, channel: ControlChannel | None) -> bool:
    """Return True if the messages of all ranks are equal and none requires the complete messages.

    Args:
        mine: The message of this rank.
        ranks: The ranks that run the operation.
        channel: Their channel, which may raise as `are_all_equal`; None for simulated ranks, with their communicator.
    """
    if channel is not None:
        return channel.are_all_equal(mine)
    votes = _simulate_gather([mine.digest, mine.needs_body], ranks, torch.int64)
    # If the votes are equal, this rank requires the complete messages only if all do.
    return not mine.needs_body and all(vote == votes[0] for vote in votes)


def gather_bodies(mine: Message, ranks: Ranks, channel: ControlChannel | None) -> list[bytes]:
    """Return the complete messages of all ranks, encoded; arguments and errors are those of `are_messages_equal`."""
    if channel is not None:
        return channel.all_gather(mine.body, mine)
    lengths = [length for (length,) in _simulate_gather([len(mine.body)], ranks, torch.int64)]
    bodies = _simulate_gather(list(mine.body.ljust(max(lengths))), ranks, torch.uint8)  # of equal length
    return [bytes(body[:length]) for body, length in zip(bodies, lengths)]


def _simulate_gather(mine: list[int], ranks: Ranks, dtype: torch.dtype) -> list[list[int]]:
    """Return the integers of every simulated rank; without a simulation, those of this process for each rank."""
    if isinstance(current_communicator(), FunctionalCommunicator):
        return [mine] * ranks.n
    with use_real_tensors():
        sent = torch.tensor(mine, dtype=dtype, device="cpu")
        gathered = current_communicator().all_gather(sent, ranks.n, ranks.group).view(ranks.n, len(mine))
    result: list[list[int]] = gathered.tolist()
    return result
