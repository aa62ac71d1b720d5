"""What a fused kernel asks of a pair: texts about pairs and scores, and all that they read, as captured tensors.

Nothing of a rank, a step of a ring or a batch is in a kernel: where rows stand, documents, sizes and slopes are what it
reads, so that one kernel serves all of them.
"""

from __future__ import annotations

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

SMALL_INDEX = 1 << 24
"""Below it, sums of a few indices and sizes are 32-bit integers."""
_AXES = "bhqk"


class PairTexts(NamedTuple):
    """What is said of all queries and keys of a call.

    plan: blocks of the pairs that attend. vectors: row<i> and col<i>, whole: int or bool (B | 1, S). sizes: n<i>.
    heads: vectors of the score, (H,). tables: what it looks up. data: None, or a mask, bool or additive (B | 1, H | 1,
    Q | 1, whole keys | 1).
    """

    plan: BlockPlan
    q_rows: Rows
    k_rows: Rows
    predicate: str
    score: str
    vectors: dict[str, Tensor]
    sizes: dict[str, int]
    heads: list[Tensor]
    tables: list[Tensor]
    data: Tensor | None


@dataclass(frozen=True)
class PairFunctions:
    """The texts as functions of one pair, which flex_attention captures. names: of what they read, in order.

    data: which dims of the data are not 1 ("bhqk"), and whether it is added; None without data.
    """

    predicate: str
    score: str
    names: tuple[str, ...]
    data: tuple[str, bool] | None

    def attends(self, b: Tensor, h: Tensor, m: Tensor, n: Tensor, *reads: Tensor) -> Tensor:
        """bool (): does the query in row m attend to the key in row n? Not if one of them is padding."""
        given = self._captured_value(reads)
        q, k = _element_at(given["q"], m), _element_at(given["k"], n)
        found = (q >= 0) & (k >= 0)
        if self.predicate:
            named = language.predicate_symbols(self.predicate)
            answer = language.evaluate_mask(
                self.predicate, {name: _predicate_symbol(name, given, b, q, k) for name in named}
            )
            found = found & answer
        if self.data and not self.data[1]:
            found = found & self._read_data(given, b, h, m, k)
        return found

    def modify_score(self, s: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor, *reads: Tensor) -> Tensor:
        """What becomes of a scaled score, in float32, or float64 for that."""
        given = self._captured_value(reads)
        s = s if s.dtype == torch.float64 else s.to(torch.float32)
        if self.score:
            # Padding, whose place is -1, is looked up as what is first: what comes of it is not read.
            q, k = _element_at(given["q"], m).clamp(min=0), _element_at(given["k"], n).clamp(min=0)
            values = {name: self._read_symbol(name, given, b, h, q, k) for name in scores.score_symbols(self.score)}
            s = scores.evaluate_score(self.score, s, values, {"tanh": _fast_tanh}, flex_lookup)
        if self.data and self.data[1]:
            s = s + self._read_data(given, b, h, m, _element_at(given["k"], n)).to(s.dtype)
        return s

    def _read_symbol(self, name: str, given: dict[str, Tensor], b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """A symbol of the score for one pair; a table as a whole."""
        if name.startswith("head"):
            return _element_at(given[name], h)
        if name.startswith("table"):
            return given[name]
        return b if name == "b" else _predicate_symbol(name, given, b, q, k)

    def _captured_value(self, reads: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return dict(zip(self.names, reads, strict=True))

    def _read_data(self, given: dict[str, Tensor], b: Tensor, h: Tensor, m: Tensor, k: Tensor) -> Tensor:
        assert self.data is not None
        place = dict(zip(_AXES, (b, h, m, k)))
        return _element_at(given["data"], *(place[axis] for axis in self.data[0]))


def pair_functions(
    pairs: PairTexts, queries: int, keys: int, device: torch.device
) -> tuple[PairFunctions, list[Tensor]]:
    """The functions, and what they read. queries, keys: rows of the local tensors."""
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


def _predicate_symbol(name: str, given: dict[str, Tensor], b: Tensor, q: Tensor, k: Tensor) -> Any:
    """A symbol of a predicate for one pair."""
    if name in ("q", "k"):
        return q if name == "q" else k
    vector = given[name]
    if vector.ndim == 0:
        return vector
    where = q if is_query_symbol(name) else k
    value = _element_at(vector, where) if vector.ndim == 1 else _element_at(vector, b, where)
    return value.to(torch.int32) if value.dtype == torch.bool else value


def _fast_tanh(x: Tensor) -> Tensor:
    """As good as a sum with 1 is; the library's function would take most registers of a kernel."""
    return 2 * torch.sigmoid(2 * x) - 1


def _element_at(x: Tensor, *places: Tensor) -> Tensor:
    """One element, of a place that no tracer asks for its value. A place of -1, padding, is the last one."""
    return torch.ops.aten.index(x, list(places)) if places else x


@lru_cache(maxsize=64)
def _row_positions(rows: Rows, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The index of each local row, -1 of padding: (length,)."""
    places = torch.full((length,), -1, dtype=dtype, device=device)
    for first, offset, count in rows:
        places[offset : offset + count] = torch.arange(first, first + count, dtype=dtype, device=device)
    return places


@lru_cache(maxsize=256)
def _device_number(value: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """() on the device, which the host does not wait for."""
    return torch.full((), value, dtype=dtype, device=device)
