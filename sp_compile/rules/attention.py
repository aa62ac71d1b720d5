"""Fused attention."""

from __future__ import annotations

import torch

from ..attention import reads_position
from ..rule import Call, Dims, Factors, rule_of
from ..shapes import Size

aten, sp = torch.ops.aten, torch.ops.sp


@rule_of(aten.scaled_dot_product_attention.default)
def _scaled_dot_product_attention(call: Call) -> Factors:
    """ "b h q d, b h k d, b h k e, b h q k -> b h q e", attend="k", and "q k" when is_causal pairs their positions.

    Any number of leading dims, which may broadcast; with enable_gqa a rank's query heads meet its own key heads, as
    long as the ranks divide both.
    """
    leading, extent = _leading(call)
    dims = ((*leading, *tail) for tail in (("q", "d"), ("k", "d"), ("k", "e"), ("q", "k")))
    operands = tuple(
        _named(call.shape(i), names, extent) for i, names in zip(range(len(call.operands)), dims)
    )
    kinds = {"k": "attend", "d": "whole"} | ({"q": "attend"} if call["is_causal"] else {})
    return Factors(operands, ((*leading, "q", "e"),), kinds, masks=(3,))


@rule_of(sp.masked_attention.default)
def _masked_attention(call: Call) -> Factors:
    """ "b h q d, b h k d, b h k e, b row0, b col0 -> b h q e", attend="k", and "q k" if the mask reads positions.

    Every rank looks the vectors up whole. Their batch is that of q without a head dim, or its leading dims as one.
    """
    leading, extent = _leading(call)
    batch = leading[0] if len(leading) <= 2 else "batch"
    vectors = [(batch, f"vector{i}") for i in range(len(call.operands) - 3)]
    dims = (*((*leading, *tail) for tail in (("q", "d"), ("k", "d"), ("k", "e"))), *vectors)
    operands = tuple(_named(call.shape(i), names, extent) for i, names in enumerate(dims))
    whole = {f: "whole" for names in operands[3:] for f in names if f and f not in leading}
    kinds = {"k": "attend", "d": "whole"} | ({"q": "attend"} if reads_position(call) else {}) | whole
    return Factors(operands, ((*leading, "q", "e"),), kinds, masks=tuple(range(3, len(operands))))


def _leading(call: Call) -> tuple[Dims, dict[str, Size]]:
    """Names of the dims before q's and k's, which may broadcast, and the extents that they broadcast to."""
    results = call.result_shapes()[0]
    depth = len(results) - 2
    leading: Dims = tuple("h" if i == depth - 1 else f"b{depth - 2 - i}" for i in range(depth))
    return leading, {**dict(zip(leading, results)), "q": call.shape(0)[-2], "k": call.shape(1)[-2]}


def _named(shape: tuple[Size, ...], names: Dims, extent: dict[str, Size]) -> Dims:
    """The last names, one a dim; a dim of size 1 that broadcasts has none."""
    own = names[len(names) - len(shape) :]
    return tuple("" if s == 1 and extent.get(f, 1) != 1 else f for s, f in zip(shape, own))
