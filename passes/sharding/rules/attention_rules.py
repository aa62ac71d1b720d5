"""Rules of fused attention, and of attention with its own exchanges, whose frames define the placements."""

from __future__ import annotations

from sp_compile.lowering.attention.op_args import SEQUENCE
from sp_compile.passes.graph.call import OpCall, node_shape
from sp_compile.passes.graph.sizes import Size
from sp_compile.passes.sharding.attention_axes import ATTENTION, depends_on_query
from sp_compile.passes.sharding.placement import Placement, Replicate, Shard
from sp_compile.passes.sharding.rule import BoundRule, Dims, register_rule_function

from ._build import align_names, factor_names
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
    leading, sizes = _leading_names(call)
    batch = leading[:1] if len(leading) <= 2 else ("batch",)
    # names of the operands after q, k and v, in the order of the schema
    vectors = [x for name in ("rows", "cols", "pieces") for x in call.get(name) or ()]
    others: list[Dims] = [(*batch, f"vector{i}") for i in range(len(vectors))]
    others += [("h",) for _ in call.get("heads") or ()]
    others += [(*leading, "q", "k")] if call["attn_mask"] is not None else []
    others += [("h",)] if call.get("sinks") is not None else []
    table_ndims = [len(node_shape(x)) for x in call.get("tables") or ()]
    others += [factor_names(ndim, f"table{i}_") for i, ndim in enumerate(table_ndims)]
    all_names = ((*leading, "q", "d"), (*leading, "k", "d"), (*leading, "k", "e"), *others)
    operands = tuple(
        align_names(call.shape(i), [sizes.get(f, 1) for f in names], names) for i, names in enumerate(all_names)
    )
    kinds = {"k": "attend", "d": "whole"}
    if call.get("lse"):
        kinds["e"] = "whole"
    if depends_on_query(call):
        kinds["q"] = "attend"
    kinds |= {f: "whole" for names in operands[3:] for f in names if f and f not in (*leading, "q", "k")}
    result = (*leading, "q", "out" if call.get("lse") else "e")
    return BoundRule(operands, (result,), kinds, masks=tuple(range(3, max(4, len(operands)))))


def _leading_names(call: OpCall) -> tuple[Dims, dict[str, Size]]:
    """Return the names of the leading dims (.., b1, b0, h), and the sizes of these, q and k without broadcasting."""
    result_shape = call.result_shapes()[0]
    ndim = len(result_shape) - 2
    leading: Dims = tuple("h" if i == ndim - 1 else f"b{ndim - 2 - i}" for i in range(ndim))
    return leading, {**dict(zip(leading, result_shape)), "q": call.shape(0)[-2], "k": call.shape(1)[-2]}


def sharded_attention_rule(call: OpCall) -> BoundRule:
    """Return "b h q d, b g k d, b g k e -> b h q e"; masks, vectors and a seed are read in full.

    This is the rule of a strategy's op, registered together with the strategy.
    """
    queries = Shard(SEQUENCE, call_frame(call, "q_frame")[0])
    keys: Placement = Replicate(partial_grad=True)
    if len(call["k_frame"]):
        keys = Shard(SEQUENCE, call_frame(call, "k_frame")[0])
    learned = [x for x in (call["mask"], call["sinks"], *call["tables"]) if x is not None]
    others = [Replicate(partial_grad=any(x is y for y in learned)) for x in call.operands[3:]]
    attended: tuple[Dims, ...] = (("b", "h", "q", "d"), ("b", "g", "k", "d"), ("b", "g", "k", "e"))
    names_of_others = tuple(factor_names(call.ndim(i), f"{i}.") for i in range(3, len(call.operands)))
    result = ("b", "h", "q", "out" if call["lse"] else "e")
    vanishing = [f for names in (("g", "k", "d", "e"), *names_of_others) for f in names if f not in result]
    return BoundRule(
        (*attended, *names_of_others),
        (result,),
        dict.fromkeys(vanishing, "whole"),
        operand_placements=(queries, keys, keys, *others),
        result_placements=queries,
    )
