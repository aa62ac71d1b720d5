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
    halo=    a position needs its neighbours (see `BoundRule.slides`)      conv1d's dim (it stays in the result)
    window=  a result is a contiguous piece of it (see `BoundRule.spans`) slice's dim (it stays in the result)

A dim that is a product of factors is a group, slowest first: `"b s d -> (b s) d"` flattens.

Ops whose behaviour depends on arguments register a function from the Call to a rule with
`@register_rule_function(op, ...)`.
The notation is that of einops and of Shardy's op sharding rules (openxla.org/shardy); `attend` is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

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
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])  # a decorated function keeps its own type
TransferFunction = Callable[[OpCall], tuple[Placement, ...]]
POINTWISE = torch.Tag.pointwise  # registering this key gives the rule of every op that carries the tag
RULES: Table[RuleFunction] = Table("sharding rules", again=True)
TRANSFERS: Table[TransferFunction] = Table("placements of exchanges")
_LOOKUP_CACHE: ContextVar[dict[Node, tuple[OpCall, BoundRule | None]] | None] = ContextVar(
    "calls and their rules", default=None
)


def lookup_rule(node: Node) -> tuple[OpCall, BoundRule | None] | None:
    """The call and its rule; None when the node is not an ATen-like op; rule None when nothing is known of it."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    seen = _LOOKUP_CACHE.get()
    if seen is not None and node in seen:
        return seen[node]
    call, function = OpCall(node), _rule_function(node.target)
    found = call, function(call) if function is not None else None
    if seen is not None:
        seen[node] = found
    return found


@contextmanager
def cache_lookups() -> Iterator[None]:
    """While no graph changes, a call and its rule stay what they are: `lookup_rule` makes them once."""
    token = _LOOKUP_CACHE.set({})
    try:
        yield
    finally:
        _LOOKUP_CACHE.reset(token)


def has_rule(target: Any) -> bool:
    """Does an op have a rule, whether or not that fits the operands of a call?"""
    return isinstance(target, OpOverload) and _rule_function(target) is not None


def _rule_function(op: OpOverload) -> RuleFunction | None:
    found = RULES.get(op)
    if found is None and POINTWISE in op.tags and not schema_of(op).is_mutable:  # add.out has the tag, and writes
        found = RULES[POINTWISE]
    return found


def register_rule_function(*ops: Any) -> Callable[[FunctionT], FunctionT]:
    """Decorator: the rule of these op overloads depends on their arguments."""
    return RULES.of(*ops)


def register_transfer(*ops: Any) -> Callable[[FunctionT], FunctionT]:
    """Decorator: where the results of an op lie that changes placements and nothing else (the sp:: exchanges)."""
    return TRANSFERS.of(*ops)


def transfer_of(target: Any) -> TransferFunction | None:
    """What `register_transfer` registered for the op; None for any op that computes."""
    return TRANSFERS.get(target)


def rule(op: Any, *texts: str, **options: Any) -> None:
    """Register the sharding behaviour of an op overload (or of a list of them) as text; see the module's docstring.

    Several texts: the one with as many operand groups as the call has tensor operands is taken.
    Options: sum, mean, total, whole, attend, scan, halo, window (space-separated factors), and sizes, lazy,
    starts_sequence, pad, masks, reshapes, lenders as in BoundRule.
    Raises SpError for a malformed text, when a vanishing factor is not classified or an option is unknown.
    """
    parsed = [RulePattern.parse(text, **options) for text in texts]
    by_count = {len(p.operands): p for p in parsed}

    def instantiate(call: OpCall) -> BoundRule | None:
        pattern = by_count.get(len(call.operands))
        return pattern.bind(call) if pattern is not None else None

    register_rule_function(*op if isinstance(op, (list, tuple)) else [op])(instantiate)
