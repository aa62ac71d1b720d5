"""What a forward keeps for its backward goes to the host's memory meanwhile, as much of it as was asked for.

    forward   x = ...; h = sp.offload(x); ... sp.offloaded(h, x); return (..., h)
    backward  y = sp.reload(h, device); ... sp.reloaded(y); ... reads of y

Works on the two halves of a joint graph: which values are kept is known there, and each has a place in the order of
work. A copy begins when its value is there, and is waited for when products and attention have taken as long as it;
back again it begins as long before the first use. First goes what frees most: bytes, times the work for which nobody
reads them. Inputs of checkpointed blocks are such values. Values that lie in one piece of memory, as queries, keys and
values of one product do, go as that piece and are views of it again.

torch 2.13's own pass (`torch._functorch._activation_offloading`) takes marks and not amounts, no results of ops with
several (attention's), has nothing to run on a CPU, and waits at once, or at the end of the forward, until which all
that is copied stays on the device.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from sp_compile._compat import storage_of
from sp_compile.cost.machine import Machine
from sp_compile.cost.offload import OnHost, copy_seconds, seconds_of
from sp_compile.cost.step import GraphStep, ModelBytes, StepMemory
from sp_compile.cost.walk.liveness import nbytes_of
from sp_compile.graph.call import is_tensor, tensors_of
from sp_compile.graph.sizes import all_same, sizes
from sp_compile.lowering import offload as _ops  # noqa: F401  (registers the operators)
from sp_compile.passes.base import Pass
from sp_compile.spmd.named_groups import is_collective

from .job import HalvesJob

sp, aten = torch.ops.sp, torch.ops.aten
LEAST = 1e-3
"""Of the bytes that are kept: smaller values stay, a copy of each would cost more than it frees."""


class Offload(Pass):
    """The halves of one graph. `offload` is a share of the kept bytes, or "auto": as few as let the step fit."""

    requires = frozenset({"captured", "exchanges are hidden"})
    machine: Machine

    @classmethod
    def of(cls, job: HalvesJob) -> Pass | None:
        return cls() if job.offload != "never" and job.backward is not None else None

    def apply(self, gm: GraphModule, job: HalvesJob) -> int:
        forward, backward = gm, job.backward
        assert backward is not None
        self.machine = next((job.machine_of(n) for n in gm.graph.nodes if is_tensor(n)), Machine.of("cpu", job.cost))
        self.asked, self.fused = job.offload, job.fused
        self.shards = job.memory[-1] if job.memory and job.state == "sharded" else None
        kept = _Kept.of(forward.graph, backward.graph, job.results)
        at = _times(forward.graph, self.machine), _times(backward.graph, self.machine)
        wanted, peak = self._wanted(kept, forward.graph, backward.graph)
        chosen = self._choose(
            kept, at, wanted, max((at[1][n] for n in backward.graph.nodes if n.name == peak), default=0)
        )
        total = sum(chosen.values())
        waits = 0.0
        if chosen:
            waits = self._send(forward.graph, kept, chosen, at[0])
            waits += self._bring(backward.graph, kept, chosen, at[1])
            backward.graph.lint()
            backward.recompile()
        seconds = copy_seconds(total, self.machine)
        job.hosted.append(OnHost(len(chosen), total, kept.nbytes - total, seconds, waits))
        return len(chosen)

    def _wanted(self, kept: _Kept, forward: Graph, backward: Graph) -> tuple[float, str]:
        """Bytes to take off the device, and the node of the backward at which they are too many, if it has one."""
        if self.asked != "auto":
            return float(self.asked) * kept.nbytes, ""
        if math.isinf(self.machine.memory):
            return 0.0, ""
        step = StepMemory(ModelBytes(0, 0, 0, 0), 0.0, [GraphStep.of(forward, backward, self.fused, 0)])
        stays = {storage_of(x): nbytes_of(x) for n in forward.find_nodes(op="placeholder") for x in tensors_of(n)}
        behind = step.graphs[0].backward
        peak = (
            max(behind.moments, key=lambda moment: moment.nbytes).name if behind is not None and behind.moments else ""
        )
        most = sum(stays.values()) + step.values
        if self.shards is not None:  # inputs are hardly anything beside them
            values = max((point.nbytes - point.gradients for point in step.points()), default=0)
            most = self.shards.weights + self.shards.gradients + values
        return min(float(kept.nbytes), most - self.machine.memory), peak

    def _choose(self, kept: _Kept, at: Sequence[Mapping[Node, float]], wanted: float, peak: float) -> dict[Node, int]:
        """What goes, with its bytes: at least as many as wanted, where a device has to fit; at most that of a share.

        peak: when the backward holds most. What it reads by then lies on the device again, and goes last.
        """
        end = max(at[0].values(), default=0.0)
        first = {x: min((at[1][user] for user in kept.readers(x)), default=0.0) for x in kept.free}
        away = {x for x in kept.free if self.asked != "auto" or first[x] > peak}

        def frees(x: Node) -> tuple[bool, float]:
            return x in away, kept.free[x].nbytes * (end - at[0][x] + first[x])

        chosen: dict[Node, int] = {}
        for x in sorted(kept.free, key=frees, reverse=True):
            taken, nbytes = sum(n for one, n in chosen.items() if one in away), kept.free[x].nbytes
            if taken < wanted if self.asked == "auto" else taken + nbytes <= wanted:
                chosen[x] = nbytes
        return chosen

    def _send(self, graph: Graph, kept: _Kept, chosen: Mapping[Node, int], at: Mapping[Node, float]) -> float:
        """Copies to the host; the seconds that the last ones are waited for."""
        self.edit(graph)
        free, under_way, hosts = 0.0, deque[tuple[float, Node, Node]](), dict[Node, Node]()
        output = graph.output_node()
        for node in [n for n in graph.nodes if n.op != "placeholder"]:
            while under_way and (node is output or under_way[0][0] <= at[node]):
                _, host, x = under_way.popleft()
                with graph.inserting_before(node):
                    self.emit(sp.offloaded.default, (host, x), None, x)
            if node in chosen:
                with graph.inserting_after(node):
                    hosts[node] = self.compute(sp.offload.default, (node,), node)
                free = max(at[node], free) + copy_seconds(chosen[node], self.machine)
                under_way.append((free, hosts[node], node))
        gone = {x: host for piece, host in hosts.items() for x in kept.free[piece].values}
        output.args = (tuple(gone.get(x, x) for x in output.args[0]),)
        return max(0.0, free - max(at.values(), default=0.0))

    def _bring(self, graph: Graph, kept: _Kept, chosen: Iterable[Node], at: Mapping[Node, float]) -> float:
        """Copies back; the seconds that the first ones are waited for.

        Backwards from the last first use: each copy ends when the next one has to begin, or when it is read.
        """
        self.edit(graph)
        order = {node: i for i, node in enumerate(graph.nodes)}
        nodes = [n for n in graph.nodes if n.op != "placeholder"]
        first = {x: min(users, key=order.__getitem__) for x in chosen if (users := kept.readers(x))}
        begin, begun, waits = math.inf, dict[Node, Node](), dict[Node, Node]()  # the first ones before a node
        for x, user in sorted(first.items(), key=lambda one: -order[one[1]]):
            given = kept.inputs[kept.free[x].values[0]]
            begin = min(begin, at[user]) - copy_seconds(kept.free[x].nbytes, self.machine)
            place = min(next(n for n in nodes if at[n] >= begin), user, key=order.__getitem__)
            with graph.inserting_before(begun.get(place) or waits.get(place) or place):
                args = (given, x.meta["val"].device)
                fresh = begun[place] = self.emit(sp.reload.default, args, x.meta["val"], x)
            with graph.inserting_before(waits.get(user) or user):
                waits[user] = self.emit(sp.reloaded.default, (fresh,), None, x)
            with graph.inserting_after(waits[user]):
                self._view(kept, x, fresh)
        for x in chosen:
            host = next(user for user in x.users if user.target is sp.offload.default)
            for given in (kept.inputs[value] for value in kept.free[x].values):
                given.meta = {**given.meta, "val": host.meta["val"]}
                given.meta.pop("tensor_meta", None)
        return max(0.0, -begin) if first else 0.0

    def _view(self, kept: _Kept, x: Node, fresh: Node) -> None:
        """Let readers of all that lies in a piece of memory read it where that is again."""
        for value in kept.free[x].values:
            made, lies = fresh, value.meta["val"]
            if not _lie_alike(lies, x.meta["val"]):
                args = (fresh, list(lies.shape), list(lies.stride()), lies.storage_offset())
                made = self.compute(aten.as_strided.default, args, value)
            kept.inputs[value].replace_all_uses_with(made, lambda one: one is not fresh)


@dataclass(frozen=True)
class _OneMemory:
    """A piece of memory by the value that fills it. values: what is kept and lies there."""

    nbytes: int
    values: list[Node]


@dataclass
class _Kept:
    """What a forward leaves for its backward. inputs: the backward's, by the forward's values. nbytes: of all of it.

    free: what may go: values that fill memory of their own, without gaps, in which no input or result lies.
    """

    inputs: dict[Node, Node]
    nbytes: int
    free: dict[Node, _OneMemory]

    @staticmethod
    def of(forward: Graph, backward: Graph, results: int) -> _Kept:
        outputs: Sequence[Node] = forward.output_node().args[0]  # type: ignore[assignment]
        names = {n.name: n for n in backward.find_nodes(op="placeholder")}
        inputs = {n: names[n.name] for n in outputs[results:] if n.name in names}
        theirs = {storage_of(x) for n in forward.find_nodes(op="placeholder") for x in tensors_of(n)}
        values = [n for n in inputs if is_tensor(n) and storage_of(n.meta["val"]) not in theirs]
        total = sum({storage_of(n.meta["val"]): nbytes_of(n.meta["val"]) for n in values}.values())
        theirs |= {storage_of(x) for n in outputs[:results] if isinstance(n, Node) for x in tensors_of(n)}
        pieces = defaultdict[int, list[Node]](list)
        for n in values:
            pieces[storage_of(n.meta["val"])].append(n)
        free = dict[Node, _OneMemory]()
        for node in filter(is_tensor, (*values, *forward.nodes)):
            found = pieces.get(storage_of(node.meta["val"]), [])
            whole = found and storage_of(node.meta["val"]) not in theirs and _is_free(node)
            if whole and all(_lie_alike(n.meta["val"], node.meta["val"]) or _is_part(n, node) for n in found):
                free[node] = _OneMemory(nbytes_of(node.meta["val"]), pieces.pop(storage_of(node.meta["val"])))
        return _Kept(inputs, total, {n: piece for n, piece in free.items() if piece.nbytes > LEAST * total})

    def readers(self, x: Node) -> list[Node]:
        """Who reads in the backward what lies in a piece of memory."""
        return [user for value in self.free[x].values for user in self.inputs[value].users]


def _lie_alike(x: Tensor, y: Tensor) -> bool:
    """Are they the same numbers?"""
    same = x.dtype == y.dtype and x.storage_offset() == y.storage_offset()
    return same and all_same(sizes(x.shape), sizes(y.shape)) and all_same(sizes(x.stride()), sizes(y.stride()))


def _is_part(node: Node, whole: Node) -> bool:
    """May it be made again as a view of what fills the memory in which it lies?"""
    x, y = node.meta["val"], whole.meta["val"]
    numbers = (*x.shape, *x.stride(), x.storage_offset())
    return x.dtype == y.dtype and y.storage_offset() == 0 and all(isinstance(n, int) for n in numbers)


def _is_free(node: Node) -> bool:
    """Is it a value that fills the memory in which it lies, and that no exchange writes any more?"""
    x = node.meta["val"]
    whole = nbytes_of(x) == x.numel() * x.element_size() if isinstance(x.numel(), int) else x.is_contiguous()
    return whole and node.op == "call_function" and not is_collective(node)


def _times(graph: Graph, machine: Machine) -> dict[Node, float]:
    """When each node runs: the seconds of the products and the attention before it."""
    times, now = dict[Node, float](), 0.0
    for node in graph.nodes:
        times[node] = now
        now += seconds_of(node, machine)
    return times
