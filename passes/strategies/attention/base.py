"""What a strategy's pass begins with: `AttentionPass`, or `ShardedAttention`, which puts one op in its place.

    q: f32[B, H, S, D]  k, v: f32[B, Hkv, T, D]
    scaled_dot_product_attention(q, k, v, mask, ...)      or sp::masked_attention, whose mask is a predicate
    ->  sp::<its op>(q, k, v, mask, rows, cols, sizes, predicate, ..., q_frame, k_frame, n, group, ...)

`is_causal` becomes the predicate "k <= q". Operands of other than four dims are reshaped around the op.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch.fx import Node

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.ranks import STRATEGIES, Ranks
from sp_compile.lowering.masks.score_program import may_have_fills
from sp_compile.passes.cost.attention_cost import Strategy, attention_strategies
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.sizes import Size, as_sizes, divides, is_same_shape, is_same_size, size_product
from sp_compile.passes.sharding.attention_axes import fill_nodes, mask_predicate, masks_all_weight
from sp_compile.passes.sharding.placement import Demand, PlacementPlan, Shard
from sp_compile.passes.sharding.rule import RULES, RuleFunction
from sp_compile.passes.sharding.rules.attention_rules import sharded_attention_rule
from sp_compile.passes.strategies.discharge import DemandPass

aten = torch.ops.aten
SEQUENCE_FROM_END = -2


class AttentionPass(DemandPass):
    """The pass of a strategy: claims attention that is to be split its way."""

    kinds = frozenset({"attend"})
    op: Any = None  # what it puts in an attention's place, if it does
    merges_blocks = True  # results over some keys and over others are merged by their log-sum-exps
    is_explained = False  # it says itself why it cannot do what was asked for
    is_default = False  # it also takes what all others leave, so its turn comes last

    @classmethod
    def on_mesh(cls, ranks: Ranks) -> bool:
        """Does a mesh of this shape ask for it?"""
        return False

    def is_chosen(self, node: Node) -> bool:
        """Is this pass the one for the node: by the cost model, because the user named it, or run by hand?"""
        choice = node_info(node).choice
        asked = choice.kind if choice is not None else self.job.attention
        return self.is_default or asked in ("auto", self.name)


def register_strategy(strategy: Strategy, rule: RuleFunction = sharded_attention_rule) -> ExitStack:
    """Make a strategy known to everything: for good, or `with register_strategy(...):` for a block. Its rule is that
    of its op.

    attention=<its name> is then an option, "auto" considers it, `explain` shows what it would cost and what it sends.
    Raises SpError: its name is taken, or its pass goes by another one.
    """
    if strategy.rewrite.name != strategy.name and not strategy.rewrite.is_default:
        name = strategy.rewrite.name
        raise SpError("SP904", f"strategy.rewrite.name: expected {strategy.name!r}, the strategy's name, got {name!r}.")
    added = STRATEGIES.register(strategy.name, strategy)
    if strategy.op is not None:
        added.enter_context(RULES.register(strategy.op, rule))
    return added


def attention_passes() -> list[type[AttentionPass]]:
    """Of all strategies, in the order in which they take their turns."""
    return sorted((s.rewrite for s in attention_strategies()), key=lambda p: p.is_default)


class ShardedAttention(AttentionPass):
    """Claims attention whose queries are sharded along their sequence. Subclasses name the op and its arguments."""

    moves_keys = True  # the keys are exchanged in blocks, so they must be shards themselves

    def refusal(self, node: Node, demands: list[Demand]) -> str | None:
        if not self.is_chosen(node):
            return ""
        why = self._refusal(OpCall(node))
        return why if why is None or self.job.attention == self.name else ""

    def _refusal(self, call: OpCall) -> str | None:
        query, key, value = (sequence_shard(self.plan, call, i) for i in range(3))
        if query is None:
            return "its queries are not sharded along their sequence"
        if self.moves_keys and not (key is not None and value is not None and key.has_same_positions(value)):
            return "its keys and values are not sharded alike along their sequence"
        if call.get("enable_gqa") and not divides(*head_counts(call)):
            return f"{head_counts(call)[0]} key heads do not divide {head_counts(call)[1]} query heads"
        vectors = [*call.get("rows", []), *call.get("cols", [])]
        if call.ndim(0) != 4 and any(as_sizes(v.meta["val"].shape)[0] != 1 for v in vectors):
            return "its mask differs from batch to batch, and its operands have no head dim"
        if has_broadcast_heads(call):
            return "its heads broadcast"
        if self.merges_blocks and has_fills(call):
            return "its mask may hold large finite numbers, whose log-sum-exps cannot be merged (use -inf or bools)"
        return self.unsupported_reason(call)

    def unsupported_reason(self, call: OpCall) -> str | None:
        """None, or why this way of sharding cannot take the call."""
        return None

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        call = OpCall(node)
        query, key = (sequence_shard(self.plan, call, i) for i in range(2))
        assert query is not None
        q_frame, k_frame = (self.sizes.list(shard.frame_arg()) if shard is not None else [] for shard in (query, key))
        with self.graph.inserting_before(node):
            batch = tuple(as_sizes(node.meta["val"].shape)[:-3])
            q, k, v = (self._to_four_dims(o, batch, node) for o in call.operands[:3])
            scores = self._score_arguments(call, batch, node)
            ranks = self.job.ranks
            args = (
                q,
                k,
                v,
                *scores,
                q_frame,
                k_frame,
                ranks.n,
                ranks.group,
                self._balance(node),
                *self.extra_arguments(node),
            )
            value = node.meta["val"]  # in whose layout gathered rows have to lie
            out = value if value.ndim == 4 else self._result(q, v, value.dtype)
            new = self.emit(self.op, args, out, node)
            self.note(new, self.describe(node))
            new = self.reshape(new, as_sizes(node.meta["val"].shape), node)
        self.replace(node, new)

    def extra_arguments(self, node: Node) -> tuple[Any, ...]:
        """The arguments that only this op has."""
        return ()

    def describe(self, node: Node) -> str:
        """The report's line."""
        return ""

    def _balance(self, node: Node) -> bool:
        choice = node_info(node).choice
        return bool(choice is not None and choice.relayout)

    def _result(self, q: Node, v: Node, dtype: torch.dtype) -> torch.Tensor:
        query, value = q.meta["val"], v.meta["val"]
        with query.fake_mode:
            return query.new_empty((*query.shape[:3], value.shape[3]), dtype=dtype)

    def _to_four_dims(self, x: Node, batch: tuple[Size, ...], node: Node) -> Node:
        """(..., H, S, D) with the batch dims of the result, expanded and flattened to (B, H, S, D)."""
        shape = as_sizes(x.meta["val"].shape)
        tail = ((1,) * 3 + shape)[-3:]
        full = (*batch, *tail)
        x = self.reshape(x, (1,) * (len(full) - len(shape)) + shape, node)
        if not is_same_shape(as_sizes(x.meta["val"].shape), full):
            x = self.compute(aten.expand.default, (x, self.sizes.list(full)), node)
        return self.reshape(x, (size_product(batch), *tail), node)

    def _score_arguments(self, call: OpCall, batch: tuple[Size, ...], node: Node) -> tuple[Any, ...]:
        """mask, rows, cols, pieces, sizes, predicate, seed, dropout_p, scale, score, heads, tables, sinks, lse."""
        predicate, mask = mask_predicate(call), call.get("attn_mask")
        lookups = [call.get(name) or [] for name in ("rows", "cols", "pieces", "sizes")]
        if mask is not None:
            mask = self._mask(mask, batch, node)
        score, heads = call.get("score") or "", call.get("heads") or []
        scores = None, call["dropout_p"], call["scale"], score, heads, call.get("tables") or []
        return mask, *lookups, predicate or "", *scores, call.get("sinks"), bool(call.get("lse"))

    def _mask(self, mask: Node, batch: tuple[Size, ...], node: Node) -> Node:
        """The mask in four dims; dims of size 1 keep broadcasting unless several batch dims become one."""
        shape = as_sizes(mask.meta["val"].shape)
        if len(batch) > 1 and len(shape) > 3:
            return self._to_four_dims(mask, batch, node)
        shape = shape[-4:]
        return self.reshape(mask, (1,) * (4 - len(shape)) + shape, node)


def head_counts(call: OpCall) -> tuple[Any, Any]:
    """How many key heads and query heads; one where there is no such dim."""
    keys, queries = (call.shape(i)[-3] if call.ndim(i) > 2 else 1 for i in (1, 0))
    return keys, queries


def has_broadcast_heads(call: OpCall) -> bool:
    """Do query or value heads broadcast? One key head for all query heads is grouped heads, and does not count."""
    if call.ndim(0) < 3:
        return False
    heads = [call.shape(i)[-3] if call.ndim(i) >= 3 else 1 for i in range(3)]
    return heads[1] != heads[2] or heads[0] != as_sizes(call.node.meta["val"].shape)[-3]


def has_fills(call: OpCall) -> bool:
    """Is there a mask of floats that may be large and finite, or does a program add such numbers to scores?"""
    mask, score = call.get("attn_mask"), call.get("score") or ""
    added = [x for x in (mask, *(call.get("tables") or ())) if x is not None and x.meta["val"].is_floating_point()]
    if may_have_fills(score):
        return True
    if masks_all_weight(call):
        return False
    return bool(added) and not fill_nodes(call.node.graph.owning_module).isdisjoint(added)


def sequence_shard(plan: PlacementPlan, call: OpCall, operand: int) -> Shard | None:
    """Where q, k or v (0, 1, 2) of an attention lies, if it is sharded along its sequence and on nothing else."""
    have = plan.of(call.operands[operand])
    if not isinstance(have, Shard) or have.dim != call.ndim(operand) + SEQUENCE_FROM_END:
        return None
    return have if is_same_size(have.outer, 1) and is_same_size(have.inner, 1) else None
