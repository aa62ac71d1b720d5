"""Hand-written tensor-parallel models through backend="sp" on real ranks: losses, gradients and steps equal a single device's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.parallel import parallel_variants as variants
from support.parallel.parallel_models import Split, build, tokens
from support.parallel.parallel_training import Trained, inferred, split, trained
from support.ranks import Ranks
from torch import nn

DECODERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout": 0.3},
    "cut embedding and loss": {"head": "vocab"},
    "tied and cut": {"head": "tied"},
    "tied and whole": {"head": "tied whole"},
    "attention beside mlp": {"parallel": True},
    "gated, explicit norms": {"gated": True, "bias": False, "norms": ("llama", "llama")},
    "hidden states": {"hidden_states": True},
    "checkpoint": {"checkpointed": True},
    "checkpoint and dropout": {"checkpointed": True, "dropout": 0.3},
    "checkpoint, cut loss": {"head": "vocab", "checkpointed": True},
}
# Offsets of a vocabulary that is split differ between ranks: their programs differ, and no layer is scattered.
SCATTERED = {name: "" if "head" in how and "cut" in name else "s" * 8 for name, how in DECODERS.items()}
SCATTERED["attention beside mlp"] = "s" * 6  # forward two a layer, backward one: it reads one norm


def ids(batch: int, length: int, longer: int = 0) -> Callable[[int], Sequence[Any]]:
    """Token ids for every step, each so much longer than the one before."""
    return lambda number: (tokens(batch, length + longer * number, number),)


def check(outcomes: Sequence[Trained], modes: str | None = None) -> None:
    for one in outcomes:
        assert not one.where, one.where[:5]
        assert max(one.eager, one.alone) < 1e-9
        assert modes is None or one.modes == [modes], one


def a_decoder(name: str, batch: int, length: int) -> Trained:
    how = DECODERS[name]
    return trained(lambda tp: build(tp, **how), split(), ids(batch, length), against_one="dropout" not in how)


QUICK = ("dropout", "tied and cut", "checkpoint")


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in DECODERS])
def test_decoders(ranks: Ranks, name: str) -> None:
    check(ranks.run(2, a_decoder, name, 2, 7), SCATTERED[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "tied and cut", "hidden states"])
@pytest.mark.parametrize(("batch", "length"), [(2, 6), (1, 9), (3, 3)])
def test_decoders_of_four(ranks: Ranks, name: str, batch: int, length: int) -> None:
    check(ranks.run(4, a_decoder, name, batch, length), SCATTERED[name])


VARIANTS: dict[str, tuple[Callable[[Split], nn.Module], str | None]] = {
    "lora": (variants.LoRA, None),
    "gate of zeros": (variants.GateOfZeros, "ssss"),
    "equal draws": (variants.EqualParts, "ffff"),  # the embedding is a matrix, too, and might be a part
    "by rank": (variants.ByRank, ""),
    "bias on the first": (variants.BiasOnTheFirst, ""),
    "uneven": (variants.Uneven, ""),
    "offset in a buffer": (variants.OffsetInABuffer, ""),
}
NOT_OF_ONE = ("equal draws", "by rank", "bias on the first", "uneven")


def a_variant(name: str) -> Trained:
    return trained(VARIANTS[name][0], split(), ids(2, 7), against_one=name not in NOT_OF_ONE)


@pytest.mark.slow
@pytest.mark.sampled(every=24)
@pytest.mark.parametrize("name", VARIANTS)
def test_variants(ranks: Ranks, name: str) -> None:
    check(ranks.run(2, a_variant, name), VARIANTS[name][1])


def frozen(tp: Split) -> nn.Module:
    model = build(tp)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "norm" in name or "bias" in name
    return model


def with_frozen_matrices() -> Trained:
    return trained(frozen, split(), ids(2, 7))


def in_place() -> Trained:
    return trained(build, split("in place"), ids(2, 7))


def longer_each_time() -> Trained:
    return trained(lambda tp: build(tp, layers=1), split(), ids(2, 6, longer=1), dynamic=True, against_one=False)


@pytest.mark.slow
@pytest.mark.parametrize("how", [with_frozen_matrices, in_place])
def test_other_forms(ranks: Ranks, how: Callable[[], Trained]) -> None:
    check(ranks.run(2, how), "s" * 8)


@pytest.mark.slow
def test_dynamic_lengths(ranks: Ranks) -> None:
    check(ranks.run(2, longer_each_time), "s" * 4)


def without_gradients(form: str, head: str) -> Trained:
    return inferred(lambda tp: build(tp, head=head, gated=True), split(form), ids(1, 7))


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(("form", "head"), [("plain", "vocab"), ("in place", "replicated")])
def test_inference(ranks: Ranks, form: str, head: str) -> None:
    check(ranks.run(2, without_gradients, form, head), "" if head == "vocab" else "ssss")


def zeros_then_steps() -> float:
    """Evaluate before training: a sharded value of zeros must not be assumed to stay equal on all ranks."""
    tp = split()
    mine, eager = variants.GateOfZeros(tp), variants.GateOfZeros(tp)
    run = torch.compile(mine, backend="sp", options={"compiler": "aot_eager"})
    (batch,) = ids(2, 7)(0)
    with torch.no_grad():
        run(batch)
    for model, call in ((mine, run), (eager, eager)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        call(batch).backward()
        optimizer.step()
    with torch.no_grad():
        return (run(batch) - eager(batch)).abs().item()


@pytest.mark.slow
def test_zeros_that_inference_meets_first(ranks: Ranks) -> None:
    assert max(ranks.run(2, zeros_then_steps)) < 1e-12


def in_bfloat16(how: str) -> tuple[float, str]:
    """Against eager mode in bfloat16: equal but for rounding."""

    def make(tp: Split) -> nn.Module:
        model = build(tp, norms=("llama", "layer"))
        return model.float() if how == "autocast" else model.to(torch.bfloat16)

    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast", cache_enabled=False):
        found = trained(make, split(), ids(2, 7), against_one=False, least=1.0)
    return found.eager, *found.modes


@pytest.mark.slow
@pytest.mark.parametrize("how", ["autocast", "bfloat16"])
def test_half_precision(ranks: Ranks, how: str) -> None:
    for error, modes in ranks.run(2, in_bfloat16, how):
        assert error < 0.05
        assert modes == "s" * 8


def by_inductor() -> Trained:
    return trained(lambda tp: build(tp, head="tied", layers=1), split(), ids(2, 7), compiler="inductor")


@pytest.mark.slow
def test_inductor(ranks: Ranks) -> None:
    check(ranks.run(2, by_inductor))
