"""A softmax along a dim that ranks share, from each rank's maximum and sum: no rank sees the others' elements.

    python examples/distributed_softmax.py                          four simulated ranks
    torchrun --nproc-per-node 2 examples/distributed_softmax.py

A rank's part in the normaliser is the log-sum-exp of its shard: its maximum, and the logarithm of the sum of what is
left. The normaliser is that of all parts, which are scanned from both ends, one number a row and rank.
"""

import torch
from on_ranks import Here, Pairs, compiled, crossing, everywhere, finish, say
from torch import Tensor, nn

from sp_compile import exclusive_scan, inclusive_scan
from sp_compile.lowering.base.ranks import Mesh

ROWS, CLASSES, WIDTH = 5, 96, 8


def softmax(x: Tensor, group: Mesh) -> Tensor:
    """(ROWS, s) -> the same: softmax along all ranks' columns."""
    largest = x.amax(1, keepdim=True).detach()
    part = largest + (x - largest).exp().sum(1, keepdim=True).log()
    up_to_here = inclusive_scan(part, 1, "logsumexp", group=group)
    behind = exclusive_scan(part, 1, "logsumexp", reverse=True, group=group)
    return (x - torch.logaddexp(up_to_here, behind)).exp()


def by_hand(here: Here) -> Pairs:
    x = here.shard(scores, 1)
    found = softmax(x, here.group)
    (grad,) = torch.autograd.grad(found, x, here.shard(cotangent, 1))
    return [("softmax", found, here.shard(probability, 1)), ("gradients", grad, here.shard(gradient, 1))]


class Pooling(nn.Module):
    """(S, WIDTH) -> (WIDTH,): a mean of all rows, weighted by a softmax of their scores along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        score = self.score(x)
        normaliser = score.logcumsumexp(0)[-1]
        return ((score - normaliser).exp() * x).sum(0)


if __name__ == "__main__":
    torch.manual_seed(0)
    scores = 1000 + 3 * torch.randn(ROWS, CLASSES, dtype=torch.float64)  # whose exponentials overflow
    scores.requires_grad_()
    cotangent = torch.randn(ROWS, CLASSES, dtype=torch.float64)
    probability = scores.softmax(1)
    (gradient,) = torch.autograd.grad(probability, scores, cotangent)
    everywhere(by_hand)

    report = compiled(Pooling().double(), torch.randn(90, WIDTH, dtype=torch.float64))
    if report is not None:
        say(f"what crosses ranks: {crossing(report)}")
        assert not report.fallbacks, "something was gathered"
    finish()
