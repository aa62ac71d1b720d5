"""Golden graphs of sharded windows, run directly and in the pipeline. EXPECTTEST_ACCEPT=1 rewrites them."""

import re

import expecttest
import pytest
import torch
import torch.nn.functional as F
from support.golden import captured, show
from torch import nn

import sp_compile
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP
from sp_compile.passes.canonical.canonicalize import Canonicalize
from sp_compile.passes.sharding.placement import Frame, Shard
from sp_compile.passes.sharding.window_rules import SlidingRows, place_window
from sp_compile.passes.strategies.gather_demands import GatherOperands
from sp_compile.passes.strategies.halo_demands import ExchangeHalos
from sp_compile.passes.strategies.select_row import SelectRow

TWO = Ranks(2, SIMULATED_GROUP)
SEQUENCE = {"seq_dims": {"x": 1}}
KERNEL = torch.ones(4, 1, 3)


def on_shards(fn, *args, first=()):
    gm = captured(fn, *args)
    Canonicalize()(gm)
    for rewrite in (*first, ExchangeHalos):
        rewrite(TWO, **SEQUENCE)(gm)
    return show(gm)


class Goldens(expecttest.TestCase):
    def test_conv1d(self):
        found = on_shards(lambda x: F.conv1d((x * 2).mT, KERNEL, padding=1, groups=4).mT + 1, torch.randn(1, 8, 4))
        self.assertExpectedInline(
            found,
            """\
lifted_tensor_0: [4, 1, 3] = get_attr
x: [1, 8, 4] = placeholder
mul: [1, 8, 4] = aten.mul.Tensor(x, 2)
m_t: [1, 4, 8] = aten.mT(mul)
conv_along_default: [1, 4, 8] = sp.conv_along(m_t, lifted_tensor_0, None, 2, 1, 1, [1], [1], [1], 4, [1, 8, 0, 8], [1, 8, 0, 8], 2, sim)
m_t_1: [1, 8, 4] = aten.mT(conv_along_default)
add: [1, 8, 4] = aten.add.Tensor(m_t_1, 1)
return (add,)""",
        )

    def test_a_shorter_result(self):
        found = on_shards(lambda x: F.conv1d((x * 2).mT, KERNEL, groups=4).mT + 1, torch.randn(1, 9, 4))
        self.assertExpectedInline(
            found,
            """\
lifted_tensor_0: [4, 1, 3] = get_attr
x: [1, 9, 4] = placeholder
mul: [1, 9, 4] = aten.mul.Tensor(x, 2)
m_t: [1, 4, 9] = aten.mT(mul)
conv_along_default: [1, 4, 7] = sp.conv_along(m_t, lifted_tensor_0, None, 2, 0, 0, [1], [0], [1], 4, [1, 9, 0, 9], [1, 9, 0, 7], 2, sim)
m_t_1: [1, 7, 4] = aten.mT(conv_along_default)
add: [1, 7, 4] = aten.add.Tensor(m_t_1, 1)
return (add,)""",
        )

    def test_a_stride(self):
        found = on_shards(lambda x: F.max_pool1d((x * 2).mT, 2).mT + 1, torch.randn(1, 8, 4))
        self.assertExpectedInline(
            found,
            """\
x: [1, 8, 4] = placeholder
mul: [1, 8, 4] = aten.mul.Tensor(x, 2)
m_t: [1, 4, 8] = aten.mT(mul)
max_pool1d_default: [1, 4, 4] = sp.max_pool1d(m_t, 0, 0, -inf, 2, 2, 1, [1, 8, 0, 8], [1, 4, 0, 4], 2, sim)
m_t_1: [1, 4, 4] = aten.mT(max_pool1d_default)
add: [1, 4, 4] = aten.add.Tensor(m_t_1, 1)
return (add,)""",
        )

    def test_token_shift(self):
        found = on_shards(lambda x: F.pad(x * 2, (1, -1, 1, -1)) + 1, torch.randn(1, 8, 4))
        self.assertExpectedInline(
            found,
            """\
x: [1, 8, 4] = placeholder
mul: [1, 8, 4] = aten.mul.Tensor(x, 2)
constant_pad_nd_default: [1, 8, 4] = aten.constant_pad_nd(mul, [1, -1, 0, 0], 0)
shift_default: [1, 8, 4] = sp.shift(constant_pad_nd_default, 1, 1, -1, 0, [1, 8, 0, 8], [1, 8, 0, 8], 2, sim)
add: [1, 8, 4] = aten.add.Tensor(shift_default, 1)
return (add,)""",
        )

    def test_roll_along_several_dims(self):
        found = on_shards(lambda x: (x * 2).roll((9, 1), (1, 2)), torch.randn(1, 8, 4))
        self.assertExpectedInline(
            found,
            """\
x: [1, 8, 4] = placeholder
mul: [1, 8, 4] = aten.mul.Tensor(x, 2)
roll_default: [1, 8, 4] = aten.roll(mul, [1], [2])
roll_default_1: [1, 8, 4] = sp.roll(roll_default, 1, 1, [1, 8, 0, 8], 2, sim)
return (roll_default_1,)""",
        )

    def test_unfold(self):
        found = on_shards(lambda x: (x * 2).unfold(1, 3, 1).sum(-1), torch.randn(1, 8, 4))
        self.assertExpectedInline(
            found,
            """\
x: [1, 8, 4] = placeholder
mul: [1, 8, 4] = aten.mul.Tensor(x, 2)
unfold_default: [1, 6, 4, 3] = sp.unfold(mul, 1, 0, 0, 0, 3, 1, [1, 8, 0, 8], [1, 8, 0, 6], 2, sim)
sum_1: [1, 6, 4] = aten.sum.dim_IntList(unfold_default, [-1])
return (sum_1,)""",
        )

    def test_a_row_before_a_slice(self):
        found = on_shards(
            lambda x, y: torch.cat([y, (x * 2)[:, :-1]], 1) + 1, torch.randn(1, 8, 4), torch.randn(1, 1, 4)
        )
        self.assertExpectedInline(
            found,
            """\
x: [1, 8, 4] = placeholder
y: [1, 1, 4] = placeholder
mul: [1, 8, 4] = aten.mul.Tensor(x, 2)
slice_1: [1, 7, 4] = aten.slice.Tensor(mul, 1, 0, -1)
shift_default: [1, 8, 4] = sp.shift(slice_1, 1, 1, 0, 0, [1, 8, 0, 7], [1, 8, 0, 8], 2, sim)
arange_default: [8] = aten.arange(8, device=cpu)
eq_scalar: [8] = aten.eq.Scalar(arange_default, 0)
reshape_default: [1, 8, 1] = aten.reshape(eq_scalar, [1, 8, 1])
where_self: [1, 8, 4] = aten.where.self(reshape_default, y, shift_default)
add: [1, 8, 4] = aten.add.Tensor(where_self, 1)
return (add,)""",
        )

    def test_the_first_row_before_a_slice(self):
        def fn(x):
            x = x * 2
            return torch.cat([x[:, :1], x[:, :-1]], 1) + 1

        self.assertExpectedInline(
            on_shards(fn, torch.randn(1, 8, 4), first=[SelectRow]),
            """\
x: [1, 8, 4] = placeholder
mul: [1, 8, 4] = aten.mul.Tensor(x, 2)
arange_default: [8] = aten.arange(8, device=cpu)
eq_scalar: [8] = aten.eq.Scalar(arange_default, 0)
reshape_default: [1, 8, 1] = aten.reshape(eq_scalar, [1, 8, 1])
where_scalar_other: [1, 8, 4] = aten.where.ScalarOther(reshape_default, mul, 0)
sum_dim_int_list: [1, 1, 4] = aten.sum.dim_IntList(where_scalar_other, [1], True, dtype=float32)
slice_2: [1, 7, 4] = aten.slice.Tensor(mul, 1, 0, -1)
shift_default: [1, 8, 4] = sp.shift(slice_2, 1, 1, 0, 0, [1, 8, 0, 7], [1, 8, 0, 8], 2, sim)
arange_default_1: [8] = aten.arange(8, device=cpu)
eq_scalar_1: [8] = aten.eq.Scalar(arange_default_1, 0)
reshape_default_1: [1, 8, 1] = aten.reshape(eq_scalar_1, [1, 8, 1])
where_self: [1, 8, 4] = aten.where.self(reshape_default_1, sum_dim_int_list, shift_default)
add: [1, 8, 4] = aten.add.Tensor(where_self, 1)
return (add,)""",
        )

    def test_two_windows_meet(self):
        def fn(x):
            x = x * 2
            return x[:, 1:] - x[:, :-1]

        self.assertExpectedInline(
            on_shards(fn, torch.randn(1, 8, 4)),
            """\
x: [1, 8, 4] = placeholder
mul: [1, 8, 4] = aten.mul.Tensor(x, 2)
slice_1: [1, 7, 4] = aten.slice.Tensor(mul, 1, 1, 9223372036854775807)
slice_2: [1, 7, 4] = aten.slice.Tensor(mul, 1, 0, -1)
shift_default: [1, 7, 4] = sp.shift(slice_2, 1, 0, 0, 0, [1, 8, 0, 7], [1, 8, 1, 7], 2, sim)
sub: [1, 7, 4] = aten.sub.Tensor(slice_1, shift_default)
return (sub,)""",
        )

    def test_an_input_that_every_rank_has(self):
        found = on_shards(lambda x: F.conv1d(x.mT, KERNEL, padding=1, groups=4), torch.randn(1, 8, 4))
        self.assertExpectedInline(
            found,
            """\
lifted_tensor_0: [4, 1, 3] = get_attr
x: [1, 8, 4] = placeholder
m_t: [1, 4, 8] = aten.mT(x)
conv_along_default: [1, 4, 8] = sp.conv_along(m_t, lifted_tensor_0, None, 2, 1, 1, [1], [1], [1], 4, [1, 8, 0, 8], [1, 8, 0, 8], 2, sim)
return (conv_along_default,)""",
        )

    def test_complete_pipeline(self):
        local = sp_compile.parallelize(torch.export.export(Causal(), (torch.randn(1, 8, 4),)), sp=2, seq_dims={"x": 1})
        self.assertExpectedInline(
            show(local),
            """\
x: [1, 8, 4] = placeholder
shard_default: [1, 4, 4] = sp.shard(x, 1, [1, 8, 0, 8], 2, sim)
conv_weight: [4, 1, 3] = get_attr
conv_bias: [4] = get_attr
mul: [1, 4, 4] = aten.mul.Tensor(shard_default, 2)
m_t: [1, 4, 4] = aten.mT(mul)
reduce_grad_default:  = sp.reduce_grad([conv_weight, conv_bias], reduce, 2, sim)
getitem: [4, 1, 3] = getitem(reduce_grad_default, 0)
getitem_1: [4] = getitem(reduce_grad_default, 1)
conv_along_default_1: [1, 4, 4] = sp.conv_along(m_t, getitem, getitem_1, 2, 2, 0, [1], [2], [1], 4, [1, 8, 0, 8], [1, 8, 0, 8], 2, sim)
silu: [1, 4, 4] = aten.silu(conv_along_default_1)
m_t_1: [1, 4, 4] = aten.mT(silu)
sum_1: [] = aten.sum(m_t_1)
all_reduce_default: [] = sp.all_reduce(sum_1, 2, sim)
return (all_reduce_default,)""",
        )

    def test_report(self):
        local = sp_compile.parallelize(torch.export.export(Causal(), (torch.randn(1, 8, 4),)), sp=2, seq_dims={"x": 1})
        report = local.meta["sp_report"]
        self.assertExpectedInline(
            "\n".join(f"{n.label} {n.node}" for n in report.notes),
            """\
exchange_halos conv_along_default_1
reduce_partials sum_1""",
        )
        self.assertExpectedInline(
            "\n".join(f"{e.op} of {e.shape}: {e.forward} and {e.backward} bytes" for e in report.exchanges),
            """\
shard of 1 x 4 x 4: 0 and 64 bytes
reduce_grad of 4 x 1 x 3, 4: 0 and 64 bytes
conv_along of 1 x 4 x 4: 32 and 32 bytes
all_reduce of : 4 and 0 bytes""",
        )


class Causal(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=2, groups=4)

    def forward(self, x):
        return F.silu(self.conv((x * 2).mT)[..., : x.shape[1]]).mT.sum()


@pytest.mark.parametrize(
    ("sliding", "shard", "n", "why"),
    [
        (SlidingRows(8, 1, 3), Shard(1, Frame.full(8, 2)), 2, "zigzag"),
        (SlidingRows(8, 1, 3), Shard(1, Frame.full(8), outer=2), 2, "shares a dim"),
        (SlidingRows(4, 0, 2, 2), Shard(1, Frame.full(8)), 3, "3 ranks .*stride of 2"),
        (SlidingRows(10, 2, 3), Shard(1, Frame.full(8)), 2, r"10 rows .* of 8\b"),
        (SlidingRows(2, 0, 7), Shard(1, Frame.full(8)), 2, "idle"),
        (SlidingRows(8, 5, 6), Shard(1, Frame.full(8)), 2, r"5 rows, .* of 8\b"),
    ],
)
def test_gathered_ops(sliding, shard, n, why):
    assert re.search(why, place_window(sliding, shard, n))


def test_gathered_with_the_reason():
    gm = captured(lambda x: F.avg_pool1d((x * 2).mT, 7, 1, 3).mT + 1, torch.randn(1, 9, 4))
    assert not ExchangeHalos(TWO, **SEQUENCE)(gm).modified
    gather = GatherOperands(TWO, **SEQUENCE)
    assert gather(gm).modified
    assert [note.label for note in gather.notes] == ["gather"]


def test_windows_keep_the_sequence_in_order():
    """A zigzag program has no neighbors: it stays contiguous, or the window is gathered if the user insists."""

    class Model(nn.Module):
        def forward(self, x):
            x = x + F.pad(x * 2, (0, 0, 1, -1))
            q = x.unflatten(-1, (2, 2)).transpose(1, 2)
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    x = torch.randn(1, 16, 4, dtype=torch.float64)
    report = sp_compile.verify(Model(), x, sp=2)
    assert report.count("shift") == 1
    assert not report.fallbacks
    report = sp_compile.verify(Model(), x, sp=2, layout="zigzag", attention="ring")
    assert report.worst < 1e-12
    assert len(report.fallbacks) == 1


class RowsOfDtype(nn.Module):
    """One row, two rows and a shift of values that torch cannot add or fill."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        y = (x.cumsum(1) * 9).to(self.dtype)
        rows = y[:, 3], y[:, -1:], y[:, :2], F.pad(y, (0, 0, 1, -1)), y.roll(1, 1)
        return x.cumsum(1), *(part.float() for part in rows)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn])
def test_rows_of_a_dtype_without_arithmetic(dtype):
    assert sp_compile.verify(RowsOfDtype(dtype), torch.rand(2, 7, 4), sp=2).worst == 0


class Subsampled(nn.Module):
    """Attention over the rows of two convolutions with a stride of 2, with positions added, as in speech models."""

    def __init__(self, length: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Conv1d(4, 4, 3, stride=2, padding=1) for _ in range(2))
        self.positions = nn.Parameter(torch.randn(-(-length // 4), 4))

    def forward(self, x):
        x = F.gelu(self.second(F.gelu(self.first(x.mT)))).mT + self.positions
        q = x.unsqueeze(1)
        return x + F.scaled_dot_product_attention(q, q, q).squeeze(1)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("length", [21, 30, 48])
@pytest.mark.sampled(every=5)
def test_a_rank_has_the_rows_of_complete_strides(length, n):
    report = sp_compile.verify(Subsampled(length).double(), torch.randn(2, length, 4, dtype=torch.float64), sp=n)
    assert report.worst < 1e-12
    assert not report.fallbacks
    assert report.work.flops_share == 1.0


class Encoder(nn.Module):
    """Convolutions of a sound with uneven strides, and one with an even kernel, without an attention.

    A graph break after them leaves such a piece of a speech model. Its only scan is over the mask of the sound.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            *[nn.Conv1d(1, 4, 10, 5, bias=False), nn.GroupNorm(4, 4), nn.GELU()],
            *[nn.Conv1d(4, 4, 3, 2), nn.GELU(), nn.Conv1d(4, 4, 2, 2)],
        )
        self.positions = nn.Conv1d(4, 4, 6, padding=3, groups=2)

    def forward(self, sound, mask):
        x, lengths = self.layers(sound[:, None]), mask.cumsum(1)[:, -1]
        return (x + self.positions(x)[..., :-1]) / lengths[:, None, None]


@pytest.mark.parametrize("n", [2, 3])
def test_convolutions_without_attention_are_on_shards(n):
    sound, mask = torch.randn(2, 811, dtype=torch.float64), torch.ones(2, 811, dtype=torch.int64)
    mask[1, 600:] = 0
    report = sp_compile.verify(Encoder().double(), sound, mask, sp=n)
    assert report.worst < 1e-12
    assert not report.fallbacks
    assert report.work.flops_share == 1.0
