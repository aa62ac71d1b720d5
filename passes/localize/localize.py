"""Rewrite a graph from the global view to the program of one rank, which is identical on all ranks.

    x: f32[B, S, D] -> linear(x, w)    becomes    linear(sp.shard(x), sp.reduce_grad(w))  on f32[B, ceil(S/n), D]

The result is the local graph; its nodes have local values, the parts of one rank. In the PlacementPlan, `placements`
has the placement of each value, and `wants` those that a node demands of its operands; nodes in `wants` run on shards.
A gradient is partial if each rank has a summand of it. A rank's last rows may be padding, see `fill_padding.py`.

The pass inserts only the ops that the edges of the PlacementPlan need: `sp::shard` (a local slice) where a replicated
value is read on shards, `sp::reduce_grad` where a replicated value is an operand of sharded compute (the identity; its
backward sums the gradient), and `sp::mask` where a sum would include padding. Size arguments become local. The forward
adds no traffic. It raises for a plan with open demands and for sizes that no input determines.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from sp_compile.lowering.base.errors import SpError, describe_node
from sp_compile.lowering.torch_compat import graph_module, keep_calling_convention
from sp_compile.passes.base import Pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, is_tensor, read_results
from sp_compile.passes.graph.differentiable import differentiable_nodes
from sp_compile.passes.graph.edit import INHERITED_META, GraphEditor, erase_dead
from sp_compile.passes.graph.mutation import is_written
from sp_compile.passes.graph.node_info import node_info, set_node_info
from sp_compile.passes.graph.sizes import as_size, is_same_size
from sp_compile.passes.sharding.placement import Partial, Placement, PlacementPlan, Replicate, Shard
from sp_compile.passes.sharding.rule import BoundRule, lookup_rule

from .fill_padding import find_loose_padding, is_shorter_window
from .reduce_gradients import find_partial_grad_nodes, make_buckets, move_before_use, needs_grad_sum
from .validate_shapes import local_shape

sp, aten = torch.ops.sp, torch.ops.aten
COPIED_META = (*INHERITED_META, "original_aten", "seq_nr")


class Localize(Pass):
    """Pass that creates the program of one rank.

    It raises SpError if a demand is open: no strategy has inserted an op for it.
    """

    requires = frozenset({"no demands", "checked"})
    provides = frozenset({"local"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Replace the graph, `self.gm`, by the program of one rank, and return the number of nodes that run on shards.

        The plan is also stored as `context.input_placements`, the placements in the global graph, which is the input of
        this pass. Later passes need them, and cannot compute them from local values.
        """
        plan = context.input_placements = context.plan(gm)
        if plan.demands:
            first = plan.demands[0]
            cause = f"needs an exchange between ranks that no pass has inserted (a demand of kind {first.kind!r})"
            why = f": {first.why}" if first.why else ""
            raise SpError("SP913", f"{describe_node(first.node)} {cause}{why}.")
        self.gm = _Localizer(gm, plan, context).run()
        return len(plan.wants)


class _Localizer(GraphEditor):
    """Builder of a local graph, which copies a global graph node by node.

    An operand is converted if its user demands another placement than it has: a replicated value is sliced, or its
    gradient is summed. Each conversion is emitted once, for all users.
    """

    def __init__(self, gm: GraphModule, plan: PlacementPlan, context: PassContext) -> None:
        self.old, self.plan, self.ranks, self.param_grads = gm, plan, context.ranks, context.options.param_grads
        self.graph = Graph()
        keep_calling_convention(self.graph, gm.graph)
        self.env: dict[Node, Node] = {}  # global node -> local node
        # global split of the sequence -> the local value of each piece. No rank runs the split: a piece has the rows of
        # the operand and a shorter window, so that its local value is that of the operand, or a copy of it with
        # restored padding.
        self.split_values: dict[Node, tuple[Node, ...]] = {}
        # (global node, placement that a user demands) -> the local value in this placement
        self.converted: dict[tuple[Node, Placement], Node] = {}
        self.differentiable = differentiable_nodes(gm)  # global nodes that may have a gradient
        # replicated global nodes whose gradient is partial on every rank, see reduce_gradients.py
        self.partial_grad_nodes = find_partial_grad_nodes(gm, plan, self.differentiable)
        # global nodes whose padded rows must be restored, see fill_padding.py
        self.loose_padding = find_loose_padding(gm, plan, self.ranks.n)

    def run(self) -> GraphModule:
        """Return the local GraphModule. `node_info(node).origin` maps its nodes to nodes of the global graph.

        Inputs come first, then their sizes, attributes and the reductions of gradients, which all other nodes may read.
        At the end, the reductions are moved to their first readers, so that the backward reduces each gradient early.
        """
        sources = [n for n in self.old.graph.nodes if n.op in ("placeholder", "get_attr")]
        for node in sources:
            if node.op == "placeholder":
                self._copy(node)
        self.edit(self.graph)  # from here on, nodes of sizes can be computed from the inputs
        self._localize_symbols(sources)
        for node in sources:
            if node.op == "get_attr" and is_tensor(node):
                self._copy(node)
        reductions = self._emit_grad_reductions(sources)
        for node in self.old.graph.nodes:
            if node.op == "output":
                self.graph.output(torch.fx.map_arg(node.args[0], self.env.__getitem__)).meta.update(node.meta)
            # Skip nodes that have a local value: one in `env`, or several in `split_values` (a split of the sequence).
            elif node not in self.env and node not in self.split_values:
                self._emit(node)
        local = graph_module(self.old, self.graph)
        local.meta.update(self.old.meta)
        erase_dead(local.graph)
        move_before_use([node for node in reductions if node.users], local.graph)
        local.recompile()
        return local

    def _copy(self, node: Node) -> None:
        """Copy a node to the local graph, with its operands replaced by their local values, and record it."""
        self._record(node, self.graph.node_copy(node, self.env.__getitem__))

    def _record(self, old: Node, new: Node) -> None:
        """Record `new` as the local value of the global node `old`, for the users that are emitted later."""
        new.meta.update(old.meta)
        is_shard = any(isinstance(placement, Shard) for placement in self.plan.placements.get(old, ()))
        set_node_info(new, origin=old, requires_grad=old in self.differentiable, is_shard=is_shard)
        self.env[old] = self._restore_padding(old, new)

    def _restore_padding(self, old: Node, local: Node) -> Node:
        """Return the local value of the global node `old`, with restored padded rows if an op may depend on them.

        Such an op requires that padded rows repeat the nearest valid row. After x[:, :-1], for example, they do not. An
        sp::window is emitted for the nodes in `loose_padding`: it fills their padded rows with the nearest valid row.
        """
        have = self.plan.of(old)
        if old not in self.loose_padding or not isinstance(have, Shard):
            return local
        args = (local, have.dim, self.sizes.list(have.frame_arg()), self.ranks.n, self.ranks.group)
        window = self._call(sp.window.default, args, old)
        set_node_info(window, origin=old, requires_grad=old in self.differentiable)
        return window

    def _localize_symbols(self, sources: Iterable[Node]) -> None:
        """Set the fake values of inputs that are passed as shards (inputs='local'), and emit their global sizes.

        `NodeInfo.local` is the tensor or size that a rank passes. For an input that is a size S of the sequence, a rank
        passes S/n, `NodeInfo.scale` is n, and S = n * (S/n) is computed. Nodes that are emitted later find the nodes of
        both sizes in `self.sizes.known`, and are placed after `self.sizes.last`.
        """
        for node in sources:
            if node_info(node).local is not None:
                self.env[node].meta["val"] = node_info(node).local
        for node in sources:
            scale = node_info(node).scale
            if scale:
                self.sizes.known[as_size(node_info(node).local)] = self.env[node]
                with self.graph.inserting_after(self.sizes.last):
                    global_size = self.emit(operator.mul, (self.env[node], scale), node.meta["val"], node)
                self.sizes.last = self.env[node] = global_size
                self.sizes.known[as_size(node.meta["val"])] = global_size

    def _emit(self, node: Node) -> None:
        """Append the local form of a node of the global graph, and record it as the node's local value."""
        if node.op != "call_function":
            self._copy(node)
        elif node.target is operator.getitem and node.args[0] in self.split_values:
            split, index = node.args
            self.env[node] = self.split_values[split][index]
        elif node in self.plan.wants:
            self._emit_on_shards(node)
        elif isinstance(node.meta.get("val"), torch.SymInt) and any(self._is_local(a) for a in node.all_input_nodes):
            # x.size(1) of a sharded x is the global size, which the local tensor does not have
            size = self.sizes(as_size(node.meta["val"]))
            # a constant size becomes a node, too, because `env` contains nodes only
            self.env[node] = size if isinstance(size, Node) else self.graph.call_function(operator.add, (size, 0))
        else:  # a replicated node
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda x: self._replicated_operand(x, node))
            self._record(node, self._call(node.target, args, node, kwargs, node.name))

    def _replicated_operand(self, source: Node, user: Node) -> Node:
        """Return the local value of an operand of a replicated node.

        If each rank has only a summand of the user's gradient (see reduce_gradients.py), the gradient of its operand is
        summed over the ranks in place of that of the user.
        """
        if user in self.partial_grad_nodes and is_tensor(source):
            return self._convert(source, Replicate(partial_grad=True), user)
        return self.env[source]

    def _is_local(self, node: Node) -> bool:
        """Return True if the local value is a part of the node's value, so that their sizes differ."""
        return is_tensor(node) and isinstance(self.plan.of(node), Shard)

    def _emit_on_shards(self, node: Node) -> None:
        """Append the local call of a node that the plan runs on shards, and record it as the node's local value.

        It has the node's op and converted operands, except for ops that move no rows (windows, reshapes).
        """
        ruled_call = lookup_rule(node)
        assert ruled_call is not None
        call, rule = ruled_call
        wants = self.plan.wants[node]
        operands = [self._convert(x, want, node) for x, want in zip(call.operands, wants)]
        if rule is None:  # an exchange between ranks, which has the frame among its arguments
            self._record(node, self._rebuild_call(call, operands))
        elif is_shorter_window(node, self.plan):
            self._cut_window(node, operands[0])
        elif rule.reshapes:  # the elements keep their order: reshape the local operand to the local shape
            args = (operands[0], self._local_shape(node))
            self._record(node, self._call(aten.reshape.default, args, node, name=node.name))
        else:
            operands = self._mask_padding(call, rule, operands, wants)
            changed: dict[str, Any] = {}
            if rule.sizes and isinstance(self.plan.of(node), Shard):  # `sizes`: name of the argument with result sizes
                changed[rule.sizes] = self._local_shape(node)
            if node.target is sp.scaled_linear.default:  # its backward takes maxima over the ranks
                changed.update(n=self.ranks.n, group=self.ranks.group)
            self._record(node, self._rebuild_call(call, operands, **changed))

    def _rebuild_call(self, call: OpCall, operands: list[Node], **changed: Any) -> Node:
        """Append the op of a global call with local operands and the `changed` arguments."""
        args, kwargs = call.with_operands(operands, **changed)
        # The operands are local nodes already; the other nodes among the arguments are global sizes.
        args, kwargs = torch.fx.map_arg((args, kwargs), lambda x: self.env.get(x, x))
        return self._call(call.node.target, args, call.node, kwargs, call.node.name)

    def _cut_window(self, node: Node, local: Node) -> None:
        """Record the local value of a slice or split of the sequence: that of its operand, as no rows move.

        x[:, :-1] only marks the last row of x as padding. Where an op may depend on such rows, they are restored.

        Args:
            node: The slice or split in the global graph.
            local: Local value of its operand.
        """
        if isinstance(node.meta["val"], (list, tuple)):
            getitems = read_results(node)  # by index of the result
            self.split_values[node] = tuple(
                self._restore_padding(getitems[i], local) if i in getitems else local
                for i in range(len(self.plan.placements[node]))
            )
        else:
            self.env[node] = self._restore_padding(node, local)

    def _local_shape(self, node: Node) -> list[int | Node]:
        """Return the shape of the node's local value as an argument of an op, and emit nodes for symbolic sizes."""
        return self.sizes.list(local_shape(self.plan.of(node), node.meta["val"], self.ranks.n))

    def _mask_padding(
        self, call: OpCall, rule: BoundRule, operands: list[Node], wants: tuple[Placement, ...]
    ) -> list[Node]:
        """Return the operands of a sum over the sequence, with padded rows filled such that they add zero.

        Operands of other calls are unchanged. All operands of a product are filled with 0, as 0 * inf is NaN. With
        `rule.pad`, one operand's fill removes the padded rows of all, such as the ignored class among a loss's targets.
        The other operands then only need finite values in these rows. That is given, except in rows that a window of
        the sequence cuts off (`_has_cut_rows`), which may be infinite; these are filled, too.
        """
        sums_over_sequence = any(isinstance(p, Partial) for p in self.plan.placements[call.node])
        if not sums_over_sequence or node_info(call.node).combines:  # `combines`: adds or scales results of sums
            return operands
        # index of an operand -> the value for its padded rows
        fills = {i: 0 for i, want in enumerate(wants) if rule.pad is None or _has_cut_rows(want)}
        if rule.pad is not None:
            index, value = rule.pad
            fills[index] = value
        masked = list(operands)
        for i, value in fills.items():
            want = wants[i]
            if isinstance(want, Shard) and not want.frame.is_exact(self.ranks.n):  # exact: no padding
                frame = self.sizes.list(want.frame_arg())
                args = (operands[i], want.dim, frame, value, self.ranks.n, self.ranks.group)
                masked[i] = self._call(sp.mask.default, args, call.node)
        return masked

    def _call(self, target: Any, args: Iterable[Any], like: Node, kwargs: Any = None, name: str | None = None) -> Node:
        """Append a call with the metadata of `like`; `ValidateShapes` infers its value later."""
        node = self.graph.create_node("call_function", target, tuple(args), kwargs or {}, name=name)
        node.meta.update({k: like.meta[k] for k in COPIED_META if k in like.meta})
        return node

    def _convert(self, source: Node, want: Placement, user: Node) -> Node:
        """Return the local value of an operand in the placement that its user demands.

        Args:
            source: Operand, a node of the global graph.
            want: Placement that the user demands.
            user: Node of the global graph whose metadata a new node inherits.
        """
        have = self.plan.of(source)
        must_gather = isinstance(want, Replicate) and not isinstance(have, Replicate)
        assert not must_gather, f"{source} is {have} where {user} wants {want}: a demand was not claimed"
        if isinstance(want, Shard) and isinstance(have, Replicate):
            return self._convert_once(source, want, user)
        # The gradient of a partial-gradient node is summed at its operands, see reduce_gradients.py.
        needs_no_sum = have == want or source in self.partial_grad_nodes or source not in self.differentiable
        # With `partial_grad`, each rank computes a summand of the operand's gradient.
        if isinstance(want, Replicate) and want.partial_grad and not needs_no_sum:
            return self._convert_once(source, want, user)
        return self.env[source]

    def _convert_once(self, source: Node, want: Placement, user: Node) -> Node:
        """Return the value of `_emit_conversion`, emitted directly after the source at the first call for all users.

        A source that is mutated in place has other values later, so it is converted for each user, before the user.
        """
        if is_written(source):
            return self._emit_conversion(source, want, user)
        key = (source, want)
        if key not in self.converted:
            with self.insert_after(self.env[source]):
                self.converted[key] = self._emit_conversion(source, want, user)
        return self.converted[key]

    def _emit_conversion(self, source: Node, want: Placement, user: Node) -> Node:
        """Append a conversion and return its result.

        It is the slice of a replicated value if the user demands a shard, or else the identity whose backward sums the
        gradient over the ranks.
        """
        local, n, group = self.env[source], self.ranks.n, self.ranks.group
        if isinstance(want, Shard):
            new = self._call(sp.shard.default, (local, want.dim, self.sizes.list(want.frame_arg()), n, group), user)
        else:
            results = self._call(sp.reduce_grad.default, ([local], self._grad_conversion(source), n, group), user)
            new = self._call(operator.getitem, (results, 0), user)
        set_node_info(new, requires_grad=source in self.differentiable)
        return new

    def _emit_grad_reductions(self, sources: Iterable[Node]) -> list[Node]:
        """Emit one sp::reduce_grad per bucket of parameters or inputs whose gradients need a sum, and return these ops.

        One collective reduces a bucket. The results are stored in `self.converted` before any user is emitted, so that
        `_convert` returns them for all users.
        """
        reductions = []
        reduced = [
            x for x in sources if x in self.differentiable and needs_grad_sum(x, self.plan, self.partial_grad_nodes)
        ]
        parameters = [x for x in reduced if _is_parameter(x)]
        inputs = [x for x in reduced if not _is_parameter(x)]
        # Parameters and inputs have separate buckets, as `_grad_conversion` may differ between the two.
        for bucket in make_buckets(parameters) + make_buckets(inputs):
            args = ([self.env[x] for x in bucket], self._grad_conversion(bucket[0]), self.ranks.n, self.ranks.group)
            reduction = self.graph.call_function(sp.reduce_grad.default, args)
            reductions.append(reduction)
            for i, source in enumerate(bucket):
                key = source, Replicate(partial_grad=True)
                self.converted[key] = self.graph.call_function(operator.getitem, (reduction, i))
        return reductions

    def _grad_conversion(self, source: Node) -> str:
        """Return what sp::reduce_grad does with the partial gradient of an input or parameter.

        "reduce" sums it over the ranks. For parameters, the option `param_grads` may leave the sum to the user's code.
        """
        return self.param_grads if _is_parameter(source) else "reduce"


def _has_cut_rows(want: Placement) -> bool:
    """Return True if the placement has only a part of the sequence's positions, such as that of x[:, :-1].

    A row that is cut off, here the last one of x, counts as padding, but may be infinite. Other padding is finite.
    """
    if not isinstance(want, Shard):
        return False
    frame = want.frame
    return not (is_same_size(frame.start, 0) and is_same_size(frame.length, frame.size))


def _is_parameter(source: Node) -> bool:
    """Return True for a parameter or buffer: an attribute of the graph or, after lifting, one of its inputs."""
    info = node_info(source)
    return not info.constant if source.op == "get_attr" else bool(info.parameter)
