"""Replace rows that are sorted by a key, processed row by row, and unsorted by ops that run on shards.

    keys, order = sort(ids)              sp.sort_rows
    x[order], h[order // k]              sp.to_sorted of x, of h with each row k times; gather, too
    grouped_mm(y, w, ends of the keys)   sp.grouped_mm, row by row
    histc(keys)                          histc(ids)
    y[inverse of order], out[order] = y  sp.from_sorted
    out.index_add(0, order // k, y)      out + the sum of the k unsorted rows of each token; scatter_add, too

Mixtures of experts (torchtitan, transformers) have this form: `ids`, the unsorted keys, are the k experts of each
token, for R = tokens * k rows. To *unsort* rows restores the order of `ids`. A *grouped product* multiplies the rows of
equal key by one matrix, w[key]. The unsorted result does not depend on the order of the rows in between, so each rank
may sort its own rows.

Every node between the sort and the restored order must be of a known kind, which `_SortUses` records. Unchanged, with a
note: sorts whose order of keys has another use.
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
from sp_compile.passes.graph.sizes import Size, as_size, is_same_shape, is_same_size
from sp_compile.passes.sharding.factors import flatten_dims
from sp_compile.passes.sharding.matchers import (
    is_arange,
    is_cast_op,
    is_copy,
    is_order_preserving,
    is_rearrangement,
    move_source,
    value_origin,
)
from sp_compile.passes.sharding.rule import lookup_rule

aten, sp = torch.ops.aten, torch.ops.sp
ARGSORT_OPS = (aten.argsort.default, aten.argsort.stable)
SORT_OPS = (aten.sort.default, aten.sort.stable, *ARGSORT_OPS)
SCATTER_OPS = (aten.index_put.default, aten._unsafe_index_put.default)
FACTORIES_LIKE = (aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default)
EXACT_DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)  # of counts per group
# products of rows (R, I), matrices (E, I, O) and the end of each group of rows (E,)
GROUPED_MM_OPS = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")


@register_pass
class RewriteSortedRows(CanonicalPass):
    """Replacement of every sort whose order only moves complete rows, which are unsorted later."""

    requires = frozenset({"normalized"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Replace the sorts of vectors by keys and all uses of their order by sp ops."""
        sorts = [node for op in SORT_OPS for node in gm.graph.find_nodes(op="call_function", target=op)]
        return sum(self._rewrite(node) for node in sorts)

    def _rewrite(self, node: Node) -> bool:
        """Replace a sort by keys and all uses of its order; return False if a use is not supported.

        The order sorts rows, x[order], which are processed row by row and restored by the inverse of the order.
        """
        call = OpCall(node)
        if not node.users or call.ndim() != 1:  # without users: a rewrite of another sort has replaced its readers
            return False
        uses = _find_uses(node, call)
        if uses.unsupported is not None and uses.sorted_reads:  # not for a sort that orders no rows
            self.note_refusal(uses.unsupported, "it reads rows that are sorted by a key and not restored")
        if uses.unsupported is not None or not uses.unsorted:
            return False
        with self.graph.inserting_before(node):
            values = (uses.ids.meta["val"], uses.order.meta["val"])  # of the sorted keys, and of the order
            args = (uses.ids, bool(call.get("stable") or False), call["descending"])
            pair = self.emit(sp.sort_rows.default, args, values, node)
            keys, order = (self.emit(operator.getitem, (pair, i), values[i], node) for i in (0, 1))
        replaced = {*uses.sorted_reads, *uses.products, *uses.counts, *uses.unsorted}
        for old in sorted(replaced, reverse=True):  # last first: new nodes read operands that are replaced later
            with self.graph.inserting_before(old):
                new = self._replacement(old, uses, keys, order)
            old.replace_all_uses_with(new)
        if uses.keys is not None:
            uses.keys.replace_all_uses_with(keys)
        for full_slice in filter(_is_full_slice, uses.rows):  # x[:n] of n rows; a rank has fewer than n
            full_slice.replace_all_uses_with(full_slice.args[0])
        self.drop(*replaced, *uses.inverse, *uses.expanded, uses.keys, uses.order, node)
        return True

    def _replacement(self, old: Node, uses: _SortUses, keys: Node, order: Node) -> Node:
        """Emit the replacement of one use of the sorted rows and return it.

        Args:
            old: The use: a read that sorts rows, x[order]; a grouped product; a count of keys; or an op that unsorts.
            uses: The uses of the sort, by kind.
            keys: The sorted keys, from `sp.sort_rows`.
            order: The permutation that sorts, from `sp.sort_rows`.
        """
        value = old.meta["val"]
        if old in uses.sorted_reads:
            times = uses.sorted_reads[old]  # h[order // k] reads each row k times
            x = old.args[0] if is_same_size(times, 1) else self.repeat_each(old.args[0], 0, times, old)
            return self.emit(sp.to_sorted.default, (x, order), value, old)
        if old in uses.products:
            (x, w), replaced_op = old.args[:2], uses.products[old]  # such as "aten::_grouped_mm", which ranks run
            return self.emit(sp.grouped_mm.default, (x, w, keys, replaced_op), value, old)
        if old in uses.counts:  # a count of sorted keys equals that of unsorted ones
            x = self.cast(uses.ids, old.args[0].meta["val"].dtype, old)
            return self.emit(aten.histc.default, (x, *old.args[1:]), value, old, old.kwargs)
        rows = uses.unsorted[old]
        unsorted = self.emit(sp.from_sorted.default, (rows, order), rows.meta["val"], old)
        if old not in uses.summed:
            return unsorted
        # out.index_add(0, order // k, rows): the k unsorted rows of a token are adjacent
        shape = (node_shape(old)[0], uses.summed[old], *node_shape(rows)[1:])
        options = {} if value.is_floating_point() else {"dtype": value.dtype}  # a sum of integers is int64 by default
        token_sums = self.compute(aten.sum.dim_IntList, (self.reshape(unsorted, shape, old), [1]), old, options)
        return self.compute(aten.add.Tensor, (old.args[0], token_sums), old)


@dataclass
class _SortUses:
    """Uses of the result of a sort, by kind.

    `accept` examines the readers of values that depend on the order, in graph order. The methods that match a node
    return True, and record the node in a field, if it is a use of their kind; `RewriteSortedRows` replaces it later.
    """

    ids: Node  # unsorted keys (R,)
    order: Node  # permutation that sorts (R,)
    keys: Node | None  # sorted keys (R,)
    descending: bool  # True if the greatest key comes first
    rows: set[Node] = field(default_factory=set)  # values whose first dim is in the order of the keys
    tokens: dict[Node, Size] = field(default_factory=dict)  # order // k, to k; the order itself, to 1
    expanded: dict[Node, Node] = field(default_factory=dict)  # (R, columns), to the order or tokens it repeats
    summed: dict[Node, Size] = field(default_factory=dict)  # ops that unsort and sum k rows per token, to k
    sorted_reads: dict[Node, Size] = field(default_factory=dict)  # reads that sort rows, to the reads per row
    unsorted: dict[Node, Node] = field(default_factory=dict)  # ops that unsort, to their rows
    counts: set[Node] = field(default_factory=set)  # counts of rows per key, independent of the order
    inverse: set[Node] = field(default_factory=set)  # inverse permutations
    buffers: set[Node] = field(default_factory=set)  # tensors that the inverse is written into
    views: set[Node] = field(default_factory=set)  # views of rows, which other views may undo
    products: dict[Node, str] = field(default_factory=dict)  # grouped products, to the names of their ops
    unsupported: Node | None = None  # first unsupported use

    def has_length(self, num_rows: Size) -> bool:
        """Return True if the number is R, the number of keys; a use must read or write all R rows."""
        return is_same_size(num_rows, node_shape(self.order)[0])

    def is_in_key_order(self, node: Any) -> bool:
        """Return True if a value has rows in the order of the keys, or is computed from that order.

        Every reader of such a value must be a use that `accept` supports, at the operand where that use expects it.
        """
        fields = (self.rows, self.tokens, self.expanded, self.inverse, self.buffers, self.views)
        return isinstance(node, Node) and any(node in nodes for nodes in fields)

    def accept(self, node: Node) -> bool:
        """Record a reader of a value that depends on the order; return True if its use is of a known kind."""
        if node.op != "call_function":
            return False
        is_result_of_rows = node.target is operator.getitem and node.args[0] in self.rows
        if is_result_of_rows or value_origin(node) in self.rows:  # a copy, or a view that undoes a view
            self.rows.add(node)
            return True
        matchers = [self._match_read, self._match_write, self._match_add, self._match_division, self._match_expand]
        matchers += [self._match_counts, self._match_product, self._match_row_wise, self._match_view]
        return any(match(node) for match in matchers)

    def _match_read(self, node: Node) -> bool:
        """Match a read that sorts rows, x[order] or x[order // k], or that unsorts them, rows[inverse].

        Instead of an index, it may be a gather along dim 0 with the order expanded over all columns.
        """
        if node.target is aten.index.Tensor and len(node.args[1]) == 1:
            x, (index,) = node.args
        elif node.target is aten.gather.default and node.args[1] == 0:
            x, index = node.args[0], self._row_index(node.args[2], node.args[0])
        else:
            return False
        if index in self.inverse and x in self.rows:
            self.unsorted[node] = x
            return True
        times = self.tokens.get(index)  # how often each row is read; None for another index
        # x is unsorted, and all reads together are R rows.
        if times is None or self.is_in_key_order(x) or not self.has_length(node_shape(x)[0] * times):
            return False
        self.sorted_reads[node] = times
        self.rows.add(node)
        return True

    def _match_add(self, node: Node) -> bool:
        """Match out.index_add(0, order // k, rows), which restores the order of rows and adds the k rows of each token.

        Also a scatter_add with an index for all columns of out and of the rows: order // k expanded over the columns.
        """
        if node.target not in (aten.index_add.default, aten.scatter_add.default) or node.args[1] != 0:
            return False
        out, _, index, rows = node.args[:4]
        if node.target is aten.scatter_add.default:
            index = self._row_index(index, out, rows)
        times = self.tokens.get(index)
        if times is None or self.is_in_key_order(out) or rows not in self.rows or OpCall(node).get("alpha", 1) != 1:
            return False
        if not self.has_length(node_shape(out)[0] * times):
            return False
        self.unsorted[node], self.summed[node] = rows, times
        return True

    def _row_index(self, index: Node, *tables: Node) -> Node | None:
        """Return the vector that an index (R, columns) of a gather or scatter repeats, or None.

        None also if a table, whose rows are read or written, has other columns: only the first ones would be.
        """
        is_complete = all(is_same_shape(node_shape(index)[1:], node_shape(table)[1:]) for table in tables)
        return self.expanded.get(index) if is_complete else None

    def _match_expand(self, node: Node) -> bool:
        """Match the order or tokens (R,) viewed as (R, 1) or expanded to (R, columns), as gather reads them."""
        source = node.args[0]
        shape = node_shape(node) if is_tensor(node) else ()
        if len(shape) != 2:
            return False
        if node.target is aten.expand.default:
            vector = self.expanded.get(source)
        elif is_same_size(shape[1], 1) and is_order_preserving(node):
            vector = source if source in self.tokens else None
        else:
            return False
        if vector is None or not self.has_length(shape[0]):
            return False
        self.expanded[node] = vector
        return True

    def _match_write(self, node: Node) -> bool:
        """Match a write that unsorts rows, or the inverse of the order.

        out[order] = rows unsorts them, without a cast or broadcast. The inverse is argsort(order), or buffer[order] =
        arange(R) with a buffer such as empty_like(order), which is matched first.
        """
        if node.target in FACTORIES_LIKE and node.args[0] is self.order:
            self.buffers.add(node)
            return True
        if node.target in ARGSORT_OPS and node.args[0] is self.order and not OpCall(node)["descending"]:
            self.inverse.add(node)
            return True
        if node.target not in SCATTER_OPS or OpCall(node)["accumulate"] or node.args[1] != [self.order]:
            return False
        out, _, values = node.args[:3]
        is_own_buffer = out in self.buffers or out in self.rows  # its rows do not matter: all R are overwritten
        if not self.has_length(node_shape(out)[0]) or (self.is_in_key_order(out) and not is_own_buffer):
            return False
        if not is_same_shape(node_shape(values), node_shape(out)):  # rows are broadcast to those of out
            return False
        if is_arange(values):
            self.inverse.add(node)
            return True
        if values not in self.rows or out.meta["val"].dtype != values.meta["val"].dtype:
            return False
        self.unsorted[node] = values
        return True

    def _match_division(self, node: Node) -> bool:
        """Match order // k, the token of each sorted row if each token has k rows."""
        k = node.args[1] if node.target is aten.floor_divide.default else None
        if node.args[0] is not self.order or not isinstance(k, int | Node) or is_tensor(k):  # k is a size, not a tensor
            return False
        self.tokens[node] = as_size(k)
        return True

    def _match_counts(self, node: Node) -> bool:
        """Match a count of rows per key, histc(keys), which is equal for sorted and unsorted keys.

        A count of the sorted keys is recorded, since it must read the unsorted keys in the rewritten graph; a count of
        the unsorted keys does not change.
        """
        if node.target is not aten.histc.default:
            return False
        x = _skip_exact_casts(node.args[0])
        if x is self.keys:
            self.counts.add(node)
        return x in (self.keys, self.ids)

    def _match_group_ends(self, node: Node, num_groups: Size) -> bool:
        """Return True if a node is the ends of the groups of rows, an operand of grouped products.

        That is the cumulative sum of histc(keys, num_groups, 0, num_groups - 1), the counts of the keys 0, ...,
        num_groups - 1. With `num_groups` as the upper end, each bin still contains exactly one key.
        """
        if node.target is not aten.cumsum.default:
            return False
        counts = _skip_exact_casts(node.args[0])
        if not self._match_counts(counts):  # of the keys of this sort
            return False
        call = OpCall(counts)
        has_bin_for_each_key = call["min"] == 0 and call["max"] in (call["bins"] - 1, call["bins"])
        return has_bin_for_each_key and is_same_size(call["bins"], num_groups)

    def _match_product(self, node: Node) -> bool:
        """Match a grouped product of sorted rows: it multiplies the rows of each key by one matrix, w[key].

        The keys must be integers in ascending order, as the ends of the groups assume.
        """
        name = schema_of(node.target).name if isinstance(node.target, OpOverload) else ""
        has_ascending_keys = not self.descending and not self.ids.meta["val"].is_floating_point()
        if name not in GROUPED_MM_OPS or len(node.args) != 3 or node.kwargs or not has_ascending_keys:
            return False
        x, w, ends = node.args  # rows (R, I), matrices (E, I, O), ends of the groups (E,)
        if x not in self.rows or self.is_in_key_order(w) or not self._match_group_ends(ends, node_shape(w)[0]):
            return False
        self.products[node] = name
        self.rows.add(node)
        return True

    def _match_row_wise(self, node: Node) -> bool:
        """Match an op of which row r of the result depends on row r of the operands only.

        The sharding rule of the op shows it: of "r i, i o -> r o" for a linear layer, the first dim of the rows, r, is
        the first dim of the result. All rows must have one such factor, and no other dim of an operand or result may
        contain it.
        """
        call, rule = lookup_rule(node) or (None, None)
        if call is None or rule is None or not is_pure(node) or self.rows.isdisjoint(call.operands):
            return False
        row_factors: set[str] = set()  # of the first dims of rows
        other_factors: set[str] = set()  # of all other dims
        for x, dims in zip(call.operands, rule.operands):
            if x in self.rows:
                row_factors.add(dims[0])
                other_factors.update(flatten_dims(dims[1:]))
            elif self.is_in_key_order(x):
                return False
            else:
                other_factors.update(flatten_dims(dims))
        for dims in rule.results:
            row_factors.add(dims[0] if dims else "")  # "": a result without dims has no rows, and is rejected below
            other_factors.update(flatten_dims(dims[1:]))
        if len(row_factors) != 1:
            return False
        (row_factor,) = row_factors
        is_single_factor = bool(row_factor) and not row_factor.startswith("(")  # (r i) is a flattened dim
        # Kind "pass": each row is computed independently; rows are not summed, scanned or mixed.
        if not is_single_factor or row_factor in other_factors or rule.kind(row_factor) != "pass":
            return False
        self.rows.add(node)
        return True

    def _match_view(self, node: Node) -> bool:
        """Match a view whose first dim is not the rows, as y.view(-1) or y.T for rows y (R, columns).

        `accept` matches a later view that restores the rows.
        """
        if is_rearrangement(node):  # a permutation, a reshape or a copy
            self.views.add(node)
        return node in self.views


def _find_uses(node: Node, call: OpCall) -> _SortUses:
    """Return the uses of a sort: all readers of values that depend on its order, up to values that do not.

    A use of an unknown kind is `_SortUses.unsupported`.
    """
    results = read_results(node)  # (sorted keys, order) by index; an argsort returns only the order
    is_argsort = is_tensor(node)
    # If nothing reads the order, the sort itself is in its place.
    order, keys = (node, None) if is_argsort else (results.get(1, node), results.get(0))
    uses = _SortUses(call.operands[0], order, keys, call["descending"])
    uses.tokens[order] = 1
    if keys is not None:
        uses.rows.add(keys)
    for reader in dropwhile(lambda n: n is not node, node.graph.nodes):  # the sort and all nodes after it
        is_use = reader not in (node, *results.values()) and any(map(uses.is_in_key_order, reader.all_input_nodes))
        if is_use and not uses.accept(reader):
            uses.unsupported = uses.unsupported or reader
    return uses


def _is_full_slice(node: Node) -> bool:
    """Return True for a slice x[:n] of all n rows, which `_rewrite` removes: a rank has fewer rows than n."""
    return node.target is aten.slice.Tensor and is_copy(node)


def _skip_exact_casts(node: Node) -> Node:
    """Return the keys or counts before casts to dtypes that represent these integers exactly, on the same device.

    A cast of other values than integers or counts, which rounds them, is returned itself.
    """
    node = value_origin(node)
    value = node.meta["val"]
    source = move_source(node) if is_cast_op(node) else None
    if source is None or value.dtype not in EXACT_DTYPES or source.meta["val"].device != value.device:
        return node
    source = _skip_exact_casts(source)
    is_integer = source.target is aten.histc.default or not source.meta["val"].is_floating_point()
    return source if is_integer else node
