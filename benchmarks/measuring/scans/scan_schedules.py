"""Force the schedule of the Triton scans. Importing this module needs triton."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from sp_compile.lowering.scan.kernels.triton import dispatch
from sp_compile.lowering.scan.kernels.triton.dispatch import TileSizes

SCHEDULES = ("one", "parts")


@contextmanager
def using_schedule(name: str, sizes: TileSizes | None = None) -> Iterator[None]:
    """Run every scan within the context, on any thread, with this schedule and these tile sizes."""
    assert name in SCHEDULES, name
    sizes = dispatch.tile_sizes() if sizes is None else sizes
    with (
        mock.patch.object(dispatch, "choose_schedule", return_value=name),
        mock.patch.object(dispatch, "tile_sizes", return_value=sizes),
    ):
        yield
