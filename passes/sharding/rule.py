"""Define and register rules: the effect of an op on dims, as one einops-like line.

    rule(aten.linear.default, "... i, o i -> ... o", sum="i")

Each comma-separated group names the dims of one tensor operand, in the order of the op's schema (absent optional
tensors are skipped; a tensor list counts as its number of operands). A factor that is in the result passes through.
One that vanishes must be classified, or registration fails:

    sum=       the result is Partial(sum) when the factor is sharded       linear's i
    mean=      like sum, divided by the global count                       mse_loss with reduction="mean"
    total=     like sum, but padded rows add to it for any fill value      mse_loss with reduction="sum"
    replicate= the operand must be gathered along it                       softmax's dim (also if it is in the result)
    attend=    attention mixes it                                          scaled_dot_product_attention's q and k
    scan=      a position needs the combined values before it              cumsum's dim (it is in the result)
    halo=      a position needs its neighbors (see `BoundRule.slides`)     conv1d's dim (it is in the result)
    window=    a result is a contiguous piece (see `BoundRule.spans`)      slice's dim (it is in the result)

A dim that is a product of factors is a group, slowest first: `"b s d -> (b s) d"` flattens.

If the rule depends on arguments, register a function from the call to a rule by `@register_rule_function(op, ...)`.
The notation is that of einops and of Shardy's op sharding rules (openxla.org/shardy); `attend` is an addition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypedDict, TypeVar, Unpack

import torch
from torch.fx import Node

from sp_compile.lowering.base.registry import Table
from sp_compile.lowering.torch_compat import OpOverload, schema_of
from sp_compile.passes.graph.call import OpCall

from .factors import BoundRule, Dims
from .notation import RulePattern
from .placement import Placement

__all__ = ["POINTWISE", "BoundRule", "Dims", "OpCall", "RuleFunction", "RulePattern", "register_rule_function", "rule"]

RuleFunction = Callable[[OpCall], BoundRule | None]
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])  # decorated functions keep their type
TransferFunction = Callable[[OpCall], tuple[Placement, ...]]
POINTWISE = torch.Tag.pointwise  # key of the rule for all ops that have the tag
RULES: Table[RuleFunction] = Table("sharding rules", replace=True)
TRANSFERS: Table[TransferFunction] = Table("placements of exchanges")
_LOOKUP_CACHE: ContextVar[dict[Node, RuledCall] | None] = ContextVar("calls and their rules", default=None)


class RuledCall(NamedTuple):
    """Call of an op overload, with its sharding rule."""

    call: OpCall  # the call, with arguments by name
    rule: BoundRule | None  # None if the op has no rule, or none for these operands


def lookup_rule(node: Node) -> RuledCall | None:
    """Return the call of a node with its rule, bound to the shapes of the call.

    Args:
        node: A node of a graph.

    Returns:
        The call, whose field `rule` is None if the op has no rule for these arguments; None if the node is no call of
        an op overload.
    """
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    cached_calls = _LOOKUP_CACHE.get()  # None outside of `cache_lookups`
    if cached_calls is not None and node in cached_calls:
        return cached_calls[node]
    call, function = OpCall(node), _rule_function(node.target)
    ruled_call = RuledCall(call, function(call) if function is not None else None)
    if cached_calls is not None:
        cached_calls[node] = ruled_call
    return ruled_call


def rule_of(node: Node) -> BoundRule | None:
    """Return the sharding rule of a node, bound to the shapes of its call.

    Args:
        node: A node of a graph.

    Returns:
        The rule, or None if the node has none.
    """
    ruled_call = lookup_rule(node)
    return ruled_call.rule if ruled_call is not None else None


@contextmanager
def cache_lookups() -> Iterator[None]:
    """Cache the results of `lookup_rule` in the block of a `with` statement, in which no graph may change.

    Returns:
        The context manager of the block.
    """
    token = _LOOKUP_CACHE.set({})
    try:
        yield
    finally:
        _LOOKUP_CACHE.reset(token)


def has_rule(target: Any) -> bool:
    """Return True if the op has a rule, which may still not match the operands of a call.

    Args:
        target: The target of a call.

    Returns:
        True for an op overload with a rule.
    """
    return isinstance(target, OpOverload) and _rule_function(target) is not None


def _rule_function(op: OpOverload) -> RuleFunction | None:
    """Return the function that returns the rule of a call of the op, or None if none is registered.

    Ops without a function of their own, but with torch's tag `pointwise`, have the one that is registered for the tag.
    """
    function = RULES.get(op)
    if function is None and POINTWISE in op.tags and not schema_of(op).is_mutable:  # add.out has the tag, but writes
        function = RULES[POINTWISE]
    return function


def register_rule_function(*ops: Any) -> Callable[[FunctionT], FunctionT]:
    """Register a function that returns the rule of a call, as a decorator.

    Args:
        *ops: Op overloads.

    Returns:
        The decorator, which returns the function unchanged.
    """
    return RULES.of(*ops)


def register_transfer(*ops: Any) -> Callable[[FunctionT], FunctionT]:
    """Register a function from a call of an exchange to the placements of its results, as a decorator.

    An exchange, such as sp::all_gather, is the identity in the global view: its results have the shapes of its
    operands, and only placements change. Therefore it has no sharding rule.

    Args:
        *ops: Ops that only change placements (sp:: exchanges).

    Returns:
        The decorator, which returns the function unchanged.
    """
    return TRANSFERS.of(*ops)


def transfer_of(target: Any) -> TransferFunction | None:
    """Return the function of an exchange that returns the placements of its results.

    Args:
        target: The target of a call.

    Returns:
        The function, or None for other ops.
    """
    return TRANSFERS.get(target)


class RuleOptions(TypedDict, total=False):
    """Options of `rule`: factor names, separated by spaces, for each kind, and fields of `BoundRule`."""

    sum: str  # factors over which the op sums
    mean: str  # factors over which it takes the mean
    total: str  # factors over which it sums; padded rows add to the sum for any fill value of an operand
    replicate: str  # factors that must be gathered
    whole: str  # deprecated name of `replicate`
    attend: str  # factors that attention mixes
    scan: str  # factors along which it scans
    halo: str  # factors whose neighbors it reads
    window: str  # factors that it cuts into contiguous pieces
    sizes: str  # schema argument with the sizes of the result
    lazy: bool  # the op only moves data
    starts_sequence: bool  # replicated operands are sharded for it
    pad: tuple[int, Any]  # (operand, value): padded rows of the operand get the value, so that a sum ignores them
    masks: tuple[int, ...]  # operands that are only indexed by position; no sequence starts at them
    reshapes: bool  # elements keep their row-major order
    lenders: tuple[int, ...]  # operands of which only the shape is read


def rule(op: Any, *texts: str, **options: Unpack[RuleOptions]) -> None:
    """Register the sharding rule of an op as text; see the module's docstring.

    Args:
        op: Op overload, or a list of overloads.
        *texts: Rule texts; the one with the call's number of tensor operands is used.
        **options: Names of factors, separated by spaces, for each kind: `sum`, `mean`, `total`, `replicate`, `attend`,
            `scan`, `halo`, `window`. And fields of `BoundRule`: `sizes`, `lazy`, `starts_sequence`, `pad`, `masks`,
            `reshapes`, `lenders`. `RuleOptions` declares their types; a rule sets few of them. `whole` is a deprecated
            name of `replicate`, with a warning.

    Returns:
        None.

    Raises:
        SpError: A text is malformed (SP931), an option is unknown (SP932) or has an invalid value (SP933), a kind names
            a factor of no operand (SP934), a factor without a kind is in no result (SP935), or the size of a factor is
            unknown (SP936).
    """
    patterns = [RulePattern.parse(text, **options) for text in texts]
    by_operand_count = {len(pattern.operands): pattern for pattern in patterns}

    def instantiate(call: OpCall) -> BoundRule | None:
        """Return the rule of a call, from the text with its number of operands; None if no text matches."""
        pattern = by_operand_count.get(len(call.operands))
        return pattern.bind(call) if pattern is not None else None

    overloads = op if isinstance(op, (list, tuple)) else [op]
    register_rule_function(*overloads)(instantiate)
