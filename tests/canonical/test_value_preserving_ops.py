"""Value-preserving ops between the ops of a pattern: the same canonical op is found.

Every pattern is a function of its inputs and of `b`, which it applies to its intermediate values; BETWEEN lists the
choices of b. The result must equal that of the pattern without b.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.attention.score_texts import score_of
from support.golden import captured
from support.parallel.tensor_parallel import all_reduce
from support.variants.between import BETWEEN, Between, plain
from support.variants.tracing_exchanges import one_of, traced
from torch import Tensor

from sp_compile.lowering.torch_compat import associative_scan_op
from sp_compile.passes.canonical.canonicalize import Canonicalize
from sp_compile.passes.graph.node_info import set_node_info

aten, sp = torch.ops.aten, torch.ops.sp
SDPA = aten.scaled_dot_product_attention.default


def exclusive_cat(x: Tensor, b: Between) -> Tensor:
    return torch.cat([b(torch.zeros(2, 1, 3)), b(b(b(x).cumsum(1))[:, :-1])], 1)


def exclusive_pad(x: Tensor, b: Between) -> Tensor:
    return b(F.pad(b(b(x).cumsum(1)), (0, 0, 1, 0)))[:, :-1]


def exclusive_difference(x: Tensor, b: Between) -> Tensor:
    return b(b(x).cumsum(1)) - b(x)


def reversed_sum(x: Tensor, b: Between) -> Tensor:
    return b(b(b(x).flip(1)).cumsum(1)).flip(1)


def reversed_total(x: Tensor, b: Between) -> Tensor:
    return b(b(x.sum(1, keepdim=True)) - b(x.cumsum(1))) + b(x)


def last_minus(x: Tensor, b: Between) -> Tensor:
    sums = b(x.cumsum(1))
    return b(sums[:, -1:]) - sums


def loop(x: Tensor, b: Between) -> Tensor:
    h, out = b(torch.zeros(2, 3)), []
    for t in range(x.shape[1]):
        h = b(b(x[:, t]).sigmoid()) * b(h) + b(x[:, t])
        out.append(b(h))
    return torch.stack(out, 1)


def loop_from_viewed_zeros(x: Tensor, b: Between) -> Tensor:
    h, out = b(torch.zeros(6)[None]).view(2, 3), []
    for t in range(x.shape[1]):
        h = x[:, t].sigmoid() * h + x[:, t]
        out.append(h)
    return torch.stack(out, 1)


def written(x: Tensor, b: Between) -> Tensor:
    y = torch.zeros_like(x)
    y = torch.select_scatter(y, x[:, 0], 1, 0)
    for t in range(1, x.shape[1]):
        y = torch.select_scatter(b(y), b(x[:, t].sigmoid() * b(y)[:, t - 1] + x[:, t]), 1, t)
    return y


def associative(x: Tensor, b: Between) -> Tensor:
    def combine(left: Tensor, right: Tensor) -> list[Tensor]:
        return [b(b(left) + b(right)).contiguous()]  # torch wants the strides of what it was given

    return associative_scan_op(combine, [b(x.movedim(1, 0))], ())[0].movedim(0, 1)


def heads(x: Tensor) -> Tensor:
    """(B, H, S, D)"""
    return x.unflatten(-1, (2, 4)).transpose(1, 2)


def attention(q: Tensor, k: Tensor, v: Tensor, b: Between) -> Tensor:
    scores = b(b(heads(q)) @ b(b(heads(k)).mT)) * 0.5
    return b(b(scores).softmax(-1)) @ b(heads(v))


def exponentials(q: Tensor, k: Tensor, v: Tensor, b: Between) -> Tensor:
    scores = b(heads(q) @ heads(k).mT)
    each = b(torch.exp(b(b(scores) - b(b(scores).amax(-1, keepdim=True)))))
    return b(b(each) / b(b(each).sum(-1, keepdim=True))) @ heads(v)


def logarithms(q: Tensor, k: Tensor, v: Tensor, b: Between) -> Tensor:
    scores = b(heads(q) @ heads(k).mT)
    return b(b(b(scores) - b(b(scores).logsumexp(-1, keepdim=True))).exp()) @ heads(v)


def keys_first(q: Tensor, k: Tensor, v: Tensor, b: Between) -> Tensor:
    scores = b(b(b(heads(k)) @ b(b(heads(q)).mT)) * 0.5)
    return b(b(b(heads(v)).mT) @ b(b(scores).softmax(-2))).mT


def numbers(q: Tensor, k: Tensor, v: Tensor, b: Between) -> Tensor:
    weights = b(b(b(b(heads(q) @ heads(k).mT) + 0.0) * 1.0).softmax(-1))
    return b(b(b(weights * 1.0) + 0.0).nan_to_num()) @ heads(v)


def biased(q: Tensor, k: Tensor, v: Tensor, b: Between) -> Tensor:
    slopes, at = b((torch.arange(1, 3) * 0.25)[:, None, None]), torch.arange(6)
    bias = b(b(slopes) * b(b(at[None]) - b(at[:, None])))
    return b(b(heads(q) @ heads(k).mT) + b(bias)).softmax(-1) @ heads(v)


def multiplied(q: Tensor, k: Tensor, v: Tensor, b: Between) -> Tensor:
    mask = b(b(torch.ones(6, 6)).tril())
    scores = b(b(b(heads(q) @ heads(k).mT) * b(mask)) - b(1e10 * b(1 - b(mask))))
    return b(scores).softmax(-1) @ heads(v)


def causal(q: Tensor, k: Tensor, v: Tensor, b: Between) -> Tensor:
    at = torch.arange(6)
    mask = b(b(at[:, None]) < b(at[None]))
    scores = torch.einsum("bhqd,bhkd->bhqk", b(heads(q)), heads(k)).masked_fill(mask, -torch.inf)
    return torch.einsum("bhqk,bhkd->bhqd", b(b(scores).softmax(-1)), heads(v))


def grouped(q: Tensor, k: Tensor, v: Tensor, b: Between) -> Tensor:
    def repeated(x: Tensor) -> Tensor:
        return b(b(b(x.unsqueeze(1))[:, :, None].expand(2, 1, 2, 6, 4)).reshape(2, 2, 6, 4))

    return F.scaled_dot_product_attention(heads(q), repeated(k[..., :4]), repeated(v[..., :4]))


def one_by_one(q: Tensor, k: Tensor, v: Tensor, b: Between) -> Tensor:
    parts = [[b(x[..., i : i + 4]) for x in (q, k, v)] for i in (0, 4)]
    return torch.cat([b(F.scaled_dot_product_attention(*part)) for part in parts], -1)


def repeated(x: Tensor, b: Between) -> Tensor:
    return b(b(x).repeat_interleave(2, 1))


def padded_convolution(x: Tensor, b: Between) -> Tensor:
    return F.conv1d(b(F.pad(b(x.mT), (2, 0))), torch.ones(3, 1, 3), groups=3)


def cut_convolution(x: Tensor, b: Between) -> Tensor:
    return b(F.conv1d(b(x.mT), torch.ones(3, 1, 3), padding=2, groups=3))[..., :-2]


def sorted_rows(x: Tensor, b: Between) -> Tensor:
    def of_lines(line: Tensor) -> Tensor:
        return b(line.unsqueeze(1)).squeeze(1)

    rows, out = b(x.flatten(0, 1)), torch.zeros(8, 3)
    keys, order = torch.sort(of_lines((rows[:, 0] > 0).long()))
    counts = of_lines(torch.histc(of_lines(keys.float()), bins=2, min=0, max=1))
    out[order] = b(b(rows[order]) + of_lines(keys)[:, None])
    return out + counts[0]


def shift(x: Tensor, b: Between) -> Tensor:
    return torch.cat([b(torch.zeros(2, 2, 3)), b(b(x)[:, :-2])], 1)


PATTERNS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "cat": (exclusive_cat, "sp.scan(*, None, 1, sum, True)"),
    "pad and slice": (exclusive_pad, "sp.scan(*, None, 1, sum, True)"),
    "difference": (exclusive_difference, "sp.scan(*, None, 1, sum, True)"),
    "flips": (reversed_sum, "sp.scan(*, None, 1, sum, False, True)"),
    "total": (reversed_total, "sp.scan(*, None, 1, sum, False, True)"),
    "last row": (last_minus, "sp.scan(*, None, 1, sum, True, True)"),
    "loop": (loop, "sp.linear_scan(*, *, None, 1, False)"),
    "loop from zeros": (loop_from_viewed_zeros, "sp.linear_scan(*, *, None, 1, False)"),
    "written rows": (written, "sp.linear_scan(*, *, *, 1, False)"),
    "associative_scan": (associative, "sp.scan(*, None, 1, sum)"),
    "attention": (attention, "aten.scaled_dot_product_attention(*, *, *, None, 0.0, scale=0.5)"),
    "causal attention": (causal, "aten.scaled_dot_product_attention(*, *, *, None, 0.0, True, scale=1.0)"),
    "exponentials": (exponentials, "aten.scaled_dot_product_attention(*, *, *, None, 0.0, scale=1.0)"),
    "logarithms": (logarithms, "aten.scaled_dot_product_attention(*, *, *, None, 0.0, scale=1.0)"),
    "keys first": (keys_first, "aten.scaled_dot_product_attention(*, *, *, None, 0.0, scale=0.5)"),
    "numbers": (numbers, "aten.scaled_dot_product_attention(*, *, *, None, 0.0, scale=1.0)"),
    "biased": (
        biased,
        "sp.masked_attention(*, *, *, [], [], [], , 0.0, 1.0, False, "
        f"score={score_of('head0*(k - q) + s')}, heads=[reshape_default])",
    ),
    "multiplied with a mask": (multiplied, "aten.scaled_dot_product_attention(*, *, *, None, 0.0, True, scale=1.0)"),
    "repeated heads": (grouped, "aten.scaled_dot_product_attention(*, *, *, enable_gqa=True)"),
    "padded convolution": (padded_convolution, "sp.conv_along(*, *, None, 2, 2, 0, [1], [0], [1], 3)"),
    "cut convolution": (cut_convolution, "sp.conv_along(*, *, None, 2, 2, 0, [1], [2], [1], 3)"),
    "shift": (shift, "sp.shift(*, 1, 2, -2, 0)"),
    "sorted rows": (sorted_rows, "sp.sort_rows(*, False, False)"),
    "repeats": (repeated, ""),  # an expand, of which there may be others
}
CANONICAL = {
    sp.masked_attention.default,
    sp.scan.default,
    sp.linear_scan.default,
    aten.cumsum.default,
    SDPA,
    sp.conv_along.default,
    sp.shift.default,
    sp.sort_rows.default,
}
NOT_CANONICAL = {aten.repeat_interleave.self_int}


def canonical_ops(pattern: Callable[..., Tensor], between: Between) -> list[str]:
    """Return the canonical ops of the pattern after comparing its values."""
    count = len(inspect.signature(pattern).parameters) - 1
    shape = (2, 6, 8) if count == 3 else (2, 4, 3)
    xs = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in range(count)]
    if count == 3:
        gm = captured(lambda x, y, z: pattern(x, y, z, between), *xs)
    else:
        gm = captured(lambda x: pattern(x, between), *xs)
    for node in gm.graph.find_nodes(op="placeholder"):
        set_node_info(node, requires_grad=False)  # or a detach would mean something
    Canonicalize()(gm)
    (found, *_), wanted = gm(*xs) if isinstance(gm(*xs), tuple) else (gm(*xs),), pattern(*xs, plain)
    torch.testing.assert_close(found, wanted)
    return [call_text(n) for n in gm.graph.nodes if n.target in CANONICAL | NOT_CANONICAL]


def call_text(node: torch.fx.Node) -> str:
    def word(value: object) -> str:
        return "*" if isinstance(value, torch.fx.Node) else str(value)

    arguments = [*map(word, node.args), *(f"{k}={word(v)}" for k, v in node.kwargs.items())]
    return f"{str(node.target).removesuffix('.default')}({', '.join(arguments)})"


@pytest.mark.sampled(every=22)
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("name", PATTERNS)
def test_found_with_ops_between(name: str, between: str) -> None:
    pattern, op = PATTERNS[name]
    assert canonical_ops(pattern, BETWEEN[between]) == ([op] if op else [])


def reducing(group: str, b: Between, more: Between = plain) -> type[torch.autograd.Function]:
    """Sums in both directions, as a pair of a mesh of two axes does, and `more` backward."""

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return b(all_reduce(b(x), group))

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return b(more(all_reduce(b(grad), group)))

    return Both


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("between", BETWEEN)
def test_pairs_that_reduce(between: str) -> None:
    with one_of(2) as group:
        function = reducing(group.group_name, BETWEEN[between])
        gm = traced(lambda x: function.apply(x) * 2, torch.randn(2, 4, requires_grad=True))
        Canonicalize()(gm)
    found = [call_text(n) for n in gm.graph.nodes if n.op == "call_function"]
    assert found[0] == f"sp.reduce_pair(*, ['sum {group.group_name}'], ['sum {group.group_name}'])"
    assert "autograd" not in str(found)


def test_a_pair_that_does_more_is_refused() -> None:
    with one_of(2) as group:
        function = reducing(group.group_name, plain, lambda x: x * 2)
        gm = traced(lambda x: function.apply(x) * 2, torch.randn(2, 4, requires_grad=True))
        canonicalize = Canonicalize()
        canonicalize(gm)
    (note,) = canonicalize.notes
    assert note.label == "not replace_reduce_pairs"
    assert "sp.reduce_pair" not in str(gm.graph)
