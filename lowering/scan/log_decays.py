"""Accumulate logarithms of decays within chunks of linear attention, for decays of 0 too.

    decay     -1   -inf   -2   -3        log      -1 -1 -3 -6        resets      0 1 1 1

A decay of 0, whose logarithm is -inf or less than -104 in float32, resets the state. Differences of accumulated
logarithms would be NaN or imprecise after it, so that resets are counted instead: a decay from one token to another is
0 if their counts differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class LogDecay(NamedTuple):
    """The decay from the start of a chunk to each token, (..., T, 1) or (..., T, K)."""

    log: Tensor  # the sum of the finite logarithms
    resets: Tensor  # int64, the number of decays of 0

    def map(self, function: Callable[[Tensor], Tensor]) -> LogDecay:
        """Apply a function, such as a selection of tokens, to both tensors."""
        return LogDecay(function(self.log), function(self.resets))

    def since(self, earlier: LogDecay, is_allowed: Tensor | None = None) -> Tensor:
        """Return the decay factor from an earlier point to this one.

        It is 0 after a decay of 0 between the two points, and where `is_allowed` (if given) is False.
        """
        is_kept = self.resets == earlier.resets
        if is_allowed is not None:
            is_kept = is_kept & is_allowed
        return (self.log - earlier.log).masked_fill(~is_kept, -torch.inf).exp()


class Decays(NamedTuple):
    """Decays of the tokens of chunks, and the documents of the tokens."""

    after: LogDecay  # from the start of the chunk, this token included
    before: LogDecay  # from the start of the chunk to the token before
    base: LogDecay  # `before` of the first token of the token's document, if that is in the chunk, else zeros
    segment: Tensor | None  # number of the document within the chunk, (..., T, 1); 0 is that of the token before it

    @classmethod
    def of(cls, decay: Tensor, starts: Tensor | None) -> Decays:
        """Accumulate the logarithms of decays over the T tokens of each chunk.

        Args:
            decay: The logarithm of each token's decay, (..., T, 1) or (..., T, K).
            starts: Whether each token is the first one of a document, (..., T, 1) bool; None for a single document.
        """
        is_reset = decay.detach().exp() == 0
        token = LogDecay(decay.masked_fill(is_reset, 0), is_reset.to(torch.int64))
        after = token.map(lambda x: x.cumsum(-2))
        before = LogDecay(after.log - token.log, after.resets - token.resets)
        if starts is None:
            return cls(after, before, before.map(lambda x: torch.zeros_like(x[..., :1, :])), None)
        row = torch.arange(decay.shape[-2], device=decay.device).view(-1, 1)
        # The row of the first token of each token's document; 0 if the document has started before the chunk.
        first = torch.where(starts, row, 0).cummax(-2).values
        base = before.map(lambda x: x.gather(-2, first.expand(x.shape)))  # exactly 0 at the first row of a chunk
        return cls(after, before, base, starts.cumsum(-2))

    def zero_later_documents(self, x: Tensor) -> Tensor:
        """Return x (..., T, D) with zeros for tokens of documents that start in the chunk.

        Such tokens do not read the state before the chunk.
        """
        return x if self.segment is None else x * (self.segment == 0)

    def causal_mask(self) -> Tensor:
        """Return True for pairs of a token and an earlier one, or the same, of its document: bool (..., T, T)."""
        size = self.after.log.shape[-2]
        causal = torch.ones(size, size, dtype=torch.bool, device=self.after.log.device).tril()
        return causal if self.segment is None else causal & (self.segment == self.segment.mT)
