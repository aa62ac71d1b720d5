"""Run every pass directly on an exported program, up to the program of each of two ranks.

    python examples/run_passes.py            prints the graph after every pass, then runs both ranks, simulated

No process group is needed. With one, `resolve(mesh, None)` of `lowering/base/ranks.py` returns the ranks of a real
mesh.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sp_compile
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, run_ranks
from sp_compile.passes.canonical.canonicalize import Canonicalize
from sp_compile.passes.context import PassContext
from sp_compile.passes.localize.localize import Localize
from sp_compile.passes.localize.validate_shapes import validate
from sp_compile.passes.strategies.attention.ulysses_strategy import AttendWithUlysses
from sp_compile.passes.strategies.gather_demands import GatherOperands
from sp_compile.passes.strategies.reduce_demands import DecomposeMeans, ReducePartials
from sp_compile.passes.strategies.scan_demands import ShardScans


class Block(nn.Module):
    """Grouped-query attention, a cumulative sum, and a mean over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a 0-d loss for x (B, S, 32)."""
        q = self.q(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
        k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x.cumsum(1).square().mean()


def main() -> None:
    """Print the graphs, then compare the loss of both ranks with the single-device loss."""
    torch.manual_seed(0)
    model, x = Block().double(), torch.randn(1, 9, 32, dtype=torch.float64)
    ranks = Ranks(2, SIMULATED_GROUP)

    graph = sp_compile.capture_export(torch.export.export(model, (x,)))
    for demand in PassContext.of(ranks).plan(graph).demands:
        print(f"demand: {demand.node.name} operand {demand.operand} is {demand.have}: {demand.why}")
    for rewrite in (
        Canonicalize(),
        DecomposeMeans(ranks),
        AttendWithUlysses(ranks),
        ShardScans(ranks),
        ReducePartials(ranks),
        GatherOperands(ranks),
    ):
        changed = rewrite(graph).modified
        print(f"\n== {type(rewrite).__name__}: {'rewrote the graph' if changed else 'nothing to do'}")
        if changed:
            graph.graph.print_tabular()

    local = Localize(ranks)(graph).graph_module
    validate(local, PassContext.of(ranks).plan(graph), ranks.n)
    print("\n== Localize: the program of each rank\n" + local.print_readable(print_output=False))

    expected = model(x)
    for rank, loss in enumerate(run_ranks(ranks.n, lambda rank: local(x))):
        print(f"rank {rank}: {loss.item():.12f}   one device: {expected.item():.12f}")
        torch.testing.assert_close(loss, expected)


if __name__ == "__main__":
    main()
