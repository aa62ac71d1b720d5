"""Arguments and weights have the user's names for every form of call."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import sp_compile
from sp_compile import SpError
from sp_compile.lowering.torch_compat import argument_name
from sp_compile.runtime.control.message import CALL_VERB, InputRecord, Message
from sp_compile.runtime.fingerprint import input_names
from sp_compile.runtime.input_checks import ComparedInputs
from sp_compile.runtime.input_mismatch import find_input_mismatch


def handed_on(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a forward with `*args, **kwargs`, like decorators of transformers."""

    @functools.wraps(forward)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    return wrapper


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])
        self.register_buffer("scale", torch.ones(4))

    @handed_on
    def forward(self, ids: Tensor, mask: Tensor | None = None, labels: Tensor | None = None, **options: Any) -> Tensor:
        x = self.blocks[0](ids.cumsum(1)) * self.scale
        for value in (mask, labels, *options.values()):
            x = x if value is None else x + (value["x"] if isinstance(value, dict) else value)
        return x


def data() -> Tensor:
    return torch.randn(2, 8, 4)


def compiled(model: nn.Module, in_place: bool) -> tuple[nn.Module, list[list[str]]]:
    """A model, and where the names of its graphs will be."""
    names: list[list[str]] = []

    def backend(gm: GraphModule, inputs: Any) -> Callable[..., Any]:
        found = [argument_name(n) for n in gm.graph.find_nodes(op="placeholder")]
        assert [one for one in input_names(gm).values() if one] == found
        names.append(found)
        return gm.forward

    torch.compiler.reset()
    if not in_place:
        return torch.compile(model, backend=backend), names
    model.compile(backend=backend)
    return model, names


WEIGHTS = {"blocks.0.weight", "blocks.0.bias", "scale"}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (lambda run: run(ids=data(), labels=data()), {"ids", "labels"}),
        (lambda run: run(data(), data()), {"ids", "mask"}),
        (lambda run: run(data(), labels=data(), bias=data()), {"ids", "labels", "bias"}),
        (lambda run: run(data(), batch={"x": data()}), {"ids", "batch['x']"}),
    ],
)
def test_names_are_those_of_the_signature(call: Callable[..., Any], arguments: set[str], in_place: bool) -> None:
    run, (names) = compiled(Model(), in_place)
    call(run)
    assert set(names[0]) == WEIGHTS | arguments


def test_a_symbol_is_called_by_its_argument() -> None:
    torch.compiler.reset()
    model, names = Model(), []
    run = torch.compile(model, dynamic=True, backend=lambda gm, _: names.extend(map(str, shown(gm))) or gm.forward)
    run(ids=data())
    assert {"ids", "ids.size()[1]"} <= set(names)


def shown(gm: GraphModule) -> list[str]:
    return [argument_name(n) for n in gm.graph.find_nodes(op="placeholder")]


def test_seq_dims_take_the_users_names() -> None:
    report = sp_compile.explain(Model(), ids=data(), labels=data(), sp=2, seq_dims={"ids": 1})
    assert "the sequence is ids dim 1" in str(report)
    with pytest.raises(SpError, match=r"SP236.* \['ids', 'labels'\].*'tokens'"):
        sp_compile.explain(Model(), ids=data(), labels=data(), seq_dims={"tokens": 1})


def test_explain_and_verify_accept_the_models_arguments() -> None:
    model, x = Model().double(), data().double()
    assert sp_compile.verify(model, ids=x, labels=x.clone(), bias=x.clone(), sp=2).worst < 1e-9
    assert "sequence" in str(sp_compile.explain(model, x, kwargs={"labels": x.clone()}, sp=4))


def test_a_misspelled_option_is_no_argument_of_the_model() -> None:
    with pytest.raises(SpError, match=r"SP102: options: .*'atention'.*'attention'"):
        sp_compile.explain(Model(), data(), atention="ring")
    with pytest.raises(SpError, match=r"SP102: options: .*'labels'"):
        sp_compile.explain(nn.Linear(4, 4), data(), labels=data())


def test_of_many_weights_a_few_are_shown() -> None:
    def message_of(rank: int) -> Message:
        names = [f"layers.{i}.weight" for i in range(12)]
        return Message(CALL_VERB, "forward", 1, inputs={name: InputRecord("(4, 4)", f"{rank}") for name in names})

    message = find_input_mismatch(
        [message_of(0), message_of(1)], [], ComparedInputs(arguments=frozenset({"ids"})), False
    )
    assert message is not None
    assert message.code == "SP633"
    assert "layers.7.weight (4, 4) with checksum 0 and 4 more" in message.cause
    assert "layers.8" not in message.cause


def test_other_data_are_explained_by_a_sampler() -> None:
    def message_of(rank: int) -> Message:
        return Message(CALL_VERB, "forward", 1, inputs={"ids": InputRecord("(4,)", f"{rank}")})

    message = find_input_mismatch(
        [message_of(0), message_of(1)], [], ComparedInputs(arguments=frozenset({"ids"})), False
    )
    assert message is not None
    assert message.code == "SP634"


class Found(NamedTuple):
    scores: Tensor
    state: Tensor


@dataclass
class Output(OrderedDict):  # type: ignore[type-arg]
    """An output dataclass like those of transformers."""

    loss: Tensor
    scores: Tensor

    def __post_init__(self) -> None:
        for one in fields(self):
            self[one.name] = getattr(self, one.name)


class Returns(nn.Module):
    """A model that returns named results in one of several forms."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Any:
        hidden = x.cumsum(1)
        for _ in range(3):
            hidden = hidden.sin() * 2
        loss = hidden.mean()
        match self.how:
            case "tuple":
                return loss, hidden
            case "dict":
                return {"loss": loss, "scores": hidden}
            case "dataclass":
                return Output(loss, hidden)
            case "named tuple":
                return Found(hidden, loss)
            case _:
                return loss, {"scores": hidden}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("how", "name"),
    [("tuple", "hidden"), ("dict", "scores"), ("dataclass", "scores"), ("named tuple", "scores"), ("nested", "hidden")],
)
def test_results_have_the_models_names(how: str, name: str) -> None:
    for outputs in ("lazy", {name: "lazy", "loss" if how != "named tuple" else "state": "gather"}):
        report = sp_compile.explain(Returns(how), data(), sp=2, outputs=outputs)
        assert report.sharded_outputs == [name]
    assert sp_compile.explain(Returns(how), data(), sp=2, outputs={"hidden": "lazy"}).sharded_outputs == [name]
    with pytest.raises(SpError, match=f"SP237.*'{name}'.*'hiden'"):
        sp_compile.explain(Returns(how), data(), sp=2, outputs={"hiden": "lazy"})
