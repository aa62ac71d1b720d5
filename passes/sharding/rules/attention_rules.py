"""Rules of fused attention ops, and of a strategy's op, which contains the exchanges of keys.

A rule names the dims of the operands and results of a call; the names are its factors. "b", "h", "g": batch, query
heads, key heads. "q", "k": rows of queries and of keys. "d", "e": last dims of q and k, and of v. A factor of kind
"attend" is mixed by attention: a strategy replaces the call if it is sharded. One of kind "replicate" is gathered
before the call. Others pass: they remain sharded.

A strategy is an algorithm for attention on shards, such as a ring of ranks. Its op has frames as arguments, which
describe how the rows of q and k are distributed over the ranks. The predicate of a mask is its condition in q and k; it
may index vectors, such as document ids, and a score function may index tables. An op with log-sum-exps returns the
log-sum-exp of each row in the result's last dim.
"""

from __future__ import annotations

from sp_compile.lowering.attention.op_args import SEQUENCE
from sp_compile.passes.graph.call import OpCall, node_shape
from sp_compile.passes.graph.sizes import Size
from sp_compile.passes.sharding.attention_axes import ATTENTION, has_query_position
from sp_compile.passes.sharding.placement import Placement, Replicate, Shard
from sp_compile.passes.sharding.rule import BoundRule, Dims, register_rule_function

from ._build import align_names, factor_names
from .exchange_rules import call_frame


@register_rule_function(*ATTENTION)
def _attention_rule(call: OpCall) -> BoundRule:
    """Return the rule of attention on q, k, v and a mask: "b h q d, b h k d, b h k e, b h q k -> b h q e", attend="k".

    If the mask depends on the query position, attend="q k". A strategy replaces a call if one of these is sharded.
    Operands after q, k and v are `masks`: they remain replicated if they are.

    There may be any number of leading dims (batch and heads), which may broadcast. With enable_gqa, a rank's query
    heads use its own key heads if the number of ranks divides both. The condition of sp::masked_attention reads
    vectors, such as document ids: `rows` at the query, `cols` at the key (`pieces` are their runs of equal values). Its
    score function reads `tables`, and `heads`, one value per head. All of these except `heads` are gathered.
    """
    leading, sizes = _leading_names_and_sizes(call)
    all_names = ((*leading, "q", "d"), (*leading, "k", "d"), (*leading, "k", "e"), *_other_operand_names(call, leading))
    # A dim of size 1 that broadcasts to a larger one gets the name "". Dims without a size in `sizes` do not broadcast.
    operands = tuple(
        align_names(call.shape(i), [sizes.get(f, 1) for f in names], names) for i, names in enumerate(all_names)
    )
    kinds, last = {"k": "attend", "d": "replicate"}, "e"
    if call.get("lse"):  # the last dim of the result also has the log-sum-exp, so it is not that of v
        kinds["e"], last = "replicate", "out"
    if has_query_position(call):
        kinds["q"] = "attend"
    kinds |= {f: "replicate" for names in operands[3:] for f in names if f and f not in (*leading, "q", "k")}
    result = (*leading, "q", last)
    # (3,) even without an operand 3, so that the text of the rule does not depend on the mask.
    return BoundRule(operands, (result,), kinds, masks=tuple(range(3, max(4, len(operands)))))


def _other_operand_names(call: OpCall, leading: Dims) -> list[Dims]:
    """Return the names of the dims of the operands after q, k and v, in the order of the schema."""
    # Vectors (batch, rows) have one batch dim; of several batch dims of q it is the flattened one, with another name.
    batch = leading[:1] if len(leading) <= 2 else ("batch",)
    vectors = [x for name in ("rows", "cols", "pieces") for x in call.get(name) or ()]
    others: list[Dims] = [(*batch, f"vector{i}") for i in range(len(vectors))]
    others += [("h",) for _ in call.get("heads") or ()]
    others += [(*leading, "q", "k")] if call["attn_mask"] is not None else []
    others += [("h",)] if call.get("sinks") is not None else []
    table_ndims = [len(node_shape(x)) for x in call.get("tables") or ()]
    return others + [factor_names(ndim, f"table{i}_") for i, ndim in enumerate(table_ndims)]


def _leading_names_and_sizes(call: OpCall) -> tuple[Dims, dict[str, Size]]:
    """Return the names of the leading dims of attention, (.., "b1", "b0", "h"), and the sizes of dims by name.

    The sizes are those of the leading dims in the result, and "q" and "k", the numbers of queries and keys. A leading
    dim of an operand may have size 1, and then broadcasts.
    """
    result_shape = call.result_shapes()[0]
    ndim = len(result_shape) - 2
    leading: Dims = tuple("h" if i == ndim - 1 else f"b{ndim - 2 - i}" for i in range(ndim))
    return leading, {**dict(zip(leading, result_shape)), "q": call.shape(0)[-2], "k": call.shape(1)[-2]}


def sharded_attention_rule(call: OpCall) -> BoundRule:
    """Return the rule of an op that runs attention on shards, such as sp::ring_attention.

    It is "b h q d, b g k d, b g k e -> b h q e" with fixed placements, so that propagation does not choose them. q and
    the result are sharded as the argument `q_frame` describes; k and v as in `k_frame`, or replicated if it is empty.
    All other operands are replicated, except a mask with `mask_rows`, which is sharded as q. Gradients of learned
    replicated operands are partial: each rank has a summand.
    """
    queries = Shard(SEQUENCE, call_frame(call, "q_frame"))
    keys: Placement = Replicate(partial_grad=True)
    if len(call["k_frame"]):
        keys = Shard(SEQUENCE, call_frame(call, "k_frame"))
    learned = [x for x in (call["mask"], call["sinks"], *call["tables"]) if x is not None]
    others: list[Placement] = [Replicate(partial_grad=any(x is y for y in learned)) for x in call.operands[3:]]
    attended: tuple[Dims, ...] = (("b", "h", "q", "d"), ("b", "g", "k", "d"), ("b", "g", "k", "e"))
    names_of_others = [factor_names(call.ndim(i), f"{i}.") for i in range(3, len(call.operands))]
    if call.get("mask_rows"):  # the mask is the first of the other operands
        others[0], names_of_others[0] = queries, (*names_of_others[0][:SEQUENCE], "q", "keys")
    result = ("b", "h", "q", "out" if call["lse"] else "e")
    # Dims that the result does not have are "replicate"; the fixed placements of the operands take precedence over
    # kinds.
    vanishing = [f for names in (("g", "k", "d", "e"), *names_of_others) for f in names if f not in result]
    return BoundRule(
        (*attended, *names_of_others),
        (result,),
        dict.fromkeys(vanishing, "replicate"),
        masks=(3,) if call["mask"] is not None else (),  # number of the operand
        operand_placements=(queries, keys, keys, *others),
        result_placements=queries,
    )
