"""Inductor with a pass on the joint graph: the user's own pass still runs, before it."""

from collections.abc import Callable

import pytest
import torch
from torch._inductor import config

from sp_compile.lowering.torch_compat import joint_compiler


@pytest.mark.parametrize("wrap", [lambda own: own, lambda own: [own]], ids=["one", "list"])
def test_own_pass(wrap: Callable[..., object]) -> None:
    seen: list[str] = []
    compiler = joint_compiler("inductor", lambda gm: seen.append("ours"), None)
    with config.patch(joint_custom_pre_pass=wrap(lambda graph: seen.append("theirs"))):
        torch.compile(lambda x: x.sin(), backend=compiler)(torch.ones(4))
    assert seen == ["theirs", "ours"]
