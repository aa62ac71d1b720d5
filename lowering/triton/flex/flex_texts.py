"""Convert mask texts and score functions to functions of one (query, key) pair, for flex_attention.

    predicate "(k <= q) & Eq(row0, col0)"   ->   mask_mod(b, h, m, n), which captures tensors q, k, row0 and col0

A mask text is a predicate of the positions q and k in the sequence, and of vectors with one element per query (row<i>)
or key (col<i>). A score function modifies the score of a pair. Captured tensors are the inputs of a kernel besides
queries, keys and values. A row of padding has position -1.

A kernel contains nothing that depends on a rank, a step of a ring or a batch. Row positions, documents, sizes and
slopes are inputs, so that one kernel serves all of them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import sympy
import torch
from sympy.core.relational import Relational
from torch import Tensor
from torch.fx import Node

from sp_compile.lowering.masks import predicate as language
from sp_compile.lowering.masks import score as scores
from sp_compile.lowering.masks.blocks import BlockPlan
from sp_compile.lowering.masks.predicate import is_query_symbol
from sp_compile.lowering.masks.spans import Rows
from sp_compile.lowering.torch_compat import flex_lookup, pytree

aten = torch.ops.aten
SMALL_INDEX = 1 << 24  # bound below which sums of a few indices and sizes are 32-bit integers
_LARGE_OPS = (aten.pow, aten.square, aten.addcmul, aten.bitwise_left_shift, aten.__lshift__)
_MASK_DIMS = "bhqk"  # dims of a mask: batch, head, query, key


class PairTexts(NamedTuple):
    """Mask text, score function, and the values that they read, for the queries and keys of a call."""

    plan: BlockPlan  # blocks of the pairs that attend
    q_rows: Rows  # positions of the local queries
    k_rows: Rows  # positions of the local keys
    predicate: str  # text of the mask
    score: str  # name of the score function
    vectors: dict[str, Tensor]  # row<i> and col<i>, which texts read; unsharded: (B | 1, S), int or bool
    sizes: dict[str, int]  # n<i>, which texts read
    heads: list[Tensor]  # vectors of the score, (H,)
    tables: list[Tensor]  # lookup tables of the score
    mask: Tensor | None  # bool or additive: (B | 1, H | 1, Q | 1, all keys | 1)


@dataclass(frozen=True)
class PairFunctions:
    """mask_mod (`attends`) and score_mod (`modify_score`) of flex_attention for texts.

    Equal instances have equal kernels: the values are not fields but arguments.
    Arguments of both: indices of batch entry b, head h, local query row m and local key row n, and captured tensors.
    """

    predicate: str  # text of the mask
    score: str  # name of the score function
    names: tuple[str, ...]  # names of the captured tensors, in order
    mask_dims: str | None  # dims of the mask that are not 1, of "bhqk"; None without a mask
    is_mask_additive: bool  # whether the mask is added to scores

    def attends(self, b: Tensor, h: Tensor, m: Tensor, n: Tensor, *captured: Tensor) -> Tensor:
        """Return a bool () that is True if query row m attends to key row n and neither is padding."""
        inputs = dict(zip(self.names, captured, strict=True))
        q, k = _element_at(inputs["q"], m), _element_at(inputs["k"], n)
        allowed = (q >= 0) & (k >= 0)
        if self.predicate:
            names = language.predicate_symbols(self.predicate)
            values = {name: _predicate_value(name, inputs, b, q, k) for name in names}
            allowed = allowed & language.evaluate_mask(self.predicate, values)
        if self.mask_dims is not None and not self.is_mask_additive:
            allowed = allowed & self._read_mask(inputs, b, h, m, k)
        return allowed

    def modify_score(self, s: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor, *captured: Tensor) -> Tensor:
        """Return the scaled score s after the score function and the additive mask, in float32 or float64."""
        inputs = dict(zip(self.names, captured, strict=True))
        s = s if s.dtype == torch.float64 else s.to(torch.float32)
        if self.score:
            # Padding has position -1 and looks up the first element. Its result is not used.
            q, k = _element_at(inputs["q"], m).clamp(min=0), _element_at(inputs["k"], n).clamp(min=0)
            values = {name: _score_value(name, inputs, b, h, q, k) for name in scores.score_symbols(self.score)}
            s = scores.evaluate_score(self.score, s, values, _REPLACEMENTS)
        if self.is_mask_additive:
            s = s + self._read_mask(inputs, b, h, m, _element_at(inputs["k"], n)).to(s.dtype)
        return s

    def _read_mask(self, inputs: dict[str, Tensor], b: Tensor, h: Tensor, m: Tensor, k: Tensor) -> Tensor:
        """Return the element of the mask for local query row m and the key at position k: a mask has all keys."""
        assert self.mask_dims is not None
        index_of = dict(zip(_MASK_DIMS, (b, h, m, k)))
        return _element_at(inputs["mask"], *(index_of[dim] for dim in self.mask_dims))


@lru_cache(maxsize=1024)
def max_magnitude(text: str, largest: int) -> int:
    """Return an upper bound of the magnitude of every value that is computed when a predicate is evaluated.

    For "k - q < 4" and positions up to 100, it is 204, the sum of 100, 100 and 4.

    Args:
        text: The predicate.
        largest: The greatest magnitude of its symbols.
    """

    def bound(expr: Any) -> int:
        """Return a bound of the values of an expression and of its operands; conditions are 0 or 1."""
        if expr.is_Symbol:
            return largest
        if expr.is_Rational:
            return max(abs(expr.p), expr.q)  # numerator and denominator
        operands = [bound(x) for x in expr.args]
        if isinstance(expr, sympy.Mul):
            return math.prod(max(x, 1) for x in operands)
        if isinstance(expr, Relational):  # both sides are multiplied by the denominators of their terms
            terms = sympy.Add.make_args(sympy.expand(expr.lhs - expr.rhs))
            factors = [factor for factor, _ in (term.as_coeff_Mul() for term in terms)]
            common_denominator = int(sympy.ilcm(1, *(factor.q for factor in factors)))
            return sum(operands) * common_denominator
        if isinstance(expr, sympy.Add):
            return sum(operands)
        return max(operands, default=1)  # others, such as a remainder, are no larger than an operand

    return bound(language.parse_predicate(text))


@lru_cache(maxsize=1024)
def max_score_magnitude(name: str, largest: int, floats: frozenset[str]) -> int:
    """Return an upper bound of the magnitude of every integer that a score function computes.

    For s + head0 * (k - q)**2 and positions up to 100, it is 40,000, the square of 200.

    Args:
        name: The score function.
        largest: The greatest magnitude of its integer inputs.
        floats: Names of its floating-point inputs, without the score.
    """
    bounds: dict[Node, int] = {}  # of integers
    for node in scores.SCORES[name].graph.graph.nodes:
        if node.op == "placeholder" and node.target not in {"s", *floats}:
            bounds[node] = largest
        bound = _bound_integers(node, bounds) if node.op == "call_function" else None
        if bound is not None:
            bounds[node] = bound
    return max(bounds.values(), default=0)


def _bound_integers(node: Node, bounds: dict[Node, int]) -> int | None:
    """Return a bound of the magnitude of a call's integers, given those of its operands; None if they are floats."""
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    is_float = any(isinstance(x, float) or (isinstance(x, torch.dtype) and x.is_floating_point) for x in leaves)
    if is_float:
        return None
    if not bounds.keys() >= set(node.all_input_nodes):  # floats, which a cast to integers does not bound
        return 1 << 63 if any(isinstance(x, torch.dtype) and x is not torch.bool for x in leaves) else None
    numbers = [bounds[x] if isinstance(x, Node) else abs(x) for x in leaves if isinstance(x, Node | int)]
    op = getattr(node.target, "overloadpacket", node.target)
    if op is aten.mul:
        return math.prod(max(x, 1) for x in numbers)
    if op is aten.pow and isinstance(node.args[1], int):
        return numbers[0] ** min(numbers[1], 64)
    largest_factor = max(1, abs(node.kwargs.get("alpha", 1)))  # of a sum
    return 1 << 63 if op in _LARGE_OPS else largest_factor * sum(numbers)  # of others, as a remainder, it is loose


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
    # Row positions and sizes are int32 if all of them, and the values that are computed from them, are small. Vectors
    # may have any values: a predicate reads them as int64.
    ends = [segment.first + segment.length for segment in (*pairs.q_rows, *pairs.k_rows)]
    largest = max([*map(abs, pairs.sizes.values()), *ends], default=0)
    is_small = largest < SMALL_INDEX and max_magnitude(pairs.predicate, largest) < 2**31
    dtype = torch.int32 if is_small and _has_small_score(pairs, largest) else torch.int64
    captured = {
        "q": _row_positions(pairs.q_rows, queries, dtype, device),
        "k": _row_positions(pairs.k_rows, keys, dtype, device),
    }
    # Vectors and sizes that the texts read. A score function also reads b, heads and tables, which are no vectors.
    symbols = language.predicate_symbols(pairs.predicate) | (scores.score_symbols(pairs.score) & pairs.vectors.keys())
    for name in sorted(symbols - {"q", "k"}):
        if name in pairs.sizes:
            captured[name] = _device_number(pairs.sizes[name], dtype, device)
        else:
            vector = pairs.vectors[name]
            captured[name] = vector[0] if vector.shape[0] == 1 else vector
    if pairs.score:
        captured |= {f"head{i}": x for i, x in enumerate(pairs.heads)}
        captured |= {f"table{i}": x for i, x in enumerate(pairs.tables)}
    # The mask, without dims of size 1.
    mask, mask_dims = pairs.mask, None
    if mask is not None:
        captured["mask"] = mask.squeeze()
        mask_dims = "".join(dim for dim, size in zip(_MASK_DIMS, mask.shape) if size != 1)
    is_additive = mask is not None and mask.dtype != torch.bool
    functions = PairFunctions(pairs.predicate, pairs.score, tuple(captured), mask_dims, is_additive)
    return functions, list(captured.values())


def _has_small_score(pairs: PairTexts, largest: int) -> bool:
    """Return True if the score function has equal results for int32 positions and int64 ones, up to `largest`."""
    if not pairs.score:
        return True
    inputs = pairs.vectors | {f"head{i}": x for i, x in enumerate(pairs.heads)}
    inputs |= {f"table{i}": x for i, x in enumerate(pairs.tables)}
    read = [inputs[name] for name in scores.score_symbols(pairs.score) & inputs.keys()]
    # An int32 number, of any magnitude, and an int64 position give an int64 result.
    if any(not (x.is_floating_point() or x.dtype in (torch.bool, torch.int64)) for x in read):
        return False
    floats = frozenset(name for name, x in inputs.items() if x.is_floating_point())
    return max_score_magnitude(pairs.score, largest, floats) < 2**31


def _predicate_value(name: str, inputs: dict[str, Tensor], b: Tensor, q: Tensor, k: Tensor) -> Any:
    """Return the value of a symbol of a predicate, as `_pair_value`, with integer vectors as int64.

    A sum of elements of narrower integers, or of one and an int32 position, may overflow.
    """
    value = _pair_value(name, inputs, b, q, k)
    is_vector = name.startswith(("row", "col")) and inputs[name].dtype != torch.bool
    return value.to(torch.int64) if is_vector else value


def _pair_value(name: str, inputs: dict[str, Tensor], b: Tensor, q: Tensor, k: Tensor) -> Any:
    """Return the value of a symbol for the pair of positions q and k in batch entry b.

    "q" and "k" are the positions, "n<i>" a size, "row<i>" and "col<i>" the element of a vector at the query or the key.
    """
    if name in ("q", "k"):
        return q if name == "q" else k
    vector = inputs[name]
    if vector.ndim == 0:  # a size
        return vector
    index = q if is_query_symbol(name) else k
    value = _element_at(vector, index) if vector.ndim == 1 else _element_at(vector, b, index)
    return value.to(torch.int32) if value.dtype == torch.bool else value


def _score_value(name: str, inputs: dict[str, Tensor], b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Any:
    """Return the value of an input of a score function for one pair; a table is returned as a whole tensor.

    "head<i>" is the element of a vector for the head h, "b" the batch entry; the others are those of `_pair_value`.
    """
    if name.startswith("head"):
        return _element_at(inputs[name], h)
    if name.startswith("table"):
        return inputs[name]
    return b if name == "b" else _pair_value(name, inputs, b, q, k)


def _fast_tanh(x: Tensor) -> Tensor:
    """Return tanh(x), less accurate near 0 than libdevice's, which needs more registers than the rest of a kernel."""
    return 2 * torch.sigmoid(2 * x) - 1


# Operators of score functions that flex_attention's kernels evaluate in another way.
_REPLACEMENTS: dict[Any, Callable[..., Any]] = {aten.tanh.default: _fast_tanh, aten.index.Tensor: flex_lookup}


def _element_at(x: Tensor, *indices: Tensor) -> Tensor:
    """Return one element at traced indices, or x itself without indices.

    The index -1, of padding, selects the last element.
    """
    return aten.index(x, list(indices)) if indices else x


@lru_cache(maxsize=64)
def _row_positions(rows: Rows, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the position in the sequence of each local row, (length,), -1 for padding.

    An entry of `rows` is a run of positions: the first one, the index of its local row, and their number.
    """
    positions = torch.full((length,), -1, dtype=dtype, device=device)
    for first, offset, count in rows:
        positions[offset : offset + count] = torch.arange(first, first + count, dtype=dtype, device=device)
    return positions


@lru_cache(maxsize=256)
def _device_number(value: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a scalar tensor () on the device, without synchronization; cached for later calls."""
    return torch.full((), value, dtype=dtype, device=device)
