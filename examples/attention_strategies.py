"""How the attention of one decoder would be split over ranks, why, and that every strategy gives the same numbers.

    python examples/attention_strategies.py

One process, no GPU. The times are the cost model's for the hardware that `COST` describes; without `cost`, they are
those of the device at hand, or what was measured on it (`sp_compile.cost.machine`).
"""

import torch
from models import DecoderLM

import sp_compile

COST = {"flops": 6e14}  # what a rank's matrix units do in a second


def predicted(ranks: int) -> None:
    """The candidates for one shape of attention, and the one that `attention="auto"` takes."""
    with torch.device("meta"):
        model, ids = (DecoderLM(dim=1024, layers=2, heads=16, kv_heads=4), torch.zeros(1, 32768, dtype=torch.int64))
    report = sp_compile.explain(model, ids, ids, sp=ranks, cost=COST)
    print(f"\n== {ranks} ranks")
    for decision in report.attention:
        print(decision)


def verified(ranks: int = 4) -> None:
    """Loss and gradients of every strategy on simulated ranks against one device."""
    torch.manual_seed(0)
    model, ids = DecoderLM(dim=64, layers=2, heads=4, kv_heads=2), torch.randint(0, 256, (2, 61))
    for attention in ("ulysses", "ring", "hybrid", "gather", "auto"):
        report = sp_compile.verify(model, ids, ids, sp=ranks, attention=attention)
        print(f"{attention:<8} on {ranks} ranks: largest relative error {report.worst:.1e}")
        assert report.worst < 1e-4


if __name__ == "__main__":
    for ranks in (8, 64):
        predicted(ranks)
    print()
    verified()
