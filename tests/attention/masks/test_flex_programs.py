"""Functions of flex_attention that no predicate expresses: they run unchanged on shards.

Learned biases, masks by head, tables of pairs; loss and every gradient equal those of a single device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.attention.flexible import DOCUMENTS, LENGTH, WAYS, backward_on_a_cpu, canonical, causal, qkv  # noqa: F401
from support.attention.fused import fused_here
from support.attention.score_texts import show_score, traced_score
from support.capturing import simulating
from support.golden import show
from support.models import Decoder, check, floats, rotated, seeded, tokens
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

import sp_compile
from sp_compile.lowering.torch_compat import pytree
from sp_compile.passes.context import NoteKind
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.sharding.attention_axes import attention_nodes, mask_predicate

aten = torch.ops.aten
HEADS = 4


def bucket(q: Tensor, k: Tensor) -> Tensor:
    """T5's of a distance: exact up to 4, then logarithmic."""
    distance = (q - k).clamp(min=0)
    far = 4 + (torch.log(distance.float() / 4) / 1.4 * 4).to(torch.long)
    return torch.where(distance < 4, distance, torch.minimum(far, torch.full_like(far, 7)))


def by_head(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & ((h % 2 == 0) | (q - k < 3))


Kind = Callable[[nn.Parameter, Tensor], tuple[Any, Any]]
# name: (shape of what is learned, the score_mod of it and of documents, the mask_mod)
KINDS: dict[str, tuple[tuple[int, ...], Kind]] = {
    "distances": ((HEADS, 2 * LENGTH - 1), lambda w, d: (lambda s, b, h, q, k: s + w[h, k - q + LENGTH - 1], causal)),
    "buckets": ((8, HEADS), lambda w, d: (lambda s, b, h, q, k: s + w[bucket(q, k), h], causal)),
    "pairs": ((HEADS, LENGTH, LENGTH), lambda w, d: (lambda s, b, h, q, k: s + w[h, q, k], None)),
    "slopes": ((HEADS,), lambda w, d: (lambda s, b, h, q, k: s * w[h].exp() - w[h] * (q - k), causal)),
    "a cap": ((1,), lambda w, d: (lambda s, b, h, q, k: 3 * w.exp()[h - h] * torch.tanh(s / w[h - h].exp()), causal)),
    "documents": (
        (4, 4),
        lambda w, d: (lambda s, b, h, q, k: s + w[d[b, q], d[b, k]], lambda b, h, q, k: (q >= k) & (d[b, k] < 3)),
    ),
    "a mask by head": ((HEADS,), lambda w, d: (lambda s, b, h, q, k: s * w[h], by_head)),
    "a table of pairs": ((1,), lambda w, d: (None, lambda b, h, q, k: (q >= k) & (_ALLOWED[q, k] | (q - k == h)))),
}
_ALLOWED = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.6
_DOCUMENTS = DOCUMENTS.clamp(max=3)


class Learned(Decoder):
    """With one weight for its attention; forward(ids, documents)."""

    def __init__(self, kind: str, heads: tuple[int, int] = (HEADS, 2)) -> None:
        super().__init__(_attend, *heads)
        shape, self.mods = KINDS[kind]
        self.weight = nn.Parameter(torch.randn(shape) / 2)

    def forward(self, ids: Tensor, documents: Tensor) -> Tensor:
        self.documents = documents
        return super().forward(ids)


def _attend(model: Learned, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    score_mod, mask_mod = model.mods(model.weight, model.documents)
    grouped, length = q.shape[1] != k.shape[1], q.shape[2]
    mask = None
    if mask_mod is not None:
        mask = create_block_mask(mask_mod, q.shape[0], q.shape[1], length, length, device="cpu")
    found = flex_attention(rotated(q), rotated(k), v, score_mod, mask, enable_gqa=grouped)
    return found * model.weight.sum().exp() if score_mod is None else found


def run(kind: str, ranks: int, length: int = LENGTH, heads: tuple[int, int] = (HEADS, 2), **config: Any) -> None:
    inputs = tokens(length), _DOCUMENTS[:, :length]
    report = check(seeded(lambda: Learned(kind, heads)), *inputs, sp=ranks, **config)
    assert not report.fallbacks, report
    assert not any(note.subject == "rewrite_flex_attention" for note in report.notes), report


@pytest.mark.sampled(every=100)
@pytest.mark.parametrize("strategy", ["ring", "ulysses", "hybrid", "gather"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_one_device(kind: str, strategy: str) -> None:
    run(kind, 4, attention=strategy)


@pytest.mark.slow
@pytest.mark.sampled(every=14)
@pytest.mark.parametrize("strategy", ["ring", "gather"])
@pytest.mark.parametrize("layout", ["zigzag", "balanced"])
@pytest.mark.parametrize("kind", ["distances", "documents", "a mask by head"])
def test_in_other_orders(kind: str, layout: str, strategy: str) -> None:
    run(kind, 3, attention=strategy, layout=layout)


@pytest.mark.slow
def test_keys_in_two_parts_learn_from_both() -> None:
    """Zigzag shards are gathered as two stretches, each of which has a gradient for all of a table."""
    run("distances", 2, attention="gather", layout="zigzag")


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_all(kind: str, strategy: str, ranks: int) -> None:
    run(kind, ranks, attention=strategy)
    run(kind, ranks, 11, (HEADS, HEADS), attention=strategy)


@pytest.mark.sampled(every=1000)
@pytest.mark.parametrize("strategy", ["ring", "ulysses", "hybrid", "gather"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_fused_kernel_equals_one_device(kind: str, strategy: str) -> None:
    """The graphs that a GPU compiles, gradients of tables included, in the place of dense arithmetic."""
    with fused_here() as programs:
        run(kind, 4, attention=strategy)
    assert len(programs.made) >= 2


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("name", ["distances", "pairs", "a mask by head", "documents"])
def test_rewritten_op(name: str) -> None:
    shape, mods = KINDS[name]
    weight = torch.randn(shape, dtype=torch.float64)
    score_mod, mask_mod = mods(weight, _DOCUMENTS)
    mask = mask_mod and create_block_mask(mask_mod, 2, HEADS, LENGTH, LENGTH, device="cpu")
    graph, notes = canonical(lambda x: flex_attention(*x, score_mod=score_mod, block_mask=mask), qkv())
    (node,) = attention_nodes(graph)
    assert not notes
    assert mask_predicate(OpCall(node)) == ("" if name == "pairs" else PREDICATES.get(name, "k <= q"))
    assert show_score(OpCall(node)["score"]) == "fills: " + TEXTS[name]
    assert len(OpCall(node)["tables"] or ()) == {"documents": 2, "a mask by head": 0}.get(name, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize(("factor", "fills"), [(1000, True), (2, False)])
@pytest.mark.parametrize("tensors", [False, True])
def test_products_of_constants_may_be_fills(factor: int, fills: bool, dtype: torch.dtype, tensors: bool) -> None:
    keep = torch.zeros(2, LENGTH, dtype=torch.long)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        hidden = keep.to(dtype) - 1
        product = (hidden * factor) * (hidden * -factor) if tensors else hidden * factor * factor
        return s + product[b, k]

    graph, _ = canonical(lambda x: flex_attention(*x, score_mod=score_mod), qkv())
    (node,) = attention_nodes(graph)
    assert show_score(OpCall(node)["score"]).startswith("fills: ") is fills


PREDICATES = {"documents": "(k <= q) & (col0 < 3)"}
TEXTS = {
    "distances": "(s + index(table0, [head0, (((k - q) + 13) - 1)]))",
    "pairs": "(s + index(table0, [head0, q, k]))",
    "a mask by head": "where(__or__(eq(remainder(head1, 2), 0), lt((q - k), 3)), (s * head0), -inf)",
    "documents": "(s + index(table0, [index(table1, [b, q]), index(table1, [b, k])]))",
}


@pytest.mark.slow
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("fills", [False, True])
def test_fills_are_not_merged(fills: bool) -> None:
    """A row of only large finite fills weights all keys equally; results of key blocks cannot express that."""
    least = -1e9 if fills else -torch.inf

    def attend(model: Learned, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def score_mod(s: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
            return torch.where((m + n + h) % 3 > 0, s * model.weight[h], least)

        return flex_attention(q, k, v, score_mod, enable_gqa=True)

    def make() -> Learned:
        model = Learned("slopes")
        model.attend = attend
        return model

    report = check(seeded(make), tokens(LENGTH), _DOCUMENTS, sp=2, attention="ring")
    assert bool(report.find_notes(NoteKind.DECLINED, subject="ring")) is fills


@pytest.mark.slow
@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize(("strategy", "layout"), [("ring", "contiguous"), ("ulysses", "zigzag"), ("gather", "zigzag")])
def test_rows_of_fills_are_averages(strategy: str, layout: str, table: bool) -> None:
    """Average rows of only fills, also over several blocks of keys: a log-sum-exp does not count them.

    Only the result is compared: torch's backward on a CPU takes such a row's weights from its log-sum-exp.
    """
    added = torch.where(torch.arange(LENGTH)[:, None] % 2 == 0, -1e18, torch.zeros(LENGTH, LENGTH).double())

    def attend(model: Learned, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def score_mod(s: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
            s = s * model.weight[h]
            return s + added[m, n] if table else torch.where(m % 2 == 0, s - 10**18, s)

        mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")
        return flex_attention(q, k, v, score_mod, mask, enable_gqa=True)

    def make() -> Learned:
        model = Learned("slopes")
        model.attend = attend
        return model

    report = sp_compile.verify(
        seeded(make),
        tokens(LENGTH),
        _DOCUMENTS,
        sp=4 if strategy == "ulysses" else 3,
        attention=strategy,
        layout=layout,
    )
    assert [error for name, error in report.errors if name.startswith("result")] == pytest.approx([0], abs=1e-9)
    assert not report.fallbacks


def test_gradients_of_rows_of_fills() -> None:
    q, k, v = (torch.randn(2, 2, LENGTH, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def filled(s: Tensor, q: Tensor) -> Tensor:
        return aten.where.ScalarOther(aten.eq.Scalar(aten.remainder.Scalar(q, 2), 0), s, -1e18)

    given = [], [], [], "k <= q", 0.0, None, False, None, traced_score(filled, fills=True)
    place = torch.arange(LENGTH)
    scores = torch.where(place[:, None] % 2 == 0, q @ k.mT * 8**-0.5, -1e18)
    wanted = scores.masked_fill(place[:, None] < place, -torch.inf).softmax(-1) @ v
    found = torch.ops.sp.masked_attention(q, k, v, *given)
    torch.testing.assert_close(found, wanted)
    grad = torch.randn_like(wanted)
    for one, other in zip(*(torch.autograd.grad(x, (q, k, v), grad) for x in (found, wanted)), strict=True):
        torch.testing.assert_close(one, other)


def test_no_pairs_are_made() -> None:
    """A lookup of distances allocates no value of all queries and keys, forward or backward."""
    length = 2048
    q, k, v = (torch.randn(1, 1, length, 8, requires_grad=True) for _ in range(3))
    table = torch.randn(1, 2 * length, requires_grad=True)
    most = 0

    def distances(s: Tensor, q: Tensor, k: Tensor, head0: Tensor, table0: Tensor) -> Tensor:
        distance = aten.add.Tensor(aten.sub.Tensor(k, q), length - 1)
        return aten.add.Tensor(s, aten.index.Tensor(table0, [head0, distance]))

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal most
            found = func(*args, **(kwargs or {}))
            made = [x for x in pytree.tree_leaves(found) if isinstance(x, Tensor)]
            most = max([most, *(x.numel() for x in made)])
            return found

    heads, rest = [torch.arange(1)], ("k <= q", 0.0, None, False, None)
    with Largest():
        out = torch.ops.sp.masked_attention(
            q, k, v, [], [], [], *rest, traced_score(distances), heads, None, None, [table]
        )
        out.sum().backward()
    assert most <= 1 << 20
    assert table.grad is not None
    assert table.grad.abs().sum() > 0


class Partial(Learned):
    """Attention over halves of the keys, put together by log-sum-exps, and these in the loss."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.attend = _in_halves


def _every_second(rest: int) -> Callable[..., Tensor]:
    return lambda b, h, q, k: (q >= k) & ((q - k) % 2 == rest)


def _in_halves(model: Partial, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    score_mod, _ = model.mods(model.weight, model.documents)
    length, found = q.shape[2], []
    for rest in (0, 1):
        mask = create_block_mask(_every_second(rest), None, None, length, length, device="cpu")
        aux = AuxRequest(lse=True)
        out, of = flex_attention(rotated(q), k, v, score_mod, mask, enable_gqa=True, return_aux=aux)
        found.append((out, of.lse))
    weights = torch.stack([lse for _, lse in found], -1).softmax(-1)
    return sum(out * weights[..., i, None] for i, (out, _) in enumerate(found)) + found[0][1][..., None] / 8


@pytest.mark.slow
@pytest.mark.sampled(every=10)
@pytest.mark.parametrize("strategy", ["ring", "ulysses", "hybrid", "gather"])
@pytest.mark.parametrize("kind", ["distances", "a cap"])
def test_log_sum_exps(kind: str, strategy: str) -> None:
    report = check(seeded(lambda: Partial(kind)), tokens(LENGTH), _DOCUMENTS, sp=4, attention=strategy)
    assert not report.fallbacks, report


class OfAnyLength(nn.Module):
    """Functions that read the length, a number that Dynamo makes an input of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.table = nn.Linear(16, 48), nn.Parameter(torch.randn(HEADS, 99))

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = (y.unflatten(-1, (HEADS, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))

        def within(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & ((documents[b, q] == documents[b, k]) | (h < length - 10))

        mask = create_block_mask(within, 1, HEADS, length, length, device="cpu")
        found = flex_attention(q, k, v, lambda s, b, h, q, k: s + self.table[h, k - q + length - 1], mask)
        return found.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("strategy", ["ring", pytest.param("ulysses", marks=pytest.mark.slow)])
def test_one_graph_for_all_lengths(strategy: str) -> None:
    torch._dynamo.reset()
    model, graphs = seeded(OfAnyLength), []
    compiled = torch.compile(model, backend=simulating(4, graphs, cost={}, attention=strategy), dynamic=True)
    with torch.no_grad():
        for length in (13, 34):
            x, documents = floats(1, length, 16), torch.arange(length)[None] // 5
            torch.testing.assert_close(compiled(x, documents), model(x, documents), rtol=1e-9, atol=1e-9)
    assert len(graphs) == 1
    assert "index(table" in show(graphs[0])
