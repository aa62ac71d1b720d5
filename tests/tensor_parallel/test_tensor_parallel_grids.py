"""Tensor parallelism as one axis of a mesh: beside data parallelism, and under the sequence passes on another axis."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from support.parallel.parallel_models import Split, build, tokens
from support.parallel.parallel_training import STEPS, Trained, message, part_of, step, trained, watched
from support.parallel.spawning import spawned
from support.ranks import Ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

from sp_compile import Report, backend, explain
from sp_compile.passes.context import Note, NoteKind
from sp_compile.passes.tensor_parallel.scatter_layers import SequenceParallelLinear


def split(mesh: DeviceMesh) -> Split:
    return Split(mesh["tp"].size(), mesh.get_local_rank("tp"), mesh.get_group("tp"))


def grid(shape: tuple[int, int], names: tuple[str, str]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@contextlib.contextmanager
def reported(reports: list[Report]) -> Iterator[None]:
    """Record the reports of the sequence passes."""
    plain = backend.lower

    def lower(*args: Any) -> Any:
        lowered = plain(*args)
        reports.append(lowered.report)
        return lowered

    backend.lower = lower
    try:
        yield
    finally:
        backend.lower = plain


def with_sequence(
    shape: tuple[int, int],
    names: tuple[str, str],
    how: dict[str, Any],
    length: int,
    longer: int = 0,
    attention: str = "auto",
) -> tuple[Trained, list[str], bool]:
    """Train with a sequence axis; also return fallbacks of the sequence passes, and if a rank's ids are a shard."""
    mesh, reports = grid(shape, names), []
    with reported(reports):
        found = trained(
            lambda tp: build(tp, **how),
            split(mesh),
            lambda number: (tokens(2, length + longer * number, number),),
            mesh=mesh,
            dynamic=bool(longer) or None,
            attention=attention,
        )
    return found, [note.label for r in reports for note in r.fallbacks], all(r.inputs for r in reports)


def check(outcomes: Sequence[tuple[Trained, list[str], bool]], modes: str | None) -> None:
    for one, fallbacks, sharded in outcomes:
        assert not one.where, one.where[:5]
        assert modes is None or one.modes == [modes]
        assert not fallbacks
        assert sharded


CASES = {
    "sequence outside": ((2, 2), ("sp", "tp"), {}, 8),
    "sequence inside": ((2, 2), ("tp", "sp"), {}, 7),
    "cut embedding and loss": ((2, 2), ("sp", "tp"), {"head": "vocab"}, 7),
    "one layer": ((2, 2), ("sp", "tp"), {"layers": 1}, 7),
    "one layer, cut embedding and loss": ((2, 2), ("sp", "tp"), {"head": "vocab", "layers": 1}, 7),
    "checkpoint": ((2, 2), ("sp", "tp"), {"checkpointed": True}, 7),
    "ring": ((2, 2), ("tp", "sp"), {}, 7, 0, "ring"),
    "gather": ((2, 2), ("sp", "tp"), {"layers": 1}, 7, 0, "gather"),
}
MODES = {
    "cut embedding and loss": "",  # of offsets of each rank
    "one layer": "s" * 4,
    "gather": "s" * 4,
    "one layer, cut embedding and loss": "",
}


@pytest.mark.slow
@pytest.mark.as_users_run("slow", case="one layer")
@pytest.mark.parametrize("case", [c if c == "one layer" else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_under_the_sequence_passes(ranks: Ranks, case: str, as_users_run: bool) -> None:
    """Measured costs of the machine may choose other modes."""
    check(ranks.run(4, with_sequence, *CASES[case]), None if as_users_run else MODES.get(case, "s" * 8))


def explained() -> tuple[str, list[tuple[Any, ...]], int, str]:
    """Return the report, its layers and all-to-alls, and the error for a sequence on the program's own axis."""
    mesh = grid((2, 2), ("sp", "tp"))
    model, ids = build(split(mesh), layers=1), tokens(2, 8, 0)
    report = explain(model, ids, mesh=mesh)
    options = {"compiler": "aot_eager", "mesh": mesh, "mesh_dim": "tp"}
    error = message(lambda: torch.compile(model, backend="sp", options=options)(ids))
    layers = [(layer.mode, layer.shape[1]) for layer in report.layers]
    return str(report), layers, report.count("all_to_all"), error


@pytest.mark.slow
def test_explain_shows_the_sequence_and_the_layers(ranks: Ranks) -> None:
    for report, layers, exchanges, error in ranks.run(4, explained):
        assert re.match(r"2 ranks; .*\bids dim 1; tensor-parallel .*\b2 ranks", report)
        assert layers == [("scattered", 4)] * 4
        assert exchanges == 2
        assert "SP619" in error


@pytest.mark.slow
def test_dynamic_lengths_under_the_sequence_passes(ranks: Ranks) -> None:
    how = {"layers": 1}
    check(ranks.run(4, with_sequence, (2, 2), ("sp", "tp"), how, 8, 1), "ssss")


def batches(rows: int, number: int) -> list[torch.Tensor]:
    return [tokens(2, 7, 10 * number + row) for row in range(rows)]


def with_data(shape: tuple[int, int], by_ddp: bool) -> Trained:
    """Each row of the mesh has a batch of its own; gradients are the mean over the rows."""
    mesh = grid(shape, ("dp", "tp"))
    tp, rows, row, data = split(mesh), shape[0], mesh.get_local_rank("dp"), mesh.get_group("dp")
    found = Trained()
    mine, alone = build(tp), build(Split())
    run: Any = DDP(mine, process_group=data) if by_ddp else mine
    run = torch.compile(run, backend="sp", options={"compiler": "aot_eager"})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.0) for m in (mine, alone)]
    with watched(found):
        for number in range(STEPS):
            ids = batches(rows, number)
            _, grads = step(run, mine, (ids[row],), optimizers[0])
            _, right = step(lambda *all_ids: sum(map(alone, all_ids)) / rows, alone, ids, optimizers[1])
            for name, parameter in mine.named_parameters():
                if not by_ddp:
                    dist.all_reduce(grads[name], group=data)
                    grads[name] /= rows
                found.take("alone", name, grads[name], part_of(right[name], parameter, tp), 1e-6)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("by_ddp", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_beside_data_parallelism(ranks: Ranks, by_ddp: bool) -> None:
    for one in ranks.run(4, with_data, (2, 2), by_ddp):
        assert not one.where, one.where[:5]
        assert one.modes == ["s" * 8]


def on_six() -> tuple[Trained, tuple[Trained, list[str], bool], tuple[Trained, list[str], bool]]:
    return (
        with_data((2, 3), False),
        with_sequence((2, 3), ("sp", "tp"), {}, 7),
        with_sequence((3, 2), ("sp", "tp"), {"head": "vocab"}, 7),
    )


@pytest.mark.slow
def test_two_by_three() -> None:
    data, wide, tall = zip(*spawned(6, on_six))
    assert not any(one.where for one in data)
    check(wide, "s" * 8)
    check(tall, "")


def over_all_ranks(shape: tuple[int, int]) -> tuple[float, list[str]]:
    """Sum over ranks with other rows of the sequence, which is no row-wise sum."""
    mesh = grid(shape, ("sp", "tp"))
    everyone = Split(4, dist.get_rank(), dist.group.WORLD, "plain")
    weight = torch.randn(6, 6, dtype=torch.float64)

    def program(x: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True) @ weight
        return everyone.sum(h.relu()).sin()

    x, reports = torch.randn(2, 1, 8, 6, dtype=torch.float64), []
    with reported(reports):
        run = torch.compile(program, backend="sp", options={"compiler": "aot_eager", "mesh": mesh})
        error = (run(x) - program(x)).abs().max().item()
    return error, [note.label for r in reports for note in r.fallbacks]


def test_a_sum_across_the_sequence_is_of_gathered_values(ranks: Ranks) -> None:
    for error, fallbacks in ranks.run(4, over_all_ranks, (2, 2)):
        assert error < 1e-12
        assert "gather" in fallbacks


def equal_in_one_row() -> tuple[float, list[Note]]:
    """Rows of two tensor-parallel groups are added up; in one of these the ranks' biases are not the same."""
    mesh = grid((2, 2), ("dp", "tp"))
    tp, data = split(mesh), mesh.get_group("dp")
    torch.manual_seed(0)
    up, down = (torch.randn(8, 8, dtype=torch.float64) * (1 + tp.rank) for _ in range(2))
    bias = torch.ones(8, dtype=torch.float64) * max(dist.get_rank(), 1)

    def program(x: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.rms_norm(x + funcol.all_reduce((x @ up).relu() @ down, "sum", tp.group) + bias, (8,))
        h = h / funcol.all_reduce(h.square(), "sum", data).sqrt()
        return h + funcol.all_reduce((h @ up).relu() @ down, "sum", tp.group)

    x = torch.randn(4, 8, dtype=torch.float64)
    run = torch.compile(program, backend="sp", options={"compiler": "aot_eager"})
    return (run(x) - program(x)).abs().max().item(), explain(program, x).notes


@pytest.mark.slow
def test_groups_of_a_grid_scatter_the_same_layers(ranks: Ranks) -> None:
    for error, notes in ranks.run(4, equal_in_one_row):
        assert error < 1e-12
        assert (NoteKind.DECLINED, SequenceParallelLinear.name) in [(note.kind, note.subject) for note in notes]


def rows_of_one_half_differ() -> float:
    """Each rank passes its rows of the sequence; those of the second half are not the same on tensor-parallel ranks."""
    mesh = grid((2, 2), ("sp", "tp"))
    tp, half = split(mesh), mesh.get_local_rank("sp")
    torch.manual_seed(0)
    up, down = (torch.randn(8, 8, dtype=torch.float64) * (1 + tp.rank) for _ in range(2))

    def program(x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        h = x + torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        h = torch.nn.functional.rms_norm(h + funcol.all_reduce((h @ up).relu() @ down, "sum", tp.group) + noise, (8,))
        h = torch.nn.functional.rms_norm(h - h.square().mean(2, keepdim=True), (8,))
        return h + funcol.all_reduce((h @ up).relu() @ down, "sum", tp.group)

    x, noise = torch.randn(2, 2, 1, 8, 8, dtype=torch.float64)
    noise[:, :, 4:] *= 1 + tp.rank
    own = slice(4 * half, 4 * half + 4)
    options = {"compiler": "aot_eager", "mesh": mesh, "inputs": "local", "outputs": "local"}
    run = torch.compile(program, backend="sp", options=options, dynamic=True)
    with torch.no_grad():
        return (run(x[:, :, own], noise[:, :, own]) - program(x, noise)[:, :, own]).abs().max().item()


@pytest.mark.slow
def test_groups_beside_a_sequence_scatter_the_same_layers(ranks: Ranks) -> None:
    assert max(ranks.run(4, rows_of_one_half_differ)) < 1e-12


def by_blocks(names: tuple[str, str], how: dict[str, Any], length: int, tail: bool, asked: dict[str, Any]) -> Trained:
    """Compile each block separately, and with `tail` also the last part; the embedding is not compiled."""
    mesh, found = grid((2, 2), names), Trained()
    tp, options = split(mesh), {"compiler": "aot_eager", "cost": {}, "mesh": mesh, "outputs": "lazy", **asked}
    mine, alone = build(tp, **how), build(Split(), **how)
    for block in mine.blocks:
        block.compile(backend="sp", options=options)

    @torch.compile(backend="sp", options=options)
    def ends(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return mine.loss(mine.norm(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def in_parts(ids: torch.Tensor) -> torch.Tensor:
        x = mine.embedded(ids)
        for block in mine.blocks:
            x = block(x)
        return ends(x, ids)

    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (mine, alone)]
    for number in range(STEPS):
        args = (tokens(2, length, number),)
        loss, grads = step(in_parts if tail else mine, mine, args, optimizers[0])
        right, theirs = step(alone, alone, args, optimizers[1])
        floor = 1e-6 * max(g.abs().max().item() for g in grads.values())
        found.take("alone", f"loss {number}", loss, right, 0)
        for name, parameter in mine.named_parameters():
            found.take("alone", f"{name} {number}", grads[name], part_of(theirs[name], parameter, tp), floor)
    return found


BLOCKS = {
    "sequence outside": (("sp", "tp"), {}, 8, False, {}),
    "sequence inside": (("tp", "sp"), {"layers": 3}, 7, True, {}),
    "cut embedding and loss": (("sp", "tp"), {"head": "vocab"}, 7, True, {}),  # blocks receive pending collectives
    "checkpoint": (("sp", "tp"), {"checkpointed": True}, 7, False, {}),
    "whole results": (("sp", "tp"), {}, 7, False, {"outputs": "gather"}),
    "ring": (("sp", "tp"), {}, 9, True, {"attention": "ring"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", BLOCKS)
def test_block_by_block_under_the_sequence_passes(ranks: Ranks, case: str) -> None:
    for one in ranks.run(4, by_blocks, *BLOCKS[case]):
        assert not one.where, one.where[:5]
