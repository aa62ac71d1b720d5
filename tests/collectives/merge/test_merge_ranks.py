"""merge_reductions and declare_groups on real ranks: right values, no communicator too many, errors on every rank."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import ranks as worker
from support.golden import notes_of
from support.parallel.merging import count, unflattened
from support.parallel.spawning import spawned
from support.ranks import Ranks
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import sp_compile
from sp_compile.lowering.torch_compat import process_groups
from sp_compile.passes.collectives.merge.merge_reductions import MergeReductions
from sp_compile.passes.cost.known_groups import KnownGroups

c10d = torch.ops._c10d_functional


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SP_COMPILE_CACHE_DIR", str(tmp_path))


def names(mesh: DeviceMesh) -> list[str]:
    return [group.group_name for group in mesh.get_all_groups()]


def checked(fn: Callable[[Tensor], Tensor], x: Tensor, groups: KnownGroups, policy: str = "always") -> int:
    """Return the number of remaining collectives after comparing values with the unmerged program."""
    gm = make_fx(fn, tracing_mode="fake")(x)
    expected = gm(x)
    MergeReductions(groups, policy)(gm)
    torch.testing.assert_close(gm(x), expected, rtol=1e-9, atol=1e-9)
    return count(gm)


def reduced_twice(one: str, other: str, a: str, b: str) -> Callable[[Tensor], Tensor]:
    def fn(x: Tensor) -> Tensor:
        h = c10d.wait_tensor(c10d.all_reduce(x, one, a)).t()
        h = h if "product" in (one, other) else h * 0.5
        return c10d.wait_tensor(c10d.all_reduce(h, other, b))

    return fn


def every_op(mesh: DeviceMesh) -> dict[str, int]:
    """Collectives left of two, for every pair of reductions, and for scatters and gathers."""
    groups = sp_compile.declare_groups(mesh, measure=False)
    (a, b), (n, m) = names(mesh), mesh.shape
    torch.manual_seed(dist.get_rank())
    x = torch.randn(n * m * 2, 3, dtype=torch.float64)
    ops = ("sum", "avg", "max", "min", "product")
    left = {f"{p}, {q}": checked(reduced_twice(p, q, a, b), x, groups) for p in ops for q in ops}

    def scattered(x: Tensor) -> Tensor:
        h = c10d.wait_tensor(c10d.reduce_scatter_tensor(x, "avg", n, a))
        return c10d.wait_tensor(c10d.reduce_scatter_tensor(h, "sum", m, b))

    def gathered(x: Tensor) -> Tensor:
        h = c10d.wait_tensor(c10d.all_gather_into_tensor(x, m, b))
        return c10d.wait_tensor(c10d.all_gather_into_tensor(h, n, a))

    return {**left, "scatter": checked(scattered, x, groups), "gather": checked(gathered, x, groups)}


def is_as_expected(left: dict[str, int]) -> bool:
    """One collective where the two agree, sum and avg too."""
    for name, number in left.items():
        kinds = {{"avg": "sum"}.get(op, op) for op in name.split(", ")}
        if number != len(kinds):
            return False
    return True


def on_two_by_two() -> dict[str, int]:
    return every_op(worker.mesh2d(2, 2))


def test_every_reduction(ranks: Ranks) -> None:
    for left in ranks.run(4, on_two_by_two):
        assert is_as_expected(left), left


# What DTensor's redistributions leave in AOTAutograd's graphs.


class Total(nn.Module):
    """Local products of a sharded sum, redistributed to all ranks."""

    def __init__(self, mesh: DeviceMesh, placements: list, targets: list) -> None:
        super().__init__()
        self.mesh, self.placements, self.targets = mesh, placements, targets

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        partial = DTensor.from_local(x @ w, self.mesh, self.placements, run_check=False)
        return partial.redistribute(self.mesh, self.targets).to_local().sin().sum()


def redistributed(
    mesh: DeviceMesh, placements: list, targets: list, inductor: bool = False
) -> tuple[list[int], list[int]]:
    """Collectives before and after, graph by graph; loss and gradients are compared with those of eager mode."""
    groups = sp_compile.declare_groups(mesh, measure=False)
    before, after = [], []

    def merge(gm: GraphModule) -> None:
        before.append(count(gm))
        notes = notes_of(MergeReductions(groups, "always", strict=False), gm)
        after.append(count(gm))
        assert (before[-1] > after[-1]) == any(note.label == "merge_reductions" for note in notes), notes

    def keep(gm: GraphModule, inputs: Any) -> GraphModule:
        merge(gm)
        return gm

    backend = "inductor" if inductor else aot_autograd(fw_compiler=keep)
    hook = {"joint_custom_pre_pass": lambda graph: merge(graph.owning_module), "force_disable_caches": True}
    torch.manual_seed(dist.get_rank())
    x, w = torch.randn(4, 6, dtype=torch.float64), torch.randn(6, 8, dtype=torch.float64)
    model = Total(mesh, placements, targets)
    results = []
    for run in (model, torch.compile(model, backend=backend)):
        leaves = [v.clone().requires_grad_() for v in (x, w)]
        with torch._inductor.config.patch(hook):
            loss = run(*leaves)
            results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)
    return before, after


def two_partials(op: str) -> tuple[list[int], list[int]]:
    return redistributed(unflattened(), [Partial(op)] * 2, [Replicate()] * 2)


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("op", ["sum", "avg", "max"])
def test_dtensor_partials(ranks: Ranks, op: str) -> None:
    for before, after in ranks.run(4, two_partials, op):
        assert (before[0], after[0]) == (2, 1)


def mixed_partials() -> tuple[list[int], list[int]]:
    mesh = unflattened()
    return redistributed(mesh, [Partial("sum"), Partial("avg")], [Replicate()] * 2)


def test_dtensor_sum_and_average(ranks: Ranks) -> None:
    for before, after in ranks.run(4, mixed_partials):
        assert (before[0], after[0]) == (2, 1)


def shard_between(shape: tuple[int, ...]) -> tuple[list[int], list[int]]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b", "c"))
    shard = [Partial(), Shard(0), Partial()]
    return redistributed(mesh, shard, [Replicate(), Shard(0), Replicate()])


def test_dtensor_shard_in_between(ranks: Ranks) -> None:
    for before, after in ranks.run(4, shard_between, (2, 1, 2)):
        assert (before[0], after[0]) == (2, 1)


def one_partial() -> tuple[list[int], list[int]]:
    return redistributed(unflattened(), [Partial(), Replicate()], [Replicate()] * 2)


def test_dtensor_of_one_partial_is_left_alone(ranks: Ranks) -> None:
    for before, after in ranks.run(4, one_partial):
        assert before == after


def sharded(dim: int, gathers: bool) -> tuple[list[int], list[int]]:
    whole, partial, shards = [Replicate()] * 2, [Partial()] * 2, [Shard(dim)] * 2
    here, there = (shards, whole) if gathers else (partial, shards)
    return redistributed(unflattened(), here, there)


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
def test_dtensor_shards(ranks: Ranks, dim: int, gathers: bool) -> None:
    for before, after in ranks.run(4, sharded, dim, gathers):
        assert (before[0], after[0]) == (2, 1)


def uneven() -> tuple[list[int], list[int]]:
    """Five rows over four ranks: DTensor pads and cuts between the two, and nothing of that may be skipped."""
    mesh = unflattened()
    groups = sp_compile.declare_groups(mesh, measure=False)
    before, after = [], []

    def compiler(gm: GraphModule, inputs: Any) -> GraphModule:
        before.append(count(gm))
        MergeReductions(groups, "always", strict=False)(gm)
        after.append(count(gm))
        return gm

    whole = torch.arange(15, dtype=torch.float64).view(5, 3)
    given = distribute_tensor(whole, mesh, [Shard(0), Shard(0)])

    def fn(x: DTensor) -> Tensor:
        return x.redistribute(mesh, [Replicate(), Replicate()]).to_local() * 1

    torch.testing.assert_close(torch.compile(fn, backend=aot_autograd(fw_compiler=compiler))(given), whole)
    return before, after


def test_dtensor_uneven_shards(ranks: Ranks) -> None:
    for before, after in ranks.run(4, uneven):
        assert before == after == [2]


@pytest.mark.slow
def test_through_inductor(ranks: Ranks) -> None:
    for before, after in ranks.run(4, compiled_partials):
        assert (before[0], after[0]) == (2, 1)


def compiled_partials() -> tuple[list[int], list[int]]:
    return redistributed(unflattened(), [Partial()] * 2, [Replicate()] * 2, inductor=True)


# More ranks than the pool has.


def on_six() -> dict[str, Any]:
    found: dict[str, Any] = {"left": every_op(init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b")))}
    # A mesh of four of the six; the two others only help to create its communicator.
    rank = dist.get_rank()
    before = len(process_groups())
    part = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
    axes = len(process_groups()) - before
    groups = sp_compile.declare_groups(part)
    found["union"] = len(process_groups()) - before - axes
    groups = sp_compile.declare_groups(part)
    found["again"] = len(process_groups()) - before - axes - found["union"]
    found["table"] = sorted(groups.members.values())
    if rank < 4:
        x = torch.ones(4, 4, dtype=torch.float64) * rank
        found["sum"] = checked(reduced_twice("sum", "avg", *names(part)), x, groups)
        (union,) = set(groups.members) - set(names(part))
        found["timeout"] = (
            dist.distributed_c10d._resolve_process_group(union)._get_backend(torch.device("cpu")).options._timeout
        )
    return found


@pytest.mark.slow
def test_two_by_three() -> None:
    results = spawned(6, on_six)
    table = sorted([((0, 2), (1, 3)), ((0, 1), (2, 3)), ((0, 1, 2, 3),)])
    for rank, found in enumerate(results):
        assert is_as_expected(found["left"]), found
        assert found["again"] == 0
        assert (found["union"], found["table"]) == ((1, table) if rank < 4 else (0, []))
    assert all((found["sum"], found["timeout"]) == (1, timedelta(seconds=60)) for found in results[:4])


def on_eight() -> tuple[list[int], list[int]]:
    return shard_between((2, 2, 2))


@pytest.mark.slow
def test_dtensor_shard_in_between_of_eight() -> None:
    for before, after in spawned(8, on_eight):
        assert (before[0], after[0]) == (2, 1)
