"""Fused losses of packages: loss and gradients equal the original's on a single device, and the head runs on a rank's rows."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from sharding.tiles.losses import VOCAB, Loss, Model, batch
from support.parity import against_eager, check
from support.programs import loss_package as package
from support.ranks import Ranks, mesh
from torch import Tensor, nn

import sp_compile
from sp_compile.passes.capture import package_kernels
from sp_compile.passes.capture.stand_ins.kernel_stand_ins import STAND_INS, ArgumentNames
from sp_compile.passes.capture.stand_ins.loss_stand_ins import _cross_entropy
from sp_compile.passes.localize.tiles import choose_tiles, run_in_tiles

LIGER = package.LigerFusedLinearCrossEntropyFunction.apply


def rows(h: Tensor, ids: Tensor, ignored: int = -100) -> tuple[Tensor, Tensor]:
    """Hidden values of all tokens but the last, and the next tokens, some of them ignored."""
    y = ids[:, 1:].flatten()
    return h[:, :-1].reshape(-1, h.shape[-1]), y.where(y % 3 > 0, ignored)


def liger(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    x, y = rows(h, ids)
    return LIGER(x, head.weight, y, head.bias)[0]


def liger_with_all(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    x, y = rows(h, ids, ignored=-1)
    classes = torch.linspace(0.5, 1.5, VOCAB, dtype=h.dtype)
    loss, z_loss, accuracy = LIGER(
        x, head.weight, y, head.bias, classes, -1, 1e-2, 0.1, "mean", 3.0, True, torch.float32, True, True
    )
    return loss + 3 * z_loss.detach() * accuracy


def liger_summed(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    x, y = rows(h, ids)
    return LIGER(x, head.weight, y, None, None, -100, 1e-3, 0.0, "sum", 5.0)[0] / (ids > 3).sum()


def liger_of_nothing(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    x, y = rows(h, ids)
    return LIGER(x, head.weight, torch.full_like(y, -100))[0]


def liger_of_logits(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    x, y = rows(h, ids)
    loss, z_loss = package.LigerCrossEntropyFunction.apply(head(x), y, -100, 0.1, 1e-3, True)
    return loss + z_loss.detach()


def fla(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    x, y = rows(h, ids)
    return package.FusedLinearCrossEntropyFunction.apply(x, y, head.weight, head.bias, -100, 0.1, 0.5)


def fla_module(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    return package.FusedLinearCrossEntropyLoss()(h, ids.roll(-1, 1), head.weight, head.bias)


def cut(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    return package.linear_cross_entropy(h, head.weight, ids, head.bias, softcap=4.0, shift=1)


def cut_rows(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    losses = package.linear_cross_entropy(h, head.weight, ids, shift=True, reduction="none", filter_eps=None)
    return (losses * weights[:, 1:]).mean()


def trl(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """As in its fused head: log-probabilities with the entropy, a softcap, a temperature and a scale of the logits."""
    x, y = rows(h, ids, ignored=0)
    found = package.ChunkedLogProbFunction.apply(x, head.weight, head.bias, y, 0.7, 32768, 3.0, 0.5)
    log_probs, entropy, squares, mean, is_top1 = (x.view(len(ids), -1) for x in found)
    w = weights[:, 1:]
    return ((0.1 * entropy - log_probs) * w).sum() + ((squares + mean + is_top1) * w).sum()


LOSSES: tuple[Loss, ...] = (
    *(liger, liger_with_all, liger_summed, liger_of_nothing, liger_of_logits, fla, fla_module, cut, cut_rows, trl),
)
FLOAT32 = (trl,)  # whose statistics are float32


def compare(loss: Loss, **how: Any) -> Any:
    """Compare a model with the original loss on a single device; no function of a package may run."""
    model = Model(loss, bias=True).double()
    torch.compiler.reset()  # all losses share the code of the model

    def run(*arguments: Tensor) -> Tensor:
        package.CALLS.clear()
        result = torch.compile(model, backend="sp", options={"compiler": "aot_eager", **how})(*arguments)
        assert not package.CALLS
        return result

    return against_eager(model, *batch(13), run=run)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
@pytest.mark.sampled(every=3)
def test_values_of_the_original(loss: Loss) -> None:
    check([compare(loss)], 1e-6 if loss in FLOAT32 else 1e-12)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
@pytest.mark.sampled(every=3)
def test_rows_of_ranks(loss: Loss) -> None:
    report = sp_compile.verify(Model(loss, bias=True).double(), *batch(13), sp=2 + LOSSES.index(loss) % 2)
    assert report.worst < (1e-6 if loss in FLOAT32 else 1e-9)
    assert not report.fallbacks
    assert report.work.sharded_flops == report.work.flops


@pytest.mark.parametrize("loss", [pytest.param(liger_with_all, marks=pytest.mark.slow), trl])
def test_real_ranks(ranks: Ranks, loss: Loss) -> None:
    check(ranks.run(3, _compare_on_ranks, loss), 1e-6 if loss in FLOAT32 else 1e-9)


def _compare_on_ranks(loss: Loss) -> Any:
    return compare(loss, mesh=mesh(), cost={})


@pytest.mark.parametrize("loss", [liger, cut_rows, trl], ids=lambda loss: loss.__name__)
@pytest.mark.sampled(every=2)
def test_tiles_without_an_option(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code asks for chunks of rows, so that tiles="auto" does not wait until the memory is short."""
    for module in (choose_tiles, run_in_tiles):
        monkeypatch.setattr(module, "TILE_BYTES", 512)
    report = sp_compile.verify(Model(loss).double(), *batch(13), sp=2)
    assert report.worst < (1e-6 if loss in FLOAT32 else 1e-9)
    (region,) = report.tiled
    assert region.tiles > 2


def test_options_without_an_equivalent_run_the_original(caplog: pytest.LogCaptureFixture) -> None:
    def loss(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
        x, y = rows(h, ids)
        return package.FusedLinearCrossEntropyFunction.apply(x, y, head.weight, None, -100, 0.0, 1.0, 8, "mean", True)

    model = Model(loss).double()
    expected = model(*batch(13))
    package.CALLS.clear()
    found = torch.compile(model, backend="sp", options={"compiler": "aot_eager"})(*batch(13))
    assert package.CALLS
    torch.testing.assert_close(found, expected)
    warned = [record.args for record in caplog.records if record.name == package_kernels.__name__]
    assert [kernel for kernel, _ in warned] == ["FusedLinearCrossEntropyFunction"]


# The parameters of Liger-Kernel 0.8.5 and cut_cross_entropy 25.1.1, after the context, and those without an equivalent.
SIGNATURES = {
    "LigerFusedLinearCrossEntropyFunction": (
        "_input weight target bias=None ce_weight=None ignore_index=-100 lse_square_scale=0.0 label_smoothing=0.0 "
        "reduction='mean' softcap=None return_z_loss=False accum_dtype=None use_token_scaling=False "
        "return_token_accuracy=False return_predicted_tokens=False ce_impl=None ce_mode=None chunk_mem_const=1",
        {"accum_dtype", "ce_impl", "ce_mode", "chunk_mem_const"},
    ),
    "LigerCrossEntropyFunction": (
        "_input target weight ignore_index=-100 lse_square_scale=0.0 label_smoothing=0.0 reduction='mean' softcap=None "
        "return_z_loss=False return_token_accuracy=False return_predicted_tokens=False",
        set[str](),
    ),
    "linear_cross_entropy": (
        "e c targets ignore_index=-100 softcap=None reduction='mean' shift=False filter_eps='high' impl='cce'",
        {"filter_eps", "impl"},
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_of_released_packages(name: str) -> None:
    """Arguments by position have the names of the stand-in, with the same defaults."""
    text, others = SIGNATURES[name]
    signature = inspect.signature(eval(f"lambda {', '.join(text.split())}: None"))
    names = ArgumentNames.of(STAND_INS[name], signature)
    assert set(names.positions) - names.known == others
    defaults = {x.name: x.default for x in inspect.signature(_cross_entropy).parameters.values()}
    for option, value in names.defaults.items():
        assert option in others or defaults.get(option, value) == value


@pytest.mark.slow
@pytest.mark.parametrize(("name", "package"), [("liger", "liger_kernel"), ("cut", "cut_cross_entropy")])
def test_values_of_released_packages(name: str, package: str) -> None:
    """If they are installed (`pip install --no-deps liger-kernel cut-cross-entropy`), without a GPU."""
    if find_spec(package) is None or find_spec("triton") is None:
        pytest.skip(f"{package} or triton is not installed")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "support.programs.released_losses", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
