"""A sampler whose replicas are those of a mesh, not all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.ranks import Mesh

from .replica import replica_of


class SequenceSampler(DistributedSampler):
    """Indices of a dataset: the same on ranks that share a sequence, other ones on their data-parallel neighbours.

    It is torch's DistributedSampler in all else: `set_epoch`, `shuffle` (True by default, of `seed` + epoch), and
    `drop_last`, without which the last round is filled with indices from the beginning; frameworks that put a sampler
    of their own in place of others leave it alone. mesh, mesh_dim, data_dims: as `replica_of` takes them, and raises.

    `state_dict()` counts what has been yielded, which with worker processes is ahead of what was used: torchdata's
    StatefulDataLoader takes that into account, and so does `SequenceLoader`. A state may be loaded on another number of
    replicas if these divide the samples that were taken.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        mesh: Mesh = None,
        *,
        mesh_dim: str | None = None,
        data_dims: str | Sequence[str] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        replica = replica_of(mesh, mesh_dim, data_dims)
        super().__init__(dataset, replica.n, replica.rank, shuffle, seed, drop_last)
        self.yielded = 0
        self._skipped = 0

    def __iter__(self) -> Iterator[int]:
        self.yielded, self._skipped = self._skipped, 0
        for index in islice(super().__iter__(), self.yielded, None):
            self.yielded += 1
            yield index

    def state_dict(self) -> dict[str, int]:
        """What it takes to go on behind the last index, with the next `iter`."""
        return {"epoch": self.epoch, "yielded": self.yielded, "replicas": self.num_replicas}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on there. Raises SpError if the replicas do not divide what was taken."""
        self.set_epoch(state["epoch"])
        self._skipped = replica_share(state["yielded"], state["replicas"], self.num_replicas)


def replica_share(taken: int, replicas: int, now: int, at_once: int = 1) -> int:
    """How often each of `now` replicas takes so many samples at once until they have those that each of others took."""
    if taken * replicas % (now * at_once):
        raise SpError(
            "SP804",
            f"state: {replicas} data-parallel replicas have taken {taken} samples each, which {now} replicas that take "
            f"{at_once} at once cannot have taken.",
        )
    return taken * replicas // (now * at_once)
