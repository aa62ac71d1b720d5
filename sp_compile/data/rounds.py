"""Batches dealt out to replicas, one each a round."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any

import torch


def rank_batches(batches: Iterable[Any], rank: int, n: int, drop_last: bool) -> Iterator[Any]:
    """The batch of number `rank` of every round of n.

    A last round that is not full is dropped, or filled with the first batches that there were; so every replica has as
    many.
    """
    source = iter(batches)
    first: list[Any] = []
    while len(one := list(islice(source, n))) == n:
        first = first or one
        yield one[rank]
    if one and not drop_last:
        yield next(islice(chain(one, cycle(first or one)), rank, None))


@dataclass(frozen=True)
class ShardedBatches:
    """What `rank_batches` gives of a sampler of batches, whose random order all ranks draw alike: of `seed` + epoch.

    sampler: of a loader's batches, or indices; what of it is random is told by an attribute `generator`, as torch's
    samplers have it.
    """

    sampler: Any
    rank: int
    n: int
    drop_last: bool
    seed: int
    at: dict[str, int]  # "epoch", and "skip": how many of its rounds are left out

    def __iter__(self) -> Iterator[Any]:
        epoch, skip = self.at["epoch"], self.at.get("skip", 0)  # not once: a loader with workers begins twice
        inner: Any = getattr(self.sampler, "sampler", None)  # of a sampler of batches
        for sampler in (self.sampler, inner):
            if hasattr(sampler, "generator"):
                sampler.generator = torch.Generator().manual_seed(self.seed + epoch)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        return islice(rank_batches(self.sampler, self.rank, self.n, self.drop_last), skip, None)

    def __len__(self) -> int:
        whole = len(self.sampler)
        return whole // self.n if self.drop_last else -(-whole // self.n)
