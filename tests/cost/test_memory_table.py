"""Reproduced rows of `benchmarks/results/memory/memory_plan.md`: measured bytes of a step equal `explain`'s to 10 %."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from support import ranks as worker
from support.ranks import Ranks

from sp_compile.passes.cost.step_memory import StepMemory, StepMoment, WalkMoment, _last_layer_start, _unsharded_bytes
from sp_compile.passes.cost.weight_memory import ModelBytes

pytestmark = pytest.mark.usefixtures("examples")
COMPILERS = "aot_eager", "inductor"
QUICK = {"Llama on one rank, head and MLPs in 4 tiles"}
"""By `aot_eager`; all others take minutes."""
CASES = [
    *(f"decoder, {way}" for way in ("ulysses", "ring", "hybrid", "gather", "checkpointed blocks")),
    *("recurrences and convolutions", "Llama", "Gemma 2, windows", "GPT-2", "Mixtral", "T5"),
    *("BERT, masked tokens", "Mamba 2", "gpt-oss, sinks, windows and experts", "Llama on one rank", "Llama on two"),
    *("Llama, head and MLPs in 4 tiles", "Llama on one rank, head and MLPs in 4 tiles"),
    *("Llama, half of what is kept on the host", "Llama, checkpointed blocks"),
    *("Llama, checkpointed blocks, all that is kept on the host", "Llama, the same in 4 tiles"),
    "decoder, checkpointed blocks, a ring, 4 tiles, all that is kept on the host",
]
SHARDS = [
    *(f"decoder, 4 layers of {size} tokens" for size in ("512, 1,024", "256, 2,048")),
    "decoder, 4 layers of 512, 2,048 tokens, checkpointed blocks",
    "the same, and head and MLPs in 4 tiles",
    "decoder, 2 layers of 128, 512 tokens",
]


TOO_HIGH = {"Llama, the same in 4 tiles", "decoder, checkpointed blocks, a ring, 4 tiles, all that is kept on the host"}
"""By Inductor, by a bucket of gradients that it makes later than predicted: docs/reference/limits.md says why."""


def rows(names: list[str], quick: set[str]) -> list[Any]:
    def marks(name: str, how: str) -> list[pytest.MarkDecorator]:
        known = [pytest.mark.xfail(strict=True, reason="a bucket is made later")]
        slow = [] if how == "aot_eager" and name in quick else [pytest.mark.slow]
        return slow + (known if how == "inductor" and name in TOO_HIGH else [])

    return [pytest.param(name, how, marks=marks(name, how)) for how, name in product(COMPILERS, names)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "compiler"), rows(CASES, QUICK))
def test_values(name: str, compiler: str) -> None:
    from measuring.steps import compare

    predicted, measured = compare(name, compiler)
    assert predicted == pytest.approx(measured, rel=0.1)


def held(way: str, compiler: str) -> int:
    from measuring import shards

    return shards.held(way, compiler, worker.mesh())


@pytest.mark.parametrize(("way", "compiler"), rows(SHARDS, set()))
def test_fsdp(ranks: Ranks, way: str, compiler: str) -> None:
    """Blocks on two ranks: all live bytes of a warm step, with sharded state and the optimizer's step."""
    from measuring import shards

    found = max(ranks.run(shards.RANKS, held, way, compiler, timeout=600))
    assert shards.predicted(way, compiler) == pytest.approx(found, rel=0.1)


def test_all_rows_are_here() -> None:
    from measuring import shards, steps

    assert (list(steps.CASES), list(shards.WAYS)) == (CASES, SHARDS)


def test_unsharded_bytes_of_fsdp() -> None:
    """Gradients of a head, then of three equal layers, then of an embedding: 5, 20 each, and 7."""
    names = [("head", ""), *((name, "1") for name in "abab"), ("first", "0"), ("embed", "")]
    made = [5, 10, 25, 30, 45, 65, 72]
    moments = [WalkMoment(name, "", gradients, gradients, layer=layer) for (name, layer), gradients in zip(names, made)]
    assert _last_layer_start(moments) == 5
    whole = _unsharded_bytes(moments, largest_layer=20)
    assert whole == [5, 5 + 5, 5 + 20, 5 + 20 + 5, 5 + 20 + 20, 5 + 20 + 20, 5 + 20 + 27]
    step = StepMemory(ModelBytes(parameters=72, trainable=72, buffers=0, unit=20, outside_layers=12))
    beside = [
        step.sharded_bytes(StepMoment("", moment, nbytes, 0, i, True, nbytes, i < 5, whole[i]), 2)
        for i, (moment, nbytes) in enumerate(zip(moments, made))
    ]
    weights = [12 + 20, *[12 + 2 * 20] * 4, 12 + 20, 12]
    most = 12 + 2 * 20
    assert beside == [w + min(g, most) + -(-m // 2) for w, g, m in zip(weights, whole, made)]
