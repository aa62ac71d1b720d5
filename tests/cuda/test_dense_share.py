"""No pair of long attention on a GPU is computed by dense arithmetic, for any mask and head dim.

Sinks are merged into the result of these calls (`merge.add_sinks`), so kernels do not see them.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from support.attention.attending import packed
from support.attention.score_texts import score_of
from support.cuda.borrowed import Watch, borrow
from support.cuda.worker import AbsentGpu

from sp_compile.lowering.attention.attend import _query_strips
from sp_compile.lowering.attention.masking import CallMask
from sp_compile.lowering.attention.op_args import LocalArgs
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, run_ranks

TOKENS, RANKS = 8192, 4
DOCUMENTS = [700, 1900, 1, 3000, 64, 2400, 100, 27]
PADDED = 500
"""Tokens of padding at the end of the second sequence of a batch."""

MASKS = {
    "none": ("", ""),
    "causal": ("k <= q", ""),
    "window": ("(k <= q) & (q - k < 1024)", ""),
    "chunks": ("Eq(floor(q/1024), floor(k/1024)) & (k <= q)", ""),
    "padding": ("Ne(col0, 0)", ""),
    "causal, padding": ("(k <= q) & Ne(col0, 0)", ""),
    "documents": ("(k <= q) & Eq(row1, col1)", ""),
    "documents, window": ("(k <= q) & Eq(row1, col1) & (q - k < 256)", ""),
    "prefix": ("(k < n0) | (k <= q)", ""),
    "soft-cap": ("k <= q", "50.0*tanh(s/50.0)"),
    "soft-cap, window": ("(k <= q) & (q - k < 1024)", "50.0*tanh(s/50.0)"),
    "ALiBi": ("k <= q", "s + head0*(k - q)"),
}


def pairs_by_kernel(predicate: str, score: str, head_dim: int) -> Counter[str]:
    """Return the number of query-key pairs of each kernel, in all steps of a zigzag ring of all ranks.

    The backward has the same pairs.
    """
    (documents, _), padding = packed(DOCUMENTS), torch.ones(2, TOKENS, dtype=torch.bool)
    padding[1, -PADDED:] = False
    vectors = [documents, documents, padding, documents]
    there, tables = [borrow(x) for x in vectors], torch.ops.sp.pieces(vectors)
    heads = [borrow(torch.ones(4))] if "head0" in score else []
    spans = [[RANKS, 2, 1, shift, 0, TOKENS] for shift in range(RANKS)]

    name = score_of(score)

    def on(rank: int) -> Counter[str]:
        found: Counter[str] = Counter()
        for span in spans:
            q, k = (
                borrow(torch.zeros((), dtype=torch.bfloat16).expand(2, n, TOKENS // RANKS, head_dim)) for n in (4, 2)
            )
            given = [None, there[:2], there[2:], tables, [700], predicate, None, 0.0, 1.0, name, heads, []]
            args, _ = LocalArgs.of([*given, spans[0], span, 1, SIMULATED_GROUP])
            with Watch(), torch.no_grad():
                for strip in _query_strips(q, k, CallMask.of(q, k, args), mask_grad=False):
                    for block, kernel in strip:
                        found[kernel.name] += block.query_rows[1] * block.key_rows[1]
        return found

    return sum(run_ranks(RANKS, on), Counter())


NAMED = {"cuDNN", "flash"}
KERNELS = {name: NAMED for name in ("none", "causal", "window", "chunks", "documents", "documents, window")}
"""The other masks have pairs that only a compiled predicate can describe, by flex attention."""


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_no_pair_is_dense(gpu: AbsentGpu, head_dim: int) -> None:
    for name, (predicate, score) in MASKS.items():
        found = gpu.run(pairs_by_kernel, predicate, score, head_dim)
        assert found.total() > TOKENS * 128
        assert set(found) <= KERNELS.get(name, NAMED | {"flex"}), name
        assert bool(score) == (set(found) == {"flex"}), name
