"""The programs of docs/tutorials/ on four real ranks; they compare their results themselves."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest import mock

import pytest
from support.docs.pages import TUTORIALS, code_of
from support.ranks import COMPILE_TIMEOUT, WORLD, Ranks

IN_A_WORKER = {'dist.init_process_group("gloo")': "pass", "dist.destroy_process_group()": "pass"}
PROGRAMS = [page for page in TUTORIALS if page.stem != "README"]


@pytest.fixture(scope="module")
def workers() -> Iterator[Ranks]:
    """Processes of this module alone: a tutorial declares groups, which stay declared."""
    workers = Ranks()
    yield workers
    workers.close()


@pytest.fixture(params=PROGRAMS, ids=lambda page: page.stem)
def script(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Write a tutorial's program to a file, for processes that have joined their group."""
    (code,) = code_of(request.param)
    for line, replacement in IN_A_WORKER.items():
        assert line in code
        code = code.replace(line, replacement)
    script = tmp_path / f"{request.param.stem}.py"
    script.write_text(code)
    return script


def run(script: str, compiler: str) -> str:
    """Run a program on this rank. Return the text that it prints."""
    from sp_compile import SPConfig

    with (
        mock.patch.dict(SPConfig.__init__.__kwdefaults__, compiler=compiler),
        mock.patch.object(SPConfig.__dataclass_fields__["compiler"], "default", compiler),
        redirect_stdout(StringIO()) as printed,
    ):
        runpy.run_path(script, run_name="tutorial")
    return printed.getvalue()


@pytest.mark.slow
def test_program(workers: Ranks, script: Path) -> None:
    printed, *others = workers.run(WORLD, run, str(script), "aot_eager")
    assert bool(printed) == ("print(" in script.read_text())
    assert not any(others)


@pytest.mark.slow
def test_program_with_inductor(workers: Ranks, script: Path) -> None:
    workers.run(WORLD, run, str(script), "inductor", timeout=COMPILE_TIMEOUT)


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: page.stem)
def test_programs_are_short(page: Path) -> None:
    assert len(code_of(page)[0].splitlines()) <= 80
