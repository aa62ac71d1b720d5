"""Slice texts of different lengths out of a packed sequence without padding, by cumulative lengths.

    python examples/batch_slicing.py                                four simulated ranks
    torchrun --nproc-per-node 2 examples/batch_slicing.py

In `slice_shards`, texts are sharded: a text starts where all earlier texts end, on any rank, which is an exclusive
scan of their lengths. In the compiled model, tokens are sharded; a text is a slice that starts and ends on any rank.
"""

import torch
from on_ranks import Here, Pairs, compiled, crossing, everywhere, finish, print_once
from torch import Tensor, nn

from sp_compile import exclusive_scan

LENGTHS = torch.tensor([5, 0, 17, 1, 30, 2, 8, 9])
WIDTH = 6


def slice_shards(here: Here) -> Pairs:
    """Compute the offsets of this rank's texts in the packed batch, and compare the slices with the texts."""
    lengths, padded = here.shard(LENGTHS), here.shard(texts)
    begin = exclusive_scan(lengths, 0, group=here.group)
    slices = [packed[b : b + n] for b, n in zip(begin.tolist(), lengths.tolist(), strict=True)]
    found = nn.utils.rnn.pad_sequence([*slices, packed[: texts.shape[1]]], batch_first=True)[:-1]
    return [("begins", begin, here.shard(begins)), ("slices", found, padded)]


class Texts(nn.Module):
    """(T, WIDTH) tokens of texts of lengths (N,) to running sums within each text, and a sum per text."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return the running sums (T, WIDTH) and the sums per text (N, WIDTH)."""
        ends = lengths.cumsum(0)
        index = torch.arange(x.shape[0])[:, None]
        inside = ((index >= ends - lengths) & (index < ends)).to(x)  # (T, N)
        y = self.linear(x).tanh()
        total = y.cumsum(0)
        before = inside * (index == ends - lengths)
        return total - inside @ (before.mT @ (total - y)), inside.mT @ y


if __name__ == "__main__":
    torch.manual_seed(0)
    begins = LENGTHS.cumsum(0) - LENGTHS
    each = [torch.randn(n, WIDTH, dtype=torch.float64) for n in LENGTHS.tolist()]
    texts, packed = nn.utils.rnn.pad_sequence(each, batch_first=True), torch.cat(each)
    everywhere(slice_shards)

    report = compiled(Texts().double(), packed, LENGTHS, seq_dims={"x": 0})
    if report is not None:
        print_once(f"exchanges of a rank: {crossing(report)}")
        assert not report.fallbacks, "something was gathered"
    finish()
