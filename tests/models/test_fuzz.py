"""Random small programs over ruled ops: on simulated ranks they equal one device in value and gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.models import check
from support.programs.random_programs import Program, Step, _inputs, programs


def _run(program: Program, sizes: tuple[int, int, int], ranks: int, dim: int, dynamic: bool = False) -> None:
    with torch._dynamo.config.patch(assume_static_by_default=not dynamic):
        check(program, *_inputs(sizes), sp=ranks, seq_dims={"x": dim})


SETTINGS = settings(suppress_health_check=list(HealthCheck))


@settings(SETTINGS, max_examples=30)
@given(programs(), st.sampled_from([2, 3]))
def test_random_programs_equal_one_device(program: tuple[Program, tuple[int, int, int]], ranks: int) -> None:
    _run(*program, ranks, dim=1)


@settings(SETTINGS, max_examples=10)
@given(programs(4), st.sampled_from([2, 3]))
def test_random_programs_of_dynamic_sizes(program: tuple[Program, tuple[int, int, int]], ranks: int) -> None:
    _run(*program, ranks, dim=1, dynamic=True)


@pytest.mark.slow
@settings(SETTINGS, max_examples=2000)
@given(programs(12), st.sampled_from([2, 3, 4]), st.integers(0, 2), st.booleans())
def test_many_random_programs_equal_one_device(
    program: tuple[Program, tuple[int, int, int]], ranks: int, dim: int, dynamic: bool
) -> None:
    _run(*program, ranks, dim, dynamic)


FOUND = {
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
    _run(Program(steps), *where)
