"""A print, a data-dependent branch and a hook in every block: single-device results, and a report of gathered values with reasons."""

from __future__ import annotations

import copy
import logging
import re
from typing import Any

import pytest
import torch
from spmd.test_blocks import Packed, documents
from support import ranks as worker
from support.parity import Block, Decoder, Outcome, build, check, difference, error_text, gradients, outcome, sp, text
from support.ranks import Ranks
from torch import Tensor, nn

import sp_compile
from sp_compile.passes.context import NoteKind
from sp_compile.passes.strategies.sequence_checks import INPUTS_WITHOUT_SEQUENCE

Seen = list[tuple[int, float]]
DIM = 16


class Watched(Block):
    """A block that prints and branches on its data; a hook records the largest entry."""

    def __init__(self, place: int, seen: Seen) -> None:
        super().__init__(16, 4)
        self.register_forward_hook(lambda block, _, out: seen.append((place, out.detach().abs().amax().item())))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        print("block", y.shape)  # noqa: T201
        return y * 2 if y.sum() > 0 else y - 1


class BreaksInEachBlock(Decoder):
    def __init__(self, seen: Seen, layers: int = 3) -> None:
        super().__init__(layers=0)
        self.blocks.extend(Watched(place, seen) for place in range(layers))


def watched(how: str, outputs: str, lengths: list[int]) -> tuple[list[Outcome], Seen, Seen]:
    """Compare steps and hook records with a single device. how: compile the "whole" model, or "blocks"."""
    saw: tuple[Seen, Seen] = [], []
    model, alone = (build(BreaksInEachBlock, seen=seen) for seen in saw)
    options = {"mesh": worker.mesh(), "outputs": outputs}
    run = sp(model, **options) if how == "whole" else model
    for block in model.blocks if how == "blocks" else ():
        block.compile(backend="sp", options={"compiler": "aot_eager", "cost": {}, **options})
    outcomes = []
    for seed, length in enumerate(lengths):
        args = text(length, seed=seed)
        for one in (model, alone):
            one.zero_grad()
        losses = run(*args), alone(*args)
        for loss in losses:
            loss.backward()
        outcomes.append(outcome(losses[0], gradients(model), losses[1], gradients(alone)))
    return outcomes, *saw


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "how", "outputs", "lengths"),
    [
        (2, "whole", "lazy", [9]),
        pytest.param(2, "whole", "auto", [9, 12], marks=pytest.mark.slow),
        pytest.param(3, "whole", "lazy", [10, 12], marks=pytest.mark.slow),
        pytest.param(2, "blocks", "lazy", [9, 12], marks=pytest.mark.slow),
        pytest.param(3, "blocks", "auto", [10], marks=pytest.mark.slow),
    ],
)
def test_breaks_in_each_block(ranks: Ranks, n: int, how: str, outputs: str, lengths: list[int]) -> None:
    results = ranks.run(n, watched, how, outputs, lengths)
    for outcomes in zip(*(steps for steps, _, _ in results)):
        check(outcomes)
    for _, found, right in results:
        assert [place for place, _ in found] == [place for place, _ in right] == [0, 1, 2] * len(lengths)
        torch.testing.assert_close(*(torch.tensor([x for _, x in saw]) for saw in (found, right)))


def train_after_eager_code(
    layout: str, attention: str, changes: bool, lengths: list[int]
) -> tuple[list[Outcome], list[str]]:
    """Train blocks whose results a hook reads, or changes after the last one, before a compiled loss; return warnings."""
    model, said = build(Packed, shifts=False), list[str]()
    alone = copy.deepcopy(model)

    def read(block: nn.Module, _: Any, out: Tensor) -> Tensor | None:
        biggest = out.detach().abs().amax()
        return out / biggest if changes and block in (model.blocks[-1], alone.blocks[-1]) else None

    for one in (*model.blocks, *alone.blocks):
        one.register_forward_hook(torch.compiler.disable(read))
    options = {"compiler": "aot_eager", "cost": {}, "mesh": worker.mesh(), "outputs": "lazy", "attention": attention}
    for block in model.blocks:
        block.compile(backend="sp", options={**options, "layout": layout})
    model.tail.compile(backend="sp", options=options)
    log, handler = logging.getLogger("sp_compile"), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log.addHandler(handler)
    outcomes = []
    for length in lengths:
        args = text(length)[0], documents(length, length)
        found, right = model(*args), alone(*args)
        grads = [torch.autograd.grad(one, [*m.parameters()]) for one, m in ((found, model), (right, alone))]
        outcomes.append(outcome(found, grads[0], right, grads[1]))
    log.removeHandler(handler)
    return outcomes, [words for words in said if INPUTS_WITHOUT_SEQUENCE in words]


@pytest.mark.parametrize(
    ("layout", "attention", "changes", "lengths"),
    [
        ("balanced", "ring", True, [24]),
        pytest.param("balanced", "ring", False, [24, 27], marks=pytest.mark.slow),
        pytest.param("contiguous", "ulysses", True, [24, 27], marks=pytest.mark.slow),
        pytest.param("contiguous", "ulysses", False, [24], marks=pytest.mark.slow),
    ],
)
def test_eager_code_before_a_compiled_tail(
    ranks: Ranks, layout: str, attention: str, changes: bool, lengths: list[int]
) -> None:
    """Values that eager code reads stay sharded; its results, and values without a sequence, are full, with a warning."""
    results = ranks.run(2, train_after_eager_code, layout, attention, changes, lengths)
    for outcomes in zip(*(steps for steps, _ in results)):
        check(outcomes)
    (zero_later_documents, of_second) = (said for _, said in results)
    assert not of_second
    assert bool(zero_later_documents) == changes
    for words in zero_later_documents:
        assert INPUTS_WITHOUT_SEQUENCE in words
        assert "['x', 'labels']" in words


def cut_between_blocks(options: dict[str, Any], dynamic: bool | None, cut: slice, lengths: list[int]) -> list[Outcome]:
    """Blocks with a graph break after their attention; eager code reads the first result and passes a view of it."""
    model = build(Packed, shifts=False)
    for block in model.blocks:
        block.out.register_forward_pre_hook(torch.compiler.disable(lambda *_: None))
    alone = copy.deepcopy(model)
    for block in model.blocks:
        given = {"compiler": "aot_eager", "cost": {}, "mesh": worker.mesh(), "outputs": "lazy", **options}
        block.compile(backend="sp", dynamic=dynamic, options=given)
    outcomes = []
    for length in lengths:
        ids, packs = text(length)[0], documents(length, length)

        def loss(m: nn.Module, ids: Tensor = ids, packs: Tensor = packs) -> Tensor:
            x = m.blocks[0](m.front(ids), packs)[:, cut]
            for block in m.blocks[1:]:
                x = block(x, packs[:, cut])
            return m.tail(x, ids[:, cut])

        found, right = loss(model), loss(alone)
        grads = [torch.autograd.grad(one, [*m.parameters()]) for one, m in ((found, model), (right, alone))]
        outcomes.append(outcome(found, grads[0], right, grads[1]))
    return outcomes


BALANCED, ZIGZAG = ({"layout": layout, "attention": "ring"} for layout in ("balanced", "zigzag"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "options", "dynamic", "cut", "lengths"),
    [
        (2, {}, None, slice(1, None), [10]),
        pytest.param(2, BALANCED, None, slice(1, None), [24, 27], marks=pytest.mark.slow),
        pytest.param(2, ZIGZAG, None, slice(None, 20), [24, 27], marks=pytest.mark.slow),
        pytest.param(3, {}, True, slice(1, -1), [24, 27], marks=pytest.mark.slow),
        pytest.param(3, BALANCED, True, slice(None, 20), [24, 27], marks=pytest.mark.slow),
    ],
)
def test_views_of_results_in_shards(
    ranks: Ranks, n: int, options: dict[str, Any], dynamic: bool | None, cut: slice, lengths: list[int]
) -> None:
    """For autograd such a view has a sharded base, whose rows torch reads during compilation."""
    for outcomes in zip(*ranks.run(n, cut_between_blocks, options, dynamic, cut, lengths)):
        check(outcomes)


@torch.compiler.disable
def changed_by_eager_code(view: Tensor) -> None:
    view.mul_(3.0)


class WritesView(nn.Module):
    """Mutates a view of its rows after a graph break, and so the rows."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.inner = where, nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.where == "of an input" else self.inner(x).cumsum(1)
        view = x[:, 1:3]
        if self.where == "by eager code":
            changed_by_eager_code(view)
        else:
            torch._dynamo.graph_break()
            view.mul_(3.0)
        return x * 2


def writes_view(where: str) -> str | float:
    """Return the error message, or the difference from the single-device result."""
    front, block = nn.Linear(DIM, DIM), WritesView(where)
    alone, x = copy.deepcopy(block), torch.randn(1, 8, DIM)
    options = {"compiler": "aot_eager", "mesh": worker.mesh(), "outputs": "lazy", "seq_dims": {"x": 1}}
    first = torch.compile(lambda x: front(x).sin(), backend="sp", options=options)
    block.compile(backend="sp", options=options)
    with torch.no_grad():  # torch refuses some of these where there are gradients
        if where != "by eager code":
            return error_text(lambda: block(first(x)).full())
        return difference(block(first(x)).full(), alone(front(x).sin()))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("where", ["of a result", "of an input", "by eager code"])
def test_a_view_that_is_written_after_a_break(ranks: Ranks, where: str) -> None:
    """On a single device the base changes with its view; a graph with both as inputs refuses the write."""
    for found in ranks.run(2, writes_view, where):
        if isinstance(found, str):
            assert re.match(r"SP221: .*\bview\b.*\bx\b", found)
        else:
            assert found < 1e-5


def test_report_of_breaks() -> None:
    """The report lists sharded values, the maximum of a hook, and eager reads with line and reason."""
    report = sp_compile.explain(build(BreaksInEachBlock, seen=[], layers=2), *text(9), sp=2, outputs="lazy")
    said = {note.label: note for note in report.notes if note.kind is not NoteKind.KEPT_SHARDED}
    assert {note.node for note in report.find_notes(NoteKind.KEPT_SHARDED)} == {"y", "out", "x"}
    assert said.keys() == {"ulysses", "reduce_partials", "reduce_extremes", "unsharded", "replicated", "graph break"}
    assert "y.sum() > 0" in said["reduce_partials"].where
    assert "amax().item()" in said["reduce_extremes"].where
    # Dynamo leaves a loop to Python in which a block breaks, and what is around it.
    assert (said["unsharded"].node, "return self.norm(x)" in said["unsharded"].where) == ("mul", True)
    assert "logits = self.head" in said["replicated"].where
    breaks = {note.where for note in report.find_notes(NoteKind.GRAPH_BREAK)}
    assert len(breaks) == 3
    for code in ("print(", "y.sum() > 0", "amax().item()"):
        assert any(code in where for where in breaks)


@pytest.mark.slow
def test_report_of_small_results() -> None:
    report = sp_compile.explain(build(BreaksInEachBlock, seen=[], layers=1), *text(9), sp=2)
    (small,) = report.find_notes(NoteKind.UNSHARDED)
    assert "return x + self.dropout" in small.where
