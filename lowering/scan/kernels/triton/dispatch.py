"""Choose the schedule of a scan on a GPU: one program for each line, or several for its parts.

A line is the rows of one scan; a tile is the places x lines that a program processes at once (`triton_tiles.py`).

On an H100 the chosen schedule was the faster one for every shape of `benchmarks/gpu/gpu_scans.py` (torch 2.11).
Importing this module needs triton.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton

from .triton_tiles import State, Sweep
from .walk import scan_in_parts, scan_single_pass


@dataclass(frozen=True)
class TileSizes:
    """Tile sizes and thresholds of the schedules."""

    walk: tuple[int, int] = (8192, 4)  # bytes of states that a program stores at once, and its number of warps
    programs: int = 16  # programs per multiprocessor if a length is divided
    min_tiles: int = 4  # programs per multiprocessor from which lengths are not divided


# Bytes of states per warp of a tile, for 64-bit states without flags; with half the warps some spill on sm_90.
WARP_BYTES = 1024
# Tile sizes in Triton's interpreter: small, so that small tensors have several tiles, and many parts.
INTERPRETER_SIZES = TileSizes(walk=(128, 1), programs=16, min_tiles=2)


def choose_schedule(across: int, along: int, multiprocessors: int, sizes: TileSizes) -> str:
    """Return the schedule: "one" program per line, or "parts" of lines with a program each.

    One program per line takes two passes over memory in place of three. It is selected if the lines alone keep the
    device busy, or have too few tiles to be divided.

    Args:
        across: Number of tiles over all lines, each with one tile's number of lines: the programs of schedule "one".
        along: Number of tiles along a line.
        multiprocessors: Number of multiprocessors of the device.
        sizes: The thresholds.
    """
    is_busy = across >= sizes.min_tiles * multiprocessors
    is_short = along <= 2  # too few tiles along a line to be divided
    return "one" if is_busy or is_short else "parts"


def tile_sizes() -> TileSizes:
    """Return the tile sizes, which depend on whether Triton's interpreter runs the kernels."""
    return INTERPRETER_SIZES if triton.knobs.runtime.interpret else TileSizes()


def run_sweep(sweep: Sweep, initial: State | None, out: State | None, total: bool) -> State | None:
    """Run a scan in the schedule that keeps the device busy.

    Args:
        sweep: The scan.
        initial: (1, lines), the state before every line; None for the neutral state.
        out: Memory for the results, like x; None if only the total is needed.
        total: True to return the total.

    Returns:
        The total, (1, lines), if requested.
    """
    sizes = tile_sizes()
    tile_bytes, warps = sizes.walk  # bytes of the states of a tile, and warps of its program
    elements = _floor_power_of_2(tile_bytes // sweep.state_bytes)  # states of a tile
    if sweep.compute.itemsize == 8:  # more warps, so that registers suffice
        needed_warps = elements * sweep.value_bytes // WARP_BYTES
        warps = max(warps, _floor_power_of_2(needed_warps))
    tile = sweep.tile(elements, warps)
    across, along = triton.cdiv(sweep.lines, tile.lines), triton.cdiv(sweep.length, tile.steps)
    multiprocessors = _multiprocessors(sweep.x.device)
    if choose_schedule(across, along, multiprocessors, sizes) == "one":
        return scan_single_pass(sweep, tile, initial, out, total)
    # Parts of each line, enough to keep the device busy: `sizes.programs` programs per multiprocessor. A program also
    # reads the totals of the parts before its own: not more tiles of them than its part has, on average.
    num_parts = min(triton.cdiv(sizes.programs * multiprocessors, across), along, math.isqrt(2 * tile.steps * along))
    steps_of_part = tile.steps * triton.cdiv(along, num_parts)
    return scan_in_parts(sweep, tile, steps_of_part, initial, out, total)


def _floor_power_of_2(number: int) -> int:
    """Return the largest power of 2 up to the number, and at least 1: sizes of tiles are powers of 2."""
    return 1 << (max(number, 1).bit_length() - 1)


@cache
def _multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 1 for Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
