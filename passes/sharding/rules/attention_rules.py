"""Rules of fused attention, and of attention with its own exchanges, whose frames define the placements."""

from __future__ import annotations

from sp_compile.lowering.attention.op_args import SEQUENCE
from sp_compile.passes.graph.call import OpCall, node_shape
from sp_compile.passes.graph.sizes import Size
from sp_compile.passes.sharding.attention_axes import ATTENTION, depends_on_query
from sp_compile.passes.sharding.placement import Placement, Replicate, Shard
from sp_compile.passes.sharding.rule import BoundRule, Dims, register_rule_function

from ._build import align_names
from .exchange_rules import call_frame


@register_rule_function(*ATTENTION)
def _attention_rule(call: OpCall) -> BoundRule:
    """Return "b h q d, b h k d, b h k e, b h q k -> b h q e", attend="k", or "q k" if the mask reads positions.

    With log-sum-exps the last dim of the result belongs to no operand.

    There may be any number of leading dims, which may broadcast. With enable_gqa, a rank's query heads use its own key
    heads if the number of ranks divides both. Vectors that the predicate of sp::masked_attention indexes, "b row0, b
    col0", are read in full by every rank. Their batch is that of q without a head dim, or its flattened leading dims.
    Vectors that the score indexes by query head have the dim "h", as have sinks. Tables of a score are read in full.
    """
    leading, extent = _leading_names(call)
    batch = leading[:1] if len(leading) <= 2 else ("batch",)
    vectors = [x for name in ("rows", "cols", "pieces") for x in call.get(name) or ()]
    masks: list[Dims] = [(*batch, f"vector{i}") for i in range(len(vectors))]
    masks += [("h",) for _ in call.get("heads") or ()]
    masks += [(*leading, "q", "k")] if call["attn_mask"] is not None else []
    masks += [("h",)] if call.get("sinks") is not None else []
    shapes = [node_shape(x) for x in call.get("tables") or ()]
    masks += [tuple(f"table{i}_{d}" for d in range(len(shape))) for i, shape in enumerate(shapes)]
    dims = (*((*leading, *tail) for tail in (("q", "d"), ("k", "d"), ("k", "e"))), *masks)
    operands = tuple(
        align_names(call.shape(i), [extent.get(f, 1) for f in names], names) for i, names in enumerate(dims)
    )
    whole = {f: "whole" for names in operands[3:] for f in names if f and f not in (*leading, "q", "k")}
    wide, lost = ("out", {"e": "whole"}) if call.get("lse") else ("e", dict[str, str]())
    kinds = {"k": "attend", "d": "whole"} | lost | ({"q": "attend"} if depends_on_query(call) else {}) | whole
    return BoundRule(operands, ((*leading, "q", wide),), kinds, masks=tuple(range(3, max(4, len(operands)))))


def _leading_names(call: OpCall) -> tuple[Dims, dict[str, Size]]:
    """Return the names of the dims before those of q and k, which may broadcast, and the broadcast sizes."""
    results = call.result_shapes()[0]
    depth = len(results) - 2
    leading: Dims = tuple("h" if i == depth - 1 else f"b{depth - 2 - i}" for i in range(depth))
    return leading, {**dict(zip(leading, results)), "q": call.shape(0)[-2], "k": call.shape(1)[-2]}


def sharded_attention_rule(call: OpCall) -> BoundRule:
    """Return "b h q d, b g k d, b g k e -> b h q e"; masks, vectors and a seed are read in full.

    This is the rule of a strategy's op, registered together with the strategy.
    """
    queries = Shard(SEQUENCE, call_frame(call, "q_frame")[0])
    keys: Placement = Replicate(partial_grad=True)
    if len(call["k_frame"]):
        keys = Shard(SEQUENCE, call_frame(call, "k_frame")[0])
    others = call.operands[3:]
    learned = [x for x in (call["mask"], call["sinks"], *call["tables"]) if x is not None]
    placed = (queries, keys, keys, *(Replicate(partial_grad=any(x is y for y in learned)) for x in others))
    named: tuple[Dims, ...] = (("b", "h", "q", "d"), ("b", "g", "k", "d"), ("b", "g", "k", "e"))
    rest = tuple(tuple(f"{i}.{d}" for d in range(call.ndim(i))) for i in range(3, len(call.operands)))
    wide, more = ("out", ("e",)) if call["lse"] else ("e", ())
    lost = {f: "whole" for dims in (("g", "k", "d", *more), *rest) for f in dims}
    return BoundRule(
        (*named, *rest), (("b", "h", "q", wide),), lost, operand_placements=placed, result_placements=queries
    )
