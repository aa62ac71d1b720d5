"""Results that share memory, on real ranks: eager writes to one change the others, and all gradients are correct."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support import ranks as worker
from support.parity import difference, error_text
from support.ranks import Ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sp_compile
from sp_compile.lowering.collectives.shard_storage import Layout, ShardStorage
from sp_compile.lowering.collectives.sharded import Sharded

D = 8


@dataclass
class Output:
    """An output dataclass like those of libraries."""

    hidden: Tensor
    last: Tensor


def written_view(h: Tensor, x: Tensor) -> Any:
    first = h[:, 0]
    first.mul_(2)
    return h, first, h[0]


def unsqueezed(h: Tensor, x: Tensor) -> Any:
    h.unsqueeze_(0)
    return h, h[0], h.transpose(0, 1)


def without_gradient(h: Tensor, x: Tensor) -> Any:
    with torch.no_grad():
        return h, h[:, :2]


def in_checkpoint(h: Tensor, x: Tensor) -> Any:
    def inside(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.cumsum(1)
        return y, y[:, 1:]

    return checkpoint(inside, h, use_reentrant=False)


def after_break(h: Tensor, x: Tensor) -> Any:
    heads = h.view(2, -1, 2, 4)
    torch._dynamo.graph_break()
    return (heads.flatten(2) * 2).cumsum(1) + h, h, heads


PROGRAMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "pooled": lambda h, x: {"last": h, "pooled": h[:, 0]},
    "flat": lambda h, x: (h, h.flatten(0, 1)),
    "three": lambda h, x: (h, h[:, 0], h.transpose(1, 2)),
    "windows of nothing returned": lambda h, x: (h[:, :5], h[:, 2:]),
    "views of one view": lambda h, x: (h.view(2, -1, 2, 4)[:, :, 0], h, h.view(2, -1, 2, 4)),
    "detached": lambda h, x: (h, h.detach()),
    "pieces": lambda h, x: (*h.split(4, -1), h),
    "pieces alone": lambda h, x: h.chunk(2, -1),
    "narrowed to the end": lambda h, x: (h.narrow(-1, -5, 5), h[..., 4:]),
    "rows apart": lambda h, x: (h[:, 0], h[:, 1]),
    "copies": lambda h, x: (h, h.clone(), h.contiguous()),
    "reshaped": lambda h, x: (h.reshape(2, -1, 4, 2), h.transpose(1, 2).reshape(2, -1), h.transpose(1, 2).contiguous()),
    "to its own dtype": lambda h, x: (h, h.to(h.dtype), h.type_as(h), h.float()),
    "a field": lambda h, x: Output(h, h[:, -1]),
    "of an input": lambda h, x: (h, x.flatten(0, 1), x[:, 0], x),
    "of an input that is used": lambda h, x: (h + x.view(2, -1, 2, 4).flatten(2), x.view(2, -1, 2, 4), x),
    "complex": lambda h, x: (h, torch.view_as_complex(h.view(2, -1, 4, 2)).real),
    "diagonal": lambda h, x: (h, h.diagonal(0, 1, 2), h.movedim(1, 0)),
    "expanded": lambda h, x: (h, h[:, None].expand(-1, 3, -1, -1)),
    "a written view": written_view,
    "unsqueezed in place": unsqueezed,
    "a view without gradient": without_gradient,
    "in a checkpoint": in_checkpoint,
    "after a break": after_break,
    "beside a loss": lambda h, x: (h.square().mean(), h, h.flatten(0, 1), h.detach()),
    "pieces beside a loss": lambda h, x: (h[..., :4].square().mean(), *h.chunk(2, -1)),
}


class Model(nn.Module):
    """Attention and a program that returns views of its result. product: the result of a matrix product."""

    def __init__(self, program: str, product: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.v = (nn.Parameter(torch.randn(D, D, dtype=torch.float64) * 0.3) for _ in range(2))
        self.program, self.product = program, product

    def forward(self, x: Tensor) -> Any:
        q = (x @ self.q).unflatten(-1, (2, -1)).transpose(1, 2)
        h = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2) @ self.v
        return PROGRAMS[self.program](h if self.product else h.sin(), x)


def listed(results: Any) -> list[Tensor]:
    found = vars(results) if isinstance(results, Output) else results
    return list(found.values()) if isinstance(found, dict) else list(found)


def loss_of(results: list[Tensor], numbers: list[int]) -> Tensor | float:
    return sum((k + 1) * results[k].square().mean() for k in numbers if results[k].requires_grad)


def uses_of(run: Any, model: nn.Module, length: int) -> list[Any]:
    """Return values and gradients after each eager use of results, or torch's error."""
    found: list[Any] = []
    leaf = torch.linspace(-1, 1, 2 * length * D, dtype=torch.float64).reshape(2, length, D).cos()
    count = len(listed(model(leaf)))
    both = list(range(count))
    uses = [("write", k, both) for k in both] + [("train", k, [k]) for k in both] + [("record", k, both) for k in both]
    for use, k, trained in uses:
        x = leaf.clone().requires_grad_()
        for p in model.parameters():
            p.grad = None
        results = listed(run(x * 1))
        try:
            if use == "record":
                results[k].mul_(2)
            loss = loss_of(results, trained)
            if isinstance(loss, Tensor):
                loss.backward()
            with torch.no_grad():
                results[k].mul_(-3)
        except RuntimeError as error:
            if isinstance(error, sp_compile.SpError):
                raise
            found.append((use, k, f"refused: {error}"))
            continue
        values = [y.detach() + 0 for y in results]
        found.append((use, k, [*values, x.grad, *(p.grad for p in model.parameters())]))
    return found


def compared(program: str, length: int, product: bool, options: dict[str, Any]) -> list[str]:
    """Return the differences from a single device."""
    alone, model = Model(program, product), Model(program, product)
    given = {"mesh": worker.mesh(), "cost": {}, **options}
    right = uses_of(alone, alone, length)
    found = uses_of(torch.compile(model, backend="sp", options=given), model, length)
    wrong = []
    for (use, k, wanted), (*_, got) in zip(right, found, strict=True):
        if isinstance(wanted, str):  # of what a program keeps for its backward it has its own, as in any compiled one
            continue
        if isinstance(got, str):
            wrong.append(f"{use} {k}: {got}")
        else:
            errors = [difference(a, b, 1e-12) for a, b in zip(got, wanted, strict=True)]
            wrong += [f"{use} {k}: {errors}"] if max(errors) > 1e-9 else []
    return wrong


LAZY, EAGER = {"compiler": "aot_eager", "outputs": "lazy"}, {"compiler": "aot_eager"}


@pytest.mark.sampled(every=13)
@pytest.mark.parametrize("program", PROGRAMS)
def test_in_shards(ranks: Ranks, program: str) -> None:
    assert ranks.run(2, compared, program, 7, False, LAZY) == [[]] * 2


@pytest.mark.sampled(every=27)
@pytest.mark.parametrize("product", [True, False])
@pytest.mark.parametrize("program", PROGRAMS)
def test_gathered(ranks: Ranks, program: str, product: bool) -> None:
    assert ranks.run(3, compared, program, 7, product, EAGER) == [[]] * 3


@pytest.mark.slow
@pytest.mark.parametrize(("n", "length"), [(3, 7), (4, 9), (4, 8)])
@pytest.mark.parametrize("program", PROGRAMS)
def test_in_shards_of_products(ranks: Ranks, program: str, n: int, length: int) -> None:
    assert ranks.run(n, compared, program, length, True, LAZY) == [[]] * n


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_by_inductor(ranks: Ranks, program: str) -> None:
    assert ranks.run(2, compared, program, 7, True, {"outputs": "lazy"}, timeout=300) == [[]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("program", ["pooled", "flat", "windows of nothing returned", "beside a loss"])
@pytest.mark.parametrize("compiler", ["inductor", "aot_eager"])
def test_large_ones(ranks: Ranks, program: str, compiler: str) -> None:
    """A MiB and more, with all default options."""
    assert ranks.run(3, compared, program, 8200, False, {"compiler": compiler}, timeout=300) == [[]] * 3


def reads_of_views() -> tuple[list[bool], int, int, float]:
    """Return gathered flags, reads of a loss and backward between graphs, reads of eager code, and the error."""
    options = {"mesh": worker.mesh(), "cost": {}, **LAZY}
    model = Model("views of one view", True)
    first = torch.compile(model, backend="sp", options=options)
    after = torch.compile(
        lambda heads, h: (heads.flatten(2).cumsum(1) * h).square().mean(), backend="sp", options=options
    )
    x = torch.linspace(-1, 1, 2 * 7 * D, dtype=torch.float64).reshape(2, 7, D)
    part, h, heads = first(x)
    assert isinstance(h, Sharded)
    assert isinstance(heads, Sharded)
    assert isinstance(part, Sharded)
    counted = [0]
    read = ShardStorage.read

    def counting(held: ShardStorage, **options: bool) -> Tensor:
        counted[0] += held.full is None and type(held.local_like) is Tensor  # not a compiler's
        return read(held, **options)

    with mock.patch.object(ShardStorage, "read", counting):
        after(heads, h).backward()
        in_graphs, apart = counted[0], [x.is_gathered for x in (part, h, heads)]
        total = heads.detach().sum() + part.detach().sum() + h.detach().sum()
    alone = Model("views of one view", True)
    part, h, heads = alone(x)
    (heads.flatten(2).cumsum(1) * h).square().mean().backward()
    pairs = zip([total, model.q.grad, model.v.grad], [heads.sum() + part.sum() + h.sum(), alone.q.grad, alone.v.grad])
    return apart, in_graphs, counted[0], max(difference(a.detach(), b.detach()) for a, b in pairs)


def test_views_stay_in_shards(ranks: Ranks) -> None:
    """Views pass to the next graph and back without a gather; eager code gathers once for all views."""
    for apart, in_graphs, all_reads, error in ranks.run(2, reads_of_views):
        assert apart == [False] * 3
        assert (in_graphs, all_reads) == (0, 1)
        assert error < 1e-9


def written_by_a_graph(program: str, which: int, reads: bool) -> float:
    """Another compiled program writes to one of two results in place."""
    found = []
    for compiles in (True, False):
        model = Model(program, False)
        run: Any = model
        write: Any = lambda y: y.mul_(3).cumsum(1).sum()  # noqa: E731
        if compiles:
            options = {"mesh": worker.mesh(), "cost": {}, **LAZY}
            run = torch.compile(model, backend="sp", options=options)
            write = torch.compile(write, backend="sp", options={**options, "seq_dims": {"y": 0 if which else 1}})
        with torch.no_grad():
            results = listed(run(torch.linspace(-1, 1, 2 * 7 * D, dtype=torch.float64).reshape(2, 7, D)))
            if reads:
                results[0] + 0
            found.append([write(results[which]), *(x + 0 for x in results)])
    return max(difference(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("reads", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("program", "which"), [("flat", 0), ("flat", 1), ("pooled", 1), ("detached", 1)])
def test_written_by_a_graph(ranks: Ranks, program: str, which: int, reads: bool) -> None:
    assert max(ranks.run(2, written_by_a_graph, program, which, reads)) < 1e-9


def other_lengths() -> float:
    """One graph of a length that is a symbol."""
    worst = 0.0
    model = Model("windows of nothing returned", True)
    run = torch.compile(model, backend="sp", dynamic=True, options={"mesh": worker.mesh(), "cost": {}, **LAZY})
    for length in (7, 10, 11):
        x = torch.linspace(-1, 1, 2 * length * D, dtype=torch.float64).reshape(2, length, D)
        with torch.no_grad():
            found, right = listed(run(x)), listed(model(x))
            for results in (found, right):
                results[1].mul_(-3)
            worst = max([worst, *(difference(a + 0, b) for a, b in zip(found, right, strict=True))])
    return worst


def test_of_lengths_that_are_symbols(ranks: Ranks) -> None:
    assert max(ranks.run(2, other_lengths)) < 1e-9


def writes_input(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    y.add_(1)
    return x.cumsum(1) + y, y[:, 0]


def written_inputs(shares: list[int]) -> tuple[str, list[float]]:
    """A program that writes to an input: fine; refused where on these ranks the inputs share memory; fine again. Inputs
    that are parts of one tensor and do not overlap share nothing.
    """
    run = torch.compile(writes_input, backend="sp", options={"mesh": worker.mesh(), "cost": {}, **EAGER})
    rank = torch.distributed.get_rank(worker.group())

    def inputs(seed: int) -> tuple[Tensor, Tensor]:
        made = torch.randn(2, 2, 7, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        return made[0], made[1]

    def error(x: Tensor, y: Tensor) -> float:
        other = x.clone(), y.clone()
        found, right = run(x, y), writes_input(*other)
        for results in (found, right):
            results[1].mul_(2)
        return max(difference(a, b) for a, b in zip([*found, y], [*right, other[1]], strict=True))

    x, y = (one.clone() for one in inputs(0))
    errors = [error(x, y)]
    x, y = (one.clone() for one in inputs(1))
    words = error_text(lambda: run(x, x.view(2, 7, D) if rank in shares else y))
    return words, [*errors, error(*(one.clone() for one in inputs(2))), error(*inputs(3))]


@pytest.mark.parametrize("shares", [[0, 1], [1]])
def test_inputs_that_share_memory_at_a_later_call(ranks: Ranks, shares: list[int]) -> None:
    """Every rank raises, also where only one is given such inputs, and the next call is right."""
    for words, errors in ranks.run(2, written_inputs, shares):
        assert re.match(r"SP221: .*\by\b.*\bx\b", words)
        assert max(errors) < 1e-9


def of_one_buffer(columns: bool) -> tuple[float, str]:
    """Two inputs that are columns, or every other row, of one buffer: of others, and of the same elements."""
    run = torch.compile(writes_input, backend="sp", options={"mesh": worker.mesh(), "cost": {}, **EAGER})
    buffer = torch.linspace(-1, 1, 2 * 14 * 2 * D, dtype=torch.float64).reshape(2, 14, 2 * D)
    other = buffer.clone()

    def parts(of: Tensor) -> tuple[Tensor, Tensor]:
        return (of[:, :7, :D], of[:, :7, D:]) if columns else (of[:, ::2, :D], of[:, 1::2, :D])

    run(parts(buffer.clone())[0], parts(buffer.clone())[1])  # of the same strides
    found, right = run(*parts(buffer)), writes_input(*parts(other))
    worst = max(difference(a, b) for a, b in zip([*found, buffer], [*right, other], strict=True))
    return worst, error_text(lambda: run(parts(buffer)[0], parts(buffer)[0]))


@pytest.mark.parametrize("columns", [True, False])
def test_inputs_of_one_buffer_at_a_later_call(ranks: Ranks, columns: bool) -> None:
    """Refused by their elements, not by the bytes from the first to the last."""
    for worst, words in ranks.run(2, of_one_buffer, columns):
        assert worst < 1e-9
        assert re.match(r"SP221: .*\by\b.*\bx\b", words)


def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    """Equal values, which are no views of each other."""
    h = x.cumsum(1).sin()
    return h * 2, h * 2


def equal_results(compiler: str, trained: bool, outputs: str) -> float:
    """Return the error of the second result after a write to the first."""
    options = {"mesh": worker.mesh(), "compiler": compiler, "outputs": outputs}
    run, x = torch.compile(twice, backend="sp", options=options), torch.linspace(-1, 1, 7 * D, dtype=torch.float64)
    results = []
    for call in (run, twice):
        first, second = call(x.view(1, 7, D).clone().requires_grad_(trained))
        if trained:
            (first.sin().sum() + second.sum()).backward()
        first.detach().zero_()
        results.append(second.detach() + 0)
    return difference(*results)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("outputs", ["gather", "lazy"])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_equal_results_are_two(ranks: Ranks, compiler: str, trained: bool, outputs: str) -> None:
    assert max(ranks.run(2, equal_results, compiler, trained, outputs)) < 1e-9


def writes_and_counts(x: Tensor, y: Tensor) -> Tensor:
    y.add_(1)
    return x.cumsum(1)[(x > 0).any(-1)] + y.sum()


def kept_program() -> tuple[float, str, float]:
    """Run an unsplit program: correct, refused for inputs that share memory, and correct again."""
    options = {"mesh": worker.mesh(), "cost": {}, **EAGER}
    run = torch.compile(writes_and_counts, backend="sp", fullgraph=True, options=options)

    def error(x: Tensor, y: Tensor) -> float:
        other = x.clone(), y.clone()
        found, right = run(x, y), writes_and_counts(*other)
        return max(difference(found, right), difference(y, other[1]))

    def inputs(seed: int) -> Tensor:
        return torch.randn(2, 2, 7, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    with mock.patch("torch._dynamo.config.capture_dynamic_output_shape_ops", True):
        first = error(*(one.clone() for one in inputs(0)))
        x = inputs(1)
        words = error_text(lambda: run(x[0], x.view(-1)[D : D + 2 * 7 * D].view(2, 7, D)))
        return first, words, error(*(one.clone() for one in inputs(2)))


def test_an_unsplit_program_refuses_inputs_that_share_memory(ranks: Ranks) -> None:
    for first, words, last in ranks.run(2, kept_program):
        assert max(first, last) < 1e-9
        assert re.match(r"SP221: .*\by\b.*\bx\b", words)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("program", ["three", "of an input", "windows of nothing returned"])
def test_verify_makes_views(program: str) -> None:
    x = torch.linspace(-1, 1, 2 * 7 * D, dtype=torch.float64).reshape(2, 7, D).requires_grad_()
    report = sp_compile.verify(Model(program, True), x, sp=2)
    assert {name for name, _ in report.errors} >= {"result 0", "result 1"}
    assert max(error for _, error in report.errors) < 1e-9


def of_a_batch_of_one(dim: int) -> float:
    """Compare results with batch 1, whose gather is a view of the received rows."""
    model = nn.Linear(4, 4).double()
    x = torch.randn(1, 7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).movedim(1, dim)

    def plain(x: Tensor) -> Tensor:
        return model(x.cumsum(dim)).sin()

    options = {"mesh": worker.mesh(), "compiler": "aot_eager", "outputs": "gather"}
    found = []
    for run in (plain, torch.compile(plain, backend="sp", options=options)):
        model.zero_grad()
        h = run(x)
        first = h.narrow(dim, 0, 3)
        h.mul_(2)
        first.sin_()
        h.square().sum().backward()
        with torch.no_grad():
            kept = run(x)
        kept.mul_(model.weight.sum())
        found.append([h.detach(), model.weight.grad.clone(), kept.detach()])
    return max((a - b).abs().max().item() for a, b in zip(*found, strict=True))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_gathered_result_is_written_in_place(ranks: Ranks, dim: int) -> None:
    assert max(ranks.run(2, of_a_batch_of_one, dim)) < 1e-12


def test_an_assigned_value_is_not_computed_again() -> None:
    layout = Layout(dim=0, n=1, group="", order=(0, 1))
    new = ShardStorage(layout, 3, local=torch.ones(3, 2))
    deferred = mock.Mock(like=torch.zeros(3, 2), compute=lambda: torch.zeros(3, 2))
    storage = ShardStorage(layout, 3, local=None, deferred=deferred)
    storage.assign(torch.ones(3, 2), new)
    assert torch.equal(storage.rows(), torch.ones(3, 2))
