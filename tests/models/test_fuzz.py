"""Samples of the fuzzer with fixed seeds, and the programs that it has found: `make fuzz` draws others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support.fuzz import ledger, oracle
from support.fuzz.fault_table import FAULTS
from support.fuzz.faults import AFTERWARDS, BROKEN, NEXT_CALL, judged
from support.fuzz.kinds import after_failure, data_errors, memory, on_ranks, stepped, transforms
from support.fuzz.kinds.on_ranks import Played
from support.fuzz.kinds.scene import Scene
from support.fuzz.loop import AFTER, Event
from support.fuzz.loop import Scene as FaultScene
from support.fuzz.outcomes import Outcome, Result
from support.fuzz.runner import SOURCES, Fuzzing, run
from support.fuzz.simulated import op_db, programs, tiled_programs
from support.fuzz.simulated.programs import Setting, made, minimal, without
from support.fuzz.simulated.random_programs import Program, Step
from support.fuzz.simulated.tiled_programs import TiledSetting
from support.ranks import Failure
from torch import Tensor
from torch.fx import GraphModule

from sp_compile import backend
from sp_compile.backend import lower

SEEDS = Random(0).sample(range(10**9), 400)
RIGHT = (Outcome.EXACT, Outcome.GATHERED)


@pytest.mark.sampled(every=202)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_programs_equal_one_device(seed: int) -> None:
    result = programs.run(f"programs:{seed}")
    assert not result.outcome.is_bad, f"{result}\n{result.program}"


@pytest.mark.sampled(every=202)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_tiles_equal_one_device(seed: int) -> None:
    result = tiled_programs.run(f"tiles:{seed}")
    assert not result.outcome.is_bad, f"{result}\n{result.program}"


@pytest.mark.sampled(every=156)
@pytest.mark.parametrize("name", list(itertools.islice(op_db.infos(), 0, None, 3)))
def test_ops_after_attention_equal_one_device(name: str) -> None:
    for variant in op_db.VARIANTS:
        if op_db.samples(name) and op_db.has_variant(variant, name):
            result = op_db.run(f"op_db:{name}:{variant}:0")
            assert not result.outcome.is_bad, result


FOUND = {
    "a value that is flipped twice has another one's gradient": (
        [
            Step("idiom", (0,), (0, "last - cumsum", "", "", "")),
            Step("flip", (0,), (0,)),
            Step("flip", (2,), (0,), "hooked"),
        ],
        ((2, 4, 5), 2, 2),
    ),
    "a result that is zero but for rounding": (
        [Step("norm", (0,), (1,)), Step("idiom", (1,), (1, "attention", "", "", "")), Step("einsum", (2,), (2,))],
        ((2, 7, 2), 2, 2),
    ),
    "gradients that are all zero but for rounding": (
        [
            Step("mean", (0,), (0, True)),
            Step("normalized", (1,), (0,)),
            Step("convolved", (2,), (0,)),
            Step("normalized", (3,), (0,)),
        ],
        ((3, 6, 5), 2, 1),
    ),
    "a window of one row broadcasts": (
        [Step("sin", (0,)), Step("slice", (1,), (1, 1, None, 1)), Step("mul", (1, 2))],
        ((2, 2, 4), 2, 1),
    ),
    "causal attention of whole queries and sharded values": (
        [Step("attention", (0, 0), (True,)), Step("expand", (1,), ((3, 5, 3),))],
        ((3, 5, 3), 2, 1),
    ),
    "a gather written for a placement that another gather changed": (
        [
            Step("attention", (0, 0), (False,)),
            Step("attention", (1, 0), (False,)),
            Step("amax", (2,), (0, False)),
            Step("logsumexp", (3,), (1, False)),
            Step("chunk", (2,), (2, 2, 0)),
            Step("add", (4, 5)),
        ],
        ((2, 2, 2), 4, 1),
    ),
    "the shape of a sharded value for a whole one": (
        [Step("cumsum", (0,), (1,)), Step("sin", (0,)), Step("view_as", (1, 2))],
        ((2, 5, 3), 3, 1),
    ),
    "no dims to flip": ([Step("class_loss", (0,), ("sum",)), Step("flip", (1,), (0,))], ((2, 4, 5), 3, 1)),
    "fewer rows than ranks, dynamic": ([Step("gram", (0, 0)), Step("gram", (1, 1))], ((2, 4, 1), 4, 0, True)),
}


@pytest.mark.parametrize(("steps", "where"), FOUND.values(), ids=FOUND)
def test_programs_that_were_wrong_once(steps: list[Step], where: tuple[Any, ...]) -> None:
    sizes, ranks, dim, *dynamic = where
    result = Setting(sizes, (ranks,), dim, bool(dynamic), {}).outcome(steps)
    assert result.outcome in RIGHT, result


HEAD = Step("head head", (0,), (0, False))
FOUND_TILES = {
    "a head's weights are a piece of a symbol's length": (
        [
            Step("rows mlp", (0,), ("gated residual",)),
            Step("rows sum of both", (1, 0)),
            Step("head head", (2,), (700, False)),
            Step("wide copied", (3,), (), "no_grad"),
        ],
        TiledSetting((2, 6, 3), (4,), 1, True, {"tiles": 40}),
    ),
    "balanced, and an unused attention": (
        [Step("rows attend", (0,)), HEAD, Step("each bce", (2,)), Step("sum mean", (3,))],
        TiledSetting((1, 6, 3), (2,), 1, False, {"layout": "balanced", "tiles": 5}),
    ),
    "a hook of what was overwritten whole": (
        [HEAD, Step("wide put", (1,), ("rows",)), Step("each column", (2,), (-1,), "hooked")],
        TiledSetting((1, 8, 3), (2,), 1, False, {"tiles": 3}, results=3),
    ),
    "a hook of what was overwritten whole, of a symbol's length": (
        [HEAD, Step("wide put", (1,), ("rows",)), Step("each column", (2,), (-1,), "hooked")],
        TiledSetting((1, 8, 3), (2,), 1, True, {"tiles": 3}, results=3),
    ),
}


@pytest.mark.parametrize(("steps", "setting"), FOUND_TILES.values(), ids=FOUND_TILES)
def test_tiles_that_were_wrong_once(steps: list[Step], setting: TiledSetting) -> None:
    result = setting.outcome(steps)
    assert result.outcome in RIGHT, result


SEEDS_FOUND = {579: RIGHT, 617: RIGHT, 818: RIGHT, 859: RIGHT, 2059: RIGHT, 2684: (Outcome.REFUSED,), 6503: RIGHT}


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS_FOUND)
def test_seeds_that_were_wrong_once(seed: int) -> None:
    """Former silent errors, raw errors and hangs. Seed 2684 uses hybrid attention with a single head."""
    result = run(f"programs:{seed}")
    assert result.outcome in SEEDS_FOUND[seed], result


FOUND_OPS: dict[str, tuple[Callable[[Tensor], Tensor], torch.dtype, Outcome]] = {
    "normal_ ends a gradient": (lambda x: x.cumsum(1).normal_(1.0, 0.0), torch.float64, Outcome.GATHERED),
    "bernoulli_ ends a gradient": (lambda x: x.cumsum(1).bernoulli_(1.0), torch.float64, Outcome.EXACT),
    "silu_ of complex numbers": (lambda x: F.silu(x + 1, inplace=True), torch.complex128, Outcome.REFUSED),
}


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize(("model", "dtype", "expected"), FOUND_OPS.values(), ids=FOUND_OPS)
def test_ops_that_were_wrong_once(
    model: Callable[[Tensor], Tensor], dtype: torch.dtype, expected: Outcome, direct: bool
) -> None:
    x = torch.ones(1, 5, 2, dtype=dtype, requires_grad=True)
    case = oracle.Case(lambda x: (model(x), x.cumsum(1)), [x], (2, 3), {"seq_dims": {"x": 1}}, direct=direct)
    result = oracle.outcome(case)
    assert result.outcome is expected, result


def test_a_seed_makes_one_program() -> None:
    assert made(7) == made(7)
    assert len({str(made(seed)) for seed in range(20)}) == 20


# What the oracle notices.


def spoiled(change: Callable[[GraphModule], None]) -> Any:
    """`lower`, but for the graph of one rank."""

    def lowered(*args: Any) -> Any:
        found = lower(*args)
        change(found.graph)
        found.graph.recompile()
        return found

    return mock.patch.object(backend, "lower", lowered)


def drops_the_scans(gm: GraphModule) -> None:
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.sp.scan.default):
        node.replace_all_uses_with(node.args[0])


def breaks(gm: GraphModule) -> None:
    raise ZeroDivisionError("in a pass")


STEPS = [Step("sin", (0,)), Step("tanh", (1,)), Step("cumsum", (2,), (1,)), Step("sin", (3,))]
SETTING = Setting((2, 5, 3), (3,), 1, False, {})


@pytest.mark.parametrize(
    ("change", "expected"),
    [(drops_the_scans, Outcome.WRONG), (breaks, Outcome.RAW)],
    ids=lambda x: getattr(x, "name", ""),
)
def test_a_program_that_is_lowered_wrongly(change: Callable[[GraphModule], None], expected: Outcome) -> None:
    assert SETTING.outcome(STEPS).outcome is Outcome.EXACT
    with spoiled(change):
        assert SETTING.outcome(STEPS).outcome is expected


def test_failures_are_minimized() -> None:
    with spoiled(drops_the_scans):
        setting, steps, result = minimal(SETTING, STEPS, SETTING.outcome(STEPS))
    assert steps == [Step("cumsum", (0,), (1,))]
    assert (setting, result.outcome) == (SETTING, Outcome.WRONG)


def test_a_step_is_left_out() -> None:
    steps = [Step("sin", (0,)), Step("cumsum", (1,), (1,)), Step("add", (1, 2))]
    assert str(Program(without(steps, 1))) == "v1 = sin(v0); v2 = add(v1, v1)"
    assert str(Program(without(steps, 0))) == "v1 = cumsum(v0, 1); v2 = add(v0, v1)"


def test_random_results_are_not_compared() -> None:
    x = torch.ones(1, 6, 2, dtype=torch.float64)
    case = oracle.Case(lambda x: torch.dropout(x.cumsum(1), 0.5, True), [x], (2,))
    assert oracle.outcome(case).outcome is Outcome.SKIPPED


def test_a_refusal_is_no_bug() -> None:
    x = torch.ones(1, 6, 2, dtype=torch.float64)
    result = oracle.outcome(oracle.Case(lambda x: x.sort(1)[0], [x], (2,), {"seq_dims": {"x": 1}, "fallback": "error"}))
    assert result.outcome is Outcome.REFUSED


RIGHT_STEP = Event(0, "right")
REFUSED_STEP = Event(1, "refused", "SP633: ids")


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([RIGHT_STEP, REFUSED_STEP, None], [RIGHT_STEP, REFUSED_STEP, None], Outcome.REFUSED),
        ([RIGHT_STEP, REFUSED_STEP, None], [RIGHT_STEP], Outcome.HANG),
        ([RIGHT_STEP, REFUSED_STEP, None], [RIGHT_STEP, Event(1, "right"), None], Outcome.WRONG),
        ([RIGHT_STEP, Event(1, "wrong"), None], [RIGHT_STEP, REFUSED_STEP, None], Outcome.WRONG),
        ([RIGHT_STEP, REFUSED_STEP, None], [RIGHT_STEP, Event(1, "raw"), None], Outcome.RAW),
        ([Event(3, "refused", REFUSED_STEP.words), None], [RIGHT_STEP, REFUSED_STEP, None], Outcome.WRONG),
        ([Event(1, "refused", "no"), None], [RIGHT_STEP, REFUSED_STEP, None], Outcome.WRONG),
        ([REFUSED_STEP, Event(AFTER, "raw"), None], [REFUSED_STEP, Event(AFTER, "right"), None], Outcome.RAW),
        (
            [REFUSED_STEP, Event(AFTER, "refused", BROKEN), None],
            [REFUSED_STEP, Event(AFTER, "right"), None],
            Outcome.WRONG,
        ),
        ([Event(2, "refused", REFUSED_STEP.words), None], [RIGHT_STEP, REFUSED_STEP, None], Outcome.WRONG),
        ([RIGHT_STEP, REFUSED_STEP, None], [Event(2, "refused", REFUSED_STEP.words), None], Outcome.REFUSED),
    ],
)
def test_judgment_of_events(first: list, second: list, expected: Outcome) -> None:
    scene = FaultScene("other tokens", world=2, odd=1, step=1, tcp=False, folder="")
    assert judged(scene, FAULTS["other tokens"], {0: first, 1: second}).outcome is expected


def test_faults_that_are_judged_otherwise_are_of_the_table() -> None:
    assert {*AFTERWARDS, *NEXT_CALL} <= {*FAULTS}


@pytest.mark.slow
def test_the_fuzzer_itself(tmp_path: Path) -> None:
    """Cases run in a process of their own, are counted, and can be run again by their names."""
    counts = Fuzzing({"programs": 0, "op_db": 0}, tmp_path, most=3).run(60, workers=1)
    assert all(count.total() for count in counts.values())
    name = (tmp_path / "cases.log").read_text().split()[2].rstrip(":")
    assert isinstance(run(name), Result)


@pytest.mark.parametrize("options", programs.OPTIONS, ids=str)
def test_no_tokens(options: dict[str, Any]) -> None:
    """A sequence of no rows: as one device has it, or refused."""
    steps = [Step("heads", (0,), (1, 2, 2, "causal")), Step("sin", (1,))]
    result = Setting((2, 0, 3), (2,), 1, False, options).outcome(steps)
    assert not result.outcome.is_bad, result


def test_the_ledger_continues(tmp_path: Path) -> None:
    """Cases of one source and commit make one row, also with other cases between them."""
    path = tmp_path / "fuzz.md"
    for source, number, outcome in (
        ("programs", 7, Outcome.EXACT),
        ("op_db", 0, Outcome.WRONG),
        ("programs", 8, Outcome.REFUSED),
    ):
        ledger.add(ledger.Row.now(source, 0, number, outcome), path)
    ledger.add(ledger.Row.now("programs", 1, 9, Outcome.EXACT), path)
    assert [ledger.end_of(source, path=path) for source in ("programs", "op_db", "faults")] == [9, 1, 0]
    rows = [line for line in path.read_text().splitlines() if line.startswith(("| programs", "| op_db"))]
    assert [line.split(" | ")[1:3] for line in rows] == [["0", "7-8"], ["0", "0-0"], ["1", "9-9"]]
    assert [ledger.end_of("programs", seed, path) for seed in (1, 2)] == [10, 0]
    assert rows[0].endswith("| 0 | 1 | 0 | 1 | 0 | 0 | 0 | 0 |")


# Kinds of programs on real ranks.

MADE: dict[str, Callable[[int], Any]] = {
    **{table: partial(stepped.made, table) for table in stepped.TABLES},
    **{source: partial(memory.made, source) for source in memory.SOURCES},
    **{"data_errors": data_errors.made, "transforms": transforms.made, "after_failure": after_failure.made},
}


@pytest.mark.parametrize("kind", MADE)
def test_a_seed_makes_one_program_of_each_kind(kind: str) -> None:
    """Programs vary in size and ranks, some under Inductor, most with lengths that the ranks do not divide."""
    drawn = [MADE[kind](seed) for seed in range(30)]
    assert MADE[kind](7) == drawn[7]
    assert len({str(one) for one in drawn}) == 30
    if kind in stepped.TABLES:
        cut = [(setting.sizes[1], setting.ranks[-1], setting.inductor) for setting, _ in drawn]
    else:
        cut = [(one.sizes[1], one.world, one.inductor) for one in drawn]
    assert sum(length % world > 0 for length, world, _ in cut) > 15
    assert 0 < sum(inductor for *_, inductor in cut) < 15


@pytest.mark.parametrize("name", SOURCES)
def test_a_seed_of_a_session_draws_other_cases(name: str) -> None:
    first, again, other = (list(itertools.islice(SOURCES[name].cases(seed), 3)) for seed in (0, 0, 1))
    assert first == again
    assert first != other


@dataclass(frozen=True)
class FakeScene(Scene):
    """A scene without ranks. answers: result of each rank. raises: the single-device run fails."""

    answers: tuple[Any, ...] = ()
    raises: bool = False

    def inputs(self) -> list[Tensor]:
        return [torch.ones(2, dtype=torch.float64)]

    def play(self, compiled: Any, inputs: Any) -> dict[str, Any]:
        if self.raises:
            raise IndexError("index out of range in self")
        return {"result": 2 * inputs[0]}


def fake_pool(scene: FakeScene) -> Any:
    """Replace the pool of processes by the answers of the scene; None is a rank without an answer."""
    answers = {
        rank: (not isinstance(answer, Failure), answer)
        for rank, answer in enumerate(scene.answers)
        if answer is not None
    }
    return mock.patch.object(on_ranks.Pool, "ask", return_value=answers)


TWO, THREE, HALF = (Played({"result": torch.full((2,), x, dtype=torch.float64)}, "") for x in (2.0, 3.0, float("nan")))
REFUSAL = Failure(("SpError", "ValueError"), "rank 1 raised IndexError: index out of range in self, at model.py:7", "")
UNCLEAR = Failure(("SpError", "ValueError"), "a rank has raised", "")
OWN = Failure(("IndexError", "LookupError"), "index out of range in self", "")
PLACED = Failure(OWN.kinds, f"{OWN.words}; rank 0 raised this at model.py:7", "")
GONE = Failure(("RuntimeError",), "Connection closed by peer", "")


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ((TWO, TWO), Outcome.EXACT),
        ((Played(TWO.values, "gather sort"), TWO), Outcome.GATHERED),
        ((TWO, THREE), Outcome.WRONG),
        ((HALF, TWO), Outcome.WRONG),
        ((Played({}, ""), Played({}, "")), Outcome.WRONG),
        ((TWO, None), Outcome.HANG),
        ((REFUSAL, None), Outcome.HANG),
        ((REFUSAL, REFUSAL), Outcome.REFUSED),
        ((REFUSAL, TWO), Outcome.RAW),
        ((REFUSAL, GONE), Outcome.RAW),
        ((GONE, Failure(("RuntimeError",), "Timed out waiting 120000ms", "")), Outcome.HANG),
    ],
)
def test_judgment_of_results(answers: tuple[Any, ...], expected: Outcome) -> None:
    scene = FakeScene(2, answers=answers)
    with fake_pool(scene):
        assert on_ranks.outcome(scene).outcome is expected


def test_single_device_failures_are_not_counted() -> None:
    """NaN of a single device is expected on ranks, and a case whose single-device run raises is skipped."""

    class Infinite(FakeScene):
        def play(self, compiled: Any, inputs: Any) -> dict[str, Any]:
            return {"result": inputs[0] / 0, "other": inputs[0]}

    other = {"other": torch.ones(2, dtype=torch.float64)}
    for answer, expected in (
        ({**HALF.values, **other}, Outcome.SKIPPED),
        ({**HALF.values, "other": TWO}, Outcome.WRONG),
    ):
        scene = Infinite(2, answers=(Played(answer, ""),) * 2)
        with fake_pool(scene):
            assert on_ranks.outcome(scene).outcome is expected
    assert on_ranks.outcome(FakeScene(2, raises=True)).outcome is Outcome.SKIPPED


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ((REFUSAL, REFUSAL), Outcome.REFUSED),
        ((OWN, OWN), Outcome.REFUSED),
        ((OWN, TWO), Outcome.WRONG),
        ((OWN, None), Outcome.HANG),
        ((OWN, REFUSAL), Outcome.RAW),
        ((PLACED, REFUSAL), Outcome.REFUSED),
        ((Failure(("RuntimeError",), PLACED.words, ""), REFUSAL), Outcome.RAW),
        ((UNCLEAR, REFUSAL), Outcome.RAW),
        ((GONE, GONE), Outcome.RAW),
    ],
)
def test_the_judgment_of_an_error_of_the_data(answers: tuple[Any, ...], expected: Outcome) -> None:
    found = {rank: (not isinstance(one, Failure), one) for rank, one in enumerate(answers) if one is not None}
    causes = [data_errors.Cause("IndexError", "index out of range in self")]
    result = data_errors.judged(data_errors.DataError(2), found, causes)
    assert result.outcome is expected, result


@pytest.mark.slow
@pytest.mark.parametrize("kind", MADE)
def test_a_case_of_each_kind_runs(kind: str) -> None:
    """On real ranks, to some outcome but for an error of the fuzzer itself."""
    result = run(f"{kind}:0")
    assert "the fuzzer itself" not in result.words
    on_ranks.pool().close()
