"""torch's flex_attention: the attention op that it becomes, and equality with a single device.

torch has no backward kernel on a CPU; the single-device reference here uses torch's eager arithmetic.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
from support.attention.flexible import DOCUMENTS, LENGTH, WAYS, backward_on_a_cpu, canonical, causal, qkv  # noqa: F401
from support.attention.fused import fused_here
from support.attention.score_texts import show_score
from support.capturing import simulating
from support.golden import show
from support.models import Decoder, check, floats, rotated, seeded, tokens
from torch import Tensor, nn
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import sp_compile
from sp_compile.passes.context import NoteKind
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.sharding.attention_axes import attention_nodes, mask_predicate

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
PADDING = torch.arange(LENGTH) < torch.tensor([[LENGTH - 3], [LENGTH]])
CAUSAL = "k <= q"


def within(documents: Tensor) -> MaskMod:
    return lambda b, h, q, k: (documents[b, q] == documents[b, k]) & (q >= k)


# name: (mask_mod of documents (B, S) and padding (B, S), what it becomes)
MASKS: dict[str, tuple[Callable[[Tensor, Tensor], MaskMod], str]] = {
    "causal": (lambda d, p: causal, CAUSAL),
    "all": (lambda d, p: lambda b, h, q, k: q >= 0, ""),
    "window": (lambda d, p: lambda b, h, q, k: (q >= k) & (q - k < 4), "(k <= q) & (-k + q < 4)"),
    "prefix": (lambda d, p: lambda b, h, q, k: (q >= k) | (k < 3), "(k <= q) | (k < 3)"),
    "not": (lambda d, p: lambda b, h, q, k: ~(q < k) & (q - k != 2), "(k <= q) & Ne(q - 2, k)"),
    "documents": (lambda d, p: within(d), "Eq(row0, col0) & (k <= q)"),
    "padding": (lambda d, p: lambda b, h, q, k: p[b, k] & (q >= k), "(k <= q) & Ne(col0, 0)"),
    "and_masks": (lambda d, p: torch_flex.and_masks(causal, lambda b, h, q, k: p[b][k]), "(k <= q) & Ne(col0, 0)"),
    "one row of documents": (lambda d, p: lambda b, h, q, k: d[0][q] == d[0][k], "Eq(row0, col0)"),
}


class Model(Decoder):
    """forward(ids, documents, padding): a BlockMask that is made here, or the one that is given."""

    def __init__(self, mask: str, heads: tuple[int, int] = (4, 2), **options: Any) -> None:
        super().__init__(_attend, *heads)
        self.mask, self.options = mask, options
        if "score_mod" in options:
            self.options = {**options, "score_mod": SCORES[options["score_mod"]][0]}

    def forward(self, ids: Tensor, documents: Tensor, padding: Tensor, given: BlockMask | None = None) -> Tensor:
        mask_mod, length = MASKS[self.mask][0](documents, padding), ids.shape[1]
        self.given = given or create_block_mask(mask_mod, ids.shape[0], None, length, length, device="cpu")
        return super().forward(ids)


def _attend(model: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    found = flex_attention(rotated(q), rotated(k), v, block_mask=model.given, enable_gqa=grouped, **model.options)
    return found if isinstance(found, Tensor) else found[0] * found[1].lse.exp()[..., None]


def inputs(length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    return tokens(length), DOCUMENTS[:, :length], PADDING[:, :length]


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_mod_is_a_predicate(name: str) -> None:
    mask_mod, wanted = MASKS[name]

    mask = create_block_mask(mask_mod(DOCUMENTS, PADDING), 2, None, LENGTH, LENGTH, device="cpu")
    graph, notes = canonical(lambda x: flex_attention(*x, block_mask=mask), qkv())
    (node,) = attention_nodes(graph)
    assert mask_predicate(OpCall(node)) == wanted
    assert not notes
    shapes = [tuple(n.meta["val"].shape) for n in graph.graph.nodes if isinstance(n.meta.get("val"), Tensor)]
    assert not any(shape[-2:] == (LENGTH, LENGTH) for shape in shapes)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_block_mask_is_an_argument(dynamic: bool) -> None:
    """One of another graph: its tables are inputs that nothing reads."""
    mask = create_block_mask(within(DOCUMENTS), 2, None, LENGTH, LENGTH, device="cpu")
    graph, _ = canonical(lambda x, mask: flex_attention(*x, block_mask=mask, scale=0.3), qkv(), mask, dynamic=dynamic)
    (node,) = attention_nodes(graph)
    assert OpCall(node)["predicate"] == "Eq(row0, col0) & (k <= q)"
    assert OpCall(node)["scale"] == 0.3
    tables = [n for n in graph.graph.find_nodes(op="placeholder") if "num_blocks" in n.name or "indices" in n.name]
    assert len(tables) == 8
    assert not any(n.users for n in tables)


# name: (score_mod, what it becomes)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
SCORES: dict[str, tuple[Callable[..., Tensor], str]] = {
    "soft-cap": (lambda s, b, h, q, k: 5.0 * torch.tanh(s / 5.0), "(tanh((s / 5.0)) * 5.0)"),
    "ALiBi": (lambda s, b, h, q, k: s + SLOPES[h] * (k - q), "(s + (head0 * (k - q)))"),
    "both": (
        lambda s, b, h, q, k: 5 * torch.tanh((s - SLOPES[h] * (q - k)) / 5),
        "(tanh(((s - (head0 * (q - k))) / 5)) * 5)",
    ),
    # On one device torch rounds 0.1 * an int to float32.
    "distance": (lambda s, b, h, q, k: s - 0.125 * (q - k).abs(), "(s - (abs((q - k)) * 0.125))"),
}


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("name", SCORES)
def test_score_functions(name: str) -> None:
    score_mod, wanted = SCORES[name]
    mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")
    graph, notes = canonical(lambda x: flex_attention(*x, score_mod=score_mod, block_mask=mask), qkv())
    (node,) = attention_nodes(graph)
    assert show_score(OpCall(node)["score"]) == wanted
    assert OpCall(node)["predicate"] == CAUSAL
    assert not notes


def as_torchtitan(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    return out * torch.sigmoid(lse - sinks.view(1, -1, 1)).unsqueeze(-1).to(out.dtype)


def as_transformers(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    every, lse = sinks.view(1, -1, 1, 1).expand(*out.shape[:3], 1), lse.to(out.dtype).unsqueeze(-1)
    return out * torch.exp(lse - torch.logsumexp(torch.cat([lse, every], -1), -1, keepdim=True))


class Sunk(Model):
    """With a logit of each head beside its keys."""

    def __init__(self, mask: str, renormalize: Callable[[Tensor, Tensor, Tensor], Tensor], **options: Any) -> None:
        super().__init__(mask, **options)
        self.attend, self.sinks = _sunk, nn.Parameter(torch.randn(4))
        self.renormalize = renormalize


def _sunk(model: Sunk, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    aux = torch_flex.AuxRequest(lse=True)
    out, found = flex_attention(q, k, v, block_mask=model.given, enable_gqa=True, return_aux=aux, **model.options)
    return model.renormalize(out, found.lse, model.sinks)


@pytest.mark.sampled(every=13)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("renormalize", [as_torchtitan, as_transformers])
@pytest.mark.parametrize(
    ("mask", "options"), [("causal", {}), ("documents", {}), ("window", {"score_mod": "soft-cap"})]
)
def test_sinks(mask: str, options: dict[str, Any], renormalize: Any, ranks: int) -> None:
    report = check(seeded(lambda: Sunk(mask, renormalize, **options)), *inputs(), sp=ranks)
    assert not report.fallbacks


def without_lse(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    every = sinks.view(1, -1, 1, 1).expand(*out.shape[:3], 1)
    return out * torch.exp(lse.unsqueeze(-1) - torch.logsumexp(torch.cat([every, every + 1], -1), -1, keepdim=True))


def test_other_log_sum_exps_are_no_sinks() -> None:
    check(seeded(lambda: Sunk("causal", without_lse)), *inputs(), sp=2)


class TestFlexGraph(expecttest.TestCase):
    def test_documents(self) -> None:
        def attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
            mask = create_block_mask(within(documents), 2, None, LENGTH, LENGTH, device="cpu")
            return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

        q, k, v = qkv()
        graph, _ = canonical(attend, q, k[:, :2], v[:, :2], DOCUMENTS)
        self.assertExpectedInline(
            show(graph),
            """\
l_documents_: [2, 13] = placeholder
l_q_: [2, 4, 13, 8] = placeholder
l_k_: [2, 2, 13, 8] = placeholder
l_v_: [2, 2, 13, 8] = placeholder
masked_attention_default: [2, 4, 13, 8] = sp.masked_attention(l_q_, l_k_, l_v_, [l_documents_], [l_documents_], [], Eq(row0, col0) & (k <= q), 0.0, 0.35355339059327373, True)
return (masked_attention_default,)""",
        )


STAYS: dict[str, Callable[..., Any]] = {
    "a score_mod": lambda x, c: flex_attention(*x, score_mod=lambda s, b, h, q, k: s + c[q].sum()),
    "a row of pairs": lambda x, c: flex_attention(
        *x, block_mask=create_block_mask(lambda b, h, q, k: (c[q] * c[k]).sum() > 0, 2, None, 13, 13, "cpu")
    ),
    "blocks alone": lambda x, c: flex_attention(
        *x,
        block_mask=BlockMask.from_kv_blocks(
            torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32), seq_lengths=(13, 13)
        ),
    ),
}


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("name", STAYS)
def test_unmatched_calls_are_reported(name: str) -> None:
    graph, notes = canonical(STAYS[name], qkv(), torch.ones(LENGTH, LENGTH, dtype=torch.int64).tril())
    assert not attention_nodes(graph)
    (note,) = notes
    assert note.label == "not rewrite_flex_attention"
    assert "test_flex_attention.py" in note.where


@pytest.mark.slow
def test_unmatched_calls_are_correct() -> None:
    """Unmatched calls run on gathered q, k and v."""
    table = torch.rand(LENGTH, 3)

    def attend(model: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, lambda s, b, h, m, n: s + (table[m] * table[n]).sum(), enable_gqa=True)

    def make() -> Model:
        model = Model("causal")
        model.attend = attend
        return model

    report = check(seeded(make), *inputs(), sp=2)
    assert report.find_notes(NoteKind.DECLINED, subject="rewrite_flex_attention")
    assert report.fallbacks


@pytest.mark.slow
@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("strategy", ["ring", "gather", "ulysses"])
def test_log_sum_exps(strategy: str) -> None:
    run("documents", strategy, 2, return_aux=torch_flex.AuxRequest(lse=True))


def run(
    mask: str, strategy: str, ranks: int, length: int = LENGTH, heads: tuple[int, int] = (4, 2), **options: Any
) -> None:
    report = check(seeded(lambda: Model(mask, heads, **options)), *inputs(length), sp=ranks, attention=strategy)
    assert not report.fallbacks


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(("mask", "strategy"), [("documents", "ring"), ("padding", "gather")])
def test_equals_one_device(mask: str, strategy: str) -> None:
    run(mask, strategy, 4)


@pytest.mark.slow
@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("strategy", ["hybrid", "ulysses"])
def test_scores_equal_one_device(strategy: str) -> None:
    run("window", strategy, 4, score_mod="both")


@pytest.mark.slow
@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("strategy", ["gather", "ring"])
def test_scores_of_balanced_positions(strategy: str) -> None:
    """A slope counts positions in the program's order, not in the order in which ranks store the rows."""
    report = check(
        seeded(lambda: Model("documents", score_mod="ALiBi")), *inputs(), sp=3, attention=strategy, layout="balanced"
    )
    assert not report.fallbacks


@pytest.mark.slow
@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("strategy", ["ring", "ulysses", "hybrid", "gather"])
@pytest.mark.parametrize(("mask", "score_mod"), [("documents", "both"), ("prefix", "soft-cap")])
def test_the_fused_kernel_equals_one_device(mask: str, score_mod: str, strategy: str) -> None:
    """The graphs that a GPU compiles, in the place of dense arithmetic."""
    with fused_here() as programs:
        run(mask, strategy, 4, score_mod=score_mod)
    assert len(programs.made) >= 2


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), WAYS)
@pytest.mark.parametrize("mask", MASKS)
def test_all(mask: str, strategy: str, ranks: int) -> None:
    run(mask, strategy, ranks)
    run(mask, strategy, ranks, 12, (4, 4))


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), WAYS)
@pytest.mark.parametrize("score_mod", SCORES)
def test_all_scores(score_mod: str, strategy: str, ranks: int) -> None:
    run("window", strategy, ranks, score_mod=score_mod)
    run("documents", strategy, ranks, 12, (4, 4), score_mod=score_mod, scale=0.7)


class OfAnyLength(nn.Module):
    """Numbers that Dynamo makes inputs of the graph: the length, and a cap."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.cap = nn.Linear(16, 48), 3.0

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = (y.unflatten(-1, (4, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        mask = create_block_mask(within(documents), 1, None, length, length, device="cpu")

        def capped(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return self.cap * torch.tanh(s / self.cap)

        return flex_attention(q, k, v, block_mask=mask, score_mod=capped).transpose(1, 2).flatten(2)


@pytest.mark.slow
def test_one_graph_for_all_lengths() -> None:
    torch._dynamo.reset()
    model, graphs = seeded(OfAnyLength), []

    backend = simulating(4, graphs, cost={}, attention="ring")
    compiled = torch.compile(model, backend=backend, dynamic=True)
    with torch.no_grad():
        for length in (13, 34):
            x, documents = floats(1, length, 16), torch.arange(length)[None] // 5
            torch.testing.assert_close(compiled(x, documents), model(x, documents), rtol=1e-9, atol=1e-9)
    assert len(graphs) == 1
    assert "ring_attention" in show(graphs[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
def test_models_of_transformers(name: str) -> None:
    """Models that use flex_attention, also with soft-caps and windows: nothing is gathered."""
    pytest.importorskip("transformers")
    of_hf = importlib.import_module("canonical.attention.test_masks_of_hf")
    # Inside of torch.compile torch warns of an option that transformers sets, which would cut the graph.
    model, ids = of_hf.decoder(name, "flex_attention").double().eval(), tokens(19) % 48
    with torch._dynamo.config.patch(ignore_logging_functions={warnings.warn}):
        report = sp_compile.verify(model, ids, labels=ids, sp=4)
    assert not report.fallbacks
    assert len(report.attention) in (1, 2)
    assert not any("graph breaks" in note.where for note in report.notes)
    assert report.worst < 1e-6  # norms and rotary positions of these compute in float32
