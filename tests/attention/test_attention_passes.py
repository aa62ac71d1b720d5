"""Golden graphs of the attention passes, run directly on an exported graph. EXPECTTEST_ACCEPT=1 rewrites them."""

import math
from unittest import mock

import expecttest
import pytest
import torch
import torch.nn.functional as F
from support.golden import captured, show

from sp_compile import explain, verify
from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP
from sp_compile.lowering.masks.predicate import evaluate_over, predicate_symbols
from sp_compile.passes.canonical.canonicalize import Canonicalize
from sp_compile.passes.strategies.attention import ring_strategy as ring
from sp_compile.passes.strategies.attention.gather_strategy import AttendWithGatheredKeys
from sp_compile.passes.strategies.attention.hybrid_strategy import AttendWithHybrid
from sp_compile.passes.strategies.attention.ring_strategy import AttendWithRing, max_hops
from sp_compile.passes.strategies.attention.ulysses_strategy import AttendWithUlysses

FOUR = Ranks(4, SIMULATED_GROUP)


def split(x):
    return (x * 2).unflatten(-1, (4, 4)).transpose(1, 2)


def causal(x):
    q = split(x)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


def windowed(x):
    q, i = split(x), torch.arange(x.shape[1])
    return F.scaled_dot_product_attention(q, q, q, attn_mask=(i[:, None] >= i) & (i[:, None] - i < 3))


def grouped(x):
    q = split(x)
    return F.scaled_dot_product_attention(q, q[:, :2], q[:, :2], enable_gqa=True)


@pytest.mark.parametrize(
    "predicate",
    [
        "k <= q",
        "(k <= q) & (q - k < 40)",
        "Abs(q - k) < 17",
        "(k - q < 9) & (Eq(row0, col0))",
        "k < 20",
        "(k <= q) | (k < 3)",
    ],
)
@pytest.mark.parametrize(("n", "rows"), [(1, 8), (2, 16), (7, 8)])
def test_the_furthest_rank_whose_keys_a_query_may_see(predicate: str, n: int, rows: int) -> None:
    """The furthest rank equals the result of a test of every pair of ranks."""
    free = {name: (-math.inf, math.inf) for name in predicate_symbols(predicate)}
    held = [(rank * rows, (rank + 1) * rows - 1) for rank in range(n)]
    seen = {
        (q - k) % n
        for q in range(n)
        for k in range(n)
        if evaluate_over(predicate, {**free, "q": held[q], "k": held[k]}) is not False
    }
    assert max_hops(predicate, n, rows) == max(seen, default=0)


def test_the_furthest_of_many_ranks_is_found_with_few_questions() -> None:
    with mock.patch.object(ring, "evaluate_over", side_effect=evaluate_over) as asked:
        assert max_hops("(k <= q) & (q - k < 1000)", 512, 1024) == 1
    assert asked.call_count <= 4 * 512


class Goldens(expecttest.TestCase):
    def test_ring(self):
        gm = captured(causal, torch.randn(1, 16, 16))
        AttendWithRing(FOUR)(gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [1, 16, 16] = placeholder
mul: [1, 16, 16] = aten.mul.Tensor(x, 2)
unflatten: [1, 16, 4, 4] = aten.unflatten.int(mul, -1, [4, 4])
transpose: [1, 4, 16, 4] = aten.transpose.int(unflatten, 1, 2)
ring_attention_default: [1, 4, 16, 4] = sp.ring_attention(transpose, transpose, transpose, None, [], [], [], [], k <= q, None, 0.0, None, , [], [], None, False, [1, 16, 0, 16], [1, 16, 0, 16], 4, sim, False, 4, travel)
return (ring_attention_default,)""",
        )

    def test_ring_of_a_window_needs_fewer_steps(self):
        gm = captured(windowed, torch.randn(1, 16, 16))
        Canonicalize()(gm)
        AttendWithRing(FOUR)(gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [1, 16, 16] = placeholder
mul: [1, 16, 16] = aten.mul.Tensor(x, 2)
unflatten: [1, 16, 4, 4] = aten.unflatten.int(mul, -1, [4, 4])
transpose: [1, 4, 16, 4] = aten.transpose.int(unflatten, 1, 2)
ring_attention_default: [1, 4, 16, 4] = sp.ring_attention(transpose, transpose, transpose, None, [], [], [], [], (k <= q) & (-k + q < 3), None, 0.0, None, , [], [], None, False, [1, 16, 0, 16], [1, 16, 0, 16], 4, sim, False, 2, travel)
return (ring_attention_default,)""",
        )

    def test_zigzag(self):
        gm = captured(causal, torch.randn(1, 13, 16))
        AttendWithRing(FOUR, folds=2)(gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [1, 13, 16] = placeholder
mul: [1, 13, 16] = aten.mul.Tensor(x, 2)
unflatten: [1, 13, 4, 4] = aten.unflatten.int(mul, -1, [4, 4])
transpose: [1, 4, 13, 4] = aten.transpose.int(unflatten, 1, 2)
ring_attention_default: [1, 4, 13, 4] = sp.ring_attention(transpose, transpose, transpose, None, [], [], [], [], k <= q, None, 0.0, None, , [], [], None, False, [1, 13, 0, 13, 2], [1, 13, 0, 13, 2], 4, sim, False, 4, travel)
return (ring_attention_default,)""",
        )

    def test_hybrid(self):
        gm = captured(causal, torch.randn(1, 16, 16))
        AttendWithHybrid(FOUR)(gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [1, 16, 16] = placeholder
mul: [1, 16, 16] = aten.mul.Tensor(x, 2)
unflatten: [1, 16, 4, 4] = aten.unflatten.int(mul, -1, [4, 4])
transpose: [1, 4, 16, 4] = aten.transpose.int(unflatten, 1, 2)
hybrid_attention_default: [1, 4, 16, 4] = sp.hybrid_attention(transpose, transpose, transpose, None, [], [], [], [], k <= q, None, 0.0, None, , [], [], None, False, [1, 16, 0, 16], [1, 16, 0, 16], 4, sim, False, 2, travel)
return (hybrid_attention_default,)""",
        )

    def test_gathered(self):
        gm = captured(causal, torch.randn(1, 16, 16))
        AttendWithGatheredKeys(FOUR)(gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [1, 16, 16] = placeholder
mul: [1, 16, 16] = aten.mul.Tensor(x, 2)
unflatten: [1, 16, 4, 4] = aten.unflatten.int(mul, -1, [4, 4])
transpose: [1, 4, 16, 4] = aten.transpose.int(unflatten, 1, 2)
gathered_attention_default: [1, 4, 16, 4] = sp.gathered_attention(transpose, transpose, transpose, None, [], [], [], [], k <= q, None, 0.0, None, , [], [], None, False, [1, 16, 0, 16], [1, 16, 0, 16], 4, sim, False)
return (gathered_attention_default,)""",
        )

    def test_ulysses_repeats_key_heads_for_the_ranks(self):
        gm = captured(grouped, torch.randn(1, 16, 16))
        AttendWithUlysses(FOUR)(gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [1, 16, 16] = placeholder
mul: [1, 16, 16] = aten.mul.Tensor(x, 2)
unflatten: [1, 16, 4, 4] = aten.unflatten.int(mul, -1, [4, 4])
transpose: [1, 4, 16, 4] = aten.transpose.int(unflatten, 1, 2)
slice_1: [1, 2, 16, 4] = aten.slice.Tensor(transpose, 1, 0, 2)
slice_2: [1, 2, 16, 4] = aten.slice.Tensor(transpose, 1, 0, 2)
unsqueeze_default: [1, 2, 1, 16, 4] = aten.unsqueeze(slice_1, -3)
expand_default: [1, 2, 2, 16, 4] = aten.expand(unsqueeze_default, [1, 2, 2, 16, 4])
reshape_default: [1, 4, 16, 4] = aten.reshape(expand_default, [1, 4, 16, 4])
unsqueeze_default_1: [1, 2, 1, 16, 4] = aten.unsqueeze(slice_2, -3)
expand_default_1: [1, 2, 2, 16, 4] = aten.expand(unsqueeze_default_1, [1, 2, 2, 16, 4])
reshape_default_1: [1, 4, 16, 4] = aten.reshape(expand_default_1, [1, 4, 16, 4])
all_to_all_default:  = sp.all_to_all([transpose, reshape_default, reshape_default_1], 1, [1, 4, 0, 4], 2, [1, 16, 0, 16], 4, sim)
getitem: [1, 4, 16, 4] = getitem(all_to_all_default, 0)
getitem_1: [1, 4, 16, 4] = getitem(all_to_all_default, 1)
getitem_2: [1, 4, 16, 4] = getitem(all_to_all_default, 2)
scaled_dot_product_attention: [1, 4, 16, 4] = aten.scaled_dot_product_attention(getitem, getitem_1, getitem_2, enable_gqa=True)
all_to_all_default_1:  = sp.all_to_all([scaled_dot_product_attention], 2, [1, 16, 0, 16], 1, [1, 4, 0, 4], 4, sim)
getitem_3: [1, 4, 16, 4] = getitem(all_to_all_default_1, 0)
return (getitem_3,)""",
        )


def test_requested_ulysses_that_is_illegal():
    gm = captured(causal, torch.randn(1, 15, 16))
    with pytest.raises(SpError, match=r"SP402: .*\b3\b.*\b4\b.* \[1, 4, 15, 4\]"):
        AttendWithUlysses(Ranks(3, SIMULATED_GROUP), attention="ulysses")(gm)


def test_a_hybrid_of_ranks_that_do_not_factor():
    gm = captured(causal, torch.randn(1, 15, 16))
    with pytest.raises(SpError, match="SP401"):
        AttendWithHybrid(Ranks(3, SIMULATED_GROUP))(gm)


def test_a_hybrid_without_heads():
    class Plain(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x.sin().flatten(0, 1)
            return F.scaled_dot_product_attention(h, h, h.sin())

    with pytest.raises(SpError, match=r"SP401: .*\b1\b"):
        explain(Plain(), torch.randn(1, 5, 3), sp=2, attention="hybrid", seq_dims={"x": 1})


def alone(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def projected(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True) @ torch.ones(4, 3, dtype=q.dtype)


def of_itself(q, k, v):
    return F.scaled_dot_product_attention(q, q, q, is_causal=True) + v


def slid(q, k, v):
    i = torch.arange(q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, (i[:, None] >= i) & (i[:, None] - i < 3)).transpose(1, 2)


@pytest.mark.sampled(every=10)
@pytest.mark.parametrize("strategy", ["auto", "ulysses", "ring", "gather"])
@pytest.mark.parametrize("program", [alone, projected, of_itself, slid])
def test_attention_begins_on_shards_of_inputs(program, strategy):
    q, k, v = (torch.randn(2, 6, 13, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    for n in (2, 3):
        report = verify(program, q, k, v, sp=n, attention=strategy)
        assert report.attention
        assert not report.fallbacks
        assert report.worst < 1e-9


def test_attention_that_no_mask_counts_begins_on_queries_alone():
    q, k, v = (torch.randn(2, 6, 13, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    report = verify(F.scaled_dot_product_attention, q, k, v, sp=2)
    assert report.worst < 1e-9
    assert {one.op for one in report.exchanges if one.forward} == {"unshard"}
