"""Inductor with a pass on the joint graph: the user's own pass still runs, before it. Its code for CPUs is corrected."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch.nn import functional

from sp_compile.lowering.torch_compat import joint_compiler


@pytest.mark.parametrize("wrap", [lambda own: own, lambda own: [own]], ids=["one", "list"])
def test_own_pass(wrap: Callable[..., object]) -> None:
    seen: list[str] = []
    compiler = joint_compiler("inductor", lambda gm: seen.append("ours"), None)
    with config.patch(joint_custom_pre_pass=wrap(lambda graph: seen.append("theirs"))):
        torch.compile(lambda x: x.sin(), backend=compiler)(torch.ones(4))
    assert seen == ["theirs", "ours"]


def multiply_padded(x: Tensor) -> Tensor:
    """Reduce over a loop that Inductor vectorizes, beside an outer one, with a loop between them."""
    gelu = (x * 0.5) * (torch.erf(x * 0.5**0.5) + 1)
    missing = x.shape[2] - x.shape[1]
    rows = functional.pad(gelu, (0, 0, 0, 0, 0, missing), value=0.5)
    return rows @ functional.pad(gelu.permute(3, 2, 1, 0), (0, 0, 0, missing), value=0.5)


def test_a_reduction_with_a_short_last_vector_stores_its_elements_only() -> None:
    """Inductor alone stores a whole vector: it overwrites elements, and the heap after the result (pytorch#196681)."""
    torch.manual_seed(0)
    x = torch.randn(1, 8, 66, 66).contiguous(memory_format=torch.channels_last)  # vectors have 4, 8 or 16 elements
    torch.testing.assert_close(torch.compile(multiply_padded, backend="sp")(x), multiply_padded(x))
