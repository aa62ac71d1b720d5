"""Parse rule texts in the notation of einops.

    RulePattern.parse("b s d -> (b s) d").bind(call)

A dim that is a product of several factors is a group in parentheses; "1" is a dim of size 1, "..." any number of dims.
Kinds and options may follow the dims, as in the `str` of a rule: "n i, i m -> n m; sum=i".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

from sp_compile.lowering.base.errors import SpError
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.sizes import Size, exact_quotient, is_same_size, size_product

from .factors import FACTOR_KINDS, BoundRule, Dims, dim_factors, flatten_dims, group_factors

RULE_OPTIONS = ("sizes", "lazy", "starts_sequence", "pad", "masks", "reshapes", "lenders")
MAX_BOUND_SHAPES = 1024  # cached bindings of one rule
_FACTOR = re.compile(r"~\d+|[^\W\d]\w*")  # ~1 is a dim of "..."


@dataclass(frozen=True)
class RulePattern:
    """Parsed rule text that is not bound to a call."""

    operands: tuple[Dims, ...]  # dims of each operand
    results: tuple[Dims, ...]  # dims of each result
    kinds: Mapping[str, str]  # kinds by factor
    options: Mapping[str, Any]  # other options of the rule
    _bound: dict[Any, BoundRule | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    @staticmethod
    def parse(text: str, **options: Any) -> RulePattern:
        """Parse a rule text.

        Args:
            text: Text of the rule.
            options: Kinds and options, as for `rule`.

        Raises:
            SpError: If the text is malformed, as for `rule`.
        """
        if "pad" in options:  # the cache would not distinguish the pad values 0, 0.0 and False
            return _read_sides(text, options)
        return _check_known(text, tuple(sorted(options.items())))

    def bind(self, call: OpCall) -> BoundRule | None:
        """Bind the text to the shapes of a call, or return None if the number of dims or group sizes do not match."""
        shapes = tuple(call.shape(i) for i in range(len(call.operands)))
        results = call.result_shapes()
        if (shapes, results) not in self._bound:  # layers are equal, and every analysis binds again
            if len(self._bound) >= MAX_BOUND_SHAPES:
                self._bound.clear()
            self._bound[shapes, results] = self._bind(shapes, results)
        return self._bound[shapes, results]

    def _bind(self, shapes: Sequence[tuple[Size, ...]], result_shapes: Sequence[tuple[Size, ...]]) -> BoundRule | None:
        given = self.operands or ((),) * len(shapes)  # nothing before the arrow: no operand, or one without dims
        bound = [_expand_ellipsis(dims, len(s) - len(dims) + 1) for dims, s in zip(given, shapes)]
        if [len(dims) for dims in bound] != [len(s) for s in shapes] or len(given) != len(shapes):
            return None
        depth = max((len(s) - len(d) + 1 for d, s in zip(given, shapes) if "..." in d), default=0)
        results = tuple(_expand_ellipsis(dims, depth) for dims in self.results)
        kinds = {f: kind for name, kind in self.kinds.items() for f in _expand_ellipsis((name,), depth)}
        pairs = [*zip(bound, shapes), *zip(results, result_shapes)]
        extent = _factor_sizes(pairs)
        grouped = _solve_groups(pairs, extent)
        if grouped is None:
            return None
        operands = tuple(
            tuple("" if s == 1 and extent.get(f, 1) != 1 else f for f, s in zip(dims, shape))
            for dims, shape in zip(bound, shapes)
        )
        return BoundRule(operands, results, kinds, **self.options, extents=grouped)


@lru_cache(maxsize=1024)
def _check_known(text: str, options: tuple[tuple[str, Any], ...]) -> RulePattern:
    return _read_sides(text, dict(options))


def _read_sides(text: str, options: dict[str, Any]) -> RulePattern:
    text, *parts = (part.strip() for part in text.split(";"))
    try:
        options.update(_read_option(part) for part in parts)
        operands, results = _split_sides(text)
        kinds = {f: kind for kind in FACTOR_KINDS for f in str(options.pop(kind, "")).split()}
        _check_rule(operands, results, kinds, options)
    except SpError as error:
        raise error.with_context(f"rule {text!r}: ") from None
    return RulePattern(operands, results, kinds, options)


def _read_option(text: str) -> tuple[str, Any]:
    """Parse an option after the dims of a rule text."""
    name, given, value = text.partition("=")
    if not given:
        return name, True
    try:
        return name, value if name in (*FACTOR_KINDS, "sizes") else ast.literal_eval(value)
    except (SyntaxError, ValueError):
        raise SpError("SP933", f"{name}: expected a Python constant, got {value!r}.") from None


@cache
def _split_sides(text: str) -> tuple[tuple[Dims, ...], tuple[Dims, ...]]:
    if text.count("->") != 1:
        raise SpError("SP931", f"expected one '->' between operands and results, got {text.count('->')}.")
    operands, results = (
        tuple(_read_dims(value) for value in side.split(",")) if side.strip() else () for side in text.split("->")
    )
    return operands, results or ((),)


def _read_dims(text: str) -> Dims:
    """Parse the dims of one operand or result."""
    dims: list[str] = []
    inside: list[str] | None = None
    for token in re.findall(r"~?\w+|\.\.\.|\S", text):
        if token == "(":
            if inside is not None:
                raise SpError("SP931", f"{text.strip()!r} has a group in a group.")
            inside = []
        elif token == ")":
            if not inside:
                raise SpError("SP931", f"{text.strip()!r} has {'an empty group' if inside == [] else 'a ) without ('}.")
            dims.append(group_factors(inside))
            inside = None
        elif inside is not None and token in ("...", "1"):
            raise SpError("SP931", f"{text.strip()!r} has {token!r} in a group.")
        elif token not in ("...", "1") and not _FACTOR.fullmatch(token):
            raise SpError("SP931", f"expected letters, digits and _ as the name of a factor, got {token!r}.")
        else:
            (dims if inside is None else inside).append("" if token == "1" else token)
    if inside is not None:
        raise SpError("SP931", f"{text.strip()!r} has a ( without ).")
    named = flatten_dims(tuple(dims))
    if twice := sorted({f for f in named if named.count(f) > 1}):
        raise SpError("SP931", f"{text.strip()!r} has {twice} twice.")
    return tuple(dims)


def _check_rule(
    operands: tuple[Dims, ...], results: tuple[Dims, ...], kinds: Mapping[str, str], options: Mapping[str, Any]
) -> None:
    """Check that vanishing factors are classified, classified factors exist, and sizes can be solved.

    Raises:
        SpError: If one of these is not the case or an option is unknown.
    """
    unknown = set(options) - set(RULE_OPTIONS)
    if unknown:
        raise SpError(
            "SP932", f"expected options out of {', '.join((*FACTOR_KINDS, *RULE_OPTIONS))}, got {sorted(unknown)}."
        )
    had = {f for dims in operands for f in flatten_dims(dims)}
    kept = {f for dims in results for f in flatten_dims(dims)}
    for f, kind in kinds.items():
        if f not in had and (kind != "whole" or f not in kept):
            raise SpError("SP934", f"{f!r} is classified but is not in an operand.")
    lost = sorted(had - kept - set(kinds))
    if lost:
        raise SpError("SP935", f"{lost} are in no result and are not classified.")
    dims = [dim for side in (*operands, *results) for dim in side]
    unsized = (had | kept) - set(_solve_sizes(dims, {f for f in dims if f[:1] != "("}))
    if unsized:
        raise SpError("SP936", f"the sizes of {sorted(unsized)} are not known, as they are in groups only.")


def _solve_sizes(dims: Iterable[str], known: set[str]) -> set[str]:
    """Return the factors whose sizes follow from the dim sizes, given those of `known`."""
    groups = [dim_factors(dim) for dim in dims if dim[:1] == "("]
    while found := {f for g in groups for f in g if f not in known and known.issuperset({*g} - {f})}:
        known = known | found
    return known


def _expand_ellipsis(dims: Dims, depth: int) -> Dims:
    """Replace "..." by `depth` dims, numbered from the last."""
    dots = tuple(f"~{i}" for i in range(depth - 1, -1, -1))
    return tuple(f for name in dims for f in (dots if name == "..." else (name,)))


def _factor_sizes(pairs: Sequence[tuple[Sequence[str], Sequence[Size]]]) -> dict[str, Size]:
    """Return the size of each factor that is a dim, from dims that do not broadcast."""
    out: dict[str, Size] = {}
    for dims, shape in pairs:
        for f, s in zip(dims, shape):
            if f and f[0] != "(" and (f not in out or out[f] == 1):
                out[f] = s
    return out


def _solve_groups(
    pairs: Sequence[tuple[Sequence[str], Sequence[Size]]], known: Mapping[str, Size]
) -> dict[str, Size] | None:
    """Return the size of each factor in a group, or None if the product differs from the size of the group."""
    groups = [(dim_factors(dim), s) for dims, shape in pairs for dim, s in zip(dims, shape) if dim[:1] == "("]
    out: dict[str, Size] = {f: known[f] for group, _ in groups for f in group if f in known}
    waiting = groups
    while waiting:
        later = []
        for dim, extent in waiting:
            missing = [f for f in dim if f not in out]
            others = size_product(out[f] for f in dim if f in out)
            rest = exact_quotient(extent, others)
            if len(missing) > 1:
                later.append((dim, extent))
            elif (missing and rest is None) or not (missing or is_same_size(extent, others)):
                return None
            elif missing:
                out[missing[0]] = rest
        waiting = later
    return out
