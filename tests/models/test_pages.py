"""The code of README.md and of docs/ runs as it stands: a page's blocks in order, in one namespace, on one rank."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.docs.pages import PAGES, ROOT, code_of

from sp_compile import SPConfig

ON_ONE_RANK = {  # what stands for what is written for many ranks, and a GPU
    "dist.init_process_group()": "pass",
    'init_device_mesh("cuda", (2, 4)': 'init_device_mesh("cpu", (1, 1)',
}


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run(page: Path) -> None:
    """A page's blocks; README.md takes a model and its arguments for granted."""
    DecoderLM = runpy.run_path(str(ROOT / "examples" / "models.py"))["DecoderLM"]
    torch.manual_seed(0)
    ids = torch.randint(0, 256, (1, 24))
    names = {"model": DecoderLM(dim=32, layers=1, heads=8), "input_ids": ids, "labels": ids}
    for number, block in enumerate(code_of(page)):
        for many, alone in ON_ONE_RANK.items():
            block = block.replace(many, alone)
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)


WITH_CODE = [page for page in PAGES if code_of(page)]
LONG = {"start", "scans", "options"}  # tests/models/test_recipes.py starts the first one as a newcomer would


@pytest.mark.parametrize("page", [p for p in WITH_CODE if p.stem not in LONG], ids=lambda page: page.stem)
@pytest.mark.usefixtures("one_rank")
def test_code_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each rank compiles is not the matter, and Inductor takes a minute longer."""
    monkeypatch.setitem(SPConfig.__init__.__kwdefaults__, "compiler", "aot_eager")
    monkeypatch.setattr(SPConfig.__dataclass_fields__["compiler"], "default", "aot_eager")
    run(page)


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
@pytest.mark.usefixtures("one_rank")
def test_code_runs_with_inductor(page: Path) -> None:
    run(page)
