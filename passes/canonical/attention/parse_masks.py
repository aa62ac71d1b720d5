"""Replace masks of positions, lengths, padding or documents by predicates, without an S x S tensor.

    mask = arange(S) <= arange(S)[:, None]                  sdpa(q, k, v, mask)  ->  sdpa(q, k, v, is_causal=True)
    mask = padding[:, None, None] & (i - j < 4) & (j <= i)  sdpa(q, k, v, mask)  ->  sp.masked_attention(q, k, v,
        rows=[], cols=[padding], sizes=[], predicate="(k <= q) & (-k + q < 4) & Ne(col0, 0)")
    bias = slopes * (j - i)                  sdpa(q, k, v, bias)  ->  sp.masked_attention(q, k, v, ...,
        score=s + head0*(k - q), heads=[slopes])

A mask is parsed to a condition over the indices of batch entry, head, query and key (`elements.py`). Its *leaves* are
tensors of data, such as `padding`, which become vectors of shape (B or 1, Q) or (B or 1, K). Bytes moved: none.

Unchanged (masks remain data): biases other than those of `biases.py`, masks that differ between heads, and masks with
data for pairs of query and key. Finite fills like finfo.min are unchanged too, unless sinks absorb filled rows or every
query provably attends to some key: a row of fills attends to all keys equally.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import sympy
import torch
from sympy import And
from sympy.core.function import AppliedUndef
from torch.fx import Graph, GraphModule, Node

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.masks.predicate import check_operations
from sp_compile.passes import base
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, node_shape
from sp_compile.passes.graph.sizes import Size, as_size, is_same_size, size_product
from sp_compile.passes.sharding.attention_axes import attention_nodes, has_absorbing_sinks

from . import element_ops  # noqa: F401  (registers the handlers of element ops)
from .biases import BiasReader
from .elements import Coords, Element, ElementReader, NotSymbolic, broadcast_coords
from .proofs import BATCH_INDEX, HEAD_INDEX, INDICES, KEY_INDEX, QUERY_INDEX, Boolean, IndexBox
from .score_functions import SCORE, ScoreOperands, register_expression

aten, sp = torch.ops.aten, torch.ops.sp
MAX_FILL = -1e9  # fills up to this value remove all of a key's weight, unless all keys are filled
CAUSAL_CONDITION = sympy.Le(KEY_INDEX, QUERY_INDEX)


@dataclass
class AttentionMask:
    """Mask as a condition over the indices b, h, q and k, such as (k <= q) & Ne(leaf_padding(b, k), 0).

    A leaf is a tensor of data, here `padding`, which the condition reads as a function of indices.
    """

    allowed: Boolean  # condition under which a query attends to a key
    box: IndexBox  # extents of the indices, for proofs
    leaves: dict[str, Node]  # values without an expression, by function name
    extent: dict[sympy.Symbol, Size]  # size of the scores along each index, 1 for an index that they lack


def try_parse_mask(node: Node, shape: tuple[Size, ...], absorbs_fills: bool = False) -> AttentionMask | None:
    """Return the result of `parse_mask`, or None if no predicate describes the mask."""
    try:
        return parse_mask(node, shape, absorbs_fills)
    except NotSymbolic:
        return None


def parse_mask(node: Node, shape: tuple[Size, ...], absorbs_fills: bool = False) -> AttentionMask:
    """Parse a mask tensor into the condition under which a query attends to a key.

    arange(S)[:, None] >= arange(S), for example, is the condition k <= q.

    Args:
        node: The mask, broadcastable to `shape`; bool, or floats that are added to the scores.
        shape: The shape of the scores, (B, H, Q, K) or (B, Q, K).
        absorbs_fills: True if fills, large negative numbers, have the effect of -inf even in a row of fills only; see
            `has_absorbing_sinks`.

    Returns:
        The mask.

    Raises:
        NotSymbolic: The mask has no predicate, with the reason.
    """
    reader, coords = _mask_coordinates(node, shape)
    allowed, has_finite_fills = _allowed_condition(reader.at(node, coords))
    return _checked_mask(reader, allowed, needs_key_per_query=has_finite_fills and not absorbs_fills)


def parse_bias(
    node: Node, shape: tuple[Size, ...], dtype: torch.dtype, absorbs_fills: bool = False
) -> tuple[AttentionMask, ScoreOperands] | None:
    """Parse a bias of queries and keys, or return None if no score function describes it.

    Args:
        node: The bias, broadcastable to `shape`.
        shape: The shape of the scores, (B, H, Q, K).
        dtype: The dtype of q.
        absorbs_fills: As in `parse_mask`.

    Returns:
        The mask, and the score function with its per-head vectors; or None.
    """
    # A bias with one row or column is no larger than the vectors that would replace it.
    if len(shape) != 4 or len(node_shape(node)) < 2 or any(s == 1 for s in node_shape(node)[-2:]):
        return None
    try:
        reader, coords = _mask_coordinates(node, shape)
        biases = BiasReader(reader, dtype, MAX_FILL)
        element = biases.at(node, coords)  # `finite`: masked scores get a large negative number, not -inf
        needs_key_per_query = element.finite and not absorbs_fills
        mask = _checked_mask(reader, element.allowed, needs_key_per_query)
        return mask, ScoreOperands(register_expression(SCORE + element.value), biases.heads)
    except (NotSymbolic, SpError):
        return None


def _mask_coordinates(node: Node, shape: tuple[Size, ...]) -> tuple[ElementReader, Coords]:
    """Return a reader of elements, and the coordinates at which the scores read a mask that broadcasts to them.

    For a mask (B, 1, 1, K), the coordinates are (b, 0, 0, k). Raises NotSymbolic if the numbers of dims do not fit.
    """
    mask_shape = node_shape(node)
    if len(shape) not in (3, 4) or len(mask_shape) > len(shape):
        raise NotSymbolic(f"scores of {len(shape)} dims, a mask of {len(mask_shape)}")
    indices = [index for index in INDICES if index != HEAD_INDEX or len(shape) == 4]  # one for each dim of the scores
    extent: dict[sympy.Symbol, Size] = {**dict.fromkeys(INDICES, 1), **dict(zip(indices, shape))}
    return ElementReader(IndexBox(extent), extent), broadcast_coords(node, tuple(indices))


def _checked_mask(reader: ElementReader, allowed: Boolean, needs_key_per_query: bool) -> AttentionMask:
    """Simplify a condition, and return it as a mask. Raises NotSymbolic if a predicate cannot express it.

    Args:
        reader: The reader that has derived the condition and recorded its leaves, the tensors of data in it.
        allowed: The condition under which a query attends to a key.
        needs_key_per_query: True if every query must provably attend to some key, since fills are finite.
    """
    allowed = reader.box.simplify(sympy.to_nnf(allowed, simplify=False))
    mask = AttentionMask(allowed, reader.box, reader.leaves, reader.sizes)
    if allowed == sympy.false:
        raise NotSymbolic("no query attends to any key")
    # Leaves may have a batch dim; the condition itself may not depend on b and h.
    without_leaves = allowed.xreplace({leaf: sympy.Integer(0) for leaf in allowed.atoms(AppliedUndef)})
    if without_leaves.free_symbols & {BATCH_INDEX, HEAD_INDEX}:
        raise NotSymbolic("it differs between heads or batches")
    if needs_key_per_query and not has_key_per_query(mask):
        raise NotSymbolic("its fills are finite, and not every query provably attends to some key")
    return mask


def intersect_masks(masks: Sequence[AttentionMask], shape: tuple[Size, ...]) -> AttentionMask:
    """Return the mask that allows what all masks allow; without masks, it allows all pairs of query and key.

    Args:
        masks: The masks.
        shape: The shape (B, H, Q, K) of the scores.

    Raises:
        NotSymbolic: It allows no pair, or differs between heads or batch entries.
    """
    extent = dict(zip(INDICES, shape))
    reader = ElementReader(IndexBox(extent), extent)  # reads nothing here, but `_checked_mask` needs its box
    reader.leaves = {name: leaf for mask in masks for name, leaf in mask.leaves.items()}
    # Other scores become -inf, not a finite fill, so that queries without keys are allowed.
    return _checked_mask(reader, And(*(mask.allowed for mask in masks)), needs_key_per_query=False)


def require_all_heads(mask: AttentionMask) -> AttentionMask:
    """Return the mask unchanged, or raise NotSymbolic if its condition differs between heads or batch entries."""
    _make_predicate(MaskPrinter(), mask)
    return mask


def _make_predicate(printer: MaskPrinter, mask: AttentionMask) -> Boolean:
    """Return the predicate of a mask: its condition, with a symbol row0, col0 or n0, ... for each leaf and size.

    Raises NotSymbolic if the condition needs the index of a head or a batch entry.

    Args:
        printer: An empty printer, which records the leaves and sizes.
        mask: The mask.
    """
    predicate = printer.rename_symbols(mask.allowed)
    if predicate.free_symbols & {BATCH_INDEX, HEAD_INDEX}:
        raise NotSymbolic("its condition on data differs between heads or batches")
    return predicate


def has_unfilled_key_per_query(node: Node, shape: tuple[Size, ...]) -> bool:
    """Return True if a bias provably adds 0 to some score of every query, and 0 or a negative number to the others.

    Its fills then remove weight as a mask of -inf does, because no row consists of fills only.
    """
    try:
        reader, coords = _mask_coordinates(node, shape)
        allowed, _ = _allowed_condition(reader.at(node, coords), max_fill=0)  # every negative number is a fill
        _checked_mask(reader, allowed, needs_key_per_query=True)
        return True
    except NotSymbolic:
        return False


def _allowed_condition(value: Element, max_fill: float = MAX_FILL) -> tuple[Boolean, bool]:
    """Return the condition under which attention is allowed, and whether the other scores get a finite fill.

    Args:
        value: The element of a mask: a condition, or pairs (condition, number that is added to the score).
        max_fill: The greatest number that is a fill.

    Raises:
        NotSymbolic: A number is neither 0 nor a fill.
    """
    if not isinstance(value, tuple):
        return value, False
    if not all(number == 0 or (number.is_number and number <= max_fill) for _, number in value):
        raise NotSymbolic(f"a bias of other numbers than 0 and fills from {MAX_FILL:g} down, such as -inf")
    # The numbers are distinct, so at most one case has the number 0.
    allowed = next((condition for condition, number in value if number == 0), sympy.false)
    return allowed, any(number.is_finite for _, number in value if number != 0)


def has_key_per_query(mask: AttentionMask) -> bool:
    """Return True if every query provably attends to some key: the one at its position, the first, or the last one.

    Then no row consists of fills only, so that finite fills have the effect of -inf.
    """
    num_queries, num_keys = (sympy.sympify(mask.extent[index]) for index in (QUERY_INDEX, KEY_INDEX))
    candidates = [sympy.Integer(0), num_keys - 1]
    if mask.box.is_nonnegative(num_keys - num_queries):  # every query has a key at its own position
        candidates.insert(0, QUERY_INDEX)
    return any(mask.box.simplify(mask.allowed.subs(KEY_INDEX, key)) == sympy.true for key in candidates)


@dataclass
class MaskPrinter:
    """Printer of a predicate, which names leaves and sizes by symbols and collects them as operands."""

    rows: list[AppliedUndef] = field(default_factory=list)  # leaves of queries, named row0, row1, ...
    cols: list[AppliedUndef] = field(default_factory=list)  # leaves of keys, named col0, col1, ...
    sizes: list[sympy.Expr] = field(default_factory=list)  # sizes, named n0, n1, ...

    def rename_symbols(self, e: Any) -> Any:
        """Return the expression with a symbol row0, col0 or n0, ... for each leaf and size.

        leaf_doc(b, k) + S, for example, becomes col0 + n0.
        """
        if isinstance(e, AppliedUndef):  # a leaf
            leaves, prefix = (self.rows, "row") if e.has(QUERY_INDEX) else (self.cols, "col")
            return self._symbol(leaves, e, prefix)
        is_number_or_constant = not (e.args or e.is_Symbol)
        if e in INDICES or is_number_or_constant:
            return e
        # The terms without an index or a leaf, if they are not only a number, become one size: S + 3 -> n0.
        terms = sympy.Add.make_args(e) if isinstance(e, sympy.Expr) else ()
        size_terms = [term for term in terms if not term.has(*INDICES, AppliedUndef)]
        if any(not term.is_number for term in size_terms):
            index_terms = sympy.Add(*(term for term in terms if term not in size_terms))
            return self._symbol(self.sizes, sympy.Add(*size_terms), "n") + self.rename_symbols(index_terms)
        return e.func(*(self.rename_symbols(a) for a in e.args))

    def _symbol(self, values: list[Any], e: Any, prefix: str) -> sympy.Symbol:
        """Return the symbol for an expression: a prefix and its index in the list `values`, to which it is added."""
        if e not in values:
            values.append(e)
        return sympy.Symbol(f"{prefix}{values.index(e)}", integer=True)


@base.register_pass
class RewriteMasks(base.CanonicalPass):
    """Replacement of the masks of all attention in one graph."""

    requires = frozenset({"fused attention"})
    provides = frozenset({"canonical", "mask predicates"})

    def edit(self, graph: Graph) -> Self:
        """Bind the pass to a graph, with empty caches, so that layers with equal masks share work."""
        self.vectors: dict[tuple[Any, ...], Node] = {}  # (leaf, index, length) -> its vector
        self.masks: dict[tuple[Any, ...], AttentionMask | str] = {}  # key of `share_mask` -> mask, or why there is none
        # (bias, shape, dtype, absorbs_fills) -> result of `parse_bias`
        self.biases: dict[tuple[Any, ...], tuple[AttentionMask, ScoreOperands] | None] = {}
        return super().edit(graph)

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Replace the mask tensors of attention by predicates and score functions; return their number."""
        calls = {node: OpCall(node) for node in attention_nodes(gm)}
        masked = [n for n, call in calls.items() if call["attn_mask"] is not None and not call.get("predicate")]
        return sum(self._rewrite(node) for node in masked)

    def _rewrite(self, node: Node) -> bool:
        """Replace the mask tensor of an attention; return False if it remains, and report why if it is computed."""
        mask_tensor = OpCall(node)["attn_mask"]
        try:
            self._replace_mask(mask_tensor, node)
        except (NotSymbolic, SpError) as error:  # SpError: a size that the graph cannot compute from its inputs
            if mask_tensor.op == "call_function":
                self.note_refusal(mask_tensor, f"the mask remains a tensor: {error.cause}")
            return False
        return True

    def _replace_mask(self, mask_tensor: Node, node: Node) -> None:
        """Replace the mask tensor of an attention by a predicate, or by a score function if it is a bias.

        Raises NotSymbolic or SpError if the tensor remains.
        """
        call = OpCall(node)
        shapes = [call.shape(i) for i in range(3)]  # of q, k and v
        if call.get("is_causal") or not has_same_leading_dims(shapes, call["enable_gqa"]):
            raise NotSymbolic("q, k and v have different batch sizes or heads, or is_causal is also set")
        q_shape, k_shape, _ = shapes
        shape = (*q_shape[:-1], k_shape[-2])  # of the scores
        absorbs_fills = has_absorbing_sinks(call)
        key = (mask_tensor, shape, absorbs_fills)
        try:
            self.set_mask(node, self.share_mask(key, lambda: parse_mask(*key)))
        except NotSymbolic as error:
            if not self._replace_bias(mask_tensor, shape, absorbs_fills, node):
                raise error from None

    def _replace_bias(self, bias: Node, shape: tuple[Size, ...], absorbs_fills: bool, node: Node) -> bool:
        """Replace a bias of positions and heads by a score function; return False if that is not possible.

        Args:
            bias: The mask tensor of the attention.
            shape: The shape of the scores.
            absorbs_fills: As in `parse_mask`.
            node: The attention.
        """
        dtype = node.meta["val"].dtype
        key = (bias, shape, dtype, absorbs_fills)
        if key not in self.biases:
            self.biases[key] = parse_bias(*key)
        parsed_bias = self.biases[key]
        if parsed_bias is None or OpCall(node).get("score"):  # two score functions are not composed
            return False
        mask, score = parsed_bias
        _, num_heads, *_ = shape
        with self.graph.inserting_before(node):
            heads = [self._per_head_vector(self.cast(x, dtype, node), num_heads, node) for x in score.heads]
        self.set_mask(node, mask, replace(score, heads=heads))
        return True

    def _per_head_vector(self, x: Node, num_heads: Size, like: Node) -> Node:
        """Emit a vector with the number of each head, from one number per head or one for all heads, of any shape."""
        return self.expand(self.reshape(x, (size_product(node_shape(x)),), like), (num_heads,), like)

    def set_mask(self, node: Node, mask: AttentionMask, score: ScoreOperands | None = None) -> None:
        """Replace the mask tensor of an attention by a parsed mask: is_causal, no mask, or a predicate.

        Args:
            node: The attention: torch's op or sp.masked_attention.
            mask: The parsed mask.
            score: The new score function and the values that it reads; by default those of the call.

        Raises:
            NotSymbolic: No predicate describes the mask.
            SpError: The graph cannot compute a size from its inputs.
        """
        call = OpCall(node)
        if score is None:
            score = ScoreOperands(call.get("score") or "", call.get("heads") or [], call.get("tables") or [])
        options: dict[str, Any] = {"score": score.name, "heads": list(score.heads)} if score.name else {}
        if score.tables:
            options["tables"] = list(score.tables)
        if call.get("sinks") is not None:
            options["sinks"] = call["sinks"]
        if call.get("lse"):
            options["lse"] = True
        # torch's causal kernel returns NaN unless the scale is positive.
        is_causal = mask.allowed == CAUSAL_CONDITION and (call["scale"] is None or call["scale"] > 0)
        if options or not (is_causal or mask.allowed == sympy.true):  # torch's op has none of the options
            self._replace_by_predicate(node, call, mask, options)
            return
        causal = {"is_causal": True} if is_causal else {}
        node.args, node.kwargs = call.with_operands(call.operands[:3] + [None], **causal)
        self.drop(call["attn_mask"])

    def share_mask(self, key: tuple[Any, ...], parse: Callable[[], AttentionMask]) -> AttentionMask:
        """Return the result of `parse`, cached by the key, so that a mask is parsed once for all layers.

        Raises NotSymbolic, at each call, if parsing failed.
        """
        if key not in self.masks:
            try:
                self.masks[key] = parse()
            except (NotSymbolic, SpError) as error:
                self.masks[key] = error.cause  # the exception itself would keep every frame alive
        mask = self.masks[key]
        if isinstance(mask, str):
            raise NotSymbolic(mask)
        return mask

    def _replace_by_predicate(self, node: Node, call: OpCall, mask: AttentionMask, options: dict[str, Any]) -> None:
        """Replace an attention by sp.masked_attention with the mask as text, and its tensors of data as vectors.

        Args:
            node: The attention.
            call: Its arguments.
            mask: The mask.
            options: Keyword arguments of the new call.
        """
        rows, cols, sizes, predicate = self.emit_predicate(mask, node)
        args = (*call.operands[:3], rows, cols, sizes, predicate, call["dropout_p"], call["scale"], call["enable_gqa"])
        with self.graph.inserting_before(node):
            self.replace(node, self.emit(sp.masked_attention.default, args, node.meta["val"], node, options))

    def emit_predicate(self, mask: AttentionMask, like: Node) -> tuple[list[Node], list[Node], list[Any], str]:
        """Return rows, cols, sizes and the predicate of `sp.masked_attention` for a mask; emits them at the first call.

        Raises NotSymbolic if no predicate describes the mask. Raises SpError if the graph cannot compute a size, or if
        the predicate has an operation that ranks cannot evaluate.
        """
        printer = MaskPrinter()
        predicate = _make_predicate(printer, mask)
        check_operations(str(predicate))
        rows = [self._leaf_vector(mask, leaf, QUERY_INDEX, like) for leaf in printer.rows]
        cols = [self._leaf_vector(mask, leaf, KEY_INDEX, like) for leaf in printer.cols]
        sizes = self.sizes.list(as_size(e) for e in printer.sizes)
        return rows, cols, sizes, "" if predicate == sympy.true else str(predicate)

    def _leaf_vector(self, mask: AttentionMask, leaf: AppliedUndef, index: sympy.Symbol, like: Node) -> Node:
        """Return the values of a leaf for all queries or keys, a vector (B or 1, Q) or (B or 1, K).

        Args:
            mask: The mask.
            leaf: The leaf in the condition of the mask, such as leaf_padding(b, k + 1).
            index: q or k, over which the vector runs.
            like: The node whose metadata new nodes copy.
        """
        key = (leaf, index, mask.extent[index])
        if key not in self.vectors:
            source = mask.leaves[leaf.func.__name__]
            with self.insert_after(source):
                vector = self._slice_vector(source, leaf.args, index, mask.extent[index], like)
                if vector.meta["val"].dtype not in (torch.bool, torch.int64):  # the predicate is computed in int64
                    vector = self.compute(aten.to.dtype, (vector, torch.int64), like)
                self.vectors[key] = vector
        return self.vectors[key]

    def _slice_vector(self, source: Node, coords: Any, index: sympy.Symbol, length: Size, like: Node) -> Node:
        """Emit the elements of a tensor at coordinates for every value of an index.

        source[:, 2:K + 2] for the coordinates (b, k + 2), for example, if the index is k.

        Args:
            source: The tensor.
            coords: A coordinate per dim: `index + number`, the index of a batch entry, or a number.
            index: The index.
            length: The number of its values.
            like: The node whose metadata new nodes copy.

        Returns:
            (B or 1, length).
        """
        x = source
        # The last dim first, because a select removes its dim.
        for dim, (coord, extent) in reversed(list(enumerate(zip(coords, node_shape(source))))):
            if coord.has(index):
                if not is_same_size(length, extent):
                    start = as_size(coord - index)
                    x = self.compute(
                        aten.slice.Tensor, (x, dim, *self.sizes.list((start, as_size(start + length)))), like
                    )
            elif coord != BATCH_INDEX:
                x = self.compute(aten.select.int, (x, dim, self.sizes(as_size(coord))), like)
        # The index that each dim of x counts: (b, index), (index, b), or only one of them.
        dims = [BATCH_INDEX if c == BATCH_INDEX else index for c in coords if c.has(BATCH_INDEX, index)]
        if dims == [index, BATCH_INDEX]:
            return self.compute(aten.transpose.int, (x, 0, 1), like)
        if index not in dims:  # the values are equal for the whole index
            shape = node_shape(x) or (1,)
            return self.expand(self.reshape(x, (*shape, 1), like), (*shape, length), like)
        return x if len(dims) == 2 else self.compute(aten.unsqueeze.default, (x, 0), like)


def has_same_leading_dims(shapes: Sequence[tuple[Size, ...]], grouped: bool) -> bool:
    """Return True if q, k and v, of these shapes, have 3 or 4 dims and equal leading dims (batch, heads).

    With grouped heads, queries may have another number of heads than keys and values.
    """
    if len({len(shape) for shape in shapes}) != 1 or len(shapes[0]) not in (3, 4):
        return False
    q_leading, k_leading, v_leading = (shape[:-2] for shape in shapes)
    if k_leading != v_leading:
        return False
    return q_leading[:-1] == k_leading[:-1] if grouped else q_leading == k_leading
