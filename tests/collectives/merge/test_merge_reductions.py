"""merge_reductions on chains of all_reduces: merged chains, refused ones with their reasons, and equal values."""

import math
from collections.abc import Callable

import expecttest
import pytest
import torch
from support.golden import captured, show
from support.parallel.merging import (
    CUBE,
    GRID,
    OPS,
    X,
    ag,
    ar,
    c10d,
    check_unchanged,
    collectives,
    merged,
    rs,
    traced,
    two,
)
from torch import Tensor

from sp_compile.passes.collectives.merge.merge_reductions import MergeReductions
from sp_compile.passes.cost.known_groups import KnownGroups


class Golden(expecttest.TestCase):
    def test_all_reduces(self) -> None:
        def fn(x: Tensor) -> Tensor:
            h = ar(x @ x.T, "sum", "b").view(2, 8).transpose(0, 1)
            return ar(h * 0.5, "sum", "a").relu()

        gm, (note,) = merged(fn, X)
        self.assertExpectedInline(
            show(gm),
            """\
x_1: [4, 6] = placeholder
permute: [6, 4] = aten.permute(x_1, [1, 0])
mm: [4, 4] = aten.mm(x_1, permute)
view: [2, 8] = aten.view(mm, [2, 8])
transpose: [8, 2] = aten.transpose.int(view, 0, 1)
mul: [8, 2] = aten.mul.Tensor(transpose, 0.5)
all_reduce_1: [8, 2] = _c10d_functional.all_reduce(mul, sum, a+b)
wait_tensor_1: [8, 2] = _c10d_functional.wait_tensor(all_reduce_1)
relu: [8, 2] = aten.relu(wait_tensor_1)
return relu""",
        )
        self.assertExpectedInline(f"{note.node}: {note.label}", "all_reduce_1: merge_reductions")

    def test_exported(self) -> None:
        gm = captured(lambda x: ar(ar(x, "sum", "a"), "avg", "b"), torch.ones(4, 6))
        MergeReductions(GRID, "always")(gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [4, 6] = placeholder
div_tensor: [4, 6] = aten.div.Tensor(x, 3)
all_reduce_1: [4, 6] = _c10d_functional.all_reduce(div_tensor, sum, a+b)
wait_tensor_1: [4, 6] = _c10d_functional.wait_tensor(all_reduce_1)
return (wait_tensor_1,)""",
        )

    def test_gathers_and_scatters(self) -> None:
        def fn(x: Tensor) -> Tensor:
            return ag(ag(rs(rs(x, "avg", 2, "a"), "avg", 3, "b"), 3, "b"), 2, "a")

        gm, notes = merged(fn, torch.ones(12, 2))
        self.assertExpectedInline(
            show(gm),
            """\
x_1: [12, 2] = placeholder
reduce_scatter_tensor_1: [2, 2] = _c10d_functional.reduce_scatter_tensor(x_1, avg, 6, a+b)
wait_tensor_1: [2, 2] = _c10d_functional.wait_tensor(reduce_scatter_tensor_1)
all_gather_into_tensor_1: [12, 2] = _c10d_functional.all_gather_into_tensor(wait_tensor_1, 6, a+b)
wait_tensor_3: [12, 2] = _c10d_functional.wait_tensor(all_gather_into_tensor_1)
return wait_tensor_3""",
        )
        assert len(notes) == 2

    def test_shared_strides(self) -> None:
        """A view of a collective's contiguous result may be illegal for its operand."""
        gm, _ = merged(lambda x: ar(ar(x.t(), "max", "a").view(24), "max", "b"), X)
        self.assertExpectedInline(
            show(gm),
            """\
x_1: [4, 6] = placeholder
t: [6, 4] = aten.t(x_1)
clone_default: [6, 4] = aten.clone(t, memory_format=contiguous_format)
view: [24] = aten.view(clone_default, [24])
all_reduce_1: [24] = _c10d_functional.all_reduce(view, max, a+b)
wait_tensor_1: [24] = _c10d_functional.wait_tensor(all_reduce_1)
return wait_tensor_1""",
        )


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("first", OPS)
@pytest.mark.parametrize("second", OPS)
def test_every_pair_of_reductions(first: str, second: str) -> None:
    fn = two(first, second)
    if first == second or {first, second} == {"sum", "avg"}:
        gm, _ = merged(fn, X)
        assert collectives(gm) == ["all_reduce a+b"]
    else:
        check_unchanged(fn, X)


def test_average_divides_once() -> None:
    gm, _ = merged(two("avg", "avg"), X)
    (reduce,) = gm.graph.find_nodes(op="call_function", target=c10d.all_reduce.default)
    assert reduce.args[1:] == ("avg", "a+b")
    for ops, divisor in ((("avg", "sum"), 2), (("sum", "avg"), 3)):
        gm, _ = merged(two(*ops), X)
        (divide,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.div.Tensor)
        assert divide.args[1] == divisor
    gm, _ = merged(lambda x: ar(ar(ar(x, "avg", "a"), "sum", "b"), "avg", "c"), X, CUBE)
    (divide,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.div.Tensor)
    assert divide.args[1] == 4
    assert collectives(gm) == ["all_reduce a+b+c"]


def test_integers() -> None:
    x = torch.ones(4, 6, dtype=torch.int64)
    for op in ("sum", "max", "min", "product"):
        assert collectives(merged(two(op, op), x)[0]) == ["all_reduce a+b"]
    check_unchanged(two("avg", "avg"), x)
    assert len(collectives(merged(two("max", "max", between=Tensor.long), x.int())[0])) == 1
    gm = traced(two("sum", "sum", between=Tensor.long), x.int())  # a sum may overflow before it is widened
    assert not MergeReductions(GRID, "always")(gm).modified


BETWEEN: dict[str, tuple[Callable, str]] = {
    "view": (lambda h: h.view(3, 8), "sum avg max min product"),
    "permute": (lambda h: h.permute(1, 0), "sum avg max min product"),
    "unsqueeze, squeeze": (lambda h: h.unsqueeze(0).transpose(0, 1).squeeze(1), "sum avg max min product"),
    "expand": (lambda h: h.expand(2, 4, 6), "sum avg max min product"),
    "clone": (lambda h: h.t().contiguous(), "sum avg max min product"),
    "times": (lambda h: h * 0.25, "sum avg max min"),
    "divided": (lambda h: h / 3, "sum avg max min"),
    "negative": (lambda h: -h * -2, "sum avg"),
    "sign": (lambda h: h / -3, "sum avg"),
    "zero": (lambda h: h * 0, "sum avg"),
    "infinite": (lambda h: h * math.inf, ""),
    "by zero": (lambda h: h / 0, ""),
    "plus": (lambda h: h + 1, ""),
    "relu": (lambda h: h.relu(), ""),
    "slice": (lambda h: h[1:], ""),  # another one on each rank?
    "tensor": (lambda h: h * torch.ones(()), ""),
    "square": (lambda h: h * h, ""),
}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("between", BETWEEN)
def test_ops_between(between: str) -> None:
    fn, allowed = BETWEEN[between]
    for op in OPS:
        gm = traced(two(op, op, between=fn), X)
        if op in allowed.split():
            gm, _ = merged(two(op, op, between=fn), X)
        else:
            assert not MergeReductions(GRID, "always")(gm).modified
        assert len(collectives(gm)) == (1 if op in allowed.split() else 2), op


def test_casts() -> None:
    """Casts to a wider dtype are merged in that dtype; casts to a narrower one would change the sums."""
    gm, _ = merged(two("sum", "avg", between=Tensor.double), X.bfloat16())
    assert collectives(gm) == ["all_reduce a+b"]
    (reduce,) = gm.graph.find_nodes(op="call_function", target=c10d.all_reduce.default)
    assert reduce.meta["val"].dtype == torch.float64
    gm = traced(two("sum", "sum", between=Tensor.bfloat16), X)
    assert not MergeReductions(GRID, "always")(gm).modified


def test_long_chains() -> None:
    def fn(x: Tensor) -> Tensor:
        return ar(ar(ar(x, "sum", "c").t(), "sum", "a") * 2, "sum", "b")

    assert collectives(merged(fn, X, CUBE)[0]) == ["all_reduce a+b+c"]
    # Only neighbors: two communicators, and one for all three is missing.
    without = KnownGroups({k: v for k, v in CUBE.members.items() if k != "a+b+c"}, CUBE.nodes)
    slow = {"all_reduce_latency": 1, "step_latency": 0, "all_reduce_bandwidth": 1}
    gm, _ = merged(fn, X, without, cost=slow)
    assert len(collectives(gm)) == 2
    # The first and the last are merged around one that stays.
    around = KnownGroups({k: CUBE.members[k] for k in ("a", "b", "c", "b+c")}, CUBE.nodes)
    gm, _ = merged(fn, X, around)
    assert collectives(gm) == ["all_reduce a", "all_reduce b+c"]


def test_very_long_chains() -> None:
    """They are looked at in pieces; here every other pair of neighbors can be merged."""

    def fn(x: Tensor) -> Tensor:
        for _ in range(5):
            x = ar(ar(x, "max", "a"), "max", "b")
        return x

    assert len(collectives(merged(fn, X)[0])) == 5


def test_mixtures_split_a_chain() -> None:
    def fn(x: Tensor) -> Tensor:
        return ar(ar(ar(ar(x, "sum", "a"), "sum", "b"), "max", "a"), "max", "c")

    gm, notes = merged(fn, X, CUBE)
    assert collectives(gm) == ["all_reduce a+b", "all_reduce a+c"]
    assert [note.label for note in notes] == ["not merge_reductions", "merge_reductions", "merge_reductions"]


def test_used_elsewhere() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        h = ar(x, "sum", "a")
        return h, ar(h, "sum", "b")

    check_unchanged(fn, X)


def test_written_in_between() -> None:
    def fn(x: Tensor) -> Tensor:
        h = ar(x, "sum", "a")
        x.add_(1)
        return ar(h, "sum", "b")

    check_unchanged(fn, X)


def test_two_chains_and_a_lone_collective() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return ar(ar(x, "sum", "a"), "sum", "b"), ar(ar(x, "max", "b"), "max", "a"), ar(x, "min", "a")

    gm, notes = merged(fn, X)
    assert collectives(gm) == ["all_reduce a+b", "all_reduce a+b", "all_reduce a"]
    assert len(notes) == 2


def test_without_waits() -> None:
    gm, _ = merged(lambda x: c10d.all_reduce(c10d.all_reduce(x, "sum", "a"), "sum", "b"), X)
    assert collectives(gm) == ["all_reduce a+b"]
