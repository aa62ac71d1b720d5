"""Store programs of one tile by name, as traced and as compiled, for the loops of ``tile_ops.py``.

A program computes a function of some rows, such as a loss over tokens: its results, and gradients of its operands. A
tile is a part of the rows. A graph contains the name of a program (`base/registry.py`).

    TileProgram    one `TileBody` for each length of a tile, and a `TileValue` for each result and gradient
    TileBody       two `TilePart`s, graphs that a loop calls once per tile: `forward` and `gradients`
    TileValue      shape and dtype of a tensor over all tiles: it has rows of each tile, or is a sum over the tiles

A cotangent is the gradient of a result, which autograd passes to the backward. Extents are the values of the symbols in
shapes for the operands of one call.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, TypeAlias

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule

from sp_compile.lowering.base.dtypes import accumulation_dtype
from sp_compile.lowering.base.registry import ProgramTable
from sp_compile.lowering.torch_compat import are_guards_met, evaluate_expr, is_symbolic

from .tile_sums import TILE_SUMS

ROWS = sympy.Symbol("rows", integer=True, positive=True)  # the number of rows, in the shape of a value
Extent: TypeAlias = int | sympy.Expr
Extents: TypeAlias = Mapping[sympy.Expr, Any]  # the value of each symbol
Compiler = Callable[[GraphModule, list[Tensor]], Callable[..., Sequence[Tensor]]]


def resolve_shape(shape: Sequence[Any], extents: Extents) -> list[Any]:
    """Return the shape with symbolic sizes replaced by `extents`, their values in one call or one tile.

    `evaluate_expr` computes the expressions that remain, such as 2 * rows.
    """
    sizes = [extents.get(size, size) if isinstance(size, sympy.Symbol) else size for size in shape]
    return [evaluate_expr(size, extents) if isinstance(size, sympy.Expr) else size for size in sizes]


@dataclass(eq=False)
class TilePart:
    """A graph of tensors, without autograd, that is called once per tile."""

    graph: GraphModule  # computes the results of one tile
    inputs: list[Tensor]  # fake tensors as the graph takes them; rows are contiguous
    run: Callable[..., Any] = field(init=False)  # the graph, or its compiled form
    compiler_key: Any = None  # key of the last `compile`, such as the name and the options of the compiler
    strides: list[tuple[int, ...] | None] = field(init=False)  # of each input; None if its sizes are symbols
    # whether `run` supports operands of these sizes, by the sizes of inputs with symbols
    supported_sizes: dict[tuple[int, ...], bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Run the graph as traced until `compile` is called; record the strides that it expects."""
        self.run = self.graph
        self.strides = [None if is_symbolic(x) else tuple(x.stride()) for x in self.inputs]

    def __call__(self, operands: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run the graph on operands of the traced shapes, compiled if the compiled form supports their sizes.

        Operands with other strides than the traced ones are copied.
        """
        operands = [_with_strides(x, strides) for x, strides in zip(operands, self.strides, strict=True)]
        return self.run(*operands) if self._can_run(operands) else self.graph(*operands)

    def _can_run(self, operands: Sequence[Tensor]) -> bool:
        """Return True if the compiled graph supports these sizes: symbolic sizes have guards."""
        if None not in self.strides:  # no input has symbolic sizes
            return True
        symbolic_operands = [x for x, strides in zip(operands, self.strides) if strides is None]
        sizes = tuple(chain(*(x.shape for x in symbolic_operands)))
        if sizes not in self.supported_sizes:
            self.supported_sizes[sizes] = are_guards_met(self.inputs, operands)
        return self.supported_sizes[sizes]

    def compile(self, compiler: Compiler, key: Any) -> None:
        """Compile the graph, unless the last compilation had the same key: the compiler and its options."""
        if self.compiler_key != key:
            with torch.no_grad(), torch.autocast(self.inputs[0].device.type, enabled=False):
                self.run = compiler(self.graph, self.inputs)
            self.compiler_key = key
            self.supported_sizes.clear()


def _with_strides(x: Tensor, strides: tuple[int, ...] | None) -> Tensor:
    """Return x with these strides, as a compiled graph requires; contiguous if they are None.

    Copies only if necessary.
    """
    if strides is None:
        return x.contiguous()
    if x.stride() == strides:
        return x
    differing_sizes = [n for n, old, new in zip(x.shape, x.stride(), strides, strict=True) if old != new]
    if all(size == 1 for size in differing_sizes):  # the stride of a dim of size 1 has no effect
        return x.as_strided(x.shape, strides)
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


@dataclass(frozen=True)
class TileValue:
    """A result or a gradient over all tiles."""

    shape: tuple[Extent, ...]  # of ints, and of symbols whose values `TileProgram.sizes` returns
    dtype: torch.dtype  # the returned dtype; a sum over the tiles accumulates in at least float32
    dim: int | None  # the dim of its rows; None for a sum over the tiles
    adds: str = ""  # how a tile adds its part to the sum, a name of `TILE_SUMS`
    order: tuple[int, ...] = ()  # the dims from the slowest to the fastest, if not in order

    def sizes(self, extents: Extents) -> list[Any]:
        """Return the shape in a call in which the symbolic sizes have the values `extents`."""
        return resolve_shape(self.shape, extents)

    def empty(self, extents: Extents, like: Tensor) -> Tensor:
        """Allocate the tensor that an operator returns, on the device of `like`.

        `self.order` has its dims from the slowest to the fastest in memory. `extents` are the values of symbolic sizes.
        """
        shape = self.sizes(extents)
        if not self.order:
            return like.new_empty(shape, dtype=self.dtype)
        buffer = like.new_empty([shape[d] for d in self.order], dtype=self.dtype)
        return buffer.permute([self.order.index(d) for d in range(len(shape))])  # the inverse of the order

    def allocate_total(self, extents: Extents, like: Tensor) -> Tensor:
        """Allocate the tensor that a loop over the tiles fills, on the device of `like`.

        It is empty for rows, which each tile writes, and zeros in at least float32 for a sum, to which each tile adds.
        """
        if self.dim is not None:
            return self.empty(extents, like)
        return replace(self, dtype=accumulation_dtype(self.dtype)).empty(extents, like).zero_()

    def add_tile(self, total: Tensor, tile_results: Iterator[Tensor], first: int, length: int) -> None:
        """Write the rows [first, first + length) of ``total``, or add to the sum ``total``, in place.

        Args:
            total: The tensor of `allocate_total`.
            tile_results: Iterator over the results of a tile, at those of this value: one tensor for rows, or the
                summands of a sum, such as the two operands of a product.
            first: First row of the tile.
            length: Number of rows of the tile.
        """
        if self.dim is not None:
            total.narrow(self.dim, first, length).copy_(next(tile_results))
        else:
            sum_kind = TILE_SUMS[self.adds]
            sum_kind.add(total, *islice(tile_results, sum_kind.num_summands))


@dataclass(frozen=True)
class TileBody:
    """The parts for tiles of one length."""

    forward: TilePart  # maps rows and shared operands to results
    # Maps the same and the cotangents of the results to gradients. If a program computes them at once: maps rows and
    # shared operands to results, and gradients for a cotangent of 1.
    gradients: TilePart | None = None

    @property
    def parts(self) -> list[TilePart]:
        """Return the parts that exist, as the digest of a program's code reads them."""
        return [part for part in (self.forward, self.gradients) if part is not None]

    def part(self, kinds: Sequence[str]) -> TilePart:
        """Return the part that computes "results", "gradients", or both: the results first."""
        part = self.gradients if "gradients" in kinds else self.forward
        assert part is not None
        return part


@dataclass(frozen=True, eq=False)
class TileProgram:
    """A program for the rows of one tile. Its operands are those with rows, then the shared ones."""

    name: str  # name of the program, by which operators find it
    bodies: dict[int, TileBody]  # by the length of a tile, at most two, or one for ANY_LENGTH
    rows: tuple[int, ...]  # the dim of the rows in each operand that has them
    results: tuple[TileValue, ...]  # the values that the program returns
    differentiable: tuple[int, ...]  # indices of the results that have a cotangent
    grad_operands: tuple[int, ...]  # indices of the operands, rows first, that have a gradient
    gradients: tuple[TileValue, ...]  # gradients of these operands
    at_once: bool  # True if these are computed with the results, for a cotangent of 1 of the only differentiable one
    # the operand and its dim for each symbol in the shapes of the values
    symbol_places: tuple[tuple[sympy.Symbol, tuple[int, int]], ...] = ()

    def sizes(self, operands: Sequence[Tensor]) -> dict[sympy.Expr, Any]:
        """Return the values of all symbolic sizes in a call with these operands, those with rows first."""
        rows: dict[sympy.Expr, Any] = {ROWS: operands[0].shape[self.rows[0]]}
        return rows | {symbol: operands[i].shape[dim] for symbol, (i, dim) in self.symbol_places}

    def compile(self, compiler: Compiler, key: Any, for_training: bool) -> None:
        """Compile the graphs that a call runs, in training or in inference; the others remain as traced.

        The runtime calls it before a compiled graph that contains the program's name runs. The forward does not run in
        training if the gradients are computed with the results.

        Args:
            compiler: Compiles a graph for example inputs.
            key: Identifies the compiler and its options: graphs that have been compiled with it are skipped.
            for_training: Whether the call computes gradients.
        """
        needs_gradients = for_training and bool(self.grad_operands)
        for body in self.bodies.values():
            if not (needs_gradients and self.at_once):
                body.forward.compile(compiler, key)
            if needs_gradients:
                assert body.gradients is not None
                body.gradients.compile(compiler, key)


ANY_LENGTH = 0  # the length of tiles whose number of rows is a symbol

PROGRAMS: ProgramTable[TileProgram] = ProgramTable("tiles")  # programs by name
