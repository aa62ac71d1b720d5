"""Rows of an identity matrix are comparisons, one element of each row is a gather; what is read otherwise stays.

EXPECTTEST_ACCEPT=1 rewrites the goldens.
"""

from __future__ import annotations

from collections.abc import Callable

import expecttest
import pytest
import torch
from support.golden import captured, show
from torch import Tensor

from sp_compile.passes.canonical.canonicalize import Canonicalize
from sp_compile.passes.canonical.one_hot import OneHotRows
from sp_compile.passes.canonical.picked import PickedElements

aten = torch.ops.aten
IDS = torch.tensor([[3, -1, 0], [-4, 2, 2]])
X, Y = torch.randn(2, 3, 5), torch.tensor([[3, -1, 0], [-4, 2, 2]])


class Goldens(expecttest.TestCase):
    """Each pass alone."""

    def test_rows_of_a_table_that_was_cast(self) -> None:
        gm = captured(lambda ids: torch.eye(4).double()[ids], IDS)
        OneHotRows()(gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [2, 3] = placeholder
eye: [4, 4] = aten.eye(4, device=cpu, pin_memory=False)
_assert_tensor_metadata_default:  = aten._assert_tensor_metadata(eye, dtype=float32, device=cpu, layout=strided)
arange_default: [4] = aten.arange(4, device=cpu)
arange_default_1: [4] = aten.arange(4, device=cpu)
index_tensor: [2, 3] = aten.index.Tensor(arange_default, [x])
unsqueeze_default: [2, 3, 1] = aten.unsqueeze(index_tensor, -1)
eq_tensor: [2, 3, 4] = aten.eq.Tensor(unsqueeze_default, arange_default_1)
to_dtype: [2, 3, 4] = aten.to.dtype(eq_tensor, float64)
return (to_dtype,)""",
        )

    def test_elements_of_rows(self) -> None:
        gm = captured(lambda x, y: x.flatten(0, 1)[torch.arange(6), y.flatten()], X, Y)
        PickedElements()(gm)
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
        lambda ids: torch.eye(4)[ids],
        lambda ids: torch.eye(4, 6, dtype=torch.int32)[ids] * 2,
        lambda ids: torch.eye(4).bool()[ids[0]],
        lambda ids: torch.eye(4).index_select(0, ids[1].abs() % 4),
        lambda ids: torch.eye(5, 4)[ids.abs()].sum(1),
    ],
)
def test_the_same_rows(program: Callable[..., Tensor]) -> None:
    gm = captured(program, IDS)
    right = gm(IDS)[0]
    Canonicalize()(gm)
    assert not {node.target for node in gm.graph.nodes} & {aten.eye.default, aten.eye.m}
    torch.testing.assert_close(gm(IDS)[0], right, rtol=0, atol=0)


@pytest.mark.parametrize(
    "program",
    [
        lambda ids: torch.eye(4)[:, ids],
        lambda ids: torch.eye(4)[ids, ids],
        lambda ids: torch.eye(4).index_select(1, ids[0].abs()),
        lambda ids: (torch.eye(4) * 2)[ids],
        lambda ids: torch.eye(4)[0:2],
        lambda ids: torch.eye(4) @ torch.eye(4)[:, :1],
    ],
)
def test_other_reads_stay(program: Callable[..., Tensor]) -> None:
    gm = captured(program, IDS)
    before = show(gm)
    OneHotRows()(gm)
    assert show(gm) == before


@pytest.mark.parametrize("wrong", [4, -5])
def test_what_is_out_of_range_is_an_error_as_before(wrong: int) -> None:
    gm = captured(lambda ids: torch.eye(4)[ids], IDS)
    OneHotRows()(gm)
    with pytest.raises(IndexError, match="out of bounds"):
        gm(IDS.where(IDS != 0, wrong))


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
    PickedElements()(gm)
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
    PickedElements()(gm)
    assert show(gm) == before


@pytest.mark.parametrize("wrong", [5, -6])
def test_an_element_out_of_range_is_an_error_as_before(wrong: int) -> None:
    gm = captured(lambda x, y: x[0][torch.arange(3), y[0]], X, Y)
    PickedElements()(gm)
    with pytest.raises(IndexError, match="out of bounds"):
        gm(X, Y.where(Y != 0, wrong))
