"""ARCHITECTURE.md against the code: EXPECTTEST_ACCEPT=1 rewrites its generated parts."""

from __future__ import annotations

import os
import re

import pytest
from support.docs.architecture import PAGE, filled
from tree.test_layers import ROOT

PLACE = re.compile(r"`((?:sp_compile|passes|lowering|tests|examples|benchmarks)/[\w/.]*)`")
PATHS = PLACE.findall(PAGE.read_text()) + PLACE.findall((ROOT / "SECURITY.md").read_text())


def test_generated_parts() -> None:
    page = PAGE.read_text()
    made = filled(page)
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        PAGE.write_text(made)
    else:
        assert made == page, "EXPECTTEST_ACCEPT=1 rewrites it"


@pytest.mark.parametrize("path", sorted(set(PATHS)))
def test_places_exist(path: str) -> None:
    assert (ROOT / path).exists()


def test_files_that_the_code_names_exist() -> None:
    files = [path for folder in ("sp_compile", "passes", "lowering") for path in (ROOT / folder).rglob("*.py")]
    names = {"file.py", *(path.name for path in [*files, *(ROOT / "benchmarks").rglob("*.py")])}  # file.py: of examples
    for path in files:
        if not {"_compat", "torch_compat"} & set(path.parts):  # which names torch's
            unknown = set(re.findall(r"\w+[.]py\b", path.read_text())) - names
            assert not unknown, f"{path} names {unknown}"


def test_thirty_words() -> None:
    words = PAGE.read_text().partition("## Words")[2]
    assert 25 <= len(re.findall(r"^\| \*\*", words, re.MULTILINE)) <= 35
