"""Loops over chunks whose last chunk has fewer rows: one scan, and equal bytes for any length."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import sp_compile

WIDTH, CHUNK = 8, 8
Body = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def decayed(q: Tensor, k: Tensor, v: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    return q @ h, 0.9 * h + k.mT @ v


def corrected(q: Tensor, k: Tensor, v: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    new = v - k @ h
    return q @ h + (q @ k.mT).tril() @ new, h + k.mT @ new


class ChunkLoop(nn.Module):
    """A loop over chunks of the projections, whose results are appended or written."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.project, self.out = body, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h, results = x.new_zeros(len(x), WIDTH, WIDTH), []
        q, k, v = (self.project(x) / 4).chunk(3, -1)
        for i in range(0, x.shape[1], CHUNK):
            result, h = self.body(q[:, i : i + CHUNK], k[:, i : i + CHUNK], v[:, i : i + CHUNK], h)
            results.append(result)
        return self.out(torch.cat(results, 1))


class WrittenChunks(ChunkLoop):
    def forward(self, x: Tensor) -> Tensor:
        h, results = x.new_zeros(len(x), WIDTH, WIDTH), torch.empty_like(x)
        q, k, v = (self.project(x) / 4).chunk(3, -1)
        for i in range(0, x.shape[1], CHUNK):
            result, h = self.body(q[:, i : i + CHUNK], k[:, i : i + CHUNK], v[:, i : i + CHUNK], h)
            results[:, i : i + CHUNK] = result
        return self.out(results)


class SplitChunks(ChunkLoop):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, results = x.new_zeros(len(x), WIDTH, WIDTH), []
        for q, k, v in zip(*((y / 4).split(CHUNK, 1) for y in self.project(x).chunk(3, -1)), strict=True):
            result, h = self.body(q, k, v, h)
            results.append(result)
        return self.out(torch.cat(results, 1)), h


class ReadChunks(ChunkLoop):
    """Chunks are written, and read before the last one is."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, results = x.new_zeros(len(x), WIDTH, WIDTH), self.out(x)
        q, k, v = (self.project(x) / 4).chunk(3, -1)
        for i in range(0, x.shape[1], CHUNK):
            if i + CHUNK > x.shape[1]:
                first = results.sum()
            result, h = self.body(q[:, i : i + CHUNK], k[:, i : i + CHUNK], v[:, i : i + CHUNK], h)
            results[:, i : i + CHUNK] = result
        return results, first


SCANS = {decayed: "linear_scan", corrected: "affine_scan"}


@pytest.mark.parametrize("form", [ChunkLoop, WrittenChunks, SplitChunks])
@pytest.mark.parametrize("body", SCANS, ids=lambda body: body.__name__)
@pytest.mark.sampled(every=2)
def test_values_and_exchanges(form: type[ChunkLoop], body: Body) -> None:
    sent = []
    for n, length in ((2, 61), (3, 125), (2, 64)):
        x = torch.randn(2, length, WIDTH, dtype=torch.float64, requires_grad=True)
        report = sp_compile.verify(form(body).double(), x, sp=n, seq_dims={"x": 1})
        assert max(error for _, error in report.errors) < 1e-12
        assert report.count(SCANS[body]) == 1
        assert not report.fallbacks
        sent.append(sum(e.forward for e in report.exchanges if e.op == "all_reduce"))
    chunk = 3 * 2 * CHUNK * WIDTH * 8  # bytes of a chunk of q, k and v
    assert max(sent) < 3 * chunk  # the short chunk, the one before, and a state, not all of 8 or 16 chunks


def test_chunks_of_two_lists() -> None:
    """The second list has the chunks of the first one, whose loop is replaced already, and the last one."""
    x = torch.randn(2, 61, WIDTH, dtype=torch.float64, requires_grad=True)
    report = sp_compile.verify(ReadChunks(decayed).double(), x, sp=2, seq_dims={"x": 1})
    assert max(error for _, error in report.errors) < 1e-12
    assert report.count("linear_scan") == 1


def test_bytes_do_not_depend_on_the_length() -> None:
    reports = [
        sp_compile.explain(ChunkLoop(decayed), torch.randn(2, length, WIDTH), sp=2, seq_dims={"x": 1})
        for length in (61, 125)
    ]
    sent = [[(e.op, e.forward, e.backward) for e in r.exchanges if e.op != "unshard"] for r in reports]
    assert sent[0] == sent[1]
