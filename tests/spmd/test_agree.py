"""Comparisons of ranks before a run, and options that must not be ignored; no processes needed."""

import math
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from support.variants.tracing_exchanges import one_of
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import sp_compile
from sp_compile.lowering.base.ranks import Ranks, resolve
from sp_compile.lowering.collectives import checksums
from sp_compile.lowering.torch_compat import FakeTensorMode, use_real_tensors
from sp_compile.runtime import fingerprint as spmd_fingerprint
from sp_compile.runtime.agreement import is_close
from sp_compile.runtime.control.message import CALL_VERB, EarlierValue, FieldValue, Message, hash_text
from sp_compile.runtime.fingerprint import exchange_digest, graph_digest
from sp_compile.runtime.settings_digest import FUNCTORCH, INDUCTOR, mode_text, settings_fields


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (4, 2)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q).sum()


class Scaled(Attention):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.tensor([self.factor], dtype=x.dtype))


def printed(model: nn.Module, dtype: torch.dtype) -> int:
    x = torch.randn(1, 8, 8, dtype=dtype)
    return graph_digest(sp_compile.parallelize(torch.export.export(model, (x,)), sp=2)).digest


def test_fingerprint_sees_dtypes_and_constants() -> None:
    assert printed(Attention(), torch.float32) == printed(Attention(), torch.float32)
    assert printed(Attention(), torch.float32) != printed(Attention(), torch.float64)
    assert printed(Scaled(1.0), torch.float32) != printed(Scaled(2.0), torch.float32)


def one_op(size: int, device: str, group: str = "") -> int:
    """Return the digest of x + table on a device, with `size` zeros in the table, and an all-reduce over a group."""
    graph = torch.fx.Graph()
    x, table = graph.placeholder("x"), graph.get_attr("table")
    made = graph.call_function(torch.ops.aten.empty.memory_format, ([2],), {"device": torch.device(device)})
    total = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (made, "sum", group))
    graph.output((graph.call_function(torch.ops.aten.add.Tensor, (x, table)), total))
    table = torch.ones(100).masked_fill(torch.arange(100) < size, 0.0)
    return graph_digest(torch.fx.GraphModule({"table": table}, graph)).digest


def test_fingerprint_ignores_values_of_one_rank() -> None:
    assert one_op(3, "cuda:0") == one_op(3, "cuda:1") != one_op(3, "cpu")
    assert one_op(3, "cpu") != one_op(4, "cpu")
    with one_of(2):
        mine, other = dist.group.WORLD.group_name, dist.new_group([0]).group_name
        assert one_op(3, "cpu", mine) == one_op(3, "cpu", other) != one_op(3, "cpu", "none")


def capture_graph(f: Callable[[Tensor], Tensor]) -> torch.fx.GraphModule:
    """Return Dynamo's graph of a function."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    torch.compile(f, backend=backend, fullgraph=True)(torch.ones(2, requires_grad=True))
    return graphs[0]


def test_digest_has_the_ops_of_checkpoints() -> None:
    sin, cos = (capture_graph(lambda x, op=op: checkpoint(op, x, use_reentrant=False)) for op in (torch.sin, torch.cos))
    assert exchange_digest(sin).digest != exchange_digest(cos).digest


def gradients_of(part: Callable[[Callable[..., Tensor], Tensor], Tensor]) -> torch.fx.GraphModule:
    """Dynamo's graph of an exchange inside a part of a program."""
    found: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        found.append(gm)
        return gm.forward

    def inside(x: Tensor) -> Tensor:
        return funcol.all_reduce(x.sin(), "sum", dist.group.WORLD)

    with one_of(2):
        torch.compile(lambda x: part(inside, x) + 1, backend=backend, fullgraph=True)(torch.ones(2, requires_grad=True))
    return found[0]


def test_collectives_in_a_checkpoint_run_again() -> None:
    plain = gradients_of(lambda inside, x: inside(x))
    again = gradients_of(lambda inside, x: checkpoint(inside, x, use_reentrant=False))
    assert exchange_digest(plain).digest != exchange_digest(again).digest
    with one_of(2):
        local = sp_compile.parallelize(torch.export.export(Attention(), (torch.ones(1, 8, 8),)), sp=2)
    kept = graph_digest(local).digest
    for node in local.graph.find_nodes(op="call_function", target=torch.ops.aten.sum.default):
        node.meta["ac_graph_id"] = 7
    assert graph_digest(local).digest != kept
    first = graph_digest(local).digest
    for node in local.graph.find_nodes(op="call_function", target=torch.ops.aten.sum.default):
        node.meta["ac_graph_id"] = 9  # a number of the process, which others need not share
    assert graph_digest(local).digest == first


def test_modes_of_a_call() -> None:
    modes: list[str] = []

    def look(x: Tensor) -> Tensor:
        modes.append(mode_text())
        return x.sin()

    checkpoint(look, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    with torch.no_grad(), torch.autograd.graph.save_on_cpu():
        look(torch.ones(2))
    assert modes == ["grad, checkpoint", "grad, checkpoint", "no_grad"]


def test_memory_that_was_freed() -> None:
    x = torch.ones(4)
    assert not checksums.is_freed(x)
    assert not checksums.is_freed(x.to_sparse())
    x.untyped_storage().resize_(0)
    assert checksums.checksum(x) == checksums.FREED_CHECKSUM


def test_an_input_more_moves_no_operation() -> None:
    x = torch.ones(2, 2)
    few = make_fx(lambda x, w: torch.tanh(torch.cos(torch.sin(x @ w))))(x, x)
    more = make_fx(lambda x, w, b: torch.tanh(torch.cos(torch.sin(x @ w)) + b))(x, x, x)
    both = zip(exchange_digest(few).lines, exchange_digest(more).lines)
    first = next((a.name, b.name) for a, b in both if a.text != b.text)
    assert first == ("aten.tanh.default", "aten.add.Tensor")


def test_inputs_are_not_distinguished() -> None:
    """The digest has no difference that the lines do not have."""
    x = torch.ones(2, 2)
    mine, other = (exchange_digest(make_fx(f)(x, x)) for f in (lambda x, w: x.sin() - w, lambda x, w: w.sin() - x))
    assert mine.digest == other.digest
    assert [line.text for line in mine.lines] == [line.text for line in other.lines]


def test_first_difference_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines whose inputs only moved, because a later line differs, are not reported."""
    x = torch.ones(2, 2)
    mine = exchange_digest(make_fx(lambda x, w: (x.sin() @ w).cos().tanh())(x, x))
    other = exchange_digest(make_fx(lambda x, w: (w @ x.sin()).cos().exp())(x, x))
    exchanged: list[Any] = []

    def answers(ranks: Any, doing: str, subject: str, said: Any) -> list[Any]:
        exchanged.append(said)
        return [
            said,
            [[hash_text(line.name), hash_text(line.text)] for line in other.lines] if len(exchanged) == 1 else "exp",
        ]

    monkeypatch.setattr(spmd_fingerprint, "all_gather_object", answers)
    first, _ = mine.first_difference(Ranks(2, ""))
    assert first.startswith("aten.tanh.default")


def test_options_are_not_ignored() -> None:
    with pytest.raises(sp_compile.SpError, match="SP116"):
        resolve(None, "typo")
    with pytest.raises(sp_compile.SpError, match="SP108"):
        torch.compile(Attention(), backend="sp", mode="max-autotune")(torch.randn(1, 8, 8))
    with pytest.raises(sp_compile.SpError, match="SP103: attention"):
        sp_compile.explain(Attention(), torch.randn(1, 8, 8), attention="torus")
    with pytest.raises(sp_compile.SpError, match=r"SP711: sp: .*\b0\b"):
        sp_compile.verify(Attention(), torch.randn(1, 8, 8), sp=0)
    with pytest.raises(sp_compile.SpError, match="SP109: outputs"):
        sp_compile.verify(Attention(), torch.randn(1, 8, 8), outputs="local")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"sp": 2.0}, "SP711.*2.0"),
        ({"sp": "2"}, "SP711.*'2'"),
        ({"cost": 3}, "SP103: cost: .*3"),
        ({"seq_dims": {"x": "1"}}, "SP103: seq_dims: .*{'x': '1'}"),
        ({"seq_dims": {"x": 5}}, r"SP303: .*\b3\b.*\b5\b"),
    ],
)
def test_options_of_a_wrong_type_raise(config: dict[str, Any], words: str) -> None:
    with pytest.raises(sp_compile.SpError, match=words):
        sp_compile.explain(Attention(), torch.randn(1, 8, 8), **config)


def test_options_that_are_no_mapping() -> None:
    with pytest.raises(sp_compile.SpError, match=r"SP103: options: .*'ring'"):
        torch.compile(Attention(), backend="sp", options="ring")(torch.randn(1, 8, 8))


def bucket(graph: Any) -> None:
    """A user's pass."""


@pytest.mark.parametrize(("module", "patterns"), [("functorch", FUNCTORCH), ("inductor", INDUCTOR)])
def test_names_of_settings_are_torch_s(module: str, patterns: list[str]) -> None:
    """A setting that torch renames would no longer be compared, without an error."""
    held = getattr(torch, f"_{module}").config.get_config_copy()
    unknown = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in held)]
    assert not unknown or torch.__version__ < "2.13", unknown


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        ("functorch", "recompute_views", True),
        ("functorch", "_sync_decision_cross_ranks", True),
        ("inductor", "reorder_for_compute_comm_overlap", True),
        ("inductor", "bucket_all_reduces_fx", "all"),
        ("inductor", "aten_distributed_optimizations.enable_overlap_scheduling", True),
        ("inductor", "post_grad_custom_post_pass", bucket),
        ("inductor", "pre_grad_custom_pass", bucket),
        ("inductor", "custom_partitioner_fn", bucket),
        ("inductor", "_collective.one_shot_all_reduce_threshold_bytes", 1),
        ("inductor", "aten_distributed_optimizations.prioritize_bucketing_during_scheduling", False),
    ],
)
def test_settings_of_torch_are_compared(config: str, name: str, value: Any) -> None:
    """Settings are compared by values and names, which are equal in all processes."""
    module = getattr(torch, f"_{config}").config
    before = settings_fields({})
    with module.patch({name: value}):
        now = settings_fields({})
    differ = {key: shown for key, shown in now.items() if before[key] != shown}
    assert differ == {f"torch._{config}.config.{name}": "bucket" if value is bucket else repr(value)}


def test_config_object_and_input_index() -> None:
    options = sp_compile.SPConfig(seq_dims={0: -2}, compiler="aot_eager")
    x = torch.randn(1, 8, 8)
    torch.testing.assert_close(torch.compile(Attention(), backend="sp", options=vars(options))(x), Attention()(x))
    report = sp_compile.explain(Attention(), x, sp=2, seq_dims={0: -2})
    assert report.inputs == {"x": [1]}


class Half(Attention):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(8, 16)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        q = x.unflatten(-1, (4, 2)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(y).flatten(0, 1), labels.flatten())


def test_loss_of_half_precision_logits_is_as_precise_as_a_single_devices() -> None:
    """The error against float64 is at most twice that of a single device."""
    model, labels = Half().bfloat16(), torch.randint(0, 16, (1, 1000))
    x = torch.randn(1, 1000, 8).bfloat16()
    exact = Half().double()
    exact.load_state_dict(model.state_dict())
    truth = exact(x.double(), labels).item()
    alone = abs(model(x, labels).item() - truth)
    for n in (2, 3):
        report = sp_compile.verify(model, x, labels, sp=n)
        off = next(error for name, error in report.errors if name == "result 0") * abs(truth)
        assert off <= 2 * alone + torch.finfo(torch.bfloat16).eps * abs(truth)


def test_running_a_model_to_explain_it_leaves_its_buffers_alone() -> None:
    norm = nn.BatchNorm1d(8)
    model = nn.Sequential(norm)
    x = torch.randn(4, 8, 5)
    sp_compile.explain(model, x, sp=1)
    assert norm.num_batches_tracked == 0


def summed(x: Tensor) -> str:
    """The checksum element by element, in Python's integers."""
    plain = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.element_size()]
    words = plain.resolve_neg().contiguous().reshape(-1).view(bits).tolist()
    total = 0
    for place, word in enumerate(words, 1):
        z = (word ^ (place * 0x9E3779B97F4A7C15)) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        total += z ^ (z >> 31)
    return str((total + 2**63) % 2**64 - 2**63)


def one_hot(place: int) -> Tensor:
    return torch.zeros(5000, dtype=torch.float64).index_fill(0, torch.tensor([place]), 1)


@pytest.mark.parametrize("shape", [(5000, 64), (64, 5000), (3, 7, 9), (1, 10_000), (4097,), (2, 2), (300, 300, 2)])
def test_a_part_is_spread_over_all_dims(shape: tuple[int, ...]) -> None:
    """The sample of a head has a few elements of many rows, other ones at each step, and all over time."""
    x, most = torch.arange(math.prod(shape)).view(shape), 100
    found = checksums.sample_view(x, most, 0)
    assert found.numel() <= most
    assert found.numel() == x.numel() or found.numel() > most // 4
    assert all(kept > 1 or size < 10 for kept, size in zip(found.shape, shape, strict=True))
    if x.numel() < 1000:
        turns = -(-x.numel() // found.numel()) * 2
        assert (
            len({n for turn in range(turns) for n in checksums.sample_view(x, most, turn).flatten().tolist()})
            == x.numel()
        )


def test_checksums_of_masks() -> None:
    """Masks with few bits at many positions, which a plain sum of bits times positions confuses."""
    ends, middle = torch.tensor([1, 0, 0, 1]), torch.tensor([0, 1, 1, 0])
    for dtype in (torch.bool, torch.int64, torch.float64):
        assert checksums.checksum(ends.to(dtype)) != checksums.checksum(middle.to(dtype))
    assert checksums.checksum(one_hot(10)) != checksums.checksum(one_hot(10 + 4096))
    masks = ((torch.arange(1 << 12)[:, None] >> torch.arange(12)) % 2).bool()
    assert len({checksums.checksum(mask) for mask in masks}) == len(masks)


LAYOUTS = [
    lambda x: x,
    lambda x: x.transpose(0, 2),
    lambda x: x[1:, ::2],
    lambda x: x[:1].expand(4, 5, 6),
    lambda x: x.flatten(),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.int8, torch.complex64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_checksums_are_made_of_small_pieces(
    monkeypatch: pytest.MonkeyPatch, layout: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = layout((torch.randn(4, 5, 6) * 3).round().to(dtype))
    monkeypatch.setattr(checksums, "PIECE_ELEMENTS", 7)
    assert str(checksums.checksum_of(x).item()) == summed(x)
    assert checksums.checksum(x) == checksums.checksum(x.clone(memory_format=torch.contiguous_format))
    assert max(piece.numel() for piece in checksums.flat_parts(x)) <= 7
    assert torch.equal(torch.cat(list(checksums.flat_parts(x))), x.reshape(-1))
    assert not checksums.is_constant(x)
    assert checksums.is_constant(x[..., :1].expand(x.shape).flatten()[:1].expand(3, 9))


def test_checksums_of_lazy_signs() -> None:
    x = torch.randn(3, 4, dtype=torch.complex64)
    for lazy in (x.conj(), x.conj().imag):
        assert str(checksums.checksum_of(lazy).item()) == summed(lazy.clone())
        assert checksums.checksum(lazy) == checksums.checksum(lazy.resolve_conj().resolve_neg().clone())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("differ", [1, 64])
def test_gradients_of_other_targets_differ(dtype: torch.dtype, differ: int) -> None:
    """Gradients of a loss with other labels or another sign, which have the same sum and magnitude."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 500, dtype=dtype, generator=generator)
    labels = torch.randint(500, (64,), generator=generator)
    others = torch.where(torch.arange(64) < differ, labels + 7, labels) % 500

    def summary(labels: Tensor, sign: int = 1) -> FieldValue:
        leaf = logits.clone().requires_grad_()
        (sign * F.cross_entropy(leaf.double(), labels)).backward()
        return checksums.start_cpu_copy(checksums.summarize(leaf.grad)[None]).read()[0]

    assert is_close(summary(labels), summary(labels))
    assert not is_close(summary(labels), summary(others))
    assert not is_close(summary(labels), summary(labels, -1))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("turn", [1, -1])
def test_gradients_with_equal_overflows_are_equal(value: float, turn: int) -> None:
    """A gradient scaler finds overflows on every rank; rounding of the other elements may differ."""

    def are_close(*summaries: tuple[float, ...]) -> bool:
        return is_close(*summaries[::turn])

    assert are_close((value, value, 1.0), (float(str(value)), value, 1.0 + 1e-15))
    assert are_close((value, value, value), (value, value, float(str(value))))
    assert not are_close((value, 1.0, 0.5), (value, 2.0, 0.5))
    assert not are_close((1.0, 1.0, value), (1.0, 1.0, 2.0))
    assert not are_close((value, 1.0, 1.0), (1.0, 1.0, 1.0))
    assert not are_close((value, value, value), (1.0, 0.5, 0.2))


@pytest.mark.parametrize("turn", [1, -1])
def test_text_and_overflows_of_other_signs_differ(turn: int) -> None:
    inf = float("inf")
    for pair in (((inf, inf), (inf, -inf)), ("3", (3.0, 3.0)), ((1.0, 1.0), (1.0, 1.0, 1.0)), ("3", "4")):
        assert not is_close(*pair[::turn])
    assert is_close(*((1.0, 1.0), (1.001, 1.001))[::turn])
    assert not is_close(*((0.0, 0.0), (1.0, 1.0))[::turn])


def test_summaries_are_sent_unchanged() -> None:
    message = Message(CALL_VERB, "forward", fields={"gradient": (float("inf"), 0.1, -0.0), "mode": "about 1.0"})
    assert Message.read(message.body) == message
    key = EarlierValue("shared gradient", "y", str(message), 1)
    with_earlier = Message.read(Message(CALL_VERB, "forward", earlier={key: "5"}).body)
    assert [*with_earlier.earlier] == [key]
    assert re.fullmatch(r".* 1, .* y, .* forward", str(key))


def test_inputs_of_a_summary() -> None:
    ones = [checksums.summarize(torch.ones(size)) for size in ((), (3,), (2, 5, 7), (3, 0))]
    assert [one.shape for one in ones] == [(3,)] * 4
    assert torch.allclose(
        checksums.summarize(torch.ones(2, 3).expand(4, 2, 3)), checksums.summarize(torch.ones(4, 2, 3))
    )
    assert checksums.summarize(torch.full((4, 1 << 14), 6e4, dtype=torch.float16)).isfinite().all()
    assert checksums.summarize(torch.ones(2, dtype=torch.complex64))[0] > 0


@pytest.mark.parametrize("tracing", [nullcontext, FakeTensorMode, enable_python_dispatcher])
def test_buffers_are_real_during_tracing(tracing: Callable[[], AbstractContextManager[Any]]) -> None:
    with tracing(), use_real_tensors():
        assert type(torch.ones(2)) is Tensor
        assert not torch._C._len_torch_dispatch_stack()
        assert not torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PythonDispatcher)
