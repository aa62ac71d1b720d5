"""A loss on a short window that is sliced after the head: the slice moves before it, so no full logits exist."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from sharding.tiles.losses import VOCAB, WIDTH, Loss, Model, batch
from support.golden import captured, notes_of, show
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import sp_compile
from sp_compile.lowering.collectives.sharded import Sharded
from sp_compile.passes.context import NoteKind
from sp_compile.passes.localize.tiles.run_in_tiles import programs_of
from sp_compile.passes.strategies.hoist import HoistSlices

EXACT = 1e-9


def tail(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Compute a loss on the answer after a prompt."""
    return F.cross_entropy(head(h)[:, 10:].flatten(0, 1), ids[:, 10:].flatten())


def answer(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Shifted, capped, upcast, copied."""
    z = torch.tanh(head(h) / 3) * 3
    return F.cross_entropy(z.double()[:, 9:-1].contiguous().view(-1, VOCAB), ids[:, 10:].flatten())


def narrowed(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    return F.cross_entropy((head(h) * 0.5).narrow(1, 3, 5).flatten(0, 1), ids[:, 4:9].flatten())


def of_chunks(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """A loop that the user wrote to hold less."""
    pieces = zip(head(h)[:, :-1].chunk(3, 1), ids[:, 1:].chunk(3, 1))
    return sum(F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="sum") for z, y in pieces) / ids.numel()


def prompt_and_answer(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """One of the windows is most of the rows for some lengths."""
    z = head(h)
    parts = (z[:, :9], ids[:, 1:10]), (z[:, 9:-1], ids[:, 10:])
    return sum(w * F.cross_entropy(a.flatten(0, 1), b.flatten()) for w, (a, b) in zip((0.1, 1), parts))


def beside_all(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """All logits are read, too, token by token."""
    z = head(h)
    return F.cross_entropy(z[:, 10:].flatten(0, 1), ids[:, 10:].flatten()) + z.logsumexp(-1).square().mean()


def last(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    return F.cross_entropy(head(h)[:, -1], ids[:, 0])


def with_late_rows(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Multiply logits with a factor that is computed later, from all rows."""
    z = head(h)
    per_row = h.mean(-1, keepdim=True).cumsum(1)
    return F.cross_entropy((z * per_row)[:, 10:].flatten(0, 1), ids[:, 10:].flatten())


def beside_no_gradients(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Multiply logits with a gate without gradients, and read one window of logits under no_grad."""
    with torch.no_grad():
        gate = torch.tanh(head(h))
    z = head(h)
    with torch.no_grad():
        least = z[:, :4]
    return F.cross_entropy((z * gate)[:, 10:].flatten(0, 1), ids[:, 10:].flatten()) + (least * z[:, 12:16]).mean()


def at_positions(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Select positions after the head, as in masked language models: repeated ones, and negative ones."""
    z = head(h)
    at = torch.tensor([3, 11, -2, 3, 8])
    return F.cross_entropy(z[:, at].flatten(0, 1), ids[:, at].flatten())


def at_positions_of_a_window(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Numbers of rows that depend on data, counted within the window that is predicted."""
    z, y = torch.tanh(head(h) * 0.5)[:, 2:-1], ids[:, 3:]
    at = ids.sum(0).argsort(stable=True)[:6] % y.shape[1] - y.shape[1]
    each = F.cross_entropy(z[:, at].mT, y[:, at], reduction="none")
    return (each * weights[:, at]).sum() / weights.sum()


def selected(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    at = torch.arange(2, 12, 2)
    return F.cross_entropy(head(h).index_select(1, at).flatten(0, 1), ids.index_select(1, at).flatten())


def every_third(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    return F.cross_entropy(head(h)[:, 1::3].flatten(0, 1), ids[:, 1::3].flatten())


ROWS = {at_positions: 5, at_positions_of_a_window: 6, selected: 5, every_third: 11}
PICKED = tuple(ROWS)
WINDOWS = (tail, answer, narrowed, of_chunks, prompt_and_answer, beside_all, last, with_late_rows, *PICKED)
EXACT_ONLY = (beside_no_gradients,)
"""Losses whose slice stays: the ops before it run with and without gradients."""


def logits_of(nodes: Iterator[Node]) -> int:
    """Rows of logits in the largest value that has any; weights are as wide."""
    values = [n.meta.get("val") for n in nodes]
    logits = [v for v in values if isinstance(v, Tensor) and v.shape[-1:] == (VOCAB,) and v.dtype.is_floating_point]
    return max((v.numel() // VOCAB for v in logits), default=0)


def most_logits(gm: GraphModule) -> int:
    """In the rank's graph, and in those of its tiles."""
    parts = [part.graph for program in programs_of(gm) for body in program.bodies.values() for part in body.parts]
    return max(logits_of(iter(one.graph.nodes)) for one in (gm, *parts))


@pytest.mark.sampled(every=107)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("seq", [16, 19, 23])
@pytest.mark.parametrize("loss", WINDOWS + EXACT_ONLY, ids=lambda loss: loss.__name__)
def test_one_device(loss: Loss, seq: int, n: int, layout: str) -> None:
    if layout == "zigzag" and n == 1:
        pytest.skip("one rank has all rows in order")
    assert sp_compile.verify(Model(loss).double(), *batch(seq), sp=n, tiles=3, layout=layout).worst < EXACT


@pytest.mark.sampled(every=13)
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("loss", WINDOWS, ids=lambda loss: loss.__name__)
def test_no_more_than_a_tile(loss: Loss, n: int) -> None:
    """No value is larger than one of 8 tiles of a rank's rows; the transposed head gradient equals eight of them."""
    rows, seq, tiles = 2, 128, 8
    gm = sp_compile.parallelize(torch.export.export(Model(loss).double(), batch(seq, rows)), sp=n, tiles=tiles)
    assert most_logits(gm) <= max(rows * seq // n // tiles, WIDTH)


def row_by_row(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Read every row separately, which would compute all rows on each rank."""
    z = head(h)
    return sum(F.cross_entropy(z[:, i], ids[:, i]) for i in range(ids.shape[1]))


@pytest.mark.slow
def test_rows_that_are_all_of_them_stay_where_they_are() -> None:
    found = sp_compile.verify(Model(row_by_row).double(), *batch(16), sp=2)
    assert found.worst < EXACT
    assert not found.find_notes(NoteKind.REWRITTEN, subject="hoist_slices")


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("loss", "cut"), [(narrowed, False), (last, True)])
def test_balanced_rows(loss: Loss, cut: bool) -> None:
    """A window would have another row order, so it stays; a replicated row has no order."""
    found = sp_compile.verify(Model(loss).double(), *batch(19), sp=3, tiles=3, layout="balanced")
    assert found.worst < EXACT
    assert bool(found.find_notes(NoteKind.REWRITTEN, subject="hoist_slices")) == cut


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("n", [2, 1])
def test_most_of_the_rows_stay_where_they_are(n: int) -> None:
    """Ranks cut such a window without an exchange."""

    def most(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(head(h)[:, 5:].flatten(0, 1), ids[:, 5:].flatten())

    found = sp_compile.explain(Model(most).double(), *batch(16), sp=n, tiles=3)
    assert not [note for note in found.notes if note.label in ("hoist_slices", "gather")]
    assert found.tiled


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("loss", PICKED, ids=lambda loss: loss.__name__)
def test_rows_that_are_picked_are_shared_out(loss: Loss) -> None:
    """Picked rows are sharded like a window, as a separate sequence."""
    model, given = Model(loss).double(), batch(33)
    found = [
        most_logits(sp_compile.parallelize(torch.export.export(model, given), sp=n, tiles="never")) for n in (2, 4)
    ]
    assert found == [2 * math.ceil(ROWS[loss] / n) for n in (2, 4)]


class Both(Model):
    """The loss of an answer, and all logits."""

    def __init__(self) -> None:
        super().__init__(tail)

    def forward(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        seen: list[Tensor] = []

        def loss(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
            seen.append(head(h))
            return F.cross_entropy(seen[0][:, 10:].flatten(0, 1), ids[:, 10:].flatten())

        self.loss = loss
        return super().forward(ids, weights), seen[0]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("tiles", [3, "never", "auto"])
def test_logits_that_are_returned_are_made_when_they_are_read(tiles: int | str) -> None:
    """With tiles; without, they are as they were."""
    model = Both().double()
    alone = copy.deepcopy(model)
    options = {"tiles": tiles, "compiler": "aot_eager", "cost": {}, "outputs": "lazy"}
    loss, logits = torch.compile(model, backend="sp", options=options)(*batch(19))
    right, whole = alone(*batch(19))
    assert isinstance(logits, Sharded) == (tiles == 3)
    (loss + logits.square().mean()).backward()
    (right + whole.square().mean()).backward()
    torch.testing.assert_close(loss, right, rtol=EXACT, atol=0)
    gradients = [[p.grad for p in one.parameters()] for one in (model, alone)]
    torch.testing.assert_close(*gradients, rtol=EXACT, atol=1e-12)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("n", [2, 1, 3])
def test_returned_beside_it(n: int) -> None:
    found = sp_compile.verify(Both().double(), *batch(19), sp=n, tiles=3)
    assert found.worst < EXACT
    assert found.tiled


class Goldens(TestCase):
    """The pass alone."""

    def test_slice_before_the_head(self) -> None:
        def program(x, y):
            h = F.scaled_dot_product_attention(x, x, x)[:, 0]
            return torch.tanh(F.linear(h, y) / 3)[:, 6:].logsumexp(-1).sum()

        gm = captured(program, torch.randn(2, 1, 8, 4), torch.randn(32, 4))
        notes = notes_of(HoistSlices(2), gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [2, 1, 8, 4] = placeholder
y: [32, 4] = placeholder
scaled_dot_product_attention: [2, 1, 8, 4] = aten.scaled_dot_product_attention(x, x, x)
select: [2, 8, 4] = aten.select.int(scaled_dot_product_attention, 1, 0)
slice_tensor: [2, 2, 4] = aten.slice.Tensor(select, 1, 6, 8, 1)
linear_default: [2, 2, 32] = aten.linear(slice_tensor, y)
div_tensor: [2, 2, 32] = aten.div.Tensor(linear_default, 3)
tanh_default: [2, 2, 32] = aten.tanh(div_tensor)
logsumexp: [2, 2] = aten.logsumexp(tanh_default, [-1])
sum_1: [] = aten.sum(logsumexp)
return (sum_1,)""",
        )
        self.assertExpectedInline(
            "\n".join(f"{note.label} {note.node}" for note in notes), """hoist_slices tanh_default"""
        )
