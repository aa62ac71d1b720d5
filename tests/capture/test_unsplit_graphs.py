"""Graphs that cannot be split run unsplit, correctly and with one warning; a failed compilation leaves no state."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.parity import Outcome, against_eager, check, error_text, outcome, sp
from support.ranks import Ranks, mesh
from torch import Tensor, nn
from torch.func import grad, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import checkpoint

import sp_compile
from sp_compile import split
from sp_compile.lowering.base.errors import CaptureError
from sp_compile.lowering.torch_compat import preserve_thread_state
from sp_compile.passes.capture import trace
from sp_compile.passes.capture.uncaptured import UNSPLIT_WARNING

WIDTH = 8


class Written(nn.Module):
    """Causal attention of (batch, S, WIDTH) after `write(x, mask, rows, parameter)`."""

    def __init__(self, write: Callable[..., Tensor]) -> None:
        super().__init__()
        self.inner, self.qkv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.given, self.write = nn.Parameter(torch.randn(WIDTH)), write

    def forward(self, x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        x = self.write(self.inner(x), mask, rows, self.given)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum()


def features(x: Tensor, mask: Tensor, rows: Tensor, given: Tensor) -> Tensor:
    x[mask] = rows * 2
    return x


def zeros(x: Tensor, mask: Tensor, rows: Tensor, given: Tensor) -> Tensor:
    x[~mask] = 0
    return x


def a_parameter(x: Tensor, mask: Tensor, rows: Tensor, given: Tensor) -> Tensor:
    x[mask] = given
    return x


def one_number(x: Tensor, mask: Tensor, rows: Tensor, given: Tensor) -> Tensor:
    x[x > 0] = given[0]
    return x


def added(x: Tensor, mask: Tensor, rows: Tensor, given: Tensor) -> Tensor:
    return torch.index_put(x, (mask,), rows, accumulate=True)


def scattered(x: Tensor, mask: Tensor, rows: Tensor, given: Tensor) -> Tensor:
    """As the image features of a vision-language model, with its check of their number."""
    torch._check_tensor_all(mask.sum() * x.shape[-1] == rows.numel())
    return x.masked_scatter(mask[..., None], rows * 2)


def positions_of_all(x: Tensor, mask: Tensor, rows: Tensor, given: Tensor) -> Tensor:
    x[:, mask[0]] = rows[:2] * given
    return x


def one_column(x: Tensor, mask: Tensor, rows: Tensor, given: Tensor) -> Tensor:
    """A mask and another index, which no rule takes."""
    x[mask, torch.zeros(6, dtype=torch.int64)] = given[0]
    return x


def read_and_written(x: Tensor, mask: Tensor, rows: Tensor, given: Tensor) -> Tensor:
    """As features of vision layers are added to hidden states of text layers."""
    read = x[mask] + rows
    x[mask] = read
    return x


def at_nonzero(x: Tensor, mask: Tensor, rows: Tensor, given: Tensor) -> Tensor:
    x[mask.nonzero(as_tuple=True)] = rows * 2
    return x


def without_grad(x: Tensor, mask: Tensor, rows: Tensor, given: Tensor) -> Tensor:
    y = x * 2
    with torch.no_grad():
        y.clamp_(-1, 1)
    return y + given


def escaped(x: Tensor, mask: Tensor, rows: Tensor, given: Tensor) -> Tensor:
    y, back = vjp(lambda w: (x * w).cumsum(1).tanh(), given)
    return y * back(y.sin())[0]


def scans_of_each(x: Tensor, mask: Tensor, rows: Tensor, given: Tensor) -> Tensor:
    """Operators that have a derivative, but none below vmap."""

    def each(t: Tensor) -> Tensor:
        h = sp_compile.linear_scan((t * given).sigmoid(), t, 0)
        return h + sp_compile.inclusive_scan(t * given, 0, op="max")

    return vmap(each)(x)


def inner_step(x: Tensor, mask: Tensor, rows: Tensor, given: Tensor) -> Tensor:
    return x * (given - 0.1 * grad(lambda w: (x * w).cumsum(1).square().mean())(given))


def step_of_each(x: Tensor, mask: Tensor, rows: Tensor, given: Tensor) -> Tensor:
    steps = vmap(grad(lambda w, t: (t * w).cumsum(0).square().mean()), (None, 0))(given, x)
    return x * (given - 0.1 * steps)[:, None]


def forward_mode(x: Tensor, mask: Tensor, rows: Tensor, given: Tensor) -> Tensor:
    y, tangent = jvp(lambda w: (x * w).cumsum(1).tanh(), (given,), (given.sin(),))
    return y + tangent


SPLIT = (
    features,
    zeros,
    a_parameter,
    scattered,
    one_number,
    positions_of_all,
    added,
    inner_step,
    step_of_each,
    forward_mode,
)
WHOLE = one_column, without_grad, escaped, scans_of_each
MASK = torch.tensor([[0, 0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 0]]).bool()


def made(write: Callable[..., Tensor]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = Written(write).double()
    x, rows = torch.randn(2, 7, WIDTH, dtype=torch.float64), torch.randn(6, WIDTH, dtype=torch.float64)
    return model, (x, MASK.clone(), rows.requires_grad_())


def collect_warnings() -> list[str]:
    """Return a list that collects later warnings of unsplit programs."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger = logging.getLogger("sp_compile.passes.capture.uncaptured")
    logger.handlers = [Handler()]
    return found


def parity(write: Callable[..., Tensor], **how: Any) -> Outcome:
    """Also of the gradient of the rows."""
    model, (x, mask, rows) = made(write)
    alone, others = copy.deepcopy(model), rows.detach().clone().requires_grad_()
    expected = alone(x, mask, others)
    expected.backward()
    torch._dynamo.reset()
    found = sp(model, mesh=mesh(), **how)(x, mask, rows)
    found.backward()
    grads = [*(p.grad for p in model.parameters()), rows.grad]
    return outcome(found, grads, expected, [*(p.grad for p in alone.parameters()), others.grad])


def of_all(writes: tuple[Callable[..., Tensor], ...], how: dict[str, Any]) -> tuple[list[Outcome], list[str]]:
    warnings = collect_warnings()
    return [parity(write, **how) for write in writes], warnings


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("programs", [SPLIT[1::2], SPLIT[::2]], ids=["odd", "even"])
def test_split_programs(ranks: Ranks, programs: tuple[Callable[..., Tensor], ...], n: int) -> None:
    answers = ranks.run(n, of_all, programs, {})
    assert not any(warnings for _, warnings in answers)
    for outcomes in zip(*(found for found, _ in answers), strict=True):
        check(outcomes)


def checked_call() -> str:
    """Return the error of a call with fewer rows than the mask has positions."""
    model, (x, mask, rows) = made(scattered)
    try:
        sp(model, mesh=mesh())(x, mask, rows[1:])
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_failed_check_raises_on_every_rank(ranks: Ranks) -> None:
    for words in ranks.run(2, checked_call):
        assert words.startswith("Expected all ")  # torch's own error


@pytest.mark.slow
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("n", [2, 3])
def test_reads_at_a_mask_end_a_graph(ranks: Ranks, n: int) -> None:
    answers = ranks.run(n, of_all, (read_and_written, at_nonzero), {})
    for outcomes in zip(*(found for found, _ in answers), strict=True):
        check(outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("write", [features, inner_step])
def test_split_programs_under_inductor(ranks: Ranks, write: Callable[..., Tensor]) -> None:
    answers = ranks.run(2, of_all, (write,), {"compiler": "inductor"})
    assert not any(warnings for _, warnings in answers)
    for outcomes in zip(*(found for found, _ in answers), strict=True):
        check(outcomes)


def test_unsplit_programs(ranks: Ranks) -> None:
    """One warning each, on rank 0, with the first line and the reason."""
    (first, warnings), *others = ranks.run(2, of_all, WHOLE, {})
    for outcomes in zip(first, *(found for found, _ in others), strict=True):
        check(outcomes)
    assert [words for _, words in others] == [[]]
    assert len(warnings) == len(WHOLE)
    pattern = re.escape(UNSPLIT_WARNING).replace("%s", ".*")
    assert all("test_unsplit_graphs.py" in words and re.search(pattern, words, re.DOTALL) for words in warnings)
    # torch's own error has no code of this package
    reasons = "DynamicOutputShapeException: aten.nonzero.default", "SP224: ", "SP215: ", "SP214: "
    for words, reason in zip(warnings, reasons, strict=True):
        assert reason in words


def pulled_back(x: Tensor, mask: Tensor, rows: Tensor, given: Tensor) -> Tensor:
    """The graph breaks inside of the transform, whose pieces eager code runs."""
    y, back = vjp(lambda t: sp_compile.linear_scan((t * given).sigmoid(), t, 1), x)
    return (y + back(y.sin())[0]).cumsum(1)


def test_eager_pieces_of_a_transform(ranks: Ranks) -> None:
    check(ranks.run(2, parity, pulled_back))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("write", WHOLE)
def test_reports_say_so(write: Callable[..., Tensor]) -> None:
    model, args = made(write)
    for entry in (sp_compile.explain, sp_compile.verify):
        report = entry(model, *args, sp=2)
        assert [(note.label, note.subject) for note in report.fallbacks] == [("replicated", "capture")]
    assert report.worst == 0


def test_work_of_a_graph_that_cannot_be_captured() -> None:
    """A write whose view has no inverse ends the capture; its product is work of every rank, not of none."""

    def program(x: Tensor) -> Tensor:
        y = x @ x.mT
        y.unfold(1, 3, 1).add_(1)
        return y.cumsum(1).square().mean()

    work = sp_compile.explain(program, torch.randn(2, 9, 4, requires_grad=True), sp=2).work
    assert work.flops == 2 * 2 * 9 * 9 * 4
    assert work.flops_share == 0


@torch.compiler.allow_in_graph
class StraightThrough(torch.autograd.Function):
    """Round, with a backward that is not the derivative of the forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad


def test_a_backward_that_dynamo_does_not_trace_is_called(caplog: pytest.LogCaptureFixture) -> None:
    """Its forward must not be differentiated in place of it."""
    weight = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)

    def program(x: Tensor) -> Tensor:
        return StraightThrough.apply(x.cumsum(1) @ weight).square().mean()

    x = torch.randn(2, 9, 4, dtype=torch.float64)
    run = torch.compile(program, backend="sp", options={"compiler": "aot_eager"})
    expected, found = (torch.autograd.grad(f(x), weight)[0] for f in (program, run))
    assert expected.abs().max() > 0
    torch.testing.assert_close(found, expected)
    assert "SP211: StraightThrough " in caplog.text
    with torch.no_grad():
        torch.testing.assert_close(run(x), program(x))


def test_fallback_error_forbids_it() -> None:
    model, args = made(one_column)
    with pytest.raises(Exception, match=r"SP212.*aten\.nonzero"):
        sp_compile.explain(model, *args, sp=2, fallback="error")


class Broken(nn.Module):
    """A graph that writes to sharded inputs, between two graphs with attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Written(zeros), Written(zeros)
        self.given = nn.Parameter(torch.randn(WIDTH))

    def half(self, part: Written, x: Tensor) -> Tensor:
        q, k, v = part.qkv(part.inner(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.half(self.first, x) * 2
        torch._dynamo.graph_break()
        h[mask, torch.zeros(6, dtype=torch.int64)] = self.given[0]
        torch._dynamo.graph_break()
        return self.half(self.last, h).square().sum() + h.sin().sum()


def between_shards() -> Outcome:
    torch.manual_seed(0)
    model, x = Broken().double(), torch.randn(2, 7, WIDTH, dtype=torch.float64)
    return against_eager(model, x, MASK.clone(), mesh=mesh())


def test_an_unsplit_graph_writes_to_sharded_values(ranks: Ranks) -> None:
    check(ranks.run(2, between_shards))


def on_one_rank() -> str:
    """Return the error of each rank if only rank 1 cannot split the program."""
    model, args = made(zeros)

    def fails(*args: Any) -> Any:
        raise CaptureError("SP211", "injected.")

    with mock.patch.object(split, "global_view", fails if dist.get_rank() else split.global_view):
        return error_text(lambda: sp(model, mesh=mesh())(*args))


def test_ranks_take_one_way(ranks: Ranks) -> None:
    for words in ranks.run(2, on_one_rank):
        assert "SP609" in words
        assert re.search(r"rank 0: sharded\n  rank 1: (?!sharded)", words)
        assert "injected" in words


def state() -> tuple[Any, ...]:
    functorch, hooks = torch._C._functorch, torch._C._autograd
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.autocast_increment_nesting() - 1 + 0 * torch.autocast_decrement_nesting(),
        functorch.get_dynamic_layer_stack_depth(),
        functorch.get_inplace_requires_grad_allowed(),
        hooks._saved_tensors_hooks_get_disabled_error_message(),
        torch._C._is_fwd_grad_enabled(),
        str(torch._C._dispatch_tls_local_include_set()),
    )


def fail_in_all_states() -> None:
    with preserve_thread_state():
        torch._C._functorch._grad_increment_nesting()
        torch._C._functorch._vmap_increment_nesting(3, "error")
        torch._C._enter_dual_level()
        torch._C._autograd._saved_tensors_hooks_disable("not now")
        torch.amp.autocast_mode._enter_autocast("cpu", torch.bfloat16, True, None)
        torch._C._set_grad_enabled(False)
        raise ZeroDivisionError


def test_state_is_kept() -> None:
    before = state()
    with pytest.raises(ZeroDivisionError):
        fail_in_all_states()
    assert state() == before


def failing(x: Tensor, mask: Tensor, rows: Tensor, given: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        return x * torch.sin(x * given)


def failing_inside(x: Tensor, mask: Tensor, rows: Tensor, given: Tensor) -> Tensor:
    return x * vmap(grad(lambda w, t: torch.ops.sp_tests.fails(t * w).sum()), (None, 0))(given, x)[:, None]


def checkpointed(run: Callable[..., Tensor], *args: Tensor) -> Tensor:
    return checkpoint(run, *args, use_reentrant=False)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("write", "around"), [(failing_inside, None), (failing, None), (failing, checkpointed)])
def test_a_failed_compilation_leaves_no_state(write: Callable[..., Tensor], around: Any) -> None:
    """Also inside of a checkpoint of eager code, whose hooks are around it; then a good model is compiled and right."""

    def fails(x: Tensor) -> Tensor:
        if get_proxy_mode() is not None:
            raise ZeroDivisionError("while it is captured")
        return x.clone()

    def fails_too(self: Any, target: Any, args: Any, kwargs: Any) -> Any:
        return fails(args[0]) if target is torch.sin else call(self, target, args, kwargs)

    call = trace._TracingInterpreter.call_function
    lowered = mock.patch.object(trace._TracingInterpreter, "call_function", fails_too)
    with lowered, torch.library._scoped_library("sp_tests", "DEF") as library:
        library.define("fails(Tensor x) -> Tensor")
        library.impl("fails", fails, "CompositeImplicitAutograd")
        before, (model, args) = state(), made(write)
        torch._dynamo.reset()
        run = sp(model, fallback="error")
        with pytest.raises(sp_compile.SpError, match="SP211"):
            run(*args) if around is None else around(run, *args)
        assert state() == before
    model, args = made(inner_step)
    expected = copy.deepcopy(model)(*args)
    torch._dynamo.reset()
    torch.testing.assert_close(sp(model, fallback="error")(*args), expected)
    checkpointed(model.inner, args[0]).sum().backward()
