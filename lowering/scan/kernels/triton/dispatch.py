"""Choose the schedule of a scan on a GPU. Importing this module needs triton.

On an H100 the chosen schedule was the faster one for every shape of `benchmarks/gpu_scans.py` (torch 2.11).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache

import torch
import triton

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.registry import Override

from .triton_tiles import State, Sweep
from .walk import scan_in_parts, scan_single_pass


@dataclass(frozen=True)
class TileSizes:
    """Tile sizes and thresholds of the schedules."""

    walk: tuple[int, int] = (8192, 4)  # bytes of states that a program stores at once, and its number of warps
    programs: int = 16  # programs per multiprocessor if a length is divided
    min_tiles: int = 4  # programs per multiprocessor from which lengths are not divided


# bytes of states per warp of a tile, for 64-bit states without flags; with half the warps some spill on sm_90
WARP_BYTES = 1024

# tile sizes in Triton's interpreter: small, so that small tensors have several tiles
INTERPRETER_SIZES = TileSizes((128, 1), programs=2, min_tiles=2)


SERIES = ("one", "parts")


def choose_schedule(across: int, along: int, multiprocessors: int, sizes: TileSizes) -> str:
    """Return the schedule: parts of lines, unless undivided lines keep the device busy.

    Args:
        across: Number of tiles across the lines.
        along: Number of tiles along a line.
        multiprocessors: Number of multiprocessors of the device.
        sizes: The thresholds.
    """
    return "one" if across >= sizes.min_tiles * multiprocessors or along <= 2 else "parts"


_forced_schedule: Override[tuple[str, TileSizes | None]] = Override()


def using_schedule(name: str, sizes: TileSizes | None = None) -> AbstractContextManager[None]:
    """Run every scan within the context, on any thread, with this schedule."""
    if name not in SERIES:
        raise SpError("SP551", f"name: expected one of {', '.join(SERIES)}, got {name!r}.")
    return _forced_schedule.force((name, sizes))


def run_sweep(sweep: Sweep, initial: State | None, out: State | None, total: bool) -> State | None:
    """Run a scan.

    Args:
        sweep: The scan.
        initial: (1, lines), the state before every line.
        out: Memory for the results, like x.
        total: True to return the total.

    Returns:
        The total, (1, lines), if requested.
    """
    way, sizes = _forced_schedule.value or ("", None)
    sizes = sizes or (INTERPRETER_SIZES if triton.knobs.runtime.interpret else TileSizes())
    held, warps = sizes.walk
    elements = 1 << (held // sweep.state_bytes).bit_length() - 1
    if sweep.compute.itemsize == 8:
        warps = max(warps, 1 << (elements * sweep.value_bytes // WARP_BYTES | 1).bit_length() - 1)
    tile = sweep.tile(elements, warps)
    across, along = triton.cdiv(sweep.lines, tile.lines), triton.cdiv(sweep.length, tile.steps)
    multiprocessors = _multiprocessors(sweep.x.device)
    if (way or choose_schedule(across, along, multiprocessors, sizes)) == "one":
        return scan_single_pass(sweep, tile, initial, out, total)
    wanted = triton.cdiv(sizes.programs * multiprocessors, across)
    part = tile.steps * triton.cdiv(along, min(wanted, along))
    return scan_in_parts(sweep, tile, part, initial, out)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
