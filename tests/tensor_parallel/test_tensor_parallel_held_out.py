"""More tensor-parallel models through backend="sp", on one axis and on the two axes of 2 x 2 and 2 x 3 grids."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from support import ranks as worker
from support.parallel.parallel_held_out import Flat, Mixture, Model, OneSum, PostNorm, TwoAxes
from support.parallel.parallel_models import Split, tokens
from support.parallel.parallel_training import Trained, trained
from support.parallel.spawning import spawned
from support.ranks import Ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import sp_compile


def alone_on(kind: type[Model], shape: tuple[int, int]) -> Trained:
    group = worker.group()
    return trained(kind, Split(group.size(), dist.get_rank(), group), lambda number: (tokens(*shape, number),))


@pytest.mark.parametrize(
    ("kind", "shape", "modes"),
    [
        (OneSum, (2, 7), "ssss"),
        pytest.param(PostNorm, (1, 5), "ssssff", marks=pytest.mark.slow),
        pytest.param(Flat, (3, 3), "ssss", marks=pytest.mark.slow),
    ],
)
def test_on_one_axis(ranks: Ranks, kind: type[Model], shape: tuple[int, int], modes: str) -> None:
    for one in ranks.run(2, alone_on, kind, shape):
        assert not one.where, one.where[:5]
        assert one.modes == [modes]  # sums of gradients of common weights have no rows


def split(mesh: DeviceMesh, name: str) -> Split:
    return Split(mesh[name].size(), mesh.get_local_rank(name), mesh.get_group(name))


def over_two(kind: type[Model], shape: tuple[int, int], names: str, size: tuple[int, int]) -> Trained:
    """names: the axis that is the model's first, then its second. The batch is the same on all ranks."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"))
    sp_compile.declare_groups(mesh, measure=False)
    axes = [split(mesh, name) for name in names]
    return trained(
        lambda tp: kind(*axes) if tp.n > 1 else kind(tp),
        axes[0],
        lambda number: (tokens(*size, number),),
        merge_reductions="always",
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TwoAxes, pytest.param(Mixture, marks=pytest.mark.slow)])
def test_over_two_axes(ranks: Ranks, kind: type[Model]) -> None:
    """Rows sharded over one axis pass collectives of the other, and are complete only after their waits."""
    for one in ranks.run(4, over_two, kind, (2, 2), "ab", (2, 7)):
        assert not one.where, one.where[:5]
        assert one.modes == ["" if kind is Mixture else "ssss"]  # a mixture takes slices at each rank's own place


def on_six() -> list[Trained]:
    cases: list[Any] = [
        (TwoAxes, "ab", (2, 7)), (TwoAxes, "ba", (1, 5)), (Mixture, "ab", (1, 4)), (Mixture, "ba", (3, 5)),
    ]  # fmt: skip
    return [over_two(kind, (2, 3), names, size) for kind, names, size in cases]


@pytest.mark.slow
def test_two_axes_of_two_by_three() -> None:
    for each in spawned(6, on_six):
        for one in each:
            assert not one.where, one.where[:5]
            assert one.modes in (["ssss"], [""])
