"""A head and its loss in tiles: loss and every gradient equal a single device's, and no tensor is larger than a tile."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sharding.tiles.losses import (
    LOSSES,
    VOCAB,
    WIDTH,
    Loss,
    Model,
    alive,
    batch,
    flat,
    mean,
    of_groups,
    of_table,
    per_sequence,
    preferred,
)
from support import ranks as worker
from support.parity import Checkpointed, Decoder, text
from support.ranks import Ranks
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import sp_compile
from sp_compile.lowering.tiles.tile_program import PROGRAMS, TileProgram
from sp_compile.passes.context import NoteKind
from sp_compile.passes.localize.tiles import choose_tiles as amount
from sp_compile.passes.localize.tiles import run_in_tiles as tiling

aten = torch.ops.aten
EXACT = 1e-9
AGAIN = (per_sequence, preferred, of_groups)
"""Losses that do not end in one number of each tile."""


def report_of(loss: Loss, n: int, tiles: int, seq: int, **how: bool) -> sp_compile.passes.report.Report:
    return sp_compile.verify(Model(loss, **how).double(), *batch(seq), sp=n, tiles=tiles)


RANKS, PIECES, LENGTHS = (3, 2, 4, 1), (3, 8, 2), (9, 23, 16)


@pytest.mark.sampled(every=207)  # each loss once, each time the next way
@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("seq", LENGTHS)
@pytest.mark.parametrize("tiles", PIECES)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_one_device(loss: Loss, n: int, tiles: int, seq: int) -> None:
    found = report_of(loss, n, tiles, seq)
    assert found.worst < EXACT
    assert found.tiled
    notes = found.find_notes(NoteKind.REWRITTEN, subject="run_in_tiles")
    assert [one.where for one in found.tiled] == [note.where for note in notes]
    assert any(one.recomputed for one in found.tiled) == (loss in AGAIN)


@pytest.mark.sampled(every=59)
@pytest.mark.parametrize("layout", ["zigzag", "balanced"])
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_orders_of_rows(loss: Loss, n: int, layout: str) -> None:
    assert sp_compile.verify(Model(loss).double(), *batch(17), sp=n, tiles=2, layout=layout).worst < EXACT


HEADS_OF_MODELS: dict[str, dict[str, bool]] = {"": {}, "tied": {"tied": True}, "bias": {"bias": True}}
REDUCTIONS = [
    *itertools.product(
        ["mean", "sum", "none"], [False, True], [0.0, 0.1], [-100, 3], ["flat", "apart"], HEADS_OF_MODELS
    )
]


@pytest.mark.sampled(every=70)
@pytest.mark.parametrize("way", range(len(REDUCTIONS)), ids=lambda i: "-".join(map(str, REDUCTIONS[i])))
def test_reductions_and_weights(way: int) -> None:
    """All that cross_entropy takes, of (rows, classes) or (batch, classes, rows); ranks, tiles and lengths in turn."""
    reduction, weighted, smoothing, ignored, rows, head = REDUCTIONS[way]

    def loss(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
        z, y = flat(h, head, ids) if rows == "flat" else (head(h)[:, :-1].mT, ids[:, 1:])
        classes = torch.linspace(0.5, 1.5, VOCAB, dtype=h.dtype) if weighted else None
        found = F.cross_entropy(z, y, classes, ignore_index=ignored, reduction=reduction, label_smoothing=smoothing)
        return found if reduction != "none" else (found * weights[:, 1:].reshape(found.shape)).sum() / weights.sum()

    n, tiles, seq = RANKS[way % 4], PIECES[way // 4 % 3], LENGTHS[way // 12 % 3]
    found = report_of(loss, n, tiles, seq, **HEADS_OF_MODELS[head])
    assert found.worst < EXACT
    assert found.tiled
    assert not any(one.recomputed for one in found.tiled)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("how", [{"tied": True}, {"bias": True}], ids=["tied", "bias"])
def test_weights(how: dict[str, bool]) -> None:
    found = report_of(mean, 2, 3, 13, **how)
    assert found.worst < EXACT
    assert found.tiled


@pytest.mark.sampled(every=100)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_mean_over_no_tokens_has_no_gradient(reduction: str, n: int) -> None:
    """The loss is NaN and no gradient changes a parameter, as on a single device."""

    def of_none(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
        z, y = flat(h, head, torch.full_like(ids, -100))
        return F.cross_entropy(z, y, reduction=reduction) / ((y >= 0).sum() if reduction == "sum" else 1)

    model, given = Model(of_none).double(), batch(13)
    model(*given).backward()
    assert not any(p.grad.any() for p in model.parameters())
    found = sp_compile.verify(model, *given, sp=n, tiles=3)
    assert found.tiled
    assert found.worst == 0


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("items", [None, 29, torch.tensor(29)], ids=["mean", "number", "tensor"])
def test_items_of_a_batch(items: int | Tensor | None) -> None:
    """Items as transformers' Trainer passes them to a model, with a float32 loss and returned logits."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, num_key_value_heads=2, use_cache=False)
    model, ids = transformers.LlamaForCausalLM(config).double(), torch.randint(512, (2, 19))
    given = {"labels": ids.where(ids % 5 > 0, -100)} | ({} if items is None else {"num_items_in_batch": items})
    found = sp_compile.verify(model, ids, sp=2, tiles=4, kwargs=given)
    assert found.worst < 2e-6
    assert {"lm_head" in one.where for one in found.tiled} == {True, False}


def program_of(gm: GraphModule) -> tuple[Node, TileProgram]:
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.sp.tiled.default)
    return node, PROGRAMS[node.args[3]]


def local(loss: Loss, n: int, tiles: int | str, seq: int) -> GraphModule:
    model = Model(loss).double()
    return sp_compile.parallelize(torch.export.export(model, batch(seq)), sp=n, tiles=tiles)


def largest(gm: GraphModule) -> int:
    values = [node.meta.get("val") for node in gm.graph.nodes]
    return max(v.numel() for v in values if isinstance(v, torch.Tensor))


@pytest.mark.sampled(every=10)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_no_more_than_a_tile(loss: Loss) -> None:
    """In the rank's graph, and in the graphs of a tile."""
    seq, rows, tiles = 64, 2, 8
    whole = local(loss, 2, tiles, seq)
    logits = rows * (seq // 2) * VOCAB
    assert largest(local(loss, 2, "never", seq)) == logits
    assert largest(whole) < logits
    nodes = whole.graph.find_nodes(op="call_function", target=torch.ops.sp.tiled.default)
    parts = [part for node in nodes for body in PROGRAMS[node.args[3]].bodies.values() for part in body.parts]
    table = VOCAB * VOCAB if loss is of_table else 0  # has no rows of tokens
    assert {largest(part.graph) for part in parts} == {max(logits // tiles, table)}


def deep(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Compute a loss with a head directly after an MLP."""
    x = F.linear(F.gelu(head(h)), head.weight.mT)
    return F.cross_entropy(x[:, :-1].flatten(0, 1) @ head.weight.T, ids[:, 1:].flatten())


def of_the_best(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """A teacher's best classes, of each token, are read with a student's logits."""
    with torch.no_grad():
        best, at = head(h.roll(1, 2)).topk(2, -1)
    return F.kl_div(head(h).gather(-1, at).log_softmax(-1), best.softmax(-1), reduction="batchmean")


@pytest.mark.sampled(every=100)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("loss", [deep, of_the_best])
def test_tiles_read_results_of_tiles(loss: Loss, n: int) -> None:
    seq, rows, tiles = 64, 2, 8
    whole = local(loss, n, tiles, seq)
    assert len(whole.graph.find_nodes(op="call_function", target=torch.ops.sp.tiled.default)) == 2
    assert largest(whole) < rows * (seq // n) * VOCAB
    assert report_of(loss, n, 3, 13).worst < EXACT


class Beside(nn.Module):
    """Logits of two heads, one under no_grad only; per-row numbers of each, or of both."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.apart = nn.LayerNorm(WIDTH), apart
        self.head, self.unlearned = nn.Linear(WIDTH, VOCAB), nn.Linear(WIDTH, VOCAB)

    def forward(self, h: Tensor) -> Tensor:
        y, z = self.norm(h), self.head(self.norm(h))
        with torch.no_grad():
            given = self.unlearned(h if self.apart else y)
        if self.apart:
            return (z.logsumexp(-1) - given.logsumexp(-1).cumsum(1)).square().mean()
        return (z.logsumexp(-1) - given.logsumexp(-1)).square().mean()


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("apart", [True, False], ids=["a region of its own", "in the loss's region"])
@pytest.mark.filterwarnings("error:.*autograd kernel was not registered")
def test_weights_read_without_gradients_have_none(apart: bool) -> None:
    """The gradient is None, not zeros: an optimizer would decay the weights."""
    model = Beside(apart).double()
    options = {"tiles": 3, "cost": {}, "seq_dims": {"h": 1}}
    given = torch.randn(2, 13, WIDTH, dtype=torch.float64)
    assert len(sp_compile.explain(model, given, sp=1, **options).tiled) == 1 + apart
    torch.compile(model, backend="sp", options={"compiler": "aot_eager", **options})(given).backward()
    assert model.head.weight.grad is not None
    assert model.unlearned.weight.grad is None
    assert model.unlearned.bias.grad is None


def test_one_body_for_all_tiles() -> None:
    """Two, where the last tile is shorter."""
    programs = {tiles: program_of(local(mean, 1, tiles, 64))[1] for tiles in (2, 32)}
    assert [list(one.bodies) for one in programs.values()] == [[32], [2]]
    few, many = (
        [len(part.graph.graph.nodes) for part in body.parts]
        for one in programs.values()
        for body in one.bodies.values()
    )
    assert few == many
    assert sorted(program_of(local(mean, 1, 3, 64))[1].bodies) == [20, 22]
    assert program_of(local(mean, 1, 3000, 64))[0].args[2] == 64


@pytest.mark.parametrize(("loss", "calls"), [(mean, [8, 4]), (per_sequence, [8 + 4, 8])], ids=["at once", "again"])
def test_a_compiled_body_is_called_for_each_tile(loss: Loss, calls: list[int]) -> None:
    """The body of 4 tiles is compiled once, in two steps and one without gradients, and no tile runs as traced."""
    made, called = [], []

    def compiler(gm: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        if not gm.graph.find_nodes(op="call_function", target=torch.ops.sp.tiled.default):
            made.append(gm)
        return lambda *given: called.append(gm) or gm(*given)

    run = torch.compile(Model(loss), backend="sp", options={"tiles": 4, "compiler": compiler, "cost": {}})
    for _ in range(2):
        run(*batch(16)).backward()
    with torch.no_grad():
        run(*batch(16))
    assert [called.count(gm) for gm in made] == calls


class Within(Model):
    """A model with its own autocast region."""

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(ids, weights)


@pytest.mark.parametrize(("loss", "model"), [(mean, Within), (per_sequence, Within), (mean, Model)])
def test_products_of_a_tile_are_those_of_its_autocast(loss: Loss, model: type[Model]) -> None:
    """Forward and backward multiply in bfloat16."""
    graphs: list[GraphModule] = []

    def compiler(gm: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm

    run = torch.compile(model(loss), backend="sp", options={"tiles": 2, "compiler": compiler, "cost": {}})
    with torch.autocast("cpu", torch.bfloat16, enabled=model is Model):
        run(*batch(16))
    *tiles, _ = graphs
    products = [n for gm in tiles for n in gm.graph.find_nodes(op="call_function", target=aten.mm.default)]
    assert {n.meta["val"].dtype for n in products} == {torch.bfloat16}


def test_gradients_of_weights_are_added_as_products() -> None:
    """No tile makes a gradient of the head of its own."""
    _, program = program_of(local(mean, 1, 4, 16))
    assert [(value.shape, value.adds) for value in program.gradients if value.dim is None] == [
        ((VOCAB, WIDTH), "product")
    ]


def test_gradients_of_a_sum_are_kept_wider_than_float16() -> None:
    """The gradient of a mean over many tokens fits in float16, that of the sum does not."""
    model = torch.export.export(Model(mean).half(), batch(16))
    _, program = program_of(sp_compile.parallelize(model, sp=1, tiles=4))
    assert {value.dtype for value in program.gradients} == {torch.float32}


class Watched(Model):
    """A model that also counts correct tokens, after the loss and without gradients."""

    def forward(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        seen: list[Tensor] = []

        def loss(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
            z, y = flat(h, head, ids)
            found = F.cross_entropy(z, y)
            with torch.no_grad():
                seen.append((z.argmax(-1) == y).sum())
            return found

        self.loss = loss
        return super().forward(ids, weights), seen[0]


class Chosen(Model):
    """A loss of the least certain tokens, which are selected without gradients."""

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        def loss(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
            z = head(h)[:, :-1].log_softmax(-1)
            likely = z.gather(-1, ids[:, 1:, None]).squeeze(-1)
            with torch.no_grad():
                entropy = -(z.exp() * z).sum(-1)
                chosen = (entropy > entropy.mean()).to(h.dtype)
                scale = (likely * chosen).sum()
            return -(likely * chosen).sum() / chosen.sum() + scale * 0.1 + scale * weights.mean()

        self.loss = loss
        return super().forward(ids, weights)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("model", [Watched, Chosen])
def test_regions_that_end_under_no_grad_keep_gradients(model: type[Model], n: int) -> None:
    """The region runs with gradients enabled."""
    found = sp_compile.verify(model(mean).double(), *batch(13), sp=n, tiles=3)
    assert found.worst < EXACT
    assert found.tiled


class Cast(Model):
    """A model that counts correct tokens in a separate autocast region."""

    def forward(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        seen: list[Tensor] = []

        def loss(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
            z, y = flat(h, head, ids)
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                seen.append((z.argmax(-1) == y).sum())
            return F.cross_entropy(z, y)

        self.loss = loss
        return super().forward(ids, weights), seen[0]


@pytest.mark.parametrize("n", [1, 2])
def test_counts_in_another_autocast_region(n: int) -> None:
    found = sp_compile.verify(Cast(mean).double(), *batch(13), sp=n, tiles=3)
    assert found.worst < EXACT


class Halves(nn.Module):
    """Half of an MLP under autocast."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = self.up(x.cumsum(1))
        return self.down(F.gelu(h.float()))


class Exact(nn.Module):
    """A head in float32 within autocast, and its loss outside of that."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = x.cumsum(1)
            with torch.autocast("cpu", enabled=False):
                z = self.head(h)
            return F.cross_entropy(z.flatten(0, 1), torch.arange(z.shape[1]))


@pytest.mark.parametrize("ambient", [False, True], ids=["by itself", "within autocast"])
@pytest.mark.parametrize(
    ("model", "parts", "dtypes"), [(Halves, 2, {torch.bfloat16, torch.float32}), (Exact, 1, {torch.float32})]
)
def test_a_tile_goes_through_regions_of_autocast(
    model: type[nn.Module], parts: int, dtypes: set[torch.dtype], ambient: bool
) -> None:
    """Each product and its gradients have the dtype of its autocast region."""
    run, x, graphs = model(), torch.randn(1, 16, WIDTH, requires_grad=True), list[GraphModule]()

    def compiler(gm: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm

    compiled = torch.compile(run, backend="sp", options={"tiles": 4, "compiler": compiler, "cost": {}})
    made = []
    for each in (compiled, run):
        with torch.autocast("cpu", torch.bfloat16, enabled=ambient and model is Exact):
            found = each(x)
        made.append((found, *torch.autograd.grad(found.square().sum(), [x, *run.parameters()])))
    *tiles, _ = graphs
    assert len(tiles) == parts, "of one region: forward and gradients, or both in one"
    products = [n for gm in tiles for n in gm.graph.nodes if n.target in (aten.mm.default, aten.addmm.default)]
    assert {n.meta["val"].dtype for n in products} == dtypes
    close = 1e-5 if dtypes == {torch.float32} else 2e-2
    torch.testing.assert_close(*made, rtol=close, atol=close)


class Both(Model):
    """The logits, too, and something made of them."""

    def forward(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        seen: list[Tensor] = []

        def loss(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
            logits = head(h)
            seen.append(logits)
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

        self.loss = loss
        found = super().forward(ids, weights)
        return found, seen[0], seen[0].argmax(-1)


@pytest.mark.parametrize("n", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_logits_that_are_returned(n: int) -> None:
    """Returned logits are computed for their reader, the loss has its own tiles, and both contribute gradients."""
    found = sp_compile.verify(Both(mean).double(), *batch(13), sp=n, tiles=3)
    assert found.worst < EXACT
    assert any(one.repeated for one in found.tiled)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("model", [Decoder, Checkpointed])
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_decoder(model: type[Decoder], n: int) -> None:
    """Both its MLPs; the head of so few tokens is no wider than they are."""
    found = sp_compile.verify(model().double(), *text(15), sp=n, tiles=3)
    assert found.worst < EXACT
    assert len(found.tiled) == 2


def test_checkpoints_compiled() -> None:
    model, gradients = Checkpointed(layers=1).double(), []
    for run in (model, torch.compile(model, backend="sp", options={"tiles": 3, "compiler": "aot_eager"})):
        model.zero_grad()
        run(*text(15)).backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


def peak_of(tiles: int | str, compiler: str, vocab: int, seq: int) -> int:
    model = Model(mean, vocab=vocab)
    run = torch.compile(model, backend="sp", options={"tiles": tiles, "compiler": compiler})
    run(*batch(seq, rows=1)).backward()
    return alive(lambda: run(*batch(seq, rows=1)).backward())


def test_memory_of_a_step() -> None:
    """Memory is little more than a tile's logits, softmax, gradient and temporaries, without the previous tile's."""
    vocab, seq, tiles = 2048, 512, 16
    assert peak_of(tiles, "aot_eager", vocab, seq) < 4.2 * vocab * seq * 4 / tiles


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_memory_falls_with_tiles(compiler: str) -> None:
    vocab, seq, tiles = 8192, 1024, 16
    peaks = [peak_of(asked, compiler, vocab, seq) for asked in ("never", tiles)]
    assert peaks[0] - peaks[1] > 0.9 * (1 - 1 / tiles) * vocab * seq * 4


class Embedded(nn.Module):
    """An embedding. tiles: number of tiles of its gradient, as an explicit loop."""

    def __init__(self, tiles: int = 0, vocab: int = 4096, width: int = 64) -> None:
        super().__init__()
        self.table, self.linear, self.tiles = nn.Embedding(vocab, width), nn.Linear(width, width), tiles

    def forward(self, ids: Tensor) -> Tensor:
        x = _EmbeddedInTiles.apply(self.table.weight, ids, self.tiles) if self.tiles else self.table(ids)
        return (x + self.linear(F.rms_norm(x, x.shape[-1:]))).square().mean()


class _EmbeddedInTiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor, tiles: int) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.size, ctx.tiles = table.shape, tiles
        return F.embedding(ids, table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        total = grad.new_zeros(ctx.size)
        for at, rows in zip(ids.flatten().chunk(ctx.tiles), grad.flatten(0, -2).chunk(ctx.tiles)):
            total.index_add_(0, at, rows)
        return total, None, None


def embedded(n: int) -> dict[str, int]:
    """Return bytes at the peak of a rank of n with 4,096 rows: compiled, and eager and tiled on a single rank."""
    ids, peaks = torch.randint(4096, (1, 4096 * n), generator=torch.Generator().manual_seed(0)), {}
    options = {"tiles": 16, "mesh": worker.mesh(), "seq_dims": {"ids": 1}}
    compiled = torch.compile(Embedded(), backend="sp", options=options)
    for name, run in {"eager": Embedded(), "explicit": Embedded(16), "compiled": compiled}.items():
        given = ids if name == "compiled" else ids[:, :4096]
        run(given).backward()
        run.zero_grad()
        peaks[name] = alive(lambda run=run, given=given: run(given).backward())
    return peaks


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2])
def test_an_embeddings_gradient_is_as_small_without_tiles(ranks: Ranks, n: int) -> None:
    """Eager mode allocates the full cotangent before any tile; the compiled program computes rows at their sum."""
    for peaks in ranks.run(n, embedded, n):
        assert peaks["explicit"] == peaks["eager"] > 1.2 * peaks["compiled"]


@pytest.mark.sampled(every=100)
@pytest.mark.parametrize(
    ("dtype", "loss"),
    [(torch.float32, mean), (torch.bfloat16, mean), (torch.bfloat16, per_sequence), (torch.float16, mean)],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_half_types(dtype: torch.dtype, loss: Loss) -> None:
    """Weights in half types, or in float32 under autocast: sums over many tiles are no worse than one of all rows."""
    exact = Model(loss).double()
    exact(*batch(64)).backward()
    errors = []
    for tiles in ("never", 64):
        torch.compiler.reset()
        model = Model(loss).to(dtype)
        run = torch.compile(model, backend="sp", options={"tiles": tiles, "compiler": "aot_eager"})
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.float32):
            found = run(*batch(64))
        found.backward()
        pairs = zip(exact.parameters(), model.parameters(), strict=True)
        errors.append(max(float((a.grad - b.grad.double()).norm() / a.grad.norm()) for a, b in pairs))
    assert 1e-4 < errors[1] < 1.2 * errors[0]


def test_a_small_loss_is_left_alone() -> None:
    found = sp_compile.explain(Model(mean), *batch(16), sp=2)
    assert not found.tiled


def test_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large one is cut into tiles of about one size."""
    monkeypatch.setattr(amount, "LARGE_BYTES", 1 << 10)
    monkeypatch.setattr(amount, "TILE_BYTES", 1 << 9)
    monkeypatch.setattr(tiling, "TILE_BYTES", 1 << 9)
    found = sp_compile.verify(Model(mean).double(), *batch(16), sp=2)
    (one,) = found.tiled
    assert found.worst < EXACT
    assert (one.inside, one.tiles, one.tile) == (4096, 8, 512)
    assert math.ceil(one.rows / one.tiles) == 1
    mlps = sp_compile.explain(Decoder(layers=1).double(), *text(16), sp=2)
    assert not mlps.tiled
    assert mlps.find_notes(NoteKind.DECLINED, subject="run_in_tiles")


@pytest.mark.slow
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("make", [Decoder, Checkpointed])
def test_auto_by_the_device(make: type[Decoder], monkeypatch: pytest.MonkeyPatch) -> None:
    """The head where the step does not fit, MLPs where it still does not; no more tiles than that takes.

    A checkpointed MLP stores nothing, so tiles of it free no memory.
    """
    monkeypatch.setattr(amount, "TILE_BYTES", 1 << 9)
    monkeypatch.setattr(tiling, "TILE_BYTES", 1 << 9)
    model = make(layers=1).double()
    model.head = nn.Linear(16, 64, bias=False).double()
    logits = 2 * 16 * 64 * 8  # of a rank of two

    def tiled(memory: float) -> list[tuple[int, int]]:
        found = sp_compile.explain(model, *text(32), sp=2, cost={"memory": memory})
        taken.append(found.memory[0].used)
        return [(one.inside, one.tiles) for one in found.tiled]

    taken: list[float] = []
    assert tiled(1e9) == []
    assert tiled(taken[0]) == [(logits, 2)], "an MLP is half as wide"
    beside = taken[0] - logits
    (mlp, tiles_of_mlp), (head, tiles_of_head) = tiled(beside + logits / 8)
    assert (mlp, head) == (logits // 2, logits)
    free = (beside + logits / 8) - (beside - (mlp if make is Decoder else 0))
    most = logits // (1 << 9)
    assert tiles_of_head == min(max(2, math.ceil(2 * head / free)), most, 16)
    assert tiles_of_mlp == min(max(2, math.ceil(2 * mlp / free)), most // 2, 16)
    if make is Checkpointed:
        monkeypatch.setattr(amount, "TILE_BYTES", 1 << 11)
        assert tiled(beside + 64) == [(mlp, 4), (head, 8)], "no smaller pieces, however little memory is free"
    else:
        roomy = beside + 2 * logits + 1
        assert tiled(roomy) == [(logits, 2)], "it fits, and is a large share of the device"
        monkeypatch.setattr(amount, "MEMORY_SHARE", 1.0)
        assert tiled(roomy) == []


def test_words_of_options() -> None:
    for wrong in (0, -2, 1.5, True, "sometimes"):
        with pytest.raises(sp_compile.SpError, match="SP103: tiles"):
            sp_compile.SPConfig(tiles=wrong)
