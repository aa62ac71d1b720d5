"""One element of each row is a gather; other reads stay.

EXPECTTEST_ACCEPT=1 rewrites the goldens.
"""

from __future__ import annotations

from collections.abc import Callable

import expecttest
import pytest
import torch
from support.golden import captured, show
from torch import Tensor

from sp_compile.passes.canonical.indexing import RewriteElementReads, SliceRanges

aten = torch.ops.aten
X, Y = torch.randn(2, 3, 5), torch.tensor([[3, -1, 0], [-4, 2, 2]])


class Goldens(expecttest.TestCase):
    """Each pass alone."""

    def test_elements_of_rows(self) -> None:
        gm = captured(lambda x, y: x.flatten(0, 1)[torch.arange(6), y.flatten()], X, Y)
        RewriteElementReads()(gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [2, 3, 5] = placeholder
y: [2, 3] = placeholder
flatten: [6, 5] = aten.flatten.using_ints(x, 0, 1)
flatten_1: [6] = aten.flatten.using_ints(y)
arange_default: [5] = aten.arange(5, device=cpu)
index_tensor: [6] = aten.index.Tensor(arange_default, [flatten_1])
unsqueeze_default: [6, 1] = aten.unsqueeze(index_tensor, -1)
gather_default: [6, 1] = aten.gather(flatten, -1, unsqueeze_default)
squeeze_dim: [6] = aten.squeeze.dim(gather_default, -1)
return (squeeze_dim,)""",
        )


@pytest.mark.parametrize(
    "program",
    [
        lambda x, y: x[0][torch.arange(3), y[1]],
        lambda x, y: x[torch.arange(2)[:, None], torch.arange(3), y],
        lambda x, y: x[torch.arange(2).view(2, 1), torch.arange(0, 3)[None], y],
        lambda x, y: x[0, :, :][torch.arange(0, 3, 1), y[0]] * 2,
    ],
)
def test_the_same_elements(program: Callable[..., Tensor]) -> None:
    gm = captured(program, X, Y)
    right = gm(X, Y)[0]
    RewriteElementReads()(gm)
    assert gm.graph.find_nodes(op="call_function", target=aten.gather.default)
    torch.testing.assert_close(gm(X, Y)[0], right, rtol=0, atol=0)


@pytest.mark.parametrize(
    "program",
    [
        lambda x, y: x[0][torch.arange(3) % 2, y[1]],
        lambda x, y: x[0][torch.arange(2), y[1, :2]],
        lambda x, y: x[0][torch.arange(1, 3), y[1, :2]],
        lambda x, y: x[0][:, y[1]],
        lambda x, y: x[torch.arange(2), y[:, 0]],
        lambda x, y: x[:, torch.arange(3), y[0]],
        lambda x, y: x[:, :, :3].transpose(0, 1)[torch.arange(3)[:, None], torch.arange(2), y.T[:, :1]],
        lambda x, y: x[0, :, :3][torch.arange(3)[:, None], torch.arange(3)],
    ],
)
def test_other_reads_of_rows_stay(program: Callable[..., Tensor]) -> None:
    gm = captured(program, X, Y)
    before = show(gm)
    RewriteElementReads()(gm)
    assert show(gm) == before


@pytest.mark.parametrize("wrong", [5, -6])
def test_an_element_out_of_range_is_an_error_as_before(wrong: int) -> None:
    gm = captured(lambda x, y: x[0][torch.arange(3), y[0]], X, Y)
    RewriteElementReads()(gm)
    with pytest.raises(IndexError, match="out of bounds"):
        gm(X, Y.where(Y != 0, wrong))


@pytest.mark.parametrize(
    ("program", "slices"),
    [
        (lambda x: x[:, torch.arange(1, 3)], 1),
        (lambda x: x[torch.arange(2)] + x[..., torch.arange(0, 5, 1)], 2),
        (lambda x: x[:, :, torch.arange(2, 5)[:, None].flatten()], 1),
        (lambda x: x[:, torch.arange(0, 3, 2)], 0),
        (lambda x: x[:, torch.arange(-2, 0)], 0),
        (lambda x: x[:, torch.arange(2)[:, None]], 0),
        (lambda x: x[torch.arange(2), torch.arange(2)], 0),
        (lambda x: x[:, torch.arange(2).flip(0)], 0),
    ],
)
def test_reads_of_ranges(program: Callable[..., Tensor], slices: int) -> None:
    """Rows that follow each other are a slice, in memory of its own."""
    gm = captured(program, X)
    SliceRanges()(gm)
    assert len(gm.graph.find_nodes(op="call_function", target=aten.slice.Tensor)) == slices
    result = gm(X)
    torch.testing.assert_close(result, program(X), rtol=0, atol=0)
    assert result.untyped_storage().data_ptr() != X.untyped_storage().data_ptr()
