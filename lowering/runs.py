"""What a plan must know of a vector's values: their bounds on every stretch, as numbers that can be compared."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Runs(NamedTuple):
    """A (batch, S) vector: its least and greatest value over the batch, constant from start to start."""

    batch: int
    starts: tuple[int, ...]
    lows: tuple[int, ...]
    highs: tuple[int, ...]


def runs_of(x: Tensor) -> Runs:
    """The runs of an int or bool vector (B, S), both >= 1. Reads values: on a GPU this waits for them."""
    values = x.to(torch.int64)
    ends = torch.stack([values.amin(0), values.amax(0)])
    changes = (ends[:, 1:] != ends[:, :-1]).any(0).nonzero().squeeze(1) + 1
    starts = torch.cat([changes.new_zeros(1), changes])
    table = torch.cat([starts[None], ends[:, starts]]).tolist()
    return Runs(x.shape[0], *(tuple(row) for row in table))


class RunBounds:
    """The bounds of a vector on any stretch, in the time of a binary search."""

    def __init__(self, runs: Runs) -> None:
        self.batch = runs.batch
        self._starts = runs.starts
        self._lows = _levels(runs.lows, min)
        self._highs = _levels(runs.highs, max)

    def over(self, first: int, last: int) -> tuple[int, int]:
        """The inclusive bounds of the values at the indices [first, last]."""
        i, j = bisect_right(self._starts, first) - 1, bisect_right(self._starts, last)
        power = (j - i).bit_length() - 1
        lows, highs, other = self._lows[power], self._highs[power], j - (1 << power)
        return min(lows[i], lows[other]), max(highs[i], highs[other])

    def change_near(self, wanted: int) -> list[int]:
        """The places next to ``wanted`` on either side where the bounds change."""
        at = bisect_left(self._starts, wanted)
        return list(self._starts[max(at - 1, 0) : at + 1])


def _levels(values: tuple[int, ...], pick: Callable[[int, int], int]) -> list[tuple[int, ...]]:
    """Level p holds ``pick`` of every 2 ** p neighbours."""
    levels = [values]
    while (step := 1 << (len(levels) - 1)) < len(levels[-1]):
        levels.append(tuple(map(pick, levels[-1], levels[-1][step:])))
    return levels
