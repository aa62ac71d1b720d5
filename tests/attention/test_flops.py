"""FLOPs of attention as registered with torch: closed formula of each mask, share per rank, and decisions by them."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support.attention.attending import PREDICATES, Problem, packed, shard
from support.models import BATCH, WIDTH, Decoder, causal, seeded, tokens
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import sp_compile
from sp_compile.lowering import torch_compat
from sp_compile.lowering.attention import attention_flops as flops
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, run_ranks
from sp_compile.lowering.masks.spans import full_span, shard_spans

sp = torch.ops.sp
OF_POSITIONS = ("none", "causal", "shifted", "window", "prefix", "sink", "chunks", "nothing")
"""Masks that look up no vectors, which fake tensors would not have."""


def counted(run: Callable[[], Any]) -> dict[Any, int]:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_flop_counts().get("Global", {})


def forward_and_backward(p: Problem, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, arguments: list[Any]) -> list[int]:
    out, lse = sp.attend(q, k, v, *arguments)
    found = counted(lambda: sp.attend(q, k, v, *arguments))
    found |= counted(lambda: sp.attend_backward(grad, q, k, v, out, lse, *arguments, False))
    return [found[sp.attend], found[sp.attend_backward]]


@pytest.mark.parametrize(("q_len", "k_len"), [(13, 13), (7, 12), (300, 300)])
@pytest.mark.parametrize("name", PREDICATES)
def test_pairs_of_a_mask(name: str, q_len: int, k_len: int) -> None:
    p = Problem(name, q_len, k_len, key_heads=2, width=8, v_width=5)
    pairs = 4 * int(p.allowed().sum())
    found = forward_and_backward(p, p.q, p.k, p.v, p.grad[..., :5], p.arguments(full_span(q_len), full_span(k_len)))
    want = [2 * pairs * (8 + 5), 2 * pairs * (3 * 8 + 2 * 5)]
    assert found == want


def test_documents_that_differ_in_a_batch() -> None:
    """Tables have bounds of their numbers; the pairs are those of the vectors."""
    documents = torch.stack([torch.bucketize(torch.arange(300), torch.tensor(ends)) for ends in ([40, 41], [7, 222])])
    q, span = torch.randn(2, 4, 300, 8), full_span(300)
    predicate, same = "Eq(row0, col0) & (k <= q)", documents[:, :, None] == documents[:, None, :]
    arguments = (None, [documents], [documents], [], [], predicate, None, 0.0, 0.3, "", [], [], span, span, 1, "")
    pairs = 4 * int(same.tril().sum())
    assert counted(lambda: sp.attend(q, q, q, *arguments)) == {sp.attend: 2 * pairs * 16}


LONG = {
    "prefix": ("(k < n0) | (k <= q)", lambda s: s * (s + 1) // 2 + 3 * 2 // 2),
    "sink": ("(k <= q) & ((k < 2) | (q - k < 4))", lambda s: 4 * s - 6 + 2 * s - 9),
}


@pytest.mark.parametrize("name", LONG)
def test_a_mask_of_a_long_sequence(name: str) -> None:
    """Counting takes time proportional to the edges of the mask, not to all pairs."""
    predicate, pairs = LONG[name]
    length = 1 << 16
    q, span = torch.empty(1, 1, 1, 8, device="meta").expand(1, 1, length, 8), full_span(length)
    arguments = (None, [], [], [], [3], predicate, None, 0.0, 0.3, "", [], [], span, span, 1, "")
    begin = time.process_time()
    assert counted(lambda: sp.attend(q, q, q, *arguments)) == {sp.attend: 2 * pairs(length) * 16}
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("window", [None, 128])
def test_the_mean_of_many_ranks_that_gather_keys(window: int | None) -> None:
    """In zigzag order, keys are gathered in two parts, of which the second has chunks in reversed order.

    Counting takes time independent of ranks and chunks, and FLOPs of all ranks sum to a single device's.
    """
    n, length = 512, 1 << 22
    q_span, (first, second) = [n, 2, 1, 0, 0, length], shard_spans([1, length // n, 0, length, 2], n)
    predicate, sizes = ("k <= q", []) if window is None else ("(k <= q) & (q - k < n0)", [window])
    pairs = length * (length + 1) // 2 if window is None else length * window - window * (window - 1) // 2
    q, k = (torch.empty(1, 1, 1, 8, device="meta").expand(1, 1, rows, 8) for rows in (length // n, length // 2))
    found, begin = 0, time.process_time()
    for k_span in (first, second):
        arguments = (None, [], [], [], sizes, predicate, None, 0.0, 0.3, "", [], [], q_span, k_span, 1, SIMULATED_GROUP)
        found += counted(lambda a=arguments: sp.attend(q, k, k, *a))[sp.attend]  # type: ignore[misc]
    assert abs(n * found - 2 * 16 * pairs) <= 2 * n * 2 * 16  # each is rounded down
    assert time.process_time() - begin < 5


def test_masks_that_need_all_pairs() -> None:
    """A sample of blocks is counted and extrapolated."""
    length = 512
    q, span = torch.empty(1, 1, length, 8, device="meta"), full_span(length)
    arguments = (None, [], [], [], [], "Eq(Mod(q + k, 4), 0)", None, 0.0, 0.3, "", [], [], span, span, 1, "")
    with mock.patch.object(flops, "MAX_COUNTED_BLOCKS", 6):
        found = counted(lambda: sp.attend(q, q, q, *arguments))
    assert found == {sp.attend: 2 * 16 * length**2 // 4}


@pytest.mark.parametrize("name", ["attend", "attend_backward", "run_tiles"])
def test_a_formula_accepts_the_arguments_of_overlap_scheduling(name: str) -> None:
    """torch._inductor passes its own values of the node to the formula, and an error would end the compilation."""
    inspect.signature(flop_registry[getattr(sp, name)]).bind(*[None] * 6, out_val=None, _node_meta={})


def test_packed_documents_by_their_positions() -> None:
    lengths = [5, 19, 64, 128]
    document, position = packed(lengths)
    q, total = torch.randn(1, 2, sum(lengths), 8), sum(n * (n + 1) // 2 for n in lengths)
    predicate, vectors = "Eq(row0, col0) & (col1 <= row1)", [document, position]
    span = full_span(sum(lengths))
    arguments = (None, vectors, vectors, [], [], predicate, None, 0.0, 0.3, "", [], [], span, span, 1, "")
    assert counted(lambda: sp.attend(q, q, q, *arguments)) == {sp.attend: 2 * 2 * total * 16}


@pytest.mark.parametrize("folds", [1, 2])
@pytest.mark.parametrize("name", PREDICATES)
def test_ranks_add_up(name: str, folds: int) -> None:
    """FLOPs of all ranks' ring steps sum to the total; on fake tensors each rank reports the mean."""
    n, length = 3, 18
    p = Problem(name, length, length, key_heads=2)
    spans = [[n, folds, 1, shift, 0, length] for shift in range(n)]

    def live(rank: int) -> list[list[int]]:
        q, grad = (shard(x, spans[0], rank) for x in (p.q, p.grad))
        held = [[shard(x, span, rank) for x in (p.k, p.v)] for span in spans]
        arguments = [p.arguments(spans[0], span, SIMULATED_GROUP) for span in spans]
        return [forward_and_backward(p, q, *x, grad, a) for x, a in zip(held, arguments)]

    ranks = run_ranks(n, live)
    pairs = 4 * int(p.allowed().sum())
    assert torch.tensor(ranks).sum((0, 1)).tolist() == [2 * pairs * 16, 2 * pairs * 40]
    if name not in OF_POSITIONS:
        return
    means = run_ranks(n, lambda rank: [_of_fake(p, spans[0], span, length // n) for span in spans])
    assert means[0] == means[1] == means[2]
    assert abs(sum(means[0]) * n - 2 * pairs * 16) <= n * n * 2 * 8 * 16  # each step is rounded down


def _of_fake(p: Problem, q_span: Sequence[int], k_span: Sequence[int], rows: int) -> int:
    with FakeTensorMode():
        q, k, v = (torch.empty(x.shape[0], x.shape[1], rows, x.shape[3]) for x in (p.q, p.k, p.v))
        arguments = p.arguments(q_span, k_span, SIMULATED_GROUP)
        arguments[1:3] = [[], []]
        return counted(lambda: sp.attend(q, k, v, *arguments))[sp.attend]


def every_pair(model: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("strategy", ["ring", "hybrid", "gather"])
@pytest.mark.parametrize(("attend", "layout"), [(every_pair, "contiguous"), (causal, "zigzag")])
def test_a_rank_does_its_share(attend: Any, layout: str, strategy: str) -> None:
    """With balanced work, a rank does 1/n of a single device's FLOPs: products and attention, both directions."""
    n, length = 4, 16
    model, ids = seeded(partial(Decoder, attend)), tokens(length)
    local = sp_compile.parallelize(torch.export.export(model, (ids,)), sp=n, attention=strategy, layout=layout)
    run = {"one": model, "rank": local}

    def step(name: str) -> dict[Any, int]:
        def both() -> None:
            result = run[name](ids)
            (result[0] if isinstance(result, list | tuple) else result).sum().backward()

        return counted(both)

    alone = step("one")
    pairs = BATCH * (length * (length + 1) // 2 if attend is causal else length**2)
    want = {sp.attend: 4 * pairs * WIDTH, sp.attend_backward: 10 * pairs * WIDTH}
    want |= {op: alone[op] for op in (torch.ops.aten.addmm, torch.ops.aten.mm)}
    for found in run_ranks(n, lambda _: step("rank")):
        assert {op: n * flops for op, flops in found.items()} == want


def test_a_budget_computes_attention_again_last() -> None:
    """Long attention is most of a layer's FLOPs, and its result as large as any other."""
    names: list[list[str]] = []

    def keep(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        names.append([str(node.target) for node in gm.graph.nodes if node.op == "call_function"])
        return make_boxed_func(gm.forward)

    def attend(model: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sp.masked_attention(q, k, v, [], [], [], "k <= q", 0.0, None, False)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    model, ids = seeded(partial(Decoder, attend)), tokens(256)
    with torch_compat.memory_budget(0.5):
        torch.compile(model, backend=backend)(ids).sum().backward()
    forward, backward = names
    assert forward.count("sp.attend.default") == 1
    assert "sp.attend.default" not in backward
    assert "aten.addmm.default" in backward or "aten.mm.default" in backward
