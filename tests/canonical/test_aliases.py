"""torch has several names for one op, and several ways to cut and to join: canonicalize makes the same graph of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.golden import captured
from torch import Tensor

from sp_compile.passes.canonical.canonicalize import Canonicalize
from sp_compile.passes.graph.node_info import set_node_info

sdpa = F.scaled_dot_product_attention
Join = Callable[[Sequence[Tensor]], Tensor]
SCAN = {"sp.linear_scan.default", "aten.cumsum.default", "sp.scan.default"}
ATTENTION = {"aten.scaled_dot_product_attention.default"}


def attention(mul: Any, div: Any, fill: Any = torch.masked_fill) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        scores = div(mul(x @ x.mT, 2.0), 4.0)
        at = torch.arange(x.shape[1])
        return torch.softmax(fill(scores, torch.gt(at, at[:, None]), -torch.inf), -1) @ x

    return run


def special(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1])
    scores = torch.divide(torch.multiply(x @ torch.swapaxes(x, 1, 2), 2.0), 4.0)
    return torch.special.softmax(scores.masked_fill(torch.greater(at, at[:, None]), -torch.inf), -1) @ x


def loop(mul: Any, join: Join, keeps: bool = False) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        h, out = torch.zeros(2, 8), []
        for t in range(x.shape[1]):
            h = mul(h, x[:, t].sigmoid()) + x[:, t]
            out.append(h[:, None] if keeps else h)
        return join(out)

    return run


def one_by_one(join: Join) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        heads = [x[..., i : i + 4] for i in (0, 4)]
        return join([sdpa(h, h * 0.5, h * 2, is_causal=True) for h in heads])

    return run


def rounds(cut: Callable[[Tensor, int, int], Tensor], join: Join) -> Callable[[Tensor], Tensor]:
    """Hillis and Steele."""

    def run(x: Tensor) -> Tensor:
        step, length = 1, x.shape[1]
        while step < length:
            x = join([cut(x, 0, step), cut(x, step, length) + cut(x, 0, length - step)])
            step *= 2
        return x

    return run


def shifted(zeros: Callable[[], Tensor], join: Join) -> Callable[[Tensor], Tensor]:
    return lambda x: join([zeros(), x.cumsum(1)[:, :-1]])


def masked(at: Callable[[int], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: sdpa(x, x, x, attn_mask=at(x.shape[1])[:, None] >= at(x.shape[1]))


def sliced(x: Tensor, start: int, stop: int) -> Tensor:
    return x[:, start:stop]


def narrowed(x: Tensor, start: int, stop: int) -> Tensor:
    return x.narrow(1, start, stop - start)


def split(x: Tensor, start: int, stop: int) -> Tensor:
    return x.split([start, stop - start, x.shape[1] - stop], 1)[1]


def joined(op: Any, *dim: int) -> Join:
    return lambda xs: op(list(xs), *dim)


CAT, STACK = joined(torch.cat, 1), joined(torch.stack, 1)
ALIASED_FORMS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], set[str]]] = {
    "multiply, divide": (attention(torch.multiply, torch.divide), attention(torch.mul, torch.div), ATTENTION),
    "true_divide": (attention(torch.mul, torch.true_divide), attention(torch.mul, torch.div), ATTENTION),
    "special, swapaxes, greater": (special, attention(torch.mul, torch.div), ATTENTION),
    "loop of multiply": (loop(torch.multiply, STACK), loop(torch.mul, STACK), SCAN),
    "loop to concat": (loop(torch.mul, joined(torch.concat, 1), True), loop(torch.mul, CAT, True), SCAN),
    "loop to hstack": (loop(torch.mul, torch.hstack, True), loop(torch.mul, CAT, True), SCAN),
    "subtract": (lambda x: torch.subtract(x.cumsum(1), x), lambda x: x.cumsum(1) - x, SCAN),
    "fliplr": (lambda x: torch.fliplr(x.fliplr().cumsum(1)), lambda x: x.flip(1).cumsum(1).flip(1), SCAN),
    "repeated zeros": (
        shifted(lambda: torch.zeros(1, 1, 8).repeat(2, 1, 1), CAT),
        shifted(lambda: torch.zeros(2, 1, 8), CAT),
        SCAN,
    ),
    "tiled zeros": (
        shifted(lambda: torch.zeros(1, 8).tile(2, 1, 1), torch.hstack),
        shifted(lambda: torch.zeros(2, 1, 8), CAT),
        SCAN,
    ),
    "positions of a split": (masked(lambda s: torch.arange(s + 3).split([s, 3])[0]), masked(torch.arange), ATTENTION),
    "positions of halves": (
        masked(lambda s: torch.concatenate(torch.arange(2 * s).chunk(2))[:s]),
        masked(torch.arange),
        ATTENTION,
    ),
    "positions of an unbind": (
        masked(lambda s: torch.stack([torch.arange(s), torch.arange(s) + 5]).unbind()[0]),
        masked(torch.arange),
        ATTENTION,
    ),
}


def ops_of(f: Callable[[Tensor], Tensor], of: set[str]) -> Counter[str]:
    """The ops that canonicalize recognizes in the function, with their arguments, after the values were compared."""
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    gm = captured(f, x)
    for node in gm.graph.find_nodes(op="placeholder"):
        set_node_info(node, requires_grad=False)
    Canonicalize()(gm)
    found = gm(x)
    torch.testing.assert_close(found[0] if isinstance(found, tuple) else found, f(x))

    def word(value: object) -> str:
        return "*" if isinstance(value, torch.fx.Node) else str(value)

    calls = [n for n in gm.graph.nodes if str(n.target) in of]
    return Counter(f"{n.target} {[*map(word, n.args)]} { {k: word(v) for k, v in n.kwargs.items()} }" for n in calls)


@pytest.mark.parametrize("name", ALIASED_FORMS)
def test_another_name_of_an_op_is_the_op(name: str) -> None:
    other, plain, ops = ALIASED_FORMS[name]
    found = ops_of(other, ops)
    assert found == ops_of(plain, ops)
    assert found.total() == 1
