"""Attention strategies of backend="sp" on real ranks: meshes, scans, cross attention, dropout, bad input."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import ranks as worker
from support.parity import Decoder, Outcome, against_eager, build, check, error_text, sp, text
from support.ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import sp_compile


@functools.cache
def ring_by_ulysses() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))


def on_two_axes(attention: str, seq: int) -> tuple[Outcome, str]:
    chosen: list[str] = []

    def compiler(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        chosen.extend(str(n.target) for n in gm.graph.nodes if "_attention" in str(n.target))
        return torch._dynamo.lookup_backend("aot_eager")(gm, inputs)

    how = {"mesh": ring_by_ulysses(), "attention": attention, "compiler": compiler}
    return against_eager(build(layers=1), *text(seq), **how), chosen[0]


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "seq"), [("auto", 16), ("hybrid", 13)])
def test_a_mesh_of_two_axes_selects_the_hybrid(ranks: Ranks, attention: str, seq: int) -> None:
    results = ranks.run(4, on_two_axes, attention, seq)
    check([outcome for outcome, _ in results])
    assert {target for _, target in results} == {"sp.hybrid_attention.default"}


def cannot(n: int, heads: int, **how: Any) -> str:
    mesh = ring_by_ulysses() if how.pop("two_axes", False) else worker.mesh(n)
    run = sp(build(dim=4 * heads, heads=heads, layers=1), mesh=mesh, **how)
    return error_text(lambda: run(*text(12)))


@pytest.mark.slow
@pytest.mark.sampled(every=6)
@pytest.mark.parametrize(
    ("n", "heads", "how", "words"),
    [
        (3, 4, {"attention": "ulysses"}, ["SP402", "the 4 heads", "parity.py"]),
        (3, 4, {"attention": "hybrid"}, ["SP401", "4 query heads"]),
        (4, 3, {"two_axes": True}, ["SP401", "2 of them", "3 query heads"]),
    ],
    ids=["ulysses", "hybrid", "mesh"],
)
def test_illegal_options_raise_on_every_rank(
    ranks: Ranks, n: int, heads: int, how: dict[str, Any], words: list[str]
) -> None:
    messages = ranks.run(n, functools.partial(cannot, n, heads, **how))
    assert len(set(messages)) == 1
    for word in words:
        assert word in messages[0], messages[0]


def dropped(attention: str) -> list[Tensor]:
    torch._dynamo.reset()
    run = sp(build(AttentionDropout), mesh=worker.mesh(), attention=attention)
    x = torch.ones(1, 4, 64, 2, dtype=torch.float64)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(run(x).detach())
    return results


class AttentionDropout(nn.Module):
    """Attends to ones, so that a result is the share of the weights that were kept, over 1 - p."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)


@pytest.mark.slow
@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("attention", ["ring", "gather", "hybrid", "ulysses"])
def test_dropout_follows_the_seed(ranks: Ranks, attention: str) -> None:
    results = ranks.run(4, dropped, attention)
    for one, again, other in results:
        assert torch.equal(one, again)
        assert not torch.equal(one, other)
        assert abs(one.mean().item() - 1) < 0.05
        rows = one[0, 0, :, 0]
        assert rows.unique().numel() > 8, "rows are dropped independently"
    assert all(torch.equal(found[0], results[0][0]) for found in results)


class Mixed(nn.Module):
    """Causal attention between a scan and a convolution along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder(layers=1)
        self.conv = nn.Conv1d(16, 16, 3, padding=2, groups=16)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.decoder.embed(ids)
        x = x + self.conv(x.mT)[..., : x.shape[1]].mT
        x = self.decoder.blocks[0](x) + 0.1 * x.cumsum(1)
        return F.cross_entropy(self.decoder.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(("seq", "balanced"), [(16, True), (15, False)])
def test_a_model_with_convolutions_keeps_its_order_outside_attention(seq: int, balanced: bool) -> None:
    model = build(Mixed)
    report = sp_compile.verify(model, *text(seq), sp=4, attention="ring", cost={"flops": 1e3, "block_keys": 1e-9})
    assert report.worst < 1e-12
    (decision,) = report.attention
    assert decision.chosen.relayout == balanced
    assert {e.op for e in report.exchanges} >= {"ring_attention", "conv_along", "scan"}
    assert not report.fallbacks


def mixed(seq: int) -> Outcome:
    return against_eager(build(Mixed), *text(seq), mesh=worker.mesh())


@pytest.mark.slow
@pytest.mark.as_users_run
@pytest.mark.parametrize("seq", [13])
def test_attention_between_a_scan_and_a_convolution(ranks: Ranks, seq: int) -> None:
    check(ranks.run(2, mixed, seq))


class Translator(nn.Module):
    """Encoder and decoder of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Linear(16, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(16, 4, 32, 0.0, batch_first=True)

    def forward(self, x: Tensor, source: Tensor, padding: Tensor) -> Tensor:
        memory = self.encoder(self.source(source), src_key_padding_mask=padding)
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.decoder(x, memory, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=padding)


@pytest.mark.slow
@pytest.mark.sampled(every=20)
@pytest.mark.parametrize("attention", ["ulysses", "ring", "hybrid", "gather", "auto"])
@pytest.mark.parametrize(("length", "source"), [(8, 20), (13, 7)])
def test_encoder_and_decoder(attention: str, length: int, source: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2, s, 16, dtype=torch.float64, generator=generator).requires_grad_() for s in (length, source))
    padding = torch.arange(source) >= torch.tensor([[source - 3], [source]])
    report = sp_compile.verify(build(Translator), x, y, padding, sp=4, attention=attention)
    assert report.worst < 1e-10, report
    assert not report.fallbacks, report
