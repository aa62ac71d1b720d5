"""Golden graphs of SequenceParallelLinear, run directly, and programs that it does not change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from support.golden import captured, show
from support.parallel.tensor_parallel import GROUP, Copy, Reduce, all_reduce, joint_graph
from torch import Tensor
from torch.func import functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from sp_compile.lowering.base.ranks import Ranks
from sp_compile.passes import PassContext
from sp_compile.passes.tensor_parallel.scatter_layers import LinearLayer, SequenceParallelLinear

c10d = torch.ops._c10d_functional


def scattered(gm: GraphModule, n: int = 2) -> tuple[GraphModule, list[LinearLayer]]:
    one = SequenceParallelLinear(Ranks(n, GROUP))
    return one(gm).graph_module, one.layers


def mlp(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Two blocks of one norm-free MLP: y is cut by columns, z by rows."""
    for _ in range(2):
        x = x + all_reduce(F.relu(F.rms_norm(x, (3,)) @ y) @ z)
    return x


def test_exported_forward() -> None:
    gm = captured(mlp, torch.randn(2, 4, 3), torch.randn(3, 5), torch.randn(5, 3))
    local, layers = scattered(gm)
    assert_expected_inline(
        show(local),
        """\
x: [2, 4, 3] = placeholder
y: [3, 5] = placeholder
z: [5, 3] = placeholder
shard_default: [1, 4, 3] = sp.shard(x, 0, [1, 2, 0, 2], 2, tp)
rms_norm: [2, 4, 3] = aten.rms_norm(x, [3])
matmul: [2, 4, 5] = aten.matmul(rms_norm, y)
relu: [2, 4, 5] = aten.relu(matmul)
matmul_1: [2, 4, 3] = aten.matmul(relu, z)
reduce_scatter_default: [1, 4, 3] = sp.reduce_scatter(matmul_1, 0, [1, 2, 0, 2], 2, tp)
add: [1, 4, 3] = aten.add.Tensor(shard_default, reduce_scatter_default)
rms_norm_1: [1, 4, 3] = aten.rms_norm(add, [3])
all_gather_default: [2, 4, 3] = sp.all_gather(rms_norm_1, 0, [1, 2, 0, 2], 2, tp)
matmul_2: [2, 4, 5] = aten.matmul(all_gather_default, y)
relu_1: [2, 4, 5] = aten.relu(matmul_2)
matmul_3: [2, 4, 3] = aten.matmul(relu_1, z)
reduce_scatter_default_1: [1, 4, 3] = sp.reduce_scatter(matmul_3, 0, [1, 2, 0, 2], 2, tp)
add_1: [1, 4, 3] = aten.add.Tensor(add, reduce_scatter_default_1)
all_gather_default_1: [2, 4, 3] = sp.all_gather(add_1, 0, [1, 2, 0, 2], 2, tp)
return (all_gather_default_1,)""",
    )
    assert [layer.mode for layer in layers] == ["scattered"] * 2


def test_joint_graph() -> None:
    def loss(x: Tensor, w: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return (x + Reduce.apply(F.relu(Copy.apply(x * w) @ y) @ z)).square().sum()

    shapes = ((4, 3), (3,), (3, 5), (5, 3))
    args = [torch.randn(shape, requires_grad=True) for shape in shapes]
    local, _ = scattered(joint_graph(loss, *args))
    assert_expected_inline(
        show(local),
        """\
primals_1: [4, 3] = placeholder
primals_2: [3] = placeholder
primals_3: [3, 5] = placeholder
primals_4: [5, 3] = placeholder
tangents_1: [] = placeholder
shard_default: [2, 3] = sp.shard(primals_1, 0, [1, 2, 0, 2], 2, tp)
mul: [4, 3] = aten.mul.Tensor(primals_1, primals_2)
view: [4, 3] = aten.view(mul, [4, 3])
mm: [4, 5] = aten.mm(view, primals_3)
relu: [4, 5] = aten.relu(mm)
detach: [4, 5] = aten.detach(relu)
mm_1: [4, 3] = aten.mm(relu, primals_4)
reduce_scatter_default: [2, 3] = sp.reduce_scatter(mm_1, 0, [1, 2, 0, 2], 2, tp)
add: [2, 3] = aten.add.Tensor(shard_default, reduce_scatter_default)
pow_1: [2, 3] = aten.pow.Tensor_Scalar(add, 2)
all_gather_default: [4, 3] = sp.all_gather(pow_1, 0, [1, 2, 0, 2], 2, tp)
sum_1: [] = aten.sum(all_gather_default)
expand: [4, 3] = aten.expand(tangents_1, [4, 3])
shard_default_1: [2, 3] = sp.shard(expand, 0, [1, 2, 0, 2], 2, tp)
pow_2: [2, 3] = aten.pow.Tensor_Scalar(add, 1.0)
mul_1: [2, 3] = aten.mul.Scalar(pow_2, 2.0)
mul_2: [2, 3] = aten.mul.Tensor(shard_default_1, mul_1)
all_gather_default_1: [4, 3] = sp.all_gather(mul_2, 0, [1, 2, 0, 2], 2, tp)
t: [5, 4] = aten.t(relu)
mm_2: [5, 3] = aten.mm(t, all_gather_default_1)
t_1: [3, 5] = aten.t(primals_4)
mm_3: [4, 5] = aten.mm(all_gather_default_1, t_1)
detach_1: [4, 5] = aten.detach(detach)
threshold_backward: [4, 5] = aten.threshold_backward(mm_3, detach_1, 0)
t_2: [3, 4] = aten.t(view)
mm_4: [3, 5] = aten.mm(t_2, threshold_backward)
t_3: [5, 3] = aten.t(primals_3)
mm_5: [4, 3] = aten.mm(threshold_backward, t_3)
reduce_scatter_default_1: [2, 3] = sp.reduce_scatter(mm_5, 0, [1, 2, 0, 2], 2, tp)
mul_3: [2, 3] = aten.mul.Tensor(reduce_scatter_default_1, shard_default)
mul_4: [2, 3] = aten.mul.Tensor(reduce_scatter_default_1, primals_2)
sum_2: [1, 3] = aten.sum.dim_IntList(mul_3, [0], True)
all_reduce_default: [1, 3] = sp.all_reduce(sum_2, 2, tp)
view_1: [3] = aten.view(all_reduce_default, [3])
add_1: [2, 3] = aten.add.Tensor(mul_2, mul_4)
all_gather_default_2: [4, 3] = sp.all_gather(add_1, 0, [1, 2, 0, 2], 2, tp)
return [sum_1, all_gather_default_2, view_1, mm_4, mm_2]""",
    )


def over_another_group(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return (x + all_reduce((x @ y) @ z, "dp")).relu()


def largest(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return (x + c10d.wait_tensor(c10d.all_reduce((x @ y) @ z, "max", GROUP))).relu()


def no_linear(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return (x + all_reduce(x.exp() * y.sum() * z.sum())).relu()


def wanted_full(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return all_reduce((x @ y) @ z)


def normalized_over_rows(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return all_reduce((x[:1] @ y) @ z).softmax(1)


def vectors(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return all_reduce((x[0, 0] @ y) @ z).relu()


def waited_twice(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    summed = c10d.all_reduce((x @ y) @ z, "sum", GROUP)
    return (x + c10d.wait_tensor(summed)).relu() + c10d.wait_tensor(summed)


@pytest.mark.parametrize(
    "program", [over_another_group, largest, no_linear, wanted_full, normalized_over_rows, vectors, waited_twice]
)
def test_left_alone(program: Callable[..., Tensor]) -> None:
    gm = captured(program, torch.randn(2, 4, 3), torch.randn(3, 5), torch.randn(5, 3))
    before = show(gm)
    local, layers = scattered(gm)
    assert all(layer.mode == "full" for layer in layers)
    assert "sp.reduce_scatter" not in show(local)
    assert show(local).count("all_reduce") == before.count("all_reduce")


def test_results_keep_memory_of_their_own() -> None:
    """A copy of an input or of another result is not replaced by it, since callers may write to a result."""

    def program(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        activation = x.relu()
        copies = [torch.empty_like(value).copy_(value) for value in (x, activation)]
        return mlp(x, y, z), activation, *copies

    inputs = torch.randn(2, 4, 3), torch.randn(3, 5), torch.randn(5, 3)
    local, _ = scattered(make_fx(functionalize(program), tracing_mode="fake")(*inputs))
    _, activation, *copies = local.graph.output_node().args[0]
    assert "aten.copy" not in show(local)
    assert [(node.target, node.args[0].name) for node in copies] == [
        (torch.ops.aten.clone.default, "x_1"), (torch.ops.aten.clone.default, activation.name)
    ]  # fmt: skip


def test_a_group_of_one() -> None:
    gm = captured(mlp, torch.randn(2, 4, 3), torch.randn(3, 5), torch.randn(5, 3))
    assert not SequenceParallelLinear(Ranks(1, GROUP))(gm).modified


def test_every_stage_is_a_lap() -> None:
    stages = "drop_overwrites mark_varying draw_full_tensors scatter_reductions revert_idle_scatters".split()
    rounds = "mean reduce_partials full localize bucket_reductions validate_shapes keep_dim_order".split()
    for program, expected in ((mlp, stages + rounds), (wanted_full, stages)):
        context = PassContext.of(Ranks(2, GROUP))
        gm = captured(program, torch.randn(2, 4, 3), torch.randn(3, 5), torch.randn(5, 3))
        SequenceParallelLinear(context.ranks).run(gm, context)
        assert [lap.name for lap in context.runs] == expected
        assert {lap.name: lap.changes for lap in context.runs}["scatter_reductions"] == (2 if program is mlp else 1)
