"""Run the code of README.md and docs/ on one rank: the blocks of a page in order, in one namespace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.docs.pages import PAGES, code_of
from torch import Tensor

from sp_compile import SPConfig

ON_ONE_RANK = {  # replacements of lines for several ranks and a GPU
    "dist.init_process_group()": "pass",
    'init_device_mesh("cuda", (2, 4)': 'init_device_mesh("cpu", (1, 1)',
    "ranks=[8, 64]": "ranks=[8]",
}


class Model(torch.nn.Module):
    """A minimal model with a sequence, heads and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(256, 16)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        q = self.embed(ids).unflatten(-1, (8, 2)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy((y @ self.embed.weight.T).flatten(0, 1), labels.flatten())


def llama() -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 8}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=1, **sizes))


CALLED = {"README", "start", "between"}  # pages that call what they compile


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run(page: Path) -> None:
    """Run the blocks of a page, with a model and its arguments; for README.md a model of transformers."""
    torch.manual_seed(0)
    ids = torch.randint(0, 256, (1, 24))
    names = {"model": llama() if page.stem == "README" else Model(), "ids": ids, "tokens": ids, "targets": ids}
    torch._dynamo.utils.counters.clear()
    for number, block in enumerate(code_of(page)):
        for many, alone in ON_ONE_RANK.items():
            block = block.replace(many, alone)
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)
        if ".compile(" in block and page.stem in CALLED:  # Dynamo skips some code silently
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"], f"{page.name}, block {number}"


WITH_CODE = [page for page in PAGES if code_of(page)]
LONG = {"start", "scans", "between"}  # tests/models/docs/test_recipes.py runs the first one with torchrun


@pytest.mark.parametrize("page", [p for p in WITH_CODE if p.stem not in LONG], ids=lambda page: page.stem)
@pytest.mark.usefixtures("one_rank")
def test_code_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile with aot_eager, because Inductor takes a minute longer."""
    monkeypatch.setitem(SPConfig.__init__.__kwdefaults__, "compiler", "aot_eager")
    monkeypatch.setattr(SPConfig.__dataclass_fields__["compiler"], "default", "aot_eager")
    run(page)


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
@pytest.mark.usefixtures("one_rank")
def test_code_runs_with_inductor(page: Path) -> None:
    run(page)
