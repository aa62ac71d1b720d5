"""Pieces of a step that run unsharded on every rank are named, with their lines: graphs between breaks, and eager code."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.parity import Decoder, build, sp, text
from support.ranks import Ranks, mesh
from torch import Tensor

import sp_compile
from sp_compile.lowering.base import warn
from sp_compile.runtime import eager_fallback


class Broken(Decoder):
    """A decoder whose head and loss are another graph."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.hidden(ids)
        torch._dynamo.graph_break()
        logits = self.head(h)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Eager(Decoder):
    """A decoder whose head and loss run eagerly."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.hidden(ids), labels)

    @torch.compiler.disable
    def loss(self, h: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(h)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class OfHead(torch.autograd.Function):
    """The likelihood of the next tokens, in chunks of rows, with a backward that computes the logits again."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(h, weight, ids)
        parts = [(x @ weight.t()).log_softmax(-1).gather(-1, y[:, None]) for x, y in zip(h.split(16), ids.split(16))]
        return torch.cat(parts).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        h, weight, ids = ctx.saved_tensors
        scores = F.one_hot(ids, weight.shape[0]) - (h @ weight.t()).softmax(-1)
        return grad * (scores @ weight), grad * (scores.t() @ h), None


class Chunked(Decoder):
    """A decoder whose head and loss are a Function, which has no rule."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        rows, targets = self.hidden(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        return -OfHead.apply(rows, self.head.weight, targets)


class Measured(Decoder):
    """A decoder whose logits a metric reads eagerly, without gradients."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.hidden(ids))
        self.measure(logits)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    @torch.compiler.disable
    @torch.no_grad()
    def measure(self, logits: Tensor) -> None:
        self.mean = logits.argmax(-1).float().mean()


HEAD = "test_whole_pieces.py:{}: logits = self.head(h)"
FUNCTION = "test_whole_pieces.py:{}: return -OfHead.apply("
LINES = {Broken: HEAD.format(27), Eager: HEAD.format(39)}


LINES_OF_EXPLAIN = {**LINES, Chunked: FUNCTION.format(64)}


@pytest.mark.sampled(every=1)
@pytest.mark.parametrize("kind", [Decoder, *LINES_OF_EXPLAIN], ids=lambda kind: kind.__name__)
def test_explain_names_the_line(kind: type[Decoder]) -> None:
    report = sp_compile.explain(kind(layers=1, dim=8), *text(34), sp=2)
    texts = [part.describe() for part in report.work.large_replicated_parts() if part.is_flops]
    assert len(texts) == (kind in LINES_OF_EXPLAIN)
    for line in texts:
        assert line in report.warnings
        assert LINES_OF_EXPLAIN[kind] in line
        assert "parity.py" not in line  # the file of the layers
    assert (report.work.flops_share == 1) == (kind is Decoder)


def _warned(kind: type[Decoder], steps: int) -> list[str]:
    """Return the warnings of a training; the values of small programs count as large."""
    eager_fallback.LARGE_OUTPUT = 0
    warn._warned.clear()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("sp_compile.runtime.eager_fallback")
    log.addHandler(handler)
    model = build(kind, layers=1, dim=8)
    # Only a value that the next graph cannot take has to be gathered; eager code gathers what it reads.
    run = sp(model, mesh=mesh(), outputs="gather" if kind is Broken else "lazy")
    for _ in range(steps):
        run(*text(34)).backward()
        with torch.no_grad():
            run(*text(34))
    log.removeHandler(handler)
    return said


def _warned_by_kind() -> dict[type[Decoder], list[str]]:
    return {kind: _warned(kind, steps=2) for kind in (Decoder, *LINES, Measured)}


@pytest.mark.slow
def test_training_names_the_line(ranks: Ranks) -> None:
    by_kind, of_second = ranks.run(2, _warned_by_kind)
    assert not any(of_second.values())
    (measured,) = by_kind.pop(Measured)
    assert "self.mean = logits.argmax(-1)" in measured
    assert re.search(r"\d% .*activations", measured)
    for kind, said in by_kind.items():
        assert len(said) == (kind in LINES)
        for words in said:
            assert LINES[kind] in words
            assert (re.search(r"\d% .*FLOPs", words) is not None) == (kind is Broken)
