"""What Inductor writes for a head and its loss in tiles: no buffer is larger than a tile of logits, forward or backward."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import chain
from typing import Any
from unittest import mock

import torch
from sharding.tiles.losses import VOCAB, Loss, Model, batch, mean
from torch._inductor.graph import GraphLowering

ROWS, SEQ = 2, 64


def largest_buffer(loss: Loss, tiles: int | str) -> int:
    """Elements of the largest buffer with a dim of the vocabulary, in all code of a step."""
    texts: list[str] = []
    to_module: Callable[[GraphLowering], Any] = GraphLowering.compile_to_module

    def written(graph: GraphLowering) -> Any:
        module = to_module(graph)
        with open(module.__file__) as file:
            texts.append(file.read())
        return module

    torch.compiler.reset()
    run = torch.compile(Model(loss), backend="sp", options={"tiles": tiles, "cost": {}}, dynamic=False)
    with (
        mock.patch.object(GraphLowering, "compile_to_module", written),
        torch._inductor.config.patch(force_disable_caches=True),
    ):
        run(*batch(SEQ)).backward()
    torch.compiler.reset()
    found = [re.findall(r"= empty_strided\w*\(\(([\d, ]*)\)", text) for text in texts]
    shapes = [[int(n) for n in re.findall(r"\d+", shape)] for shape in chain(*found)]
    assert len(texts) >= 2
    return max(math.prod(shape) for shape in shapes if VOCAB in shape)


def test_no_buffer_holds_more_than_a_tile() -> None:
    logits, tiles = ROWS * SEQ * VOCAB, 8
    assert largest_buffer(mean, "never") == logits
    assert largest_buffer(mean, tiles) <= logits // tiles
