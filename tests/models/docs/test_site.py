"""The site of docs/ builds without a warning: links, anchors, docstrings."""

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.docs.pages import ROOT, code_of

import sp_compile

FURO_WIDTH, PADDING = 46, 0.875  # of a page in em; of a box of code at each side in rem
CHARACTER = 0.61  # width of a character of a monospaced font, as a part of its size


def test_the_first_example_fits_its_box() -> None:
    """It needs no scroll bar on the narrowest page beside furo's side bars, in the size of docs/_static/site.css."""
    size = re.search(
        r"^\.content pre \{ font-size: ([\d.]+)rem; \}", (ROOT / "docs/_static/site.css").read_text(), re.MULTILINE
    )
    assert size is not None
    fitting = int((FURO_WIDTH - 2 * PADDING) / (CHARACTER * float(size[1])))
    index = (ROOT / "docs/index.md").read_text()
    assert "{include} ../README.md" in index.partition("```python")[0]  # so that README's first example is the site's
    assert max(map(len, code_of(ROOT / "README.md")[0].splitlines())) <= fitting


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
    assert "coming_from" in pages_with(tmp_path / "site", "context", "parallel")
    errors = (tmp_path / "site" / "reference" / "errors.html").read_text()
    messages = re.findall(r"^\| `", (ROOT / "docs" / "reference" / "errors.md").read_text(), re.MULTILINE)
    anchors = re.findall(r'<td[^>]* id="([^"]+)"', errors)
    assert len(set(anchors)) == len(anchors) == len(messages)
    assert all(f'href="#{anchor}"' in errors for anchor in anchors)


def pages_with(site: Path, *words: str) -> set[str]:
    """Return the pages that a search for all of the words finds, in the index that the site's search reads."""
    index = json.loads((site / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")"))
    found = []
    for word in words:
        numbers = [index[kind].get(word, []) for kind in ("terms", "titleterms")]
        flat = [n for given in numbers for n in (given if isinstance(given, list) else [given])]
        found.append({index["docnames"][n] for n in flat})
    return set.intersection(*found)
