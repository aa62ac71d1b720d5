"""Vectors that masks look up: one table per graph, and single-device results with every strategy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.attention.attending import packed, randn
from torch import Tensor, nn

import sp_compile
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, run_ranks
from sp_compile.lowering.masks import pieces
from sp_compile.passes.graph.call import OpCall

ops = torch.ops.sp
LENGTHS = [5, 1, 9, 2, 3, 7]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the number of vectors copied to the host in each call."""
    found: list[int] = []
    on_host = pieces._copy_to_host

    def counted(vectors: list[Tensor]) -> list[Tensor]:
        found.append(len(vectors))
        return on_host(vectors)

    monkeypatch.setattr(pieces, "_copy_to_host", counted)
    return found


class Layers(nn.Module):
    """Attention within documents and to their past, in a window, and to all but padding; each with a mask of its own."""

    def __init__(self, window: int = 4) -> None:
        super().__init__()
        self.window = window
        self.projections = nn.ModuleList(nn.Linear(16, 48) for _ in range(3))

    def forward(self, x: Tensor, positions: Tensor, padding: Tensor) -> Tensor:
        documents = (positions == 0).cumsum(1)
        same = documents[:, None, :, None] == documents[:, None, None]
        past = positions[:, None, None] <= positions[:, None, :, None]
        near = positions[:, None, :, None] - positions[:, None, None] < self.window
        for projection, mask in zip(self.projections, (same & past, same & past & near, padding[:, None, None])):
            q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in projection(x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        return x


def given(batch: int = 1) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    positions = torch.cat([packed(LENGTHS[i:] + LENGTHS[:i])[1] for i in range(batch)])
    padding = torch.arange(positions.shape[1])[None].expand(batch, -1) < positions.shape[1] - 3
    x = randn(batch, positions.shape[1], 16).requires_grad_()
    return Layers().double(), x, positions, padding


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("attention", ["ulysses", "ring", "hybrid", "gather"])
@pytest.mark.parametrize("batch", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("n", [4, pytest.param(3, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_results_equal_a_single_device(attention: str, n: int, batch: int, waits: list[int]) -> None:
    """Forward and backward; each rank copies the vectors to the host once."""
    if n == 3 and attention in ("ulysses", "hybrid"):
        pytest.skip("3 ranks do not divide 4 heads")
    if n == 2 and attention == "hybrid":
        pytest.skip("a hybrid of two ranks is none")
    model, *inputs = given(batch)
    report = sp_compile.verify(model, *inputs, sp=n, attention=attention)
    assert report.worst < 1e-12, report
    assert not report.fallbacks, report
    assert waits == [3] * n


@pytest.mark.parametrize(("n", "layout"), [(2, "contiguous"), pytest.param(3, "zigzag", marks=pytest.mark.slow)])
def test_a_document_that_begins_shortly_before_a_rank(n: int, layout: str) -> None:
    """The next rank's first queries see all three of its keys there, and then one less each."""
    positions = packed([50, 47, 103])[1]
    x, padding = randn(1, 200, 16).requires_grad_(), torch.ones(1, 200, dtype=torch.bool)
    model = Layers(window=40).double()
    report = sp_compile.verify(model, x, positions, padding, sp=n, attention="ring", layout=layout)
    assert report.worst < 1e-12, report


def test_one_call_at_the_beginning() -> None:
    """The tables of all vectors; every attention takes its own."""
    model, *inputs = given()
    program = torch.export.export(model, tuple(inputs), strict=False)
    graph = sp_compile.parallelize(program, sp=2, attention="ring").graph
    (call,) = graph.find_nodes(op="call_function", target=ops.pieces.default)
    readers = graph.find_nodes(op="call_function", target=ops.ring_attention.default)
    assert len(readers) == 3
    assert all(node < readers[0] for node in (call, *call.users))
    assert not any("linear" in str(node.target) and node < call for node in graph.nodes)
    for reader in map(OpCall, readers):
        vectors = [*reader["rows"], *reader["cols"]]
        taken = [call.args[0][table.args[1]] for table in reader["pieces"]]
        assert [v.target for v in taken] == [v.target for v in vectors]
        assert len({*vectors}) >= len({*taken})


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_once_a_step_compiled(backend: str, dynamic: bool, waits: list[int]) -> None:
    """The backward reads tables that the forward saved; equal calls of the operator are merged."""
    documents, positions = packed(LENGTHS)
    q = randn(1, 4, documents.shape[1], 8)

    def step(x: Tensor, documents: Tensor, positions: Tensor) -> Tensor:
        vectors = [documents, positions]
        for _ in range(2):
            masked = ops.masked_attention(
                x, x, x, vectors, vectors, [], "Eq(row0, col0) & (col1 <= row1)", 0.0, None, False
            )
            x = x + masked
        return x.square().sum()

    def gradient(run: object, x: Tensor, *vectors: Tensor) -> Tensor:
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(run(leaf, *vectors), leaf)
        return grad

    torch._dynamo.reset()
    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=dynamic)
    for length in (documents.shape[1], documents.shape[1] - 4) if dynamic else (documents.shape[1],):
        args = q[:, :, :length], documents[:, :length], positions[:, :length]
        expected = gradient(step, *args)
        waits.clear()
        torch.testing.assert_close(gradient(compiled, *args), expected)
        assert waits == [2]


@pytest.mark.parametrize("way", ["ring", "gathered", "hybrid"])
def test_once_a_functional_call(way: str, waits: list[int]) -> None:
    """For any number of ring steps, forward and backward."""
    documents, _ = packed(LENGTHS)
    documents = documents[:, :24]
    q = randn(1, 4, 24, 8)
    run = getattr(sp_compile, f"{way}_attention")

    def on_rank(rank: int) -> None:
        x = q[:, :, rank * 6 : (rank + 1) * 6].clone().requires_grad_()
        more = {"ulysses": 2} if way == "hybrid" else {}
        ranks = Ranks(4, SIMULATED_GROUP)
        run(x, x, x, mesh=ranks, documents=documents, is_causal=True, check=False, **more).sum().backward()

    run_ranks(4, on_rank)
    assert waits == [1] * 4
