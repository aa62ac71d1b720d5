"""Define the bases of a strategy's pass: `AttentionPass`, and `ShardAttention`, which emits one op.

    q: f32[B, H, S, D]  k, v: f32[B, Hkv, T, D]
    scaled_dot_product_attention(q, k, v, mask, ...)      or sp::masked_attention, whose mask is a predicate
    ->  sp::<its op>(q, k, v, mask, rows, cols, sizes, predicate, ..., q_frame, k_frame, n, group, ...)

`is_causal` becomes the predicate "k <= q". It may index vectors, by query (`rows`) and by key (`cols`), whose runs of
equal values are `pieces`, and read `sizes`. A score function `score` reads `heads` (a value per head) and `tables`.
Operands that do not have four dims are reshaped around the op. An op that gathers keys itself may have the argument
`orders`, the order of their rows in a balanced layout, and with `splits_mask` has the argument `mask_rows`. A frame is
the list of sizes that describes the rows of a sharded sequence on each rank.

A pass claims an attention (`refusal` returns None) and then rewrites it. A refusal is the reason not to, as text of the
report. A choice (`node_info(node).choice`) is the Candidate that `ChooseAttention` has selected for the node.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch.fx import Node

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.ranks import STRATEGIES, Ranks
from sp_compile.lowering.masks.score import may_have_fills
from sp_compile.passes.cost.attention_cost import Strategy, attention_strategies
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.sizes import Size, as_sizes, is_divisor, is_same_shape, is_same_size, size_product
from sp_compile.passes.sharding.attention_axes import fill_nodes, has_absorbing_sinks, mask_predicate
from sp_compile.passes.sharding.placement import REPLICATE, Demand, PlacementPlan, Shard
from sp_compile.passes.sharding.rule import RULES, RuleFunction
from sp_compile.passes.sharding.rules.attention_rules import sharded_attention_rule
from sp_compile.passes.strategies.discharge import DemandPass

aten = torch.ops.aten
SEQUENCE_FROM_END = -2


class AttentionPass(DemandPass):
    """Pass of one strategy, which claims the attention that was chosen for the strategy, and shards it."""

    kinds = frozenset({"attend"})
    op: Any = None  # op that replaces an attention, if any
    merges_blocks = True  # results over disjoint keys are merged by their log-sum-exps
    is_explained = False  # reports by itself why a requested strategy is not possible
    is_default = False  # also claims all remaining attention, so it runs last

    @classmethod
    def is_used_on_mesh(cls, ranks: Ranks) -> bool:
        """Return True if the strategy is used on a mesh of this shape, unless the user requests another one by name."""
        return False

    def is_chosen(self, node: Node) -> bool:
        """Return True if this strategy may claim the attention.

        `ChooseAttention` has chosen it for the node, or has made no choice and the option `attention` allows it. The
        default strategy may claim any attention that remains.
        """
        choice = node_info(node).choice
        strategy = choice.kind if choice is not None else self.context.options.attention
        return self.is_default or strategy in ("auto", self.name)


def register_strategy(strategy: Strategy, rule: RuleFunction = sharded_attention_rule) -> ExitStack:
    """Register a strategy permanently, or for the block of a `with` statement.

    Its name becomes a value of the option `attention`. "auto" considers it, and `explain` shows its cost and traffic.

    Args:
        strategy: The strategy.
        rule: The sharding rule of its op.

    Returns:
        A context manager that removes the strategy on exit.

    Raises:
        SpError: The name is taken, or the pass has another name.
    """
    # The default pass (of gathered attention) may run for strategies of other names, too.
    if strategy.rewrite.name != strategy.name and not strategy.rewrite.is_default:
        name = strategy.rewrite.name
        raise SpError("SP904", f"strategy.rewrite.name: expected {strategy.name!r}, the strategy's name, got {name!r}.")
    added = STRATEGIES.register(strategy.name, strategy)
    if strategy.op is not None:
        added.enter_context(RULES.register(strategy.op, rule))
    return added


def attention_passes() -> list[type[AttentionPass]]:
    """Return the passes of all strategies, in the order in which they run."""
    passes = [strategy.rewrite for strategy in attention_strategies()]
    return sorted(passes, key=lambda entry: entry.is_default)  # the default one last


class ShardAttention(AttentionPass):
    """Pass for attention with sharded queries; subclasses define the op and its arguments."""

    moves_keys = True  # keys are exchanged in blocks, so they must be sharded
    splits_mask = False  # the op has the argument `mask_rows`, with which a mask is sharded as the queries

    def refusal(self, node: Node, demands: list[Demand]) -> str | None:
        """Return None to claim the demands of a node, else the reason ("" adds no line to the report)."""
        if not self.is_chosen(node):
            return ""
        why = self._refusal(OpCall(node))
        if why is None:
            return None
        # The report has the reason only if the user requested this strategy by name.
        return why if self.context.options.attention == self.name else ""

    def _refusal(self, call: OpCall) -> str | None:
        """Return the reason, for the report, why the strategy cannot shard an attention, or None if it can."""
        query, key, value = (sequence_shard(self.plan, call, i) for i in range(3))
        if query is None:
            return "its queries are not sharded along their sequence"
        if self.moves_keys and (key is None or value is None or not key.has_same_positions(value)):
            return "its keys and values are not sharded equally along their sequence"
        query_heads, key_heads, _ = head_counts(call)
        if call.get("enable_gqa") and not is_divisor(key_heads, query_heads):
            return f"{key_heads} key heads do not divide {query_heads} query heads"
        vectors = [*call.get("rows", []), *call.get("cols", [])]  # that the mask indexes: (batch, length)
        if call.ndim(0) != 4 and any(as_sizes(v.meta["val"].shape)[0] != 1 for v in vectors):
            return "its mask differs between batch entries, and its operands have no head dim"
        if has_broadcast_heads(call):
            return "its heads broadcast"
        if self.merges_blocks and has_fills(call):
            return "its mask may contain large finite numbers, whose log-sum-exps cannot be merged (use -inf or bools)"
        return self.unsupported_reason(call)

    def unsupported_reason(self, call: OpCall) -> str | None:
        """Return the reason why this strategy does not support the call, or None; strategies override it."""
        return None

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        """Replace an attention by the op of the strategy on shards; other than four dims are reshaped around it."""
        call, value, ranks = OpCall(node), node.meta["val"], self.context.ranks
        shape = as_sizes(value.shape)
        query, key = (sequence_shard(self.plan, call, i) for i in range(2))
        assert query is not None
        q_frame = self.sizes.list(query.frame_arg())
        k_frame = self.sizes.list(key.frame_arg()) if key is not None else []  # []: every rank has all keys
        needs_zigzag_exchange = self._needs_zigzag_exchange(node)
        with self.graph.inserting_before(node):
            batch = shape[:-3]
            qkv = [self._to_four_dims(x, batch, node) for x in call.operands[:3]]
            scores = self._score_arguments(call, batch, node)
            frames = (q_frame, k_frame, ranks.n, ranks.group)
            args = (*qkv, *scores, *frames, needs_zigzag_exchange, *self.extra_arguments(node))
            options = {"mask_rows": True} if self.splits_mask and self._has_mask_rows(call) else None
            # The value of a node with four dims is reused, as it has the strides of the original attention, to which
            # `localize/memory_order.py` restores gathered values.
            q, v = qkv[0].meta["val"], qkv[2].meta["val"]
            out = value if value.ndim == 4 else q.new_empty((*q.shape[:3], v.shape[3]), dtype=value.dtype)
            new = self.emit(self.op, args, out, node, options)
            self.note(new, self.describe(node))
            new = self.reshape(new, shape, node)
        self.replace(node, new)

    def _has_mask_rows(self, call: OpCall) -> bool:
        """Return True if each rank has only the rows of the mask for its queries, or can compute only these.

        It can if an op computes the mask on every rank, and the mask has a row for each query.
        """
        mask = call.get("attn_mask")
        if mask is None:
            return False
        if mask_shard(self.plan, call) is not None:
            return True
        if mask.op != "call_function" or self.plan.of(mask) != REPLICATE:
            return False
        return call.ndim("attn_mask") > 1 and not is_same_size(call.shape("attn_mask")[SEQUENCE_FROM_END], 1)

    def extra_arguments(self, node: Node) -> tuple[Any, ...]:
        """Return the arguments that only the op of this strategy has, after those of all strategies."""
        return ()

    def describe(self, node: Node) -> str:
        """Return the line of the report for a rewritten attention."""
        return ""

    def _needs_zigzag_exchange(self, node: Node) -> bool:
        """Return the argument `balance`: True if the op exchanges rows to zigzag order before it runs, and back."""
        choice = node_info(node).choice
        return choice is not None and bool(choice.relayout)

    def _to_four_dims(self, x: Node, batch: tuple[Size, ...], node: Node) -> Node:
        """Return an operand with four dims: (..., H, S, D) is expanded to all batch dims, and these are flattened.

        Without a head dim, H is 1.

        Args:
            x: The operand.
            batch: The batch dims of the result.
            node: The attention, whose metadata the new nodes get.
        """
        shape = as_sizes(x.meta["val"].shape)
        heads_rows_width = ((1,) * 3 + shape)[-3:]  # (H, S, D), with 1 for a dim that x does not have
        full = (*batch, *heads_rows_width)
        x = self.reshape(x, (1,) * (len(full) - len(shape)) + shape, node)
        if not is_same_shape(as_sizes(x.meta["val"].shape), full):
            x = self.compute(aten.expand.default, (x, self.sizes.list(full)), node)
        return self.reshape(x, (size_product(batch), *heads_rows_width), node)

    def _score_arguments(self, call: OpCall, batch: tuple[Size, ...], node: Node) -> tuple[Any, ...]:
        """Return the arguments of the op that describe mask and scores, in its order.

        These are mask, rows, cols, pieces, sizes, predicate, seed, dropout_p, scale, score, heads, tables, sinks, lse.
        """
        mask = call.get("attn_mask")
        if mask is not None:
            mask = self._reshape_mask(mask, batch, node)
        lookups = [call.get(name) or [] for name in ("rows", "cols", "pieces", "sizes")]  # what the predicate reads
        predicate = mask_predicate(call) or ""
        seed = None  # with dropout, the op draws one
        dropout = (seed, call["dropout_p"])
        score, heads, tables = call.get("score") or "", call.get("heads") or [], call.get("tables") or []
        score_arguments = (call["scale"], score, heads, tables, call.get("sinks"))
        return (mask, *lookups, predicate, *dropout, *score_arguments, bool(call.get("lse")))

    def _reshape_mask(self, mask: Node, batch: tuple[Size, ...], node: Node) -> Node:
        """Return the mask with four dims (B, H, S, T), of which those of size 1 broadcast.

        If several batch dims are flattened to B, the mask is expanded to all of them first.
        """
        shape = as_sizes(mask.meta["val"].shape)
        if len(batch) > 1 and len(shape) > 3:
            return self._to_four_dims(mask, batch, node)
        shape = shape[-4:]
        return self.reshape(mask, (1,) * (4 - len(shape)) + shape, node)


def head_counts(call: OpCall) -> list[Size]:
    """Return the numbers of query heads, key heads and value heads; 1 for an operand without a head dim."""
    return [call.shape(i)[-3] if call.ndim(i) > 2 else 1 for i in range(3)]


def has_broadcast_heads(call: OpCall) -> bool:
    """Return True if query or value heads broadcast, which the ops do not support.

    A single key head is not such a case: it is the one group of grouped heads.
    """
    if call.ndim(0) < 3:
        return False
    query_heads, key_heads, value_heads = head_counts(call)
    result_heads = as_sizes(call.node.meta["val"].shape)[-3]
    return key_heads != value_heads or query_heads != result_heads


def has_fills(call: OpCall) -> bool:
    """Return True if a float mask or a score function may add large finite numbers in place of -inf.

    Block results of rows that are masked by such numbers cannot be merged by their log-sum-exps.
    """
    mask = call.get("attn_mask")
    if may_have_fills(call.get("score") or ""):
        return True
    is_float_mask = mask is not None and mask.meta["val"].is_floating_point()
    # A row whose keys all have fills would have uniform weights. With learned sinks (`has_absorbing_sinks`), the sink
    # has all of the weight of such a row, so that a fill has the effect of -inf.
    if not is_float_mask or has_absorbing_sinks(call):
        return False
    return mask in fill_nodes(call.node.graph.owning_module)


def mask_shard(plan: PlacementPlan, call: OpCall) -> Shard | None:
    """Return the shard of a tensor mask whose rows are sharded as the queries of the attention, else None.

    Args:
        plan: The placements.
        call: The attention.
    """
    mask, query = call.get("attn_mask"), sequence_shard(plan, call, 0)
    have = plan.of(mask) if mask is not None else None
    if query is None or not isinstance(have, Shard) or have.dim != call.ndim("attn_mask") + SEQUENCE_FROM_END:
        return None
    return have if have.has_same_positions(query) else None


def sequence_shard(plan: PlacementPlan, call: OpCall, operand: int) -> Shard | None:
    """Return the shard of an operand of attention.

    Args:
        plan: The placements.
        call: The attention.
        operand: 0, 1 or 2 for q, k or v.

    Returns:
        The shard if the operand is sharded along its sequence only, else None.
    """
    have = plan.of(call.operands[operand])
    if not isinstance(have, Shard) or have.dim != call.ndim(operand) + SEQUENCE_FROM_END:
        return None
    return have if have.is_only_factor else None
