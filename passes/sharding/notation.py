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
    # bound rules, by the shapes of operands and results
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
        return _read_cached(text, tuple(sorted(options.items())))

    def bind(self, call: OpCall) -> BoundRule | None:
        """Bind the text to the shapes of a call, or return None.

        The result is None if the number of dims or group sizes do not match.
        """
        shapes = tuple(call.shape(i) for i in range(len(call.operands)))
        results = call.result_shapes()
        if (shapes, results) not in self._bound:  # layers are equal, and every analysis binds again
            if len(self._bound) >= MAX_BOUND_SHAPES:
                self._bound.clear()
            self._bound[shapes, results] = self._bind(shapes, results)
        return self._bound[shapes, results]

    def _bind(self, shapes: Sequence[tuple[Size, ...]], result_shapes: Sequence[tuple[Size, ...]]) -> BoundRule | None:
        """Bind the text to shapes of operands and results, see `bind`."""
        patterns = self.operands or ((),) * len(shapes)  # nothing before the arrow: no operand, or one without dims
        if len(patterns) != len(shapes):
            return None
        depths = [len(shape) - len(dims) + 1 for dims, shape in zip(patterns, shapes)]  # number of dims of "..."
        expanded = [_expand_ellipsis(dims, depth) for dims, depth in zip(patterns, depths)]
        if [len(dims) for dims in expanded] != [len(shape) for shape in shapes]:
            return None
        depth = max((depth for dims, depth in zip(patterns, depths) if "..." in dims), default=0)
        results = tuple(_expand_ellipsis(dims, depth) for dims in self.results)
        kinds = {f: kind for name, kind in self.kinds.items() for f in _expand_ellipsis((name,), depth)}
        pairs = [*zip(expanded, shapes), *zip(results, result_shapes)]
        sizes = _factor_sizes(pairs)
        extents = _solve_groups(pairs, sizes)
        if extents is None:
            return None
        operands = tuple(
            tuple("" if size == 1 and sizes.get(f, 1) != 1 else f for f, size in zip(dims, shape))  # "": broadcasts
            for dims, shape in zip(expanded, shapes)
        )
        return BoundRule(operands, results, kinds, **self.options, extents=extents)


@lru_cache(maxsize=1024)
def _read_cached(text: str, options: tuple[tuple[str, Any], ...]) -> RulePattern:
    return _read_sides(text, dict(options))


def _read_sides(text: str, options: dict[str, Any]) -> RulePattern:
    """Parse and check a rule text; options in the text are added to `options`."""
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
    name, equals, value = text.partition("=")
    if not equals:
        return name, True
    try:
        return name, value if name in (*FACTOR_KINDS, "sizes") else ast.literal_eval(value)
    except (SyntaxError, ValueError):
        raise SpError("SP933", f"{name}: expected a Python constant, got {value!r}.") from None


@cache
def _split_sides(text: str) -> tuple[tuple[Dims, ...], tuple[Dims, ...]]:
    """Return the dims of the operands and of the results; a text without results has one of no dims."""
    if text.count("->") != 1:
        raise SpError("SP931", f"expected one '->' between operands and results, got {text.count('->')}.")
    operands, results = (
        tuple(_read_dims(value) for value in side.split(",")) if side.strip() else () for side in text.split("->")
    )
    return operands, results or ((),)


def _read_dims(text: str) -> Dims:
    """Parse the dims of one operand or result."""
    dims: list[str] = []
    group: list[str] | None = None  # factors of the group that is being read
    for token in re.findall(r"~?\w+|\.\.\.|\S", text):
        if token == "(":
            if group is not None:
                raise SpError("SP931", f"{text.strip()!r} has a group in a group.")
            group = []
        elif token == ")":
            if not group:
                raise SpError("SP931", f"{text.strip()!r} has {'an empty group' if group == [] else 'a ) without ('}.")
            dims.append(group_factors(group))
            group = None
        elif group is not None and token in ("...", "1"):
            raise SpError("SP931", f"{text.strip()!r} has {token!r} in a group.")
        elif token not in ("...", "1") and not _FACTOR.fullmatch(token):
            expected = "a letter or _, then letters, digits or _"
            raise SpError("SP931", f"{text.strip()!r}: expected {expected} as the name of a dim, got {token!r}.")
        else:
            (dims if group is None else group).append("" if token == "1" else token)
    if group is not None:
        raise SpError("SP931", f"{text.strip()!r} has a ( without ).")
    factors = flatten_dims(tuple(dims))
    repeated = sorted({f for f in factors if factors.count(f) > 1})
    if repeated:
        raise SpError("SP931", f"{text.strip()!r} has {repeated} twice.")
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
    operand_factors = {f for dims in operands for f in flatten_dims(dims)}
    result_factors = {f for dims in results for f in flatten_dims(dims)}
    for f, kind in kinds.items():
        if f not in operand_factors and (kind != "whole" or f not in result_factors):
            raise SpError("SP934", f"{f!r} is classified but is not in an operand.")
    unclassified = sorted(operand_factors - result_factors - set(kinds))
    if unclassified:
        raise SpError("SP935", f"{unclassified} are in no result and are not classified.")
    all_dims = [dim for dims in (*operands, *results) for dim in dims]
    unsized = (operand_factors | result_factors) - _solve_sizes(all_dims, {f for f in all_dims if f[:1] != "("})
    if unsized:
        raise SpError("SP936", f"the sizes of {sorted(unsized)} are not known, as they are in groups only.")


def _solve_sizes(dims: Iterable[str], known: set[str]) -> set[str]:
    """Return the factors whose sizes follow from the dim sizes, given those of `known`."""
    groups = [set(dim_factors(dim)) for dim in dims if dim[:1] == "("]
    while solved := {f for group in groups for f in group - known if known.issuperset(group - {f})}:
        known = known | solved
    return known


def _expand_ellipsis(dims: Dims, depth: int) -> Dims:
    """Replace "..." by `depth` dims, numbered from the last."""
    dots = tuple(f"~{i}" for i in range(depth - 1, -1, -1))
    return tuple(f for name in dims for f in (dots if name == "..." else (name,)))


def _factor_sizes(pairs: Sequence[tuple[Sequence[str], Sequence[Size]]]) -> dict[str, Size]:
    """Return the size of each factor that is a dim, from dims that do not broadcast."""
    sizes: dict[str, Size] = {}
    for dims, shape in pairs:
        for f, size in zip(dims, shape):
            if f and f[0] != "(" and (f not in sizes or sizes[f] == 1):
                sizes[f] = size
    return sizes


def _solve_groups(
    pairs: Sequence[tuple[Sequence[str], Sequence[Size]]], known: Mapping[str, Size]
) -> dict[str, Size] | None:
    """Return the size of each factor in a group, or None if a group's size does not match.

    A group's size must be the product of the sizes of its factors.

    Args:
        pairs: Dims and shape of each operand and result.
        known: Sizes of the factors that are a dim. The sizes of the others can be solved, see `_check_rule`.
    """
    waiting = [(dim_factors(dim), size) for dims, shape in pairs for dim, size in zip(dims, shape) if dim[:1] == "("]
    solved: dict[str, Size] = {f: known[f] for group, _ in waiting for f in group if f in known}
    while waiting:
        unsolved = []  # groups with several unknown factors
        for group, size in waiting:
            missing = [f for f in group if f not in solved]
            product = size_product(solved[f] for f in group if f in solved)
            if len(missing) > 1:
                unsolved.append((group, size))
            elif missing:
                quotient = exact_quotient(size, product)
                if quotient is None:
                    return None
                solved[missing[0]] = quotient
            elif not is_same_size(size, product):
                return None
        waiting = unsolved
    return solved
