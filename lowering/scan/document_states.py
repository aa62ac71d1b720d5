"""Read and write one state of linear attention for each document: initial states (N, H, K, V) of N documents.

    opened    1 + the number of the document that starts at a token, or 0        bounds 0 2 3 5:  1 0 2 3 0
    closed    1 + the number of the document that ends at a token, or 0                           0 1 2 0 3

The tokens of a chunk that read the same state are a *segment*: those of one document, or those before the first start,
which read the state before the chunk. ``reads`` and ``factor`` of a chunk refer to the state at the start of a segment.
So the initial state of a document acts in the chunk in which it starts: on the results of its tokens there, and on the
state after that chunk if it continues. Later chunks, of other ranks too, get it from the scan. Each state is read on
one rank, and each final state is computed on one rank; the others add zeros. Memory: N chunks in addition.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class DocumentRows(NamedTuple):
    """The token of each document at which it starts, or ends, among the tokens of a rank, (1, 1, chunks, T, 1)."""

    chunk: Tensor  # int64 (N,), the chunk of the token
    row: Tensor  # int64 (N,), the row of the token in its chunk
    is_own: Tensor  # bool (N, 1, 1, 1), False if another rank has the token

    def select(self, x: Tensor) -> Tensor:
        """Return the chunks of the documents: (1, H, chunks, ...) -> (N, H, ...)."""
        return x.squeeze(0).movedim(1, 0).index_select(0, self.chunk)

    def select_row(self, x: Tensor) -> Tensor:
        """Return the rows of the tokens: (1, H, chunks, T, D) -> (N, H, 1, D)."""
        rows = self.row.view(-1, 1, 1, 1).expand(-1, x.shape[1], 1, x.shape[-1])
        return self.select(x).gather(2, rows)

    def add_to(self, x: Tensor, y: Tensor) -> Tensor:
        """Add values of the documents (N, H, ...) to their chunks (1, H, chunks, ...), if they are on this rank."""
        y = torch.where(self.is_own, y, 0)
        return x.squeeze(0).movedim(1, 0).index_add(0, self.chunk, y).movedim(0, 1).unsqueeze(0)


def find_documents(marks: Tensor, count: int) -> DocumentRows:
    """Return the tokens of the documents from their numbers, 1 to `count`, int64 (1, 1, chunks, T, 1)."""
    size, numbers = marks.shape[-2], marks.flatten()
    tokens = torch.arange(numbers.shape[0], device=marks.device)
    slots = numbers.new_full((count + 1,), -1)  # slot 0 is that of all other tokens
    found = slots.scatter(0, numbers, tokens)[1:]
    position = found.clamp(min=0)
    return DocumentRows(position // size, position % size, (found >= 0).view(-1, 1, 1, 1))


def add_initial_states(
    out: Tensor, state: Tensor, reads: Tensor, factor: Tensor, segment: Tensor, opened: Tensor, initial: Tensor
) -> tuple[Tensor, Tensor]:
    """Add the effects of initial states to the results of chunks and to the states after them.

    Args:
        out: (1, H, chunks, T, V), results.
        state: (1, H, chunks, K, V), states after the chunks.
        reads: (1, H, chunks, T, K), rows that read the state at the start of their segment.
        factor: (1, H, chunks, K, K) or (1, H, chunks, K, 1), of the last segment of a chunk.
        segment: Numbers of the segments of a chunk, int64 (1, 1, chunks, T, 1).
        opened: As `segment`, see above.
        initial: (N, H, K, V).
    """
    documents = find_documents(opened, initial.shape[0])
    number, own = documents.select(segment), documents.select_row(segment)
    out = documents.add_to(out, (documents.select(reads) * (number == own)) @ initial)
    selected = documents.select(factor)
    after = selected * initial if selected.shape[-1] == 1 else selected @ initial
    return out, documents.add_to(state, after * (number[..., -1:, :] == own))


def final_states(
    written: list[tuple[Tensor, Tensor, Tensor | None]],
    after: Tensor,
    base: Tensor,
    segment: Tensor,
    before: Tensor,
    closed: Tensor,
    initial: Tensor,
) -> Tensor:
    """Return the states after documents whose last token is on this rank, (N, H, K, V), zeros for others.

    Args:
        written: Keys, values and readings that tokens write, (1, H, chunks, T, ...).
        after: Logarithm of the decay up to each token, this one included, (1, H, chunks, T, 1) or (..., K).
        base: As `after`, up to the start of the segment.
        segment: As for `add_initial_states`.
        before: (1, H, chunks, K, V), states before the chunks.
        closed: As `segment`.
        initial: (N, H, K, V).
    """
    ends = find_documents(closed, initial.shape[0])
    number, own, last = ends.select(segment), ends.select_row(segment), ends.select_row(after)
    row = torch.arange(segment.shape[-2], device=segment.device).view(-1, 1)
    is_written = (number == own) & (row <= ends.row.view(-1, 1, 1, 1))
    kept = (last - ends.select(after)).masked_fill(~is_written, -torch.inf).exp()
    start = torch.where(own == 0, ends.select(before), initial)
    state = (last - ends.select_row(base)).exp().mT * start
    for key, values, reading in written:
        values = ends.select(values)
        values = values if reading is None else values + ends.select(reading) @ start
        state = state + (ends.select(key) * kept).mT @ values
    return torch.where(ends.is_own, state, 0)
