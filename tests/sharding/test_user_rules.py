"""An op of the user's whose rule has groups of factors: sharded by the passes, right on ranks, with padding too."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import sp_compile
from sp_compile.passes.sharding import rule
from sp_compile.passes.sharding.factors import BoundRule
from sp_compile.passes.sharding.notation import RulePattern, _solve_groups


@torch.library.custom_op("sp_tests::merge_rows", mutates_args=())
def merge_rows(x: Tensor) -> Tensor:
    return x.flatten(0, 1) * 2


@torch.library.custom_op("sp_tests::sum_rows", mutates_args=())
def sum_rows(x: Tensor, like: Tensor) -> Tensor:
    return x.unflatten(0, like.shape[:2]).sum(1) + 0.0


@torch.library.custom_op("sp_tests::running_mean", mutates_args=())
def running_mean(x: Tensor) -> Tensor:
    return x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype, device=x.device)[:, None]


running_mean.register_fake(torch.empty_like)
merge_rows.register_fake(lambda x: x.new_empty(x.shape[0] * x.shape[1], x.shape[2]))
merge_rows.register_autograd(
    lambda ctx, grad: grad.unflatten(0, ctx.rows) * 2,
    setup_context=lambda ctx, inputs, output: setattr(ctx, "rows", inputs[0].shape[:2]),
)
sum_rows.register_fake(lambda x, like: x.new_empty(like.shape[0], x.shape[1]))
sum_rows.register_autograd(
    lambda ctx, grad: (grad[:, None].expand(*ctx.rows, -1).flatten(0, 1), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "rows", inputs[1].shape[:2]),
)


@torch.library.custom_op("sp_tests::clip_gradient", mutates_args=())
def clip_gradient(x: Tensor) -> Tensor:
    return x.clone()


clip_gradient.register_fake(torch.empty_like)
clip_gradient.register_autograd(lambda ctx, grad: grad.clamp(-0.1, 0.1))


@pytest.fixture(autouse=True)
def rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "RULES", copy.copy(rule.RULES))
    sp_compile.sharding_rule(torch.ops.sp_tests.merge_rows.default, "b s d -> (b s) d")
    sp_compile.sharding_rule(torch.ops.sp_tests.running_mean.default, "b s d -> b s d", scan="s")
    sp_compile.sharding_rule(torch.ops.sp_tests.sum_rows.default, "(b s) d, b s e -> b d", sum="s", replicate="e")


class Model(nn.Module):
    """Attention, its rows merged, and summed for each sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(16, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        heads = x.unflatten(2, (2, 4)).transpose(1, 2)
        x = nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        rows = self.out(torch.ops.sp_tests.merge_rows(x))
        return torch.ops.sp_tests.sum_rows(rows, x)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("length", [12, 13], ids=["padded", "even"])
def test_an_op_of_the_user_keeps_its_groups_sharded(length: int) -> None:
    ids = torch.randint(16, (3, length), generator=torch.Generator().manual_seed(1))
    report = sp_compile.verify(Model(), ids, sp=2, attention="ulysses")
    assert report.worst < 1e-4
    assert {e.op for e in report.exchanges} == {"shard", "all_to_all", "all_reduce", "reduce_grad"}


def test_a_scan_of_the_user_is_gathered() -> None:
    """A rule declares that rows depend on earlier rows, not how ranks would combine them."""

    def model(x: Tensor) -> Tensor:
        return torch.ops.sp_tests.running_mean(x.cumsum(1).sin()).cos()

    with torch.no_grad():
        report = sp_compile.verify(model, torch.randn(2, 7, 4, dtype=torch.float64), sp=2)
    assert report.worst < 1e-12
    assert [note.label for note in report.fallbacks] == ["gather"]


def test_a_backward_of_the_user_gets_full_gradients() -> None:
    """A clipped sum over the ranks is not the sum of clipped summands."""

    def model(x: Tensor, w: Tensor) -> Tensor:
        return (x.sin() @ torch.ops.sp_tests.clip_gradient(w * 1.0)).sin()

    x, w = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 7, 6), (6, 5)))
    assert sp_compile.verify(model, x, w, sp=2, seq_dims={"x": 1}).worst < 1e-9


def test_deprecated_name_of_replicate() -> None:
    op = torch.ops.sp_tests.sum_rows.default
    node = make_fx(op)(torch.ones(6, 4), torch.ones(2, 3, 5)).graph.find_nodes(op="call_function", target=op)[0]
    for text, options in (("(b s) d, b s e -> b d", {"whole": "e"}), ("(b s) d, b s e -> b d; whole=e", {})):
        with pytest.warns(FutureWarning, match="use 'replicate'"):
            sp_compile.sharding_rule(op, text, sum="s", **options)
        assert str(rule.rule_of(node)) == "(b s) d, b s e -> b d; sum=s; replicate=e"
    with pytest.warns(FutureWarning, match="use 'replicate'"):
        assert BoundRule((("n", "i"),), (("n",),), {"i": "whole"}).kind("i") == "replicate"


def test_results_of_other_dims_than_the_text_have_no_rule() -> None:
    pattern = RulePattern.parse("(b s) d -> b s d")
    assert pattern._bind([(6, 4)], [()]) is None
    assert pattern._bind([(6, 4)], [(2, 3, 4)]) is not None
    assert _solve_groups([(("(b s)", "d"), (6, 4)), (("b", "s", "d"), ())], {"d": 4}) is None
