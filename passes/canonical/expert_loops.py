"""Replace rows that are sorted by a key, processed row by row, and unsorted by ops that run on shards.

    keys, order = sort(ids)              sp.sort_rows
    x[order], h[order // k]              sp.to_sorted of x, of h with each row k times; gather, too
    grouped_mm(y, w, ends of the keys)   sp.grouped_mm, row by row
    histc(keys)                          histc(ids)
    y[inverse of order], out[order] = y  sp.from_sorted
    out.index_add(0, order // k, y)      out + the sum of the k unsorted rows of each token; scatter_add, too

Mixtures of experts (torchtitan, transformers) have this form. The unsorted result does not depend on the order of the
rows in between, so each rank may sort its own rows. Unchanged, with a note: sorts whose order of keys has another use.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from itertools import dropwhile
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.torch_compat import OpOverload, schema_of
from sp_compile.passes.base import CanonicalPass, register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, is_tensor, node_shape, read_results
from sp_compile.passes.graph.mutation import is_pure
from sp_compile.passes.graph.sizes import Size, as_size, is_same_size
from sp_compile.passes.sharding.factors import flatten_dims
from sp_compile.passes.sharding.matchers import (
    is_arange,
    is_cast_op,
    is_copy,
    is_rearrangement,
    keeps_order,
    move_source,
    value_origin,
)
from sp_compile.passes.sharding.rule import lookup_rule

aten, sp = torch.ops.aten, torch.ops.sp
SORT_OPS = (aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable)
SCATTER_OPS = (aten.index_put.default, aten._unsafe_index_put.default)
FACTORIES_LIKE = (aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default)
EXACT_DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)  # of counts per group
GROUPED_MM_OPS = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")
"""Products of rows (R, I), matrices (E, I, O) and the end of each group of rows (E,)."""


@register_pass
class RewriteSortedRows(CanonicalPass):
    """Replacement of every sort along which only complete rows are moved."""

    requires = frozenset({"normalized"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        sorts = [node for op in SORT_OPS for node in gm.graph.find_nodes(op="call_function", target=op)]
        return sum(self._rewrite(node) for node in sorts)

    def _rewrite(self, node: Node) -> bool:
        """Replace a sort and all uses of its results; return False if a use is not supported."""
        call = OpCall(node)
        if not node.users or call.ndim() != 1:  # without users it was removed with another region
            return False
        region = _sort_region(node, call)
        if region.left is not None and region.taken:
            self.note_refusal(region.left, "it reads rows that are sorted by a key and not restored")
        if region.left is not None or not region.back:
            return False
        with self.graph.inserting_before(node):
            values = (call.operands[0].meta["val"], region.order.meta["val"])
            args = (call.operands[0], bool(call.get("stable") or False), call["descending"])
            created = self.emit(sp.sort_rows.default, args, values, node)
            keys, order = (self.emit(operator.getitem, (created, i), values[i], node) for i in (0, 1))
        created = {*region.taken, *region.products, *region.counts, *region.back}
        for old in sorted(created, reverse=True):  # a node is replaced before its operands are
            with self.graph.inserting_before(old):
                new = self._replacement(old, region, keys, order)
            old.replace_all_uses_with(new)
        if region.keys is not None:
            region.keys.replace_all_uses_with(keys)
        for cut in filter(
            _is_full_slice, region.rows
        ):  # by a number that is compared with the number of rows at run time only
            cut.replace_all_uses_with(cut.args[0])
        self.drop(*created, *region.inverse, *region.spread, region.keys, region.order, node)
        return True

    def _replacement(self, old: Node, region: _SortUses, keys: Node, order: Node) -> Node:
        """Return the replacement of one use of the sorted rows."""
        value = old.meta["val"]
        if old in region.taken:
            times = region.taken[old]
            x = old.args[0] if is_same_size(times, 1) else self.repeat_each(old.args[0], 0, times, old)
            return self.emit(sp.to_sorted.default, (x, order), value, old)
        if old in region.products:
            return self.emit(sp.grouped_mm.default, (*old.args[:2], keys, region.products[old]), value, old)
        if old in region.counts:
            x = self.cast(region.ids, old.args[0].meta["val"].dtype, old)
            return self.emit(aten.histc.default, (x, *old.args[1:]), value, old, old.kwargs)
        rows = region.back[old]
        back = self.emit(sp.from_sorted.default, (rows, order), rows.meta["val"], old)
        if old not in region.added:
            return back
        shape = (node_shape(old)[0], region.added[old], *node_shape(rows)[1:])
        together = self.compute(aten.sum.dim_IntList, (self.reshape(back, shape, old), [1]), old)
        return self.compute(aten.add.Tensor, (old.args[0], together), old)


@dataclass
class _SortUses:
    """Uses of the result of a sort, by kind."""

    ids: Node  # unsorted keys
    order: Node  # permutation that sorts
    keys: Node | None  # sorted keys
    descending: bool
    rows: set[Node] = field(default_factory=set)  # values whose first dim is in the order of the keys
    tokens: dict[Node, Any] = field(default_factory=dict)  # order // k to k; the order itself to 1
    spread: dict[Node, Node] = field(default_factory=dict)  # the order or tokens, repeated for each column
    added: dict[Node, Any] = field(default_factory=dict)  # ops that unsort and sum k rows per token, to k
    taken: dict[Node, Any] = field(default_factory=dict)  # reads of unsorted rows, to the number of reads per row
    back: dict[Node, Node] = field(default_factory=dict)  # ops that unsort, to their rows
    counts: set[Node] = field(default_factory=set)  # counts of rows per key, independent of the order
    inverse: set[Node] = field(default_factory=set)  # inverse permutations
    shapes: set[Node] = field(default_factory=set)  # tensors that the inverse is written into
    views: set[Node] = field(default_factory=set)  # views of rows, which other views may undo
    products: dict[Node, str] = field(default_factory=dict)  # grouped products, to their names
    left: Node | None = None  # first unsupported use

    @property
    def length(self) -> Size:
        """Return the number of sorted rows."""
        return node_shape(self.order)[0]

    def depends_on_order(self, node: Any) -> bool:
        """Return True if the value is in the order of the keys or computed from that order."""
        sets = (self.rows, self.tokens, self.spread, self.inverse, self.shapes, self.views)
        return isinstance(node, Node) and any(node in one for one in sets)

    def accept(self, node: Node) -> bool:
        """Record a reader of the region's values and return True if its use is supported."""
        if node.op != "call_function":
            return False
        if (node.target is operator.getitem and node.args[0] in self.rows) or value_origin(node) in self.rows:
            self.rows.add(node)
            return True
        patterns = (
            self._read,
            self._match_put,
            self._add,
            self._match_division,
            self._is_spread,
            self._match_counts,
            self._product,
        )
        return any(way(node) for way in (*patterns, self._row_wise, self._match_view))

    def _read(self, node: Node) -> bool:
        """Match an index or gather that sorts rows, or that unsorts them by the inverse permutation."""
        if node.target is aten.index.Tensor and len(node.args[1]) == 1:
            x, (at,) = node.args
        elif node.target is aten.gather.default and node.args[1] == 0:
            x, at = node.args[0], self.spread.get(node.args[2])
        else:
            return False
        if at in self.inverse and x in self.rows:
            self.back[node] = x
            return True
        times = self.tokens.get(at)
        if times is None or self.depends_on_order(x) or not is_same_size(node_shape(x)[0] * times, self.length):
            return False
        self.taken[node] = times
        self.rows.add(node)
        return True

    def _add(self, node: Node) -> bool:
        """Match unsorted rows that are summed for each token."""
        if node.target not in (aten.index_add.default, aten.scatter_add.default) or node.args[1] != 0:
            return False
        into, _, at, rows = node.args[:4]
        at = self.spread.get(at) if node.target is aten.scatter_add.default else at
        times = self.tokens.get(at)
        if times is None or self.depends_on_order(into) or rows not in self.rows or OpCall(node).get("alpha", 1) != 1:
            return False
        if not is_same_size(node_shape(into)[0] * times, self.length):
            return False
        self.back[node], self.added[node] = rows, times
        return True

    def _is_spread(self, node: Node) -> bool:
        """Match the order or tokens (R,) that are viewed as (R, 1) and expanded to (R, columns)."""
        source, shape = node.args[0], node_shape(node) if is_tensor(node) else ()
        if node.target is aten.expand.default:
            at = self.spread.get(source)
        elif len(shape) == 2 and is_same_size(shape[1], 1) and keeps_order(node):
            at = source if source in self.tokens else None
        else:
            return False
        if at is None or not is_same_size(shape[0], self.length):
            return False
        self.spread[node] = at
        return True

    def _match_put(self, node: Node) -> bool:
        """Match a computation of the inverse permutation, or a write of all rows to the unsorted order."""
        if node.target in FACTORIES_LIKE and node.args[0] is self.order:
            self.shapes.add(node)
            return True
        if node.target in SORT_OPS[2:] and node.args[0] is self.order and not OpCall(node)["descending"]:
            self.inverse.add(node)
            return True
        if node.target not in SCATTER_OPS or OpCall(node)["accumulate"] or node.args[1] != [self.order]:
            return False
        into, _, values = node.args[:3]
        if not is_same_size(node_shape(into)[0], self.length) or (
            self.depends_on_order(into) and into not in self.shapes | self.rows
        ):
            return False
        if is_arange(values):
            self.inverse.add(node)
            return True
        if values not in self.rows or not is_same_size(node_shape(values)[0], self.length):
            return False
        self.back[node] = values
        return into.meta["val"].dtype == values.meta["val"].dtype

    def _match_division(self, node: Node) -> bool:
        """Match order // k, the token of each sorted row."""
        by = node.args[1] if node.target is aten.floor_divide.default else None
        if node.args[0] is not self.order or not isinstance(by, int | Node) or is_tensor(by):
            return False
        self.tokens[node] = as_size(by)
        return True

    def _match_counts(self, node: Node) -> bool:
        """Match counts of rows per key."""
        if node.target is not aten.histc.default:
            return False
        x = _uncast_numbers(node.args[0])
        if x is self.keys:
            self.counts.add(node)
        return x in (self.keys, self.ids)

    def _is_group_ends(self, node: Node, groups: Any) -> bool:
        """Return True if the node computes the end of each group of keys."""
        if node.target is not aten.cumsum.default:
            return False
        counts = _uncast_numbers(node.args[0])
        if not self._match_counts(counts):
            return False
        call = OpCall(counts)
        return (
            is_same_size(call["bins"], groups) and call["min"] == 0 and call["max"] in (call["bins"] - 1, call["bins"])
        )

    def _product(self, node: Node) -> bool:
        """Match a grouped product of rows in ascending order of integer keys."""
        name = schema_of(node.target).name if isinstance(node.target, OpOverload) else ""
        ascending = not self.descending and not self.ids.meta["val"].is_floating_point()
        if name not in GROUPED_MM_OPS or len(node.args) != 3 or node.kwargs or not ascending:
            return False
        x, w, ends = node.args
        if x not in self.rows or self.depends_on_order(w) or not self._is_group_ends(ends, node_shape(w)[0]):
            return False
        self.products[node] = name
        self.rows.add(node)
        return True

    def _row_wise(self, node: Node) -> bool:
        """Return True if each row of the result depends on the same row of the operands only."""
        call, rule = lookup_rule(node) or (None, None)
        if call is None or rule is None or not is_pure(node):
            return False
        factors = {dims[0] for x, dims in zip(call.operands, rule.operands) if x in self.rows}
        others = {f for x, dims in zip(call.operands, rule.operands) if x not in self.rows for f in flatten_dims(dims)}
        if len(factors) != 1 or any(self.depends_on_order(x) and x not in self.rows for x in call.operands):
            return False
        (row,) = factors
        inside = [f for dims in (*rule.operands, *rule.results) for f in flatten_dims(dims[1:])]
        if not row or row[:1] == "(" or row in others or row in inside or rule.kind(row) != "pass":
            return False
        if any(not dims or dims[0] != row for dims in rule.results):
            return False
        self.rows.add(node)
        return True

    def _match_view(self, node: Node) -> bool:
        """Match a view of the rows, which another one may undo."""
        if is_rearrangement(node):
            self.views.add(node)
        return node in self.views


def _sort_region(node: Node, call: OpCall) -> _SortUses:
    """Return the uses of a sort."""
    results = read_results(node)
    is_argsort = is_tensor(node)
    order, keys = (node, None) if is_argsort else (results.get(1, node), results.get(0))
    region = _SortUses(call.operands[0], order, keys, call["descending"])
    region.tokens[order] = 1
    if region.keys is not None:
        region.rows.add(region.keys)
    following = dropwhile(lambda n: n is not node, node.graph.nodes)
    for reader in following:
        used = reader not in (node, *results.values()) and any(map(region.depends_on_order, reader.all_input_nodes))
        if used and not region.accept(reader):
            region.left = region.left or reader
    return region


def _is_full_slice(node: Node) -> bool:
    """Return True for a slice of all rows."""
    return node.target is aten.slice.Tensor and is_copy(node)


def _uncast_numbers(node: Node) -> Node:
    """Return the integers before a lossless cast; the device is unchanged."""
    node = value_origin(node)
    source, value = move_source(node) if is_cast_op(node) else None, node.meta["val"]
    if source is None or value.dtype not in EXACT_DTYPES or source.meta["val"].device != value.device:
        return node
    return _uncast_numbers(source)
