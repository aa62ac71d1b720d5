"""Convert mask texts and score functions to functions of a pair, with all inputs as captured tensors.

A kernel contains nothing that depends on a rank, a step of a ring or a batch. Row positions, documents, sizes and
slopes are inputs, so that one kernel serves all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sp_compile.lowering.masks import predicate as language
from sp_compile.lowering.masks import score as scores
from sp_compile.lowering.masks.blocks import BlockPlan
from sp_compile.lowering.masks.predicate import is_query_symbol
from sp_compile.lowering.masks.spans import Rows
from sp_compile.lowering.torch_compat import flex_lookup

aten = torch.ops.aten
SMALL_INDEX = 1 << 24  # bound below which sums of a few indices and sizes are 32-bit integers
_AXES = "bhqk"


class PairTexts(NamedTuple):
    """Texts and tables for all queries and keys of a call."""

    plan: BlockPlan  # blocks of the pairs that attend
    q_rows: Rows  # positions of the local queries
    k_rows: Rows  # positions of the local keys
    predicate: str  # text of the mask
    score: str  # name of the score function
    vectors: dict[str, Tensor]  # row<i> and col<i>, unsharded: (B | 1, S), int or bool
    sizes: dict[str, int]  # n<i>
    heads: list[Tensor]  # vectors of the score, (H,)
    tables: list[Tensor]  # lookup tables of the score
    data: Tensor | None  # mask, bool or additive: (B | 1, H | 1, Q | 1, all keys | 1)


@dataclass(frozen=True)
class PairFunctions:
    """Texts as functions of one pair, which flex_attention captures."""

    predicate: str  # text of the mask
    score: str  # name of the score function
    names: tuple[str, ...]  # names of the captured tensors, in order
    data: tuple[str, bool] | None  # dims of the data that are not 1 ("bhqk"), and whether it is additive

    def attends(self, b: Tensor, h: Tensor, m: Tensor, n: Tensor, *reads: Tensor) -> Tensor:
        """Return a bool () that is True if query row m attends to key row n and neither is padding."""
        symbols = self._captured_value(reads)
        q, k = _element_at(symbols["q"], m), _element_at(symbols["k"], n)
        found = (q >= 0) & (k >= 0)
        if self.predicate:
            named = language.predicate_symbols(self.predicate)
            answer = language.evaluate_mask(
                self.predicate, {name: _predicate_symbol(name, symbols, b, q, k) for name in named}
            )
            found = found & answer
        if self.data and not self.data[1]:
            found = found & self._read_data(symbols, b, h, m, k)
        return found

    def modify_score(self, s: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor, *reads: Tensor) -> Tensor:
        """Return the modified scaled score, in float32, or in float64 for a float64 score."""
        symbols = self._captured_value(reads)
        s = s if s.dtype == torch.float64 else s.to(torch.float32)
        if self.score:
            # Padding has position -1 and looks up the first element. Its result is not used.
            q, k = _element_at(symbols["q"], m).clamp(min=0), _element_at(symbols["k"], n).clamp(min=0)
            values = {name: self._read_symbol(name, symbols, b, h, q, k) for name in scores.score_symbols(self.score)}
            s = scores.evaluate_score(self.score, s, values, _REPLACEMENTS)
        if self.data and self.data[1]:
            s = s + self._read_data(symbols, b, h, m, _element_at(symbols["k"], n)).to(s.dtype)
        return s

    def _read_symbol(self, name: str, symbols: dict[str, Tensor], b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Return the value of a score function's input for one pair, or a table as one tensor."""
        if name.startswith("head"):
            return _element_at(symbols[name], h)
        if name.startswith("table"):
            return symbols[name]
        return b if name == "b" else _predicate_symbol(name, symbols, b, q, k)

    def _captured_value(self, reads: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return dict(zip(self.names, reads, strict=True))

    def _read_data(self, symbols: dict[str, Tensor], b: Tensor, h: Tensor, m: Tensor, k: Tensor) -> Tensor:
        assert self.data is not None
        place = dict(zip(_AXES, (b, h, m, k)))
        return _element_at(symbols["data"], *(place[axis] for axis in self.data[0]))


def pair_functions(
    pairs: PairTexts, queries: int, keys: int, device: torch.device
) -> tuple[PairFunctions, list[Tensor]]:
    """Return the functions of the texts, and the tensors that they capture.

    Args:
        pairs: Texts and tables.
        queries: Rows of the local queries.
        keys: Rows of the local keys.
        device: Device of the captured tensors.
    """
    numbers = [abs(size) for size in pairs.sizes.values()]
    ends = [segment.first + segment.length for rows in (pairs.q_rows, pairs.k_rows) for segment in rows]
    dtype = torch.int32 if max([*numbers, *ends], default=0) < SMALL_INDEX else torch.int64
    reads = {
        "q": _row_positions(pairs.q_rows, queries, dtype, device),
        "k": _row_positions(pairs.k_rows, keys, dtype, device),
    }
    of_texts = language.predicate_symbols(pairs.predicate) | (scores.score_symbols(pairs.score) & pairs.vectors.keys())
    for name in sorted(of_texts - {"q", "k"}):
        if name in pairs.sizes:
            reads[name] = _device_number(pairs.sizes[name], dtype, device)
        else:
            vector = pairs.vectors[name]
            reads[name] = vector[0] if vector.shape[0] == 1 else vector
    if pairs.score:
        reads |= {f"head{i}": x for i, x in enumerate(pairs.heads)}
        reads |= {f"table{i}": x for i, x in enumerate(pairs.tables)}
    data = None
    if pairs.data is not None:
        dims = [dim for dim, extent in enumerate(pairs.data.shape) if extent > 1]
        reads["data"] = pairs.data.reshape([pairs.data.shape[dim] for dim in dims])
        data = "".join(_AXES[dim] for dim in dims), pairs.data.dtype != torch.bool
    return PairFunctions(pairs.predicate, pairs.score, tuple(reads), data), list(reads.values())


def _predicate_symbol(name: str, symbols: dict[str, Tensor], b: Tensor, q: Tensor, k: Tensor) -> Any:
    """Return the value of a predicate symbol for one pair."""
    if name in ("q", "k"):
        return q if name == "q" else k
    vector = symbols[name]
    if vector.ndim == 0:
        return vector
    where = q if is_query_symbol(name) else k
    value = _element_at(vector, where) if vector.ndim == 1 else _element_at(vector, b, where)
    return value.to(torch.int32) if value.dtype == torch.bool else value


def _fast_tanh(x: Tensor) -> Tensor:
    """Return tanh with an absolute error that suffices in sums with 1; libdevice's uses most registers."""
    return 2 * torch.sigmoid(2 * x) - 1


_REPLACEMENTS: dict[Any, Callable[..., Any]] = {aten.tanh.default: _fast_tanh, aten.index.Tensor: flex_lookup}


def _element_at(x: Tensor, *places: Tensor) -> Tensor:
    """Return one element at traced indices. Index -1, of padding, selects the last element."""
    return aten.index(x, list(places)) if places else x


@lru_cache(maxsize=64)
def _row_positions(rows: Rows, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the position of each local row, (length,), -1 for padding."""
    places = torch.full((length,), -1, dtype=dtype, device=device)
    for first, offset, count in rows:
        places[offset : offset + count] = torch.arange(first, first + count, dtype=dtype, device=device)
    return places


@lru_cache(maxsize=256)
def _device_number(value: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a scalar tensor () on the device, without synchronization."""
    return torch.full((), value, dtype=dtype, device=device)
