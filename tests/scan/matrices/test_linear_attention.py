"""sp::linear_attention, and the kernel functions of packages that become calls of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support.parity import against_eager
from support.parity import check as check_ranks
from support.parity import sp as compile_model
from support.ranks import Ranks, mesh
from support.scans.kernel_package import CALLS, attend, fla
from torch import Tensor, nn

import sp_compile
from sp_compile.lowering.base import warn
from sp_compile.lowering.scan import affine_scan
from sp_compile.lowering.scan.attention_kernels import FUNCTIONS, KERNELS, register_kernel
from sp_compile.passes.capture import package_kernels

sp = torch.ops.sp
WIDTH, HEADS, SIZE = 12, 2, 4
KINDS = ["decay", "delta", "low rank"]


def random_operands(kind: str, vector: bool, documents: bool, with_initial: bool) -> list[Tensor | None]:
    torch.manual_seed(0)
    batch, length, columns = 2, 71, 5
    q, k = (torch.randn(batch, length, HEADS, SIZE, dtype=torch.float64) / 2 for _ in range(2))
    v = torch.randn(batch, length, HEADS, columns, dtype=torch.float64)
    decay = -torch.rand(batch, length, HEADS, SIZE if vector else 1, dtype=torch.float64)
    beta = torch.rand(batch, length, HEADS, dtype=torch.float64) if kind == "delta" else None
    a, b = (torch.randn_like(k) / 3 if kind == "low rank" else None for _ in range(2))
    starts = torch.rand(batch, length) < 0.05 if documents else None
    initial = torch.randn(batch, HEADS, SIZE, columns, dtype=torch.float64) if with_initial else None
    operands = [q, k, v, decay, beta, a, b, starts, initial]
    return [x.requires_grad_() if x is not None and x.is_floating_point() else x for x in operands]


@pytest.mark.parametrize("with_initial", [False, True])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(kind: str, vector: bool, documents: bool, with_initial: bool) -> None:
    operands = random_operands(kind, vector, documents, with_initial)
    leaves = [x for x in operands if x is not None and x.requires_grad]
    expected = attend(*operands, 0.5)
    call = *operands[:8], None, None, operands[8], 0.5, ""
    found = sp.linear_attention(*call), sp.linear_attention_state(*call)
    cotangents = [torch.randn_like(x) for x in expected]
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)
    found_grads = torch.autograd.grad(found, leaves, cotangents)
    for x, y in zip(found_grads, torch.autograd.grad(expected, leaves, cotangents), strict=True):
        torch.testing.assert_close(x, y)


Forward = Callable[[dict[str, Tensor], Tensor | None], Any]


def _ids(bounds: Tensor | None, x: Tensor) -> Tensor | None:
    """Return the number of the document of each token, (1, S)."""
    return None if bounds is None else torch.bucketize(torch.arange(x.shape[1]), bounds, right=True)[None]


PROGRAMS: dict[str, Forward] = {
    "chunk_gated_delta_rule": lambda x, bounds: fla.chunk_gated_delta_rule(
        x["q"][:, :, :1], x["k"][:, :, :1], x["v"], x["g"], x["beta"], use_qk_l2norm_in_kernel=True, cu_seqlens=bounds
    )[0],
    "chunk_kda": lambda x, bounds: fla.chunk_kda(
        _unit(x["q"]), _unit(x["k"]), x["v"], F.logsigmoid(x["a"]), x["beta"], scale=0.7, cu_seqlens=bounds
    )[0],
    "chunk_delta_rule": lambda x, bounds: fla.chunk_delta_rule(
        x["q"], _unit(x["k"]), x["v"], x["beta"], cu_seqlens=bounds
    )[0],
    "chunk_simple_gla": lambda x, bounds: fla.chunk_simple_gla(
        x["q"], x["k"], x["v"], x["g"], None, 0.6, cu_seqlens=bounds
    )[0],
    "chunk_lightning_attn": lambda x, bounds: fla.chunk_lightning_attn(x["q"], x["k"], x["v"], 1, 4, cu_seqlens=bounds)[
        0
    ],
    "chunk_gla": lambda x, bounds: fla.chunk_gla(x["q"], x["k"], x["v"], F.logsigmoid(x["a"]), cu_seqlens=bounds)[0],
    "chunk_rwkv7": lambda x, bounds: fla.chunk_rwkv7(
        x["q"], F.logsigmoid(x["a"]), x["k"], x["v"], -_unit(x["b"]), _unit(x["b"]) / 2, cu_seqlens=bounds
    )[0],
    "mamba_chunk_scan_combined": lambda x, bounds: fla.mamba_chunk_scan_combined(
        x["v"],
        x["beta"],
        -torch.arange(1.0, HEADS + 1, dtype=torch.float64),
        x["k"][:, :, :1],
        x["q"][:, :, :1],
        16,
        D=torch.ones(HEADS, dtype=torch.float64),
        dt_softplus=True,
        seq_idx=_ids(bounds, x["v"]),
    ),
    "causal_conv1d_fn": lambda x, bounds: fla.causal_conv1d_fn(
        x["v"].flatten(2).mT,
        torch.linspace(-1, 1, 4, dtype=torch.float64).expand(HEADS * SIZE, -1),
        seq_idx=_ids(bounds, x["v"]),
        activation="silu",
    ).mT.unflatten(-1, (HEADS, SIZE)),
}


def _unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


class Mixer(nn.Module):
    """A layer that calls a kernel, and a mean loss."""

    def __init__(self, kernel: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kernel = kernel
        self.project = nn.Linear(WIDTH, 5 * HEADS * SIZE).double()
        self.gates = nn.Linear(WIDTH, 2 * HEADS).double()
        self.out = nn.Linear(HEADS * SIZE, WIDTH).double()

    def forward(self, x: Tensor, bounds: Tensor | None = None) -> Tensor:
        """x (B, S, WIDTH), bounds (number of documents + 1) -> a loss."""
        q, k, v, a, b = (y.unflatten(-1, (HEADS, SIZE)) for y in self.project(x).chunk(5, -1))
        g, beta = self.gates(x).chunk(2, -1)
        inputs = {"q": q, "k": k, "v": v, "a": a, "b": b, "g": F.logsigmoid(g), "beta": beta.sigmoid()}
        mixed = PROGRAMS[self.kernel](inputs, bounds)
        return (self.out(mixed.flatten(2)) - x).pow(2).mean()


# Documents of 37 tokens: one ends at the cut of 2 ranks, 19; one has 1 token; one spans all cuts of 3 and 4 ranks.
# The first case of a table is not sampled away.
DOCUMENTS = {"cut": [0, 5, 19, 20, 37], "long": [0, 1, 3, 36, 37], "one": None}


def _train(kernel: str, documents: str, with_kernel: bool) -> tuple[Any, list[str]]:
    """Compare a layer on the ranks with eager code; return the kernels that the compiled layer ran."""
    if with_kernel:
        register_kernel(kernel, getattr(fla, kernel), "cpu")
    torch.manual_seed(1)
    bounds = DOCUMENTS[documents]
    x = torch.randn(2 if bounds is None else 1, 37, WIDTH, dtype=torch.float64)
    arguments = [x] if bounds is None else [x, torch.tensor(bounds)]
    CALLS.clear()
    try:
        found = against_eager(Mixer(kernel), *arguments, mesh=mesh(), seq_dims={"x": 1})
    finally:
        FUNCTIONS.pop(kernel, None)
    return found, CALLS[:]


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("kernel", PROGRAMS)
@pytest.mark.sampled(every=25)
def test_kernels_are_on_shards(ranks: Ranks, kernel: str, documents: str, n: int) -> None:
    answers = ranks.run(n, _train, kernel, documents, False)
    check_ranks([answer for answer, _ in answers])
    assert all(calls == [kernel] for _, calls in answers), "only the eager model calls the package"


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("kernel", sorted(KERNELS))
@pytest.mark.sampled(every=17)
def test_installed_kernels_run_on_the_rows_of_ranks(ranks: Ranks, kernel: str, documents: str, n: int) -> None:
    answers = ranks.run(n, _train, kernel, documents, True)
    check_ranks([answer for answer, _ in answers])
    assert all(len(calls) > 2 for _, calls in answers), "the compiled model calls the kernel, too"


def test_the_report_names_the_exchange() -> None:
    x = torch.randn(1, 37, WIDTH, dtype=torch.float64)
    report = sp_compile.explain(Mixer("chunk_gated_delta_rule"), x, sp=2)
    assert not report.fallbacks
    assert report.work.flops_share == 1.0
    (scan,) = [e for e in report.exchanges if e.op == "linear_attention"]
    assert scan.forward == scan.backward == HEADS * SIZE * (SIZE + SIZE) * 8


def test_exchanges_do_not_depend_on_the_length() -> None:
    exchanges = []
    for length in (64, 640):
        report = sp_compile.explain(Mixer("chunk_kda"), torch.randn(1, length, WIDTH, dtype=torch.float64), sp=2)
        exchanges.append([(e.op, e.forward, e.backward) for e in report.exchanges if e.op != "unshard"])
    assert exchanges[0] == exchanges[1]


@pytest.mark.parametrize("kind", KINDS)
def test_launches_do_not_depend_on_the_length(kind: str) -> None:
    """Forward and backward call the same ops for any length, where the recurrence of matrices is one kernel."""
    pytest.importorskip("triton")
    kernel = "sp_compile.lowering.triton.affine_kernel.scan_affine_rows"
    counts = []
    for length in (128, 1024):
        q, k, v = (torch.randn(1, length, HEADS, SIZE, requires_grad=True) for _ in range(3))
        decay, beta = -torch.rand(1, length, HEADS, 1), torch.rand(1, length, HEADS) if kind == "delta" else None
        a, b = (torch.randn(1, length, HEADS, SIZE) if kind == "low rank" else None for _ in range(2))
        with (
            mock.patch.object(affine_scan, "_has_affine_kernel", return_value=True),
            mock.patch(kernel, lambda m, b, *_: torch.zeros_like(b)),
            torch.profiler.profile() as profile,
        ):
            out = sp.linear_attention(q, k, v, decay, beta, a, b, None, None, None, None, 0.5, "")
            torch.autograd.grad(out, (q, k, v), out)
        counts.append({x.key: x.count for x in profile.key_averages() if x.key.startswith(("aten::", "sp::"))})
    assert counts[0] == counts[1]


class Stateful(Mixer):
    def forward(self, x: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, _, _ = (y.unflatten(-1, (HEADS, SIZE)) for y in self.project(x).chunk(5, -1))
        g, beta = self.gates(x).chunk(2, -1)
        options = {"initial_state": initial, "output_final_state": True}
        return fla.chunk_gated_delta_rule(q, _unit(k), v, F.logsigmoid(g), beta.sigmoid(), **options)


@pytest.mark.slow
def test_states_before_and_after_are_on_all_ranks() -> None:
    initial = torch.randn(2, HEADS, SIZE, SIZE, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, 37, WIDTH, dtype=torch.float64, requires_grad=True)
    model = Stateful("")
    for n in (2, 3):
        report = sp_compile.verify(model, x, initial, sp=n, seq_dims={"x": 1})
        assert max(error for _, error in report.errors) < 1e-12
        assert not report.fallbacks


def test_options_without_a_stand_in_run_the_original(caplog: pytest.LogCaptureFixture) -> None:
    def mix(x: Tensor) -> Tensor:
        return 2 * fla.chunk_delta_rule(x, x, x, x[..., 0], chunks_of_text=3)[0]

    warn._warned.clear()
    x = torch.randn(1, 7, HEADS, SIZE, dtype=torch.float64)
    with pytest.raises(TypeError, match="chunks_of_text"):
        torch.compile(mix, backend="eager")(x)
    (warning,) = (record.args for record in caplog.records if record.name == package_kernels.__name__)
    assert warning[0] == "chunk_delta_rule"
    assert "chunks_of_text" in warning[1]


def _train_lengths(kernel: str) -> list[float]:
    """Return the errors of losses and gradients of lengths that follow each other, on the ranks."""
    model, errors = Mixer(kernel), []
    compiled = compile_model(model, mesh=mesh(), seq_dims={"x": 1}, dynamic=True)
    for length in (21, 34):
        torch.manual_seed(length)
        x = torch.randn(2, length, WIDTH, dtype=torch.float64)
        parameters = list(model.parameters())
        expected, found = model(x), compiled(x)
        grads = [torch.autograd.grad(y, parameters, allow_unused=True) for y in (expected, found)]
        pairs = [(a, b) for a, b in zip(*grads, strict=True) if a is not None and b is not None]
        errors += [float((a - b).abs().max()) for a, b in [(expected.detach(), found.detach()), *pairs]]
    return errors


@pytest.mark.parametrize("kernel", ["chunk_simple_gla", "chunk_kda"])
@pytest.mark.slow
def test_lengths_that_change(ranks: Ranks, kernel: str) -> None:
    for errors in ranks.run(2, _train_lengths, kernel):
        assert len(errors) > 6
        assert max(errors) < 1e-11


def test_padding_of_a_convolution_is_zero() -> None:
    from sp_compile.passes.capture.stand_ins.kernel_stand_ins import STAND_INS

    ids = torch.tensor([[0, 0, 1, -1, -1]])
    out = STAND_INS["causal_conv1d_fn"].compute(torch.ones(1, 1, 5), torch.ones(1, 4), torch.ones(1), seq_idx=ids)
    assert out.flatten().tolist() == [2, 3, 2, 0, 0]


LENGTH = 37  # of the programs below; two ranks cut it at 19, three at 13 and 26
RESETS = {"cuts": [12, 13, 18, 19, 20, 26], "first": [0], "last": [36], "all": [*range(LENGTH)]}


@pytest.mark.parametrize("resets", RESETS)
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_infinite_decays_reset_the_state(kind: str, vector: bool, documents: bool, resets: str) -> None:
    operands = [x if x is None else x.detach() for x in random_operands(kind, vector, documents, True)]
    is_reset = torch.zeros_like(operands[3], dtype=torch.bool)
    is_reset[:, RESETS[resets], 0, :1] = True  # of one head, and of one row of its state if it has several decays
    is_reset[1, RESETS[resets]] = True
    operands[3] = operands[3].masked_fill(is_reset, -torch.inf)
    operands = [x.requires_grad_() if x is not None and x.is_floating_point() else x for x in operands]
    leaves = [x for x in operands if x is not None and x.requires_grad]
    expected, call = attend(*operands, 0.5), (*operands[:8], None, None, operands[8], 0.5, "")
    found = sp.linear_attention(*call), sp.linear_attention_state(*call)
    cotangents = [torch.randn_like(x) for x in expected]
    torch.testing.assert_close(found, expected)
    found_grads = torch.autograd.grad(found, leaves, cotangents)
    torch.testing.assert_close(found_grads, torch.autograd.grad(expected, leaves, cotangents))


class Resetting(Mixer):
    """A layer whose decays are -inf at the first tokens of documents."""

    def forward(self, x: Tensor, is_reset: Tensor) -> Tensor:
        q, k, v, a, _ = (y.unflatten(-1, (HEADS, SIZE)) for y in self.project(x).chunk(5, -1))
        g, beta = self.gates(x).chunk(2, -1)
        if self.kernel == "loop":  # a recurrence of the user's own
            decay, state, states = a.masked_fill(is_reset[..., None, None], -torch.inf), torch.zeros_like(v[:, 0]), []
            for t in range(x.shape[1]):
                state = decay[:, t].clamp(max=0).exp() * state + v[:, t]
                states.append(state)
            mixed = torch.stack(states, 1)
        elif self.kernel == "chunk_gla":
            decay = F.logsigmoid(a).masked_fill(is_reset[..., None, None], -torch.inf)
            mixed = fla.chunk_gla(q, k, v, decay)[0]
        else:
            decay = F.logsigmoid(g).masked_fill(is_reset[..., None], -torch.inf)
            mixed = fla.chunk_gated_delta_rule(q, _unit(k), v, decay, beta.sigmoid())[0]
        return (self.out(mixed.flatten(2)) - x).pow(2).mean()


@pytest.mark.parametrize("large", [-90.0, -110.0, -1e5, -1e9])
@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_large_finite_decays_are_precise(kind: str, vector: bool, large: float) -> None:
    """Differences of float32 sums would lose the decays after a large one."""
    operands = random_operands(kind, vector, documents=True, with_initial=True)
    with torch.no_grad():
        operands[3][:, 5::20] = large
    leaves = [x for x in operands if x is not None and x.requires_grad]
    expected, _ = attend(*operands, 0.5)
    single = [x.float() if x is not None and x.is_floating_point() else x for x in operands]
    found = sp.linear_attention(*single[:8], None, None, single[8], 0.5, "")
    cotangent = torch.randn_like(found)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4)
    found_grads = torch.autograd.grad(found, leaves, cotangent)
    for x, y in zip(found_grads, torch.autograd.grad(expected, leaves, cotangent.double()), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)


def _train_with_resets(kernel: str, resets: str) -> Any:
    torch.manual_seed(1)
    x, is_reset = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64), torch.zeros(2, LENGTH, dtype=torch.bool)
    is_reset[:, RESETS[resets]] = True
    return against_eager(Resetting(kernel), x, is_reset, mesh=mesh(), seq_dims={"x": 1, "is_reset": 1})


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("resets", RESETS)
@pytest.mark.parametrize("kernel", ["chunk_gated_delta_rule", "chunk_gla", "loop"])
@pytest.mark.sampled(every=8)
def test_states_reset_at_the_cuts_of_ranks(ranks: Ranks, kernel: str, resets: str, n: int) -> None:
    check_ranks(ranks.run(n, _train_with_resets, kernel, resets))
