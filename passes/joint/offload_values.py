"""Offload saved values of a forward to host memory until the backward reads them.

    forward   x = ...; h = sp.offload(x); ... sp.offloaded(h, x); return (..., h)
    backward  y = sp.reload(h, device); ... sp.reloaded(y); ... reads of y

Works on both partitions of a joint graph, where the saved values and the order of nodes are known. A copy starts when
its value is computed, and its wait is placed where products and attention have taken as long as the copy; a copy back
starts that long before the first use. Values with the largest product of bytes and unused time are offloaded first.
Inputs of checkpointed blocks are such values. Values that share a storage, such as queries, keys and values of one
product, are copied as that storage and become views of it again.

torch 2.13's own pass (`torch._functorch._activation_offloading`) accepts marks but no amounts. It supports no ops
with several outputs (attention) and does not run on a CPU. It waits immediately or at the end of the forward, so that
all copied values stay on the device until then.
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
from sp_compile.lowering.torch_compat import storage_of
from sp_compile.passes.base import Pass
from sp_compile.passes.cost.group_names import is_collective
from sp_compile.passes.cost.machine import Machine
from sp_compile.passes.cost.offload_cost import MIN_OFFLOAD_BYTES, HostValues, copy_seconds, hiding_seconds
from sp_compile.passes.cost.step_memory import GraphStep, StepMemory
from sp_compile.passes.cost.walk.liveness import nbytes_of, storage_bytes
from sp_compile.passes.cost.weight_memory import ModelBytes
from sp_compile.passes.graph.call import is_tensor, node_tensors
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

    `offload` is a share of the saved bytes, or "auto": the smallest amount with which the step fits.
    """

    requires = frozenset({"captured", "overlapped collectives"})
    machine: Machine

    @classmethod
    def of(cls, job: PartitionContext) -> Pass | None:
        """Create the pass for a job, or return None if it does not apply."""
        return cls() if job.options.offload != "never" and job.backward is not None else None

    def apply(self, gm: GraphModule, job: PartitionContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        forward, backward = gm, job.backward
        assert backward is not None
        self.machine = job.machine_of_nodes(gm.graph.nodes)
        options, self.n = job.options, job.ranks.n
        self.requested, self.fused = options.offload, options.uses_inductor
        self.shards = job.memory[-1].state if job.memory and options.state == "sharded" else None
        self.input_bytes = job.input_bytes
        saved = _SavedValues.of(forward.graph, backward.graph, job.results)
        at = _node_times(forward.graph, self.machine), _node_times(backward.graph, self.machine)
        schedule = _OffloadSchedule(saved, *at, self.machine)
        if self.requested == "auto":
            chosen = self._take_fitting(schedule, self._over_limit(forward.graph, backward.graph))
        else:
            chosen = self._take_share(schedule, float(self.requested) * saved.nbytes)
        total = sum(chosen.values())
        waits = 0.0
        if chosen:
            waits = self._copy_to_host(forward.graph, schedule, chosen)
            waits += self._copy_from_host(backward.graph, schedule, chosen)
            backward.graph.lint()
            backward.recompile()
        seconds = copy_seconds(total, self.machine)
        job.on_host.append(HostValues(len(chosen), total, saved.nbytes - total, seconds, waits))
        return len(chosen)

    def _over_limit(self, forward: Graph, backward: Graph) -> dict[Node, float]:
        """Return the nodes of both partitions that exceed the device's memory, with the excess bytes."""
        if math.isinf(self.machine.memory):
            return {}
        graph = GraphStep.of(forward, backward, self.fused, self.input_bytes)
        step = StepMemory(self.shards or ModelBytes(0, 0, 0, 0), graphs=[graph])
        if self.shards is not None:
            always = step.sharded_state(self.n)
        else:
            always = sum(storage_bytes(forward.find_nodes(op="placeholder")).values())
        halves = [{n.name: n for n in graph.nodes} for graph in (forward, backward)]
        found = dict[Node, float]()
        for point in step.points():
            live = point.nbytes if self.shards is None else step.sharded_bytes(point, self.n)
            excess = always + live - self.machine.memory
            if excess > 0:
                found[halves[point.in_backward][point.moment.name]] = excess
        return found

    def _take_share(self, schedule: _OffloadSchedule, wanted: float) -> dict[Node, int]:
        """Choose values of at most `wanted` bytes, those that free most first. Returns their bytes."""
        chosen = dict[Node, int]()
        for x in sorted(schedule.saved.free, key=schedule.freed_byte_seconds, reverse=True):
            if sum(chosen.values()) + schedule.saved.free[x].nbytes <= wanted:
                chosen[x] = schedule.saved.free[x].nbytes
        return chosen

    def _take_fitting(self, schedule: _OffloadSchedule, excess: Mapping[Node, float]) -> dict[Node, int]:
        """Choose the smallest set of values that removes the excess bytes at all nodes. Returns their bytes.

        At the node with the largest excess, the smallest sufficient value is chosen, or else the one that frees most,
        until none remains. Values that later choices make unnecessary are dropped. Where all values together do not
        suffice, all of them are chosen.
        """
        bytes_of = {x: piece.nbytes for x, piece in schedule.saved.free.items()}
        most = sorted((schedule.order[n], more) for n, more in excess.items())
        alone = {x: schedule.copies([x]).offloaded[x] for x in bytes_of}
        chosen, rest, rejected, hopeless = dict[Node, int](), dict(most), set[tuple[int, Node]](), set[int]()
        while (
            worst := max((i for i in rest if rest[i] > 0 and i not in hopeless), key=rest.__getitem__, default=None)
        ) is not None:
            candidates = [x for x in bytes_of if x not in chosen and worst in alone[x] and (worst, x) not in rejected]
            enough = [x for x in candidates if bytes_of[x] >= rest[worst]]
            if not candidates:
                hopeless.add(worst)
                continue
            x = (
                min(enough, key=lambda x: (bytes_of[x], -schedule.freed_byte_seconds(x)))
                if enough
                else max(candidates, key=schedule.freed_byte_seconds)
            )
            after = schedule.remaining_bytes(most, {**chosen, x: bytes_of[x]})
            if after[worst] < rest[worst]:
                chosen[x], rest = bytes_of[x], after
            else:  # queued with other copies, it is back by then
                rejected.add((worst, x))
        for x in sorted(chosen, key=chosen.__getitem__, reverse=True):
            others = {one: nbytes for one, nbytes in chosen.items() if one is not x}
            without = schedule.remaining_bytes(most, others)
            if all(without[i] <= max(0.0, more) for i, more in rest.items()):
                chosen, rest = others, without
        return chosen

    def _copy_to_host(self, graph: Graph, schedule: _OffloadSchedule, chosen: Mapping[Node, int]) -> float:
        """Insert the copies to the host, and return the seconds of waiting for the last ones."""
        self.edit(graph)
        at, ends = schedule.forward, schedule.copies(chosen).ends
        under_way, hosts = deque[tuple[float, Node, Node]](), dict[Node, Node]()
        output = graph.output_node()
        for node in [n for n in graph.nodes if n.op != "placeholder"]:
            while under_way and (node is output or under_way[0][0] <= at[node]):
                _, host, x = under_way.popleft()
                with graph.inserting_before(node):
                    self.emit(sp.offloaded.default, (host, x), None, x)
            if node in chosen:
                with graph.inserting_after(node):
                    hosts[node] = self.compute(sp.offload.default, (node,), node)
                under_way.append((ends[node], hosts[node], node))
        freed = {x: host for piece, host in hosts.items() for x in schedule.saved.free[piece].values}
        output.args = (tuple(freed.get(x, x) for x in output.args[0]),)
        return max(0.0, max(ends.values()) - max(at.values(), default=0.0))

    def _copy_from_host(self, graph: Graph, schedule: _OffloadSchedule, chosen: Iterable[Node]) -> float:
        """Insert the copies back, and return the seconds of waiting for the first ones."""
        self.edit(graph)
        saved, at, order, begins = schedule.saved, schedule.backward, schedule.order, schedule.copies(chosen).begins
        nodes = [n for n in graph.nodes if n.op != "placeholder"]
        begun, waits = dict[Node, Node](), dict[Node, Node]()  # the first of each before a node
        for x, begin in begins.items():
            source, user = saved.inputs[saved.free[x].values[0]], schedule.first[x]
            place = min(next(n for n in nodes if at[n] >= begin), user, key=order.__getitem__)
            with graph.inserting_before(begun.get(place) or waits.get(place) or place):
                args = (source, x.meta["val"].device)
                fresh = begun[place] = self.emit(sp.reload.default, args, x.meta["val"], x)
            with graph.inserting_before(waits.get(user) or user):
                waits[user] = self.emit(sp.reloaded.default, (fresh,), None, x)
            with graph.inserting_after(waits[user]):
                self._rebuild_views(saved, x, fresh)
        for x in chosen:
            host = next(user for user in x.users if user.target is sp.offload.default)
            for source in (saved.inputs[value] for value in saved.free[x].values):
                source.meta = {**source.meta, "val": host.meta["val"]}
                source.meta.pop("tensor_meta", None)
        return max(0.0, -min(begins.values(), default=0.0))

    def _rebuild_views(self, saved: _SavedValues, x: Node, fresh: Node) -> None:
        """Replace reads of all values in a storage by views of the reloaded storage."""
        for value in saved.free[x].values:
            view_node, view = fresh, value.meta["val"]
            if not _is_same_view(view, x.meta["val"]):
                offset, *numbers = self.sizes.list(_storage_layout(view))
                args = (fresh, numbers[: view.dim()], numbers[view.dim() :], offset)
                view_node = self.compute(aten.as_strided.default, args, value)
            saved.inputs[value].replace_all_uses_with(view_node, lambda one: one is not fresh)


@dataclass(frozen=True)
class _StorageGroup:
    """A storage, identified by the value that fills it."""

    nbytes: int
    values: list[Node]  # saved values in this storage


@dataclass
class _SavedValues:
    """The values that a forward saves for its backward."""

    inputs: dict[Node, Node]  # the backward's inputs, by the forward's values
    nbytes: int  # of all saved values
    free: dict[Node, _StorageGroup]  # offloadable: without gaps, and not in the storage of an input or output

    @staticmethod
    def of(forward: Graph, backward: Graph, results: int) -> _SavedValues:
        """Collect the saved values of the partitions of one joint graph."""
        outputs: Sequence[Node] = forward.output_node().args[0]  # type: ignore[assignment]
        names = {n.name: n for n in backward.find_nodes(op="placeholder")}
        inputs = {n: names[n.name] for n in outputs[results:] if n.name in names}
        input_storages = {storage_of(x) for n in forward.find_nodes(op="placeholder") for x in node_tensors(n)}
        values = [n for n in inputs if is_tensor(n) and storage_of(n.meta["val"]) not in input_storages]
        total = sum(storage_bytes(values).values())
        input_storages |= {storage_of(x) for n in outputs[:results] if isinstance(n, Node) for x in node_tensors(n)}
        known = {as_size(n.meta["val"]) for n in names.values() if isinstance(n.meta.get("val"), torch.SymInt)}
        pieces = defaultdict[int, list[Node]](list)
        for n in values:
            pieces[storage_of(n.meta["val"])].append(n)
        free = dict[Node, _StorageGroup]()
        for node in filter(is_tensor, (*values, *forward.nodes)):
            found = pieces.get(storage_of(node.meta["val"]), [])
            fills_storage = found and storage_of(node.meta["val"]) not in input_storages and _can_offload(node)
            if fills_storage and all(
                _is_same_view(n.meta["val"], node.meta["val"]) or _is_view_of(n, node, known) for n in found
            ):
                free[node] = _StorageGroup(nbytes_of(node.meta["val"]), pieces.pop(storage_of(node.meta["val"])))
        return _SavedValues(
            inputs, total, {n: piece for n, piece in free.items() if piece.nbytes > MIN_OFFLOAD_BYTES * total}
        )

    def readers(self, x: Node) -> list[Node]:
        """Return the backward's readers of the values in a storage."""
        return [user for value in self.free[x].values for user in self.inputs[value].users]


@dataclass(frozen=True)
class _CopySchedule:
    """The times of the copies and the intervals without a copy on the device."""

    ends: dict[Node, float]  # seconds of the forward's work at which copies to the host end
    begins: dict[Node, float]  # seconds of the backward's work at which copies back start
    offloaded: dict[Node, range]  # nodes (by number, the backward's after the forward's) with the value on the host


class _OffloadSchedule:
    """The schedule of copies: when each node of both partitions runs, and how long a copy takes."""

    def __init__(
        self, saved: _SavedValues, forward: Mapping[Node, float], backward: Mapping[Node, float], machine: Machine
    ) -> None:
        self.saved, self.forward, self.backward, self.machine = saved, forward, backward, machine
        self.times = list(forward.values()), list(backward.values())
        self.order = {n: i for i, n in enumerate([*forward, *backward])}
        self.first = {x: min(users, key=self.order.__getitem__) for x in saved.free if (users := saved.readers(x))}
        read = {storage_of(x): self.order[n] for n in forward if n.op != "output" for x in _memory_of_node(n)}
        self.last = {x: read[storage_of(x.meta["val"])] for x in saved.free}

    def freed_byte_seconds(self, x: Node) -> float:
        """Return the bytes times the seconds for which they are not read."""
        end = max(self.times[0], default=0.0)
        begin = self.backward[self.first[x]] if x in self.first else 0.0
        return self.saved.free[x].nbytes * (end - self.forward[x] + begin)

    def copies(self, chosen: Iterable[Node]) -> _CopySchedule:
        """Schedule the copies.

        Copies to the host follow each other. Copies back are scheduled from the last first use to the first: each ends
        when the next one starts or when its value is read.
        """
        ends, begins, absent = dict[Node, float](), dict[Node, float](), dict[Node, range]()
        free, begin = 0.0, math.inf
        for x in sorted(chosen, key=self.order.__getitem__):
            free = ends[x] = max(self.forward[x], free) + self._seconds(x)
        for x in sorted((x for x in ends if x in self.first), key=lambda x: -self.order[self.first[x]]):
            begin = begins[x] = min(begin, self.backward[self.first[x]]) - self._seconds(x)
        there, back = self.times
        for x, end in ends.items():
            start, stop = max(self.last[x] + 1, bisect_left(there, end)), len(self.order)
            if x in self.first:
                stop = min(self.order[self.first[x]], len(there) + bisect_left(back, begins[x]))
            absent[x] = range(start, stop)
        return _CopySchedule(ends, begins, absent)

    def remaining_bytes(self, excess: Sequence[tuple[int, float]], chosen: Mapping[Node, int]) -> dict[int, float]:
        """Return the excess bytes at nodes, by number, without those offloaded at that node."""
        change = defaultdict[int, int](int)
        for x, nodes in self.copies(chosen).offloaded.items():
            change[nodes.start] += chosen[x] if nodes else 0
            change[nodes.stop] -= chosen[x] if nodes else 0
        found, steps, freed = dict[int, float](), deque(sorted(change.items())), 0
        for i, more in excess:
            while steps and steps[0][0] <= i:
                freed += steps.popleft()[1]
            found[i] = more - freed
        return found

    def _seconds(self, x: Node) -> float:
        return copy_seconds(self.saved.free[x].nbytes, self.machine)


def _memory_of_node(node: Node) -> list[Tensor]:
    """Return the node's operands and results, which may share storage with other values."""
    return [x for n in (node, *node.all_input_nodes) for x in node_tensors(n)]


def _is_same_view(x: Tensor, y: Tensor) -> bool:
    """Return True if both are the same elements of one storage."""
    return x.dtype == y.dtype and is_same_shape(_storage_layout(x), _storage_layout(y))


def _storage_layout(x: Tensor) -> tuple[Size, ...]:
    """Return the offset, shape and strides."""
    return tuple(map(nonempty_size, as_sizes((x.storage_offset(), *x.shape, *x.stride()))))


def _is_view_of(node: Node, full: Node, known: Set[Size]) -> bool:
    """Return True if the node can be rebuilt as a view of the value that fills its storage.

    known: the sizes that are inputs of the backward.
    """
    x, y = node.meta["val"], full.meta["val"]
    symbols = {one for n in _storage_layout(x) if isinstance(n, sympy.Expr) for one in n.free_symbols}
    return x.dtype == y.dtype and is_same_size(as_size(y.storage_offset()), 0) and symbols <= known


def _can_offload(node: Node) -> bool:
    """Return True if the value fills its storage and no pending collective writes it."""
    x = node.meta["val"]
    fills_storage = is_same_size(
        size_product(as_sizes(x.shape)) * x.element_size(), nonempty_size(as_size(x.untyped_storage().nbytes()))
    )
    return fills_storage and node.op == "call_function" and not is_collective(node)


def _node_times(graph: Graph, machine: Machine) -> dict[Node, float]:
    """Return the start of each node: the seconds of the products and attentions before it."""
    times, now = dict[Node, float](), 0.0
    for node in graph.nodes:
        times[node] = now
        now += hiding_seconds(node, machine)
    return times
