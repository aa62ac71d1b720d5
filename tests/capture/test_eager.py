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
from sp_compile.lowering.torch_compat import EagerReason
from sp_compile.lowering.torch_compat.dynamo import _entered_model
from sp_compile.runtime.eager_fallback import EAGER_CAUSES, EAGER_FIXES, EAGER_WARNING


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


def fallbacks(warnings: pytest.LogCaptureFixture) -> list[tuple[str, str, str]]:
    """Return the name, the fix and the whole text of each warning of an eager fallback."""
    records = [record for record in warnings.records if record.name == "sp_compile.runtime.eager_fallback"]
    assert {record.msg for record in records} <= {EAGER_WARNING}
    return [(record.args[0], record.args[-1], record.getMessage()) for record in records]  # type: ignore[index]


def compiled(module: Any, **how: Any) -> Any:
    options = {"compiler": "eager", "seq_dims": {"x": 1}}
    if not isinstance(module, nn.Module):
        return torch.compile(module, backend="sp", options=options, **how)
    module.compile(backend="sp", options=options, **how)
    return module


@pytest.mark.parametrize(
    ("given", "name", "reason"),
    [
        (nn.Linear(4, 4), "Linear", EagerReason.TORCH_CODE),
        (Looped(), "Looped", EagerReason.GRAPH_BREAK),
        (Disabled(), "Disabled", EagerReason.DISABLED),
        (looped, "looped", EagerReason.GRAPH_BREAK),
    ],
    ids=lambda one: "" if isinstance(one, str | EagerReason) else type(one).__name__,
)
def test_it_warns_once(warnings: pytest.LogCaptureFixture, given: Any, name: str, reason: EagerReason) -> None:
    run = compiled(given)
    for _ in range(2):
        run(torch.ones(2, 3, 4))
    (found,) = fallbacks(warnings)
    assert found[:2] == (name, EAGER_FIXES[reason])
    assert EAGER_CAUSES.get(reason, "graph break in loop") in found[2]  # the latter is Dynamo's own message
    assert ("test_eager.py:" in found[2]) == (name != "Linear")


def test_past_the_recompile_limit(warnings: pytest.LogCaptureFixture) -> None:
    run = compiled(Block(), dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        run(torch.ones(2, 3, 4))
        assert not words(warnings)
        run(torch.ones(2, 5, 4))
    (found,) = fallbacks(warnings)
    assert found[:2] == ("Block", EAGER_FIXES[EagerReason.RECOMPILE_LIMIT])
    assert "recompile limit" in found[2]


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
    (found,) = fallbacks(warnings)
    assert found[:2] == ("Decorated", EAGER_FIXES[EagerReason.RECOMPILE_LIMIT])
    assert "recompile limit" in found[2]


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
