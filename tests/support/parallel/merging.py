"""Helpers of the tests of merge_reductions: graphs of collectives, and the pass with a check of its values."""

import functools
import math
from collections.abc import Callable, Sequence

import torch
from support.golden import show
from support.parallel import on_mesh
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from sp_compile.passes.collectives.merge.find_chains import COLLECTIVES
from sp_compile.passes.collectives.merge.merge_reductions import MergeReductions
from sp_compile.passes.cost.known_groups import KnownGroups, Partition, label_subsets, reduce_partitions

c10d = torch.ops._c10d_functional


def mesh_axis_groups(mesh_shape: Sequence[int], dim: int) -> Partition:
    """Return the groups of one axis of a row-major mesh: (2, 3), 0 -> (0, 3), (1, 4), (2, 5)."""
    ranks = torch.arange(math.prod(mesh_shape)).view(*mesh_shape)
    return tuple(map(tuple, ranks.movedim(dim, -1).flatten(0, -2).tolist()))


def mesh_groups(mesh_shape: Sequence[int], names: Sequence[str], ranks_per_node: int | None = None) -> KnownGroups:
    """Return the table of a row-major mesh without processes, with unions "a+b" of axes."""
    axes = {name: mesh_axis_groups(mesh_shape, dim) for dim, name in enumerate(names)}
    unions = {
        "+".join(several): reduce_partitions([axes[name] for name in several]) for several in label_subsets(names)
    }
    nodes = {rank: rank // ranks_per_node if ranks_per_node else 0 for rank in range(math.prod(mesh_shape))}
    return KnownGroups({**axes, **unions}, nodes)


GRID = mesh_groups((2, 3), ("a", "b"))
CUBE = mesh_groups((2, 2, 2), ("a", "b", "c"))
OPS = ("sum", "avg", "max", "min", "product")


def ar(x: Tensor, op: str, group: str) -> Tensor:
    return c10d.wait_tensor(c10d.all_reduce(x, op, group))


def rs(x: Tensor, op: str, n: int, group: str) -> Tensor:
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, op, n, group))


def ag(x: Tensor, n: int, group: str) -> Tensor:
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, n, group))


def two(
    first: str, second: str, a: str = "a", b: str = "b", between: Callable[[Tensor], Tensor] = lambda h: h
) -> Callable[[Tensor], Tensor]:
    """One all_reduce after the other."""
    return lambda x: ar(between(ar(x, first, a)), second, b)


def traced(fn: Callable, *args: Tensor) -> GraphModule:
    return make_fx(fn, tracing_mode="fake")(*args)


def collectives(gm: GraphModule) -> list[str]:
    return [f"{COLLECTIVES[n.target]} {n.args[-1]}" for n in gm.graph.nodes if n.target in COLLECTIVES]


def operands(x: Tensor, world: int) -> list[list[Tensor]]:
    gen = torch.Generator().manual_seed(0)
    if not x.is_floating_point():
        return [[torch.randint(-9, 9, x.shape, generator=gen).to(x.dtype)] for _ in range(world)]
    return [[torch.randn(x.shape, generator=gen, dtype=torch.float64).to(x.dtype)] for _ in range(world)]


def merged(fn: Callable, x: Tensor, groups: KnownGroups = GRID, policy: str = "always", **options) -> tuple:
    """The graph after the pass, and its notes; its values are compared with those before."""
    gm = traced(fn, x)
    inputs = operands(x, len(groups.nodes))
    before = on_mesh.run(gm, groups, inputs)
    rewrite = MergeReductions(groups, policy, **options)
    changed = rewrite(gm).modified
    assert changed == any(note.label == "merge_reductions" for note in rewrite.notes)
    after = on_mesh.run(gm, groups, inputs)
    tolerance = 3e-2 if x.dtype == torch.bfloat16 else 1e-6 if x.dtype == torch.float32 else 1e-12
    torch.testing.assert_close(after, before, rtol=tolerance, atol=tolerance)
    for node in gm.graph.nodes:
        if isinstance(value := node.meta.get("val"), Tensor) and node.op == "call_function":
            assert value.dtype.is_floating_point == x.dtype.is_floating_point
    return gm, rewrite.notes


def check_unchanged(fn: Callable, x: Tensor, groups: KnownGroups = GRID, policy: str = "always") -> None:
    """Check that the pass leaves the only chain of a graph as it is, and reports that."""
    text = show(traced(fn, x))
    gm, notes = merged(fn, x, groups, policy)
    assert show(gm) == text
    (note,) = notes
    assert note.label == "not merge_reductions"


X = torch.ones(4, 6, dtype=torch.float64)


def count(gm: GraphModule) -> int:
    """Collectives of the graph."""
    return sum(node.target in COLLECTIVES for node in gm.graph.nodes)


@functools.cache
def unflattened() -> DeviceMesh:
    """A mesh that no other test has flattened: over one that was, DTensor merges by itself."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
