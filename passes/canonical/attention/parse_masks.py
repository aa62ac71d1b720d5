"""Replace masks of positions, lengths, padding or documents by predicates, without an S x S tensor.

    mask = arange(S) <= arange(S)[:, None]                  sdpa(q, k, v, mask)  ->  sdpa(q, k, v, is_causal=True)
    mask = padding[:, None, None] & (i - j < 4) & (j <= i)  sdpa(q, k, v, mask)  ->  sp.masked_attention(q, k, v,
        rows=[], cols=[padding], sizes=[], predicate="(k <= q) & (-k + q < 4) & Ne(col0, 0)")
    bias = slopes * (j - i)                  sdpa(q, k, v, bias)  ->  sp.masked_attention(q, k, v, ...,
        score=s + head0*(k - q), heads=[slopes])

Part of canonicalize. Vectors have shape (B or 1, Q) and (B or 1, K). Bytes moved: none. Unchanged (masks remain data):
biases other than those of `biases.py`, masks that differ between heads, and masks with data for pairs of query and key.
Finite fills like finfo.min are unchanged too, unless sinks absorb filled rows or every query provably attends to some
key: a row of fills attends to all keys equally.
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
from sp_compile.passes import base
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, node_shape
from sp_compile.passes.graph.sizes import Size, is_same_shape, is_same_size, size_product
from sp_compile.passes.sharding.attention_axes import attention_nodes, masks_all_weight

from . import element_ops  # noqa: F401  (registers the handlers of element ops)
from .biases import BiasReader
from .elements import Element, ElementReader, NotSymbolic
from .proofs import BATCH_INDEX, HEAD_INDEX, INDICES, KEY_INDEX, QUERY_INDEX, Boolean, IndexBox
from .score_functions import SCORE, ScoreOperands, register_expression

aten, sp = torch.ops.aten, torch.ops.sp
MAX_FILL = -1e9  # fills up to this value remove all of a key's weight, unless all keys are filled
CAUSAL_TEXT = sympy.Le(KEY_INDEX, QUERY_INDEX)


@dataclass
class AttentionMask:
    """Mask as a condition over the indices; functions of coordinates represent the leaves."""

    allowed: Boolean  # condition under which a query attends to a key
    box: IndexBox  # extents of the indices, for proofs
    leaves: dict[str, Node]  # values without an expression, by function name
    extent: dict[sympy.Symbol, Size]  # size of the scores along each index


def try_parse_mask(node: Node, shape: tuple[Size, ...], settled: bool = False) -> AttentionMask | None:
    """Parse a mask, or return None if it has no predicate. See `parse_mask`."""
    try:
        return parse_mask(node, shape, settled)
    except NotSymbolic:
        return None


def parse_mask(node: Node, shape: tuple[Size, ...], settled: bool = False) -> AttentionMask:
    """Parse a mask into a condition over its indices.

    Args:
        node: The mask, broadcastable to `shape`; bool, or floats that are added to the scores.
        shape: The shape of the scores, (B, H, Q, K) or (B, Q, K).
        settled: True if finite fills remove all weight even from rows of fills; see `masks_all_weight`.

    Returns:
        The mask.

    Raises:
        NotSymbolic: The mask has no predicate, with the reason.
    """
    positions, coords = _mask_coordinates(node, shape)
    return _checked_mask(positions, *_allowed_condition(positions.at(node, coords)), settled)


def parse_bias(
    node: Node, shape: tuple[Size, ...], dtype: torch.dtype, settled: bool = False
) -> tuple[AttentionMask, ScoreOperands] | None:
    """Parse a bias of queries and keys, or return None if no score function describes it.

    Args:
        node: The bias, broadcastable to `shape`.
        shape: The shape of the scores, (B, H, Q, K).
        dtype: The dtype of q.
        settled: As in `parse_mask`.

    Returns:
        The mask, and the score function with its per-head vectors; or None.
    """
    if len(shape) != 4 or len(node_shape(node)) < 2 or any(s == 1 for s in node_shape(node)[-2:]):
        return None
    try:
        positions, coords = _mask_coordinates(node, shape)
        biases = BiasReader(positions, dtype, MAX_FILL)
        found = biases.at(node, coords)
        mask = _checked_mask(positions, found.allowed, found.finite, settled)
        return mask, ScoreOperands(register_expression(SCORE + found.value), biases.heads)
    except (NotSymbolic, SpError):
        return None


def _mask_coordinates(node: Node, shape: tuple[Size, ...]) -> tuple[ElementReader, list[Any]]:
    """Return a reader, and the coordinates of the mask for a query and a key."""
    own = node_shape(node)
    if len(shape) not in (3, 4) or len(own) > len(shape):
        raise NotSymbolic(f"scores of {len(shape)} dims, a mask of {len(own)}")
    indices = [i for i in INDICES if i != HEAD_INDEX or len(shape) == 4]
    extent: dict[sympy.Symbol, Size] = {**dict.fromkeys(INDICES, 1), **dict(zip(indices, shape))}
    coords = [0 if s == 1 else i for s, i in zip(own, indices[len(shape) - len(own) :])]
    return ElementReader(IndexBox(extent), extent), coords


def _checked_mask(positions: ElementReader, allowed: Boolean, finite: bool, settled: bool) -> AttentionMask:
    allowed = positions.box.simplify(sympy.to_nnf(allowed, simplify=False))
    mask = AttentionMask(allowed, positions.box, positions.leaves, positions.sizes)
    if allowed == sympy.false:
        raise NotSymbolic("no query attends to any key")
    without_leaves = allowed.xreplace({leaf: sympy.Integer(0) for leaf in allowed.atoms(AppliedUndef)})
    if without_leaves.free_symbols & {BATCH_INDEX, HEAD_INDEX}:
        raise NotSymbolic("it differs between heads or batches")
    if finite and not settled and not has_key_per_query(mask):
        raise NotSymbolic("its fills are finite, and no query provably attends to some key")
    return mask


def intersect_masks(masks: Sequence[AttentionMask], shape: tuple[Size, ...]) -> AttentionMask:
    """Return the intersection of masks of scores (B, H, Q, K); without masks, all pairs are allowed."""
    positions = ElementReader(IndexBox(extent := dict(zip(INDICES, shape))), extent)
    positions.leaves = {name: leaf for mask in masks for name, leaf in mask.leaves.items()}
    return _checked_mask(positions, And(*(mask.allowed for mask in masks)), False, False)


def require_all_heads(mask: AttentionMask) -> AttentionMask:
    """Return the mask. Raises NotSymbolic if its predicate needs the index of a head or a batch entry."""
    if MaskPrinter().to_text(mask.allowed).free_symbols & {BATCH_INDEX, HEAD_INDEX}:
        raise NotSymbolic("its condition on data differs between heads or batches")
    return mask


def keeps_a_key(node: Node, shape: tuple[Size, ...]) -> bool:
    """Return True if a bias provably adds 0 to some key of every query and at most 0 to the others."""
    try:
        positions, coords = _mask_coordinates(node, shape)
        _checked_mask(positions, _allowed_condition(positions.at(node, coords), 0)[0], True, False)
        return True
    except NotSymbolic:
        return False


def _allowed_condition(value: Element, least: float = MAX_FILL) -> tuple[Boolean, bool]:
    """Return where a query may attend, and whether the other scores get a finite fill."""
    if not isinstance(value, tuple):
        return value, False
    if not all(v == 0 or (v.is_number and v <= least) for _, v in value):
        raise NotSymbolic(f"a bias of other numbers than 0 and fills from {MAX_FILL:g} down, such as -inf")
    zero = [c for c, v in value if v == 0]
    return (zero[0] if zero else sympy.false), any(v.is_finite for _, v in value if v != 0)


def has_key_per_query(mask: AttentionMask) -> bool:
    """Return True if every query provably attends to its own, the first or the last key."""
    candidates = [sympy.Integer(0), mask.extent[KEY_INDEX] - 1]
    if mask.box.is_nonnegative(mask.extent[KEY_INDEX] - sympy.sympify(mask.extent[QUERY_INDEX])):
        candidates.insert(0, QUERY_INDEX)
    return any(mask.box.simplify(mask.allowed.subs(KEY_INDEX, key)) == sympy.true for key in candidates)


@dataclass
class MaskPrinter:
    """Printer of a predicate that collects the vectors and sizes of its symbols."""

    rows: list[AppliedUndef] = field(default_factory=list)  # leaves of queries, named row0, row1, ...
    cols: list[AppliedUndef] = field(default_factory=list)  # leaves of keys, named col0, col1, ...
    sizes: list[sympy.Expr] = field(default_factory=list)  # sizes, named n0, n1, ...

    def to_text(self, e: Any) -> Any:
        """Return the expression with row, col and n symbols for leaves and sizes."""
        if isinstance(e, AppliedUndef):
            vectors, name = (self.rows, "row") if e.has(QUERY_INDEX) else (self.cols, "col")
            return self._symbol(vectors, e, name)
        if e in INDICES or not (e.args or e.is_Symbol):
            return e
        fixed = [a for a in sympy.Add.make_args(e) if not a.is_number and not a.has(*INDICES, AppliedUndef)]
        if isinstance(e, sympy.Expr) and fixed:
            rest = [a for a in sympy.Add.make_args(e) if a not in fixed and not a.is_number]
            size = sympy.Add(*(a for a in sympy.Add.make_args(e) if a not in rest))
            return self._symbol(self.sizes, size, "n") + (self.to_text(sympy.Add(*rest)) if rest else 0)
        return e.func(*(self.to_text(a) for a in e.args))

    def _symbol(self, known: list[Any], e: Any, name: str) -> sympy.Symbol:
        if e not in known:
            known.append(e)
        return sympy.Symbol(f"{name}{known.index(e)}", integer=True)


@base.register_pass
class RewriteMasks(base.CanonicalPass):
    """Replacement of the masks of all attention in one graph."""

    requires = frozenset({"fused attention"})
    provides = frozenset({"canonical", "mask predicates"})

    def edit(self, graph: Graph) -> Self:
        """Start to edit a graph with empty caches."""
        self.vectors: dict[tuple[Any, ...], Node] = {}
        self.masks: dict[tuple[Any, ...], AttentionMask | str] = {}  # per form: the mask, or why there is none
        self.biases: dict[tuple[Any, ...], tuple[AttentionMask, ScoreOperands] | None] = {}
        return super().edit(graph)

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        found = [n for n in attention_nodes(gm) if OpCall(n)["attn_mask"] is not None]
        return sum(self._rewrite(n) for n in found if not OpCall(n).get("predicate"))

    def _rewrite(self, node: Node) -> bool:
        """Replace the mask if possible; report the reason against it for computed masks."""
        call = OpCall(node)
        data = call["attn_mask"]
        try:
            self._drop_mask(data, node, call)
        except (NotSymbolic, SpError) as why:  # SpError: a size that the graph cannot compute from its inputs
            if data.op == "call_function":
                self.note_refusal(data, f"the mask remains a tensor: {why.cause}")
            return False
        return True

    def _drop_mask(self, data: Node, node: Node, call: OpCall) -> None:
        """Replace the mask by a predicate. Raises NotSymbolic or SpError if the mask remains."""
        shapes = [call.shape(i) for i in range(3)]
        if call.get("is_causal") or not has_same_leading_dims(shapes, call["enable_gqa"]):
            raise NotSymbolic("q, k and v have different batch sizes or heads, or is_causal is also set")
        shape, settled = (*shapes[0][:-1], shapes[1][-2]), masks_all_weight(call)
        try:
            self.set_mask(node, self.share_form((data, shape, settled), lambda: parse_mask(data, shape, settled)))
        except NotSymbolic as why:
            if not self._rewrite_bias(data, shape, settled, node, call):
                raise why from None

    def _rewrite_bias(self, data: Node, shape: tuple[Size, ...], settled: bool, node: Node, call: OpCall) -> bool:
        """Replace a bias of positions and heads by a score function, and return True if that is possible."""
        dtype, key = node.meta["val"].dtype, (data, shape, settled)
        if key not in self.biases:
            self.biases[key] = parse_bias(data, shape, dtype, settled)
        found = self.biases[key]
        if found is None or call.get("score"):
            return False
        mask, score = found
        with self.graph.inserting_before(node):
            heads = [self._per_head_vector(self.cast(x, dtype, node), shape[1], node) for x in score.heads]
        self.set_mask(node, mask, replace(score, heads=heads))
        return True

    def _per_head_vector(self, x: Node, count: Size, like: Node) -> Node:
        """Return the number of each head, (count,)."""
        flat = self.reshape(x, (size_product(node_shape(x)),), like)
        if is_same_shape(node_shape(flat), (count,)):
            return flat
        return self.compute(aten.expand.default, (flat, [self.sizes(count)]), like)

    def set_mask(self, node: Node, mask: AttentionMask, score: ScoreOperands | None = None) -> None:
        """Replace the mask of an attention by a predicate.

        Args:
            node: The attention.
            mask: The mask.
            score: The new score function and its values; by default those of the call.

        Raises:
            NotSymbolic: No predicate describes the mask.
            SpError: The graph cannot compute a size from its inputs.
        """
        call = OpCall(node)
        if score is None:
            score = ScoreOperands(call.get("score") or "", call.get("heads") or [], call.get("tables") or [])
        scores: dict[str, Any] = {"score": score.name, "heads": list(score.heads)} if score.name else {}
        if score.tables:
            scores["tables"] = list(score.tables)
        if call.get("sinks") is not None:
            scores["sinks"] = call["sinks"]
        if call.get("lse"):
            scores["lse"] = True
        # torch's causal kernel returns NaN unless the scale is positive.
        kernel = mask.allowed == CAUSAL_TEXT and (call["scale"] is None or call["scale"] > 0)
        if (mask.allowed == sympy.true or kernel) and not scores:
            causal = {"is_causal": True} if kernel else {}
            node.args, node.kwargs = call.with_operands(call.operands[:3] + [None], **causal)
            self.drop(call["attn_mask"])
        else:
            self._predicate(node, call, mask, scores)

    def share_form(self, key: tuple[Any, ...], read: Callable[[], AttentionMask]) -> AttentionMask:
        """Return the mask with this key, parsed once for all layers. Raises NotSymbolic if parsing failed."""
        if key not in self.masks:
            try:
                self.masks[key] = read()
            except (NotSymbolic, SpError) as why:
                self.masks[key] = why.cause  # the exception itself would keep every frame alive
        mask = self.masks[key]
        if isinstance(mask, str):
            raise NotSymbolic(mask)
        return mask

    def _predicate(self, node: Node, call: OpCall, mask: AttentionMask, scores: dict[str, Any]) -> None:
        printer = MaskPrinter()
        predicate = printer.to_text(mask.allowed)
        if predicate.free_symbols & {BATCH_INDEX, HEAD_INDEX}:
            raise NotSymbolic("its condition on data differs between heads or batches")
        rows = [self._vector(mask, leaf, QUERY_INDEX, node) for leaf in printer.rows]
        cols = [self._vector(mask, leaf, KEY_INDEX, node) for leaf in printer.cols]
        extents = self.sizes.list(_print_size(e) for e in printer.sizes)
        with self.graph.inserting_before(node):
            options = [call[name] for name in ("dropout_p", "scale", "enable_gqa")]
            text = "" if predicate == sympy.true else str(predicate)
            args = (*call.operands[:3], rows, cols, extents, text, *options)
            fresh = self.emit(sp.masked_attention.default, args, node.meta["val"], node, scores)
        self.replace(node, fresh)

    def _vector(self, mask: AttentionMask, leaf: AppliedUndef, index: sympy.Symbol, like: Node) -> Node:
        """Return the values of a leaf at every index (and batch entry), as (B or 1, Q) or (B or 1, K)."""
        length = mask.extent[index]
        key = (leaf, index, length)
        if key not in self.vectors:
            source = mask.leaves[leaf.func.__name__]
            with self.insert_after(source):
                self.vectors[key] = self._slice_vector(source, leaf.args, index, length, like)
        return self.vectors[key]

    def _slice_vector(self, source: Node, coords: Any, index: sympy.Symbol, length: Size, like: Node) -> Node:
        x = source
        for dim, (coord, extent) in reversed(list(enumerate(zip(coords, node_shape(source))))):
            start = _print_size(coord - index) if coord.has(index) else None
            if start is not None and not is_same_size(length, extent):
                span = self.sizes.list((start, _print_size(start + length)))
                x = self.compute(aten.slice.Tensor, (x, dim, *span), like)
            elif start is None and coord != BATCH_INDEX:
                x = self.compute(aten.select.int, (x, dim, self.sizes(_print_size(coord))), like)
        indexed = [BATCH_INDEX if c == BATCH_INDEX else index for c in coords if c.has(BATCH_INDEX, index)]
        if indexed == [index, BATCH_INDEX]:
            return self.compute(aten.transpose.int, (x, 0, 1), like)
        if index not in indexed:
            shape = [self.sizes(extent) for extent in node_shape(x)] or [1]
            x = self.compute(aten.reshape.default, (x, [*shape, 1]), like)
            return self.compute(aten.expand.default, (x, [*shape, self.sizes(length)]), like)
        return x if len(indexed) == 2 else self.compute(aten.unsqueeze.default, (x, 0), like)


def has_same_leading_dims(shapes: Sequence[tuple[Size, ...]], grouped: bool) -> bool:
    """Return True if q, k and v have equal leading dims, except for grouped heads."""
    fronts = [s[:-2] for s in shapes]
    ranks = {len(s) for s in shapes}
    heads = fronts[1][-1:] == fronts[2][-1:] and (grouped or fronts[0][-1:] == fronts[1][-1:])
    return len(ranks) == 1 and ranks <= {3, 4} and heads and len({f[:-1] for f in fronts}) == 1


def _print_size(e: Any) -> Size:
    e = sympy.sympify(e)
    return int(e) if e.is_Integer else e
