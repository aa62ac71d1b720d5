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
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from sp_compile.passes.canonical.canonicalize import Canonicalize
from sp_compile.passes.capture.capture import capture
from sp_compile.passes.capture.shorthands import SHORTHANDS
from sp_compile.passes.graph.node_info import set_node_info
from sp_compile.passes.sharding.rule import RULES

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


def write_to(view: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        h = x.sin()
        view(h).multiply_(2)
        return h + h.mT.mT.reshape_as(x)

    return run


def swapped_in_place(x: Tensor) -> tuple[Tensor, ...]:
    h = x.sin()
    return h.swapaxes_(0, 1).multiply_(2), h, h.tile(2)


def in_a_branch(x: Tensor) -> Tensor:
    return torch.cond(x.sum().real > 0, lambda x: torch.multiply(x, 2), lambda x: torch.subtract(x, 1), (x,))


DECOMPOSED: dict[str, Callable[[Tensor], Any]] = {
    "in a branch": in_a_branch,
    "joins": lambda x: [torch.hstack([x, x]), torch.vstack([x[0, 0], x[0, 1]]), torch.dstack([x[0], x[1]])],
    "meshgrid": lambda x: [g.clone() for g in torch.meshgrid(x[0, 0], x[0, 1], indexing="xy")],
    "shapes of others": lambda x: [x[0].expand_as(x), x.view_as(x.flatten()), *torch.broadcast_tensors(x, x[0, 0])],
    "splits": lambda x: [h.sin() for h in (*torch.tensor_split(x, [3, 1], 1), *torch.hsplit(x, 3))],
    "swapped in place": swapped_in_place,
    "take_along_dim": lambda x: torch.take_along_dim(x, x.abs().argsort(1) - 6, 1),
    "the operand itself": lambda x: [x.conj() + 1, x.real, torch.atleast_1d(x)],
    "write to a conjugate": write_to(torch.conj),
    "write to a part": write_to(torch.real),
    "write to an adjoint": write_to(torch.adjoint),
    "write to pieces": write_to(lambda h: torch.tensor_split(h, 2, 1)[1]),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("name", DECOMPOSED)
def test_captured_graphs_have_no_shorthands(name: str, dtype: torch.dtype) -> None:
    """By torch.export and by torch.compile, also in bodies; the values are equal."""
    f = DECOMPOSED[name]
    x = torch.randn(2, 6, 8, dtype=dtype, generator=torch.Generator().manual_seed(0))
    graphs = []

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(capture(gm, inputs))
        results = len(gm.graph.output_node().args[0])
        return lambda *args: graphs[-1](*args)[:results]  # without hidden results

    expected = pytree.tree_leaves(f(x.clone()))
    torch.testing.assert_close(pytree.tree_leaves(torch.compile(f, backend=backend)(x.clone())), expected)
    graphs.append(captured(f, x.clone()))
    torch.testing.assert_close(pytree.tree_leaves(graphs[-1](x.clone())), expected)
    bodies = [body for gm in graphs for body in gm.modules() if isinstance(body, GraphModule)]
    assert len(graphs) == 2
    assert not [node for body in bodies for node in body.graph.nodes if node.target in SHORTHANDS]


def test_shorthands_have_no_rules() -> None:
    """A rule of an op that no captured graph has would never be tested in a program."""
    assert not SHORTHANDS.keys() & RULES.keys()
