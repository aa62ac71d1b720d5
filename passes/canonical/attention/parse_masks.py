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
from sp_compile.lowering.masks.score import SCORE, check
from sp_compile.passes import base
from sp_compile.passes.context import Job
from sp_compile.passes.graph.call import Call, shape_of
from sp_compile.passes.graph.sizes import Size, all_same, product, same
from sp_compile.passes.sharding.attention_axes import attention_nodes, keeps_no_weight

from . import element_ops  # noqa: F401  (registers how ops get their elements)
from .biases import Biases
from .elements import Element, NotSymbolic, Positions
from .proofs import BATCH, HEAD, INDICES, KEY, QUERY, Boolean, Box

aten, sp = torch.ops.aten, torch.ops.sp
LARGEST_FILL = -1e9  # fills from here down leave nothing of a key's probability, unless all keys are filled
CAUSAL = sympy.Le(KEY, QUERY)


@dataclass
class Mask:
    """Who may attend to whom, over the indices; functions of coordinates stand for the leaves."""

    allowed: Boolean
    box: Box
    leaves: dict[str, Node]
    extent: dict[sympy.Symbol, Size]


def recognise(node: Node, shape: tuple[Size, ...], settled: bool = False) -> Mask | None:
    """The mask that broadcasts to scores of `shape`, (B, H, Q, K) or (B, Q, K); None where it is not understood."""
    try:
        return understood(node, shape, settled)
    except NotSymbolic:
        return None


def understood(node: Node, shape: tuple[Size, ...], settled: bool = False) -> Mask:
    """As `recognise`. Raises NotSymbolic, which says why the mask stays data. settled: see `keeps_no_weight`."""
    positions, coords = _places(node, shape)
    return _checked(positions, *_allowed(positions.at(node, coords)), settled)


@dataclass(frozen=True)
class BiasText:
    """A bias as text about scores (`lowering/masks/score.py`), the numbers of each head that it reads, and a mask."""

    text: str
    heads: list[Node]
    mask: Mask


def biased(node: Node, shape: tuple[Size, ...], dtype: torch.dtype, settled: bool = False) -> BiasText | None:
    """A bias of queries and keys, of the dtype of q; None where no text says it. shape, settled: as in `understood`."""
    if len(shape) != 4 or len(shape_of(node)) < 2 or any(s == 1 for s in shape_of(node)[-2:]):
        return None
    try:
        positions, coords = _places(node, shape)
        biases = Biases(positions, dtype, LARGEST_FILL)
        found = biases.at(node, coords)
        text = str(SCORE + found.value)
        check(text)
        return BiasText(text, biases.heads, _checked(positions, found.allowed, found.finite, settled))
    except (NotSymbolic, SpError):
        return None


def _places(node: Node, shape: tuple[Size, ...]) -> tuple[Positions, list[Any]]:
    """Where the mask is read for a query and a key."""
    own = shape_of(node)
    if len(shape) not in (3, 4) or len(own) > len(shape):
        raise NotSymbolic(f"scores of {len(shape)} dims, a mask of {len(own)}")
    indices = [i for i in INDICES if i != HEAD or len(shape) == 4]
    extent: dict[sympy.Symbol, Size] = {**dict.fromkeys(INDICES, 1), **dict(zip(indices, shape))}
    coords = [0 if s == 1 else i for s, i in zip(own, indices[len(shape) - len(own) :])]
    return Positions(Box(extent), extent), coords


def _checked(positions: Positions, allowed: Boolean, finite: bool, settled: bool) -> Mask:
    allowed = positions.box.tidy(sympy.to_nnf(allowed, simplify=False))
    mask = Mask(allowed, positions.box, positions.leaves, positions.sizes)
    if allowed == sympy.false:
        raise NotSymbolic("no query attends to any key")
    without_leaves = allowed.xreplace({leaf: sympy.Integer(0) for leaf in allowed.atoms(AppliedUndef)})
    if without_leaves.free_symbols & {BATCH, HEAD}:
        raise NotSymbolic("it differs between heads or batches")
    if finite and not settled and not always_attends(mask):
        raise NotSymbolic("its fills are finite, and no query provably attends to some key")
    return mask


def all_of(masks: Sequence[Mask], shape: tuple[Size, ...]) -> Mask:
    """Where all masks of scores of `shape`, (B, H, Q, K), allow it; everywhere if there is none."""
    positions = Positions(Box(extent := dict(zip(INDICES, shape))), extent)
    positions.leaves = {name: leaf for mask in masks for name, leaf in mask.leaves.items()}
    return _checked(positions, And(*(mask.allowed for mask in masks)), False, False)


def of_all_heads(mask: Mask) -> Mask:
    """The mask. Raises NotSymbolic if a predicate would need the number of a head or a batch entry."""
    if MaskForm().spell(mask.allowed).free_symbols & {BATCH, HEAD}:
        raise NotSymbolic("what it asks of its data differs between heads or batches")
    return mask


def leaves_a_key(node: Node, shape: tuple[Size, ...]) -> bool:
    """Does a bias provably add 0 to some key of every query, and nothing above that to the others?"""
    try:
        positions, coords = _places(node, shape)
        _checked(positions, _allowed(positions.at(node, coords), 0)[0], True, False)
        return True
    except NotSymbolic:
        return False


def _allowed(value: Element, least: float = LARGEST_FILL) -> tuple[Boolean, bool]:
    """(where a query may attend, whether the others are filled with a finite number)"""
    if not isinstance(value, tuple):
        return value, False
    if not all(v == 0 or (v.is_number and v <= least) for _, v in value):
        raise NotSymbolic(f"a bias of other numbers than 0 and fills from {LARGEST_FILL:g} down, such as -inf")
    zero = [c for c, v in value if v == 0]
    return (zero[0] if zero else sympy.false), any(v.is_finite for _, v in value if v != 0)


def always_attends(mask: Mask) -> bool:
    """Does every query provably attend to some key: its own, the first, or the last?"""
    candidates = [sympy.Integer(0), mask.extent[KEY] - 1]
    if mask.box.nonnegative(mask.extent[KEY] - sympy.sympify(mask.extent[QUERY])):
        candidates.insert(0, QUERY)
    return any(mask.box.tidy(mask.allowed.subs(KEY, key)) == sympy.true for key in candidates)


@dataclass
class MaskForm:
    """A predicate's text, with the vectors and sizes that its symbols stand for."""

    rows: list[AppliedUndef] = field(default_factory=list)
    cols: list[AppliedUndef] = field(default_factory=list)
    sizes: list[sympy.Expr] = field(default_factory=list)

    def spell(self, e: Any) -> Any:
        """The expression with row, col and n symbols for leaves and sizes."""
        if isinstance(e, AppliedUndef):
            vectors, name = (self.rows, "row") if e.has(QUERY) else (self.cols, "col")
            return self._symbol(vectors, e, name)
        if e in INDICES or not (e.args or e.is_Symbol):
            return e
        fixed = [a for a in sympy.Add.make_args(e) if not a.is_number and not a.has(*INDICES, AppliedUndef)]
        if isinstance(e, sympy.Expr) and fixed:
            rest = [a for a in sympy.Add.make_args(e) if a not in fixed and not a.is_number]
            size = sympy.Add(*(a for a in sympy.Add.make_args(e) if a not in rest))
            return self._symbol(self.sizes, size, "n") + (self.spell(sympy.Add(*rest)) if rest else 0)
        return e.func(*(self.spell(a) for a in e.args))

    def _symbol(self, known: list[Any], e: Any, name: str) -> sympy.Symbol:
        if e not in known:
            known.append(e)
        return sympy.Symbol(f"{name}{known.index(e)}", integer=True)


@base.register
class Masks(base.Spelling):
    """Rewrites the attentions of one graph."""

    requires = frozenset({"attention is fused"})
    provides = frozenset({"canonical", "masks are predicates"})

    def edit(self, graph: Graph) -> Self:
        self.vectors: dict[tuple[Any, ...], Node] = {}
        self.masks: dict[tuple[Any, ...], Mask | str] = {}  # layers share theirs, or why there is none
        self.texts: dict[tuple[Any, ...], BiasText | None] = {}
        return super().edit(graph)

    def apply(self, gm: GraphModule, job: Job) -> int:
        found = [n for n in attention_nodes(gm) if Call(n)["attn_mask"] is not None]
        return sum([self._rewrite(n) for n in found if not Call(n).get("predicate")])

    def _rewrite(self, node: Node) -> bool:
        """Do without the mask's data, where that can be; of a mask that is computed here the report says why not."""
        call = Call(node)
        data = call["attn_mask"]
        try:
            self._without(data, node, call)
        except (NotSymbolic, SpError) as why:  # SpError: of a size that the graph cannot compute from its inputs
            if data.op == "call_function":
                self.refused(data, f"the mask stays data: {why.cause}")
            return False
        return True

    def _without(self, data: Node, node: Node, call: Call) -> None:
        """Raises NotSymbolic or SpError if the mask stays."""
        shapes = [call.shape(i) for i in range(3)]
        if call.get("is_causal") or not same_in_front(shapes, call["enable_gqa"]):
            raise NotSymbolic("q, k and v have other batches or heads, or it comes with is_causal")
        shape, settled = (*shapes[0][:-1], shapes[1][-2]), keeps_no_weight(call)
        try:
            self.say(node, self.once((data, shape, settled), lambda: understood(data, shape, settled)))
        except NotSymbolic as why:
            if not self._as_text(data, shape, settled, node, call):
                raise why from None

    def _as_text(self, data: Node, shape: tuple[Size, ...], settled: bool, node: Node, call: Call) -> bool:
        """Let the attention add a bias that positions and heads give, if its data is one."""
        dtype, key = node.meta["val"].dtype, (data, shape, settled)
        if key not in self.texts:
            self.texts[key] = biased(data, shape, dtype, settled)
        found = self.texts[key]
        if found is None or call.get("score"):
            return False
        with self.graph.inserting_before(node):
            heads = [self._of_each_head(self.cast(x, dtype, node), shape[1], node) for x in found.heads]
        self.say(node, found.mask, found.text, heads)
        return True

    def _of_each_head(self, x: Node, count: Size, like: Node) -> Node:
        """(count,)."""
        flat = self.reshaped(x, (product(shape_of(x)),), like)
        if all_same(shape_of(flat), (count,)):
            return flat
        return self.compute(aten.expand.default, (flat, [self.sizes(count)]), like)

    def say(
        self, node: Node, mask: Mask, score: str = "", heads: Sequence[Node] = (), tables: Sequence[Node] = ()
    ) -> None:
        """Let an attention do with this in place of its mask. Raises NotSymbolic or SpError if no predicate says it.

        score, heads, tables: what becomes of its scores, and what that reads (`lowering/masks/score.py`), if it does
        not say.
        """
        call = Call(node)
        score, heads = score or call.get("score") or "", heads or call.get("heads") or []
        scores: dict[str, Any] = {"score": score, "heads": list(heads)} if score else {}
        if tables:
            scores["tables"] = list(tables)
        if call.get("sinks") is not None:
            scores["sinks"] = call["sinks"]
        if call.get("lse"):
            scores["lse"] = True
        # torch's own causal kernel returns NaN for a scale that is not positive.
        kernel = mask.allowed == CAUSAL and (call["scale"] is None or call["scale"] > 0)
        if (mask.allowed == sympy.true or kernel) and not scores:
            causal = {"is_causal": True} if kernel else {}
            node.args, node.kwargs = call.rebuild(call.operands[:3] + [None], **causal)
            self.drop(call["attn_mask"])
        else:
            self._predicate(node, call, mask, scores)

    def once(self, key: tuple[Any, ...], read: Callable[[], Mask]) -> Mask:
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

    def _predicate(self, node: Node, call: Call, mask: Mask, scores: dict[str, Any]) -> None:
        spelling = MaskForm()
        predicate = spelling.spell(mask.allowed)
        if predicate.free_symbols & {BATCH, HEAD}:
            raise NotSymbolic("what it asks of its data differs between heads or batches")
        rows = [self._vector(mask, leaf, QUERY, node) for leaf in spelling.rows]
        cols = [self._vector(mask, leaf, KEY, node) for leaf in spelling.cols]
        extents = self.sizes.list(_size(e) for e in spelling.sizes)
        with self.graph.inserting_before(node):
            options = [call[name] for name in ("dropout_p", "scale", "enable_gqa")]
            text = "" if predicate == sympy.true else str(predicate)
            args = (*call.operands[:3], rows, cols, extents, text, *options)
            fresh = self.emit(sp.masked_attention.default, args, node.meta["val"], node, scores)
        self.replace(node, fresh)

    def _vector(self, mask: Mask, leaf: AppliedUndef, index: sympy.Symbol, like: Node) -> Node:
        """The leaf's values at every index (and batch), as (B or 1, Q) or (B or 1, K)."""
        length = mask.extent[index]
        key = (leaf, index, length)
        if key not in self.vectors:
            source = mask.leaves[leaf.func.__name__]
            with self.behind(source):
                self.vectors[key] = self._cut(source, leaf.args, index, length, like)
        return self.vectors[key]

    def _cut(self, source: Node, coords: Any, index: sympy.Symbol, length: Size, like: Node) -> Node:
        x = source
        for dim, (coord, extent) in reversed(list(enumerate(zip(coords, shape_of(source))))):
            start = _size(coord - index) if coord.has(index) else None
            if start is not None and not same(length, extent):
                span = self.sizes.list((start, _size(start + length)))
                x = self.compute(aten.slice.Tensor, (x, dim, *span), like)
            elif start is None and coord != BATCH:
                x = self.compute(aten.select.int, (x, dim, self.sizes(_size(coord))), like)
        kept = [BATCH if c == BATCH else index for c in coords if c.has(BATCH, index)]
        if kept == [index, BATCH]:
            return self.compute(aten.transpose.int, (x, 0, 1), like)
        if index not in kept:
            shape = [self.sizes(extent) for extent in shape_of(x)] or [1]
            x = self.compute(aten.reshape.default, (x, [*shape, 1]), like)
            return self.compute(aten.expand.default, (x, [*shape, self.sizes(length)]), like)
        return x if len(kept) == 2 else self.compute(aten.unsqueeze.default, (x, 0), like)


def same_in_front(shapes: Sequence[tuple[Size, ...]], grouped: bool) -> bool:
    """Do q, k and v have the same dims in front, but for grouped heads?"""
    fronts = [s[:-2] for s in shapes]
    ranks = {len(s) for s in shapes}
    heads = fronts[1][-1:] == fronts[2][-1:] and (grouped or fronts[0][-1:] == fronts[1][-1:])
    return len(ranks) == 1 and ranks <= {3, 4} and heads and len({f[:-1] for f in fronts}) == 1


def _size(e: Any) -> Size:
    e = sympy.sympify(e)
    return int(e) if e.is_Integer else e
