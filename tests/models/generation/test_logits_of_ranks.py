"""Bytes that ranks allocate in a step of a causal language model: logits of a tile at most, never of a rank's rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from models.hf.test_hf import transformers
from support.ranks import Ranks, mesh
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from sp_compile.passes.localize.tiles import choose_tiles, run_in_tiles

VOCAB, WIDTH, ROWS, RANKS, TILES = 8192, 8, 4, 2, 8
LENGTHS = (64, 96, 80)  # the second is compiled with a symbol
TILE = ROWS * max(LENGTHS) // RANKS // TILES * VOCAB * 4  # bytes of a tile of the longest sequence


def largest_allocation(step: Callable[[], Any]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = profiled.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")


def make() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCAB, pad_token_id=0, **sizes))


def with_labels(run: Any, given: dict[str, Tensor]) -> Tensor:
    """As a Trainer calls it, which does not read the logits that the model returns."""
    return run(**given, use_cache=False).loss


def fused(run: Any, given: dict[str, Tensor]) -> Tensor:
    """Log-probabilities and entropies as GRPO reads them, and those of a reference without gradients."""
    found = run(**given, fused_lm_head=True)
    with torch.no_grad():
        reference = run(**given, fused_lm_head=True).log_probs
    return -(found.log_probs - reference).exp().mean() + 1e-2 * found.entropy.mean() + found.mean_logits.mean()


def measure(kind: str, rows: tuple[int, ...]) -> list[int]:
    """Return the bytes of the largest allocation of each step on this rank, after steps that compile."""
    model = make()
    if kind == "fused":
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    calls = {"fused": fused, "labels": with_labels}
    options = {"mesh": mesh(), "compiler": "aot_eager", "cost": {}}
    run = torch.compile(model, backend="sp", options=options | ({"tiles": TILES} if kind == "labels" else {}))

    def step(length: int, n: int) -> None:
        ids = torch.randint(3, VOCAB, (n, length), generator=torch.Generator().manual_seed(length))
        mask = (torch.arange(length) < length - torch.arange(n)[:, None]).long()
        given = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
        calls[kind](run, given).backward()
        model.zero_grad()

    of_small_tiles = [mock.patch.object(module, "TILE_BYTES", TILE) for module in (choose_tiles, run_in_tiles)]
    with of_small_tiles[0], of_small_tiles[1]:
        for length, n in zip(LENGTHS, rows):
            step(length, n)
        return [largest_allocation(lambda length=length, n=n: step(length, n)) for length, n in zip(LENGTHS, rows)]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [(ROWS, ROWS, ROWS), (ROWS, 2, 3)], ids=["lengths", "lengths and sequences"])
@pytest.mark.parametrize("kind", ["labels", "fused"])
def test_a_rank_has_logits_of_a_tile(ranks: Ranks, kind: str, rows: tuple[int, ...]) -> None:
    if kind == "fused":
        pytest.importorskip("trl")
    for found in ranks.run(RANKS, measure, kind, rows):
        for length, n, largest in zip(LENGTHS, rows, found):
            logits = n * length // RANKS * VOCAB * 4
            assert VOCAB * WIDTH * 4 <= largest <= max(TILE * 3 // 2, logits // 4), (length, n)
