"""Golden graphs of the scan passes, run directly and in the pipeline. EXPECTTEST_ACCEPT=1 rewrites them."""

from __future__ import annotations

import expecttest
import torch
from support.golden import captured, show

import sp_compile
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP
from sp_compile.passes.context import NoteKind
from sp_compile.passes.cost.machine import Machine
from sp_compile.passes.localize.localize import Localize
from sp_compile.passes.strategies.gather_demands import GatherOperands
from sp_compile.passes.strategies.scan_demands import ShardScans, SplitNestedScans

TWO = Ranks(2, SIMULATED_GROUP)
sp = torch.ops.sp
x = torch.randn(1, 7, 4)


class Goldens(expecttest.TestCase):
    def test_cumsum(self):
        gm = captured(lambda x: (x * 2).cumsum(1) + 1, x)
        ShardScans(TWO)(gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [1, 7, 4] = placeholder
mul: [1, 7, 4] = aten.mul.Tensor(x, 2)
scan_default: [1, 7, 4] = sp.scan(mul, None, 1, sum, frame=[1, 7, 0, 7], exchange=gather, n=2, group=sim)
add: [1, 7, 4] = aten.add.Tensor(scan_default, 1)
return (add,)""",
        )

    def test_every_cumulative_op(self):
        def all_of_them(x):
            y = x * 2
            return y.cumsum(-2, dtype=torch.float64) + y.cumprod(1) + y.logcumsumexp(1) + (y > 0).cumsum(1)

        gm = captured(all_of_them, x)
        ShardScans(TWO)(gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [1, 7, 4] = placeholder
mul: [1, 7, 4] = aten.mul.Tensor(x, 2)
scan_default: [1, 7, 4] = sp.scan(mul, None, 1, sum, False, False, float64, frame=[1, 7, 0, 7], exchange=gather, n=2, group=sim)
scan_default_1: [1, 7, 4] = sp.scan(mul, None, 1, prod, frame=[1, 7, 0, 7], exchange=gather, n=2, group=sim)
add: [1, 7, 4] = aten.add.Tensor(scan_default, scan_default_1)
scan_default_2: [1, 7, 4] = sp.scan(mul, None, 1, logsumexp, frame=[1, 7, 0, 7], exchange=gather, n=2, group=sim)
add_1: [1, 7, 4] = aten.add.Tensor(add, scan_default_2)
gt: [1, 7, 4] = aten.gt.Scalar(mul, 0)
scan_default_3: [1, 7, 4] = sp.scan(gt, None, 1, sum, frame=[1, 7, 0, 7], exchange=gather, n=2, group=sim)
add_2: [1, 7, 4] = aten.add.Tensor(add_1, scan_default_3)
return (add_2,)""",
        )

    def test_extremes_with_and_without_their_indices(self):
        def extremes(x):
            highest, index = (x * 2).cummax(1)
            lowest, _ = (x * 3).cummin(1)
            return highest + lowest, index

        gm = captured(extremes, x)
        ShardScans(TWO)(gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [1, 7, 4] = placeholder
mul: [1, 7, 4] = aten.mul.Tensor(x, 2)
extremes_default:  = sp.extremes(mul, 1, max, frame=[1, 7, 0, 7], exchange=gather, n=2, group=sim)
getitem: [1, 7, 4] = getitem(extremes_default, 0)
getitem_1: [1, 7, 4] = getitem(extremes_default, 1)
mul_1: [1, 7, 4] = aten.mul.Tensor(x, 3)
scan_default: [1, 7, 4] = sp.scan(mul_1, None, 1, min, frame=[1, 7, 0, 7], exchange=gather, n=2, group=sim)
add: [1, 7, 4] = aten.add.Tensor(getitem, scan_default)
return (add, getitem_1)""",
        )

    def test_a_sequence_that_begins_with_a_scan(self):
        gm = captured(lambda x: x.cumsum(1), x)
        for rewrite in (ShardScans(TWO), GatherOperands(TWO), Localize(TWO)):
            gm = rewrite(gm).graph_module
        self.assertExpectedInline(
            show(gm),
            """\
x: [1, 7, 4] = placeholder
shard_default:  = sp.shard(x, 1, [1, 7, 0, 7], 2, sim)
scan_default: [1, 7, 4] = sp.scan(shard_default, None, 1, sum, frame=[1, 7, 0, 7], exchange=gather, n=2, group=sim)
unshard_default: [1, 7, 4] = sp.unshard(scan_default, 1, [1, 7, 0, 7], 2, sim)
return (unshard_default,)""",
        )

    def test_a_window_of_the_sequence(self):
        gm = captured(lambda x: (x * 2)[:, 1:].cumsum(1), x)
        ShardScans(TWO)(gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [1, 7, 4] = placeholder
mul: [1, 7, 4] = aten.mul.Tensor(x, 2)
slice_1: [1, 6, 4] = aten.slice.Tensor(mul, 1, 1, 9223372036854775807)
scan_default: [1, 6, 4] = sp.scan(slice_1, None, 1, sum, frame=[1, 7, 1, 6], exchange=gather, n=2, group=sim)
return (scan_default,)""",
        )

    def test_zigzag(self):
        gm = captured(lambda x: (x * 2).cumsum(1), x)
        ShardScans(TWO, folds=2)(gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [1, 7, 4] = placeholder
mul: [1, 7, 4] = aten.mul.Tensor(x, 2)
scan_default: [1, 7, 4] = sp.scan(mul, None, 1, sum, frame=[1, 7, 0, 7, 2], exchange=gather, n=2, group=sim)
return (scan_default,)""",
        )

    def test_ops_of_the_package_without_a_frame(self):
        def written(x, y):
            state = sp.linear_scan(torch.sigmoid(x), x, None, 1)
            return sp.scan(state, y, 1, "max", exclusive=True)

        gm = captured(written, x, torch.arange(7) // 3)
        ShardScans(TWO)(gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [1, 7, 4] = placeholder
y: [7] = placeholder
sigmoid: [1, 7, 4] = aten.sigmoid(x)
linear_scan: [1, 7, 4] = sp.linear_scan(sigmoid, x, None, 1, frame=[1, 7, 0, 7], exchange=gather, n=2, group=sim)
scan: [1, 7, 4] = sp.scan(linear_scan, y, 1, max, True, frame=[1, 7, 0, 7], exchange=gather, n=2, group=sim)
return (scan,)""",
        )

    def test_large_carries_go_in_steps(self):
        gm = captured(lambda x: (x * 2).cumsum(1), torch.randn(1, 32, 4))
        slow = Machine.of("cpu", {"all_gather_bandwidth": 1.0})
        ShardScans(Ranks(8, SIMULATED_GROUP), machine=slow)(gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [1, 32, 4] = placeholder
mul: [1, 32, 4] = aten.mul.Tensor(x, 2)
scan_default: [1, 32, 4] = sp.scan(mul, None, 1, sum, frame=[1, 32, 0, 32], exchange=steps, n=8, group=sim)
return (scan_default,)""",
        )

    def test_a_batch_of_sequences_in_one_dim(self):
        gm = captured(lambda x: (x * 2).flatten(0, 1).cumsum(0), torch.randn(3, 7, 4))
        SplitNestedScans(TWO)(gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [3, 7, 4] = placeholder
mul: [3, 7, 4] = aten.mul.Tensor(x, 2)
flatten: [21, 4] = aten.flatten.using_ints(mul, 0, 1)
to_dtype: [21, 4] = aten.to.dtype(flatten, float64)
reshape_default: [3, 7, 4] = aten.reshape(to_dtype, [3, 7, 4])
scan_default_1: [3, 7, 4] = sp.scan(reshape_default, None, 1, sum)
select_int: [3, 4] = aten.select.int(scan_default_1, 1, -1)
scan_default_2: [3, 4] = sp.scan(select_int, None, 0, sum, True)
unsqueeze_default: [3, 1, 4] = aten.unsqueeze(scan_default_2, 1)
add_tensor: [3, 7, 4] = aten.add.Tensor(unsqueeze_default, scan_default_1)
reshape_default_1: [21, 4] = aten.reshape(add_tensor, [21, 4])
to_dtype_1: [21, 4] = aten.to.dtype(reshape_default_1, float32)
return (to_dtype_1,)""",
        )

    def test_choices_of_each_token_in_one_dim(self):
        def queues(x):
            return x.topk(2, -1)[0].flatten(0, 1).cumsum(0)

        gm = captured(lambda x: queues((x * 2).cumprod(0)), torch.randn(7, 4))
        for rewrite in (SplitNestedScans(TWO), ShardScans(TWO)):
            rewrite(gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [7, 4] = placeholder
mul: [7, 4] = aten.mul.Tensor(x, 2)
scan_default_3: [7, 4] = sp.scan(mul, None, 0, prod, frame=[1, 7, 0, 7], exchange=gather, n=2, group=sim)
topk:  = aten.topk(scan_default_3, 2)
getitem: [7, 2] = getitem(topk, 0)
getitem_1: [7, 2] = getitem(topk, 1)
flatten: [14] = aten.flatten.using_ints(getitem, 0, 1)
to_dtype: [14] = aten.to.dtype(flatten, float64)
reshape_default: [7, 2] = aten.reshape(to_dtype, [7, 2])
scan_default_1: [7, 2] = sp.scan(reshape_default, None, 1, sum)
select_int: [7] = aten.select.int(scan_default_1, 1, -1)
scan_default_2: [7] = sp.scan(select_int, None, 0, sum, True, frame=[1, 7, 0, 7], exchange=gather, n=2, group=sim)
unsqueeze_default: [7, 1] = aten.unsqueeze(scan_default_2, 1)
add_tensor: [7, 2] = aten.add.Tensor(unsqueeze_default, scan_default_1)
reshape_default_1: [14] = aten.reshape(add_tensor, [14])
to_dtype_1: [14] = aten.to.dtype(reshape_default_1, float32)
return (to_dtype_1,)""",
        )

    def test_slow_scans_of_one_rank(self):
        def several(x):
            return x.cumsum(0), x.cumsum(1), x[:4].cumprod(0), x.cummax(0)[1]

        gm = captured(several, torch.randn(4096, 8))
        ShardScans(1)(gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [4096, 8] = placeholder
scan_default: [4096, 8] = sp.scan(x, None, 0, sum)
cumsum_1: [4096, 8] = aten.cumsum(x, 1)
slice_1: [4, 8] = aten.slice.Tensor(x, 0, 0, 4)
cumprod: [4, 8] = aten.cumprod(slice_1, 0)
extremes_default:  = sp.extremes(x, 0, max)
getitem: [4096, 8] = getitem(extremes_default, 0)
getitem_1: [4096, 8] = getitem(extremes_default, 1)
return (scan_default, cumsum_1, cumprod, getitem_1)""",
        )

    def test_the_graph_of_a_rank(self):
        gm = captured(lambda x: ((x * 2).cumsum(1) - x * 2).exp(), x)
        local = sp_compile.parallelize(gm, sp=2, seq_dims={"x": 1})
        self.assertExpectedInline(
            show(local),
            """\
x: [1, 7, 4] = placeholder
shard_default: [1, 4, 4] = sp.shard(x, 1, [1, 7, 0, 7], 2, sim)
mul: [1, 4, 4] = aten.mul.Tensor(shard_default, 2)
scan_default: [1, 4, 4] = sp.scan(mul, None, 1, sum, True, frame=[1, 7, 0, 7], exchange=gather, n=2, group=sim)
exp: [1, 4, 4] = aten.exp(scan_default)
unshard_default: [1, 7, 4] = sp.unshard(exp, 1, [1, 7, 0, 7], 2, sim)
return (unshard_default,)""",
        )
        report = local.meta["sp_report"]
        assert [note.subject for note in report.find_notes(NoteKind.REWRITTEN)] == ["shard_scans"]
        sent = [(exchange.op, exchange.forward, exchange.backward) for exchange in report.exchanges]
        assert sent == [("shard", 0, 64), ("scan", 32, 32), ("unshard", 64, 0)]
