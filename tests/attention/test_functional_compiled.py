"""Functional attention inside torch.compile: one graph, eager results, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.attention.functional_cases import BATCH, DIM, MESHES, OPS
from support.recording import Recorder
from torch import Tensor, nn
from torch._C._distributed_c10d import _unregister_process_group

from sp_compile.lowering.base.library import sources_digest
from sp_compile.lowering.comm import routes

HEADS, KV_HEADS = 4, 2
OPTIONS: dict[str, dict[str, Any]] = {
    "ulysses": {"is_causal": True, "window": 5},
    "ring": {"is_causal": True, "layout": "zigzag"},
    "ring, scattered": {"is_causal": True, "window": 5},
    "hybrid": {"is_causal": True, "dropout_p": 0.3, "seed": 5},
    "gathered": {"is_causal": True},
}

WHERE = [(2, "process group", op) for op in OPS]
WHERE += [(4, "ring x ulysses", "hybrid"), (4, "dp x sp, sliced", "gathered")]


class Attention(nn.Module):
    """(B, s, H * D) -> the same, of this rank's rows."""

    def __init__(self, op: str, mesh: Any, options: dict[str, Any]) -> None:
        super().__init__()
        self.fn, self.extra = OPS[op]
        self.mesh, self.options = mesh, options
        self.q = nn.Linear(HEADS * DIM, HEADS * DIM)
        self.kv = nn.Linear(HEADS * DIM, 2 * KV_HEADS * DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, DIM)).transpose(1, 2) for y in (self.q(x), *self.kv(x).chunk(2, -1)))
        out = self.fn(q, k, v, mesh=self.mesh, **self.options, **self.extra)
        return out.transpose(1, 2).flatten(2)


def _rows(s: int) -> Tensor:
    whole = torch.randn(BATCH, 4 * s, HEADS * DIM, generator=torch.Generator().manual_seed(s))
    return whole[:, dist.get_rank() * s : (dist.get_rank() + 1) * s]


def _run(model: Any, parameters: list[nn.Parameter], x: Tensor) -> list[Tensor]:
    out = model(x)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), parameters)]


def _differences(op: str, mesh: str, lengths: list[int], **how: Any) -> list[float]:
    """Largest difference between compiled and eager, for each length."""
    model = Attention(op, MESHES[mesh](), OPTIONS[op])
    compiled, parameters = torch.compile(model, **how), list(model.parameters())
    worst = []
    for x in map(_rows, lengths):
        pairs = zip(_run(compiled, parameters, x), _run(model, parameters, x), strict=True)
        worst.append(max((a - b).abs().max().item() for a, b in pairs))
    return worst


def _inductor(op: str, mesh: str) -> list[float]:
    return _differences(op, mesh, [8], backend="inductor", fullgraph=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "mesh", "op"),
    [(2, "process group", "ring"), pytest.param(4, "ring x ulysses", "hybrid", marks=pytest.mark.slow)],
)
def test_inductor(ranks, n: int, mesh: str, op: str) -> None:
    for worst in ranks.run(n, _inductor, op, mesh):
        assert max(worst) < 1e-4


def _any_length(op: str, mesh: str) -> list[float]:
    return _differences(op, mesh, [8, 12, 24], backend="aot_eager", fullgraph=True, dynamic=True)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "mesh", "op"), WHERE)
def test_one_graph_of_any_length(ranks, n: int, mesh: str, op: str) -> None:
    for worst in ranks.run(n, _any_length, op, mesh):
        assert max(worst) < 1e-4


def _collectives(op: str) -> tuple[int, int]:
    model, recorder = Attention(op, MESHES["process group"](), OPTIONS[op]), Recorder()
    torch.compile(model, backend=recorder, fullgraph=True)(_rows(8)).sum().backward()
    return len(recorder.collectives("forward")), len(recorder.collectives("backward"))


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    ("op", "forward", "backward"), [("ulysses", 2, 2), ("ring", 1, 3), ("ring, scattered", 1, 2), ("gathered", 1, 2)]
)
def test_the_compiler_sees_the_collectives(ranks, op: str, forward: int, backward: int) -> None:
    """The graph contains the collectives, and none that compares calls of ranks."""
    assert ranks.run(2, _collectives, op) == [(forward, backward)] * 2


def _from_the_cache() -> list[float]:
    first = _inductor("ring", "process group")
    assert sources_digest() in torch.compiler.config.cache_key_tag  # none of its programs outlives an edit of the ops
    torch._dynamo.reset()
    for name in list(routes._routes):  # as in a process that has not traced the program
        _unregister_process_group(name)
    routes._routes.clear()
    return first + _inductor("ring", "process group")


@pytest.mark.slow
def test_a_program_from_the_cache_knows_its_routes(ranks) -> None:
    for worst in ranks.run(2, _from_the_cache):
        assert max(worst) < 1e-4
