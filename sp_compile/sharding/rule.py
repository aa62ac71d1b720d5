"""The rule notation and the registry: what an op does to the dims of its operands, as one einops-like line.

    rule(aten.linear.default, "... i, o i -> ... o", sum="i")

Each comma-separated group names the dims of one tensor operand, in the order of the op's schema (absent optional
tensors are skipped; a tensor list counts as that many operands). A factor that stands in the result passes through.
One that vanishes must be classified, or registration fails:

    sum=     the result is Partial(sum) when the factor is sharded      linear's i
    mean=    as sum, divided by the whole count                        mse_loss with reduction="mean"
    total=   a sum whose padding no fill of one operand removes         mse_loss with reduction="sum"
    whole=   the op needs all of it                                     softmax's dim (also if it stays in the result)
    attend=  attention mixes it                                         scaled_dot_product_attention's q and k
    scan=    every position needs what all before it combine to         cumsum's dim (it stays in the result)
    halo=    a position needs its neighbours (see `Factors.slides`)      conv1d's dim (it stays in the result)

Ops whose behaviour depends on arguments register a function from the Call to a rule with `@rule_of(op, ...)`.
The notation is that of einops and of Shardy's op sharding rules (openxla.org/shardy); `attend` is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import torch
from torch.fx import Node

from sp_compile._compat import OpOverload
from sp_compile.errors import SpError
from sp_compile.graph.call import Call
from sp_compile.graph.sizes import Size

from .placement import Placement
from .reshape import Reshape, Window
from .windows import Sliding

__all__ = [
    "POINTWISE",
    "Call",
    "Dims",
    "Factors",
    "Pattern",
    "Reshape",
    "Rule",
    "RuleFunction",
    "Window",
    "rule",
    "rule_of",
]

KINDS = ("sum", "mean", "total", "whole", "attend", "scan", "halo")
Dims = tuple[str, ...]  # one factor name per dim; "" is a dim of size 1 that broadcasts


@dataclass(frozen=True)
class Factors:
    """A rule at one call: factor names for every dim of every operand and result, and what mixes them.

    sizes: the schema argument that spells the result's sizes (made local when the result is sharded).
    lazy: the op only moves data, so it does not by itself decide that a replicated value is worth sharding.
    pad: (operand, value): the operand to fill outside the window, and with what, so that a sum ignores padding.
    masks: operands that are only looked up by position; computed whole on every rank as long as that is free.
    normalises: what it needs whole it divides by its total, as softmax does.
    slides: for every factor of kind "halo", the rows that a result reads; its extent may differ in the result.
    wants, gives: where the call itself says that its operands and its results lie (an op that does its own exchanges).
    alias: with its operand where the call wants it, what a rank holds of it is what it holds of the result.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    kinds: Mapping[str, str] = field(default_factory=dict)
    sizes: str | None = None
    lazy: bool = False
    pad: tuple[int, Any] | None = None
    masks: tuple[int, ...] = ()
    normalises: bool = False
    slides: Mapping[str, Sliding] = field(default_factory=dict)
    wants: tuple[Placement, ...] | None = None
    gives: Placement | None = None
    alias: bool = False

    def __post_init__(self) -> None:
        """A factor of no operand can be local only if a size argument makes it so; none may vanish unclassified."""
        named = {f for dims in self.operands for f in dims if f}
        kept = {f for dims in self.results for f in dims if f}
        lost = sorted(named - kept - set(self.kinds))
        if lost:
            raise SpError(f"rule {self.operands} -> {self.results}: {lost} vanish and are not classified")
        if self.sizes is None and kept - named:
            object.__setattr__(self, "kinds", {**self.kinds, **dict.fromkeys(sorted(kept - named), "whole")})

    def kind(self, factor: str) -> str:
        """How the op treats the factor: one of KINDS, or "pass"."""
        return self.kinds.get(factor, "pass")


Rule = Factors | Reshape | Window
RuleFunction = Callable[[Call], Rule | None]
RuleFunctionT = TypeVar("RuleFunctionT", bound=RuleFunction)  # a decorated function keeps its own type
TransferFunction = Callable[[Call], tuple[Placement, ...]]
POINTWISE = torch.Tag.pointwise  # registering this key gives the rule of every op that carries the tag
_REGISTRY: dict[Any, RuleFunction] = {}
_TRANSFERS: dict[Any, TransferFunction] = {}


def lookup(node: Node) -> tuple[Call, Rule | None] | None:
    """The call and its rule; None when the node is not an ATen-like op; rule None when nothing is known of it."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    call = Call(node)
    function = _REGISTRY.get(node.target)
    if function is None and torch.Tag.pointwise in node.target.tags:
        function = _REGISTRY[POINTWISE]
    return call, function(call) if function is not None else None


def registered() -> Mapping[Any, RuleFunction]:
    """A copy of the registry: op overload (or POINTWISE) to rule function."""
    return dict(_REGISTRY)


def rule_of(*ops: Any) -> Callable[[RuleFunctionT], RuleFunctionT]:
    """Decorator: the rule of these op overloads depends on their arguments."""

    def register(function: RuleFunctionT) -> RuleFunctionT:
        for op in ops:
            _REGISTRY[op] = function
        return function

    return register


def forget(op: Any) -> None:
    """Undo `rule_of` for an op that is no longer there."""
    del _REGISTRY[op]


def transfer(*ops: Any) -> Callable[[TransferFunction], TransferFunction]:
    """Decorator: where the results of an op lie that changes placements and nothing else (the sp:: exchanges)."""

    def register(function: TransferFunction) -> TransferFunction:
        for op in ops:
            _TRANSFERS[op] = function
        return function

    return register


def transfer_of(target: Any) -> TransferFunction | None:
    """What `transfer` registered for the op; None for any op that computes."""
    return _TRANSFERS.get(target)


def rule(op: Any, *texts: str, **options: Any) -> None:
    """Register the sharding behaviour of an op overload (or of a list of them) as text; see the module's docstring.

    Several texts: the one with as many operand groups as the call has tensor operands is taken.
    Options: sum, mean, whole, attend (space-separated factors), sizes, lazy, pad as in Factors.
    Raises SpError when a vanishing factor is not classified or an option is unknown.
    """
    parsed = [Pattern.parse(text, **options) for text in texts]
    by_count = {len(p.operands): p for p in parsed}

    def instantiate(call: Call) -> Factors | None:
        pattern = by_count.get(len(call.operands))
        return pattern.at(call) if pattern is not None else None

    for one in op if isinstance(op, (list, tuple)) else [op]:
        _REGISTRY[one] = instantiate


@dataclass(frozen=True)
class Pattern:
    """A parsed rule text, not yet tied to a call."""

    text: str
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    kinds: Mapping[str, str]
    options: Mapping[str, Any]

    @staticmethod
    @cache
    def _groups(text: str) -> tuple[tuple[Dims, ...], tuple[Dims, ...]]:
        left, arrow, right = text.partition("->")
        if not arrow:
            raise SpError(f"rule {text!r}: no '->' between operands and results")
        split = [
            tuple(tuple(g.split()) for g in side.split(",")) if side.strip() else ((),)
            for side in (left, right)
        ]
        return (split[0] if left.strip() else ()), split[1]

    @staticmethod
    def parse(text: str, **options: Any) -> Pattern:
        """Read a rule text. Raises SpError as `rule` does."""
        operands, results = Pattern._groups(text)
        kinds = {f: kind for kind in KINDS for f in str(options.pop(kind, "")).split()}
        unknown = set(options) - {"sizes", "lazy", "pad", "masks"}
        if unknown:
            raise SpError(
                f"rule {text!r}: unknown option {sorted(unknown)}; known: {', '.join(KINDS)}, sizes, lazy, pad"
            )
        named = {f for dims in operands for f in dims}
        for f in kinds:
            if f not in named:
                raise SpError(f"rule {text!r}: {f!r} is classified but names no dim of an operand")
        lost = sorted(named - {f for dims in results for f in dims} - set(kinds))
        if lost:
            raise SpError(
                f"rule {text!r}: {lost} vanish from the result; say how: {', '.join(f'{k}=' for k in KINDS)}"
            )
        return Pattern(text, operands, results, kinds, options)

    def at(self, call: Call) -> Factors | None:
        """Bind the text to a call's shapes; None if the number of dims does not fit."""
        shapes = [call.shape(i) for i in range(len(call.operands))]
        found = (_bind(dims, len(s)) for dims, s in zip(self.operands, shapes))
        bound = [names for names in found if names is not None]
        if not len(bound) == len(shapes) == len(self.operands):
            return None
        depth = max((len(s) - len(d) + 1 for d, s in zip(self.operands, shapes) if "..." in d), default=0)
        results = tuple(
            tuple(f for name in dims for f in (_ellipsis(depth) if name == "..." else [name]))
            for dims in self.results
        )
        kinds = dict(self.kinds)
        if "..." in kinds:
            kind = kinds.pop("...")
            kinds.update({f: kind for f in _ellipsis(depth)})
        extent = _extents([*zip(bound, shapes), *zip(results, call.result_shapes())])
        operands = tuple(
            tuple("" if s == 1 and extent[f] != 1 else f for f, s in zip(dims, shape))
            for dims, shape in zip(bound, shapes)
        )
        return Factors(operands, results, kinds, **self.options)


def _ellipsis(depth: int) -> list[str]:
    return [f"~{i}" for i in range(depth - 1, -1, -1)]


def _bind(dims: Dims, ndim: int) -> list[str] | None:
    if "..." not in dims:
        return list(dims) if len(dims) == ndim else None
    extra = ndim - (len(dims) - 1)
    if extra < 0:
        return None
    at = dims.index("...")
    return [*dims[:at], *_ellipsis(extra), *dims[at + 1 :]]


def _extents(pairs: Sequence[tuple[Sequence[str], Sequence[Size]]]) -> dict[str, Size]:
    """The size of each factor: that of a dim that does not broadcast."""
    out: dict[str, Size] = {}
    for dims, shape in pairs:
        for f, s in zip(dims, shape):
            if f not in out or out[f] == 1:
                out[f] = s
    return out
