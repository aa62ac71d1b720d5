"""Predictions of `explain` for a rank's training step on a GPU, against the live bytes of Inductor's wrappers."""

from __future__ import annotations

from typing import Any

import pytest
from support.cuda.llama import LLAMA_8B, OF_MANY, Llama, compiled_step, predicted
from support.cuda.worker import AbsentGpu

slow = pytest.mark.slow
CLOSE = 0.1

SMALL = Llama(rows=2048, dim=512, heads=16, hidden=1536, vocab=8192)
"""Narrow heads, and too few values for sums over rows to be fused with rows."""
HOSTED = {"attention": "ulysses", "tiles": 16, "offload": 0.3}
GATHERED = {"attention": "gather", "layout": "zigzag"}

CASES = [
    pytest.param(Llama(checkpoints=False), 2, {"attention": "ulysses"}, id="ulysses"),
    pytest.param(Llama(), 3, {"attention": "ring", "tiles": 4}, id="ring, checkpoints, tiles"),
    pytest.param(Llama(checkpoints=False, layers=1), 4, {"attention": "hybrid", "ulysses": 2, "tiles": 4}, id="hybrid"),
    pytest.param(Llama(), 2, {"attention": "ulysses", "tiles": 4}, id="ulysses, checkpoints, tiles", marks=slow),
    pytest.param(Llama(layers=1), 8, {"attention": "ring", "tiles": 4}, id="ring of 8", marks=slow),
    pytest.param(Llama(), 2, GATHERED, id="gathered zigzag", marks=slow),
    pytest.param(SMALL, 8, GATHERED, id="small, gathered", marks=slow),
    pytest.param(SMALL, 8, GATHERED | {"offload": 0.5}, id="small, gathered, offload", marks=slow),
    pytest.param(SMALL, 8, {"attention": "ulysses", "offload": 0.5}, id="small, ulysses, offload", marks=slow),
    pytest.param(SMALL, 8, {"attention": "ring", "offload": 0.5}, id="small, ring, offload", marks=slow),
    pytest.param(LLAMA_8B.of(2), 8, HOSTED, id="8B, 2 layers", marks=slow),
    pytest.param(LLAMA_8B.of(3), 8, HOSTED, id="8B, 3 layers", marks=slow),
]


@pytest.mark.slow
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("of", "n", "options"), CASES)
def test_a_predicted_peak_is_that_of_the_wrappers(gpu: AbsentGpu, of: Llama, n: int, options: dict[str, Any]) -> None:
    """Compare the peaks of all values and gradients, of forward and backward."""
    live = gpu.run(compiled_step, of, n, **options)
    found = predicted(of, n, **{name: value for name, value in options.items() if name != "ulysses"})
    assert found.values == pytest.approx(live.peak, rel=CLOSE)
    forward, backward = (
        max(x.nbytes for x in found.points() if x.in_backward is backward) for backward in (False, True)
    )
    assert forward == pytest.approx(live.forward.peak, rel=CLOSE)
    assert backward == pytest.approx(live.backward.peak, rel=CLOSE)


@slow
def test_layers_add_up(gpu: AbsentGpu) -> None:
    """Each further layer of an 8B model at a million tokens takes equal memory, and 32 fit into 80 GB with FSDP.

    Attention is recomputed, as in the model with all layers; `explain` predicts the extrapolated peak.
    """
    options = {"attention": "ulysses", "tiles": 16}
    live = [gpu.run(compiled_step, LLAMA_8B.of(n), 8, **options, **OF_MANY) for n in (1, 2, 3)]
    first, second, third = (step.values for step in live)
    assert third - second == pytest.approx(second - first, rel=0.05)
    total = third + (LLAMA_8B.layers - 3) * (third - second)
    assert total + LLAMA_8B.state(8) < 80e9
    assert predicted(LLAMA_8B, 8, **options).peak_without_gradients == pytest.approx(total, rel=CLOSE)
