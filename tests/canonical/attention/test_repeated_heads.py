"""Repeated key and value heads become grouped heads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.golden import captured
from support.models import floats
from torch import Tensor

from sp_compile.passes.canonical.canonicalize import Canonicalize
from sp_compile.passes.graph.call import OpCall, node_shape
from sp_compile.passes.sharding.attention_axes import attention_nodes

KEYS, HEADS, WIDTH = 6, 2, 4


@pytest.mark.parametrize("order", [(1, 2, 0, 3), (1, -2, 0, -1)])
def test_heads_repeated_before_a_permutation(order: tuple[int, ...]) -> None:
    """The dims of the permutation may count from the end."""

    def attend(x: Tensor, y: Tensor) -> Tensor:
        keys = y.unsqueeze(2).expand(KEYS, HEADS, 2, WIDTH).permute(order).reshape(1, 2 * HEADS, KEYS, WIDTH)
        return F.scaled_dot_product_attention(x, keys, keys, is_causal=True)

    args = floats(1, 2 * HEADS, KEYS, WIDTH), floats(KEYS, HEADS, WIDTH)
    gm = captured(attend, *args)
    Canonicalize()(gm)
    (node,) = attention_nodes(gm)
    assert OpCall(node)["enable_gqa"]
    assert node_shape(OpCall(node)["key"]) == (1, HEADS, KEYS, WIDTH)
    gm.recompile()
    torch.testing.assert_close(gm(*args), attend(*args))


@pytest.mark.parametrize("repeat", ["transposed", "of a batch", "without a batch"])
def test_other_forms_of_repeated_heads(repeat: str) -> None:
    """The first two are grouped, with the values of the program; keys of three dims broadcast over the batch."""

    def attend(x: Tensor, y: Tensor) -> Tensor:
        if repeat == "transposed":  # (B, S, h, 1, D) -> (B, h, r, S, D)
            keys = y.transpose(1, 2).unsqueeze(3).expand(3, KEYS, HEADS, 2, WIDTH).permute(0, 2, 3, 1, 4)
            keys = keys.reshape(3, 2 * HEADS, KEYS, WIDTH)
        elif repeat == "of a batch":
            keys = y[:, :, None].expand(3, HEADS, 2, KEYS, WIDTH).reshape(3, 2 * HEADS, KEYS, WIDTH)
        else:
            keys = y[:1, :, None].expand(1, HEADS, 2, KEYS, WIDTH).reshape(2 * HEADS, KEYS, WIDTH)
        return F.scaled_dot_product_attention(x, keys, keys, is_causal=True)

    args = floats(3, 2 * HEADS, KEYS, WIDTH), floats(3, HEADS, KEYS, WIDTH)
    gm = captured(attend, *args)
    Canonicalize()(gm)
    gm.recompile()
    torch.testing.assert_close(gm(*args), attend(*args))
    if repeat != "without a batch":
        (node,) = attention_nodes(gm)
        assert OpCall(node)["enable_gqa"]
