"""A loader of batches for ranks that share a sequence, made of the loader of one device."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, islice, repeat
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.ranks import Mesh, process_rank
from sp_compile.runtime.agreement import describe_field_mismatch, describe_operation_mismatch
from sp_compile.runtime.control.channel import publish_stop
from sp_compile.runtime.control.message import Message

from .batch_codec import encode_batch
from .handing import handed_on, spread
from .replica import replica_of
from .rounds import ShardedBatches, rank_batches
from .sampler import replica_share

READS = ("all", "first")
END = object()
LENGTH = "batches of a replica"


class SequenceLoader:
    """The batches of a loader: the same on ranks that share a sequence, other ones on their data-parallel neighbours.

    loader: as for one device, where every batch is for one replica. A DataLoader or StatefulDataLoader over a dataset
    with indices is made anew, and each replica reads only its own batches. Of anything else that yields batches (an
    IterableDataset's loader, a generator's maker, a list) each rank reads all and takes its own.
    mesh, mesh_dim, data_dims: as `replica_of` takes them. reads: "all", or "first": one rank of each sequence reads and
    hands its batches to the others, which may pass None for a loader. They come on the CPU, tensors as bytes and the
    rest as JSON (see `sp_compile.data.batch_codec`).
    seed: random orders are drawn of seed + epoch, alike on all ranks. drop_last: what becomes of a last round in which
    there are batches for some replicas only: False fills it with the first batches of the epoch.

    Epochs count by themselves; `set_epoch` says which comes next. `state_dict` within an epoch and `load_state_dict`
    before the next go on behind the last batch that was yielded, on another number of replicas too unless the loader
    has a state of its own (StatefulDataLoader).

    Every rank iterates to the same batch. Ranks compare the length of an epoch when it begins, and where nobody can
    know it, or one reads for others, before every batch whether all have one: an epoch ends everywhere when it ends
    somewhere. Raises SpError, on every rank: other lengths, epochs or seeds; a rank that could not read; one that does
    something else instead of reading.
    """

    def __init__(
        self,
        loader: Iterable[Any] | None,
        mesh: Mesh = None,
        *,
        mesh_dim: str | None = None,
        data_dims: str | Sequence[str] | None = None,
        reads: str = "all",
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if reads not in READS:
            raise SpError("SP103", f"reads: expected one of {', '.join(map(repr, READS))}, got {reads!r}.")
        self.replica = replica = replica_of(mesh, mesh_dim, data_dims)
        self.reads = reads
        self.hands_on = reads == "first" and bool(replica.sequence)
        self.reader = not self.hands_on or replica.first
        self.seed, self.drop_last = seed, drop_last
        self.loader: Any = None
        self._given = loader
        self.indexed = False
        self._at = {"epoch": 0}
        self._batches = self._behind = 0
        self._known: int | None = None
        self._problem: SpError | None = None
        if self.reader:
            try:
                self.loader, self.indexed = self._dealt_out(loader)
            except SpError as problem:  # raised together with the other ranks, which would wait
                self._problem = problem
        self._compare("makes", {})
        self._asks = bool(replica.axes) and (self.hands_on or not self.indexed)

    def _dealt_out(self, loader: Any) -> tuple[Any, bool]:
        """The loader of this replica; whether it yields only its batches."""
        if loader is None:
            raise SpError("SP801", f"loader: expected a loader on this rank with reads={self.reads!r}, got None.")
        at_random = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        if not at_random:
            return loader, False
        sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
        place = (self.replica.n, self.replica.rank)
        if isinstance(sampler, DistributedSampler):
            if (sampler.num_replicas, sampler.rank) != place:
                raise SpError(
                    "SP802",
                    f"loader: its sampler is a DistributedSampler over {sampler.num_replicas} ranks, so ranks that "
                    "share a sequence would get different batches.",
                )
            place = (1, 0)
        batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        mine = ShardedBatches(batches, place[1], place[0], self.drop_last, self.seed, self._at)
        return remade(loader, mine), True

    def __len__(self) -> int:
        """How many batches an epoch has. Raises TypeError, as a DataLoader does, where nobody knows."""
        length = self._known if not self.reader else self._length()
        if length is None:
            raise TypeError("the loader has no length")
        return length

    def _length(self) -> int | None:
        try:
            whole = len(self.loader)
        except TypeError:
            return None
        n = 1 if self.indexed else self.replica.n
        return whole // n if self.drop_last else -(-whole // n)

    def set_epoch(self, epoch: int) -> None:
        """Which epoch the next iteration is: the random order, and what the dataset makes of its own `set_epoch`."""
        self._at["epoch"] = epoch

    def state_dict(self) -> dict[str, Any]:
        """What it takes to go on behind the batch that was yielded last; every rank that reads has the same."""
        state = {"epoch": self._at["epoch"], "samples": self._batches * self._batch_size, "replicas": self.replica.n}
        if hasattr(self.loader, "state_dict"):
            state["loader"] = self.loader.state_dict()
        return state

    @property
    def _batch_size(self) -> int:
        """How many samples a batch counts for: what the DataLoader was given, 1 where nobody said."""
        return getattr(self._given, "batch_size", None) or 1

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on there with the next iteration. Raises SpError on another number of replicas that cannot stand there."""
        self._at["epoch"] = state["epoch"]
        self._behind = replica_share(state["samples"], state["replicas"], self.replica.n, self._batch_size)
        if hasattr(self.loader, "load_state_dict") and "loader" in state:
            if state["replicas"] != self.replica.n:
                raise SpError(
                    "SP803",
                    f"state: expected the loader's own state of one of {self.replica.n} data-parallel replicas, got "
                    f"that of one of {state['replicas']}.",
                )
            self.loader.load_state_dict(state["loader"])

    def __iter__(self) -> Iterator[Any]:
        self._batches, self._behind = self._behind, 0
        self._compare("begins an epoch of", {"epoch": str(self._at["epoch"]), "batches before": str(self._batches)})
        for batch in self._in_step() if self._asks else self._read():
            self._batches += 1
            yield batch
        self._batches = 0
        self._at["epoch"] += 1

    def _own(self) -> Iterator[Any]:
        """The batches of this replica, behind those that a state says were taken."""
        stateful, skip = hasattr(self.loader, "load_state_dict"), self._batches
        if self.indexed:
            self._at["skip"] = 0 if stateful else skip
            return iter(self.loader)
        source = getattr(self.loader, "dataset", self.loader)
        if hasattr(source, "set_epoch"):
            source.set_epoch(self._at["epoch"])
        batches = rank_batches(self.loader, self.replica.rank, self.replica.n, self.drop_last)
        return islice(batches, 0 if stateful else skip, None)

    def _read(self) -> Iterator[Any]:
        """As many batches as every rank has; one that cannot read on says so to those that wait for it elsewhere."""
        try:
            yield from self._own()
        except Exception as error:
            publish_stop(f"it could not read a batch: {_words(error)}")
            raise

    def _in_step(self) -> Iterator[Any]:
        """Batches while every rank has one, which they tell each other."""
        own = self._own() if self.reader else repeat(None)
        for number in count(1):
            parcel: Any = None
            failure: Exception | None = None
            try:
                parcel = batch = next(own, END)
                if self.reader and self.hands_on and batch is not END:
                    parcel = encode_batch(batch)
            except Exception as error:
                failure = error
            problem = _failure_of(failure) if failure else None
            has = {"batch": "none" if parcel is END else "one"}
            try:
                mine = Message("reads", "a batch", number, has, error=problem)
                said = spread(self.replica.axes, mine, _failure, _least)
            except SpError as told:
                raise told from failure
            if said["batch"] == "none":
                return
            yield handed_on(self.replica.sequence, parcel, number) if self.hands_on else batch

    def _compare(self, doing: str, fields: Mapping[str, str]) -> None:
        """Raise SpError, on all ranks, if these are not the same on all or one has a problem."""
        problem, self._problem = self._problem, None
        facts = {"seed": str(self.seed), "drop_last": str(self.drop_last), **fields}
        if self.reader and problem is None:
            facts[LENGTH] = str(self._length())
        if problem is not None and not self.replica.axes:
            raise problem
        mine = Message(doing, "a SequenceLoader", 0, facts, error=_failure_of(problem) if problem else None)
        said = spread(self.replica.axes, mine, _unlike, _all_fields)
        self._known = int(said[LENGTH]) if said.get(LENGTH, "None") != "None" else None


def remade(loader: DataLoader[Any], batches: ShardedBatches) -> DataLoader[Any]:
    """The loader with other batches (of indices; indices where it collates none), and all else as it was given."""
    taken = set(inspect.signature(type(loader).__init__).parameters)
    kept = {name: getattr(loader, name) for name in KEPT if name in taken and hasattr(loader, name)}
    if loader.num_workers == 0:  # then these are refused
        kept = {name: value for name, value in kept.items() if name not in OF_WORKERS}
    if loader.batch_sampler is None:
        return type(loader)(loader.dataset, sampler=batches, batch_size=None, **kept)
    return type(loader)(loader.dataset, batch_sampler=batches, **kept)


KEPT = """num_workers collate_fn pin_memory timeout worker_init_fn multiprocessing_context generator prefetch_factor
persistent_workers snapshot_every_n_steps in_order""".split()
OF_WORKERS = "prefetch_factor persistent_workers multiprocessing_context timeout".split()


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, SpError) else f"{type(error).__name__}: {error}"[:500]


def _failure_of(error: Exception) -> SpError:
    """Return the error that the ranks report together."""
    found = error if isinstance(error, SpError) else SpError("SP806", f"{type(error).__name__}: {error}."[:500])
    return found.with_context(f"rank {process_rank()} could not read: ")


def _failure(everyone: Sequence[Message]) -> SpError | None:
    """Return the first error of these ranks, with those of the others; None without one."""
    failed = {str(one.error): one.error for one in everyone if one.error is not None}
    if not failed:
        return describe_operation_mismatch(everyone)
    (first, *_), (_, *others) = failed.values(), failed
    return SpError(first.code, "\n".join([first.cause, *others]), first.fix)


def _all_fields(everyone: Sequence[Message]) -> dict[str, str]:
    return {name: value for one in everyone for name, value in one.fields.items()}


def _unlike(everyone: Sequence[Message]) -> SpError | None:
    if failed := _failure(everyone):
        return failed
    different = describe_field_mismatch([one.fields for one in everyone], "the ranks of this group read different data")
    return SpError("SP807", different) if different else None


def _least(everyone: Sequence[Message]) -> dict[str, str]:
    return {"batch": "none" if any(one.fields["batch"] == "none" for one in everyone) else "one"}
