"""Loaders on real ranks: ranks of one sequence get equal batches, replicas others; differences raise on all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from support.ranks import Ranks, mesh2d
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from sp_compile import SpError
from sp_compile.data import SequenceLoader, SequenceSampler, replica_of

DP, SP = 2, 2


class Stream(IterableDataset):
    """A stream with a different length per rank, which may fail at one item."""

    def __init__(self, length: int, fails: int = -1) -> None:
        self.length, self.fails = length, fails

    def __iter__(self) -> Iterator[torch.Tensor]:
        for i in range(self.length):
            if i == self.fails:
                raise OSError("the disk is gone")
            yield torch.tensor(i)


def dataset() -> TensorDataset:
    return TensorDataset(torch.arange(11))


def read(kind: str) -> list[Any]:
    """Return the batches of a rank, with its own random seed."""
    mesh, rank = mesh2d(DP, SP), dist.get_rank()
    torch.manual_seed(rank)
    makers: dict[str, Callable[[], Any]] = {
        "shuffled": lambda: SequenceLoader(DataLoader(dataset(), batch_size=2, shuffle=True), mesh),
        "sampler": lambda: DataLoader(dataset(), batch_size=2, sampler=SequenceSampler(dataset(), mesh)),
        "stream": lambda: SequenceLoader(DataLoader(Stream(7)), mesh),
        "shorter on one": lambda: SequenceLoader(DataLoader(Stream(7 - 3 * (rank == 3))), mesh),
        "of a group": lambda: SequenceLoader([torch.tensor([i]) for i in range(4)], mesh["sp"]),
        "first": lambda: SequenceLoader(
            [{"x": torch.tensor([i], dtype=torch.float16)} for i in range(3)] if rank % SP == 0 else None,
            mesh,
            reads="first",
        ),
    }
    out = []
    for batch in makers[kind]():
        (values,) = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list) else [batch]
        out.append(values.tolist())
    return out


def test_batches_of_each_rank(ranks: Ranks) -> None:
    for kind, batches in {
        "shuffled": 3,
        "sampler": 3,
        "stream": 4,
        "shorter on one": 2,
        "of a group": 2,
        "first": 2,
    }.items():
        each = ranks.run(4, read, kind)
        assert each[0] == each[1] != each[2] == each[3], kind
        assert {len(one) for one in each} == {batches}, kind


def one_differs(what: str) -> str:
    mesh, odd = mesh2d(DP, SP), dist.get_rank() == 3
    cases: dict[str, Callable[[], Any]] = {
        "length": lambda: SequenceLoader(DataLoader(TensorDataset(torch.arange(4 + odd))), mesh),
        "seed": lambda: SequenceLoader(DataLoader(dataset()), mesh, seed=int(odd)),
        "no loader": lambda: SequenceLoader(None if odd else DataLoader(dataset()), mesh),
        "fails": lambda: list(SequenceLoader(DataLoader(Stream(4, fails=2 if odd else -1)), mesh)),
        "cannot hand on": lambda: list(SequenceLoader([object()], mesh, reads="first")),
    }
    try:
        cases[what]()
    except SpError as error:
        return str(error)
    return ""


WORDS = {
    "length": "SP807.*batches of a replica 2.*batches of a replica 3",
    "seed": "seed 0.*seed 1",
    "no loader": "SP801: rank 3 could not read: loader: ",
    "fails": "SP806: rank 3 could not read: OSError: the disk is gone",
    "cannot hand on": "SP805: rank 0 could not read: ",
}


def test_differences_raise_on_every_rank(ranks: Ranks) -> None:
    for what, words in WORDS.items():
        for message in ranks.run(4, one_differs, what):
            assert re.search(words, message, re.DOTALL), (what, message)


def replica_fields(names: tuple[str, ...], **options: Any) -> tuple[int, int, bool] | str:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    try:
        replica = replica_of(mesh, **options)
    except SpError as error:
        return str(error)
    return replica.rank, replica.n, replica.first


def test_axes_define_the_replica(ranks: Ranks) -> None:
    assert ranks.run(4, replica_fields, ("dp", "sp")) == [(0, 2, True), (0, 2, False), (1, 2, True), (1, 2, False)]
    assert ranks.run(4, replica_fields, ("tp", "sp")) == [(0, 1, True)] + [(0, 1, False)] * 3
    (message, *_) = ranks.run(4, replica_fields, ("a", "b"))
    assert "SP814: mesh: expected an axis of the sequence, got ('a', 'b')" in message
