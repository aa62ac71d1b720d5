"""A training step of every named family of docs/reference/families.md on ranks equals eager mode: loss and every gradient."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import ranks as worker
from support.parity import Outcome, against_eager, check
from support.ranks import Ranks
from torch import Tensor, nn
from torch.utils import _pytree as pytree

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from support.docs.family_models import NAMED

QUICK = ("LFM2", "DINOv3 ViT")  # families with a fast test; the others are slow
SETTINGS = ((2, "auto"), (3, "ring"), (4, "ulysses"), (4, "hybrid"), (3, "gather"))  # ranks, attention
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}
# Sums over tokens of these models, in norms, gates or states, are float32 for every dtype of the model.
FLOAT32_SUMS = "Wan,Qwen3.5 (text),Mamba2,Bamba,Falcon-H1,Zamba2,OlmoHybrid,RecurrentGemma,LFM2,Sana,Mochi".split(",")
FLOAT32_TOLERANCE = 1e-6
# Models in transformers compute the delta rule in float32 with sums that cancel. The tolerance is twice the distance of
# the gradients of the model in eager mode from those of a copy of its code with float64 in place of float32.
DELTA_RULE_TOLERANCE = {"OlmoHybrid": 1e-5, "Qwen3-Next": 7e-5, "Qwen3.5 (text)": 2.3e-4}


class WithLoss(nn.Module):
    """A model with a loss of its first result, or with its own loss if that has the dtype of the model.

    Losses of transformers are float32 for every dtype. Their last bit depends on the order of a sum over tokens.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.dtype = model, next(model.parameters()).dtype

    def forward(self, **inputs: Any) -> Tensor:
        results = self.model(**inputs)
        loss = getattr(results, "loss", None)
        if loss is not None and loss.dtype == self.dtype:
            return loss
        first = results[0] if loss is None else results.logits
        while isinstance(first, (list, tuple)):
            first = first[0]
        return (first.sin() + first.square()).mean()


def _build(name: str) -> tuple[nn.Module, dict[str, Any], torch.dtype]:
    """Return a model with its loss, its arguments and its dtype: float64, or float32 if it does not run in float64."""
    torch.manual_seed(zlib.crc32(name.encode()))
    model, inputs = next(family for family in NAMED if family.name == name).build()
    model.eval().requires_grad_(True)
    for parameter in model.parameters():  # some libraries initialize gates and last layers with zeros
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    wide = pytree.tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, inputs)
    try:
        WithLoss(copy.deepcopy(model).double())(**wide).backward()
    except RuntimeError:
        return WithLoss(model), inputs, torch.float32
    return WithLoss(model.double()), wide, torch.float64


def _train(name: str, attention: str) -> tuple[Outcome, torch.dtype]:
    model, inputs, dtype = _build(name)
    return against_eager(model, kwargs=inputs, mesh=worker.mesh(), attention=attention), dtype


def _cases() -> Iterator[Any]:
    """Yield every family with every setting."""
    for family in NAMED:
        for n, attention in SETTINGS:
            is_quick = family.name in QUICK and attention == "auto"
            marks = () if is_quick else pytest.mark.slow
            yield pytest.param(family.name, n, attention, marks=marks, id=f"{family.name}-{n}-{attention}")


@pytest.mark.parametrize(("name", "n", "attention"), _cases())
def test_a_family_trains_as_a_single_device(ranks: Ranks, name: str, n: int, attention: str) -> None:
    answers = ranks.run(n, _train, name, attention)
    known = dict.fromkeys(FLOAT32_SUMS, FLOAT32_TOLERANCE) | DELTA_RULE_TOLERANCE
    check([answer for answer, _ in answers], known.get(name, TOLERANCE[answers[0][1]]))
