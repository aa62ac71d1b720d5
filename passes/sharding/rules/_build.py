"""Small builders that the rule files share: factor names for dims, and rules from a text and a call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.sizes import Size
from sp_compile.passes.sharding.rule import BoundRule, Dims, RuleFunction, RulePattern


def bind_rule(call: OpCall, text: str, **options: Any) -> BoundRule | None:
    """The rule text at this call, for functions that choose the text by the arguments."""
    return RulePattern.parse(text, **options).bind(call)


def factor_names(ndim: int, prefix: str = "d") -> Dims:
    """One factor name per dim."""
    return tuple(f"{prefix}{i}" for i in range(ndim))


def wrap_dim(dim: Any, ndim: int) -> int:
    """A non-negative dim."""
    return int(dim) % max(ndim, 1)


def normalize_dims(value: Any, ndim: int) -> tuple[int, ...]:
    """A dim argument of a reduction as non-negative dims: None and [] are all of them."""
    if value is None or (isinstance(value, Sequence) and not value):
        return tuple(range(ndim))
    return tuple(wrap_dim(d, ndim) for d in (value if isinstance(value, Sequence) else [value]))


def replace_dims(dims: Dims, at: Iterable[int], by: str) -> Dims:
    """The dims with those at `at` renamed to `by` plus their position; "" makes them nameless."""
    at = set(at)
    return tuple((f"{by}{i}" if by else "") if i in at else f for i, f in enumerate(dims))


def align_names(shape: Sequence[Size], full: Sequence[Size], dims: Dims) -> Dims:
    """The names of `shape`'s dims, aligned right to the dims (of sizes `full`) that it broadcasts to."""
    skip = len(full) - len(shape)
    return tuple("" if s == 1 and f != 1 else name for s, f, name in zip(shape, full[skip:], dims[skip:], strict=True))


def along_dims(
    call: OpCall, at: Iterable[int], result: Dims | None = None, kind: str = "whole", lazy: bool = False
) -> BoundRule:
    """Dims of the only operand are of a kind; the results have the operand's dims unless given."""
    dims = factor_names(call.ndim())
    results = tuple(dims if result is None else result for _ in call.results())
    return BoundRule((dims,), results, {dims[d]: kind for d in at if dims}, lazy=lazy)


def gathered_dims(call: OpCall) -> BoundRule:
    """The result has the operand's shape; the dims that the argument `dim` names are needed whole."""
    return along_dims(call, normalize_dims(call["dim"], call.ndim()))


def resize_dims(argument: str = "", ndim: int = 0) -> RuleFunction:
    """The result's dim named by the argument (or its last `ndim`) is computed from the whole of the operand's."""

    def instantiate(call: OpCall) -> BoundRule | None:
        rank = call.ndim()
        if any(len(s) != rank for s in call.result_shapes()):
            return None
        at = normalize_dims(call[argument], rank) if argument else range(rank - ndim, rank)
        return along_dims(call, at, replace_dims(factor_names(rank), at, "new"))

    return instantiate
