"""Define the base of passes that discharge demands.

A `Demand` states that a node on shards needs more of an operand than the rank's rows: `x[:, -1]` needs one row of
another rank. A pass claims demands of some kinds, and replaces the node by ops with an exchange, which discharges the
demands. A refusal is the reason why a pass does not claim them. Each strategy is one file: the demands that it claims,
and the ops that replace them. A graph in the global view has the shapes and values of a single device.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.errors import SpError, describe_node
from sp_compile.lowering.base.frames import has_arithmetic
from sp_compile.passes.base import Pass, Passes
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.sizes import Size
from sp_compile.passes.sharding.placement import Demand, PlacementPlan

aten = torch.ops.aten
MAX_REWRITE_ROUNDS = 8  # maximum number of runs of all rewrites; real models take two
MAX_PATIENT_ROUNDS = 5  # number of rounds in which demands that arise are not gathered yet


def is_summed(dtype: torch.dtype) -> bool:
    """Return True if values of the dtype can be sent by a sum over the ranks, to which all ranks but one add zeros."""
    return dtype != torch.bool and has_arithmetic(dtype)


class DemandPass(Pass):
    """Base of passes that discharge demands by exchanges, which are identities in the global view.

    Direct use: `AttendWithUlysses(2)(graph_module)`, where 2 is the number of ranks, or Ranks, or a PassContext.
    Every call analyzes the graph again, so that passes can run in any order and more than once.
    """

    requires = frozenset({"canonical", "chosen attention"})
    provides = frozenset({"claimed"})
    kinds: frozenset[str] = frozenset()  # kinds of the demands that the pass may claim, see `Demand.kind`
    plan: PlacementPlan  # the placements and demands of the graph, during `apply`

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Rewrite each node whose demands the pass claims, and return the number of these nodes."""
        self.plan = context.plan(gm)
        demands_of: dict[Node, list[Demand]] = {}
        for demand in self.plan.demands:
            if demand.kind in self.kinds:
                demands_of.setdefault(demand.node, []).append(demand)
        num_rewritten = 0
        for node, demands in demands_of.items():
            refusal = self.refusal(node, demands)
            if refusal is None:
                self.rewrite(node, demands)
                num_rewritten += 1
            elif refusal:  # "" adds no line to the report
                self.note_refusal(node, refusal)
        return num_rewritten

    def refusal(self, node: Node, demands: list[Demand]) -> str | None:
        """Decide for `apply` if the pass claims the demands of a node.

        Args:
            node: The node that states the demands.
            demands: Its demands.

        Returns:
            None to claim the demands, else the reason ("" if they do not concern this pass).
        """
        return None

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        """Replace a node so that its demands are satisfied and its value in the global view is unchanged.

        Args:
            node: The node that states the demands.
            demands: Its claimed demands.
        """
        raise NotImplementedError

    # Helpers of rewrites.

    def mark_position(self, position: int | Node, length: Size, dim: int, ndim: int, like: Node) -> Node:
        """Emit arange(length) == position, a mask of one row of a sequence, and return its node.

        It also works on shards, where the arange has the positions of the rank's rows.

        Args:
            position: The position of the row.
            length: The length of the sequence.
            dim: The dim along which the mask broadcasts to a tensor.
            ndim: The number of dims of the tensor.
            like: A node whose device and metadata the new nodes get.
        """
        device = {"device": like.meta["val"].device}
        positions = self.compute(aten.arange.default, (self.sizes(length),), like, device)
        is_position = self.compute(aten.eq.Scalar, (positions, position), like)
        shape = [self.sizes(length) if d == dim else 1 for d in range(ndim)]
        return self.compute(aten.reshape.default, (is_position, shape), like)


class RepeatPasses(Passes):
    """Repetition of rewrites until no demand remains."""

    provides = frozenset({"no demands"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Run the parts in rounds until no demand remains, and return the number of their changes.

        A change, as of a norm, may place its readers on shards, whose demands arise in the same round. They are not
        gathered before the next round, in which better strategies can claim them (`PassContext.open_nodes`).

        Raises:
            SpError: No part claims a demand (SP912).
        """
        changes = rounds = 0
        while demands := context.plan(gm).demands:
            if rounds == MAX_REWRITE_ROUNDS:  # a demand that no part claims is still there after every round
                cause = f"{describe_node(demands[0].node)} has a demand ({demands[0].kind}) that no strategy claims"
                raise SpError("SP912", f"{cause}: {demands[0].why}.")
            is_patient = rounds < MAX_PATIENT_ROUNDS
            context.open_nodes = frozenset(demand.node for demand in demands) if is_patient else None
            changes += super().apply(gm, context)
            rounds += 1
        context.open_nodes = None
        return changes
