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
from functools import lru_cache
from typing import Any

from sp_compile.lowering.base.errors import SpError
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.sizes import Size, exact_quotient, is_same_size, size_product

from .factors import FACTOR_KINDS, BoundRule, Dims, dim_factors, flatten_dims, group_factors, rename_kind

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
        """Parse a rule text, such as "n i, i m -> n m; sum=i", and check it.

        Args:
            text: Text of the rule.
            options: Kinds and options, as for `rule`.

        Raises:
            SpError: If the text is malformed, as for `rule`.
        """
        if "pad" in options:  # not cached, because a cache key does not distinguish the pad values 0, 0.0 and False
            return _read_sides(text, options)
        return _read_cached(text, tuple(sorted(options.items())))

    def bind(self, call: OpCall) -> BoundRule | None:
        """Return the rule of a call: the text with "..." expanded, and with the sizes of the factors in groups.

        The result is None if the call has other numbers of operands or dims than the text, or if a dim is not the
        product of its group, such as a dim of 7 rows for "(b s)" with b = 2.
        """
        shapes = tuple(call.shape(i) for i in range(len(call.operands)))
        key = (shapes, call.result_shapes())
        if key not in self._bound:  # most calls repeat: layers are equal, and each analysis binds again
            if len(self._bound) >= MAX_BOUND_SHAPES:
                self._bound.clear()
            self._bound[key] = self._bind(*key)
        return self._bound[key]

    def _bind(self, shapes: Sequence[tuple[Size, ...]], result_shapes: Sequence[tuple[Size, ...]]) -> BoundRule | None:
        """Return the rule for operands and results of these shapes, or None if they do not match the text.

        For operands (2, 8, 16) and (32, 16), the rule of "... i, o i -> ... o" is "~1 ~0 i, o i -> ~1 ~0 o": "..."
        becomes the dims "~1" and "~0".
        """
        patterns = self.operands or ((),) * len(shapes)  # nothing before the arrow: no operand, or one without dims
        if len(patterns) != len(shapes):
            return None
        # "..." represents the dims of an operand that the pattern does not name. It is itself one of the len(dims)
        # entries of the pattern, so that len(dims) - 1 dims have names.
        num_unnamed = [len(shape) - (len(dims) - 1) for dims, shape in zip(patterns, shapes)]
        expanded = [_expand_ellipsis(dims, ndim) for dims, ndim in zip(patterns, num_unnamed)]
        if [len(dims) for dims in expanded] != [len(shape) for shape in shapes]:  # too few dims, or more without "..."
            return None
        # Operands broadcast along "...", so in results and kinds it has the largest number of dims of any operand.
        most_unnamed = max((ndim for dims, ndim in zip(patterns, num_unnamed) if "..." in dims), default=0)
        results = tuple(_expand_ellipsis(dims, most_unnamed) for dims in self.results)
        if [len(dims) for dims in results] != [len(shape) for shape in result_shapes]:
            return None
        kinds = {f: kind for name, kind in self.kinds.items() for f in _expand_ellipsis((name,), most_unnamed)}
        dims_and_shapes = [*zip(expanded, shapes), *zip(results, result_shapes)]
        sizes = _factor_sizes(dims_and_shapes)
        extents = _solve_groups(dims_and_shapes, sizes)
        if extents is None:
            return None
        # A dim of size 1 of a longer factor broadcasts. Its name becomes "", so that it is not sharded.
        operands = tuple(
            tuple("" if size == 1 and sizes.get(f, 1) != 1 else f for f, size in zip(dims, shape))
            for dims, shape in zip(expanded, shapes)
        )
        return BoundRule(operands, results, kinds, **self.options, extents=extents)


@lru_cache(maxsize=1024)
def _read_cached(text: str, options: tuple[tuple[str, Any], ...]) -> RulePattern:
    return _read_sides(text, dict(options))


def _read_sides(text: str, given: Mapping[str, Any]) -> RulePattern:
    """Parse and check a rule text; `given` are options that are not in the text.

    The kinds are options such as sum="i j", which become {"i": "sum", "j": "sum"}.
    """
    dims_text, *option_texts = (part.strip() for part in text.split(";"))
    try:
        options = {**given, **dict(map(_read_option, option_texts))}
        if "whole" in options:
            kind = rename_kind("whole")
            options[kind] = f"{options.get(kind, '')} {options.pop('whole')}"
        operands, results = _split_sides(dims_text)
        kind_texts = {kind: str(options.pop(kind, "")) for kind in FACTOR_KINDS}  # the remaining options are no kinds
        kinds = {f: kind for kind, factors in kind_texts.items() for f in factors.split()}
        _check_rule(operands, results, kinds, options)
    except SpError as error:
        raise error.with_context(f"rule {dims_text!r}: ") from None
    return RulePattern(operands, results, kinds, options)


def _read_option(text: str) -> tuple[str, Any]:
    """Return the name and the value of an option in a rule text.

    "sum=i j" is ("sum", "i j"), "masks=(1,)" is ("masks", (1,)), and "lazy" is ("lazy", True).
    """
    name, equals, value = text.partition("=")
    if not equals:
        return name, True
    if name in (*FACTOR_KINDS, "whole", "sizes"):  # names of factors or of an argument
        return name, value
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        raise SpError("SP933", f"{name}: expected a Python constant, got {value!r}.") from None


def _split_sides(text: str) -> tuple[tuple[Dims, ...], tuple[Dims, ...]]:
    """Return the dims of each operand and of each result: "n i, i -> n" is ((("n", "i"), ("i",)), (("n",),)).

    Nothing after the arrow is one result without dims, as in "k ->"; nothing before it is no operand.
    """
    if text.count("->") != 1:
        raise SpError("SP931", f"expected one '->' between operands and results, got {text.count('->')}.")
    operands, results = (
        tuple(_read_dims(value) for value in side.split(",")) if side.strip() else () for side in text.split("->")
    )
    return operands, results or ((),)


def _read_dims(text: str) -> Dims:
    """Parse the dims of one operand or result: "n 1 (b s) ..." is ("n", "", "(b s)", "...").

    Names such as ~1 are those of the dims of "..." in a bound rule.
    """
    dims: list[str] = []
    group: list[str] | None = None  # factors of the group that is being read
    for token in re.findall(r"~?\w+|\.\.\.|\S", text):
        if token == "(" and group is None:
            group = []
        elif token == ")" and group:
            dims.append(group_factors(group))
            group = None
        elif token in ("...", "1") and group is None:
            dims.append("" if token == "1" else token)
        elif _FACTOR.fullmatch(token):
            (dims if group is None else group).append(token)
        else:
            expected = f"{'the name of a dim' if group is None else 'names of dims in a group'}, such as b or b1"
            raise SpError("SP931", f"{text.strip()!r}: expected {expected}, got {token!r}.")
    if group is not None:
        raise SpError("SP931", f"{text.strip()!r}: expected a ')' after '(', got none.")
    factors = flatten_dims(tuple(dims))
    repeated = sorted({f for f in factors if factors.count(f) > 1})
    if repeated:
        raise SpError("SP931", f"{text.strip()!r} has {repeated} more than once; expected each name once.")
    return tuple(dims)


def _check_rule(
    operands: tuple[Dims, ...], results: tuple[Dims, ...], kinds: Mapping[str, str], options: Mapping[str, Any]
) -> None:
    """Check the parts of a parsed rule.

    Raises:
        SpError: An option is unknown (SP932), a factor with a kind is in no operand (SP934), a factor of an operand is
            in no result and has no kind (SP935), or the size of a factor does not follow from shapes (SP936), as for
            "(a b) -> (a b)".
    """
    unknown = set(options) - set(RULE_OPTIONS)
    if unknown:
        raise SpError(
            "SP932", f"expected options out of {', '.join((*FACTOR_KINDS, *RULE_OPTIONS))}, got {sorted(unknown)}."
        )
    operand_factors = {f for dims in operands for f in flatten_dims(dims)}
    result_factors = {f for dims in results for f in flatten_dims(dims)}
    for f, kind in kinds.items():
        is_unsharded_result = (
            kind == "replicate" and f in result_factors
        )  # a new dim of the result, which is not sharded
        if f not in operand_factors and not is_unsharded_result:
            raise SpError("SP934", f"{kind}: expected factors of the operands, got {f!r}.")
    unclassified = sorted(operand_factors - result_factors - set(kinds))
    if unclassified:
        raise SpError("SP935", f"expected a kind for each factor that is in no result, got none for {unclassified}.")
    all_dims = [dim for dims in (*operands, *results) for dim in dims]
    single_factors = {dim for dim in all_dims if dim[:1] != "("}  # whose sizes are sizes of dims
    unsized = (operand_factors | result_factors) - _solvable_factors(all_dims, single_factors)
    if unsized:
        raise SpError(
            "SP936", f"the sizes of the factors {sorted(unsized)} are not known, because they are only in groups."
        )


def _solvable_factors(dims: Iterable[str], known: set[str]) -> set[str]:
    """Return the factors whose sizes can be computed: those of `known`, and those that groups determine.

    The size of a group is that of a dim, so it determines its last unknown factor: with b known, "(b s)" determines s,
    and then "(s k)" determines k.
    """
    groups = [set(dim_factors(dim)) for dim in dims if dim[:1] == "("]
    while True:
        unknown_factors = [group - known for group in groups]  # of each group
        solved = {f for unknown in unknown_factors if len(unknown) == 1 for f in unknown}
        if not solved:
            return known
        known = known | solved


def _expand_ellipsis(dims: Dims, ndim: int) -> Dims:
    """Replace "..." by `ndim` dims, numbered from the last: ("...", "i") with 2 dims is ("~1", "~0", "i").

    Operands are aligned at the last dim when they broadcast, so equal numbers are equal dims.
    """
    unnamed = [f"~{i}" for i in reversed(range(ndim))]
    return tuple(name for dim in dims for name in (unnamed if dim == "..." else [dim]))


def _factor_sizes(dims_and_shapes: Sequence[tuple[Sequence[str], Sequence[Size]]]) -> dict[str, Size]:
    """Return the size of each factor that is a dim by itself, not only in a group.

    A factor may have size 1 in one operand, which broadcasts, and its full size in another; the result is the latter.
    """
    sizes: dict[str, Size] = {}
    for dims, shape in dims_and_shapes:
        for dim, size in zip(dims, shape):
            is_single_factor = dim and dim[0] != "("
            if is_single_factor and (dim not in sizes or sizes[dim] == 1):
                sizes[dim] = size
    return sizes


def _solve_groups(
    dims_and_shapes: Sequence[tuple[Sequence[str], Sequence[Size]]], known: Mapping[str, Size]
) -> dict[str, Size] | None:
    """Return the size of each factor in a group, or None if a dim is not the product of the factors of its group.

    None also if the groups do not determine the size of a factor.

    For "(b s) d -> b s d", s and b are known from the result, and the first dim of the operand must be their product.

    Args:
        dims_and_shapes: Dims and shape of each operand and result.
        known: Sizes of the factors that are a dim by themselves. Those of the others follow, as `_check_rule` ensures.
    """
    groups = [
        (dim_factors(dim), size) for dims, shape in dims_and_shapes for dim, size in zip(dims, shape) if dim[:1] == "("
    ]
    solved: dict[str, Size] = {f: known[f] for group, _ in groups for f in group if f in known}
    num_groups, waiting = len(groups), 0  # `waiting`: groups in a row that have waited for others
    for group, size in groups:  # which grows in this loop
        missing = [f for f in group if f not in solved]
        product = size_product(solved[f] for f in group if f in solved)
        if len(missing) > 1:  # the groups after it determine some of these
            waiting += 1
            if waiting > num_groups:
                return None
            groups.append((group, size))
        elif missing:
            waiting = 0
            quotient = exact_quotient(size, product)
            if quotient is None:
                return None
            solved[missing[0]] = quotient
        elif not is_same_size(size, product):
            return None
    return solved
