"""Loops of users whose body is linear in their states, in other forms than h = a * h + b and h = m @ h + b."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.golden import captured
from support.parity import against_eager
from support.parity import check as check_ranks
from support.ranks import Ranks, mesh
from torch import Tensor, nn

import sp_compile
from sp_compile.passes.canonical.loops.reroll import RerollLoops
from sp_compile.passes.canonical.normalize_ops import NormalizeOps
from sp_compile.passes.context import NoteKind
from sp_compile.passes.graph.call import node_tensors

WIDTH, SIZE = 6, 4
# From the states and the inputs of a step to the states after it, and the output of the step.
Step = Callable[[list[Tensor], dict[str, Tensor]], tuple[list[Tensor], Tensor]]


def einsum(h: list[Tensor], x: dict[str, Tensor]) -> Any:
    new = torch.einsum("bij,bjv->biv", x["m"], h[0]) + torch.einsum("bi,bv->biv", x["k"], x["v"])
    return [new], torch.einsum("biv,bi->bv", new, x["a"])


def delta_rule(h: list[Tensor], x: dict[str, Tensor]) -> Any:
    kept = h[0] * x["g"].unsqueeze(-1)
    new = (x["v"] - (kept * x["k"].unsqueeze(-1)).sum(-2)) * x["a"]
    kept = kept + x["k"].unsqueeze(-1) * new.unsqueeze(-2)
    return [kept], (kept * x["k"].unsqueeze(-1)).sum(-2)


def delta_rule_of_einsums(h: list[Tensor], x: dict[str, Tensor]) -> Any:
    new = x["v"] - torch.einsum("bk,bkv->bv", x["k"], h[0] * x["g"].unsqueeze(-1))
    state = h[0] * x["g"].unsqueeze(-1) + torch.einsum("bk,bv->bkv", x["k"], new)
    return [state], state.sum(-1)


def product_on_the_right(h: list[Tensor], x: dict[str, Tensor]) -> Any:
    new = h[0] @ x["m"] + x["k"].unsqueeze(-1) * x["v"].unsqueeze(-2)
    return [new], new.sum(-1)


def products_on_both_sides(h: list[Tensor], x: dict[str, Tensor]) -> Any:
    new = x["m"] @ h[0] @ x["m"] + x["k"].unsqueeze(-1)
    return [new], new.sum(-1)


def baddbmm(h: list[Tensor], x: dict[str, Tensor]) -> Any:
    new = torch.baddbmm(x["m"], x["m"], h[0], beta=0.5, alpha=0.7)
    return [new], new.sum(-1)


def masked(h: list[Tensor], x: dict[str, Tensor]) -> Any:
    update = (x["k"] > 0.5)[:, :1, None]
    new = torch.where(update, h[0] @ x["m"] + x["m"], h[0])
    return [new], new.sum(-1)


def masked_fill(h: list[Tensor], x: dict[str, Tensor]) -> Any:
    new = (x["m"] @ h[0]).masked_fill((x["k"] > 0.5).unsqueeze(1), 0.25)
    return [new], new.sum(-1)


def vector(h: list[Tensor], x: dict[str, Tensor]) -> Any:
    new = (x["m"] @ h[0].unsqueeze(-1)).squeeze(-1) + x["k"]
    return [new], new


def mean_of_the_state(h: list[Tensor], x: dict[str, Tensor]) -> Any:
    new = torch.lerp(h[0], h[0].mean(-1, keepdim=True), x["a"]) + x["k"]
    return [new], new


def rotation(h: list[Tensor], x: dict[str, Tensor]) -> Any:
    p, q = h
    return [x["a"] * p - x["g"] * q + x["k"], x["g"] * p + x["a"] * q], p + 2 * q


def oscillator(h: list[Tensor], x: dict[str, Tensor]) -> Any:
    p = h[0] + 0.1 * (x["k"] - x["a"] * h[1])
    q = h[1] + 0.1 * p
    return [p, q], q


def second_order(h: list[Tensor], x: dict[str, Tensor]) -> Any:
    new = x["a"] * h[0] / 2 + x["g"] * h[1] / 3 + x["k"]
    return [new, h[0]], new


def third_order(h: list[Tensor], x: dict[str, Tensor]) -> Any:
    new = x["a"] * h[0] / 2 + x["g"] * h[2] / 3 + x["k"]
    return [new, h[0], h[1]], new


def momentum_of_a_delta_rule(h: list[Tensor], x: dict[str, Tensor]) -> Any:
    state, speed = h
    error = x["v"].unsqueeze(-2) - x["k"].unsqueeze(-2) @ state
    speed = speed * x["g"].unsqueeze(-1) + x["k"].unsqueeze(-1) @ error
    state = state * x["a"].unsqueeze(-1) + speed
    return [state, speed], state.sum(-1)


def columns_with_their_own_decay(h: list[Tensor], x: dict[str, Tensor]) -> Any:
    new = x["m"] @ (h[0] * x["a"].unsqueeze(-2)) + x["k"].unsqueeze(-1)
    return [new], new.sum(-1)


def merged_dims(h: list[Tensor], x: dict[str, Tensor]) -> Any:
    new = (h[0].flatten(1) * x["m"].flatten(1)).unflatten(1, (SIZE, SIZE)).mT + x["m"]
    return [new], new.sum(-1)


def rolled_rows(h: list[Tensor], x: dict[str, Tensor]) -> Any:
    new = h[0].roll(1, -2) * x["a"].unsqueeze(-1) + h[0].flip(-1) / 3 + x["m"]
    return [new], new.sum(-1)


def sums_of_rows(h: list[Tensor], x: dict[str, Tensor]) -> Any:
    new = h[0].cumsum(-2) * x["a"].unsqueeze(-1) / SIZE + x["m"]
    return [new], new.sum(-1)


def halves(h: list[Tensor], x: dict[str, Tensor]) -> Any:
    first, second = h[0].chunk(2, -1)
    new = torch.cat([second * x["a"][..., :2], first - second / 2], -1) + x["k"]
    return [new], new


VECTORS = (halves, vector, mean_of_the_state, rotation, oscillator, second_order, third_order)
COUNTS = {rotation: 2, oscillator: 2, second_order: 2, third_order: 3, momentum_of_a_delta_rule: 2}
FORMS: list[Step] = [
    einsum,
    delta_rule,
    delta_rule_of_einsums,
    product_on_the_right,
    products_on_both_sides,
    baddbmm,
    masked,
    masked_fill,
    momentum_of_a_delta_rule,
    columns_with_their_own_decay,
    merged_dims,
    rolled_rows,
    sums_of_rows,
    *VECTORS,
]


class Loop(nn.Module):
    """A loop over tokens, and a loss of its outputs."""

    def __init__(self, step: Step, seeded: bool = False, reverse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.step, self.reverse = step, reverse
        self.project = nn.Linear(WIDTH, 5 * SIZE + SIZE * SIZE).double()
        shape = (SIZE,) if step in VECTORS else (SIZE, SIZE)
        self.seeds = nn.ParameterList(torch.randn(shape).double() for _ in range(COUNTS.get(step, 1)))
        self.seeded = seeded

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, WIDTH) -> a loss."""
        rows = self.project(x).sigmoid()
        inputs = dict(zip("akvgi", rows[..., : 5 * SIZE].split(SIZE, -1)))
        inputs["m"] = rows[..., 5 * SIZE :].unflatten(-1, (SIZE, SIZE)) / SIZE
        states = [
            y.expand(x.shape[0], *y.shape) if self.seeded else x.new_zeros(x.shape[0], *y.shape) for y in self.seeds
        ]
        outputs: list[Tensor] = []
        steps = range(x.shape[1])
        for t in reversed(steps) if self.reverse else steps:
            states, output = self.step(states, {name: y[:, t] for name, y in inputs.items()})
            outputs.append(output)
        return (torch.stack(outputs[::-1] if self.reverse else outputs, 1) - x[..., :SIZE]).pow(2).mean()


def tokens(length: int = 9, batch: int = 2) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(batch, length, WIDTH, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("step", FORMS, ids=lambda step: step.__name__)
@pytest.mark.sampled(every=12)
def test_forms_are_scans(step: Step) -> None:
    report = sp_compile.explain(Loop(step), tokens(), sp=2, seq_dims={"x": 1})
    assert report.count("affine_scan") == 1, report.find_notes(NoteKind.DECLINED, subject="reroll_loops")
    assert not report.fallbacks
    assert report.work.flops_share > 0.95
    for seeded, reverse in ((False, False), (True, True)):
        checked = sp_compile.verify(Loop(step, seeded, reverse), tokens(), sp=3, seq_dims={"x": 1})
        assert max(error for _, error in checked.errors) < 1e-12


def test_a_shared_matrix_and_a_batch_of_one() -> None:
    class Shared(Loop):
        def forward(self, x: Tensor) -> Tensor:
            state, states, weight = x.new_zeros(x.shape[0], SIZE), [], self.project.weight[:SIZE, :SIZE] / SIZE
            inputs = self.project(x)[..., :SIZE]
            for t in range(x.shape[1]):
                state = F.linear(state, weight, self.project.bias[:SIZE]) + inputs[:, t]
                states.append(state)
            return torch.stack(states, 1).pow(2).mean()

    for batch in (1, 3):
        report = sp_compile.verify(Shared(vector), tokens(7, batch), sp=2, seq_dims={"x": 1})
        assert report.count("affine_scan") == 1
        assert max(error for _, error in report.errors) < 1e-12


def of_a_square(h: list[Tensor], x: dict[str, Tensor]) -> Any:
    new = x["m"] @ h[0] * h[0] + x["m"]
    return [new], new.sum(-1)


def of_a_condition(h: list[Tensor], x: dict[str, Tensor]) -> Any:
    new = torch.where(h[0] > 0.1, h[0] @ x["m"], h[0]) + x["m"]
    return [new], new.sum(-1)


def of_a_divisor(h: list[Tensor], x: dict[str, Tensor]) -> Any:
    new = x["m"] @ (x["m"] / (2 + h[0])) + h[0] / 2
    return [new], new.sum(-1)


def of_a_rounded_state(h: list[Tensor], x: dict[str, Tensor]) -> Any:
    new = (h[0] @ x["m"]).float().double() + x["m"]
    return [new], new.sum(-1)


def of_a_softmax(h: list[Tensor], x: dict[str, Tensor]) -> Any:
    new = h[0].softmax(-1) @ x["m"] + x["m"]
    return [new], new.sum(-1)


@pytest.mark.sampled(every=1)
@pytest.mark.parametrize(
    "step",
    [of_a_square, of_a_condition, of_a_divisor, of_a_rounded_state, of_a_softmax],
    ids=lambda step: step.__name__,
)
def test_other_bodies_are_refused(step: Step) -> None:
    report = sp_compile.verify(Loop(step, seeded=True), tokens(5), sp=2, seq_dims={"x": 1})
    assert report.find_notes(NoteKind.DECLINED, subject="reroll_loops")
    assert report.count("affine_scan") == 0
    assert max(error for _, error in report.errors) < 1e-12


def test_an_error_names_the_op_of_a_refused_loop() -> None:
    """The loop is the only candidate for a sequence."""
    with pytest.raises(sp_compile.SpError, match=r"SP301.*test_loop_forms\.py:\d+.*aten\.to\b"):
        sp_compile.explain(Loop(of_a_rounded_state, seeded=True), tokens(5), sp=2)


RESHAPED: dict[str, tuple[tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = {
    "rows of -1": ((8, 4), lambda w, h: (w @ h.reshape(-1, 2, h.shape[-1])).reshape(h.shape[0], -1)),
    "a batch of -1": ((1, 8, 4), lambda w, h: (w @ h.reshape(-1, 4, 2, h.shape[-1])).reshape(1, h.shape[1], -1)),
    "heads of -1": ((1, 8, 4), lambda w, h: (w @ h.reshape(-1, 2, h.shape[-1])).reshape(1, h.shape[1], -1)),
    "all sizes": ((1, 8, 8), lambda w, h: (w @ h.reshape(1, 4, 2, 8)).reshape(1, 8, 8)),
}
"""State shapes, and steps that mix the two rows of each group by w (2, 2)."""


@pytest.mark.parametrize(("shape", "body"), RESHAPED.values(), ids=RESHAPED)
def test_reshapes_with_the_sizes_of_the_state(shape: tuple[int, ...], body: Callable[[Tensor, Tensor], Tensor]) -> None:
    def loop(x: Tensor, w: Tensor) -> Tensor:
        h, states = x.new_zeros(shape), []
        for t in range(x.shape[1]):
            h = body(w, h) + (x[:, t] if len(shape) == 2 else x[:, t, None])
            states.append(h)
        return torch.stack(states, 1)

    torch.manual_seed(0)
    x = torch.randn(1, 6, shape[-1], dtype=torch.float64, requires_grad=True)
    w = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    report = sp_compile.verify(loop, x, w, sp=2, seq_dims={"x": 1})
    assert max(error for _, error in report.errors) < 1e-12


def test_matrices_are_not_copied_for_each_vector_of_the_basis() -> None:
    """The largest value for two states of K elements, which matrices (B, K, K) mix, is m of all steps, (B, 2K, 2K)."""
    batch, steps, rows, columns = 2, 5, 8, 3

    def loop(w: Tensor, h: Tensor) -> Tensor:
        states, momentum = [], torch.zeros_like(h)
        for t in range(steps):
            momentum = 0.9 * momentum + w[:, t] @ h
            h = h + momentum
            states.append(h)
        return torch.stack(states, 1)

    gm = captured(loop, torch.randn(batch, steps, rows, rows), torch.randn(batch, rows, columns))
    NormalizeOps()(gm)
    assert RerollLoops()(gm).modified
    assert [n for n in gm.graph.nodes if n.target is torch.ops.sp.affine_scan.default]
    sizes = [x.numel() for n in gm.graph.nodes for x in node_tensors(n)]
    assert max(sizes) == batch * steps * (2 * rows) ** 2


@pytest.mark.slow
def test_nodes_do_not_depend_on_the_length() -> None:
    counts = []
    for length in (16, 48):
        program = torch.export.export(Loop(delta_rule), (tokens(length),))
        counts.append(len(sp_compile.parallelize(program, sp=2).graph.nodes))
    assert counts[0] == counts[1]


def steps_of_documents(x: Tensor, documents: Tensor) -> Tensor:
    """A state that is reset to zeros_like itself before the first token of a document."""
    starts = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    h, states = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = torch.where(starts[:, t, None], torch.zeros_like(h), h) * x[:, t].sigmoid() + x[:, t]
        states.append(h)
    return torch.stack(states, 1)


def chunks_of_documents(x: Tensor, documents: Tensor) -> Tensor:
    """A state of the document of the previous chunk's last token, which the loop keeps in a variable."""
    pad = -x.shape[1] % SIZE
    chunks = F.pad(x, (0, 0, 0, pad)).unflatten(1, (-1, SIZE))
    ids = F.pad(documents, (0, pad), value=-1).unflatten(1, (-1, SIZE))
    h, previous, results = x.new_zeros(x.shape[0], x.shape[-1], x.shape[-1]), ids[:, 0, 0], []
    for i in range(chunks.shape[1]):
        c, last = chunks[:, i], ids[:, i, -1]
        within = (c @ c.mT).tril() * (ids[:, i, :, None] == ids[:, i, None])
        results.append(within @ c + (c * (ids[:, i] == previous[:, None]).unsqueeze(-1)) @ h)
        kept = c * (ids[:, i] == last[:, None]).unsqueeze(-1)
        h, previous = h * (previous == last)[:, None, None] / 2 + kept.mT @ c, last
    return torch.cat(results, 1)[:, : x.shape[1]]


@pytest.mark.parametrize("loop", [steps_of_documents, chunks_of_documents])
@pytest.mark.parametrize("n", [2, 3])
def test_loops_over_documents(loop: Callable[[Tensor, Tensor], Tensor], n: int) -> None:
    documents = torch.tensor([[0] * 9 + [1] * 3 + [2] + [3] * 10, [4] * 16 + [5] * 7])
    x = (tokens(23) / 2).detach().requires_grad_()
    report = sp_compile.verify(loop, x, documents, sp=n)
    assert max(error for _, error in report.errors) < 1e-12
    assert report.count("linear_scan") == 1
    assert not report.fallbacks
    assert report.work.flops_share > 0.95


def _train(step: Step) -> object:
    return against_eager(Loop(step, seeded=True), tokens(13).detach(), mesh=mesh(), seq_dims={"x": 1})


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("step", FORMS, ids=lambda step: step.__name__)
@pytest.mark.sampled(every=33)
def test_forms_on_real_ranks(ranks: Ranks, step: Step, n: int) -> None:
    check_ranks(ranks.run(n, _train, step))
