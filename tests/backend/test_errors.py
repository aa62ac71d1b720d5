"""Refused programs: a readable SpError on every rank, and no rank hangs."""

import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import ranks as worker
from support.parity import Decoder, Sums, build, error_text, sp, text
from support.ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule

import sp_compile
from sp_compile.lowering.base.errors import CaptureError, first_called_frame
from sp_compile.passes.capture import uncaptured
from sp_compile.passes.capture.uncaptured import wrap_failures
from sp_compile.runtime import compile_failure

ALL = 2


@pytest.fixture(autouse=True)
def _forget() -> None:
    torch._dynamo.reset()


def rank() -> int:
    return dist.get_rank()


def other_length() -> str:
    run = sp(build(layers=1), mesh=worker.mesh())
    return error_text(lambda: run(*text(12 + rank())))


def other_batch() -> str:
    run = sp(build(layers=1), mesh=worker.mesh())
    return error_text(lambda: run(*text(12, batch=1 + rank())))


def other_model() -> str:
    run = sp(build(layers=1 + rank()), mesh=worker.mesh())
    return error_text(lambda: run(*text(12)))


class ReadsItsRank(Decoder):
    def hidden(self, ids: Tensor) -> Tensor:
        x = super().hidden(ids)
        return x.sin() if rank() else x


def other_code() -> str:
    run = sp(build(ReadsItsRank, layers=1), mesh=worker.mesh())
    return error_text(lambda: run(*text(12)))


class OptionalLabels(Decoder):
    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.hidden(ids).sum() if labels is None else super().forward(ids, labels)


def labels_on_one() -> str:
    run = sp(build(OptionalLabels, layers=1), mesh=worker.mesh())
    ids, labels = text(12)
    return error_text(lambda: run(ids, labels) if rank() == 0 else run(ids))


def fails_on_one() -> str:
    def compiler(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        if rank() == 1:
            raise MemoryError("no memory for the code")
        return gm.forward

    run = sp(build(layers=1), mesh=worker.mesh(), compiler=compiler)
    return error_text(lambda: run(*text(12)))


def typo_on_one() -> str:
    options = {"mesh": worker.mesh(), **({"atention": "gather"} if rank() == 1 else {})}
    run = sp(build(layers=1), **options)
    return error_text(lambda: run(*text(12)))


def local_with_a_break() -> str:
    run = sp(build(Breaks, layers=1), mesh=worker.mesh(), outputs="local")
    return error_text(lambda: run(*text(12)))


class Breaks(Decoder):
    def hidden(self, ids: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().hidden(ids)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "code", "words"),
    [
        (other_length, "SP632", ["rank 1: ids (2, 13)"]),
        (other_batch, "SP632", ["ids (2, 12)", "ids (1, 12)"]),
        (other_model, "SP631", ["blocks.1.norm1.weight"]),
        (other_code, "SP631", ["sin", "return x.sin() if rank() else x"]),
        (labels_on_one, "SP631", ["labels (2, 12)", "rank 1: labels"]),
        (fails_on_one, "SP607: rank 1", ["MemoryError: no memory for the code"]),
        (local_with_a_break, "SP231: rank 0, 1", ["outputs='local'"]),
        (typo_on_one, "SP102: rank 1", ["'atention'", "'attention'"]),
    ],
    ids=lambda x: x.__name__ if callable(x) else "",
)
def test_every_rank_raises(ranks: Ranks, case: Callable[[], str], code: str, words: list[str]) -> None:
    messages = ranks.run(ALL, case, timeout=60)
    assert len(set(messages)) == 1
    assert messages[0].startswith(f"{code}: ")
    for word in words:
        assert word in messages[0], messages[0]


def with_options(options: dict[str, Any]) -> str:
    return error_text(lambda: sp(build(layers=1), **options)(*text(8)))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ({"mode": "max-autotune"}, "SP101: options", ["'mode'"]),
        ({"param_grad": "reduce"}, "SP102: options", ["'param_grad'", "'param_grads'"]),
        ({"attention": "torus"}, "SP103: attention", ["'auto', 'gather', 'hybrid', 'ring', 'ulysses'", "'torus'"]),
        ({"layout": "zig"}, "SP103: layout", ["'zig'", "'zigzag'"]),
        ({"attention": "ulyses"}, "SP103: attention", ["'ulyses'", "'ulysses'"]),
        ({"outputs": "global"}, "SP103: outputs", ["'gather', 'local'"]),
        ({"seq_dims": 1}, "SP103: seq_dims", ["1"]),
        ({"seq_dims": {"tokens": 1}}, "SP236: seq_dims", ["'tokens'", "ids", "labels"]),
        ({"seq_dims": {-1: 1}}, "SP236: seq_dims", ["-1", "ids", "labels"]),
        ({"seq_dims": {-5: 1}}, "SP236: seq_dims", ["-5", "ids", "labels"]),
        ({"seq_dims": {"ids": 2}}, "SP303: seq_dims", ["ids", "2"]),
        ({"activation_memory_budget": 2}, "SP103: activation_memory_budget", ["2"]),
        ({"activation_memory_budget": "half"}, "SP103: activation_memory_budget", ["'half'"]),
        ({"check_every": "often"}, "SP103: check_every", ["'often'"]),
        ({"mesh": "sp"}, "SP111: mesh", ["str"]),
        ({"compiler": "inductr"}, "SP104: compiler", ["'inductr'", "'inductor'"]),
    ],
    ids=lambda x: "-".join(f"{k}" for k in x) if isinstance(x, dict) else "",
)
def test_options(options: dict[str, Any], code: str, words: list[str]) -> None:
    message = with_options(options)
    assert message.startswith(f"{code}: ")
    for word in words:
        assert word in message, message


def wrong_meshes() -> list[str]:
    mesh = worker.mesh2d(2, 2)
    outside = DeviceMesh("cpu", [0, 1], mesh_dim_names=("sp",))
    messages = [with_options({"mesh": mesh, "mesh_dim": "tp"})]
    messages.append(with_options({"mesh": mesh._flatten("all"), "mesh_dim": "sp"}))
    unnamed = DeviceMesh("cpu", [[0, 1], [2, 3]])
    messages.append(with_options({"mesh": unnamed}))
    if rank() > 1:
        messages.append(with_options({"mesh": outside}))
    return messages


def test_meshes(ranks: Ranks) -> None:
    for r, messages in enumerate(ranks.run(4, wrong_meshes, timeout=60)):
        assert re.match(r"SP113: mesh: .*'tp'", messages[0])
        assert re.match(r"SP114: mesh: .*'sp'.*\('all',\)", messages[1])
        assert re.match(r"SP113: mesh: .*'sp'.*\b2\b", messages[2])
        if r > 1:
            assert re.match(rf"SP112: mesh: .*\({r}\)", messages[3])


def no_sequence() -> str:
    run = sp(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), mesh=worker.mesh())
    return error_text(lambda: run(torch.randn(3, 4)))


def test_no_sequence(ranks: Ranks) -> None:
    messages = ranks.run(2, no_sequence, timeout=60)
    assert messages[0] == messages[1]
    assert "SP301" in messages[0]
    assert "'args[0]'" in messages[0]


class Gathers(Decoder):
    def hidden(self, ids: Tensor) -> Tensor:
        x = super().hidden(ids)
        return x.sort(dim=1).values  # the line that the error has to show


def forbids() -> str:
    run = sp(build(Gathers, layers=1), mesh=worker.mesh(), fallback="error")
    return error_text(lambda: run(*text(12)))


def test_fallback_error_names_node_line_and_shapes(ranks: Ranks) -> None:
    messages = ranks.run(2, forbids, timeout=60)
    assert messages[0] == messages[1]
    where = ("test_errors.py", "the line that the error has to show")
    for word in ("SP305", "sort", *where, "[2, 12, 16]"):
        assert word in messages[0], messages[0]


def test_an_error_is_raised_at_every_call() -> None:
    run = sp(build(layers=1), attention="torus")
    for _ in range(2):
        with pytest.raises(sp_compile.SpError, match=r"SP103: attention: .*'torus'"):
            run(*text(8))


def with_other_values(what: str) -> str:
    """One rank has other weights, or other tokens: the loss would be that of a mixture."""
    rank = dist.get_rank()
    torch.manual_seed(rank if what == "weights" else 0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))
    torch.manual_seed(rank if what == "tokens" else 0)
    run = torch.compile(model, backend="sp", options={"compiler": "aot_eager", "mesh": worker.mesh(2)})
    try:
        run(torch.randint(0, 16, (1, 8)))
    except sp_compile.SpError as error:
        return str(error)
    return "no error"


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("what", ["weights", "tokens"])
def test_ranks_with_other_values_all_raise(ranks: Ranks, what: str) -> None:
    for message in ranks.run(2, with_other_values, what):
        assert {"weights": "SP642: ", "tokens": "SP634: "}[what] in message
        assert "checksum" in message


def test_a_constant_on_the_meta_device() -> None:
    def attend(x: Tensor) -> Tensor:
        x = x + torch.tensor([1.0], device=x.device)
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    report = sp_compile.explain(attend, torch.zeros(2, 3, 8, 4, device="meta"), sp=2)
    assert report.attention


class LongFailure(Exception):
    """An error with the output of another compiler."""


def fails_at_cumsum(gm: GraphModule, inputs: list[Any]) -> Any:
    for node in gm.graph.nodes:
        if "scan" in node.name or "cumsum" in node.name:
            raise LongFailure("the compiler failed\n" + "command\n" * 60 + "code.cpp:3: error: no such function\n")
    return gm.forward


def test_a_failure_of_the_compiler_is_short_and_has_the_users_line(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(compile_failure.tempfile, "gettempdir", lambda: str(tmp_path))
    run = sp(build(Sums), compiler=fails_at_cumsum)
    with pytest.raises(sp_compile.SpError) as failure:
        run(torch.ones(2, 8, 16, dtype=torch.float64))
    first, *others = str(failure.value).splitlines()
    assert re.match(r"SP243: Sums at support/parity.py:\d+: .*support/parity.py:\d+: .*LongFai", first)
    assert first.endswith("LongFailure: the compiler failed")
    assert others[0] == "code.cpp:3: error: no such function."
    assert len(others) == 2
    (file,) = tmp_path.rglob("rank0.txt")
    assert str(file.parent) in others[1]
    text = file.read_text()
    assert text.count("command\n") == 60
    assert "in fails_at_cumsum" in text
    shown = "".join(traceback.format_exception(failure.value))
    assert shown.count("command") <= 1  # of the source lines


def test_a_short_failure_keeps_its_type_and_names_the_line() -> None:
    def fails(gm: GraphModule, inputs: list[Any]) -> Any:
        for node in gm.graph.nodes:
            if node.op == "call_function":
                raise KeyError(node.name)

    with pytest.raises(KeyError) as failure:
        sp(build(Sums), compiler=fails)(torch.ones(2, 8, 16, dtype=torch.float64))
    assert any("compiling support/parity.py:" in note for note in failure.value.__notes__)


def test_a_failure_inside_of_a_pass_has_the_users_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uncaptured, "raises_internal_errors", False)
    gm = torch.fx.symbolic_trace(lambda x: x.cumsum(1))
    node = next(iter(gm.graph.find_nodes(op="call_method")))
    node.meta["stack_trace"] = '  File "model.py", line 12, in forward\n    return x.cumsum(1)\n'
    match = r"SP213: .*AssertionError: broken, .*model.py:12: return x.cumsum\(1\)"
    with pytest.raises(CaptureError, match=match), wrap_failures():
        _fail_at(node)


def test_a_program_is_named_by_a_frame_of_the_user() -> None:
    """Also if other traces are shorter, and have frames of torch alone."""
    own = ["/home/user/model.py", "/home/user/layers.py"]
    torch_file = torch.nn.functional.__file__
    inside, through, direct = (
        "".join(f'  File "{file}", line {line}, in call\n    x\n' for line, file in enumerate(files, 1))
        for files in ([torch_file] * 2, [torch_file] * 3 + own, [torch_file, *own])
    )
    assert first_called_frame([inside, through]) == "call at user/model.py:4"
    assert first_called_frame([inside, through, direct]) == "call at user/model.py:2"
    assert first_called_frame(["", inside]) == "call at nn/functional.py:1"
    assert first_called_frame([""]) == ""


def test_tests_see_a_failure_inside_of_a_pass() -> None:
    """The program would run unsplit and pass each comparison with a single device."""
    with pytest.raises(AssertionError, match="broken"), wrap_failures():
        _fail_at(torch.fx.Graph().placeholder("x"))


def _fail_at(node: torch.fx.Node) -> None:
    raise AssertionError("broken\nin a pass")
