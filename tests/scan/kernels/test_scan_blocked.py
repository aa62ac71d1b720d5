"""Scans of any associative function in blocks: results, and counted calls within their bound."""

import math
from typing import Any

import pytest
import torch
from support.scans.scanning import linear_scan_by_loop
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sp_compile.lowering.scan.kernels import blocked
from sp_compile.lowering.scan.monoids import MONOIDS, compose_affine, segment_combine, select_combine
from sp_compile.lowering.torch_compat import make_fx, pytree

LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 63, 64, 65, 100, 1000, 1024, 1025)


def scan(combine: Any, states: Any, dim: int) -> Any:
    return blocked.blocked_inclusive(combine, states, dim)[0]


def matrix_product(left: Tensor, right: Tensor) -> Tensor:
    """Associative, and does not commute."""
    return right @ left


@pytest.mark.parametrize("n", LENGTHS)
def test_combines_in_order(n: int) -> None:
    angles = torch.rand(n, 3, dtype=torch.float64)
    states = torch.linalg.matrix_exp(torch.randn(n, 3, 3, dtype=torch.float64) - torch.diag_embed(angles))
    states = states / torch.linalg.matrix_norm(states, 2)[:, None, None]
    expected = [states[0]]
    for state in states[1:]:
        expected.append(matrix_product(expected[-1], state))
    found, last = blocked.blocked_inclusive(matrix_product, states, 0)
    torch.testing.assert_close(found, torch.stack(expected))
    torch.testing.assert_close(last, expected[-1][None])


@pytest.mark.parametrize("n", [1, 2, 33, 100])
@pytest.mark.parametrize("dim", [0, 1, -2])
def test_takes_trees_of_states_along_any_dim(n: int, dim: int) -> None:
    shape = [4, 2, 3]
    shape[dim] = n
    a, b = torch.rand(2, *shape, dtype=torch.float64)

    def combine(left: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, Tensor]:
        a, b = compose_affine((left["a"], left["b"]), (right["a"], right["b"]))
        return {"a": a, "b": b}

    out = scan(combine, {"a": a, "b": b}, dim)
    torch.testing.assert_close(out["a"], a.cumprod(dim))
    torch.testing.assert_close(out["b"], linear_scan_by_loop(a, b, dim))


def test_of_no_states() -> None:
    assert scan(torch.add, torch.ones(2, 0, 3), 1).shape == (2, 0, 3)


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_differentiable_twice(n: int) -> None:
    a, b = (x.requires_grad_() for x in torch.rand(2, 2, n, dtype=torch.float64))

    def h(a: Tensor, b: Tensor) -> Tensor:
        return scan(compose_affine, (a, b), 1)[1]

    assert torch.autograd.gradcheck(h, (a, b))
    assert torch.autograd.gradgradcheck(h, (a, b))


# The combine functions of the five operations, of segments, of indices and of the recurrence.
STATES = {
    "sum": (torch.add, 1),
    "logsumexp": (MONOIDS["logsumexp"].combine, 1),
    "extremes": (select_combine("max"), 2),
    "recurrence": (compose_affine, 2),
    "segmented": (segment_combine(torch.add), 2),
}


def states_of(name: str, n: int) -> Any:
    """n states of three columns."""
    first, second = torch.rand(2, n, 3, dtype=torch.float64)
    return {
        "sum": first,
        "logsumexp": first,
        "extremes": (first, torch.arange(n)[:, None].expand(n, 3)),
        "recurrence": (first, second),
        "segmented": (first > 0.9, second),
    }[name]


class Elements(TorchDispatchMode):
    """Counts the elements that operations compute; a view computes none."""

    def __init__(self) -> None:
        super().__init__()
        self.computed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.computed += sum(x.numel() for x in pytree.tree_leaves(out) if isinstance(x, Tensor))
        return out


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("kind", STATES)
def test_work_is_linear(kind: str) -> None:
    """Two combinations an element or little more, and the rows that are moved to their places."""
    combine, leaves = STATES[kind]
    for n in (100, 500, 4096, 10_001, 65_535, 65_536, 300_000):
        states = states_of(kind, n)
        with Elements() as once:
            combine(states, states)
        with Elements() as all_rows:
            scan(combine, states, 0)
        assert all_rows.computed <= 2.2 * once.computed + 2.5 * 3 * n * leaves, n


def depth(n: int) -> int:
    """The operations of the longest chain in which each needs the one before."""
    traced = make_fx(lambda x: scan(torch.add, x, 0), tracing_mode="fake")
    graph = traced(torch.rand(n, 1)).graph
    longest: dict[Any, int] = {}
    for node in graph.nodes:
        before = max((longest[other] for other in node.all_input_nodes), default=0)
        longest[node] = before + (node.op == "call_function")
    return max(longest.values())


@pytest.mark.slow
def test_depth_is_logarithmic() -> None:
    for n in (4, 33, 1000, 33_000):
        assert depth(n) <= 12 * math.log2(n) + 50, n
