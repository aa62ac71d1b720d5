"""What the bodies of the ``sp::`` operators are: a digest of this package's source."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import torch


@cache
def digest(*folders: str) -> str:
    """Changes with every edit of an operator, and of what else lies in these folders.

    A compiler's caches see the operators' names only, and would bring back code made from an older body.
    """
    places = [Path(__file__).parent, *map(Path, folders)]
    files = sorted(file for place in places for file in place.rglob("*.py"))
    return hashlib.sha256(b"\0".join(f.read_bytes() for f in files)).hexdigest()[:16]


def tag_programs() -> None:
    """Programs compiled from now on are found in caches only by a process with the same operators."""
    config, tag = torch.compiler.config, f"sp_compile {digest()}"
    if tag not in config.cache_key_tag:
        config.cache_key_tag = f"{config.cache_key_tag} {tag}".strip()
