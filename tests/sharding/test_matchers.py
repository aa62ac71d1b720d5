"""Classification of a node by its rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.golden import captured
from torch import Tensor
from torch.fx import Node

from sp_compile.passes.graph.call import is_same_argument
from sp_compile.passes.sharding.matchers import (
    constant_value,
    is_cast_op,
    is_copy,
    is_order_preserving,
    is_same_call,
    match_join,
    match_pad,
    match_piece,
    permutation_of,
    skip_widening_cast,
    value_origin,
)


def last(function: Callable[[Tensor], Tensor]) -> Node:
    """The node of the function's value; x is (2, 6, 3)."""
    gm = captured(function, torch.randn(2, 6, 3))
    result = gm.graph.output_node().args[0]
    return result[0] if isinstance(result, tuple | list) else result


@pytest.mark.parametrize(
    ("function", "value"),
    [
        (lambda x: torch.zeros(6).view(2, 3).clone().expand(4, 2, 3)[1:], 0),
        (lambda x: torch.full((2,), 2.5).double().unsqueeze(1), 2.5),
        (lambda x: torch.ones_like(x, dtype=torch.bool).mT, 1),
        (lambda x: torch.full((2,), 2.5).long(), None),
        (lambda x: torch.ones(2, 2).tril(), None),
        (lambda x: F.pad(torch.ones(2), (1, 0)), None),
        (lambda x: torch.ones(2).view(torch.int32), None),
        (lambda x: x.new_zeros(3) + x[0, 0], None),
    ],
)
def test_constants(function: Callable[[Tensor], Tensor], value: float | None) -> None:
    assert constant_value(last(function)) == value


@pytest.mark.parametrize(
    ("function", "piece"),
    [
        (lambda x: x[:, 2:5] + 0, (1, 2, 3, 1, True)),
        (lambda x: x[:, -1] + 0, (1, 5, 1, 1, False)),
        (lambda x: x[:, 1::2] + 0, (1, 1, 3, 2, True)),
        (lambda x: x.narrow(1, 2, 3) + 0, (1, 2, 3, 1, True)),
        (lambda x: x.split([1, 5], 1)[1] + 0, (1, 1, 5, 1, True)),
        (lambda x: x.unbind(2)[1] + 0, (2, 1, 1, 1, False)),
        (lambda x: x.flip(1) + 0, None),
    ],
)
def test_pieces(function: Callable[[Tensor], Tensor], piece: tuple[Any, ...] | None) -> None:
    found = last(function).args[0]
    one = match_piece(found)
    known = None if one is None else (one.dim, one.start, one.length, one.step, one.keeps_dim)
    assert known == piece
    if one is not None:
        assert one.source.op == "placeholder"


@pytest.mark.parametrize(
    ("function", "joined"),
    [
        (lambda x: torch.cat([x, x + 1], -2), (1, False)),
        (lambda x: torch.stack([x, x + 1], -1), (3, True)),
        (lambda x: torch.hstack([x, x + 1]), (1, False)),
        (lambda x: torch.vstack(x.unbind(0)), (0, False)),
        (lambda x: torch.dstack([x[0], x[1]]), None),
        (lambda x: torch.cat([x, x[:, :0]], 1), None),
    ],
)
def test_joins(function: Callable[[Tensor], Tensor], joined: tuple[int, bool] | None) -> None:
    assert match_join(last(function)) == joined


def test_orders_and_copies() -> None:
    assert permutation_of(last(lambda x: x.movedim(0, 2))) == (1, 2, 0)
    assert permutation_of(last(lambda x: torch.einsum("abc->cab", x))) == (2, 0, 1)
    assert permutation_of(last(lambda x: torch.einsum("abc->ca", x))) is None
    assert permutation_of(last(lambda x: x.flip(1))) is None
    assert is_copy(last(lambda x: x.clone()))
    assert not is_copy(last(lambda x: x.detach()))
    assert is_copy(last(lambda x: x.type_as(x[0])))  # another shape, of which only the dtype is read
    assert not is_copy(last(lambda x: x.type_as(x[0].half())))
    assert is_cast_op(last(lambda x: x.half()))
    assert not is_copy(last(lambda x: x.half()))
    assert is_order_preserving(last(lambda x: x.flatten(0, 1)))
    assert not is_order_preserving(last(lambda x: x.mT))
    assert not is_order_preserving(last(lambda x: x[:, None].expand(2, 5, 6, 3)))


def test_pads() -> None:
    pad = match_pad(last(lambda x: F.pad(x, (0, 0, 1, 2), value=3.0)))
    assert pad is not None
    assert (pad.dim, pad.before, pad.after, pad.fill) == (1, 1, 2, 3.0)


@pytest.mark.parametrize(
    ("function", "undone"),
    [
        (lambda x: x.mT.clone().mT.reshape(-1).view(x.shape), True),
        (lambda x: x.permute(1, 2, 0).permute(2, 0, 1), True),
        (lambda x: x.permute(1, 2, 0).permute(1, 2, 0), False),
        (lambda x: x.mT.reshape(2, 6, 3), False),
        (lambda x: x[:, 1:].unsqueeze(0).squeeze(0), False),
        (lambda x: x.double().float(), False),
        (lambda x: x.detach() + 0, False),
    ],
)
def test_origins(function: Callable[[Tensor], Tensor], undone: bool) -> None:
    assert (value_origin(last(function)).op == "placeholder") == undone


def test_adjoints_of_complex_numbers_conjugate() -> None:
    assert value_origin(last(lambda x: x.mH.mT)).op == "placeholder"
    assert value_origin(last(lambda x: torch.complex(x, x).mH.mT)).target != torch.ops.aten.complex.default
    assert value_origin(last(lambda x: torch.complex(x, x).mT.mT)).target == torch.ops.aten.complex.default


def test_constants_of_equal_calls_have_one_type() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    call, *others = (graph.call_function(torch.ops.aten.mul.Tensor, (x, c)) for c in (1, 1, 1.0, True))
    assert [is_same_call(call, other) for other in others] == [True, False, False]
    assert is_same_argument([x, 0.0], [x, 0.0])
    assert not is_same_argument([x, 0.0], [x, -0.0])


@pytest.mark.parametrize(
    ("function", "exact"),
    [
        (lambda x: x.double().float(), True),
        (lambda x: (x > 0).half().bool(), True),
        (lambda x: x.int().long().int(), True),
        (lambda x: x.half().float().half(), True),
        (lambda x: x.half().bfloat16().half(), False),
        (lambda x: x.half().float(), False),
        (lambda x: x.int().float().int(), False),
        (lambda x: x.byte().int().byte(), False),  # it is, but of another sign
        (lambda x: x.double().mT.float(), False),
    ],
)
def test_casts_there_and_back(function: Callable[[Tensor], Tensor], exact: bool) -> None:
    assert (skip_widening_cast(last(function)) is not None) == exact
