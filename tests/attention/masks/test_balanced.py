"""layout="balanced": loss and gradients equal those of a single device in every row order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.attention.attending import packed
from support.models import check
from support.parity import Outcome, against_eager
from support.parity import check as every_rank_is_right
from support.parity import sp as compiled
from support.ranks import Ranks, mesh
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sp_compile
from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.collectives.sharded import Sharded
from sp_compile.lowering.masks import pieces
from sp_compile.passes.context import NoteKind
from sp_compile.passes.cost.attention_cost import Candidate
from sp_compile.passes.strategies.attention import choose_attention as choose

LENGTHS = [5, 1, 9, 2, 3, 7]
HEADS, WIDTH, VOCABULARY = 4, 16, 31
ops = torch.ops.sp


class Packed(nn.Module):
    """Attention within the documents that position_ids define, and a loss on shifted labels."""

    def __init__(self, layers: int = 2, window: int | None = None) -> None:
        super().__init__()
        self.window = window
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def mask(self, positions: Tensor) -> Tensor:
        document = (positions == 0).cumsum(1)
        mask = document[:, None, :, None] == document[:, None, None]
        mask = mask & (positions[:, None, None] <= positions[:, None, :, None])
        if self.window is not None:
            mask = mask & (positions[:, None, :, None] - positions[:, None, None] < self.window)
        return mask

    def forward(self, ids: Tensor, positions: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S) int64 three times -> (0-d loss, logits (B, S, VOCABULARY))."""
        x, mask = self.tokens(ids) + self.places(positions), self.mask(positions)
        for layer in self.layers:
            q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in layer(x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        logits = self.head(x)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits


def given(batch: int = 1, lengths: list[int] = LENGTHS, **how: Any) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Packed(**how).double()
    positions = torch.cat([packed(lengths[i:] + lengths[:i])[1] for i in range(batch)])
    ids = torch.randint(VOCABULARY, positions.shape)
    return model, ids, positions, ids


def orders(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The orders that are made from now on."""
    from sp_compile.lowering.masks import balance_rows

    made: list[Tensor] = []
    new_order = balance_rows.order_tensors

    def seen(*args: Any) -> tuple[Tensor, Tensor]:
        made.append(new_order(*args)[0])
        return new_order(*args)

    monkeypatch.setattr(balance_rows, "order_tensors", seen)
    return made


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("attention", ["ring", "gather", "hybrid"])
def test_packed_documents(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """27 positions on 4 ranks, one label less, logits in the program's order; each rank has a balanced order."""
    made = orders(monkeypatch)
    report = check(*given(), sp=4, attention=attention, layout="balanced")
    assert not report.fallbacks
    assert len(report.find_notes(NoteKind.REWRITTEN, subject="balanced")) == 1
    assert len(made) == 4
    assert all(torch.equal(order, made[0]) for order in made)
    assert made[0].tolist() != sorted(made[0].tolist())


class Alone(nn.Module):
    """Causal attention within documents, whose first input is the sequence."""

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        mask = (documents[:, :, None] == documents[:, None]) & (place[:, None] >= place)
        y = x.unflatten(-1, (4, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(y, y, y, attn_mask=mask[:, None]).square().mean()


def test_a_length_that_is_a_symbol() -> None:
    """Then the first input of the graph is no tensor."""
    x, documents = torch.randn(1, 23, 16, dtype=torch.float64, requires_grad=True), torch.arange(23)[None] // 9
    for given in (x, documents):
        torch._dynamo.mark_dynamic(given, 1)
    report = check(Alone(), x, documents, sp=2, attention="ring", layout="balanced")
    assert report.find_notes(NoteKind.REWRITTEN, subject="balanced")


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("lengths", [LENGTHS, [*LENGTHS, 5], [3, 1], [64], [40, 3, 2, 1, 1, 1, 20, 7, 4]], ids=str)
@pytest.mark.parametrize("attention", ["ring", "gather", "hybrid", "ulysses", "auto"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_all_lengths(n: int, attention: str, lengths: list[int], batch: int, window: int | None) -> None:
    if (attention in ("ulysses", "hybrid") and n in (3, 8)) or (attention == "hybrid" and n == 2):
        pytest.skip("the ranks do not divide 4 heads so")
    check(*given(batch, lengths, window=window), sp=n, attention=attention, layout="balanced")


def test_one_wait_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order and the tables of all vectors, in both orders, from one copy of two vectors."""
    waits: list[int] = []
    on_host = pieces._copy_to_host

    def counted(vectors: list[Tensor]) -> list[Tensor]:
        waits.append(len(vectors))
        return on_host(vectors)

    monkeypatch.setattr(pieces, "_copy_to_host", counted)
    check(*given(), sp=2, attention="ring", layout="balanced")
    assert waits == [2, 2], "once on each of two ranks"


def test_causal_alone_is_zigzag(monkeypatch: pytest.MonkeyPatch) -> None:
    class Causal(Packed):
        def mask(self, positions: Tensor) -> Tensor:
            index = torch.arange(positions.shape[1])
            return index[:, None] >= index

    made = orders(monkeypatch)
    torch.manual_seed(0)
    _, *inputs = given(lengths=[16])
    check(Causal().double(), *inputs, sp=2, attention="gather", layout="balanced")
    chunks = [order[::4] // 4 for order in made[0].view(2, 8)]
    assert sorted(map(sorted, (chunk.tolist() for chunk in chunks))) == [[0, 3], [1, 2]]


class Cumulative(Packed):
    def forward(self, ids: Tensor, positions: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss, logits = super().forward(ids, positions, labels)
        return loss, logits.cumsum(1)


class Shifted(Packed):
    def forward(self, ids: Tensor, positions: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss, logits = super().forward(ids, positions, labels)
        return loss, logits[:, 1:] + logits[:, :-1]


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (Cumulative, {}, ["SP411", "cumsum", "test_balanced.py"]),
        (Shifted, {}, ["SP411", "add", "test_balanced.py"]),
        (Packed, {"outputs": "local"}, ["SP413"]),
    ],
)
def test_unsupported_programs_are_refused(model: type[Packed], options: dict[str, Any], words: list[str]) -> None:
    torch.manual_seed(0)
    _, *inputs = given()
    with pytest.raises(SpError) as error:
        sp_compile.explain(model(), *inputs, sp=2, attention="ring", layout="balanced", **options)
    for word in ["layout='balanced'", *words]:
        assert word in str(error.value)


def test_ulysses_has_nothing_to_balance() -> None:
    report = check(*given(), sp=2, attention="ulysses", layout="balanced")
    assert len(report.find_notes(NoteKind.DECLINED, subject="balanced")) == 1


def test_heads_exchanged_in_a_balanced_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer by Ulysses, which has the program's order between its exchanges, and one as a ring."""
    kinds = iter(["ulysses", "ring"])

    def in_turn(possible: list[Candidate]) -> Candidate:
        kind = next(kinds)
        return next(c for c in possible if c.kind == kind)

    monkeypatch.setattr(choose, "choose_attention", in_turn)
    report = check(*given(), sp=4, layout="balanced")
    assert {note.label for note in report.notes} >= {"ulysses", "ring", "balanced"}


SLOW = {"flops": 1e5}
"""A device on which attention takes longer than balancing a sequence of a few tokens."""


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("n", "attention", "lengths"),
    [
        (3, "auto", LENGTHS),
        (4, "ring", LENGTHS),
        (4, "gather", [40, 3, 2, 1, 1, 1, 20, 7, 4]),
        pytest.param(4, "hybrid", LENGTHS, marks=pytest.mark.slow),
        pytest.param(2, "ring", [3, 2], marks=pytest.mark.slow),
        pytest.param(2, "gather", [64], marks=pytest.mark.slow),
    ],
)
def test_auto_balances_documents(n: int, attention: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches, each packed in its own way."""
    made = orders(monkeypatch)
    report = check(*given(2, lengths), sp=n, attention=attention, cost=SLOW)
    assert len(made) == n
    assert len(report.find_notes(NoteKind.REWRITTEN, subject="balanced")) == 1
    assert not report.fallbacks
    assert {decision.chosen.layout for decision in report.attention} == {"balanced"}


class Mapped(Packed):
    """A model whose documents result from a layer's matrix, in the middle of the program."""

    def forward(self, ids: Tensor, positions: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(ids)
        document = (x.sum(-1) > 0).cumsum(1)
        mask = document[:, None, :, None] == document[:, None, None]
        for layer in self.layers:
            q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in layer(x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


class Hidden(Packed):
    """A model that returns hidden states, like a graph before a break."""

    def forward(self, ids: Tensor, positions: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss, logits = super().forward(ids, positions, labels)
        return loss, logits.tanh()


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("model", "options"),
    [(Shifted, {}), (Hidden, {"outputs": "lazy", "cost": {**SLOW, "all_gather_latency": 10.0}}), (Mapped, {})],
)
def test_auto_reports_that_documents_stay(model: type[Packed], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    _, *inputs = given()
    report = sp_compile.explain(model(), *inputs, sp=3, **{"attention": "ring", "cost": SLOW, **options})
    assert len(report.find_notes(NoteKind.DECLINED, subject="balanced")) == 1
    check(model().double(), *inputs, sp=3, attention="ring", cost=SLOW)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("n", [2, 3])
def test_auto_balances_sharded_outputs(n: int) -> None:
    """Balancing saves more time than the next graph may need to restore another order."""
    torch.manual_seed(0)
    _, *inputs = given()
    model, how = Hidden().double(), {"sp": n, "attention": "ring", "cost": SLOW}
    report = sp_compile.explain(model, *inputs, outputs="lazy", **how)
    assert len(report.find_notes(NoteKind.REWRITTEN, subject="balanced")) == 1
    assert not report.find_notes(NoteKind.DECLINED, subject="balanced")
    check(model, *inputs, **how)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("predicate", ["padding", "causal", "documents, heads for all ranks", "documents, little work"])
def test_auto_does_not_change_balanced_masks(predicate: str) -> None:
    class Other(Packed):
        def mask(self, positions: Tensor) -> Tensor:
            index = torch.arange(positions.shape[1])
            causal = index[:, None] >= index
            return causal & (positions[:, None, None] >= 0) if predicate == "padding" else causal

    model, *inputs = given()
    few = "little" in predicate
    how = {"sp": 4, "attention": "auto" if "heads" in predicate else "ring", "cost": {"flops": 1e12} if few else SLOW}
    report = sp_compile.explain(model if "documents" in predicate else Other(), *inputs, **how)
    assert not [note for note in report.notes if note.subject == "balanced"]
    assert {decision.chosen.layout for decision in report.attention} <= {"contiguous", "zigzag"}


class Loss(nn.Module):
    """The loss alone. checkpointed: all before it is computed again in the backward."""

    def __init__(self, model: nn.Module, checkpointed: bool = False) -> None:
        super().__init__()
        self.model, self.checkpointed = model, checkpointed

    def forward(self, *args: Tensor) -> Tensor:
        run = partial(checkpoint, self.model, use_reentrant=False) if self.checkpointed else self.model
        return run(*args)[0]


def step(attention: str, compiler: str) -> Outcome:
    model, *args = given()
    how = {"mesh": mesh(), "attention": attention, "layout": "balanced", "compiler": compiler}
    return against_eager(Loss(model), *args, **how)


class Scored(nn.Module):
    """A compiled model with its own loss, and a second loss of its logits in eager code."""

    def __init__(self, model: Callable[..., tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor) -> Tensor:
        loss, logits = self.model(*args)
        return loss + (logits[:, ::2].sin() * torch.arange(logits.shape[-1])).mean()


def logits_in_shards(layout: str) -> Outcome:
    """Compare losses of batches with different packing, one of another length."""
    model, *_ = given()
    how = {"attention": "ring", "layout": layout, "outputs": "lazy", "cost": SLOW, "mesh": mesh()}
    run = Scored(compiled(model, dynamic=True, **how))
    batches = [given(lengths=lengths)[1:] for lengths in (LENGTHS, LENGTHS[::-1], [*LENGTHS, 4])]
    with torch.no_grad():
        _, logits = run.model(*batches[0])
        assert isinstance(logits, Sharded)
        assert "balanced order" in repr(logits)
        torch.testing.assert_close(logits.full(), model(*batches[0])[1])
    return max((against_eager(Scored(model), *args, run=run) for args in batches), key=lambda one: one.error)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["auto", "balanced"])
def test_results_in_shards(ranks: Ranks, layout: str) -> None:
    every_rank_is_right(ranks.run(2, logits_in_shards, layout))


def steps_of_auto(checkpointed: bool) -> Outcome:
    """Four batches of other documents, the last ones of other lengths; the worst of them."""
    model = Loss(given()[0], checkpointed)
    run = compiled(model, attention="ring", cost=SLOW, mesh=mesh(), dynamic=True)
    batches = [given(lengths=lengths)[1:] for lengths in (LENGTHS, LENGTHS[::-1], [*LENGTHS, 4], [30])]
    return max((against_eager(model, *args, run=run) for args in batches), key=lambda one: one.error)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
def test_any_length(ranks: Ranks, checkpointed: bool) -> None:
    every_rank_is_right(ranks.run(3, steps_of_auto, checkpointed))


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize(("attention", "n"), [("gather", 2), ("ring", 3), ("hybrid", 4)])
def test_compiled(ranks: Ranks, attention: str, n: int, compiler: str) -> None:
    every_rank_is_right(ranks.run(n, step, attention, compiler))


class Window(nn.Module):
    """Attention, then attention over a window of its rows with the passed ids."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.rows = slice(first, last)
        self.tokens, self.layer = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def attend(self, x: Tensor, document: Tensor | None) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.layer(x).chunk(3, -1))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        if document is not None:
            mask = mask & (document[:, None, :, None] == document[:, None, None])
        return x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)

    def forward(self, ids: Tensor, document: Tensor, again: Tensor | None) -> Tensor:
        """(B, S) int64 twice, and the documents of the window, if they count there."""
        x = self.attend(self.tokens(ids), document)
        return self.attend(x[:, self.rows], again).square().sum()


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("attention", "ranks"), [("ring", 2), ("gather", 3)])
def test_windows_that_begin_later(attention: str, ranks: int, documents: bool) -> None:
    """Positions count from the first row of the window; lookup vectors have one value for each of its rows."""
    torch.manual_seed(0)
    model, (document, _) = Window(2, -1).double(), packed(LENGTHS)
    ids, again = torch.randint(VOCABULARY, document.shape), document[:, 2:-1].clone() if documents else None
    assert not check(model, ids, document, again, sp=ranks, attention=attention, layout="balanced").fallbacks
