"""Read and write one state of linear attention for each document: initial states (N, H, K, V) of N documents.

    opened    1 + the number of the document that starts at a token, or 0        bounds 0 2 3 5:  1 0 2 3 0
    closed    1 + the number of the document that ends at a token, or 0                           0 1 2 0 3

The tokens of a chunk that read the same state are a *segment*: those of one document, or those before the first start,
which read the state before the chunk. ``reads`` and ``factor`` of a chunk refer to the state at the start of a segment.
So the initial state of a document acts in the chunk in which it starts: on the results of its tokens there, and on the
state after that chunk if it continues. Later chunks, of other ranks too, get it from the scan. Each state is read on
one rank, and each final state is computed on one rank; the others add zeros. Memory: N chunks in addition.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .log_decays import LogDecay


class DocumentRows(NamedTuple):
    """Place of one token of each document, its first or its last, among the chunks of T tokens of a rank."""

    chunk: Tensor  # int64 (N,), the chunk of the token; 0 if another rank has the token
    row: Tensor  # int64 (N,), the row of the token in its chunk; 0 if another rank has the token
    is_own: Tensor  # bool (N, 1, 1, 1), False if another rank has the token

    def select(self, x: Tensor) -> Tensor:
        """Return, for each document, the chunk of its token: (1, H, chunks, ...) -> (N, H, ...)."""
        return x.squeeze(0).movedim(1, 0).index_select(0, self.chunk)

    def select_row(self, x: Tensor) -> Tensor:
        """Return, for each document, the row of its token: (1, H, chunks, T, D) -> (N, H, 1, D)."""
        rows = self.row.view(-1, 1, 1, 1).expand(-1, x.shape[1], 1, x.shape[-1])
        return self.select(x).gather(2, rows)

    def add_to(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x (1, H, chunks, ...) plus the value of each own document, y (N, H, ...), in its token's chunk."""
        y = torch.where(self.is_own, y, 0)
        return x.squeeze(0).movedim(1, 0).index_add(0, self.chunk, y).movedim(0, 1).unsqueeze(0)


def find_documents(marks: Tensor, count: int) -> DocumentRows:
    """Return the place of each document's marked token, its first or last one.

    Args:
        marks: `opened` or `closed` of the module, int64 (1, 1, chunks, T, 1): the number of the document, from 1, at
            its first or last token, and 0 elsewhere.
        count: Number of documents, N.
    """
    size, numbers = marks.shape[-2], marks.flatten()
    tokens = torch.arange(numbers.shape[0], device=marks.device)
    slots = numbers.new_full((count + 1,), -1)  # by number; slot 0 receives the unmarked tokens
    found = slots.scatter(0, numbers, tokens)[1:]  # index of the token, -1 if another rank has it
    index = found.clamp(min=0)
    return DocumentRows(index // size, index % size, (found >= 0).view(-1, 1, 1, 1))


def add_initial_states(
    out: Tensor, state: Tensor, reads: Tensor, factor: Tensor, segment: Tensor, opened: Tensor, initial: Tensor
) -> tuple[Tensor, Tensor]:
    """Add the effects of initial states to the results of chunks and to the states after them.

    Args:
        out: (1, H, chunks, T, V), results.
        state: (1, H, chunks, K, V), states after the chunks.
        reads: (1, H, chunks, T, K), rows that read the state at the start of their segment.
        factor: (1, H, chunks, K, K), or (1, H, chunks, K, 1) if it is diagonal: the state at the start of the last
            segment of a chunk times this factor is its part of the state after the chunk.
        segment: Numbers of the segments of a chunk, int64 (1, 1, chunks, T, 1).
        opened: Marks of the first tokens (see the module), like `segment`.
        initial: (N, H, K, V), the states of the documents before their first tokens.

    Returns:
        out and state, with the effects added.
    """
    documents = find_documents(opened, initial.shape[0])
    # Of the chunk in which each document starts: the segments of its tokens, and the segment of the document.
    segments, own_segment = documents.select(segment), documents.select_row(segment)
    out = documents.add_to(out, (documents.select(reads) * (segments == own_segment)) @ initial)
    chunk_factor = documents.select(factor)
    state_after = chunk_factor * initial if chunk_factor.shape[-1] == 1 else chunk_factor @ initial
    continues = segments[..., -1:, :] == own_segment  # the document has the last token of the chunk
    return out, documents.add_to(state, state_after * continues)


def final_states(
    written: list[tuple[Tensor, Tensor, Tensor | None]],
    after: LogDecay,
    base: LogDecay,
    segment: Tensor,
    before: Tensor,
    closed: Tensor,
    initial: Tensor,
) -> Tensor:
    """Return the states after documents whose last token is on this rank, (N, H, K, V), zeros for others.

    The state after a document is computed in the chunk of its last token: the decayed state at the start of the
    document's segment there, plus what the tokens of the segment write, up to the last one.

    Args:
        written: What tokens write, (1, H, chunks, T, ...): keys, and values of the form ``values + reading @ h``, where
            h is the state at the start of the segment, and a reading may be None.
        after: The decay from the start of the chunk to each token, this one included, (1, H, chunks, T, 1) or (..., K).
        base: Like `after`, but from the start of the chunk to the start of each token's segment.
        segment: Numbers of the segments of a chunk, int64 (1, 1, chunks, T, 1); 0 is that of the state before it.
        before: (1, H, chunks, K, V), states before the chunks.
        closed: Marks of the last tokens (see the module), like `segment`.
        initial: (N, H, K, V), the states of the documents before their first tokens.
    """
    # `select` takes the chunk of each document's last token, (N, H, T, ...), and `select_row` the token itself,
    # (N, H, 1, ...). For documents that end on other ranks both take some token, and the result is set to 0.
    ends = find_documents(closed, initial.shape[0])
    segments, own_segment = ends.select(segment), ends.select_row(segment)
    # The decays from the start of the chunk to the last token, and to the start of the document's segment.
    to_end, to_start = after.map(ends.select_row), base.map(ends.select_row)
    row = torch.arange(segment.shape[-2], device=segment.device).view(-1, 1)
    is_written = (segments == own_segment) & (row <= ends.row.view(-1, 1, 1, 1))
    kept = to_end.since(after.map(ends.select), is_written)  # the factor of what each token writes
    start = torch.where(own_segment == 0, ends.select(before), initial)  # segment 0 has started in an earlier chunk
    state = to_end.since(to_start).mT * start  # one factor, or one for each of the K rows of a state
    for key, values, reading in written:
        values = ends.select(values)
        values = values if reading is None else values + ends.select(reading) @ start
        state = state + (ends.select(key) * kept).mT @ values
    return torch.where(ends.is_own, state, 0)
