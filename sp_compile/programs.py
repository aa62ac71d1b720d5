"""A graph as ranks compare it: one number on every call, and its lines where the numbers differ."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist

from .errors import source_line
from .mesh import Ranks

WIDTH = 160  # characters of a line in an error message


class Line(NamedTuple):
    """One operation. text: all that is compared of it; name and stack trace: what a person is told."""

    text: str
    name: str
    trace: str


@dataclass(frozen=True)
class Program:
    """digest: equal for programs that ranks may run together. lines: its operations, in order."""

    digest: int = 0
    lines: tuple[Line, ...] = ()

    def first_difference(self, ranks: Ranks) -> list[str]:
        """What each rank has where their lines first differ; every rank of the group has to come here.

        Empty if they do not differ. Two exchanges: of a digest a line, then of one line a rank.
        """
        hashes: list[list[int]] = gathered([hashed(line.text) for line in self.lines], ranks)
        shortest, longest = min(map(len, hashes)), max(map(len, hashes))
        differ = (i for i in range(shortest) if len({one[i] for one in hashes}) > 1)
        first = next(differ, shortest)
        if first == longest:
            return []
        if first == len(self.lines):
            return gathered("nothing more", ranks)
        _, name, trace = self.lines[first]
        short = name if len(name) <= WIDTH else name[: WIDTH - 3] + "..."
        return gathered(f"{short} at {source_line(trace)}", ranks)


def gathered(mine: Any, ranks: Ranks) -> list[Any]:
    """Every rank's object, in the order of the ranks."""
    everyone: list[Any] = [None] * ranks.n
    dist.all_gather_object(everyone, mine, group=ranks.process_group)
    return everyone


def hashed(text: str) -> int:
    """63 bits of a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
