"""The pass that finds exchanges of two dims: every captured form, and programs without a match."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from support.golden import notes_of, show
from support.variants.exchange_variants import (
    EXCHANGES,
    NEAR_MISSES,
    ExchangeForm,
    deepspeed_heads,
    four_d_heads,
    four_d_rows,
    two_groups,
)
from support.variants.tracing_exchanges import N, aot, count, one_of, traced
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from sp_compile.lowering.comm.simulate import run_ranks
from sp_compile.passes.collectives.permute.fuse_permute import FuseAllToAllPermutes
from sp_compile.passes.graph.call import node_packet

aten = torch.ops.aten


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    with one_of(N) as ranks:
        yield ranks


def same(x: Tensor) -> Tensor:
    return x


def check_values(form: ExchangeForm, gm: GraphModule, before: Any = same, after: Any = same) -> None:
    """Run the rewritten graph on simulated ranks; before, after: other ops of the graph."""
    xs = [torch.randn(form.shape) for _ in range(N)]
    for rank, y in enumerate(run_ranks(N, lambda r: gm(xs[r]))):
        y = y[0] if isinstance(y, tuple) else y
        true = torch.cat([before(x).chunk(N, form.scatter)[rank] for x in xs], form.gather)
        assert torch.equal(y, after(true.reshape(form.result or true.shape)))


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("name", EXCHANGES)
def test_form(group: Any, name: str) -> None:
    form = EXCHANGES[name]
    gm = traced(lambda x: form.fn(x, N, group), torch.randn(form.shape))
    rewrite = FuseAllToAllPermutes()
    assert rewrite(gm).modified
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    assert str(calls[0].target) == "sp.all_to_all_permute.default"
    assert calls[0].args[1:4] == (form.scatter, form.gather, N)
    # Results keep their strides, and a shape that is not that of x.
    assert {node_packet(n) for n in calls[1:]} <= {aten.clone, aten.permute, aten.reshape}
    assert [n.label for n in rewrite.notes] == ["permute_all_to_all"]
    check_values(form, gm)
    assert not rewrite(gm).modified


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("name", ["DeepSpeed, heads", "4D, rows", "blog, heads", "matrix, rows"])
def test_form_in_joint_graphs(group: Any, name: str) -> None:
    """Forward and backward have one collective each and fewer copies; matrix rows had one copy before."""
    form = EXCHANGES[name]
    graphs = aot(lambda x: form.fn(x, N, group).sin(), torch.randn(form.shape, requires_grad=True))
    for part in ("forward", "backward"):
        assert count(graphs[part], "all_to_all_single") == 1
        assert count(graphs[part], "sp.") == 0
    assert count(graphs["joint"], "clone") < aot_copies(form, group) + (name == "matrix, rows")


def aot_copies(form: ExchangeForm, group: Any) -> int:
    found: list[int] = []

    def partition(joint: GraphModule, examples: Any, **options: Any) -> Any:
        found.append(count(joint, "clone") + count(joint, "cat") + count(joint, "aten.copy"))
        return min_cut_rematerialization_partition(joint, examples, **options)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=lambda gm, _: make_boxed_func(gm.forward), partition_fn=partition)
    x = torch.randn(form.shape, requires_grad=True)
    torch.compile(lambda x: form.fn(x, N, group).sin(), backend=backend, fullgraph=True)(x)
    return found[0]


def test_sizes_may_be_symbolic(group: Any) -> None:
    x = torch.randn(2, 3, 8, 5)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(x, 1)
    gm = traced(lambda x: deepspeed_heads(x, N, group), x)
    assert [n.label for n in notes_of(FuseAllToAllPermutes(), gm)] == ["permute_all_to_all"]
    assert count(gm, "sp.all_to_all_permute") == 1


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss(group: Any, name: str) -> None:
    fn, shape = NEAR_MISSES[name]
    gm = traced(lambda x: fn(x, N, group), torch.randn(shape))
    before = show(gm)
    rewrite = FuseAllToAllPermutes()
    assert not rewrite(gm).modified
    assert show(gm) == before
    assert [n.label for n in rewrite.notes] == ["not permute_all_to_all"]


def test_another_group_between(group: Any) -> None:
    other = dist.new_group(range(N))
    gm = traced(lambda x: two_groups(x, N, group, other), torch.randn(2, 3, 8, 5))
    before = show(gm)
    assert [n.label for n in notes_of(FuseAllToAllPermutes(), gm)] == ["not permute_all_to_all"] * 2
    assert show(gm) == before


def test_there_and_back_is_nothing(group: Any) -> None:
    gm = traced(lambda x: four_d_rows(four_d_heads(x.sin(), N, group), N, group).cos(), torch.randn(2, 3, 8, 5))
    FuseAllToAllPermutes()(gm)
    assert_expected_inline(
        show(gm),
        """\
l_x_: [2, 3, 8, 5] = placeholder
sin: [2, 3, 8, 5] = aten.sin(l_x_)
cos: [2, 3, 8, 5] = aten.cos(sin)
return (cos,)""",
    )


def test_there_and_back_is_a_copy_of_an_input(group: Any) -> None:
    gm = traced(lambda x: four_d_rows(four_d_heads(x, N, group), N, group), torch.randn(2, 3, 8, 5))
    notes = notes_of(FuseAllToAllPermutes(), gm)
    assert [n.label for n in notes] == ["permute_all_to_all", "permute_all_to_all", "cancelled"]
    x = torch.randn(2, 3, 8, 5)
    assert torch.equal(gm(x)[0], x)
    assert gm(x)[0].data_ptr() != x.data_ptr()


def test_twice_the_same_way_stays(group: Any) -> None:
    """Heads to rows, and then other heads to rows again."""
    gm = traced(lambda x: four_d_heads(four_d_heads(x, N, group), N, group), torch.randn(2, 3, 16, 5))
    FuseAllToAllPermutes()(gm)
    assert count(gm, "sp.all_to_all_permute") == 2


def test_back_over_another_group_stays(group: Any) -> None:
    other = dist.new_group(range(N))
    gm = traced(lambda x: four_d_rows(four_d_heads(x, N, group), N, other), torch.randn(2, 3, 8, 5))
    FuseAllToAllPermutes()(gm)
    assert count(gm, "sp.all_to_all_permute") == 2


def test_views_that_follow_become_reshapes(group: Any) -> None:
    gm = traced(lambda x: deepspeed_heads(x, N, group).view(2, 12, 10).sin(), torch.randn(2, 3, 8, 5))
    FuseAllToAllPermutes()(gm)
    xs = [torch.randn(2, 3, 8, 5) for _ in range(N)]
    for rank, (y,) in enumerate(run_ranks(N, lambda r: gm(xs[r]))):
        assert torch.equal(y, torch.cat([x.chunk(N, 2)[rank] for x in xs], 1).flatten(2).sin())


def test_dtensors_own_exchange(group: Any) -> None:
    """DTensor uses this all-to-all on GPUs; on a CPU it gathers."""

    def step(x: Tensor) -> Tensor:
        return torch.ops._dtensor.shard_dim_alltoall(x.sin(), 1, 2, group.group_name).cos()

    gm = traced(step, torch.randn(2, 3, 8, 5))
    assert [n.label for n in notes_of(FuseAllToAllPermutes(), gm)] == ["permute_all_to_all"]
    check_values(ExchangeForm(step, (2, 3, 8, 5), 2, 1), gm, lambda x: x.sin(), torch.cos)
