"""Eager fallbacks of code compiled with backend="sp": one warning with the reason and a fix."""

from __future__ import annotations

import functools
import logging
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_compile.lowering.base import warn
from sp_compile.lowering.torch_compat.dynamo import _entered_model


class Block(nn.Module):
    """One graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


class Broken(Block):
    """A model of two graphs: a graph break is not an eager fallback."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        torch._dynamo.graph_break()
        return x.relu()


class Looped(Block):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.layer(x)
            torch._dynamo.graph_break()
        return x


class Disabled(Block):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def looped(x: Tensor) -> Tensor:
    for _ in range(2):
        x = x + 1
        torch._dynamo.graph_break()
    return x


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    torch._dynamo.reset()
    monkeypatch.setattr(warn, "_warned", set())
    caplog.set_level(logging.WARNING, "sp_compile.runtime.eager_fallback")
    return caplog


def words(warnings: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in warnings.records if record.name == "sp_compile.runtime.eager_fallback"]


def compiled(module: Any, **how: Any) -> Any:
    options = {"compiler": "eager", "seq_dims": {"x": 1}}
    if not isinstance(module, nn.Module):
        return torch.compile(module, backend="sp", options=options, **how)
    module.compile(backend="sp", options=options, **how)
    return module


@pytest.mark.parametrize(
    ("given", "name", "reason", "advice"),
    [
        (nn.Linear(4, 4), "Linear", "defined in a file of torch", "in the forward of your own module"),
        (Looped(), "Looped", "graph break in loop", "TORCH_LOGS=graph_breaks"),
        (Disabled(), "Disabled", "torch.compiler.disable", "Remove torch.compiler.disable"),
        (looped, "looped", "graph break in loop", "fullgraph=True"),
    ],
    ids=lambda one: "" if isinstance(one, str) else type(one).__name__,
)
def test_it_warns_once(warnings: pytest.LogCaptureFixture, given: Any, name: str, reason: str, advice: str) -> None:
    run = compiled(given)
    for _ in range(2):
        run(torch.ones(2, 3, 4))
    (one,) = words(warnings)
    assert one.startswith(f"{name} falls back to eager")
    assert reason in one
    assert advice in one
    assert ("test_eager.py:" in one) == (name != "Linear")


def test_past_the_recompile_limit(warnings: pytest.LogCaptureFixture) -> None:
    run = compiled(Block(), dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        run(torch.ones(2, 3, 4))
        assert not words(warnings)
        run(torch.ones(2, 5, 4))
    (one,) = words(warnings)
    assert "Block falls back to eager" in one
    assert "recompile limit exceeded. Run with TORCH_LOGS=recompiles" in one


def decorated(forward: Any) -> Any:
    @functools.wraps(forward)
    def around(*args: Any) -> Any:
        return forward(*args)

    return around


class Decorated(Block):
    """A model with a decorated forward, as in transformers."""

    forward = decorated(Block.forward)


def test_the_limit_of_a_decorated_forward(warnings: pytest.LogCaptureFixture) -> None:
    """It is no torch.compiler.disable, though the code that Dynamo left is not the module's own."""
    run = compiled(Decorated(), dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        run(torch.ones(2, 3, 4))
        run(torch.ones(2, 5, 4))
    (one,) = words(warnings)
    assert "Decorated falls back to eager" in one
    assert "recompile limit exceeded. Run with TORCH_LOGS=recompiles" in one


def test_a_callback_of_the_garbage_collection_was_not_compiled() -> None:
    """A callback may run between torch.compile's wrapper and the wrapped function, and must not be mistaken for it."""
    wrapper = torch.compile(looped, backend="eager").__code__
    caller: Any = SimpleNamespace(f_code=wrapper, f_locals={"fn": looped}, f_back=None)
    assert _entered_model(looped.__code__, caller) == "looped"
    assert _entered_model(weakref.WeakKeyDictionary.__init__.__code__, caller) is None


@pytest.mark.parametrize("module", [Block(), Broken()], ids=lambda one: type(one).__name__)
def test_compiled_code_does_not_warn(warnings: pytest.LogCaptureFixture, module: nn.Module) -> None:
    module.register_forward_pre_hook(torch.compiler.disable(lambda module, args: None))
    compiled(module)(torch.ones(2, 3, 4))
    plain = torch.compile(looped, backend="eager")
    plain(torch.ones(2))
    assert not words(warnings)
