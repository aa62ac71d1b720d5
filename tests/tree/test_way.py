"""Follow the calls of `backend.sp`: capture is among the first files, and no file is entered repeatedly."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from support.ranks import Ranks, mesh
from tree.test_layers import FILES, ROOT

from sp_compile import backend

PRODUCT = {str(file) for file in FILES.values()}
VOCABULARY = {
    "passes/graph/sizes.py",
    "passes/graph/call.py",
    "passes/sharding/placement.py",
    "passes/sharding/rule.py",
    "lowering/base/frames.py",  # placements as operators take them
}
PASS_LOOP = "passes/base.py"  # calls each pass of a list, also several of one file
Step = tuple[str, str]  # a file, and a function or a class of it


@cache
def in_product(file: str) -> str:
    """Return the path of a file in the repository, "" if it is not the product's."""
    found = Path(file).resolve()
    return found.relative_to(ROOT).as_posix() if str(found) in PRODUCT else ""


def place(frame: FrameType) -> Step | None:
    """Return the file and the function or class of a call of the product, or None."""
    code = frame.f_code
    file = in_product(code.co_filename)
    return (file, code.co_qualname.partition(".")[0]) if file and not code.co_name.startswith("<") else None


def follow_calls(run: Callable[[], Any]) -> list[tuple[Step, Step]]:
    """Return the steps of `backend.sp` in the order of their first calls, each with its caller."""
    found: dict[Step, Step] = {}

    def profile(frame: FrameType, event: str, _: Any) -> None:
        step = place(frame) if event == "call" else None
        if step is None or step in found:
            return
        above, caller = frame.f_back, None
        while above is not None and caller is None:
            above, caller = above.f_back, place(above)
        if step == ("sp_compile/backend.py", "sp") or caller in found:
            found[step] = caller or step

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
    return list(found.items())


def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    q = (x @ w).unflatten(-1, (4, 4)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2).sin()


def path_of(run: Callable[..., torch.Tensor], options: Mapping[str, Any]) -> list[tuple[Step, Step]]:
    """Return the steps of one rank: those of a compilation and of a first call."""
    compiled = torch.compile(run, backend=backend.sp, options={"compiler": "eager", "cost": {}, **options})
    return follow_calls(lambda: compiled(torch.randn(2, 8, 16), torch.randn(16, 16)))


def path_with_sequence() -> list[tuple[Step, Step]]:
    return path_of(program, {"mesh": mesh()})


def path_with_groups() -> list[tuple[Step, Step]]:
    group = mesh().get_group()
    options = {"compiler": "aot_eager"}  # which runs the passes on collectives
    return path_of(lambda x, w: funcol.all_reduce(x @ w, "sum", group).sin(), options)


both_programs = pytest.mark.parametrize("path", [path_with_sequence, path_with_groups])


@both_programs
def test_capture_is_among_the_first_five_files(ranks: Ranks, path: Callable[[], list[tuple[Step, Step]]]) -> None:
    for steps in ranks.run(2, path):
        files = list(dict.fromkeys(file for (file, _), _ in steps))
        assert any(file.startswith("passes/capture/") for file in files[:5]), files[:5]


@both_programs
def test_no_file_is_entered_repeatedly(ranks: Ranks, path: Callable[[], list[tuple[Step, Step]]]) -> None:
    for steps in ranks.run(2, path):
        files = list(dict.fromkeys(file for (file, _), _ in steps))
        entered = [file for (file, _), (caller, _) in steps if caller not in (file, PASS_LOOP)]
        entered = [file for file in entered if file not in VOCABULARY]
        often = {file: entered.count(file) for file in entered if entered.count(file) > 6}
        assert not often
        assert len(files) > 50  # the path has been followed
