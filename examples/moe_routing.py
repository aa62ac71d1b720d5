"""Route tokens to experts of limited capacity: an expert takes its first tokens over all ranks.

    python examples/moe_routing.py                                  four simulated ranks
    torchrun --nproc-per-node 2 examples/moe_routing.py

A token's position in an expert's queue is the number of earlier tokens that chose the expert: an exclusive scan of the
(tokens, experts) matrix along the tokens. Each rank exchanges one row of the matrix.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from on_ranks import Here, Pairs, compiled, everywhere, finish, print_once
from torch import Tensor, nn

from sp_compile import exclusive_scan

TOKENS, WIDTH, EXPERTS, CHOICES, CAPACITY = 240, 16, 8, 2, 40


def counted_before(chosen: Tensor) -> Tensor:
    """Return the exclusive sum, on a single device."""
    return chosen.cumsum(0) - chosen


class Experts(nn.Module):
    """A mixture of experts with limited capacity.

    Returns (T, WIDTH) for (T, WIDTH), the positions in the queues (T, EXPERTS), and the load of the experts (EXPERTS,).
    """

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor, before: Callable[[Tensor], Tensor] = counted_before) -> tuple[Tensor, ...]:
        """Return the output, the positions and the load; `before` is the exclusive sum."""
        share = self.router(x).softmax(-1)
        chosen = F.one_hot(share.topk(CHOICES, -1).indices, EXPERTS).sum(1)
        position = before(chosen)
        taken = chosen * (position < CAPACITY)
        return torch.einsum("te,td,edh->th", share * taken, x, self.experts), position, taken.sum(0)


def route_shards(here: Here) -> Pairs:
    """Route this rank's tokens; their queue positions count the tokens of all ranks."""
    shard = here.shard(x)
    y, position, _ = model(shard, partial(exclusive_scan, dim=0, group=here.group))
    (grad,) = torch.autograd.grad(y.square().sum(), shard)
    found = {"routed tokens": y, "positions in the queues": position, "gradients": grad}
    return [(what, mine, here.shard(expected[what])) for what, mine in found.items()]


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Experts().double()
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    y, position, load = model(x)
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    expected = {"routed tokens": y, "positions in the queues": position, "gradients": grad}
    print_once(
        f"{TOKENS} tokens choose {CHOICES} of {EXPERTS} experts; {TOKENS * CHOICES - load.sum()} exceed the capacity"
    )
    everywhere(route_shards)

    report = compiled(model, x.detach(), seq_dims={"x": 0})
    if report is not None:
        (scan,) = [e for e in report.exchanges if e.op == "scan"]
        print_once(f"a rank sends {scan.forward} bytes to learn the positions; the matrix has {position.nbytes}")
        assert not report.fallbacks, "something was gathered"
    finish()
