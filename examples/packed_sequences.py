"""Pack documents into one sequence: document numbers, positions, and attention within documents.

    python examples/packed_sequences.py                             four simulated ranks
    torchrun --nproc-per-node 2 examples/packed_sequences.py

A document starts at its first token, BEGIN. A token's document is the number of BEGIN tokens up to it, and its position
is the number of earlier tokens in the document. These are two scans, which continue across shards and restart at each
document, on any rank.
"""

import torch
import torch.nn.functional as F
from on_ranks import Here, Pairs, compiled, crossing, everywhere, finish, print_once
from torch import Tensor, nn

from sp_compile import inclusive_scan, segmented_scan

LENGTHS = (13, 40, 2, 1, 57, 3, 4)  # some end inside a shard, one is longer than two shards
BEGIN, VOCABULARY, WIDTH, HEADS = 0, 29, 16, 4


def packed() -> Tensor:
    """Return (sum of LENGTHS,) tokens."""
    tokens = torch.randint(1, VOCABULARY, (sum(LENGTHS),))
    tokens[[sum(LENGTHS[:i]) for i in range(len(LENGTHS))]] = BEGIN
    return tokens


def scan_shards(here: Here) -> Pairs:
    """Compute documents and positions of this rank's tokens, and the mean of each document so far."""
    tokens, x = here.shard(all_tokens), here.shard(all_x)
    document = inclusive_scan(tokens == BEGIN, 0, group=here.group) - 1
    position = segmented_scan(torch.ones_like(tokens), document, 0, exclusive=True, group=here.group)
    mean = segmented_scan(x, document, 0, group=here.group) / (position + 1)[:, None]
    (grad,) = torch.autograd.grad(mean.square().sum(), x)
    found = {"documents": document, "positions": position, "means so far": mean, "gradients": grad}
    return [(what, mine, here.shard(expected[what])) for what, mine in found.items()]


def expected_values() -> dict[str, Tensor]:
    """Compute the expected values document by document."""
    pieces = all_x.split(LENGTHS)
    means = torch.cat([p.cumsum(0) / torch.arange(1, len(p) + 1)[:, None] for p in pieces])
    return {
        "documents": torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)),
        "positions": torch.cat([torch.arange(n) for n in LENGTHS]),
        "means so far": means,
        "gradients": torch.autograd.grad(means.square().sum(), all_x)[0],
    }


class Attention(nn.Module):
    """(B, S) tokens to (B, S, WIDTH), single-device code."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(max(LENGTHS), WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the attention within documents, (B, S, WIDTH)."""
        first = tokens == BEGIN
        document = first.cumsum(-1)
        index = torch.arange(tokens.shape[-1])
        position = index - torch.where(first, index, 0).cummax(-1).values
        x = self.tokens(tokens) + self.positions(position)
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        mask = (document[:, :, None] == document[:, None]) & (index[:, None] >= index)
        return F.scaled_dot_product_attention(q, k, v, mask[:, None]).transpose(1, 2).flatten(2)


if __name__ == "__main__":
    torch.manual_seed(0)
    all_tokens = packed()
    all_x = torch.randn(len(all_tokens), WIDTH, dtype=torch.float64, requires_grad=True)
    expected = expected_values()
    print_once(f"{len(LENGTHS)} documents of {LENGTHS} tokens in one sequence of {len(all_tokens)}")
    everywhere(scan_shards)

    report = compiled(Attention().double(), all_tokens[None])
    if report is not None:
        print_once(f"exchanges of a rank: {crossing(report)}")
    finish()
