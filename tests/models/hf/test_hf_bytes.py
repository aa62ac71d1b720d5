"""Measured bytes that ranks send while unmodified transformers models train: unread logits cost nothing."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models.hf.test_hf import NAMES, OTHERS, TOLERANCE, gpt2, trained, transformers
from support import ranks as worker
from support.parallel.sockets import bytes_sent, can_count_bytes
from support.parity import Outcome, check, difference, gradients, outcome, sp
from support.ranks import Ranks

from sp_compile.lowering.collectives.sharded import Sharded

WORDS, ROWS, TOKENS = 64, 66, 63
"""So many that logits, in float32 too, and T5's other results are of more than the MiB from which on results stay in shards."""


@dataclass
class Step:
    """Results of a step on one rank. sent: bytes of the forward, of the backward, and of reading the logits.

    right: loss and gradients; error: of the logits, whose bytes are `size`. in_shards: logits were sharded before the read.
    """

    sent: list[int]
    right: Outcome
    error: float = 0.0
    size: int = 0
    in_shards: bool = False


def step(make: Any, whole: bool) -> Step:
    """Run two steps and return the second. whole: compile the model with all results, not its loss only."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model = make()
    model.resize_token_embeddings(WORDS, mean_resizing=False)
    model, alone = model.double(), copy.deepcopy(model).double()
    run = sp(model if whole else trained(model, False), mesh=worker.mesh())
    for seed in range(2):
        model.zero_grad()
        ids = torch.randint(1, WORDS, (ROWS, TOKENS), generator=torch.Generator().manual_seed(seed))
        before = bytes_sent()
        found = run(input_ids=ids, labels=ids, **({"use_cache": False} if whole else {}))
        forward = bytes_sent()
        loss = found.loss if whole else found
        loss.backward()
        backward = bytes_sent()
    expected = alone(input_ids=ids, labels=ids, use_cache=False)
    expected.loss.backward()
    sent = [forward - before, backward - forward]
    right = outcome(loss, gradients(model), expected.loss, gradients(alone))
    if not whole:
        return Step(sent, right)
    in_shards = isinstance(found.logits, Sharded) and not found.logits.is_gathered
    begun = bytes_sent()
    logits = found.logits.detach() * 1
    sent.append(bytes_sent() - begun)
    return Step(sent, right, difference(logits, expected.logits.detach()), logits.nbytes, in_shards)


MODELS = [
    pytest.param(make, id=name, marks=[pytest.mark.slow] * (make is not gpt2)) for make, name in zip(OTHERS, NAMES)
]


@pytest.mark.slow
@pytest.mark.parametrize("make", MODELS)
def test_unread_logits_are_not_sent(ranks: Ranks, make: Any) -> None:
    """Forward and backward without options; logits read afterwards equal a single device's and are sent once."""
    if not can_count_bytes():
        pytest.skip("the kernel does not count what a connection sends")
    with_logits, loss_alone = (ranks.run(2, step, make, whole) for whole in (True, False))
    for found in (with_logits, loss_alone):
        check([one.right for one in found], TOLERANCE)
    for one, other in zip(with_logits, loss_alone, strict=True):
        assert one.in_shards
        assert one.sent[:2] == other.sent
        assert min(other.sent) > 0
        assert one.error < TOLERANCE
        assert one.size // 2 <= one.sent[2] < one.size
