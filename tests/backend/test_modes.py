"""`torch.compile(mode=...)` with backend="sp": Inductor's settings, errors of refused modes, and operators outside of CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._functorch import config as functorch_config
from torch._inductor import config
from torch._inductor.utils import is_cudagraph_unsafe_fx_node
from torch.fx import Graph

import sp_compile
from sp_compile.lowering.base.library import COMPOSITES

REPLAYED = """
add_into from_bytes grad_token local_affine_scan local_affine_total local_extremes local_linear_scan
local_linear_scan_grads local_linear_total local_scan merge_into merge_to pack pack_by_owner rank to_bytes
""".split()
NEVER_REPLAYED = """
add_rows_into add_rows_to add_stored_grad attend attend_backward attend_backward_parts balance_rows balance_tables local_attention_kernel
local_attention_kernel_backward offload offloaded pieces
reload reloaded run_tiles shared
""".split()


def test_operators_in_cuda_graphs() -> None:
    """Every opaque operator is in exactly one list, and Inductor splits CUDA graphs at the second."""
    found: dict[bool, list[str]] = {True: [], False: []}
    names = (name.removeprefix("sp::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("sp::"))
    for name in sorted(names):
        op = getattr(torch.ops.sp, name).default
        if op not in COMPOSITES:
            found[is_cudagraph_unsafe_fx_node(Graph().call_function(op))].append(name)
    assert found == {True: NEVER_REPLAYED, False: REPLAYED}


def settings_of(mode: str | None, **options: Any) -> tuple[bool, bool]:
    """Return Inductor's settings (autotuning, padding of strides) for one rank's graph."""
    seen: list[tuple[bool, bool]] = []

    def look(graph: Graph) -> None:
        seen.append((config.max_autotune, config.comprehensive_padding))

    def both(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return sp_compile.backend.sp(gm, inputs, mode=mode, options=options)  # torch.compile takes one of them

    torch._dynamo.reset()
    uncached = config.patch(joint_custom_pre_pass=look, fx_graph_cache=False)
    with uncached, functorch_config.patch(enable_autograd_cache=False), torch.no_grad():
        run = torch.compile(torch.sin, backend=both if options else "sp", mode=None if options else mode)
        torch.testing.assert_close(run(torch.ones(4)), torch.ones(4).sin())
    return seen[0]


@pytest.mark.parametrize(
    ("mode", "autotune"), [(None, False), ("default", False), ("max-autotune-no-cudagraphs", True)]
)
def test_settings(mode: str | None, autotune: bool) -> None:
    assert settings_of(mode) == (autotune, False)
    assert not config.max_autotune


@pytest.mark.parametrize(
    ("mode", "options", "words"),
    [
        ("reduce-overhead", {}, ["SP108: mode=", "'reduce-overhead'"]),
        ("max-autotune", {}, ["SP108: mode=", "'max-autotune'"]),
        ("max-autotun", {}, ["SP103: mode: ", "'max-autotun'", "'max-autotune'"]),
        ("default", {"compiler": "aot_eager"}, ["SP107: mode='default'", "compiler='aot_eager'"]),
    ],
)
def test_refused(mode: str, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(Exception, match="mode") as caught:
        settings_of(mode, **options)
    assert all(word in str(caught.value) for word in words), str(caught.value)
