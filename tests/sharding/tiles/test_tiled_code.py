"""What Inductor writes for a head and its loss in tiles: no buffer is larger than a tile of logits, forward or backward."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from sharding.tiles.losses import Loss, Model, batch, mean, per_sequence
from torch._inductor.graph import GraphLowering
from torch.testing._internal.distributed.fake_pg import FakeStore

from sp_compile.spmd.check_run import CheckedProgram

ROWS, SEQ, VOCAB = 2, 64, 1024
"""All else is smaller than a tile of logits, in whatever shape that lies."""


@contextmanager
def rank_of(n: int) -> Iterator[None]:
    """Of so many, of which there are no others; of one that there is no group."""
    if n == 1:
        yield
        return
    dist.init_process_group("fake", rank=n - 1, world_size=n, store=FakeStore())
    try:
        with mock.patch.object(CheckedProgram, "_agree"):
            yield
    finally:
        dist.destroy_process_group()


def largest_buffer(loss: Loss, tiles: int | str, n: int) -> int:
    """Elements of the largest buffer in all code of a step of a rank, which has SEQ tokens of each sequence."""
    texts: list[str] = []
    to_module: Callable[[GraphLowering], Any] = GraphLowering.compile_to_module

    def written(graph: GraphLowering) -> Any:
        module = to_module(graph)
        with open(module.__file__) as file:
            texts.append(file.read())
        return module

    torch.compiler.reset()
    options = {"tiles": tiles, "cost": {}, "attention": "ulysses"}
    run = torch.compile(Model(loss, vocab=VOCAB), backend="sp", options=options, dynamic=False)
    with (
        mock.patch.object(GraphLowering, "compile_to_module", written),
        torch._inductor.config.patch(force_disable_caches=True),
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True),  # others have no gradients to send
    ):
        run(*batch(n * SEQ))
    torch.compiler.reset()
    found = [re.findall(r"= empty_strided\w*\(\(([\d, ]*)\)", text) for text in texts]
    shapes = [[int(n) for n in re.findall(r"\d+", shape)] for shape in chain(*found)]
    assert len(texts) >= 2
    return max(map(math.prod, shapes))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("loss", [mean, pytest.param(per_sequence, marks=pytest.mark.slow)], ids=["at once", "again"])
def test_no_buffer_holds_more_than_a_tile(loss: Loss, n: int) -> None:
    logits, tiles = ROWS * SEQ * VOCAB, 8
    with rank_of(n):
        assert largest_buffer(loss, "never", n) == logits
        assert logits // (2 * tiles) < largest_buffer(loss, tiles, n) <= logits // tiles
