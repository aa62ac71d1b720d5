"""Offload saved values of a forward to host memory until the backward reads them.

    forward   x = ...; h = sp.offload(x); ... sp.offloaded(h, x); return (..., h)
    backward  y = sp.reload(h, device); ... sp.reloaded(y); ... reads of y

`offload` and `reload` start a copy, `offloaded` and `reloaded` wait for it. A saved value is an output of the forward
that the backward reads. It fills its storage if it has all elements of it; other values of a storage are views.

Works on both partitions of a joint graph, where the saved values and the order of nodes are known. A copy starts when
its value is computed, and its wait is placed where products and attention have taken as long as the copy; a copy back
starts that long before the first use. Values with the largest product of bytes and unused time are offloaded first.
Inputs of checkpointed blocks are such values. Values that share a storage, such as queries, keys and values of one
product, are copied as that storage and become views of it again.

torch 2.13's own pass (`torch._functorch._activation_offloading`) accepts marks but no amounts. It supports no ops
with several outputs (attention), does not run on a CPU, and keeps copied values on the device until the forward ends.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from sp_compile.lowering import offload_ops as _ops  # noqa: F401  (registers the operators)
from sp_compile.lowering.tiles.tile_flops import node_flops
from sp_compile.lowering.torch_compat import storage_of
from sp_compile.passes.base import Pass
from sp_compile.passes.cost.group_names import is_collective
from sp_compile.passes.cost.machine import Machine, copy_seconds
from sp_compile.passes.cost.step_memory import MIN_OFFLOAD_BYTES, GraphStep, HostValues, StepMemory
from sp_compile.passes.cost.walk.live_values import nbytes_of, storage_bytes
from sp_compile.passes.cost.weight_memory import ModelBytes
from sp_compile.passes.graph.call import is_tensor
from sp_compile.passes.graph.sizes import (
    Size,
    as_size,
    as_sizes,
    is_same_shape,
    is_same_size,
    nonempty_size,
    size_product,
)

from .joint_context import PartitionContext

sp, aten = torch.ops.sp, torch.ops.aten


class OffloadValues(Pass):
    """Pass that offloads saved values of one graph.

    The option `offload` is a share of the saved bytes, or "auto": the smallest amount with which the step fits. A
    storage is chosen and copied as a unit. In all methods it is identified by the node x whose value fills it.
    """

    requires = frozenset({"captured", "overlapped collectives"})
    machine: Machine

    @classmethod
    def of(cls, context: PartitionContext) -> Pass | None:
        """Create the pass if the option `offload` is set and the graph has a backward, else return None."""
        return cls() if context.options.offload != "never" and context.backward is not None else None

    def apply(self, gm: GraphModule, context: PartitionContext) -> int:
        """Insert copies of saved values to the host in the forward and back in the backward; return their number.

        Appends the offloaded bytes and the expected seconds of the copies to `context.on_host`, for the report.
        """
        backward, options = context.backward, context.options
        assert backward is not None
        self.machine = context.machine_of_nodes(gm.graph.nodes)
        saved = _SavedValues.of(gm.graph, backward.graph, context.results)
        schedule = _OffloadSchedule(saved, gm.graph, backward.graph, self.machine)
        # `chosen` maps the node that fills each chosen storage to the bytes of the storage.
        if options.offload == "auto":
            chosen = self._choose_fitting(schedule, self._excess_bytes(gm.graph, backward.graph, context))
        else:
            chosen = self._choose_share(schedule, float(options.offload) * saved.nbytes)
        total, wait_seconds = sum(chosen.values()), 0.0  # seconds in which compute waits for copies
        if chosen:
            wait_seconds = self._copy_to_host(gm.graph, schedule, chosen)
            wait_seconds += self._copy_from_host(backward.graph, schedule, chosen)
            backward.graph.lint()
            backward.recompile()
        seconds = copy_seconds(total, self.machine)
        context.on_host.append(
            HostValues(len(chosen), total, kept=saved.nbytes - total, seconds=seconds, waits=wait_seconds)
        )
        return len(chosen)

    def _excess_bytes(self, forward: Graph, backward: Graph, context: PartitionContext) -> dict[Node, float]:
        """Return the bytes by which a step without offloading exceeds the device's memory, by node of a partition.

        It has the nodes with an excess only; none if the device's memory is unknown. While a node runs, memory contains
        the state of the model, which is constant, and the live values.
        """
        if math.isinf(self.machine.memory):
            return {}
        is_sharded = bool(context.memory) and context.options.state == "sharded"
        # The bytes of a model that FSDP shards. None if every device stores all parameters: they are counted below.
        state = context.memory[-1].state if is_sharded else None
        graph_step = GraphStep.of(forward, backward, context.options.is_inductor, context.input_bytes)
        step, n = StepMemory(state or ModelBytes(0, 0, 0, 0), graphs=[graph_step]), context.ranks.n
        if state is not None:
            constant_bytes = step.sharded_state(n)
        else:  # parameters and buffers are inputs of the forward
            constant_bytes = sum(storage_bytes(forward.find_nodes(op="placeholder")).values())
        forward_nodes, backward_nodes = ({node.name: node for node in graph.nodes} for graph in (forward, backward))
        excess = dict[Node, float]()
        for point in step.points():  # predicted memory while a kernel (`point.moment`) runs, which has a node's name
            live_bytes = step.sharded_bytes(point, n) if state is not None else point.nbytes
            excess_bytes = constant_bytes + live_bytes - self.machine.memory
            if excess_bytes > 0:
                nodes = backward_nodes if point.in_backward else forward_nodes
                excess[nodes[point.moment.name]] = excess_bytes
        return excess

    def _choose_share(self, schedule: _OffloadSchedule, max_bytes: float) -> dict[Node, int]:
        """Choose storages of at most `max_bytes` in total, and return the bytes of each.

        Used if the option `offload` is a share of the saved bytes. Storages are chosen in the order of their benefit,
        the bytes times the seconds for which they are not on the device. A storage is identified by the node x whose
        value fills it.
        """
        chosen, storages = dict[Node, int](), schedule.saved.storages
        for x in sorted(storages, key=schedule.freed_byte_seconds, reverse=True):
            if sum(chosen.values()) + storages[x].nbytes <= max_bytes:
                chosen[x] = storages[x].nbytes
        return chosen

    def _choose_fitting(self, schedule: _OffloadSchedule, excess: Mapping[Node, float]) -> dict[Node, int]:
        """Choose a small set of storages whose offloading removes the excess; return the bytes of each.

        Used for offload="auto". A storage is identified by the node x whose value fills it. It helps at the nodes
        between its copy to the host and its copy back. At the node with the largest excess, the smallest storage that
        removes the excess is chosen, or else the one with the largest benefit (`freed_byte_seconds`). This is repeated
        until no excess remains, or no storage that helps. At the end, storages that later choices have made unnecessary
        are dropped (`_drop_unneeded`).

        Args:
            schedule: The copies of any set of storages.
            excess: The bytes that exceed the device's memory at each node.
        """
        bytes_of = {x: storage.nbytes for x, storage in schedule.saved.storages.items()}
        # Below, a node is identified by its number, its position in the forward and then the backward.
        excess_at = sorted((schedule.order[node], nbytes) for node, nbytes in excess.items())
        ranges = {x: schedule.copies([x]).offloaded[x] for x in bytes_of}  # numbers of the nodes at which x helps
        chosen, remaining = dict[Node, int](), dict(excess_at)  # remaining: excess by node, with the chosen offloaded
        rejected = set[tuple[int, Node]]()  # (node, storage) where the storage does not help
        without_candidates = set[int]()  # nodes at which no storage is left to choose
        while exceeded := [i for i, nbytes in remaining.items() if nbytes > 0 and i not in without_candidates]:
            worst = max(exceeded, key=remaining.__getitem__)
            candidates = [x for x in bytes_of if x not in chosen and worst in ranges[x] and (worst, x) not in rejected]
            sufficient = [x for x in candidates if bytes_of[x] >= remaining[worst]]
            if not candidates:
                without_candidates.add(worst)
                continue
            if sufficient:
                x = min(sufficient, key=lambda x: (bytes_of[x], -schedule.freed_byte_seconds(x)))
            else:
                x = max(candidates, key=schedule.freed_byte_seconds)
            remaining_with_x = schedule.remaining_bytes(excess_at, {**chosen, x: bytes_of[x]})
            if remaining_with_x[worst] < remaining[worst]:
                chosen[x], remaining = bytes_of[x], remaining_with_x
            else:  # its copy waits for the chosen copies, so that x is still on the device at this node
                rejected.add((worst, x))
        return self._drop_unneeded(schedule, excess_at, chosen, remaining)

    def _drop_unneeded(
        self, schedule: _OffloadSchedule, excess_at: Sequence[tuple[int, float]], chosen: dict[Node, int],
        remaining: dict[int, float],
    ) -> dict[Node, int]:  # fmt: skip
        """Return the chosen storages that are needed: drop each, the largest first, if no node then has more excess.

        Args:
            schedule: The copies of any set of storages.
            excess_at: Number of a node, and the excess bytes at it without offloading, in order.
            chosen: Bytes of the chosen storages, by the nodes that fill them.
            remaining: Excess bytes at each node, by number, if these are offloaded.
        """
        for x in sorted(chosen, key=chosen.__getitem__, reverse=True):
            others = {y: nbytes for y, nbytes in chosen.items() if y is not x}
            remaining_without_x = schedule.remaining_bytes(excess_at, others)
            if all(remaining_without_x[i] <= max(0.0, nbytes) for i, nbytes in remaining.items()):
                chosen, remaining = others, remaining_without_x
        return chosen

    def _copy_to_host(self, graph: Graph, schedule: _OffloadSchedule, chosen: Mapping[Node, int]) -> float:
        """Insert the copies to the host in the forward, and return them in place of the saved values.

        A copy starts directly after the node that computes its value. Its wait (sp::offloaded) is inserted before the
        first node that is expected to run after the end of the copy, or else before the output.

        Args:
            graph: The forward graph.
            schedule: The expected times of nodes and copies.
            chosen: The nodes whose values fill the storages to copy.

        Returns:
            The seconds that the end of the forward waits for copies.
        """
        self.edit(graph)
        # Seconds from the start of the forward until each node starts, and until each copy ends.
        times, ends, output = schedule.forward, schedule.copies(chosen).ends, graph.output_node()
        # Values whose copy has no wait yet, in order; and the copy of each value.
        pending, host_copies = deque[Node](), dict[Node, Node]()
        for node in [n for n in graph.nodes if n.op != "placeholder"]:
            while pending and (node is output or ends[pending[0]] <= times[node]):
                x = pending.popleft()
                with graph.inserting_before(node):
                    self.emit(sp.offloaded.default, (host_copies[x], x), None, x)
            if node in chosen:
                with graph.inserting_after(node):
                    host_copies[node] = self.compute(sp.offload.default, (node,), node)
                pending.append(node)
        # All saved values in a storage are replaced by its copy, of which the backward rebuilds them.
        copy_of = {value: host for x, host in host_copies.items() for value in schedule.saved.storages[x].values}
        output.args = (tuple(copy_of.get(x, x) for x in output.args[0]),)
        return max(0.0, max(ends.values()) - max(times.values(), default=0.0))

    def _copy_from_host(self, graph: Graph, schedule: _OffloadSchedule, chosen: Iterable[Node]) -> float:
        """Insert the copies back to the device in the backward, whose inputs are now copies on the host.

        A copy starts early enough to end before the first reader of its value. Before that reader follow the wait for
        the copy (sp::reloaded), and views of the copy for the saved values in the storage.

        Args:
            graph: The backward graph.
            schedule: The expected times of nodes and copies.
            chosen: The nodes of the forward whose values fill the storages to copy.

        Returns:
            The seconds that the backward waits at its start for copies.
        """
        self.edit(graph)
        saved, times, order = schedule.saved, schedule.backward, schedule.order
        # Seconds after the start of the backward at which each copy starts; below 0 if it should start earlier.
        begins, nodes = schedule.copies(chosen).begins, [n for n in graph.nodes if n.op != "placeholder"]
        # `begins` starts with the storage that is read last. Copies and waits at the same node have to be in the order
        # of reads, so each is inserted before the ones already there. Of these, the first copy and wait at each node:
        first_copies, first_waits = dict[Node, Node](), dict[Node, Node]()
        for x, begin in begins.items():
            backward_input, reader = saved.inputs[saved.storages[x].values[0]], schedule.first_reader[x]
            scheduled_node = next(n for n in nodes if times[n] >= begin)
            next_node = min(scheduled_node, reader, key=order.__getitem__)
            with graph.inserting_before(first_copies.get(next_node) or first_waits.get(next_node) or next_node):
                args = (backward_input, x.meta["val"].device)
                device_copy = first_copies[next_node] = self.emit(sp.reload.default, args, x.meta["val"], x)
            with graph.inserting_before(first_waits.get(reader) or reader):
                first_waits[reader] = self.emit(sp.reloaded.default, (device_copy,), None, x)
            with graph.inserting_after(first_waits[reader]):
                self._rebuild_views(saved, x, device_copy)
        # The values of the backward's inputs are those of the copies on the host, which the forward returns.
        for x in chosen:
            host_copy = next(user for user in x.users if user.target is sp.offload.default)
            for value in saved.storages[x].values:
                backward_input = saved.inputs[value]
                backward_input.meta = {**backward_input.meta, "val": host_copy.meta["val"]}
                backward_input.meta.pop("tensor_meta", None)  # describes the value on the device
        return max(0.0, -min(begins.values(), default=0.0))

    def _rebuild_views(self, saved: _SavedValues, x: Node, device_copy: Node) -> None:
        """Let the backward read views of `device_copy`, the copy of x, in place of the saved values in x's storage.

        Where a saved value has the shape and the strides of x, it reads the copy itself.
        """
        for value in saved.storages[x].values:
            view_node, view = device_copy, value.meta["val"]
            if not _is_same_view(view, x.meta["val"]):
                offset, *shape_and_strides = self.sizes.list(_storage_layout(view))
                args = (device_copy, shape_and_strides[: view.dim()], shape_and_strides[view.dim() :], offset)
                view_node = self.compute(aten.as_strided.default, args, value)
            # The copy back, sp.reload, continues to read the backward's input, which is the copy in host memory.
            saved.inputs[value].replace_all_uses_with(view_node, lambda user: user is not device_copy)


@dataclass(frozen=True)
class _SavedStorage:
    """A storage with saved values, which are offloaded together."""

    nbytes: int  # bytes of the storage
    values: list[Node]  # saved values in this storage


@dataclass
class _SavedValues:
    """The values that a forward saves for its backward."""

    inputs: dict[Node, Node]  # the backward's inputs, by the forward's values
    nbytes: int  # of all saved values, without inputs of the forward
    # The offloadable storages, by the node that fills each one: without gaps, and not of an input or output.
    storages: dict[Node, _SavedStorage]

    @staticmethod
    def of(forward: Graph, backward: Graph, n_results: int) -> _SavedValues:
        """Collect the saved values of a joint graph's partitions, and the storages that can be offloaded.

        A storage can be offloaded if a node of the forward fills it, and all saved values in it are views of that
        node's value. It contains no input or result of the forward, since the caller may keep these.

        Args:
            forward: The forward graph. Its outputs are its results, then the saved values.
            backward: The backward graph. Its inputs have the names of the saved values.
            n_results: Number of the results.
        """
        outputs: Sequence[Node] = forward.output_node().args[0]  # type: ignore[assignment]
        backward_inputs = {n.name: n for n in backward.find_nodes(op="placeholder")}
        inputs = {n: backward_inputs[n.name] for n in outputs[n_results:] if n.name in backward_inputs}
        input_storages = storage_bytes(forward.find_nodes(op="placeholder"))
        values = [n for n in inputs if is_tensor(n) and storage_of(n.meta["val"]) not in input_storages]
        total = sum(storage_bytes(values).values())  # bytes of all saved values but inputs
        values_of_storage = defaultdict[int, list[Node]](list)
        for n in values:
            values_of_storage[storage_of(n.meta["val"])].append(n)
        for storage in storage_bytes(n for n in outputs[:n_results] if isinstance(n, Node)):
            values_of_storage.pop(storage, None)
        # The symbolic sizes that the backward has as inputs: it can compute views of these sizes.
        input_values = [n.meta.get("val") for n in backward_inputs.values()]
        known = {as_size(value) for value in input_values if isinstance(value, torch.SymInt)}
        # Find the node that fills each storage: one of the saved values, or another node of which they are views.
        storages = dict[Node, _SavedStorage]()
        for node in filter(is_tensor, (*values, *forward.nodes)):
            storage = storage_of(node.meta["val"])
            views = values_of_storage.get(storage, [])
            if views and _can_offload(node) and all(_can_rebuild(view, node, known) for view in views):
                storages[node] = _SavedStorage(nbytes_of(node.meta["val"]), values_of_storage.pop(storage))
        # MIN_OFFLOAD_BYTES is a fraction of all saved bytes.
        large = {n: storage for n, storage in storages.items() if storage.nbytes > MIN_OFFLOAD_BYTES * total}
        return _SavedValues(inputs, total, large)

    def readers(self, x: Node) -> list[Node]:
        """Return the nodes of the backward that read a saved value in the storage that x fills."""
        return [user for value in self.storages[x].values for user in self.inputs[value].users]


@dataclass(frozen=True)
class _CopySchedule:
    """The times of the copies of some storages, each identified by the node whose value fills it."""

    ends: dict[Node, float]  # seconds after the start of the forward at which copies to the host end
    begins: dict[Node, float]  # seconds after the start of the backward (below 0: before) at which copies back start
    # Numbers of the nodes (positions in forward and backward) that run while the storage is on the host only.
    offloaded: dict[Node, range]


class _OffloadSchedule:
    """The schedule of copies: when each node of both partitions runs, and how long a copy takes.

    Times are seconds of products and attentions since the start of the partition; other ops take none. The number of a
    node is its position in the list of all nodes of the forward, then of the backward (`order`). `forward[x]` is the
    time at which node x of the forward starts; `forward_times` lists these times in order; likewise for the backward.
    """

    def __init__(self, saved: _SavedValues, forward: Graph, backward: Graph, machine: Machine) -> None:
        """Compute when each node runs, and where each storage is used last and is read first in the backward.

        Args:
            saved: The saved values, and their storages by the nodes that fill them.
            forward: The forward graph.
            backward: The backward graph.
            machine: The speed of compute and of copies.
        """
        self.saved, self.machine = saved, machine
        # Seconds from the start of a partition until each of its nodes starts.
        self.forward, self.backward = _node_times(forward, machine), _node_times(backward, machine)
        self.forward_times, self.backward_times = list(self.forward.values()), list(self.backward.values())
        self.order = {n: i for i, n in enumerate([*self.forward, *self.backward])}  # numbers of nodes
        # First reader in the backward of each storage that has readers.
        readers = {x: saved.readers(x) for x in saved.storages}
        self.first_reader = {x: min(users, key=self.order.__getitem__) for x, users in readers.items() if users}
        # Number of the last node in the forward that reads or writes each storage.
        last_of_storage = dict[int, int]()
        for node in self.forward:
            if node.op != "output":
                storages = storage_bytes([node, *node.all_input_nodes])  # of its results and operands, as keys
                last_of_storage |= dict.fromkeys(storages, self.order[node])  # later nodes replace earlier ones
        self.last_use = {x: last_of_storage[storage_of(x.meta["val"])] for x in saved.storages}

    def freed_byte_seconds(self, x: Node) -> float:
        """Return the benefit of offloading the storage that x fills, by which storages are ranked.

        It is the number of bytes times the seconds between the node x in the forward and its first reader in the
        backward.
        """
        forward_end = max(self.forward_times, default=0.0)
        first_read = self.backward[self.first_reader[x]] if x in self.first_reader else 0.0
        return self.saved.storages[x].nbytes * (forward_end - self.forward[x] + first_read)

    def copies(self, chosen: Iterable[Node]) -> _CopySchedule:
        """Return when the copies of the chosen storages run, and at which nodes the storages are not on the device.

        One copy runs at a time in each direction. A copy to the host starts when its value is computed and the previous
        copy has ended. Copies back are scheduled in reverse, from the storage that is read last, each as late as
        possible: it ends before the first read of its value, and before the next copy starts.

        Args:
            chosen: The nodes x whose values fill the storages. `self.forward[x]` is the time at which x runs.
        """
        # The time at which each copy to the host ends, and at which each copy back begins.
        ends, begins, offloaded = dict[Node, float](), dict[Node, float](), dict[Node, range]()
        seconds = {x: copy_seconds(self.saved.storages[x].nbytes, self.machine) for x in chosen}
        last_end, next_begin = 0.0, math.inf
        for x in sorted(seconds, key=self.order.__getitem__):
            last_end = ends[x] = max(self.forward[x], last_end) + seconds[x]
        read_values = [x for x in ends if x in self.first_reader]
        for x in sorted(read_values, key=lambda x: -self.order[self.first_reader[x]]):
            next_begin = begins[x] = min(next_begin, self.backward[self.first_reader[x]]) - seconds[x]
        # Convert the times to numbers of nodes: from the end of the copy, and the last use in the forward, to the start
        # of the copy back. A storage without readers in the backward remains on the host.
        for x, end in ends.items():
            start, stop = max(self.last_use[x] + 1, bisect_left(self.forward_times, end)), len(self.order)
            if x in self.first_reader:
                reload_start = len(self.forward_times) + bisect_left(self.backward_times, begins[x])
                stop = min(self.order[self.first_reader[x]], reload_start)
            offloaded[x] = range(start, stop)
        return _CopySchedule(ends, begins, offloaded)

    def remaining_bytes(self, excess: Sequence[tuple[int, float]], chosen: Mapping[Node, int]) -> dict[int, float]:
        """Return the excess bytes that remain at each node, by number, if the chosen storages are offloaded.

        Args:
            excess: Number of a node and its excess bytes without offloading, in order.
            chosen: Bytes of the chosen storages.
        """
        changes = defaultdict[int, int](int)  # number of a node -> change of the offloaded bytes at it
        for x, nodes in self.copies(chosen).offloaded.items():
            if nodes:
                changes[nodes.start] += chosen[x]
                changes[nodes.stop] -= chosen[x]
        # Go through the nodes in order, with the bytes that are offloaded at each.
        remaining, change_positions, offloaded_bytes = dict[int, float](), deque(sorted(changes)), 0
        for i, nbytes in excess:
            while change_positions and change_positions[0] <= i:
                offloaded_bytes += changes[change_positions.popleft()]
            remaining[i] = nbytes - offloaded_bytes
        return remaining


def _is_same_view(x: Tensor, y: Tensor) -> bool:
    """Return True if two tensors of one storage have the same dtype and elements, in the same order."""
    return x.dtype == y.dtype and is_same_shape(_storage_layout(x), _storage_layout(y))


def _storage_layout(x: Tensor) -> tuple[Size, ...]:
    """Return the offset, shape and strides of a tensor, from which as_strided rebuilds it, as one tuple."""
    return tuple(map(nonempty_size, as_sizes((x.storage_offset(), *x.shape, *x.stride()))))


def _can_rebuild(node: Node, full: Node, known: Set[Size]) -> bool:
    """Return True if the backward can rebuild a saved value from the value that fills its storage.

    Only the latter is copied to the host. The saved value is equal to it, or an as_strided view of it whose sizes,
    strides and offset are known in the backward.

    Args:
        node: The saved value.
        full: The value that fills its storage.
        known: The symbolic sizes that are inputs of the backward.
    """
    x, y = node.meta["val"], full.meta["val"]
    if _is_same_view(x, y):
        return True
    expressions = [size for size in _storage_layout(x) if isinstance(size, sympy.Expr)]
    symbols = {symbol for expression in expressions for symbol in expression.free_symbols}
    starts_at_zero = is_same_size(as_size(y.storage_offset()), 0)  # as its copy does, so that offsets of views remain
    return x.dtype == y.dtype and starts_at_zero and symbols <= known


def _can_offload(node: Node) -> bool:
    """Return True if the node's value can be copied to the host: it fills its storage, and an op has computed it.

    The result of a collective cannot, since it is complete only after its wait.
    """
    x = node.meta["val"]
    nbytes, bytes_of_storage = size_product(as_sizes(x.shape)) * x.element_size(), x.untyped_storage().nbytes()
    # torch's size of a storage has terms Max(1, size), which `nonempty_size` replaces by the size.
    fills_storage = is_same_size(nbytes, nonempty_size(as_size(bytes_of_storage)))
    return fills_storage and node.op == "call_function" and not is_collective(node)


def _node_times(graph: Graph, machine: Machine) -> dict[Node, float]:
    """Return the time at which each node of a partition starts: the seconds of matrix products and attention before it.

    These hide copies to the host; other ops are expected to take no time. Nodes are in graph order.
    """
    times, now = dict[Node, float](), 0.0
    for node in graph.nodes:
        times[node] = now
        now += node_flops(node) / machine.flops  # 0 for other ops
    return times
