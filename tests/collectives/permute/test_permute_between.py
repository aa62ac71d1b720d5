"""Value-preserving ops between the permutes of an exchange: it is found, or remains unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.golden import notes_of
from support.variants.between import BETWEEN, Between
from support.variants.exchange_variants import swap_functional
from support.variants.tracing_exchanges import N, exported, one_of
from torch import Tensor

from sp_compile.lowering.comm.simulate import run_ranks
from sp_compile.passes.collectives.permute.fuse_permute import FuseAllToAllPermutes


def heads(x: Tensor, group: Any, b: Between) -> Tensor:
    rows, length, count, width = x.shape
    x = b(b(b(x).reshape(rows, length, N, count // N, width)).permute(2, 0, 1, 3, 4)).contiguous()
    y = b(b(swap_functional(b(x), N, group)).permute(1, 0, 2, 3, 4))
    return b(y.reshape(rows, N * length, count // N, width))


def pieces(x: Tensor, group: Any, b: Between) -> Tensor:
    sent = b(torch.cat([b(piece) for piece in b(x).chunk(N, 2)]))
    received = swap_functional(sent.contiguous(), N, group)
    return b(torch.cat([b(piece) for piece in b(received).chunk(N)], 1))


ENDS = ("to", "wider")  # without a table in the index algebra; a detach after one in exported graphs stops no gradient


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("exchange", [heads, pieces])
def test_found_with_ops_between(exchange: Callable[..., Tensor], between: str) -> None:
    xs = [torch.randn(2, 3, 8, 5, generator=torch.Generator().manual_seed(rank)) for rank in range(N)]
    with one_of(N) as group:
        gm = exported(lambda x: exchange(x, group, BETWEEN[between]), xs[0])
    assert [n.label for n in notes_of(FuseAllToAllPermutes(), gm)] == [
        "not permute_all_to_all" if between in ENDS else "permute_all_to_all"
    ]
    for rank, y in enumerate(run_ranks(N, lambda r: gm(xs[r]))) if between not in ENDS else ():
        assert torch.equal(y, torch.cat([x.chunk(N, 2)[rank] for x in xs], 1))
