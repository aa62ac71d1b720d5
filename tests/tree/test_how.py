"""The graphs of docs/how.md against the passes; EXPECTTEST_ACCEPT=1 rewrites them."""

from __future__ import annotations

import inspect
import os

from support.docs.stages import PAGE, fill, program


def test_graphs_of_each_stage() -> None:
    page = PAGE.read_text()
    generated = fill(page)
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        PAGE.write_text(generated)
    else:
        assert generated == page, "EXPECTTEST_ACCEPT=1 rewrites it"


def test_the_program_is_shown() -> None:
    body = inspect.getsource(program).partition('"""\n')[2]
    assert all(line.strip() in PAGE.read_text() for line in body.splitlines())
