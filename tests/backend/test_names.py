"""Arguments and weights have the user's names for every form of call."""

from __future__ import annotations

import functools
import linecache
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypedDict, Unpack

import pytest
import torch
import torch.nn.functional as F
from support.parity import error_text
from torch import Tensor, nn
from torch.fx import GraphModule

import sp_compile
from sp_compile import SpError
from sp_compile.lowering.torch_compat import argument_name
from sp_compile.planner.dry_run import split_kwargs
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


class SelfInArgs(Model):
    """The decorator has no parameter `self`."""

    @functools.wraps(Model.forward)
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        return Model.forward(*args, **kwargs)


@pytest.mark.parametrize("in_place", [False, True])
def test_weights_of_a_model_in_args(in_place: bool) -> None:
    run, names = compiled(SelfInArgs(), in_place)
    run(data(), labels=data())
    assert set(names[0]) == WEIGHTS | {"ids", "labels"}


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
    assert report.inputs["ids"] == [1]
    assert "ids dim 1" in str(report)
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
    assert "layers.7.weight" in message.cause
    assert "layers.8" not in message.cause


@pytest.mark.parametrize(("is_scalar", "difference"), [(True, "numbers"), (False, "sizes")])
def test_a_field_separates_numbers_from_sizes(is_scalar: bool, difference: str) -> None:
    """A complex number has parentheses, like the shape of a tensor."""
    sizes = ("(1+2j)", "(1+3j)")
    inputs = [{"scale": InputRecord(size, is_scalar=is_scalar)} for size in sizes]
    messages = [Message(CALL_VERB, "forward", 1, inputs=records) for records in inputs]
    mismatch = find_input_mismatch(messages, [], ComparedInputs(), False)
    assert mismatch is not None
    assert mismatch.code == "SP632"
    assert f"different {difference}" in mismatch.cause


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


class Wrapper(nn.Module):
    """Pass all arguments to another model, as PEFT does."""

    def __init__(self, base: nn.Module | None = None) -> None:
        super().__init__()
        self.base = Base() if base is None else base

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.base(*args, **kwargs)


class Base(nn.Module):
    """A model with arguments that are close to names of options, and with further ones."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, input_ids: Tensor, output: Tensor | None = None, world_size: int = 1, **more: Any) -> Tensor:
        x = self.inner(input_ids).cumsum(1) * world_size
        for value in (output, *more.values()):
            x = x if value is None else x + value
        return x.sum()


def test_arguments_of_a_wrapped_model_are_passed() -> None:
    model = Wrapper().double()
    x = data().double()
    for entry in (sp_compile.explain, sp_compile.verify):
        report = entry(model, input_ids=x, output=x.clone(), world_size=2, bias_term=x.clone(), sp=4)
        assert report.n == 4
    assert report.worst < 1e-9
    report = sp_compile.explain(lambda **batch: model(**batch), input_ids=x, sp=2)
    assert "sequence" in str(report)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"ranks": 8}, "SP102: explain: .*'ranks'.* sp=8"),
        ({"strategy": "ring"}, "SP102: options: .*'strategy'.*'attention'"),
        ({"atention": "ring"}, "SP102: .*'attention'"),
        ({"optimiser": "adam"}, r"SP102: .*'optimiser'"),
    ],
)
@pytest.mark.parametrize("model", [Wrapper, Base])
def test_names_that_no_one_knows_are_refused(model: Callable[[], nn.Module], names: dict[str, Any], words: str) -> None:
    with pytest.raises(SpError, match=words):
        sp_compile.explain(model(), data(), **names)


def test_plan_and_verify_name_their_argument_of_ranks() -> None:
    with pytest.raises(SpError, match=r"SP102: plan: .*'sp'.* ranks=8"):
        sp_compile.plan(Base(), data(), sp=8)
    with pytest.raises(SpError, match=r"SP102: verify: .*'ranks'.* sp=8"):
        sp_compile.verify(Base(), data(), ranks=8)
    with pytest.raises(SpError, match=r"SP102: explain: unknown option 'options'.*by name"):
        sp_compile.explain(Base(), data(), sp=2, options={"attention": "ring"})


NO_DERIVATIVE = "halves has no derivative"


@torch.library.custom_op("first::halves", mutates_args=())
def halves(x: Tensor) -> Tensor:
    return x / 2


@halves.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _no_derivative(ctx: Any, grad: Tensor) -> Tensor:
    raise NotImplementedError(NO_DERIVATIVE)


halves.register_autograd(_no_derivative)


@pytest.mark.parametrize("entry", [sp_compile.explain, sp_compile.verify])
def test_a_program_that_cannot_run_does_not_pass(entry: Callable[..., Any]) -> None:
    base = Base()

    def program(x: Tensor) -> Tensor:
        return halves(base(x))

    def fails() -> tuple[type, str]:
        torch.compiler.reset()
        with pytest.raises(Exception, match=NO_DERIVATIVE) as failure:
            entry(program, data())
        return failure.type, str(failure.value)

    run = torch.compile(program, backend="sp", options={"compiler": "aot_eager"})
    torch.compiler.reset()
    with pytest.raises(Exception, match=NO_DERIVATIVE) as expected:
        run(data())
    assert fails()[0] is expected.type


def test_a_plan_names_the_hardware_and_reads_sizes() -> None:
    with torch.device("meta"):
        model, x = Base(), data()
    plan = sp_compile.plan(model, x, memory="1GB", ranks=2)
    assert "assumes H100 GPUs: attention 650 TFLOP/s, " in str(plan)
    plan = sp_compile.plan(model, x, memory=1e9, ranks=2, cost={"flops": 1e12})
    assert "attention 1 TFLOP/s" in str(plan)
    assert "cost sets flops" in str(plan)
    with pytest.raises(SpError, match=r"SP722: memory: 80\b.*'80GB'"):
        sp_compile.plan(model, x, memory=80)


class Inner(nn.Module):
    """Reads "gain" from its **kwargs, and passes others to functions."""

    def forward(self, x: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Tensor:
        x = shifted_by(x * kwargs.get("gain", 1), **kwargs)
        return F.scaled_dot_product_attention(x, x, x) if labels is None else F.mse_loss(x, labels)


def shifted_by(x: Tensor, summand: float = 0, **_: Any) -> Tensor:
    return x + summand


@pytest.mark.parametrize("name", ["labels", "gain", "summand", "cu_seq_lens_q", "output_attentions"])
def test_arguments_that_a_module_with_kwargs_reads(name: str) -> None:
    options, kwargs = split_kwargs("explain", Wrapper(Inner()), {name: 1})
    assert (options, kwargs) == ({}, {name: 1})


FACTORS = ("alpha", "beta")


class Declared(TypedDict, total=False):
    """Keyword arguments of a model."""

    gain: float


class ClosedModel(nn.Module):
    """Removes names in every way, reads those of a constant, and passes the rest on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.declared = Inner(), DeclaredModel()

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        if "first" in kwargs:
            x = x * kwargs.pop("first")
        factors = {name: kwargs.pop(name, 1) for name in FACTORS}
        self._adjust(values=kwargs)
        kwargs = {k: v for k, v in kwargs.items() if not k.startswith("adapter")}
        kwargs = without_offset(x, **kwargs)
        kwargs.update(scale=2)
        rest = {**kwargs, **factors}
        return self.inner(x, **rest) + self.declared(x, **{k: v for k, v in kwargs.items() if v is not None})

    def _adjust(self, values: dict[str, Any]) -> None:
        values["second"] = 2 * values.get("second", 1)


def without_offset(x: Tensor, **kwargs: Any) -> dict[str, Any]:
    kwargs.pop("offset", x)
    return kwargs


class DeclaredModel(nn.Module):
    """Loops over names that its annotation lists."""

    def forward(self, x: Tensor, **kwargs: Unpack[Declared]) -> Tensor:
        return x * len([*kwargs.values()])


def loop(x: Tensor, **factors: float) -> Tensor:
    for factor in factors.values():
        x = x * factor
    return x


def forward_of(code: str) -> Callable[..., Any]:
    """Return a method of a model, whose source is in a file."""
    lines = "".join(f"    {line}\n" for line in code.splitlines())
    name = f"<forward {code}>"
    source = f"def forward(self, x, **kwargs):\n{lines}"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    scope: dict[str, Any] = {"loop": loop, "torch": torch}
    exec(compile(source, name, "exec"), scope)
    return scope["forward"]


@pytest.mark.parametrize("name", ["first", "alpha", "beta", "second", "offset", "gain", "summand"])
def test_arguments_that_a_wrapper_reads_or_passes_on(name: str) -> None:
    assert split_kwargs("explain", ClosedModel(), {name: 1}) == ({}, {name: 1})
    text = error_text(lambda: split_kwargs("explain", ClosedModel(), {"bogus": 1}))
    assert "SP102" in text


@pytest.mark.parametrize(
    "code",
    [
        "return sum(kwargs.values())",
        "for name, value in kwargs.items():\n    x = x * value\nreturn x",
        "return loop(x, **kwargs)",
        "return self._loop(x, values=kwargs)",
        "return self.other(kwargs)",
        "rest = {k: v for k, v in kwargs.items() if k}\nreturn torch.stack([*rest.values()])",
        "return self.other({k[1:]: v for k, v in kwargs.items()})",
        "for name in self.names:\n    x = x * kwargs[name]\nreturn x",
        "return kwargs",
    ],
)
def test_a_model_that_loops_over_its_arguments_accepts_all_names(code: str) -> None:
    methods = {"forward": forward_of(code), "_loop": lambda self, x, values: loop(x, **values)}
    model = type("Open", (nn.Module,), methods)()
    assert split_kwargs("explain", model, {"bogus": 1}) == ({}, {"bogus": 1})


def test_the_closest_names_are_those_of_the_model() -> None:
    """Also if the name is close to one of an option, here `inputs`."""

    class Named(nn.Module):
        def forward(self, inputs_embeds: Tensor, inputs_embeds_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
            return F.relu(inputs_embeds, **kwargs)

    text = error_text(lambda: split_kwargs("explain", Named(), {"inputs_embedds": 1}))
    assert "SP102" in text
    assert "'inputs_embeds'" in text
    assert "'inputs_embeds_mask'" in text


@pytest.mark.parametrize("name", ["bogus", "lables"])
def test_arguments_that_no_module_reads(name: str) -> None:
    model = Wrapper(Inner())
    assert "SP102" in (text := error_text(lambda: split_kwargs("explain", model, {name: 1})))
    assert ("'labels'" in text) == (name == "lables")
    assert split_kwargs("explain", model, {"kwargs": {name: 1}}) == ({}, {name: 1})
