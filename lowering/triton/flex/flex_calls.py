"""Call the fused kernel, forward and backward, through programs compiled once per text and shape.

The first program of a family is compiled for the lengths of its first call. The second one is dynamic in all lengths:
sequences of varying length would otherwise compile at every step. Steps of a ring share a program.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.registry import Override
from sp_compile.lowering.torch_compat import FlexProgram, flex_backward, flex_forward

from .flex_tables import BlockTables, build_tables, tile_size
from .flex_texts import PairFunctions, PairTexts, pair_functions

# compiler of a graph of fake tensors, without a device, in place of Inductor: for tests
COMPILER: Override[Any] = Override()

_programs: dict[Hashable, list[FlexProgram]] = {}
_known_lengths: dict[Hashable, Hashable] = {}
_programs_lock = threading.Lock()
_failed = False

# Dims of operands and tables that are lengths.
_ROWS, _COUNTS, _INDICES = (2,), (2,), (2, 3)


class CannotCompileError(SpError):
    """Failure to compile the fused kernel. The process does not try again."""


def is_flex_available() -> bool:
    """Return True unless a compilation of the fused kernel has failed."""
    return not _failed


def flex_block_forward(q: Tensor, k: Tensor, v: Tensor, pairs: PairTexts, scale: float) -> tuple[Tensor, Tensor]:
    """Return attention of all rows of q over all allowed keys: out in q's dtype, and lse in float32.

    Shapes: q (B, Hq, Q, D), k (B, Hkv, K, D), v (B, Hkv, K, E), Hkv divides Hq -> (B, Hq, Q, E), (B, Hq, Q). Queries
    without keys have 0 and -inf.

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
    dq, dk, dv, *learned = _call_program(_backward_program, [q, k, v, grad, out, lse], pairs, scale, tuple(totals))
    for total, found in zip(totals.values(), learned, strict=True):
        total.add_(found)
    return dq, dk, dv


def _fit_options(head_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Return blocks, warps and stages with which the values of a text fit in registers.

    torch's defaults for plain scores spill. Seen on sm_90, compiled by Triton 3.7, with soft-caps, slopes and
    documents. In float32, which tensor cores do not support without TF32, two stages move rows from registers to shared
    memory.
    """
    wide = head_dim > 128
    if dtype == torch.float32:
        forward, back = (32, 16, 2) if wide else (32, 32, 1), (16, 16, 2)
    else:
        forward = (128, 64, 3) if head_dim <= 128 else (64, 32, 3)
        back = (64, 64, 2) if head_dim <= 64 else (32, 64, 2) if head_dim <= 128 else (32, 32, 1)
    found = {"fwd_BLOCK_M": forward[0], "fwd_BLOCK_N": forward[1], "fwd_num_stages": forward[2]}
    found |= {"bwd_BLOCK_M1": back[0], "bwd_BLOCK_N1": back[1], "bwd_BLOCK_M2": back[1], "bwd_BLOCK_N2": back[0]}
    warps = (8, 4) if dtype == torch.float32 else (4 if wide else 8, 8)
    return found | {"fwd_num_warps": warps[0], "bwd_num_warps": warps[1], "bwd_num_stages": back[2]}


def _forward_program(
    pair: PairFunctions, tile: int, scale: float, learned: tuple[str, ...], *xs: Tensor
) -> tuple[Tensor, ...]:
    found, reads = BlockTables(*xs[3:11]), xs[11:]
    q, k, v = xs[:3]
    fitting = _fit_options(max(q.shape[3], v.shape[3]), q.dtype)
    return flex_forward(q, k, v, pair.modify_score, pair.attends, found, tile, scale, fitting, reads)


def _backward_program(
    pair: PairFunctions, tile: int, scale: float, learned: tuple[str, ...], *xs: Tensor
) -> tuple[Tensor, ...]:
    (q, k, v, grad, out, lse), found, reads = xs[:6], BlockTables(*xs[6:14]), xs[14:]
    fitting = _fit_options(max(q.shape[3], v.shape[3]), q.dtype)
    places = [pair.names.index(name) for name in learned]
    args = pair.modify_score, pair.attends, found, tile, scale, fitting, reads, places
    return flex_backward(grad, q, k, v, out, lse, *args)


def _call_program(
    fn: Callable[..., Any], operands: list[Tensor], pairs: PairTexts, scale: float, learned: tuple[str, ...] = ()
) -> Sequence[Tensor]:
    q, k, *_ = operands
    queries, keys = q.shape[2], k.shape[2]
    pair, reads = pair_functions(pairs, queries, keys, q.device)
    check_data = pair.data is not None and not pair.data[1]
    found, tile = build_tables(pairs.plan, queries, keys, check_data, q.device), tile_size(queries, keys)
    lengths = [_ROWS] * len(operands) + [_COUNTS, _INDICES] * 4 + [_length_dims(name, pair) for name in pair.names]
    of = pair, tile, scale, learned
    return _get_program(partial(fn, *of), (fn, *of), [*operands, *found, *reads], lengths)


def _length_dims(name: str, pair: PairFunctions) -> tuple[int, ...]:
    """Return the length dims of a tensor that a text reads."""
    if name == "data":
        assert pair.data is not None
        return tuple(i for i, axis in enumerate(pair.data[0]) if axis in "qk")
    if name.startswith(("row", "col")):
        return (-1,)
    return (0,) if name in ("q", "k") else ()


def _get_program(
    fn: Callable[..., Any], of: Hashable, xs: list[Tensor], lengths: list[tuple[int, ...]]
) -> Sequence[Tensor]:
    """Run the program for these tensors; compile it if there is none."""
    lengths = [tuple(dim % x.ndim for dim in dims) for x, dims in zip(xs, lengths)]
    fixed = tuple(tuple(0 if dim in dims else n for dim, n in enumerate(x.shape)) for x, dims in zip(xs, lengths))
    family = of, fixed, tuple((x.dtype, x.device) for x in xs), COMPILER.value
    with _programs_lock:
        shapes = tuple(x.shape for x in xs)
        strides: Hashable = None
        if _known_lengths.setdefault(family, shapes) == shapes:
            lengths, strides = [()] * len(xs), tuple(x.stride() for x in xs)
        else:  # for dynamic lengths, strides must follow from the lengths
            xs = [x.contiguous() for x in xs]
        known = _programs.setdefault((family, strides), [])
        program = next((one for one in known if one.fits(xs)), None)
        if program is None:
            program = _compile_program(fn, xs, lengths)
            known.append(program)
    return program(xs)


def _compile_program(fn: Callable[..., Any], xs: list[Tensor], lengths: list[tuple[int, ...]]) -> FlexProgram:
    global _failed
    try:
        return FlexProgram(fn, xs, lengths, COMPILER.value)
    except Exception as error:
        _failed = True
        warnings.warn(
            f"attention scores are computed densely: flex_attention cannot be compiled here ({error})", stacklevel=2
        )
        raise CannotCompileError("SP432", f"flex_attention cannot be compiled here: {error}.") from error
