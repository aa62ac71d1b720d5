"""The site of docs/: Sphinx, with pages in Markdown and an API page from docstrings. `make docs` builds it."""

import re
import sys
from itertools import groupby
from pathlib import Path

from docutils import nodes

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import sp_compile  # noqa: E402

project = "sp_compile"
version = release = sp_compile.__version__
html_theme = "furo"
html_title = f"sp_compile {version}"
html_copy_source = False
extensions = ["myst_parser", "sphinx.ext.autodoc"]
highlight_language = "text"
smartquotes = False  # "auto" is a string
myst_heading_anchors = 3
python_maximum_signature_line_length = 100
autodoc_typehints_format = "short"

ENTRY = re.compile(r"(\w[\w, ]*?)(?::\s|\s{2,})\s*(.*)")  # "mesh: text", or "mesh      text" of a table


def restructured(lines: list[str]) -> list[str]:
    """A docstring as this project writes it, in reStructuredText.

    Single backquotes are code. A paragraph that is all indented is kept as it stands; one in which only later lines are
    has an entry for each line that is not, `name: text`.
    """
    out: list[str] = []
    for blank, group in groupby(lines, lambda line: not line.strip()):
        paragraph = list(group)
        if blank or paragraph[0].startswith(">>>"):
            out += paragraph
        elif all(line.startswith("  ") for line in paragraph):
            out += ["::", "", *paragraph] if out[-3:-2] != ["::"] else paragraph
        elif any(line.startswith("  ") for line in paragraph[1:]):
            for line in paragraph:
                entry = None if line.startswith("  ") else ENTRY.fullmatch(line)
                out += [f"``{entry[1]}``", f"    {escaped(entry[2])}"] if entry else [f"    {escaped(line.strip())}"]
        else:
            out += map(escaped, paragraph)
    return [*out, ""]


def escaped(line: str) -> str:
    """Code between backquotes, and nothing else that reStructuredText would read."""
    parts = line.split("`")
    return "".join(f"``{part}``" if i % 2 else re.sub(r"([*_|\\])", r"\\\1", part) for i, part in enumerate(parts))


def anchored(document: nodes.document) -> None:
    """Every row of the page of errors has an anchor of its message's words, and a link to it."""
    for row in document.findall(nodes.row):
        cell = row.children[0]
        if message := next(cell.findall(nodes.literal), None):
            cell["names"].append(message.astext())
            anchor = document.set_id(cell)
            cell.children[0].append(nodes.reference("", " ¶", refid=anchor, classes=["headerlink"]))


def setup(app) -> None:
    def docstring(_app, _what, _name, _object, _options, lines: list[str]) -> None:
        lines[:] = restructured(lines)

    app.connect("autodoc-process-docstring", docstring)
    app.connect("doctree-read", lambda app, document: app.env.docname == "errors" and anchored(document))
