"""Rows of an identity matrix are comparisons; what reads it otherwise stays. EXPECTTEST_ACCEPT=1 rewrites."""

from __future__ import annotations

import expecttest
import pytest
import torch
from support.golden import captured, show

from sp_compile.passes.canonical.canonicalize import Canonicalize
from sp_compile.passes.canonical.one_hot import OneHotRows

aten = torch.ops.aten
IDS = torch.tensor([[3, -1, 0], [-4, 2, 2]])


class Goldens(expecttest.TestCase):
    """The pass alone."""

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
def test_the_same_rows(program: object) -> None:
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
def test_other_reads_stay(program: object) -> None:
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
