"""Any chain of collectives over any groups has the values that it had before."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.golden import notes_of
from support.parallel import on_mesh
from support.parallel.merging import OPS, ag, ar, collectives, merged, mesh_groups, operands, rs, traced
from torch import Tensor

from sp_compile.passes.collectives.merge.merge_reductions import MergeReductions
from sp_compile.passes.cost.known_groups import KnownGroups

AXES = {(2, 2): "ab", (2, 3): "ab", (3, 2): "ab", (2, 2, 2): "abc", (2, 1, 3): "abc"}
STEPS: list[Callable[[Tensor], Tensor]] = [
    lambda h: h,
    lambda h: h.transpose(0, 1),
    lambda h: h.contiguous(),
    lambda h: h.unsqueeze(0).reshape(h.shape[1], h.shape[0]),
    lambda h: h * 3,
    lambda h: h / -2,
    lambda h: h + 1,
    lambda h: h.double(),
]


@st.composite
def programs(draw: st.DrawFn) -> tuple[KnownGroups, list]:
    """Draw a mesh with overlapping groups, and reductions over it with ops between them."""
    shape = draw(st.sampled_from(sorted(AXES)))
    groups = mesh_groups(shape, AXES[shape])
    ranks = draw(st.permutations(range(math.prod(shape))))
    size = draw(st.sampled_from([s for s in (2, 3) if len(ranks) % s == 0]))
    odd = tuple(tuple(ranks[i : i + size]) for i in range(0, len(ranks), size))
    groups = KnownGroups({**groups.members, "odd": odd}, groups.nodes)
    ops = draw(st.sampled_from([OPS, ("sum", "avg"), ("max",), ("product",), ("sum",)]))
    names = [*AXES[shape] * 2, "odd"]
    link = st.tuples(st.sampled_from(ops), st.sampled_from(names), st.sampled_from(STEPS))
    return groups, draw(st.lists(link, min_size=2, max_size=4))


@settings(max_examples=80)
@given(programs(), st.sampled_from([torch.float64, torch.float32, torch.int64]))
def test_any_chain(program: tuple[KnownGroups, list], dtype: torch.dtype) -> None:
    groups, links = program

    def fn(x: Tensor) -> Tensor:
        for op, group, step in links:
            x = step(ar(x, op, group))
        return x

    x = torch.ones(2, 3, dtype=dtype)
    gm = traced(fn, x)
    inputs = operands(x, len(groups.nodes))
    before, count = on_mesh.run(gm, groups, inputs), len(collectives(gm))
    notes = notes_of(MergeReductions(groups, "always", strict=False), gm)
    singles = (node for node in gm.graph.nodes if getattr(node.meta.get("val"), "dtype", None) == torch.float32)
    tolerance = 1e-3 if any(singles) else 1e-10  # for every result dtype: division makes float32 of integers
    torch.testing.assert_close(on_mesh.run(gm, groups, inputs), before, rtol=tolerance, atol=tolerance)
    assert (len(collectives(gm)) < count) == any(note.label == "merge_reductions" for note in notes)


def gather(x: Tensor, n: int, name: str, dim: int) -> Tensor:
    """Gather along a dim in the form that programs use."""
    out = ag(x, n, name)
    return torch.cat(torch.split(out, x.shape[0]), dim) if dim else out


def scatter(x: Tensor, op: str, n: int, name: str, dim: int) -> Tensor:
    return rs(torch.cat(torch.split(x, x.shape[dim] // n, dim)) if dim else x, op, n, name)


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(AXES)),
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0, 1, 1])), min_size=2, max_size=3),
    st.booleans(),
    st.sampled_from(["sum", "avg", "max", "sum, avg"]),
)
def test_any_order_of_chunks(shape: tuple[int, ...], axes: list, gathers: bool, ops: str) -> None:
    groups = mesh_groups(shape, AXES[shape])
    names = [AXES[shape][axis % len(shape)] for axis, _ in axes]

    def fn(x: Tensor) -> Tensor:
        for i, (name, (_, dim)) in enumerate(zip(names, axes)):
            n = groups.size(name)
            x = gather(x, n, name, dim) if gathers else scatter(x, ops.split(", ")[i % len(ops.split())], n, name, dim)
            x = x * 2
        return x

    rows = 2 if gathers else 2 * math.prod(groups.size(n) for n in names)
    merged(fn, torch.ones(rows, rows, dtype=torch.float64), groups)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("op", ["sum", "avg", "min"])
def test_along_a_dim(dim: int, op: str) -> None:
    groups = mesh_groups((2, 3), ("a", "b"))

    def fn(x: Tensor) -> Tensor:
        h = scatter(scatter(x, op, 2, "a", dim) * 2, op, 3, "b", dim)
        return gather(gather(h + 1, 3, "b", dim) / 5, 2, "a", dim)

    gm, _ = merged(fn, torch.ones(6, 12, 6, dtype=torch.float64), groups)
    assert collectives(gm) == ["reduce_scatter a+b", "all_gather a+b"]
    cats = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    assert len(cats) == (2 if dim else 0)


def test_other_moves_are_left_alone() -> None:
    """Chunks in another order or of another number, a chunk that is used elsewhere, two dims."""
    groups = mesh_groups((2, 2), ("a", "b"))

    def moved(move: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: gather(move(ag(x, 2, "b")), 2, "a", 1)

    moves: list[Callable[[Tensor], Tensor]] = [
        lambda h: torch.cat(torch.split(h, 4)[::-1], 1),
        lambda h: torch.cat(torch.split(h, 2), 1),
        lambda h: torch.cat(torch.split(h, 4), 1) + h.sum(),
        lambda h: (lambda pieces: torch.cat(pieces, 1) * pieces[0].sum())(torch.split(h, 4)),
        lambda h: h,
    ]
    for move in moves:
        gm, _ = merged(moved(move), torch.ones(4, 4, dtype=torch.float64), groups)
        assert len(collectives(gm)) == 2
