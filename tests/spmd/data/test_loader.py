"""A SequenceLoader in one process: orders, epochs, states, rebuilt loaders, and refused ones."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from sp_compile import SpError
from sp_compile.data import Replica, SequenceLoader, SequenceSampler
from sp_compile.data.batch_codec import decode_batch, encode_batch

DATASET = TensorDataset(torch.arange(23))


class Stream(IterableDataset):
    """Numbers of an epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(9) + 100 * self.epoch)


def of_replica(rank: int, n: int) -> Any:
    """Return patches under which new loaders and samplers belong to one replica."""
    replica = Replica(rank, n, True, (), ())
    modules = "sp_compile.data.loader", "sp_compile.data.sampler"
    return [mock.patch.multiple(module, replica_of=lambda *_: replica) for module in modules]


def loader(rank: int, n: int, make: Any = None, **options: Any) -> SequenceLoader:
    one, two = of_replica(rank, n)
    with one, two:
        return SequenceLoader((make or shuffled)(), **options)


def shuffled() -> DataLoader[Any]:
    return DataLoader(DATASET, batch_size=3, shuffle=True)


def sampled() -> DataLoader[Any]:
    return DataLoader(DATASET, batch_size=3, sampler=SequenceSampler(DATASET, seed=5))


def single() -> DataLoader[Any]:
    return DataLoader(DATASET, batch_size=None, shuffle=True)


def streamed() -> DataLoader[Any]:
    return DataLoader(Stream(), batch_size=2)


def listed() -> list[Any]:
    return [torch.tensor([i, i + 1]) for i in range(0, 10, 2)]


def with_workers() -> DataLoader[Any]:
    return DataLoader(DATASET, batch_size=3, shuffle=True, num_workers=1)


MAKERS = [shuffled, sampled, single, streamed, listed]


def numbers(batches: Any) -> list[list[int]]:
    """The numbers of each batch."""
    return [torch.as_tensor(b[0] if isinstance(b, list | tuple) else b).reshape(-1).tolist() for b in batches]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("drop_last", [False, True])
def test_replicas_take_everything_between_them(make: Any, drop_last: bool) -> None:
    alone = sorted(chain(*numbers(loader(0, 1, make))))
    each = [loader(rank, 2, make, drop_last=drop_last) for rank in range(2)]
    taken = [numbers(one) for one in each]
    assert len(taken[0]) == len(taken[1])
    if make is streamed:
        with pytest.raises(TypeError, match="no length"):
            len(each[0])
    else:
        assert [len(one) for one in each] == [len(one) for one in taken]
    flat = list(chain(*chain(*taken)))
    if drop_last and make is not sampled:
        assert len(set(flat)) == len(flat)
        assert set(flat) <= set(alone)
    else:
        assert set(flat) == set(alone)


@pytest.mark.parametrize("make", [shuffled, sampled, single])
def test_ranks_with_other_random_numbers_draw_one_order(make: Any) -> None:
    taken = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        one = loader(1, 2, make)
        taken.append([numbers(one), numbers(one)])
    assert taken[0] == taken[1]
    assert taken[0][0] != taken[0][1]  # the next epoch has another


def test_another_seed_is_another_order() -> None:
    assert numbers(loader(0, 1)) != numbers(loader(0, 1, seed=1))


@pytest.mark.parametrize("make", [*MAKERS, with_workers])
def test_continues_from_a_saved_state(make: Any) -> None:
    whole, begun, resumed = (loader(1, 2, make) for _ in range(3))
    epochs = [numbers(whole), numbers(whole)]
    list(begun)
    some = iter(begun)
    next(some)
    next(some)
    state = begun.state_dict()
    resumed.load_state_dict(state)
    assert numbers(resumed) == epochs[1][2:]
    whole.set_epoch(0)
    assert numbers(whole) == epochs[0]


def test_continues_with_another_number_of_replicas() -> None:
    begun = [loader(rank, 2) for rank in range(2)]
    before = []
    for one in begun:
        some = iter(one)
        before += numbers(next(some) for _ in range(2))
    alone = loader(0, 1)
    alone.load_state_dict(begun[0].state_dict())
    assert sorted(before + numbers(alone)) == sorted(numbers(loader(0, 1)))
    with pytest.raises(
        SpError, match="SP804: state: 2 data-parallel replicas have taken 6 samples each, which 3 replicas that take 3"
    ):
        loader(0, 3).load_state_dict(begun[0].state_dict())


def test_a_sampler_continues() -> None:
    one, two = of_replica(1, 2)
    with one, two:
        begun, resumed, whole = (SequenceSampler(DATASET, seed=2) for _ in range(3))
    for sampler in (begun, whole):
        sampler.set_epoch(3)
    some = iter(begun)
    taken = [next(some) for _ in range(4)]
    resumed.load_state_dict(begun.state_dict())
    assert taken + list(resumed) == list(whole)
    assert list(resumed) == list(whole)  # a state counts once


def test_arguments_of_a_loader_do_not_change() -> None:
    def collate(rows: Any) -> torch.Tensor:
        return torch.cat([row[0][None] for row in rows]) * 10

    given = DataLoader(DATASET, batch_size=3, collate_fn=collate, num_workers=1, prefetch_factor=3)
    made = loader(0, 2, lambda: given).loader
    assert (made.collate_fn, made.num_workers, made.prefetch_factor) == (collate, 1, 3)
    assert numbers(made)[:2] == [[0, 10, 20], [60, 70, 80]]


def test_a_sampler_that_shards_over_all_ranks_is_refused() -> None:
    sampler = DistributedSampler(DATASET, num_replicas=4, rank=0)
    with pytest.raises(SpError, match=r"SP802.* over 4 ranks"):
        loader(0, 2, lambda: DataLoader(DATASET, sampler=sampler))
    with pytest.raises(SpError, match=r"SP103: reads: .* got 'somewhere'"):
        loader(0, 1, reads="somewhere")
    with pytest.raises(SpError, match="SP801"):
        loader(0, 1, lambda: None)


def test_a_batch_as_text_and_tensors() -> None:
    batch = {
        "input_ids": torch.randint(9, (2, 3)),
        "bf16": torch.randn(3, 2, dtype=torch.bfloat16).T,
        "none of": torch.empty(0, 4),
        "bool": torch.tensor(True),
        "text": ["a", "b\n"],
        "nested": ({1: 2.5, "x": None}, [True, np.arange(3, dtype=np.int16)]),
    }
    text, tensors = encode_batch(batch)
    found, empty = decode_batch(text)
    for mine, sent in zip(empty, tensors, strict=True):
        mine.copy_(sent)
    assert torch.equal(found["bf16"], batch["bf16"])
    assert found["bool"].item() is True
    assert found["none of"].shape == (0, 4)
    assert found["text"] == batch["text"]
    assert found["nested"][0] == batch["nested"][0]
    array = found["nested"][1][1]
    assert array.dtype == np.int16
    assert array.tolist() == [0, 1, 2]


@pytest.mark.parametrize("what", [object(), {1, 2}, np.array(["a"]), {"a": [b"bytes"]}])
def test_batches_that_cannot_be_sent_are_named(what: Any) -> None:
    with pytest.raises(SpError, match=r"SP805: batch.* got \w+"):
        encode_batch(what)


def test_continues_with_another_batch_size() -> None:
    def small() -> DataLoader[Any]:
        return DataLoader(DATASET, batch_size=2, shuffle=True)

    def large() -> DataLoader[Any]:
        return DataLoader(DATASET, batch_size=4, shuffle=True)

    begun, whole, resumed = loader(0, 1, large), loader(0, 1, large), [loader(rank, 2, small) for rank in range(2)]
    some = iter(begun)
    next(some)
    next(some)
    for one in resumed:
        one.load_state_dict(begun.state_dict())
    pairs = zip(*map(numbers, resumed), strict=True)
    assert [a + b for a, b in pairs][:-1] == numbers(whole)[2:-1]  # of the last one replicas lack a batch


class Counting(IterableDataset):
    """A data set of numbers that saves its position."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 20:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["indexed", "stream"])
def test_a_loader_with_its_own_state_continues(kind: str, workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def make() -> Any:
        dataset = DATASET if kind == "indexed" else Counting()
        return stateful(dataset, batch_size=2, shuffle=kind == "indexed" or None, num_workers=workers)

    whole, begun, resumed = (loader(1, 2, make) for _ in range(3))
    expected = numbers(whole)
    some = iter(begun)
    taken = numbers(next(some) for _ in range(2))
    resumed.load_state_dict(begun.state_dict())
    assert taken + numbers(resumed) == expected
    with pytest.raises(SpError, match=r"SP803.* of one of 2"):
        loader(0, 1, make).load_state_dict(begun.state_dict())
