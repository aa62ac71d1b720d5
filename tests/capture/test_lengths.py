"""Guards of a program on a symbolic length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sp_compile
from sp_compile.lowering.torch_compat import make_symbolic_mode, single_value


def halves(length: Any) -> None:
    """Evaluate the conditions of a tree over every second row."""
    while length >= 2:
        if length % 2 == 0:
            pass
        length = length // 2


def doubles(length: Any) -> None:
    step = 1
    while step < length:
        step *= 2


def halves_to_one(length: Any) -> None:
    """Its guards give the length no bound that torch knows."""
    while length != 1:
        length = length // 2


def root(length: Any) -> None:
    """Evaluate conditions by torch's functions."""
    assert length**0.5 < 4


def guarded_length(hint: int, ask: Callable[[Any], Any]) -> Any:
    _, (length, _) = make_symbolic_mode(hint, 3)
    ask(length)
    return length


@pytest.mark.parametrize("length", [2, 3, 4, 7, 10, 33, 1000, 65535])
def test_a_tree_has_one_length(length: int) -> None:
    assert single_value(guarded_length(length, halves)) == length


@pytest.mark.parametrize(
    ("length", "ask"),
    [
        (7, lambda length: None),
        (10, doubles),
        (10, halves_to_one),
        (10, root),
        (10, lambda length: length <= 11),
        (128, lambda length: length % 64 == 0 and length <= 1 << 20),
        (128, lambda length: length % 64 == 0 and length <= 1 << 60),
    ],
    ids=["nothing", "rounds", "rounds to one", "a root", "a bound", "multiples", "multiples in a wide range"],
)
def test_other_lengths_have_several(length: int, ask: Callable[[Any], Any]) -> None:
    symbol = guarded_length(length, ask)
    assert single_value(symbol) is None
    assert symbol.node.expr.is_Symbol, "a guard was added"


def test_inputs_without_fakes_run_unsplit() -> None:
    """A jagged tensor has no fake with the program's symbols."""

    def model(x: Tensor, rows: Tensor) -> Tensor:
        return x.cumsum(1) * (rows.values() * 2).sum()

    compiled = torch.compile(model, backend="sp", options={"compiler": "aot_eager"})
    for length in (7, 10):
        parts = [torch.ones(3, 4), torch.ones(length, 4)]
        given = torch.ones(2, length, 4), torch.nested.nested_tensor(parts, layout=torch.jagged)
        assert torch.equal(compiled(*given), model(*given))
    with pytest.raises(sp_compile.SpError, match=r"SP212.*to_padded_tensor"):
        sp_compile.verify(model, *given, sp=2)


@pytest.mark.parametrize("marks", [torch._dynamo.mark_dynamic, torch._dynamo.maybe_mark_dynamic])
def test_a_model_without_a_sequence_is_reported_for_any_length(marks: Callable[..., None]) -> None:
    """A length that the user marked dynamic, or that the program does not depend on, is not specialized."""
    x = torch.randn(2, 7, 4)
    marks(x, 1)
    with pytest.raises(sp_compile.SpError, match="SP301"):
        sp_compile.verify(nn.Linear(4, 4), x, sp=2)


class MeansOfChunks(nn.Module):
    """Attention over the means of chunks of 4 tokens, which are added to their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.project = nn.Embedding(30, 12), nn.Linear(12, 12)

    def forward(self, ids: Tensor) -> Tensor:
        batch, length = ids.shape
        tokens = F.pad(self.embed(ids), (0, 0, 0, -length % 4))
        chunks = tokens.view(batch, -1, 4, 12)
        heads = self.project(chunks.mean(2))[:, None]
        means = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)[:, 0]
        return (chunks + means[:, :, None]).flatten(1, 2)[:, :length].square().mean()


@pytest.mark.parametrize(("n", "length"), [(2, 7), (2, 11), (3, 4), (3, 10), (3, 27)])
def test_chunks_of_a_dynamic_length(n: int, length: int) -> None:
    """A rank with one chunk adds the guard that it has one, which sizes of views contain, and frames do not."""
    ids = torch.randint(30, (2, length), generator=torch.Generator().manual_seed(0))
    torch._dynamo.mark_dynamic(ids, 1)
    report = sp_compile.verify(MeansOfChunks().double(), ids, sp=n)
    assert report.worst < 1e-12
