"""Writes at masks become selections of rows, whose shapes are static.

EXPECTTEST_ACCEPT=1 rewrites the goldens.
"""

from __future__ import annotations

from collections.abc import Callable

import expecttest
import pytest
import torch
import torch.nn.functional as F
from support.golden import captured, show
from torch import Tensor, nn

import sp_compile
from sp_compile.passes.canonical.masked_writes import ReplaceMaskedWrites

aten = torch.ops.aten
WRITES = (aten.index_put.default, aten.index_put_.default, aten.masked_scatter.default)
BATCH, SEQ, WIDTH = 2, 7, 4
MASK = torch.tensor([[0, 0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 0]]).bool()
COUNT = int(MASK.sum())
POSITIONS = MASK[0]  # of the sequence only
CHANNELS = torch.tensor([True, False, True, False])
ELEMENTS = torch.arange(BATCH * SEQ * WIDTH).reshape(BATCH, SEQ, WIDTH) % 3 == 0


def floats(*shape: int) -> Tensor:
    return torch.linspace(-1, 2, torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


class Goldens(expecttest.TestCase):
    """The pass alone."""

    def test_rows(self) -> None:
        gm = captured(scatter_expanded, floats(BATCH, SEQ, WIDTH), MASK, floats(COUNT, WIDTH))
        ReplaceMaskedWrites()(gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [2, 7, 4] = placeholder
y: [2, 7] = placeholder
z: [6, 4] = placeholder
unsqueeze: [2, 7, 1] = aten.unsqueeze(y, 2)
expand_as: [2, 7, 4] = aten.expand_as(unsqueeze, x)
_assert_tensor_metadata_default:  = aten._assert_tensor_metadata(expand_as, dtype=bool, device=cpu, layout=strided)
reshape_default: [2, 7] = aten.reshape(unsqueeze, [2, 7])
new_zeros_default: [1, 4] = aten.new_zeros(z, [1, 4])
cat_default: [7, 4] = aten.cat([z, new_zeros_default], 0)
reshape_default_1: [14] = aten.reshape(reshape_default, [14])
to_dtype: [14] = aten.to.dtype(reshape_default_1, int64)
cumsum_default: [14] = aten.cumsum(to_dtype, 0)
sub_tensor: [14] = aten.sub.Tensor(cumsum_default, 1)
reshape_default_2: [2, 7] = aten.reshape(sub_tensor, [2, 7])
to_dtype_1: [2, 7] = aten.to.dtype(reshape_default, int64)
sum_default: [] = aten.sum(to_dtype_1)
full_default: [] = aten.full([], 6, device=cpu, dtype=int64)
full_default_1: [] = aten.full([], 7, device=cpu, dtype=int64)
where_self: [2, 7] = aten.where.self(reshape_default, reshape_default_2, full_default)
le_tensor: [] = aten.le.Tensor(sum_default, full_default)
where_self_1: [2, 7] = aten.where.self(le_tensor, where_self, full_default_1)
index_tensor: [2, 7, 4] = aten.index.Tensor(cat_default, [where_self_1])
reshape_default_3: [2, 7, 1] = aten.reshape(reshape_default, [2, 7, 1])
where_self_2: [2, 7, 4] = aten.where.self(reshape_default_3, index_tensor, x)
return (where_self_2,)""",
        )


def put(x: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    x = x.clone()
    x[mask] = values
    return x


def put_to_positions(x: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    x = x.clone()
    x[:, mask] = values
    return x


def put_to_channels(x: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    x = x.clone()
    x[..., mask] = values
    return x


def add(x: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    return torch.index_put(x, (mask,), values, accumulate=True)


def scatter_rows(x: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    return x.masked_scatter(mask[..., None], values)


def scatter_expanded(x: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    return x.masked_scatter(mask[..., None].expand_as(x).to(x.device), values)


def scatter_repeated(x: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    return x.masked_scatter(mask[..., None].repeat(1, 1, WIDTH), values)


def scatter(x: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    return x.masked_scatter(mask, values)


def scatter_to_larger(x: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    return x[:1].masked_scatter(mask[..., None], values)


NONE = MASK & False
CASES = {
    "rows": (put, MASK, floats(COUNT, WIDTH)),
    "rows of one column": (put, MASK, floats(COUNT, 1)),
    "no row": (put, NONE, floats(0, WIDTH)),
    "an element": (put, MASK, floats(WIDTH)),
    "a number": (put, MASK, floats(1, 1)),
    "each element": (put, ELEMENTS, floats(int(ELEMENTS.sum()))),
    "a number to elements": (put, ELEMENTS, floats()),
    "rows of each batch entry": (put_to_positions, POSITIONS, floats(BATCH, 2, WIDTH)),
    "rows of all batch entries": (put_to_positions, POSITIONS, floats(2, WIDTH)),
    "an element of each batch entry": (put_to_positions, POSITIONS, floats(BATCH, 1, WIDTH)),
    "an element to positions": (put_to_positions, POSITIONS, floats(WIDTH)),
    "channels": (put_to_channels, CHANNELS, floats(BATCH, SEQ, 2)),
    "channels of all positions": (put_to_channels, CHANNELS, floats(2)),
    "channels of one column": (put_to_channels, CHANNELS, floats(SEQ, 1)),
    "added": (add, MASK, floats(COUNT, WIDTH)),
    "scattered": (scatter_rows, MASK, floats(COUNT, WIDTH)),
    "scattered, more rows": (scatter_rows, MASK, floats(COUNT + 2, WIDTH)),
    "scattered, parts of rows": (scatter_rows, MASK, floats(COUNT * WIDTH + 3)),
    "scattered, none": (scatter_rows, NONE, floats(0, WIDTH)),
    "scattered, expanded": (scatter_expanded, MASK, floats(COUNT, WIDTH)),
    "scattered, repeated": (scatter_repeated, MASK, floats(COUNT, WIDTH)),
    "scattered elements": (scatter, ELEMENTS, floats(BATCH * SEQ * WIDTH)),
    "scattered channels": (scatter, CHANNELS, floats(BATCH * SEQ * WIDTH)),
    "scattered positions": (scatter, POSITIONS[:, None], floats(BATCH * 2 * WIDTH)),
    "scattered everywhere": (scatter, torch.tensor(True), floats(BATCH * SEQ * WIDTH)),
    "scattered to a larger result": (scatter_to_larger, MASK, floats(COUNT, WIDTH)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_values_and_gradients(name: str) -> None:
    program, mask, values = CASES[name]
    x, weight = floats(BATCH, SEQ, WIDTH), torch.randn(BATCH, SEQ, WIDTH, dtype=torch.float64)
    gm = captured(program, x, mask, values)
    run = ReplaceMaskedWrites()
    run(gm)
    assert run.changes == 1
    assert not any(node.target in WRITES for node in gm.graph.nodes)

    def result_and_grads(fn: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [x.clone().requires_grad_(), values.clone().requires_grad_()]
        result = fn(leaves[0], mask, leaves[1])
        grads = torch.autograd.grad((result * weight).sum(), leaves, allow_unused=True, materialize_grads=True)
        return [result, *grads]

    for found, right in zip(result_and_grads(gm), result_and_grads(program), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("program", "count"), [(put, COUNT - 1), (put, COUNT + 1), (scatter_rows, COUNT - 1)])
def test_another_number_of_rows_raises(program: Callable[..., Tensor], count: int) -> None:
    x, other = floats(BATCH, SEQ, WIDTH), torch.arange(BATCH * SEQ).reshape(BATCH, SEQ) < count
    gm = captured(program, x, other, floats(count, WIDTH))
    ReplaceMaskedWrites()(gm)
    with pytest.raises(IndexError, match="out of bounds"):
        gm(x, MASK, floats(count, WIDTH))


class Merged(nn.Module):
    """Attention after a write of rows that a layer computes."""

    def __init__(self, write: Callable[..., Tensor]) -> None:
        super().__init__()
        self.rows, self.qkv, self.write = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3 * WIDTH), write

    def forward(self, x: Tensor, mask: Tensor, values: Tensor) -> Tensor:
        x = self.write(x.sin(), mask, self.rows(values))
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum()


def positions(*written: int) -> Tensor:
    return torch.isin(torch.arange(BATCH * SEQ).reshape(BATCH, SEQ), torch.tensor(written))


# Positions on no rank, on one rank, and on all; of 7 positions, the last ranks have fewer.
MASKS = {"none": NONE, "first": positions(0, 1, 7), "last": positions(6, 13), "some": MASK, "all": ~NONE}


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("write", [put, add, scatter_rows, scatter_expanded])
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("mask", MASKS)
def test_rows_on_shards(mask: str, n: int, write: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    values = torch.randn(int(MASKS[mask].sum()), WIDTH, dtype=torch.float64, requires_grad=True)
    x = torch.randn(BATCH, SEQ, WIDTH, dtype=torch.float64, requires_grad=True)
    report = sp_compile.verify(Merged(write).double(), x, MASKS[mask], values, sp=n)
    assert report.worst < 1e-12
    assert report.work.flops_share > 0.8  # not the layer of the rows, which are no sequence
