"""Builders for rule files: factor names for dims, and rules from a text and a call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.sizes import Size
from sp_compile.passes.sharding.rule import BoundRule, Dims, RuleFunction, RulePattern


def bind_rule(call: OpCall, text: str, **options: Any) -> BoundRule | None:
    """Bind a rule text to a call, for functions that select the text by the arguments."""
    return RulePattern.parse(text, **options).bind(call)


def factor_names(ndim: int, prefix: str = "d") -> Dims:
    """Return one factor name per dim."""
    return tuple(f"{prefix}{i}" for i in range(ndim))


def wrap_dim(dim: Any, ndim: int) -> int:
    """Return a non-negative dim."""
    return int(dim) % max(ndim, 1)


def normalize_dims(value: Any, ndim: int) -> tuple[int, ...]:
    """Return a dim argument of a reduction as non-negative dims; None and [] select all dims."""
    if value is None or (isinstance(value, Sequence) and not value):
        return tuple(range(ndim))
    return tuple(wrap_dim(d, ndim) for d in (value if isinstance(value, Sequence) else [value]))


def replace_dims(dims: Dims, at: Iterable[int], by: str) -> Dims:
    """Rename the dims in `at` to `by` plus their position; "" removes their names."""
    at = set(at)
    return tuple((f"{by}{i}" if by else "") if i in at else f for i, f in enumerate(dims))


def align_names(shape: Sequence[Size], full: Sequence[Size], dims: Dims) -> Dims:
    """Return the names of the dims of `shape`, right-aligned to the dims (of sizes `full`) it broadcasts to."""
    skip = len(full) - len(shape)
    return tuple("" if s == 1 and f != 1 else name for s, f, name in zip(shape, full[skip:], dims[skip:], strict=True))


def along_dims(
    call: OpCall, at: Iterable[int], result: Dims | None = None, kind: str = "whole", lazy: bool = False
) -> BoundRule:
    """Return a rule that assigns a kind to dims of the only operand.

    Args:
        call: Call of the op.
        at: Dims with this kind.
        result: Dims of each result; those of the operand by default.
        kind: Kind of the dims.
        lazy: The op only moves data.
    """
    dims = factor_names(call.ndim())
    results = tuple(dims if result is None else result for _ in call.results())
    return BoundRule((dims,), results, {dims[d]: kind for d in at if dims}, lazy=lazy)


def gathered_dims(call: OpCall) -> BoundRule:
    """Return a rule with a result of the operand's shape that gathers the dims of the argument `dim`."""
    return along_dims(call, normalize_dims(call["dim"], call.ndim()))


def resize_dims(argument: str = "", ndim: int = 0) -> RuleFunction:
    """Return a rule function that gathers the resized dims: those of the argument, or the last `ndim`."""

    def instantiate(call: OpCall) -> BoundRule | None:
        """Return the rule of a call that changes the size of these dims, or None if it changes their number."""
        rank = call.ndim()
        if any(len(s) != rank for s in call.result_shapes()):
            return None
        at = normalize_dims(call[argument], rank) if argument else range(rank - ndim, rank)
        return along_dims(call, at, replace_dims(factor_names(rank), at, "new"))

    return instantiate
