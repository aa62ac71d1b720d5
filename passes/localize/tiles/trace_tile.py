"""Trace the programs of one tile, for results and gradients, as graphs without autograd.

    h, w, y -> sum of cross_entropy     forward: (h, w, y) -> loss      at once: (h, w, y) -> loss, dh, (dz.mT, h)

A tile is a part of the rows of a region (`tile_regions.py`), and a loop calls its program for each tile. Each node of
the region runs with the sizes of a tile in its size arguments. Operands and results are identified by index, operands
with rows before replicated ones:

    trained            the operands that have a gradient
    differentiable     the results that have a cotangent (the gradient that the backward receives for a result)
    at once            the gradients are computed in the loop of the forward, as the only cotangent is 1 (a loss)
    places             the operand and dim from which each symbolic size is read (`tile_symbols.py`)

A body (`TileBody`) has the graphs for tiles of one length: `forward`, and `gradients` if an operand has one. Each is a
`TilePart`. A gradient that all tiles add up is returned as summands (`partial_sums.py`), whose form selects how the
loop adds them to its accumulator: no tile computes a separate gradient of a weight.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.registry import graph_code
from sp_compile.lowering.tiles.tile_ops import tile_length
from sp_compile.lowering.tiles.tile_program import (
    ANY_LENGTH,
    PROGRAMS,
    ROWS,
    Extents,
    TileBody,
    TilePart,
    TileProgram,
    TileValue,
    resolve_shape,
)
from sp_compile.lowering.torch_compat import FakeTensorMode, enable_python_dispatcher, make_symbolic_mode
from sp_compile.passes.graph.call import OpCall, node_shape
from sp_compile.passes.graph.fakes import trace_function
from sp_compile.passes.graph.modes import disable_autocast, disable_autocast_cache, restore_autocast
from sp_compile.passes.graph.node_info import can_require_grad
from sp_compile.passes.graph.sizes import as_sizes, is_same_size, read_sizes_from_inputs, size_product
from sp_compile.passes.graph.strides import is_identity, order_of_strides
from sp_compile.passes.sharding.rule import rule_of

from .partial_sums import return_summands
from .tile_regions import TileRegion, count_rows
from .tile_symbols import SymbolPlaces, has_symbolic_length, has_symbols, row_dim, split_row_dim, symbol_places
from .tile_view import TokenView

aten = torch.ops.aten


class TileFunction:
    """One tile of a region as a function of tensors, which is run under a tracer and under autograd.

    The region is a part of the token view (`tile_view.py`): a copy of the local graph in which tiles are the ranks.
    """

    def __init__(self, view: TokenView, region: TileRegion, places: SymbolPlaces, length: Any, sizes: Extents) -> None:
        """Create the function.

        Args:
            view: The token view.
            region: A region of the view.
            places: The operand (by index, those with rows first) and the dim from which each symbolic size is read.
            length: The number of rows of the tile, an int or a SymInt.
            sizes: The values of the symbolic sizes while the function is traced.
        """
        self.view, self.region, self.places, self.length, self.sizes = view, region, places, length, sizes

    def shape(self, node: Node, length: Any, sizes: Extents) -> list[Any]:
        """Return the shape of a node's value in a tile with `length` rows, with symbols replaced by `sizes`.

        The value of a node of the view has the rows of a rank. ROWS is a symbol for their number in a tile.
        """
        shard, shape = self.view.rows(node), list(as_sizes(node.meta["val"].shape))
        if shard is not None:  # the dim may be merged, such as [B * S, D]: only S is replaced
            shape[shard.dim] = size_product((shard.outer, ROWS, shard.inner))
        return resolve_shape(shape, {**sizes, ROWS: length})

    def inputs(self) -> list[Tensor]:
        """Return fake operands to trace the tile with: those with rows, then replicated ones."""
        return [self._fake_operand(x) for x in (*self.region.rows, *self.region.replicated)]

    def _fake_operand(self, x: Node) -> Tensor:
        """Return an empty tensor for an operand.

        Tiles of rows are contiguous copies. A replicated operand is passed as it is, so its tensor has its strides,
        unless a size is symbolic.
        """
        value, strides = x.meta["val"], as_sizes(x.meta["val"].stride())
        shape = resolve_shape(split_row_dim(self.view, x, self.length), self.sizes)
        is_static = all(isinstance(extent, int) for extent in (*as_sizes(value.shape), *strides))
        if is_static and self.view.rows(x) is None:
            return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
        return torch.empty(shape, dtype=value.dtype, device=value.device)

    def results(self, *operands: Tensor) -> list[Tensor]:
        """Run the region on one tile and return its results.

        Operands and results with rows have these in a dim of their own, which the loop slices (`split_row_dim`). Inside
        the region, values have the shapes of the model, with dims such as (batch * rows).
        """
        values: dict[Node, Any] = dict(zip((*self.region.rows, *self.region.replicated), operands, strict=True))
        # Sizes are read from the operands, so that the trace records their source.
        length = operands[0].shape[row_dim(self.view, self.region.rows[0])]
        sizes = {symbol: operands[i].shape[d] for symbol, (i, d) in self.places.items()}
        values.update({x: values[x].reshape(self.shape(x, length, sizes)) for x in self.region.rows})
        for node in self.region.nodes:
            values[node] = self._call(node, values, length, sizes)
        return [self._output(x, values[x], length, sizes) for x in self.region.results]

    def _output(self, x: Node, value: Tensor, length: Any, sizes: Extents) -> Tensor:
        """Return a result of the region with its rows in a separate dim, in which the loop writes them.

        A sum over the rows is returned unchanged.

        Args:
            x: The result, a node of the view.
            value: Its value in the tile.
            length: The number of rows of the tile.
            sizes: The values of the symbolic sizes.
        """
        if self.view.rows(x) is None:
            return value
        return value.reshape(resolve_shape(split_row_dim(self.view, x, length), sizes))

    def _call(self, node: Node, values: dict[Node, Any], length: Any, sizes: Extents) -> Any:
        """Run a node of the region on the values of its operands, with the sizes of a tile as size arguments.

        Args:
            node: Node of the view.
            values: Values of the nodes before it, in the tile.
            length: The number of rows of the tile.
            sizes: The values of the symbolic sizes.
        """
        if node.target is operator.getitem:
            return values[node.args[0]][node.args[1]]
        call, rule = OpCall(node), rule_of(node)  # the sharding rule states which argument is the shape of the result
        assert rule is not None
        operands = [values[x] for x in call.operands]
        if rule.reshapes:
            return operands[0].reshape(self.shape(node, length, sizes))
        size_argument = {rule.sizes: self.shape(node, length, sizes)} if rule.sizes else {}
        args, kwargs = call.with_operands(operands, **size_argument)
        with restore_autocast(self.view.to_local[node]):  # recorded at the node of the local graph
            return node.target(*args, **kwargs)


def tile_program(view: TokenView, region: TileRegion, tiles: int) -> TileProgram:
    """Trace and register the program of a region's tiles, which the sp::tiled call calls by its name.

    It has a forward and gradients for each length of a tile, as graphs without autograd. If the only differentiable
    result is a loss, its cotangent is taken to be 1, and the gradients are computed with it (`at_once`).

    Args:
        view: The token view.
        region: A region of the view.
        tiles: The number of tiles.
    """
    places = symbol_places(view, region)
    assert places is not None
    operands = (*region.rows, *region.replicated)
    mode, functions = _tile_functions(view, region, places, tiles)
    with mode, enable_python_dispatcher(), disable_autocast_cache():  # autocast itself is that of the caller
        # Indices of the operands that have a gradient, and of the results that have a cotangent.
        trained = tuple(i for i, x in enumerate(operands) if can_require_grad(x))
        # They are equal for tiles of all lengths, so those of one length are examined.
        differentiable, trained = _find_differentiable(next(iter(functions.values())), trained)
        losses = [region.results[i] for i in differentiable]
        at_once = len(losses) == 1 and view.is_sum(losses[0]) and is_same_size(size_product(node_shape(losses[0])), 1)
        # The gradient of an operand without rows, such as a weight, is a sum over the tiles. A tile may return it as
        # the operands of a product (summands), which the loop adds to an accumulator; the form is then "product".
        sums = [view.rows(operands[i]) is None for i in trained]
        bodies, forms = _trace_bodies(functions, trained, differentiable, at_once, sums)
    # Symbols are renamed in order, so that equal layers have the same code and share one program.
    names = {symbol: sympy.Symbol(f"n{i}", integer=True, positive=True) for i, symbol in enumerate(places)}
    results = tuple(_describe_value(view, x, names) for x in region.results)
    gradients = [_describe_value(view, operands[i], names) for i in trained]
    if at_once:  # a sum over many tokens may exceed the range of float16
        gradients = [replace(x, dtype=torch.float32) if x.dtype == torch.float16 else x for x in gradients]
    added_gradients = tuple(replace(x, adds=form) for x, form in zip(gradients, forms, strict=True))
    row_dims = tuple(row_dim(view, x) for x in region.rows)
    named_places = tuple(zip(names.values(), places.values()))
    # the fields of the TileProgram after its name and bodies
    fields = (row_dims, results, differentiable, trained, added_gradients, at_once, named_places)
    code = fields, {n: _body_code(body) for n, body in bodies.items()}
    return PROGRAMS[PROGRAMS.register(code, lambda name: TileProgram(name, bodies, *fields))]


def _tile_functions(
    view: TokenView, region: TileRegion, places: SymbolPlaces, tiles: int
) -> tuple[FakeTensorMode, dict[int, TileFunction]]:
    """Return the fake mode in which tiles are traced, and a function to trace for each length of a tile.

    There are up to two lengths: 10 rows in 4 tiles give 3, 3, 3 and 1. If the number of rows is symbolic, one function
    with the key ANY_LENGTH supports all lengths.
    """
    total = count_rows(view, region)
    length = tile_length(total, tiles)
    last_length = total % length or length  # that of all tiles if they divide the rows evenly
    mode, sizes = FakeTensorMode(), dict[sympy.Expr, Any]()
    lengths: dict[int, Any] = {n: n for n in (length, last_length)}  # key of a function -> number of rows of its tile
    if has_symbols(view, region):  # hints of at least 2, since torch specializes sizes of 0 and 1
        hints = [max(2, view.size_hints.get(x, 2)) for x in places]
        mode, (symbolic_length, *values) = make_symbolic_mode(max(2, length), *hints)
        sizes = dict(zip(places, values, strict=True))
        if has_symbolic_length(view, region):
            lengths = {ANY_LENGTH: symbolic_length}
    return mode, {n: TileFunction(view, region, places, rows, sizes) for n, rows in lengths.items()}


def has_same_draws(program: TileProgram) -> bool:
    """Return True if the backward, which runs the forward of each tile again, draws the same random numbers.

    Each tile sets the same seed in both, so that the number of draws has to be equal. A program whose gradients are
    computed with its results runs the forward once.
    """
    pairs = [(body.forward.graph, body.gradients.graph) for body in program.bodies.values() if body.gradients]
    return program.at_once or all(_count_draws(forward) == _count_draws(backward) for forward, backward in pairs)


def _count_draws(gm: GraphModule) -> int:
    """Return the number of nodes of the graph that draw random numbers."""
    return sum(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in gm.graph.nodes)


def _describe_value(view: TokenView, x: Node, names: Mapping[Any, Any]) -> TileValue:
    """Return the shape, dtype and memory order with which the loop over tiles allocates a result or gradient.

    Args:
        view: The token view.
        x: The result, or the operand of the gradient. Without rows, its gradient is a sum over the tiles, which is
            allocated with the memory order of x (such as that of a transposed weight).
        names: The names of the symbolic sizes in the program.
    """
    value, split_shape = x.meta["val"], split_row_dim(view, x, ROWS)
    named_shape = tuple(extent if isinstance(extent, int) else extent.subs(names) for extent in split_shape)
    if view.rows(x) is not None:
        return TileValue(named_shape, value.dtype, dim=row_dim(view, x))
    order = order_of_strides(as_sizes(value.stride()))
    return TileValue(named_shape, value.dtype, dim=None, order=() if is_identity(order) else tuple(order))


def _new_leaves(operands: Sequence[Tensor], trained: Sequence[int]) -> list[Tensor]:
    """Return detached operands, of which those at the indices in `trained` require a gradient."""
    return [x.detach().requires_grad_(i in trained) for i, x in enumerate(operands)]


def _find_differentiable(tile: TileFunction, trained: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the indices of the results that require a gradient, and of the operands in `trained` that receive one.

    An operand that is read only under no_grad receives none. A gradient of zeros in its place would be wrong: an
    optimizer skips a weight without a gradient, but applies weight decay to one with zeros.
    """
    with torch.enable_grad():
        leaves = _new_leaves(tile.inputs(), trained)
        results = tile.results(*leaves)
    differentiable = tuple(i for i, x in enumerate(results) if x.requires_grad)
    if not differentiable:
        return (), ()
    outputs = [results[i] for i in differentiable]
    cotangents = [torch.ones_like(x) for x in outputs]
    gradients = _compute_gradients(outputs, [leaves[i] for i in trained], cotangents, allow_unused=True)
    return differentiable, tuple(i for i, x in zip(trained, gradients, strict=True) if x is not None)


def _compute_gradients(
    outputs: Sequence[Tensor], leaves: Sequence[Tensor], cotangents: Sequence[Tensor], allow_unused: bool = False
) -> tuple[Any, ...]:
    """Return torch.autograd.grad outside of autocast, as users call a backward; None for an unused leaf."""
    with disable_autocast(outputs[0].device.type):
        return torch.autograd.grad(outputs, leaves, cotangents, allow_unused=allow_unused)


def _trace_bodies(
    functions: Mapping[int, TileFunction], trained: Sequence[int], differentiable: Sequence[int], at_once: bool,
    sums: Sequence[bool],
) -> tuple[dict[int, TileBody], list[str]]:  # fmt: skip
    """Trace the tiles of each length; return the bodies (their graphs) by length, and the form of each gradient.

    A gradient that is a sum over the tiles (`sums`) may be returned as summands, such as the operands of a product that
    the loop adds; its form is how the loop adds them. Tiles of all lengths add to the same accumulator: if the form of
    a gradient differs between lengths, all are traced again, and each tile computes this gradient itself. Arguments: as
    of `_trace_body`.
    """
    traced = {n: _trace_body(tile, trained, differentiable, at_once, sums) for n, tile in functions.items()}
    forms_by_length = [forms for _, forms in traced.values()]
    is_uniform = [len(set(forms_of_one)) == 1 for forms_of_one in zip(*forms_by_length, strict=True)]
    if not all(is_uniform):
        sums = [is_sum and uniform for is_sum, uniform in zip(sums, is_uniform, strict=True)]
        traced = {n: _trace_body(tile, trained, differentiable, at_once, sums) for n, tile in functions.items()}
    _, forms = next(iter(traced.values()))
    return {n: body for n, (body, _) in traced.items()}, forms


def _trace_body(
    tile: TileFunction, trained: Sequence[int], differentiable: Sequence[int], at_once: bool, sums: Sequence[bool]
) -> tuple[TileBody, list[str]]:
    """Trace the forward and the gradients of a tile, and return both graphs with the form of each gradient.

    Args:
        tile: The tile, of one length.
        trained: Indices of the operands that have a gradient.
        differentiable: Indices of the results that have a cotangent, the gradient that the backward receives for them.
        at_once: The gradients are computed with the results, for a cotangent of 1.
        sums: For each gradient, True if it is a sum over the tiles, which may be returned as summands: the operands of
            the op that computes it. The form, such as "product", is that op (`return_summands`).
    """
    inputs = tile.inputs()
    num_inputs = len(inputs)

    def forward(*operands: Tensor) -> list[Tensor]:
        """Return the results of one tile."""
        with torch.no_grad():
            return tile.results(*operands)

    def gradients(*operands: Tensor) -> list[Tensor]:
        """Return the gradients of one tile, after its results if `at_once`; operands are inputs, then cotangents."""
        with torch.enable_grad():
            leaves = _new_leaves(operands[:num_inputs], trained)
            results = tile.results(*leaves)
            outputs = [results[i] for i in differentiable]
            cotangents = [torch.ones_like(x) for x in outputs] if at_once else list(operands[num_inputs:])
        grads = _compute_gradients(outputs, [leaves[i] for i in trained], cotangents)
        return [*([x.detach() for x in results] if at_once else ()), *grads]

    forward_part = TilePart(_trace_graph(forward, inputs), inputs)
    if not trained:
        return TileBody(forward_part), []
    operands = list(inputs)
    if not at_once:  # the cotangents are operands, too
        outputs = forward_part.graph.graph.output_node().args[0]
        operands += [torch.empty_like(outputs[i].meta["val"]) for i in differentiable]
    graph = _trace_graph(gradients, operands)
    forms = return_summands(graph, sums)
    return TileBody(forward_part, TilePart(graph, operands)), forms


def _trace_graph(run: Callable[..., Any], operands: Sequence[Tensor]) -> GraphModule:
    """Trace the function to a graph. Symbolic sizes become reads of the shapes of its inputs, not inputs themselves."""
    gm = trace_function(run, operands)
    read_sizes_from_inputs(gm.graph)
    gm.recompile()
    return gm


def _body_code(body: TileBody) -> list[Any]:
    """Return the code and the input types of each graph of a body: `forward`, and `gradients` if it has them.

    Regions with equal ones, as of equal layers, share a program.
    """
    return [
        (graph_code(part.graph), part.strides, [(x.shape, x.dtype, x.device) for x in part.inputs])
        for part in body.parts
    ]
