"""The site of docs/ builds without a warning: links, anchors, docstrings."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sp_compile

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_site_builds_without_warnings(tmp_path: Path) -> None:
    for package in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(package, reason="the site needs what `pip install sp-compile[docs]` brings")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", str(tmp_path / "trees")]
    done = subprocess.run([*command, "docs", str(tmp_path / "site")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "site" / "reference" / "api.html").read_text()
    assert "sp_compile.integrations.transformers.SequenceParallel" in api
    described = re.search(r"\bmesh: ([\w ]+)", inspect.getdoc(sp_compile.SPConfig) or "")
    assert described is not None
    assert described[1] in api
    errors = (tmp_path / "site" / "reference" / "errors.html").read_text()
    messages = re.findall(r"^\| `", (ROOT / "docs" / "reference" / "errors.md").read_text(), re.MULTILINE)
    anchors = re.findall(r'<td[^>]* id="([^"]+)"', errors)
    assert len(set(anchors)) == len(anchors) == len(messages)
    assert all(f'href="#{anchor}"' in errors for anchor in anchors)
