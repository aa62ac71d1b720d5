"""Tiles of a sequence whose length is a symbol, or whose batch is, or both: one body for every number of rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from models.test_experts import WIDTH, inverted
from sharding.tiles.losses import VOCAB, Model, alive, batch, mean, per_sequence
from sharding.tiles.mixtures import MixtureLayer
from support.models import floats, seeded
from support.parity import Decoder, text
from support.ranks import Ranks, mesh
from torch import Tensor, nn

import sp_compile
from sp_compile import rank_program
from sp_compile.lowering.tiles.tile_program import ANY_LENGTH, TileProgram
from sp_compile.lowering.torch_compat import SYMBOLIC_GRAPHS
from sp_compile.passes.localize.tiles.run_in_tiles import programs_of
from sp_compile.rank_program import RankProgram

LENGTHS = (16, 23, 9, 40, 7, 4)
BATCHES = (2, 3, 5)
pytestmark = pytest.mark.skipif(not SYMBOLIC_GRAPHS, reason="a number of rows that is a symbol takes torch 2.13")


def step(
    model: nn.Module, run: Callable[..., Tensor], given: Sequence[Tensor], alone: nn.Module, same: Sequence[Tensor]
) -> None:
    """One step of the model as it runs, and of the one that is alone: loss and gradients are equal."""
    model.zero_grad(), alone.zero_grad()
    expected, found = alone(*same), run(*given)
    expected.backward(), found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    gradients = [[p.grad for p in one.parameters()] for one in (model, alone)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


def compare(compiler: str, tiles: int, **options: object) -> list[TileProgram]:
    """Steps of every length against one device; the programs of the last graph."""
    model, seen = Model(mean).double(), list[RankProgram]()
    alone, plain = copy.deepcopy(model), rank_program.compile_local

    def watched(lowered: RankProgram, mode: str | None) -> object:
        seen.append(lowered)
        return plain(lowered, mode)

    with mock.patch.object(rank_program, "compile_local", watched):
        run = torch.compile(model, backend="sp", options={"compiler": compiler, "tiles": tiles, **options})
        for seq in LENGTHS:
            given = batch(seq)
            for x in given:
                torch._dynamo.mark_dynamic(x, 1)
            step(model, run, given, alone, batch(seq))
    assert len(seen) == 1
    return programs_of(seen[0].graph)


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_lengths(compiler: str) -> None:
    (program,) = compare(compiler, 3)
    assert list(program.bodies) == [ANY_LENGTH]
    (fits,) = [part.supported_sizes for part in program.bodies[ANY_LENGTH].parts if part.supported_sizes]
    assert all(fits.values())
    rows = {extents[1] for extents in fits}
    assert {2, 3, 5, 6, 7, 8, 13, 14} <= rows  # a process caches one program for all callers


def test_a_length_that_is_a_symbol_holds_no_more() -> None:
    """Nothing of a tile's inside stays because its size is read later."""
    peaks, vocab, seq = [], 2048, 512
    for is_symbol in (False, True):
        torch.compiler.reset()
        run = torch.compile(Model(mean, vocab=vocab), backend="sp", options={"tiles": 16, "compiler": "aot_eager"})

        def step(run: Callable[..., Tensor] = run, is_symbol: bool = is_symbol) -> None:
            given = batch(seq, rows=1)
            for x in given if is_symbol else ():
                torch._dynamo.mark_dynamic(x, 1)
            run(*given).backward()

        step()
        peaks.append(alive(step))
    assert peaks[1] < peaks[0] + vocab * seq * 4 / 16 / 2, "less than half a tile's logits more"


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("n", [3, 2])
def test_the_labels_that_a_rank_masks_are_rows(n: int) -> None:
    given = batch(13)
    for x in given:
        torch._dynamo.mark_dynamic(x, 1)
    found = sp_compile.verify(Model(mean).double(), *given, sp=n, tiles=3)
    assert found.worst < 1e-9
    assert any("losses.py" in one.where for one in found.tiled), found


class Labelled(nn.Module):
    """A model as those of transformers are called: tokens, labels and the mask of a padded batch are three inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = (
            nn.Embedding(VOCAB, WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, VOCAB),
        )

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        h = self.embed(ids)
        q, k, v = self.qkv(h).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        h = h + F.scaled_dot_product_attention(q, k, v, mask[:, None, None] & causal).transpose(1, 2).flatten(-2)
        return F.cross_entropy(self.head(h[:, :-1]).reshape(-1, VOCAB), labels[:, 1:].reshape(-1))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [4, 12], ids=["", "sequences and labels of equal number"])
def test_inputs_of_one_sequence_share_its_symbols(rows: int) -> None:
    """Dynamo gives each input symbols of its own, and equates products of them only: of sequences and positions."""
    ids = batch(13, rows)[0]
    mask = (torch.arange(13) < torch.arange(rows)[:, None] + 9).clone()
    given = ids, ids.clone(), mask
    for x in given:
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(x, 1)
    report = sp_compile.verify(Labelled().double(), *given, sp=2, tiles=3)
    assert report.worst < 1e-9
    assert not report.fallbacks
    assert len(report.tiled) == 1


def on_a_rank(compiler: str) -> None:
    compare(compiler, 2, mesh=mesh(), cost={})


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3])
def test_lengths_on_ranks(ranks: Ranks, n: int) -> None:
    ranks.run(n, on_a_rank, "aot_eager")


def test_a_tile_that_no_guard_lets_through_runs_as_it_was_traced() -> None:
    (program,) = compare("aot_eager", 2)
    part = program.bodies[ANY_LENGTH].gradients
    assert part is not None
    given = [
        torch.zeros([5 if isinstance(s, torch.SymInt) else s for s in x.shape], dtype=x.dtype) for x in part.inputs
    ]
    plain = part.graph(*given)
    not_run = mock.patch.object(part, "run", side_effect=AssertionError)
    refused = mock.patch("sp_compile.lowering.tiles.tile_program.are_guards_met", return_value=False)
    with mock.patch.object(part, "supported_sizes", {}), not_run, refused:
        torch.testing.assert_close(part(given), plain)


def batches(
    model: nn.Module,
    make: Callable[..., tuple[Tensor, ...]],
    lengths: Sequence[int],
    dims: Sequence[int],
    **options: Any,
) -> None:
    """Steps of every batch against one device, in one graph that has tiles."""
    torch._dynamo.reset()  # Dynamo compiles a function 8 times at most, also with other options
    alone, seen, plain = copy.deepcopy(model), list[RankProgram](), rank_program.compile_local

    def watched(lowered: RankProgram, mode: str | None) -> object:
        seen.append(lowered)
        return plain(lowered, mode)

    with mock.patch.object(rank_program, "compile_local", watched):
        run = torch.compile(model, backend="sp", options={"tiles": 3, "cost": {}, **options})
        for rows, seq in zip(BATCHES, lengths, strict=True):
            given = make(seq, rows)
            for x in given:
                for dim in dims:
                    torch._dynamo.mark_dynamic(x, dim)
            step(model, run, given, alone, make(seq, rows))
    assert len(seen) == 1
    assert programs_of(seen[0].graph)


MAKES: dict[str, tuple[Callable[[], nn.Module], Callable[..., tuple[Tensor, ...]]]] = {
    "loss": (lambda: Model(mean), batch),
    "a number for each sequence": (lambda: Model(per_sequence), batch),
    "MLP": (lambda: Decoder(layers=1), text),
    "experts": (lambda: MixtureLayer(inverted), lambda seq, rows: (floats(rows, seq, WIDTH),)),
}


@pytest.mark.sampled(every=18)
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dims", [(0,), (0, 1)], ids=["batch", "batch and length"])
@pytest.mark.parametrize("name", MAKES)
def test_batches(name: str, dims: tuple[int, ...], compiler: str) -> None:
    make, given = MAKES[name]
    batches(seeded(make), given, (16, 23, 9) if len(dims) == 2 else (16, 16, 16), dims, compiler=compiler)


def batches_on_a_rank(name: str) -> None:
    make, given = MAKES[name]
    batches(seeded(make), given, (16, 23, 9), (0, 1), compiler="aot_eager", mesh=mesh())


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", MAKES)
def test_batches_on_ranks(ranks: Ranks, n: int, name: str) -> None:
    ranks.run(n, batches_on_a_rank, name)
