"""Samplers on simulated replicas and real ranks: orders, states, and the replica of each rank."""

from __future__ import annotations

import itertools
import re
from typing import Any
from unittest import mock

import pytest
import torch
from support.ranks import Ranks, mesh2d
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

from sp_compile import SpError
from sp_compile.data import Replica, SequenceSampler, replica_of

DATASET = TensorDataset(torch.arange(23))


def sampler_of(rank: int, n: int, **options: Any) -> SequenceSampler:
    """Return the sampler of one of n replicas."""
    with mock.patch("sp_compile.data.replica_of", return_value=Replica(rank, n)):
        return SequenceSampler(DATASET, **options)


@pytest.mark.parametrize("drop_last", [False, True])
def test_replicas_take_everything_between_them(drop_last: bool) -> None:
    taken = [list(sampler_of(rank, 2, drop_last=drop_last)) for rank in range(2)]
    assert {len(one) for one in taken} == {11 if drop_last else 12}
    flat = list(itertools.chain(*taken))
    assert len(set(flat)) == (22 if drop_last else 23)


def test_order_depends_on_seed_and_epoch_only() -> None:
    one, other = sampler_of(1, 2, seed=5), sampler_of(1, 2, seed=6)
    torch.manual_seed(1)
    first = list(one)
    torch.manual_seed(2)
    assert list(one) == first != list(other)
    one.set_epoch(1)
    assert list(one) != first


def test_state_resumes_after_the_last_index() -> None:
    begun, resumed, full = (sampler_of(1, 2, seed=2) for _ in range(3))
    for sampler in (begun, full):
        sampler.set_epoch(3)
    some = iter(begun)
    taken = [next(some) for _ in range(4)]
    resumed.load_state_dict(begun.state_dict())
    assert resumed.state_dict() == begun.state_dict()
    resumed.set_epoch(3)  # as a loop over epochs sets it
    assert taken + list(resumed) == list(full)
    assert list(resumed) == list(full)  # a state counts once


def test_another_epoch_starts_at_its_first_index() -> None:
    sampler, full = sampler_of(0, 2), sampler_of(0, 2)
    list(sampler)
    sampler.set_epoch(1)
    full.set_epoch(1)
    resumed = sampler_of(0, 2)
    resumed.load_state_dict(sampler.state_dict())
    assert list(resumed) == list(full)


def test_state_resumes_on_another_number_of_replicas() -> None:
    begun = [sampler_of(rank, 2) for rank in range(2)]
    taken = [index for one in begun for index, _ in zip(one, range(4))]
    alone, full = sampler_of(0, 1), sampler_of(0, 1)
    state = {"epoch": 0, "yielded": 4, "replicas": 2}
    alone.load_state_dict(state)
    assert sorted([*taken, *alone]) == sorted(full)
    with pytest.raises(SpError, match=r"SP804: state: 2 .*\b4\b.*\b3\b"):
        sampler_of(0, 3).load_state_dict(state)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_stateful_data_loader_saves_the_sampler(workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    begun, resumed, full = (
        stateful(DATASET, batch_size=2, sampler=sampler_of(1, 2), num_workers=workers) for _ in range(3)
    )
    expected = [batch[0].tolist() for batch in full]
    some = iter(begun)
    taken = [next(some)[0].tolist() for _ in range(2)]
    resumed.load_state_dict(begun.state_dict())
    assert taken + [batch[0].tolist() for batch in resumed] == expected


def read(axis: str | None) -> list[list[int]]:
    """Return the batches of a rank, whose random state differs from the others'."""
    mesh = mesh2d(2, 2)
    torch.manual_seed(torch.distributed.get_rank())
    dataset = TensorDataset(torch.arange(11))
    sampler = SequenceSampler(dataset, mesh if axis is None else mesh[axis])
    return [batch.tolist() for (batch,) in DataLoader(dataset, batch_size=2, sampler=sampler)]


@pytest.mark.parametrize("axis", [None, "sp"])
def test_ranks_of_a_sequence_get_the_same_batches(ranks: Ranks, axis: str | None) -> None:
    each = ranks.run(4, read, axis)
    assert each[0] == each[1] != each[2] == each[3]
    assert {len(one) for one in each} == {3}


def find_replica(names: tuple[str, ...], **options: Any) -> tuple[int, int] | str:
    """Return the replica of a rank on a mesh of these axes, or the error."""
    try:
        replica = replica_of(init_device_mesh("cpu", (2, 2), mesh_dim_names=names), **options)
    except SpError as error:
        return str(error)
    return replica.rank, replica.n


def test_axes_determine_the_replica(ranks: Ranks) -> None:
    assert ranks.run(4, find_replica, ("dp", "sp")) == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert ranks.run(4, find_replica, ("tp", "sp")) == [(0, 1)] * 4
    (message, *_) = ranks.run(4, find_replica, ("a", "b"))
    assert re.match(r"SP814: mesh: .*\('a', 'b'\)", message)


def find_replica_of_group(sizes: tuple[int, ...]) -> tuple[int, int] | str:
    """Return the replica of a rank among groups of these sizes, or the error."""
    ends = list(itertools.accumulate(sizes, initial=0))
    groups = [torch.distributed.new_group(list(range(*bounds))) for bounds in itertools.pairwise(ends)]
    own = next(group for group in groups if group is not torch.distributed.GroupMember.NON_GROUP_MEMBER)
    try:
        replica = replica_of(own)
    except SpError as error:
        return str(error)
    return replica.rank, replica.n


def test_groups_of_one_rank_are_replicas(ranks: Ranks) -> None:
    assert ranks.run(4, find_replica_of_group, (1, 1, 1, 1)) == [(0, 4), (1, 4), (2, 4), (3, 4)]


@pytest.mark.parametrize("sizes", [(3, 1), (1, 1, 2)])
def test_groups_of_different_sizes_raise_on_every_rank(ranks: Ranks, sizes: tuple[int, ...]) -> None:
    for message in ranks.run(4, find_replica_of_group, sizes):
        assert "SP815" in message
