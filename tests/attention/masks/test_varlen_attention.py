"""torch's varlen_attn, which has kernels on a GPU only, against plain attention document by document."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import expecttest
import pytest
import torch
from support.attention.flexible import canonical
from support.golden import show
from support.models import check
from torch import Tensor, nn
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.sharding.attention_axes import attention_nodes

LENGTH, WIDTH = 13, 16
ENDS = torch.tensor([0, 4, 5, 5, 11, LENGTH], dtype=torch.int32)
FEWER = torch.tensor([0, 3, 5, 7, 9, 11], dtype=torch.int32)
"""Of keys, for documents that are shorter or longer than those of the queries."""


def by_document(q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor | None, *rest: Any) -> Tensor:
    """varlen_attn in arithmetic: the last query of a document is at the place of its last key."""
    _, _, causal, scale, window, *_ = rest
    left, right = window[0], 0 if causal else window[1]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    parts = []
    for rows, cols in zip(pairwise(q_ends.tolist()), pairwise((q_ends if k_ends is None else k_ends).tolist())):
        one, two, three = q[slice(*rows)], k[slice(*cols)], v[slice(*cols)]
        scores = torch.einsum("qhd,khd->hqk", one, two) * (q.shape[-1] ** -0.5 if scale is None else scale)
        place = torch.arange(len(one))[:, None] + len(two) - len(one)
        key = torch.arange(len(two))
        seen = ((key <= place + right) | (right < 0)) & ((key >= place - left) | (left < 0))
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
        parts.append(torch.einsum("hqk,khd->qhd", weights, three))
    return torch.cat(parts)


def forward(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return by_document(q, *rest), q.new_empty(q.shape[1], len(q)), torch.empty(2, dtype=torch.uint64)


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *ends_and_most, causal, _, scale, window = rest

    def again(*qkv: Tensor) -> Tensor:
        return by_document(*qkv, *ends_and_most, causal, scale, window)

    return torch.func.vjp(again, q, k, v)[1](grad)


@pytest.fixture(autouse=True, scope="module")
def kernels() -> Iterator[None]:
    with torch.library._scoped_library("torch_attn", "IMPL") as library:
        library.impl("_varlen_attn", forward, "CPU")
        library.impl("_varlen_attn_backward", backward, "CPU")
        yield


class Model(nn.Module):
    """(T, WIDTH) tokens of documents -> (T, WIDTH). keys: (T_k, WIDTH) other tokens, for cross attention."""

    def __init__(self, heads: int = 4, key_heads: int = 2, **options: Any) -> None:
        super().__init__()
        self.heads, self.key_heads, self.options = heads, key_heads, options
        self.before = nn.LayerNorm(WIDTH)
        self.q, self.kv = nn.Linear(WIDTH, heads * 8), nn.Linear(WIDTH, 2 * key_heads * 8)
        self.out = nn.Linear(heads * 8, WIDTH)

    def forward(self, x: Tensor, ends: Tensor, context: Tensor | None = None, k_ends: Tensor | None = None) -> Tensor:
        y = self.before(x)
        q = self.q(y).unflatten(-1, (self.heads, 8))
        k, v = self.kv(y if context is None else context).unflatten(-1, (self.key_heads, -1)).chunk(2, -1)
        grouped = self.heads != self.key_heads
        given = q, k, v, ends, ends if k_ends is None else k_ends, LENGTH, LENGTH
        return x + self.out(varlen_attn(*given, enable_gqa=grouped, **self.options).flatten(1))


def build(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options).double()


def tokens(length: int) -> Tensor:
    return torch.randn(length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(length))


WINDOWS: dict[str, tuple[tuple[int, int], str]] = {
    "all": ((-1, -1), ""),
    "causal": ((-1, 0), " & (k <= {q})"),
    "window": ((2, 0), " & (k <= {q}) & ({q} - k <= 2)"),
    "both sides": ((1, 2), " & (k - {q} <= 2) & ({q} - k <= 1)"),
}


def run(window: str, strategy: str, ranks: int, **options: Any) -> None:
    model = build(window_size=WINDOWS[window][0], **options)
    report = check(model, tokens(LENGTH), ENDS, sp=ranks, attention=strategy)
    assert not report.fallbacks


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_equals_each_document_alone(strategy: str) -> None:
    run("causal", strategy, 4)


@pytest.mark.parametrize("strategy", ["ring", pytest.param("gather", marks=pytest.mark.slow)])
def test_auto_balances_its_documents(strategy: str) -> None:
    report = check(build(window_size=(-1, 0)), tokens(LENGTH), ENDS, sp=3, attention=strategy, cost={"flops": 1e5})
    assert {decision.chosen.layout for decision in report.attention} == {"balanced"}


WAYS = [(s, n) for s in ("ulysses", "ring", "hybrid", "gather", "auto") for n in (1, 2, 3, 4)]
UNFIT = [("ulysses", 3), ("hybrid", 2), ("hybrid", 3)]
"""Three ranks do not divide four heads, and two make no neighborhoods."""


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), [way for way in WAYS if way not in UNFIT])
@pytest.mark.parametrize("window", WINDOWS)
def test_all(window: str, strategy: str, ranks: int) -> None:
    run(window, strategy, ranks)
    run(window, strategy, ranks, key_heads=4, scale=0.3)
    model = build(window_size=WINDOWS[window][0])
    report = check(model, tokens(LENGTH), ENDS, tokens(11), FEWER, sp=ranks, attention=strategy)
    assert not report.fallbacks


def test_other_documents_of_keys() -> None:
    model = build(window_size=(-1, 0))
    assert not check(model, tokens(LENGTH), ENDS, tokens(11), FEWER, sp=2, attention="gather").fallbacks


@pytest.mark.parametrize(
    ("window", "ends"), [("all", "others"), ("causal", "the same"), ("window", "others"), ("both sides", "the same")]
)
def test_its_predicate(window: str, ends: str) -> None:
    size, wanted = WINDOWS[window]
    q_ends, k_ends = ENDS, ENDS if ends == "the same" else ENDS.clone()
    x = torch.randn(3, LENGTH, 4, 8)
    graph, _ = canonical(lambda x, a, b: varlen_attn(*x, a, b, LENGTH, LENGTH, window_size=size), x, q_ends, k_ends)
    (node,) = attention_nodes(graph)
    assert OpCall(node)["predicate"] == "Eq(row0, col0)" + wanted.format(q="q" if ends == "the same" else "row1")


class TestVarlenGraph(expecttest.TestCase):
    def test_documents(self) -> None:
        def attend(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
            return varlen_attn(q, k, v, ends, ends, LENGTH, LENGTH, window_size=(-1, 0), enable_gqa=True)

        q, k, v = torch.randn(3, LENGTH, 4, 8)
        graph, _ = canonical(attend, q, k[:, :2], v[:, :2], ENDS)
        self.assertExpectedInline(
            show(graph),
            """\
l_q_: [13, 4, 8] = placeholder
l_k_: [13, 2, 8] = placeholder
l_v_: [13, 2, 8] = placeholder
l_ends_: [6] = placeholder
arange_default: [13] = aten.arange(13, dtype=int32, device=cpu)
slice_tensor: [5] = aten.slice.Tensor(l_ends_, 0, 1)
bucketize_tensor: [13] = aten.bucketize.Tensor(arange_default, slice_tensor, right=True)
unsqueeze_default: [1, 13] = aten.unsqueeze(bucketize_tensor, 0)
transpose_int: [4, 13, 8] = aten.transpose.int(l_q_, 0, 1)
unsqueeze_default_1: [1, 4, 13, 8] = aten.unsqueeze(transpose_int, 0)
transpose_int_1: [2, 13, 8] = aten.transpose.int(l_k_, 0, 1)
unsqueeze_default_2: [1, 2, 13, 8] = aten.unsqueeze(transpose_int_1, 0)
transpose_int_2: [2, 13, 8] = aten.transpose.int(l_v_, 0, 1)
unsqueeze_default_3: [1, 2, 13, 8] = aten.unsqueeze(transpose_int_2, 0)
masked_attention_default: [1, 4, 13, 8] = sp.masked_attention(unsqueeze_default_1, unsqueeze_default_2, unsqueeze_default_3, [unsqueeze_default], [unsqueeze_default], [], Eq(row0, col0) & (k <= q), 0.0, None, True)
squeeze_dims: [4, 13, 8] = aten.squeeze.dims(masked_attention_default, [0])
transpose_int_3: [13, 4, 8] = aten.transpose.int(squeeze_dims, 0, 1)
return (transpose_int_3,)""",
        )


def test_unmatched_calls_are_reported() -> None:
    def attend(x: Tensor, ends: Tensor) -> Tensor:
        return varlen_attn(*x, ends, ends, LENGTH, LENGTH, return_aux=AuxRequest(lse=True))[1]

    graph, (note,) = canonical(attend, torch.randn(3, LENGTH, 4, 8), ENDS)
    assert not attention_nodes(graph)
    assert note.label == "not rewrite_varlen_attention"
    assert "test_varlen_attention.py" in note.where
