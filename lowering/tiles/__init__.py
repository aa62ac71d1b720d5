"""Run work on rows tile by tile: a program of one tile, and the loops that call it."""

from . import tile_flops, tile_ops  # noqa: F401  (registers the operators, and what they compute)
