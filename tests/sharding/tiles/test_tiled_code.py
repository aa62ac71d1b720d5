"""Inductor's code for a head and its loss in tiles: no buffer exceeds a tile of logits, forward or backward."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import chain
from typing import Any
from unittest import mock

import pytest
import torch
from sharding.tiles.losses import Loss, Model, batch, mean, per_sequence
from support import ranks as worker
from support.ranks import Ranks
from torch._inductor.graph import GraphLowering

ROWS, SEQ, VOCAB, RANKS = 2, 128, 1024, 2
"""SEQ: tokens of a rank. All other values are smaller than a tile of logits in any layout."""


def largest_buffer(loss: Loss, tiles: int | str, n: int = 1) -> int:
    """Elements of the largest buffer in all code of a step, of a rank of n."""
    texts: list[str] = []
    to_module: Callable[[GraphLowering], Any] = GraphLowering.compile_to_module

    def written(graph: GraphLowering) -> Any:
        module = to_module(graph)
        with open(module.__file__) as file:
            texts.append(file.read())
        return module

    torch.compiler.reset()
    options = {"tiles": tiles, "cost": {}, **({"mesh": worker.mesh()} if n > 1 else {})}
    run = torch.compile(Model(loss, vocab=VOCAB), backend="sp", options=options, dynamic=False)
    with (
        mock.patch.object(GraphLowering, "compile_to_module", written),
        torch._inductor.config.patch(force_disable_caches=True),
    ):
        run(*batch(n * SEQ)).backward()
    torch.compiler.reset()
    found = [re.findall(r"= empty_strided\w*\(\(([\d, ]*)\)", text) for text in texts]
    shapes = [[int(n) for n in re.findall(r"\d+", shape)] for shape in chain(*found)]
    assert len(texts) >= 2
    return max(map(math.prod, shapes))


@pytest.mark.slow
@pytest.mark.parametrize("loss", [mean, pytest.param(per_sequence, marks=pytest.mark.slow)], ids=["at once", "again"])
def test_no_buffer_holds_more_than_a_tile(loss: Loss) -> None:
    logits, tiles = ROWS * SEQ * VOCAB, 8
    assert largest_buffer(loss, "never") == logits
    assert logits // (2 * tiles) < largest_buffer(loss, tiles) <= logits // tiles


@pytest.mark.slow
@pytest.mark.parametrize("loss", [mean, per_sequence], ids=["at once", "again"])
def test_no_buffer_of_a_rank_holds_more_than_a_tile(ranks: Ranks, loss: Loss) -> None:
    logits, tiles = ROWS * SEQ * VOCAB, 8
    assert ranks.run(RANKS, largest_buffer, loss, "never", RANKS) == [logits] * RANKS
    for found in ranks.run(RANKS, largest_buffer, loss, tiles, RANKS):
        assert logits // (2 * tiles) < found <= logits // tiles
