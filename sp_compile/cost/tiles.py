"""What a region that runs in tiles holds: whole, and in a tile."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiled:
    """One region. node: its first product; where: the user's line. rows: of a rank.

    inside: bytes of what its products make of all rows; tile: of those of a tile.
    """

    node: str
    where: str
    tiles: int
    rows: int
    inside: int
    tile: int
