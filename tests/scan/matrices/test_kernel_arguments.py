"""Calls of kernel functions of packages: every form of arguments, and options that have no equivalent."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.scans.kernel_package import CALLS, attend, fla
from torch import Tensor, nn

import sp_compile
from sp_compile.lowering.scan.attention_kernels import FUNCTIONS, KERNELS, register_kernel
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
    is_exact: bool = True,
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
        ((Q, K, V, BETA, 64, None, False, False, False), {}, r"\bis_exact\b"),
        ((Q, K, V, BETA), {"state_v_first": True}, r"\bstate_v_first\b"),  # chunk_delta_rule ignores it
        ((Q, K, V, BETA), {"gate": Q}, r"\bgate\b"),
        ((Q, K, V), {}, r"\barguments\b"),
        ((Q, K, V, BETA, 64, None, False, False, True, 3), {}, r"\barguments\b"),
    ],
)
def test_what_has_no_equivalent_is_reported(args: Any, kwargs: Any, reason: str) -> None:
    assert re.search(reason, call(*args, **kwargs))


def test_functions_of_users_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users replace functions and methods of packages: a wrapper has the name of the original, as by functools.wraps."""

    class LigerCrossEntropyFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
            raise AssertionError

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad, None

    @functools.wraps(fla.chunk_delta_rule)
    def double(*args: Any, **kwargs: Any) -> Any:
        result, state = fla.chunk_delta_rule(*args, **kwargs)
        return 2 * result, state

    def lose(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        return logits + 7

    LigerCrossEntropyFunction.__module__ = "fla_with_changes_of_tests"
    LigerCrossEntropyFunction.forward = lose  # type: ignore[assignment]
    module: Any = ModuleType(LigerCrossEntropyFunction.__module__)
    module.chunk_delta_rule, module.LigerCrossEntropyFunction = double, LigerCrossEntropyFunction
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def run(q: Tensor) -> Tensor:
        result = module.chunk_delta_rule(q, K, V, BETA)[0]
        loss: Tensor = module.LigerCrossEntropyFunction.apply(result, torch.zeros(1))
        return loss

    compiled = torch.compile(run, backend="sp", options={"compiler": "aot_eager"})
    torch.testing.assert_close(compiled(Q), run(Q))


def test_a_wrapper_drops_what_its_function_does_not_have() -> None:
    out, state = call(Q, K, V, BETA, gate=Q, drops_unknown=True)
    torch.testing.assert_close(out, call(Q, K, V, BETA)[0])
    assert state is None
    assert isinstance(call(Q, K, V, BETA, drops_unknown=True, is_exact=False), str)


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


@contextmanager
def register_for(kernel: str, is_installed: bool) -> Iterator[None]:
    """Use the kernel of the tests' package on the CPU for a block."""
    if is_installed:
        register_kernel(kernel, getattr(fla, kernel), "cpu")
    try:
        yield
    finally:
        FUNCTIONS.pop(kernel, None)


BATCH, LENGTH, HEADS, KEYS, VALUES = 2, 37, 2, 4, 3
BETA_OPTIONS = {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": False}
NORM = {"use_qk_l2norm_in_kernel": True}
V_FIRST = {"state_v_first": True}
# The arguments of layers of flash-linear-attention 0.6.0 in training: names of inputs, and options. All have
# initial_state, output_final_state and cu_seqlens, too. yoco has those of simple_gla, hgrn2 and rodimus those of gla.
LAYERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gated_deltanet": (
        "chunk_gated_delta_rule",
        "q k v g=by_head beta A_log dt_bias=bias",
        {**NORM, **BETA_OPTIONS, **V_FIRST, "use_gate_in_kernel": True},
    ),
    "gated_deltanet of fla 0.5": (
        "chunk_gated_delta_rule",
        "q k v g=log_by_head beta=factor",
        {**NORM, "transpose_state_layout": True},
    ),
    "mom": ("chunk_gated_delta_rule", "q k v g=log_by_head beta=factor", {**NORM, **V_FIRST}),
    "kda": (
        "chunk_kda",
        "q k v g=by_row beta A_log dt_bias=biases",
        {**NORM, **BETA_OPTIONS, **V_FIRST, "use_gate_in_kernel": True, "safe_gate": False, "lower_bound": None},
    ),
    "kda with bounds": (
        "chunk_kda",
        "q k v g=by_row beta A_log dt_bias=biases",
        {
            **NORM,
            **V_FIRST,
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": True,
            "use_gate_in_kernel": True,
            "safe_gate": True,
            "lower_bound": -5.0,
        },
    ),
    "simple_gla": ("chunk_simple_gla", "q k v g=log_by_head", V_FIRST),
    "gla": ("chunk_gla", "q k v g=log_by_row", V_FIRST),
    "multiscale_retention": ("chunk_retention", "q k v", {}),
    "linear_attn": ("chunk_linear_attn", "q k v", {"normalize": False}),
    "comba": ("chunk_comba", "q k v p=by_row g=log_by_head beta=factor", NORM),
    "delta_net": ("chunk_delta_rule", "q k v beta=factor", NORM),
    "rwkv7": (
        "chunk_rwkv7",
        "r=q w=log_by_row k v a=away b=along",
        {"scale": 1.0, "safe_gate": True, "lower_bound": -0.6065306597126334, "chunk_size": 64},
    ),
}


class Layer(nn.Module):
    """Calls a kernel with the arguments of a layer of fla, and an initial and a final state."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kernel, self.names, self.options = LAYERS[layer]
        self.project = nn.Linear(8, HEADS * (3 * KEYS + VALUES + 2)).double()
        shape = (VALUES, KEYS) if {"state_v_first", "transpose_state_layout"} & self.options.keys() else (KEYS, VALUES)
        self.initial = nn.Parameter(torch.randn(BATCH, HEADS, *shape).double())
        self.A_log = nn.Parameter(torch.randn(HEADS).double())
        self.bias = nn.Parameter(torch.randn(HEADS).double())
        self.biases = nn.Parameter(torch.randn(HEADS * KEYS).double())

    def arguments(self, x: Tensor) -> dict[str, Any]:
        """x (B, S, 8) -> the arguments by name."""
        sizes = [KEYS, KEYS, KEYS, VALUES, 1, 1]
        q, k, by_row, v, by_head, beta = self.project(x).unflatten(-1, (HEADS, -1)).split(sizes, -1)
        inputs = {"q": q, "k": k, "v": v, "by_row": by_row, "by_head": by_head.squeeze(-1), "beta": beta.squeeze(-1)}
        inputs.update({"A_log": self.A_log, "bias": self.bias, "biases": self.biases})
        inputs.update({f"log_{name}": F.logsigmoid(inputs[name]) for name in ("by_head", "by_row")})
        inputs.update(factor=inputs["beta"].sigmoid(), away=-F.normalize(k, dim=-1), along=F.normalize(k, dim=-1) / 2)
        pairs = [name.partition("=") for name in self.names.split()]
        chosen = {name: inputs[value or name] for name, _, value in pairs}
        return {**chosen, "initial_state": self.initial, "output_final_state": True, "cu_seqlens": None, **self.options}

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return getattr(fla, self.kernel)(**self.arguments(x))


@pytest.mark.parametrize("documents", [None, [0, 5, LENGTH]])
@pytest.mark.parametrize("is_installed", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
def test_calls_of_layers_of_fla(layer: str, is_installed: bool, documents: list[int] | None) -> None:
    """The stand-in has the values and gradients of the kernel, and calls it correctly where it is installed.

    A row has two documents, for the states of a batch of two rows.
    """
    if is_installed and LAYERS[layer][0] not in KERNELS:
        pytest.skip("runs by arithmetic")
    model, x = Layer(layer), torch.randn(BATCH if documents is None else 1, LENGTH, 8, dtype=torch.float64)
    arguments = model.arguments(x)
    arguments["cu_seqlens"] = None if documents is None else torch.tensor(documents)
    kernel: Callable[..., Any] = getattr(fla, model.kernel)
    stand_in = make_stand_in(model.kernel, inspect.signature(kernel), lambda reason, *_: pytest.fail(reason), False)
    expected = kernel(**arguments)
    CALLS.clear()
    with register_for(model.kernel, is_installed):
        found = stand_in(**arguments)
        torch.testing.assert_close(found, expected)
        cotangents = [torch.randn_like(y) for y in expected]
        leaves = list(model.parameters())
        grads = torch.autograd.grad(found, leaves, cotangents, retain_graph=True, allow_unused=True)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, leaves, cotangents, allow_unused=True))
    assert bool(CALLS) == (is_installed and documents is None)  # states of documents are computed without a kernel


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.sampled(every=1)
def test_layers_of_fla_on_shards(layer: str) -> None:
    x = torch.randn(BATCH, LENGTH, 8, dtype=torch.float64, requires_grad=True)
    model, calls = Layer(layer), []
    for is_installed in (False, True) if model.kernel in KERNELS else (False,):
        CALLS.clear()
        with register_for(model.kernel, is_installed):
            report = sp_compile.verify(model, x, sp=3, seq_dims={"x": 1})
        assert max(error for _, error in report.errors) < 1e-11
        assert not report.fallbacks
        calls.append(len(CALLS))
    assert len(calls) == 1 or calls[1] > calls[0], "the compiled model calls an installed kernel"
