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
html_static_path = ["_static"]
html_css_files = ["site.css"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
highlight_language = "text"
smartquotes = False  # "auto" is a string
myst_heading_anchors = 3
python_maximum_signature_line_length = 100
autodoc_typehints_format = "short"

ENTRY = re.compile(r"(\w[\w, ]*?)(?::\s|\s{2,})\s*(.*)")  # "mesh: text", or "mesh      text" of a table
SECTION = re.compile(r"(Args|Attributes|Example|Examples|Note|Raises|Returns|Yields):")  # of napoleon


def to_rst(lines: list[str]) -> list[str]:
    """Return a docstring in reStructuredText; Google sections are left to napoleon.

    Single backquotes are code. Outside of sections, an indented paragraph is literal, and a paragraph in which only
    later lines are indented is a list of entries `name: text`.
    """
    out: list[str] = []
    in_section = False
    for blank, group in groupby(lines, lambda line: not line.strip()):
        paragraph = list(group)
        if not blank and not paragraph[0].startswith(" "):
            in_section = bool(SECTION.fullmatch(paragraph[0].rstrip()))
        if blank or paragraph[0].startswith(">>>"):
            out += paragraph
        elif in_section:
            out += map(escape, paragraph)
        elif all(line.startswith("  ") for line in paragraph):
            out += ["::", "", *paragraph] if out[-3:-2] != ["::"] else paragraph
        elif any(line.startswith("  ") for line in paragraph[1:]):
            for line in paragraph:
                entry = None if line.startswith("  ") else ENTRY.fullmatch(line)
                out += [f"``{entry[1]}``", f"    {escape(entry[2])}"] if entry else [f"    {escape(line.strip())}"]
        else:
            out += map(escape, paragraph)
    return [*out, ""]


def escape(line: str) -> str:
    """Return a line in which text between single backquotes is code and no other character is markup."""
    if "``" in line:
        return line
    parts = line.split("`")
    return "".join(f"``{part}``" if i % 2 else re.sub(r"([*_|\\])", r"\\\1", part) for i, part in enumerate(parts))


def add_anchors(document: nodes.document) -> None:
    """Give every row of the page of errors an anchor with the name of its code, and a link to it."""
    for row in document.findall(nodes.row):
        cell = row.children[0]
        if code := next(cell.findall(nodes.literal), None):
            cell["names"].append(code.astext())
            anchor = document.set_id(cell)
            cell.children[0].append(nodes.reference("", " \u00b6", refid=anchor, classes=["headerlink"]))


def setup(app) -> None:
    def process_docstring(_app, _what, _name, _object, _options, lines: list[str]) -> None:
        lines[:] = to_rst(lines)

    app.connect("autodoc-process-docstring", process_docstring, priority=400)  # before napoleon
    app.connect("doctree-read", lambda app, document: app.env.docname == "reference/errors" and add_anchors(document))
