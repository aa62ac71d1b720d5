"""README.md and the pages of docs/: their code, headings and links."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted((DOCS / "reference").glob("*.md"))]
"""Pages whose code runs in one process (tests/models/docs/test_pages.py)."""
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
"""Each is one program for several ranks (tests/models/docs/test_tutorials.py)."""
RECIPES = sorted((DOCS / "recipes").glob("*.md"))
"""Each is one program for processes of its own (tests/models/docs/test_recipes.py)."""

FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return (language, text) of each code block, in order."""
    return FENCE.findall(page.read_text())


def code_of(page: Path) -> list[str]:
    """Return the Python blocks of a page."""
    return [code for language, code in blocks(page) if language == "python"]


def prose(page: Path) -> str:
    """Return a page without its code blocks."""
    return FENCE.sub("", page.read_text())


def links(page: Path) -> list[str]:
    """Return the links of a page to files of the repository."""
    return [link for link in LINK.findall(prose(page)) if "://" not in link]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MyST generate them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
