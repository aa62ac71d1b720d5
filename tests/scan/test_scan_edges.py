"""Edge cases of functional scans and shifts: empty dims, single rows, ignored options, wrong operands."""

import pytest
import torch
import torch.nn.functional as F

import sp_compile
from sp_compile import SpError, affine_scan, exclusive_scan, inclusive_scan, linear_scan, segmented_scan
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.comm.simulate import run_ranks

N = 2
GROUP = Ranks(N, "sim")


@pytest.mark.parametrize("accumulate", [torch.int8, torch.int64])
@pytest.mark.parametrize("scan", [inclusive_scan, exclusive_scan])
@pytest.mark.parametrize("exchange", ["gather", "steps"])
def test_exchanged_extremes_are_not_rounded(scan, accumulate, exchange):
    x = torch.arange(6, dtype=torch.int16) * 100
    options = {"accumulate_dtype": accumulate, "exchange": exchange, "group": GROUP}
    shards = run_ranks(N, lambda rank: scan(x.chunk(N)[rank], 0, "max", **options))
    assert torch.cat(shards).equal(scan(x, 0, "max"))


@pytest.mark.parametrize("op", ["sum", "prod"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("segmented", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_integers_are_rounded_before_they_are_combined(op, dtype, segmented):
    odd = 257 if dtype == torch.bfloat16 else 2**24 + 1
    x = torch.tensor([odd, -odd + 1, 0, 0] if op == "sum" else [odd, odd, 1, 1])
    ids = torch.zeros(4, dtype=torch.int64) if segmented else None

    def scan(rank):
        segments = None if ids is None else ids.chunk(N)[rank]
        return torch.ops.sp.scan(x.chunk(N)[rank], segments, 0, op, dtype=dtype, frame=[1, 4, 0, 4], n=N, group="sim")

    wanted = getattr(torch, f"cum{op}")(x, 0, dtype=dtype)
    assert torch.cat(run_ranks(N, scan)).equal(wanted)
    assert torch.ops.sp.scan(x, ids, 0, op, dtype=dtype).equal(wanted)


@pytest.mark.parametrize("op", ["sum", "max", "logsumexp"])
def test_a_dim_of_no_elements_beside_the_scanned_one(op):
    def scan(rank):
        x = torch.zeros(4, 0, requires_grad=True)
        ids = torch.zeros(4, dtype=torch.int64)
        out = exclusive_scan(x, 0, op, reverse=True, group=GROUP) + segmented_scan(x, ids, 0, op, group=GROUP)
        out.sum().backward()
        return out.shape, x.grad.shape

    assert run_ranks(N, scan) == [((4, 0), (4, 0))] * N


@pytest.mark.parametrize("shape", [(4, 3, 3, 0), (4, 3, 0, 2), (0, 3, 2, 2)])
def test_matrix_states_of_no_elements(shape):
    def scan(rank):
        m = torch.zeros(*shape[:-1], shape[-2], requires_grad=True)
        out = affine_scan(m, torch.zeros(shape), initial=torch.zeros(1, 1), group=GROUP)
        out.sum().backward()
        return out.shape, m.grad.shape

    assert run_ranks(N, scan) == [(shape, (*shape[:-1], shape[-2]))] * N


def scans(x):
    return x.cumsum(1) - x.cummax(1).values + x.flip(1).cumprod(1) + x.logcumsumexp(1)


def neighbors(x):
    return F.pad(x.cumsum(1).roll(1, 1), (0, 0, 2, 0))[:, :-2] + x.flip(1)


@pytest.mark.parametrize("model", [scans, neighbors])
def test_a_sequence_of_no_rows(model):
    x = torch.zeros(2, 0, 4, dtype=torch.float64, requires_grad=True)
    assert sp_compile.verify(model, x, sp=N, seq_dims={"x": 1}).worst == 0


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("length", [1, 2, 3, 5])
@pytest.mark.parametrize("widths", [(0, 2), (3, 0), (0, 7)])
def test_a_shift_by_more_rows_than_there_are(length, widths):
    def model(x):
        sums = x.cumsum(1)
        before, after = widths
        return sums - F.pad(sums, (0, 0, before, after))[:, after : after + x.shape[1]]

    x = torch.randn(2, length, 4, dtype=torch.float64, requires_grad=True)
    assert sp_compile.verify(model, x, sp=N).worst < 1e-12


def test_logsumexp_passes_a_gradient_to_rows_before_infinity():
    x = torch.tensor([0.0, torch.inf, 2.0], dtype=torch.float64, requires_grad=True)
    inclusive_scan(x, 0, "logsumexp").sum().backward()
    assert x.grad[0] == 1
    assert x.grad[2] == 0


def test_a_number_for_every_step_of_a_recurrence():
    assert linear_scan(0.5, torch.ones(3), 0, initial=2).tolist() == [2, 2, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_number_is_not_rounded_to_16_bits(dtype: torch.dtype) -> None:
    """In bfloat16, the factor 0.999 is 1."""
    b = torch.ones(2000, dtype=dtype)
    expected = linear_scan(0.999, b.float(), 0)
    torch.testing.assert_close(linear_scan(0.999, b, 0), expected.to(dtype))


X = torch.arange(3)
WRONG = {
    "SP502: inclusive_scan: x": lambda: inclusive_scan([1, 2], 0, group=GROUP),
    "SP502: segmented_scan: segment_ids": lambda: segmented_scan(X, None, 0, group=GROUP),
    "SP502: inclusive_scan: op": lambda: inclusive_scan(X, 0, ["sum"], group=GROUP),
    "SP502: inclusive_scan: dtype": lambda: inclusive_scan(X, 0, dtype="float32", group=GROUP),
    "SP502: linear_scan: accumulate_dtype": lambda: linear_scan(
        X.double(), X.double(), 0, accumulate_dtype="f", group=GROUP
    ),
    "SP502: inclusive_scan: reverse": lambda: inclusive_scan(X, 0, reverse="yes", group=GROUP),
    "SP502: inclusive_scan: dim": lambda: inclusive_scan(X, 0.0, group=GROUP),
    "SP502: inclusive_scan: length": lambda: inclusive_scan(X, 0, length=3.0, group=GROUP),
    "SP522.*uint64": lambda: inclusive_scan(X.to(torch.uint64), 0, group=GROUP),
    "SP523": lambda: inclusive_scan(X.float().requires_grad_(), 0, dtype=torch.int64, group=GROUP),
    "SP524": lambda: inclusive_scan(X.float().requires_grad_(), 0, dtype=torch.complex64, group=GROUP),
}


@pytest.mark.parametrize("message", WRONG)
def test_an_error_of_one_rank_is_raised_on_all(message):
    def scan(rank):
        code, _, cause = message.partition(": ")
        with pytest.raises(SpError, match=f"{code}.*rank 1: {cause}" if cause else f"{code}"):
            WRONG[message]() if rank == 1 else inclusive_scan(X, 0, group=GROUP)

    run_ranks(N, scan)


@pytest.mark.parametrize("size", [(20000,), (20000, 4)])
def test_gradients_of_long_rows_are_as_precise_as_torchs(size):
    """A rounded result would spoil a recurrence of exp(y_(j-1) - y_j) over thousands of rows."""
    x = torch.randn(size, generator=torch.Generator().manual_seed(0))

    def gradient(scan, x):
        x = x.clone().requires_grad_()
        scan(x).sum().backward()
        return x.grad.double()

    exact = gradient(lambda x: x.logcumsumexp(0), x.double())
    ours = (gradient(lambda x: inclusive_scan(x, 0, "logsumexp"), x) - exact).abs()
    torchs = (gradient(lambda x: x.logcumsumexp(0), x) - exact).abs()
    assert ours.max() <= 2 * torchs.max()
    assert ours.mean() <= 2 * torchs.mean()
