"""Scans along a sharded sequence: each rank scans its rows, and only what they add up to is exchanged.

    cumsum(x, S)       ->   sp.scan(x, None, S, "sum", ..., frame, exchange, n, group)
    cummax(x, S)       ->   sp.extremes(x, S, "max", ..., frame, exchange, n, group)
    sp.linear_scan(a, b, initial, S)   ->   the same with its frame

Also cumprod, cummin, logcumsumexp, and sp.scan and sp.extremes without a frame, which idioms and the user's own calls
are. One collective forward and one backward; bytes sent: (n - 1) * C, where C is one row of the result in the dtype
that is summed in, whatever S is. Large carries go in ceil(log2 n) steps (scan_cost.py). Leaves alone: dims that hold
more than the sequence (nested_scan.py), and dtypes without scans, such as complex numbers (to be gathered).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.passes.infra.pass_base import PassResult

from .._compat import size_hint
from ..call import Call
from ..layout import Demand, Shard
from ..machine import Machine
from ..scan_cost import Carries, choose_exchange, message_bytes
from .nested_scan import is_flat, scanned_rows
from .rewrite import Rewrite
from .scan_calls import has_scan, respelt
from .slow_scans import SlowScans

sp = torch.ops.sp


class Scan(Rewrite):
    """Claims the demands of scans. By hand, `Scan(1)(graph_module)` makes the slow scans of any graph fast."""

    name = "scan"
    kinds = frozenset({"scan"})

    def call(self, graph_module: torch.fx.GraphModule) -> PassResult:
        claimed = super().call(graph_module).modified
        return PassResult(graph_module, SlowScans(self.job)(graph_module).modified or claimed)

    def refuses(self, node: Node, demands: list[Demand]) -> str | None:
        if not has_scan(Call(node)):
            return f"there is no scan of {Call(node).results()[0].dtype} on shards"
        return None if is_flat(scanned_rows(self.plan, node)) else ""

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        shard = scanned_rows(self.plan, node)
        fresh = respelt(self, node)
        call = Call(fresh)
        cost = self._carries(call, shard)
        ranks = self.job.ranks
        where = {"exchange": cost.exchange, "n": ranks.n, "group": ranks.group}
        fresh.args, fresh.kwargs = call.rebuild(call.operands, frame=self.frame(shard), **where)
        self.note(fresh, f"{_described(call)} of {shard.frame.size} positions: {cost}")

    def _carries(self, call: Call, shard: Shard) -> Carries:
        folds = shard.frame.folds
        nbytes, _ = message_bytes(call, folds, _hint)
        machine = self.job.machine or Machine.of(call.results()[0].device.type)
        return choose_exchange(int(nbytes), self.job.ranks.n, machine, folds)


def _described(call: Call) -> str:
    if call.node.target is sp.linear_scan.default:
        return "linear recurrence"
    kind = "exclusive" if call.get("exclusive") else "inclusive"
    return f"{kind} {call['op']}" + (", reversed," if call["reverse"] else "")


def _hint(extent: Any) -> int:
    return size_hint(extent) if isinstance(extent, torch.SymInt) else int(extent)
