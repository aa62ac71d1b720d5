"""README.md and the pages of docs/: their code, headings and links."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
"""All but the recipes, each of which is one program for processes of its own (tests/models/test_recipes.py)."""

FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def blocks(page: Path) -> list[tuple[str, str]]:
    """(what stands behind the fence, the block) of each code block, in order."""
    return FENCE.findall(page.read_text())


def code_of(page: Path) -> list[str]:
    """The Python of a page."""
    return [code for language, code in blocks(page) if language == "python"]


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return FENCE.sub("", page.read_text())


def links(page: Path) -> list[str]:
    """Those of a page that stay in the repository."""
    return [link for link in LINK.findall(prose(page)) if "://" not in link]


def anchors(page: Path) -> set[str]:
    """What `page.md#...` may name: its headings, as GitHub and MyST write them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
