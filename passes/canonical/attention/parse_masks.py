"""Masks that are computed from positions, lengths, padding or documents become predicates; no S x S is left.

    mask = arange(S) <= arange(S)[:, None]                  sdpa(q, k, v, mask)  ->  sdpa(q, k, v, is_causal=True)
    mask = padding[:, None, None] & (i - j < 4) & (j <= i)  sdpa(q, k, v, mask)  ->  sp.masked_attention(q, k, v,
        rows=[], cols=[padding], sizes=[], predicate="(k <= q) & (-k + q < 4) & Ne(col0, 0)")
    bias = slopes * (j - i)                  sdpa(q, k, v, bias)  ->  sp.masked_attention(q, k, v, ...,
        score="s + head0*(k - q)", heads=[slopes])

Part of canonicalize. Vectors come as (B or 1, Q) and (B or 1, K). Bytes moved: none. Leaves alone (masks stay data):
biases but for those of `biases.py`, masks that differ between heads, masks whose data belongs to a query and a key at
once, and finite fills like finfo.min unless every query provably attends to some key, because a row of nothing but
fills attends to all alike, or unless sinks take such a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import sympy
import torch
from sympy import And
from sympy.core.function import AppliedUndef
from torch.fx import Graph, GraphModule, Node

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.masks.score import SCORE_NAME, check_score
from sp_compile.passes import base
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, node_shape
from sp_compile.passes.graph.sizes import Size, is_same_shape, is_same_size, size_product
from sp_compile.passes.sharding.attention_axes import attention_nodes, masks_all_weight

from . import element_ops  # noqa: F401  (registers how ops get their elements)
from .biases import BiasReader
from .elements import Element, ElementReader, NotSymbolic
from .proofs import BATCH_INDEX, HEAD_INDEX, INDICES, KEY_INDEX, QUERY_INDEX, Boolean, IndexBox

aten, sp = torch.ops.aten, torch.ops.sp
MAX_FILL = -1e9  # fills from here down leave nothing of a key's probability, unless all keys are filled
CAUSAL_TEXT = sympy.Le(KEY_INDEX, QUERY_INDEX)


@dataclass
class AttentionMask:
    """Who may attend to whom, over the indices; functions of coordinates stand for the leaves."""

    allowed: Boolean
    box: IndexBox
    leaves: dict[str, Node]
    extent: dict[sympy.Symbol, Size]


def try_parse_mask(node: Node, shape: tuple[Size, ...], settled: bool = False) -> AttentionMask | None:
    """The mask that broadcasts to scores of `shape`, (B, H, Q, K) or (B, Q, K); None where it is not understood."""
    try:
        return parse_mask(node, shape, settled)
    except NotSymbolic:
        return None


def parse_mask(node: Node, shape: tuple[Size, ...], settled: bool = False) -> AttentionMask:
    """As `try_parse_mask`. Raises NotSymbolic, which says why the mask stays data. settled: see `masks_all_weight`."""
    positions, coords = _mask_coordinates(node, shape)
    return _checked_mask(positions, *_allowed_condition(positions.at(node, coords)), settled)


@dataclass(frozen=True)
class BiasText:
    """A bias as text about scores (`lowering/masks/score.py`), the numbers of each head that it reads, and a mask."""

    text: str
    heads: list[Node]
    mask: AttentionMask


def parse_bias(node: Node, shape: tuple[Size, ...], dtype: torch.dtype, settled: bool = False) -> BiasText | None:
    """A bias of queries and keys, of the dtype of q; None where no text says it. shape, settled: as in `parse_mask`."""
    if len(shape) != 4 or len(node_shape(node)) < 2 or any(s == 1 for s in node_shape(node)[-2:]):
        return None
    try:
        positions, coords = _mask_coordinates(node, shape)
        biases = BiasReader(positions, dtype, MAX_FILL)
        found = biases.at(node, coords)
        text = str(SCORE_NAME + found.value)
        check_score(text)
        return BiasText(text, biases.heads, _checked_mask(positions, found.allowed, found.finite, settled))
    except (NotSymbolic, SpError):
        return None


def _mask_coordinates(node: Node, shape: tuple[Size, ...]) -> tuple[ElementReader, list[Any]]:
    """Where the mask is read for a query and a key."""
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
    """Where all masks of scores of `shape`, (B, H, Q, K), allow it; everywhere if there is none."""
    positions = ElementReader(IndexBox(extent := dict(zip(INDICES, shape))), extent)
    positions.leaves = {name: leaf for mask in masks for name, leaf in mask.leaves.items()}
    return _checked_mask(positions, And(*(mask.allowed for mask in masks)), False, False)


def require_all_heads(mask: AttentionMask) -> AttentionMask:
    """The mask. Raises NotSymbolic if a predicate would need the number of a head or a batch entry."""
    if MaskPrinter().to_text(mask.allowed).free_symbols & {BATCH_INDEX, HEAD_INDEX}:
        raise NotSymbolic("what it asks of its data differs between heads or batches")
    return mask


def keeps_a_key(node: Node, shape: tuple[Size, ...]) -> bool:
    """Does a bias provably add 0 to some key of every query, and nothing above that to the others?"""
    try:
        positions, coords = _mask_coordinates(node, shape)
        _checked_mask(positions, _allowed_condition(positions.at(node, coords), 0)[0], True, False)
        return True
    except NotSymbolic:
        return False


def _allowed_condition(value: Element, least: float = MAX_FILL) -> tuple[Boolean, bool]:
    """(where a query may attend, whether the others are filled with a finite number)"""
    if not isinstance(value, tuple):
        return value, False
    if not all(v == 0 or (v.is_number and v <= least) for _, v in value):
        raise NotSymbolic(f"a bias of other numbers than 0 and fills from {MAX_FILL:g} down, such as -inf")
    zero = [c for c, v in value if v == 0]
    return (zero[0] if zero else sympy.false), any(v.is_finite for _, v in value if v != 0)


def has_key_per_query(mask: AttentionMask) -> bool:
    """Does every query provably attend to some key: its own, the first, or the last?"""
    candidates = [sympy.Integer(0), mask.extent[KEY_INDEX] - 1]
    if mask.box.is_nonnegative(mask.extent[KEY_INDEX] - sympy.sympify(mask.extent[QUERY_INDEX])):
        candidates.insert(0, QUERY_INDEX)
    return any(mask.box.simplify(mask.allowed.subs(KEY_INDEX, key)) == sympy.true for key in candidates)


@dataclass
class MaskPrinter:
    """A predicate's text, with the vectors and sizes that its symbols stand for."""

    rows: list[AppliedUndef] = field(default_factory=list)
    cols: list[AppliedUndef] = field(default_factory=list)
    sizes: list[sympy.Expr] = field(default_factory=list)

    def to_text(self, e: Any) -> Any:
        """The expression with row, col and n symbols for leaves and sizes."""
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
    """Rewrites the attentions of one graph."""

    requires = frozenset({"attention is fused"})
    provides = frozenset({"canonical", "masks are predicates"})

    def edit(self, graph: Graph) -> Self:
        self.vectors: dict[tuple[Any, ...], Node] = {}
        self.masks: dict[tuple[Any, ...], AttentionMask | str] = {}  # layers share theirs, or why there is none
        self.texts: dict[tuple[Any, ...], BiasText | None] = {}
        return super().edit(graph)

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        found = [n for n in attention_nodes(gm) if OpCall(n)["attn_mask"] is not None]
        return sum([self._rewrite(n) for n in found if not OpCall(n).get("predicate")])

    def _rewrite(self, node: Node) -> bool:
        """Do without the mask's data, where that can be; of a mask that is computed here the report says why not."""
        call = OpCall(node)
        data = call["attn_mask"]
        try:
            self._drop_mask(data, node, call)
        except (NotSymbolic, SpError) as why:  # SpError: of a size that the graph cannot compute from its inputs
            if data.op == "call_function":
                self.note_refusal(data, f"the mask stays data: {why.cause}")
            return False
        return True

    def _drop_mask(self, data: Node, node: Node, call: OpCall) -> None:
        """Raises NotSymbolic or SpError if the mask stays."""
        shapes = [call.shape(i) for i in range(3)]
        if call.get("is_causal") or not has_same_leading_dims(shapes, call["enable_gqa"]):
            raise NotSymbolic("q, k and v have other batches or heads, or it comes with is_causal")
        shape, settled = (*shapes[0][:-1], shapes[1][-2]), masks_all_weight(call)
        try:
            self.set_mask(node, self.share_form((data, shape, settled), lambda: parse_mask(data, shape, settled)))
        except NotSymbolic as why:
            if not self._bias_as_text(data, shape, settled, node, call):
                raise why from None

    def _bias_as_text(self, data: Node, shape: tuple[Size, ...], settled: bool, node: Node, call: OpCall) -> bool:
        """Let the attention add a bias that positions and heads give, if its data is one."""
        dtype, key = node.meta["val"].dtype, (data, shape, settled)
        if key not in self.texts:
            self.texts[key] = parse_bias(data, shape, dtype, settled)
        found = self.texts[key]
        if found is None or call.get("score"):
            return False
        with self.graph.inserting_before(node):
            heads = [self._per_head_vector(self.cast(x, dtype, node), shape[1], node) for x in found.heads]
        self.set_mask(node, found.mask, found.text, heads)
        return True

    def _per_head_vector(self, x: Node, count: Size, like: Node) -> Node:
        """(count,)."""
        flat = self.reshape(x, (size_product(node_shape(x)),), like)
        if is_same_shape(node_shape(flat), (count,)):
            return flat
        return self.compute(aten.expand.default, (flat, [self.sizes(count)]), like)

    def set_mask(
        self, node: Node, mask: AttentionMask, score: str = "", heads: Sequence[Node] = (), tables: Sequence[Node] = ()
    ) -> None:
        """Let an attention do with this in place of its mask. Raises NotSymbolic or SpError if no predicate says it.

        score, heads, tables: what becomes of its scores, and what that reads (`lowering/masks/score.py`), if it does
        not say.
        """
        call = OpCall(node)
        score, heads = score or call.get("score") or "", heads or call.get("heads") or []
        scores: dict[str, Any] = {"score": score, "heads": list(heads)} if score else {}
        if tables:
            scores["tables"] = list(tables)
        if call.get("sinks") is not None:
            scores["sinks"] = call["sinks"]
        if call.get("lse"):
            scores["lse"] = True
        # torch's own causal kernel returns NaN for a scale that is not positive.
        kernel = mask.allowed == CAUSAL_TEXT and (call["scale"] is None or call["scale"] > 0)
        if (mask.allowed == sympy.true or kernel) and not scores:
            causal = {"is_causal": True} if kernel else {}
            node.args, node.kwargs = call.with_operands(call.operands[:3] + [None], **causal)
            self.drop(call["attn_mask"])
        else:
            self._predicate(node, call, mask, scores)

    def share_form(self, key: tuple[Any, ...], read: Callable[[], AttentionMask]) -> AttentionMask:
        """What is read of a mask, once for all layers. Raises NotSymbolic wherever there is none."""
        if key not in self.masks:
            try:
                self.masks[key] = read()
            except (NotSymbolic, SpError) as why:
                self.masks[key] = why.cause  # the exception itself would keep every frame
        mask = self.masks[key]
        if isinstance(mask, str):
            raise NotSymbolic(mask)
        return mask

    def _predicate(self, node: Node, call: OpCall, mask: AttentionMask, scores: dict[str, Any]) -> None:
        spelling = MaskPrinter()
        predicate = spelling.to_text(mask.allowed)
        if predicate.free_symbols & {BATCH_INDEX, HEAD_INDEX}:
            raise NotSymbolic("what it asks of its data differs between heads or batches")
        rows = [self._vector(mask, leaf, QUERY_INDEX, node) for leaf in spelling.rows]
        cols = [self._vector(mask, leaf, KEY_INDEX, node) for leaf in spelling.cols]
        extents = self.sizes.list(_print_size(e) for e in spelling.sizes)
        with self.graph.inserting_before(node):
            options = [call[name] for name in ("dropout_p", "scale", "enable_gqa")]
            text = "" if predicate == sympy.true else str(predicate)
            args = (*call.operands[:3], rows, cols, extents, text, *options)
            fresh = self.emit(sp.masked_attention.default, args, node.meta["val"], node, scores)
        self.replace(node, fresh)

    def _vector(self, mask: AttentionMask, leaf: AppliedUndef, index: sympy.Symbol, like: Node) -> Node:
        """The leaf's values at every index (and batch), as (B or 1, Q) or (B or 1, K)."""
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
        kept = [BATCH_INDEX if c == BATCH_INDEX else index for c in coords if c.has(BATCH_INDEX, index)]
        if kept == [index, BATCH_INDEX]:
            return self.compute(aten.transpose.int, (x, 0, 1), like)
        if index not in kept:
            shape = [self.sizes(extent) for extent in node_shape(x)] or [1]
            x = self.compute(aten.reshape.default, (x, [*shape, 1]), like)
            return self.compute(aten.expand.default, (x, [*shape, self.sizes(length)]), like)
        return x if len(kept) == 2 else self.compute(aten.unsqueeze.default, (x, 0), like)


def has_same_leading_dims(shapes: Sequence[tuple[Size, ...]], grouped: bool) -> bool:
    """Do q, k and v have the same dims in front, but for grouped heads?"""
    fronts = [s[:-2] for s in shapes]
    ranks = {len(s) for s in shapes}
    heads = fronts[1][-1:] == fronts[2][-1:] and (grouped or fronts[0][-1:] == fronts[1][-1:])
    return len(ranks) == 1 and ranks <= {3, 4} and heads and len({f[:-1] for f in fronts}) == 1


def _print_size(e: Any) -> Size:
    e = sympy.sympify(e)
    return int(e) if e.is_Integer else e
