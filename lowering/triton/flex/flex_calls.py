"""Call flex_attention, forward and backward, through compiled programs.

A program is compiled once per mask text, score function and shape. Calls that differ only in their lengths (numbers of
queries and keys) are a *family*. The first program of a family is compiled for the lengths of its first call. The
second one is dynamic in all lengths: sequences of varying length would otherwise compile at every step. Steps of a ring
share a program.
"""

import threading
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.registry import Override
from sp_compile.lowering.torch_compat import FlexProgram, FlexSetup, flex_backward, flex_forward

from .flex_tables import BlockTables, build_tables, tile_size
from .flex_texts import PairFunctions, PairTexts, pair_functions

# compiler of a graph of fake tensors, without a device, in place of Inductor: for tests
COMPILER: Override[Any] = Override()

_programs: dict[Hashable, list[FlexProgram]] = {}  # programs by (family, strides); see `_run_program`
_first_shapes: dict[Hashable, Hashable] = {}  # shapes of the operands in the first call of each family
_programs_lock = threading.Lock()
_failed = False  # whether a compilation has failed in this process


class CannotCompileError(SpError):
    """Failure to compile flex_attention. The process does not try again."""


def is_flex_available() -> bool:
    """Return True unless a compilation of flex_attention has failed; kernel selection then skips it."""
    return not _failed


def flex_block_forward(q: Tensor, k: Tensor, v: Tensor, pairs: PairTexts, scale: float) -> tuple[Tensor, Tensor]:
    """Return attention of all rows of q over all allowed keys: out in q's dtype, and lse in float32.

    Shapes: q (B, Hq, Q, D), k (B, Hkv, K, D), v (B, Hkv, K, E), Hkv divides Hq -> (B, Hq, Q, E), (B, Hq, Q). Queries
    without keys have 0 and -inf. ``pairs`` has the mask and the score function as texts, and the tensors that they
    read.

    Raises:
        CannotCompileError: The kernel cannot be compiled.
    """
    out, lse = _call_program(_forward_program, [q, k, v], pairs, scale)
    return out, lse


def flex_block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pairs: PairTexts, scale: float,
    totals: Mapping[str, Tensor] = {},
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk, dv in q's dtype for the keys of k, given out and lse over all keys.

    Args:
        grad: Gradient of out.
        q: (B, Hq, Q, D).
        k: (B, Hkv, K, D), a part of the keys.
        v: (B, Hkv, K, E).
        out: (B, Hq, Q, E), over all keys.
        lse: (B, Hq, Q), float32, over all keys.
        pairs: Texts and tables of the pairs.
        scale: Factor of the scores.
        totals: Tensors to which gradients of the score's tables are added, by table name.

    Raises:
        CannotCompileError: The kernel cannot be compiled.
    """
    operands, learned = [q, k, v, grad, out, lse], tuple(totals)
    dq, dk, dv, *table_grads = _call_program(_backward_program, operands, pairs, scale, learned)
    for total, table_grad in zip(totals.values(), table_grads, strict=True):
        total.add_(table_grad)
    return dq, dk, dv


def _fit_options(head_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Return options of flex_attention's kernels with which their values fit in registers.

    The values include those of mask texts and score functions, for which torch's defaults spill. Measured on sm_90,
    compiled by Triton 3.7, with soft-caps, slopes and documents. In float32, which tensor cores do not support without
    TF32, two stages move rows from registers to shared memory.
    """
    # (queries per block, keys per block, stages, warps) of forward and backward
    if dtype == torch.float32:
        forward = (32, 16, 2, 8) if head_dim > 128 else (32, 32, 1, 8)
        backward = (16, 16, 2, 4)
    elif head_dim <= 64:
        forward, backward = (128, 64, 3, 8), (64, 64, 2, 8)
    elif head_dim <= 128:
        forward, backward = (128, 64, 3, 8), (32, 64, 2, 8)
    else:
        forward, backward = (64, 32, 3, 4), (32, 32, 1, 8)
    options = dict(zip(("fwd_BLOCK_M", "fwd_BLOCK_N", "fwd_num_stages", "fwd_num_warps"), forward))
    options |= dict(zip(("bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_num_stages", "bwd_num_warps"), backward))
    # The backward's loop for dq has the sizes of the loop for dk and dv, exchanged.
    queries, keys, *_ = backward
    return options | {"bwd_BLOCK_M2": keys, "bwd_BLOCK_N2": queries}


def _forward_program(
    pair: PairFunctions, tile: int, scale: float, learned: tuple[str, ...], *inputs: Tensor
) -> tuple[Tensor, ...]:
    """Run flex_attention's forward, for a compilation, and return (out, lse).

    `_call_program` calls it as `_backward_program`, so it has the same arguments, with q, k and v as operands. No table
    is `learned` here, as the forward has no gradients.
    """
    (q, k, v), call = _split_inputs(pair, tile, scale, inputs, num_operands=3)
    return flex_forward(q, k, v, call)


def _backward_program(
    pair: PairFunctions, tile: int, scale: float, learned: tuple[str, ...], *inputs: Tensor
) -> tuple[Tensor, ...]:
    """Run flex_attention's backward, for a compilation.

    Args:
        pair: The functions of the score and of the mask.
        tile: Rows of a block of the tables.
        scale: Factor of the scores.
        learned: Names of the tables of the score that need a gradient.
        *inputs: q, k, v, the gradient of out, out and lse; the block tables; the captured tensors.

    Returns:
        dq, dk, dv, then the gradients of the learned tables.
    """
    (q, k, v, grad, out, lse), call = _split_inputs(pair, tile, scale, inputs, num_operands=6)
    return flex_backward(grad, q, k, v, out, lse, call, [pair.names.index(name) for name in learned])


def _split_inputs(
    pair: PairFunctions, tile: int, scale: float, inputs: tuple[Tensor, ...], num_operands: int
) -> tuple[tuple[Tensor, ...], FlexSetup]:
    """Split the inputs that `_call_program` joins into `num_operands` operands, and a call with all others.

    The others are the block tables and the captured tensors. The first operands are q, k and v.
    """
    q, _, v = inputs[:3]
    end = num_operands + len(BlockTables.__match_args__)  # `__match_args__`: the names of the fields, one per table
    tables, options = BlockTables(*inputs[num_operands:end]), _fit_options(max(q.shape[3], v.shape[3]), q.dtype)
    call = FlexSetup(pair.modify_score, pair.attends, tables, tile, scale, options, inputs[end:])
    return inputs[:num_operands], call


def _call_program(
    fn: Callable[..., Any], operands: list[Tensor], pairs: PairTexts, scale: float, learned: tuple[str, ...] = ()
) -> Sequence[Tensor]:
    """Run `_forward_program` or `_backward_program` as a compiled program.

    Args:
        fn: The program.
        operands: q, k, v, and in the backward grad, out and lse; the lengths are dim 2 of each.
        pairs: The mask and the score of the pairs of a query and a key, and the values that they read.
        scale: Factor of the scores.
        learned: Names of the tables of the score that need a gradient, in the backward.

    Returns:
        The results of the program, in the backward with the gradients of the learned tables at the end.
    """
    q, k, *_ = operands
    queries, keys = q.shape[2], k.shape[2]
    pair, captured = pair_functions(pairs, queries, keys, q.device)
    has_bool_mask = pair.mask_dims is not None and not pair.is_mask_additive
    # Tables of numbers (1, 1, rows) and of indices (1, 1, rows, columns) of tiles alternate. Rows and columns depend on
    # the lengths.
    block_tables = build_tables(pairs.plan, queries, keys, has_bool_mask, q.device)
    tile = tile_size(queries, keys)
    dims_of_tables = [(2,), (2, 3)] * (len(block_tables) // 2)
    dims_of_captured = [_length_dims(name, pair) for name in pair.names]
    length_dims = [(2,)] * len(operands) + dims_of_tables + dims_of_captured  # of each input
    variant = pair, tile, scale, learned  # the arguments of `fn` that are no tensors
    return _run_program(partial(fn, *variant), (fn, *variant), [*operands, *block_tables, *captured], length_dims)


def _length_dims(name: str, pair: PairFunctions) -> tuple[int, ...]:
    """Return the dims of a captured tensor that are numbers of queries or keys; calls may differ in these only.

    Args:
        name: "q" or "k", the positions of the queries or keys, with one dim; "row<i>" or "col<i>", a vector with one
            element per query or key, and possibly a batch dim before; "mask"; or another name: a number, or a vector or
            table of the score function, which has no such dim.
        pair: The functions that read the tensor; `mask_dims` are letters of "bhqk", one for each dim of the mask.
    """
    if name == "mask":
        assert pair.mask_dims is not None
        return tuple(i for i, dim in enumerate(pair.mask_dims) if dim in "qk")
    if name.startswith(("row", "col")):
        return (-1,)
    return (0,) if name in ("q", "k") else ()


def _run_program(
    fn: Callable[..., Any], variant: Hashable, xs: list[Tensor], length_dims: list[tuple[int, ...]]
) -> Sequence[Tensor]:
    """Return the results of the program for these tensors; compile it if there is none.

    The calls of a family differ in lengths only. Those with the lengths of its first call run a program with constant
    sizes and strides, all others a program with symbolic lengths.

    Args:
        fn: The function to compile.
        variant: Key that identifies the function.
        xs: Operands of the function.
        length_dims: Dims of each operand that are lengths.
    """
    length_dims = [tuple(dim % x.ndim for dim in dims) for x, dims in zip(xs, length_dims)]
    fixed_sizes = tuple(  # shapes with 0 in place of lengths
        tuple(0 if dim in dims else size for dim, size in enumerate(x.shape)) for x, dims in zip(xs, length_dims)
    )
    family = variant, fixed_sizes, tuple((x.dtype, x.device) for x in xs), COMPILER.value
    with _programs_lock:
        shapes = tuple(x.shape for x in xs)
        dynamic_dims = length_dims
        strides: Hashable = None
        if _first_shapes.setdefault(family, shapes) == shapes:  # the lengths of the first call: nothing is dynamic
            dynamic_dims = [()] * len(xs)
            strides = tuple(x.stride() for x in xs)
        else:  # with dynamic lengths, strides must follow from the lengths
            xs = [x.contiguous() for x in xs]
        programs = _programs.setdefault((family, strides), [])
        program = next((program for program in programs if program.can_run(xs)), None)
        if program is None:
            program = _compile_program(fn, xs, dynamic_dims)
            programs.append(program)
    return program(xs)


def _compile_program(fn: Callable[..., Any], xs: list[Tensor], dynamic_dims: list[tuple[int, ...]]) -> FlexProgram:
    """Compile a function of the tensors ``xs``; ``dynamic_dims`` are the dims of each whose sizes may differ later.

    A failure warns and marks flex_attention as unavailable, so that later calls compute scores densely.
    """
    global _failed
    try:
        return FlexProgram(fn, xs, dynamic_dims, COMPILER.value)
    except Exception as error:
        _failed = True
        warnings.warn(
            f"Attention scores are computed densely: flex_attention cannot be compiled here ({error})", stacklevel=2
        )
        raise CannotCompileError("SP432", f"flex_attention cannot be compiled here: {error}.") from error
