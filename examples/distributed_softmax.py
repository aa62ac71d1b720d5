"""Compute a softmax along a sharded dim from each rank's maximum and sum, without gathering elements.

    python examples/distributed_softmax.py                          four simulated ranks
    torchrun --nproc-per-node 2 examples/distributed_softmax.py

A rank's part of the normalizer is the log-sum-exp of its shard: its maximum plus the logarithm of the sum of shifted
exponentials. Two scans, from both ends, combine the parts; they exchange one number per row and rank.
"""

import torch
from on_ranks import Here, Pairs, compiled, crossing, everywhere, finish, print_once
from torch import Tensor, nn

from sp_compile import exclusive_scan, inclusive_scan
from sp_compile.lowering.base.ranks import Mesh

ROWS, CLASSES, WIDTH = 5, 96, 8


def softmax(x: Tensor, group: Mesh) -> Tensor:
    """Return the softmax along all ranks' columns for x (ROWS, s), in the same shape."""
    largest = x.amax(1, keepdim=True).detach()
    part = largest + (x - largest).exp().sum(1, keepdim=True).log()
    up_to_here = inclusive_scan(part, 1, "logsumexp", group=group)
    after_here = exclusive_scan(part, 1, "logsumexp", reverse=True, group=group)
    return (x - torch.logaddexp(up_to_here, after_here)).exp()


def softmax_of_shards(here: Here) -> Pairs:
    """Compute this rank's columns of the softmax and of its gradient."""
    x = here.shard(scores, 1)
    found = softmax(x, here.group)
    (grad,) = torch.autograd.grad(found, x, here.shard(cotangent, 1))
    return [("softmax", found, here.shard(probability, 1)), ("gradients", grad, here.shard(gradient, 1))]


class Pooling(nn.Module):
    """(S, WIDTH) to (WIDTH,): a mean of all rows, weighted by a softmax of their scores along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighted mean."""
        score = self.score(x)
        normalizer = score.logcumsumexp(0)[-1]
        return ((score - normalizer).exp() * x).sum(0)


if __name__ == "__main__":
    torch.manual_seed(0)
    scores = 1000 + 3 * torch.randn(ROWS, CLASSES, dtype=torch.float64)  # exponentials overflow
    scores.requires_grad_()
    cotangent = torch.randn(ROWS, CLASSES, dtype=torch.float64)
    probability = scores.softmax(1)
    (gradient,) = torch.autograd.grad(probability, scores, cotangent)
    everywhere(softmax_of_shards)

    report = compiled(Pooling().double(), torch.randn(90, WIDTH, dtype=torch.float64))
    if report is not None:
        print_once(f"exchanges of a rank: {crossing(report)}")
        assert not report.fallbacks, "something was gathered"
    finish()
