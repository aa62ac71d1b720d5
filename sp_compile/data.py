"""Sample a dataset for the data-parallel replicas of a mesh.

A replica is the ranks that share a sequence, and thus a copy of the model: they get the same samples. Other replicas
get other samples.

mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "sp"))
loader = DataLoader(dataset, batch_size=2, sampler=SequenceSampler(dataset, mesh))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.ranks import STRATEGIES, Mesh, Ranks, ranks_of, resolve
from sp_compile.runtime.agreement import all_gather_object, publish_failure

__all__ = ["Replica", "SequenceSampler", "replica_of"]

# mesh axes along which ranks take the same batch, besides the axes of strategies
SAME_BATCH = frozenset({"sp", "cp", "tp", "ep", "etp", "pp"})


@dataclass(frozen=True)
class Replica:
    """Position of a rank among the data-parallel replicas; the ranks of a replica take the same batches."""

    rank: int  # number of the replica of this rank, from 0
    n: int  # number of replicas


def replica_of(mesh: Mesh = None, mesh_dim: str | None = None, data_dims: str | Sequence[str] | None = None) -> Replica:
    """Return the data-parallel replica of this rank.

    With a mesh of several axes this is a local computation. The ranks of a mesh of one axis, or of a process group, are
    one replica. To number the replicas, all ranks of the default process group exchange their groups, so each of them
    has to call this function.

    Args:
        mesh: A DeviceMesh, with named axes if it has several; a process group; or None for the default process group
            as a single replica.
        mesh_dim: The axis of the sequence, if it has a name of your own. Its ranks take the same batches.
        data_dims: The axes along which ranks take different batches. By default all axes but `mesh_dim`, "sp", "cp",
            "tp", "ep", "etp", "pp" and the axes of strategies, such as "ring" and "ulysses".

    Returns:
        The number of the replica, and the number of replicas.

    Raises:
        SpError: The axes of the mesh have no names, a named axis is not in the mesh, this rank is not in the mesh, no
            axis is left for the sequence, or the groups do not split the default process group evenly.
    """
    with publish_failure():  # ranks that wait for this one in `_replica_of_group` raise, too
        if isinstance(mesh, DeviceMesh) and mesh.ndim > 1:
            return _replica_on_axes(mesh, mesh_dim, data_dims)
        if data_dims is not None:
            raise SpError("SP811", f"data_dims: expected None for a mesh without several axes, got {data_dims!r}.")
        ranks = resolve(mesh, mesh_dim) if isinstance(mesh, DeviceMesh) else ranks_of(mesh)
    return _replica_of_group(ranks)


def _replica_on_axes(mesh: DeviceMesh, mesh_dim: str | None, data_dims: str | Sequence[str] | None) -> Replica:
    """Return the replica of this rank in a mesh of several axes, its position along the data axes.

    Args:
        mesh: The mesh.
        mesh_dim: The axis of the sequence, or None.
        data_dims: The data axes, along which ranks take different batches; None for the default of `replica_of`.

    Raises:
        SpError: As `replica_of`.
    """
    names, coordinate = mesh.mesh_dim_names, mesh.get_coordinate()
    if not names:
        raise SpError("SP812", f"mesh: expected names of the {mesh.ndim} axes, got None.")
    if coordinate is None:
        raise SpError("SP112", f"mesh: this rank ({dist.get_rank()}) is not in the mesh {mesh}.")
    requested = [data_dims] if isinstance(data_dims, str) else data_dims
    for name in [*(requested or ()), *([mesh_dim] if mesh_dim is not None else ())]:
        if name not in names:
            argument = "mesh_dim" if name == mesh_dim else "data_dims"
            raise SpError("SP114", f"{argument}: expected an axis of the mesh, {names}, got {name!r}.")
    if requested is not None and mesh_dim in requested:
        raise SpError("SP813", f"data_dims: expected axes with different batches, got the sequence axis {mesh_dim!r}.")
    same_batch = SAME_BATCH.union({mesh_dim}, *(strategy.axes for strategy in STRATEGIES.values()))
    data_axes = set(requested) if requested is not None else set(names) - same_batch
    if len(data_axes) == len(names):
        raise SpError("SP814", f"mesh: expected an axis of the sequence, got {names}.")
    rank, n = 0, 1  # position of this rank in the grid of the data axes, row by row, and the size of the grid
    for name, position, size in zip(names, coordinate, mesh.shape, strict=True):
        if name in data_axes:
            rank, n = rank * size + position, n * size
    return Replica(rank, n)


def _replica_of_group(ranks: Ranks) -> Replica:
    """Return the replica of this rank if each replica is a process group, `ranks` on this rank, that shares a sequence.

    All ranks of the default process group call it and exchange the members of their groups. The replicas are numbered
    in the order of their first ranks: of {0, 1} and {2, 3}, rank 3 is in replica 1 of 2.

    Raises:
        SpError: The groups do not split the default process group evenly.
    """
    group = ranks.process_group
    if group is None:
        return Replica(0, 1)
    world = ranks_of(dist.group.WORLD)
    if ranks.n == world.n or not world.has_other_processes:  # one replica of all ranks, or torch's fake groups
        return Replica(0, 1)
    own_members = dist.get_process_group_ranks(group)
    subject = "the ranks that share a sequence"
    all_members = all_gather_object(world, verb="gathers", subject=subject, value=own_members)
    groups = sorted({tuple(members) for members in all_members}, key=min)
    # Each rank is in its own group, so the sizes add up to that of the world only if the groups do not overlap.
    has_overlap = sum(map(len, groups)) != world.n
    has_different_sizes = len({len(members) for members in groups}) > 1
    if has_overlap or has_different_sizes:
        raise SpError(
            "SP815",
            f"mesh: expected disjoint groups of equal size over the {world.n} ranks of the default process group, "
            f"got {groups}.",
        )
    return Replica(groups.index(tuple(own_members)), len(groups))


class SequenceSampler(DistributedSampler):
    """DistributedSampler over the data-parallel replicas of a mesh, with a state for checkpoints.

    Ranks that share a sequence get the same indices, replicas get different ones. Frameworks that replace the sampler
    of a loader do not replace a DistributedSampler, so they use this one as it is.

    Args:
        dataset: The dataset to sample.
        mesh: As for `replica_of`.
        mesh_dim: As for `replica_of`.
        data_dims: As for `replica_of`.
        shuffle: True to shuffle the indices, with `seed` and the epoch.
        seed: The seed of the order, equal on all ranks.
        drop_last: True to drop the last indices if they do not fill a round of all replicas, False to fill the round
            with the first indices.

    Raises:
        SpError: As for `replica_of`.
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
        self.yielded = 0  # indices of this replica in the epoch so far
        self._skipped = 0  # indices that the next iteration skips: those that were yielded before a loaded state

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of this replica in this epoch, without those that were yielded before a loaded state."""
        self.yielded, self._skipped = self._skipped, 0
        for index in islice(super().__iter__(), self.yielded, None):
            self.yielded += 1
            yield index

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. The position of a loaded state is kept if the epoch does not change.

        Args:
            epoch: The number of the epoch, which selects the random order.
        """
        if epoch != self.epoch:
            self.yielded = self._skipped = 0
        super().set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """Return the position in the epoch, for a checkpoint.

        It counts indices that were yielded. Worker processes prefetch, so with them use torchdata's
        StatefulDataLoader, which saves the position of the last batch that it returned.

        Returns:
            The epoch, the number of indices yielded in it, and the number of replicas.
        """
        return {"epoch": self.epoch, "yielded": self.yielded, "replicas": self.num_replicas}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue after the last index of a state, in the next iteration.

        Args:
            state: A result of `state_dict`. It may be that of a run with another number of replicas: 10 samples of each
                of 4 replicas are 40 samples, which 8 replicas continue after 5 of each.

        Raises:
            SpError: The replicas do not divide the samples that were taken.
        """
        self.set_epoch(state["epoch"])
        taken = state["yielded"] * state["replicas"]
        if taken % self.num_replicas:
            raise SpError(
                "SP804",
                f"state: {state['replicas']} data-parallel replicas have taken {state['yielded']} samples each, "
                f"{taken} in total, which the {self.num_replicas} replicas of this run do not divide.",
            )
        self.yielded = self._skipped = taken // self.num_replicas
