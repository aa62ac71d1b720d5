"""Define ``sp::tiled``: run rows through a program tile by tile, forward and backward.

No intermediate value of a tile is saved.

Operands are `rows`, cut along the dim that the program names, and `shared`, which every tile reads. One loop calls
the program once per tile, so the size of the compiled code does not depend on the number of tiles. Sums over the tiles
(the gradient of a weight, a sum over tokens) are accumulated in place. A value is a result or a gradient over all tiles
(`tile_program.py`). A cotangent is the gradient of a result.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sp_compile.lowering.base.library import composite, opaque

from .tile_program import ANY_LENGTH, PROGRAMS, TileBody, TileProgram, TileValue

sp = torch.ops.sp
Tensors = list[Tensor]
TILE_ARGUMENTS = "Tensor[] rows, Tensor[] shared, int tiles, str program, Tensor? seed"


def tile_length(rows: int, tiles: int) -> int:
    """Return the number of rows of every tile but the last, which may be shorter: 3 for 10 rows in 4 tiles."""
    return -(-rows // tiles)


def _iterate_tiles(program: TileProgram, rows: Tensors, tiles: int) -> Iterator[tuple[TileBody, int, int]]:
    """Yield (body, first row, number of rows) of each tile, with the program's body for its length.

    A program has one body per length. Its only body may be for ANY_LENGTH, a graph that was traced with a symbol for
    the length and supports all lengths but 1: a size of 1 could broadcast. The lengths then differ by at most one, and
    there are fewer tiles if they would have one row.
    """
    row_dim = program.rows[0]  # of the first operand
    total, first = rows[0].shape[row_dim], 0
    if ANY_LENGTH in program.bodies:
        n_tiles = min(tiles, max(1, total // 2))
        shortest, remainder = divmod(total, n_tiles)
        lengths = [shortest + 1 if i < remainder else shortest for i in range(n_tiles)]
    else:
        length = tile_length(total, tiles)
        lengths = [min(length, total - start) for start in range(0, total, length)]
    for length in lengths:
        yield program.bodies.get(length) or program.bodies[ANY_LENGTH], first, length
        first += length


def _slice_tile(operands: Sequence[Tensor], dims: Sequence[int | None], first: int, length: int) -> Tensors:
    """Return the rows [first, first + length) of each operand along its dim, contiguous.

    An operand whose dim is None, such as a weight, is shared by all tiles and returned unchanged.
    """
    return [
        x if dim is None else x.narrow(dim, first, length).contiguous() for x, dim in zip(operands, dims, strict=True)
    ]


def _fake_results(
    kinds: Sequence[str], cotangents: Tensors, rows: Tensors, shared: Tensors, tiles: int, program: str, seed: Any
) -> Tensors:
    """Return what ``run_tiles`` returns for fake operands: empty tensors with the shapes of its values."""
    extents = PROGRAMS[program].sizes([*rows, *shared])  # the values of the symbolic sizes in the shapes
    return [value.empty(extents, rows[0]) for value in _values_of(PROGRAMS[program], kinds)]


def _values_of(program: TileProgram, kinds: Sequence[str]) -> list[TileValue]:
    """Return the descriptions of a program's "results" or "gradients", or of both, in the order of `kinds`."""
    return [value for kind in kinds for value in getattr(program, kind)]


@opaque(
    f"run_tiles(str[] kinds, Tensor[] cotangents, {TILE_ARGUMENTS}) -> Tensor[]",
    _fake_results,
    replays=False,  # the seed is read on the CPU in every call
)
def run_tiles(
    kinds: Sequence[str], cotangents: Tensors, rows: Tensors, shared: Tensors, tiles: int, program: str,
    seed: Tensor | None,
) -> Tensors:  # fmt: skip
    """Run a program, the graphs of one tile, on all tiles in turn, and return its results, its gradients, or both.

    Each tile seeds the generators with ``seed`` plus the index of its first row, so that a backward that recomputes the
    tile draws the same numbers. The state of the generators is restored at the end.

    Shapes: rows (.., R, ..), shared any -> as the program defines; gradients as their operands. Peak: intermediate
    values of a tile, in addition to operands and results.

    Args:
        kinds: Values to return, "results", "gradients" or both in this order: rows of all tiles, or sums over them.
        cotangents: Gradients of the differentiable results, for "gradients" alone; with "results" they are 1.
        rows: Operands that are cut into tiles.
        shared: Operands that every tile reads.
        tiles: Number of tiles.
        program: Name of the program.
        seed: () int64; None for a program that draws no random numbers.
    """
    tile_program, device = PROGRAMS[program], rows[0].device
    # `values` describe the tensors to return: rows of each tile, or sums over the tiles.
    operands, values = [*rows, *shared, *cotangents], _values_of(tile_program, kinds)
    cotangent_dims = [tile_program.results[i].dim for i in tile_program.differentiable] if cotangents else []
    dims = [*tile_program.rows, *[None] * len(shared), *cotangent_dims]
    extents = tile_program.sizes([*rows, *shared])  # values of the symbolic sizes in this call
    totals = [value.allocate_total(extents, rows[0]) for value in values]
    first_seed = None if seed is None else int(seed.item())
    fork_rng = torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=seed is not None)
    with torch.autocast(device.type, enabled=False), fork_rng:
        for body, first, length in _iterate_tiles(tile_program, rows, tiles):
            if first_seed is not None:
                torch.manual_seed(first_seed + first)
            tile_results = iter(body.part(kinds)(_slice_tile(operands, dims, first, length)))
            for value, total in zip(values, totals):  # each takes its tensors from the iterator, in this order
                value.add_tile(total, tile_results, first, length)
            del tile_results  # free the memory before the next tile runs
    return [total.to(value.dtype) for value, total in zip(values, totals)]


class _RecomputeFunction(torch.autograd.Function):
    """Autograd function that saves the operands; the backward recomputes each tile."""

    @staticmethod
    def forward(
        ctx: Any, num_rows: int, tiles: int, program: str, seed: Tensor | None, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        """Run the program in tiles and save the operands.

        The first ``num_rows`` operands are cut into tiles; every tile reads the others.
        """
        rows, shared = list(operands[:num_rows]), list(operands[num_rows:])
        results = sp.run_tiles.default(["results"], [], rows, shared, tiles, program, seed)
        ctx.save_for_backward(seed, *operands)
        ctx.num_rows, ctx.tiles, ctx.program = num_rows, tiles, program
        ctx.mark_non_differentiable(*_non_differentiable_results(PROGRAMS[program], results))
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Recompute each tile and compute its gradients. Returns a gradient or None per argument of `forward`."""
        (seed, *operands), program = ctx.saved_tensors, PROGRAMS[ctx.program]
        rows, shared = list(operands[: ctx.num_rows]), list(operands[ctx.num_rows :])
        cotangents = [grads[i] for i in program.differentiable]
        arguments = cotangents, rows, shared, ctx.tiles, ctx.program, seed
        operand_grads = sp.run_tiles.default(["gradients"], *arguments)
        return None, None, None, None, *_grads_per_operand(len(operands), program, operand_grads)


class _AtOnceFunction(torch.autograd.Function):
    """Autograd function that saves gradients for a cotangent of 1; the backward scales them."""

    @staticmethod
    def forward(
        ctx: Any, num_rows: int, tiles: int, program: str, seed: Tensor | None, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        """Run the program and its backward in tiles, for a cotangent of 1, and save only the gradients.

        The first ``num_rows`` operands are cut into tiles; every tile reads the others. ``program`` is a name in
        `PROGRAMS`, and ``seed`` that of its random numbers, if it draws any.
        """
        tile_program, rows, shared = PROGRAMS[program], list(operands[:num_rows]), list(operands[num_rows:])
        values = sp.run_tiles.default(["results", "gradients"], [], rows, shared, tiles, program, seed)
        results, gradients = values[: len(tile_program.results)], values[len(tile_program.results) :]
        ctx.save_for_backward(*gradients)
        ctx.program, ctx.num_operands = program, len(operands)
        ctx.dtypes = [operands[i].dtype for i in tile_program.grad_operands]
        ctx.mark_non_differentiable(*_non_differentiable_results(tile_program, results))
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the saved gradients by the gradient of the only differentiable result, a scalar.

        Returns a gradient or None per argument of `forward`.
        """
        program = PROGRAMS[ctx.program]
        (result_index,) = program.differentiable
        cotangent = grads[result_index].reshape(())
        # A zero gradient remains zero for a mean over no tokens, although its cotangent is infinite.
        scaled = ((x * cotangent).masked_fill_(x == 0, 0) for x in ctx.saved_tensors)
        operand_grads = [x.to(dtype) for x, dtype in zip(scaled, ctx.dtypes, strict=True)]
        return None, None, None, None, *_grads_per_operand(ctx.num_operands, program, operand_grads)


def _non_differentiable_results(program: TileProgram, results: Tensors) -> Tensors:
    """Return the results that autograd must not differentiate, such as integers."""
    return [x for i, x in enumerate(results) if i not in program.differentiable]


def _grads_per_operand(num_operands: int, program: TileProgram, grads: Tensors) -> list[Tensor | None]:
    """Return the gradient of each operand, None for those without one, as autograd expects them."""
    grad_of = dict(zip(program.grad_operands, grads, strict=True))
    return [grad_of.get(i) for i in range(num_operands)]


@composite(f"tiled({TILE_ARGUMENTS}) -> Tensor[]")
def run_tiled(rows: Tensors, shared: Tensors, tiles: int, program: str, seed: Tensor | None) -> Tensors:
    """Run a program, the graphs of one tile (``tile_program.py``), on all rows, tile by tile; differentiable once.

    Shapes: rows (.., R, ..), shared any -> as the program defines; tiles of ceil(R / tiles) rows, the last one shorter.
    If the program supports any length, the lengths of tiles differ by at most one, and each has two rows or more.
    seed: () int64 on the CPU, of the random numbers of a program; None if it draws none.
    Bytes: none. Saves: the operands; if the only result is a scalar, the gradients for a cotangent of 1, which the same
    loop computes. Source: DeepSpeed's ALST (arXiv:2506.13996), Liger's fused loss.
    """
    tile_program, operands = PROGRAMS[program], [*rows, *shared]
    needs_grad = torch.is_grad_enabled() and any(operands[i].requires_grad for i in tile_program.grad_operands)
    if not needs_grad:
        with torch.no_grad():  # operands may require a gradient under no_grad, which the operator does not compute
            return list(sp.run_tiles.default(["results"], [], rows, shared, tiles, program, seed))
    function = _AtOnceFunction if tile_program.at_once else _RecomputeFunction
    return list(function.apply(len(rows), tiles, program, seed, *operands))
