"""Compute positions and masks from earlier tokens: padding, the end of a text, the best score so far.

    python examples/cumulative_masks.py                             four simulated ranks
    torchrun --nproc-per-node 2 examples/cumulative_masks.py

A token's position is the number of earlier tokens that are not padding (left or right). It is alive until the first
END. It is a record if its score exceeds all earlier ones. These are a sum, a product and a maximum along the sequence.
"""

import torch
import torch.nn.functional as F
from on_ranks import Here, Pairs, compiled, crossing, everywhere, finish, print_once
from torch import Tensor, nn

from sp_compile import exclusive_scan, inclusive_scan

BATCH, LENGTH, VOCABULARY, WIDTH, HEADS = 3, 48, 11, 16, 4
PADDING, END = 0, 1


def texts() -> Tensor:
    """Return (BATCH, LENGTH) tokens: padded left, padded right, and with an END in the middle."""
    tokens = torch.randint(2, VOCABULARY, (BATCH, LENGTH))
    tokens[0, :9] = PADDING
    tokens[1, -15:] = PADDING
    tokens[1, -16] = tokens[2, 21] = END
    return tokens


def scan_shards(here: Here) -> Pairs:
    """Compute the values of this rank's columns of the batch."""
    mine, marks = here.shard(tokens, 1), here.shard(scores, 1)
    position = exclusive_scan(mine != PADDING, 1, group=here.group)
    alive = exclusive_scan(mine != END, 1, "prod", group=here.group)
    best = inclusive_scan(marks, 1, "max", group=here.group)
    record = marks > exclusive_scan(marks.detach(), 1, "max", group=here.group)
    (grad,) = torch.autograd.grad(best.square().sum(), marks)
    found = {"positions": position, "alive": alive, "best": best, "records": record, "gradients": grad}
    return [(what, value, here.shard(expected[what], 1)) for what, value in found.items()]


def expected_values() -> dict[str, Tensor]:
    """Compute the expected values on a single device."""
    real, going = (tokens != PADDING).long(), (tokens != END).long()
    best = scores.cummax(1).values
    lowest = torch.full((BATCH, 1), -torch.inf, dtype=scores.dtype)
    return {
        "positions": real.cumsum(1) - real,
        "alive": torch.cat([torch.ones(BATCH, 1, dtype=torch.long), going.cumprod(1)[:, :-1]], 1),
        "best": best,
        "records": scores > torch.cat([lowest, best[:, :-1]], 1),
        "gradients": torch.autograd.grad(best.square().sum(), scores)[0],
    }


class Attention(nn.Module):
    """(B, S) tokens to (B, S, WIDTH), single-device code; the best score so far gates the result."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.qkv, self.score = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the gated attention (B, S, WIDTH)."""
        real = tokens != PADDING
        x = self.tokens(tokens) + self.positions((real.cumsum(1) - 1).clamp(min=0))
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        causal = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        mask = causal & real[:, None, None] | torch.eye(tokens.shape[1], dtype=torch.bool)
        y = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
        alive = (tokens != END).long().cumprod(1)
        best = self.score(x).cummax(1).values
        return y * best.sigmoid() * alive[..., None]


if __name__ == "__main__":
    torch.manual_seed(0)
    tokens = texts()
    scores = torch.randn(BATCH, LENGTH, dtype=torch.float64, requires_grad=True)
    expected = expected_values()
    everywhere(scan_shards)

    report = compiled(Attention().double(), tokens)
    if report is not None:
        print_once(f"exchanges of a rank: {crossing(report)}")
        assert not report.fallbacks, "something was gathered"
    finish()
