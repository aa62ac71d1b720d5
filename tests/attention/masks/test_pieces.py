"""Pieces of vectors: every value within them, lines known exactly, tables short, and one call for all of a graph."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention.attending import packed, pieces_of
from torch import Tensor

from sp_compile.lowering.masks.pieces import CELL, FAR_VALUE, MAX_PIECES, table_size


def vectors() -> st.SearchStrategy[Tensor]:
    """(B, S): stretches of lines, repeated values, noise, and numbers at which int64 wraps."""
    lines = st.tuples(st.integers(-9, 9), st.integers(-2, 2), st.integers(1, 300)).map(
        lambda line: [line[0] + line[1] * i for i in range(line[2])]
    )
    noise = st.lists(st.integers(-3, 3), min_size=1, max_size=100)
    wild = st.lists(
        st.sampled_from([-(2**63), 2**63 - 1, 2**62, 0, -1, FAR_VALUE, FAR_VALUE - 1]), min_size=1, max_size=6
    )
    row = st.lists(st.one_of(lines, noise, wild), min_size=1, max_size=6).map(lambda parts: [*chain(*parts)])
    return st.lists(row, min_size=1, max_size=3).map(
        lambda rows: torch.tensor([row[: min(map(len, rows))] for row in rows])
    )


@settings(max_examples=300)
@given(vectors(), st.data())
def test_values_are_within_their_pieces(x: Tensor, data: st.DataObject) -> None:
    found, values = pieces_of(x), x.numpy()
    length = x.shape[1]
    low, high, _ = found.lines(np.arange(length))
    tame = np.abs(values.astype(np.float64)) < FAR_VALUE / 2
    assert ((low <= values) & (values <= high) | ~tame).all()
    known = low == high
    assert (values[:, known] == low[known]).all()
    first = data.draw(st.integers(0, length - 1))
    last = data.draw(st.integers(first, length - 1))
    least, greatest = found.bounds_over(first, last)
    part = np.where(tame, values, 0)[:, first : last + 1]
    assert tame[:, first : last + 1].all() <= (least <= part.min() and part.max() <= greatest)
    if (line := found.line(first, last)) is not None:
        assert (x[:, first : last + 1] == line[0] + line[1] * torch.arange(last + 1 - first)).all()


@settings(max_examples=60)
@given(st.lists(st.integers(CELL // MAX_PIECES, 400), min_size=1, max_size=40))
def test_documents_and_positions_have_a_piece_each(lengths: list[int]) -> None:
    documents, positions = packed(lengths)
    assert len(pieces_of(documents).starts) <= len(lengths)
    assert len(pieces_of(positions).starts) == len(lengths)
    assert (pieces_of(positions).slopes == 1).all()


@pytest.mark.parametrize(
    ("values", "pieces"),
    [
        ([5], [(0, 5, 5, 0)]),
        ([0, 0, 0, 1, 1, 1, 1, 2, 2], [(0, 0, 0, 0), (3, 1, 1, 0), (7, 2, 2, 0)]),
        ([0, 1, 2, 0, 1, 2, 3, 0, 1], [(0, 0, 0, 1), (3, 0, 0, 1), (7, 0, 0, 1)]),
        ([0, 0, 0, 1, 1, 2, 2, 3, 3, 3], [(0, 0, 0, 0), (3, 1, 1, 0), (5, 2, 2, 0), (7, 3, 3, 0)]),
        ([0, 0, 0, 1, 2, 2, 2], [(0, 0, 0, 0), (3, 1, 1, 0), (4, 2, 2, 0)]),
        ([0, 1, 2, 2, 2, 2], [(0, 0, 0, 1), (2, 2, 2, 0)]),
        ([0, 1, 2, 0, 0, 1, 2], [(0, 0, 0, 1), (3, 0, 0, 0), (4, 0, 0, 1)]),
        ([2**63 - 1, -(2**63), 5, 5, 5], [(0, -FAR_VALUE, FAR_VALUE, 0), (2, 5, 5, 0)]),
    ],
)
def test_pieces(values: list[int], pieces: list[tuple[int, ...]]) -> None:
    found = pieces_of(torch.tensor([values]))
    assert list(zip(*(x.tolist() for x in (found.starts, found.lows, found.highs, found.slopes)))) == pieces


def test_a_batch_is_lines_where_they_have_one_slope() -> None:
    x = torch.stack([torch.arange(8), torch.arange(8) + 3, torch.arange(8) * torch.tensor([1] * 4 + [2] * 4)])
    found = pieces_of(x)
    assert (found.lows[0], found.highs[0], found.slopes[0]) == (0, 3, 1)
    assert found.bounds_over(0, 3) == (0, 6)
    assert found.bounds_over(4, 7) == (4, 14)


@pytest.mark.parametrize("kind", ["bits", "ints", "alternating", "batches"])
def test_tables_fit_any_values(kind: str) -> None:
    """Noise costs one piece per cell; equal bounds everywhere cost one piece."""
    generator = torch.Generator().manual_seed(0)
    for length in (1, 2, CELL - 1, CELL, CELL + 1, 10 * CELL + 3):
        x = {
            "bits": torch.randint(2, (1, length), generator=generator).bool(),
            "ints": torch.randint(1 << 40, (1, length), generator=generator),
            "alternating": torch.arange(length)[None] % 2,
            "batches": torch.randint(9, (5, length), generator=generator),
        }[kind]
        (table,) = torch.ops.sp.pieces([x])
        assert table.shape == (table_size(length),)
        found = pieces_of(x)
        assert found.batch == x.shape[0]
        if length > CELL:
            assert len(found.starts) <= length // CELL + MAX_PIECES
    if kind in ("bits", "alternating"):  # but for the last positions, which are no whole cell
        assert len(found.starts) <= 1 + MAX_PIECES


def test_equal_tables_are_equal_pieces() -> None:
    x = torch.arange(100)[None]
    assert pieces_of(x) == pieces_of(x.clone())
    assert hash(pieces_of(x)) == hash(pieces_of(x.to(torch.int32)))
    assert pieces_of(x) != pieces_of(x + 1)
    assert pieces_of(x) != pieces_of(x[:, :99])
    assert pieces_of(x) != pieces_of(x.expand(2, -1))


def test_the_operator_keeps_torchs_contracts() -> None:
    """The size of its tables depends on the length only, also for symbolic lengths and without vectors."""
    torch.library.opcheck(torch.ops.sp.pieces.default, ([torch.arange(9)[None], torch.ones(2, 300, dtype=torch.bool)],))
    assert torch.ops.sp.pieces([]) == []
    assert torch.ops.sp.pieces([torch.ones(0, 7, dtype=torch.long)])[0].shape == (table_size(7),)
