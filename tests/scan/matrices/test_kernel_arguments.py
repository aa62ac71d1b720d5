"""Calls of kernel functions of packages: every form of arguments, and options that have no equivalent."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from support.scans.kernel_package import attend
from torch import Tensor

from sp_compile.passes.capture.stand_ins.kernel_stand_ins import make_stand_in


def torch_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = True,
) -> Any:
    """A function with the names and the order of arguments of transformers, and an option without an equivalent."""


def operands() -> list[Tensor]:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 7, 2, 4, dtype=torch.float64) / 2
    return [q, k, v, torch.rand(1, 7, 2, dtype=torch.float64), torch.randn(1, 2, 4, 4, dtype=torch.float64)]


def call(*args: Any, drops_unknown: bool = False, **kwargs: Any) -> Any:
    """Return the results of the stand-in, or the reason to run the original function."""
    signature = inspect.signature(torch_delta_rule)
    stand_in = make_stand_in("chunk_delta_rule", signature, lambda reason, *_: reason, drops_unknown)
    return stand_in(*args, **kwargs)


Q, K, V, BETA, INITIAL = operands()
FORMS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "positions": ((Q, K, V, BETA, 64, INITIAL, True), {}),
    "positions with all": ((Q, K, V, BETA, 16, INITIAL, True, False, True), {}),
    "names": ((), {"value": V, "beta": BETA, "key": K, "query": Q, "initial_state": INITIAL, "output_final_state": 1}),
    "mixed": ((Q, K), {"beta": BETA, "value": V, "initial_state": INITIAL, "output_final_state": True}),
    "names of the kernel": ((Q, K, V), {"beta": BETA, "initial_state": INITIAL, "output_final_state": True}),
    "an option of another version": (
        (Q, K, V, BETA, 64, INITIAL, True),
        {"scale": None, "cu_seqlens": None, "head_first": False},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_call(form: str) -> None:
    args, kwargs = FORMS[form]
    expected = attend(Q, K, V, torch.zeros_like(V[..., :1]), BETA, None, None, None, INITIAL, 0.5)
    for x, y in zip(call(*args, **kwargs), expected, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    ("args", "kwargs", "reason"),
    [
        ((Q, K, V, BETA, 64, None, False, False, False), {}, r"\bstate_v_first\b"),
        ((Q, K, V, BETA), {"gate": Q}, r"\bgate\b"),
        ((Q, K, V), {}, r"\barguments\b"),
        ((Q, K, V, BETA, 64, None, False, False, True, 3), {}, r"\barguments\b"),
    ],
)
def test_what_has_no_equivalent_is_reported(args: Any, kwargs: Any, reason: str) -> None:
    assert re.search(reason, call(*args, **kwargs))


def test_a_wrapper_drops_what_its_function_does_not_have() -> None:
    out, state = call(Q, K, V, BETA, gate=Q, drops_unknown=True)
    torch.testing.assert_close(out, call(Q, K, V, BETA)[0])
    assert state is None
    assert isinstance(call(Q, K, V, BETA, drops_unknown=True, state_v_first=False), str)


def test_the_last_state_has_a_gradient_in_plain_torch_only() -> None:
    def scan(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, return_last_state: bool = False) -> Any:
        """A function with arguments of transformers' selective scan."""

    torch.manual_seed(0)
    u, delta, vectors = torch.rand(2, 3, 5, requires_grad=True), torch.rand(2, 3, 5), torch.rand(2, 4, 5)
    for is_wrapper in (False, True):
        stand_in = make_stand_in("selective_scan_fn", inspect.signature(scan), lambda reason, *_: reason, is_wrapper)
        out, state = stand_in(u, delta, -torch.rand(3, 4), vectors, vectors, return_last_state=True)
        assert out.requires_grad
        assert state.requires_grad == is_wrapper
