"""Functional attention: single-device values and gradients on simulated and real ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.attention.attending import randn
from support.attention.functional_cases import BATCH, DIM, MESHES, OPS, Case, attend, dense, simulated, whole
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import sp_compile
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, run_ranks

DOCUMENTS = torch.stack([torch.arange(16) // 5, torch.arange(16) // 7])
CASES = {
    "full": Case(),
    "causal": Case({"is_causal": True}),
    "window": Case({"is_causal": True, "window": 5}),
    "window of one": Case({"is_causal": True, "window": 1}),
    "window both ways": Case({"window": 3}),
    "documents": Case({"is_causal": True, "documents": DOCUMENTS}),
    "documents of all": Case({"documents": DOCUMENTS[:1], "window": 4}),
    "bool mask": Case({"attn_mask": randn(2, 1, 16, 16, seed=5) > -1}),
    "additive mask": Case({"attn_mask": randn(1, 4, 16, 16, seed=6), "is_causal": True}),
    "mask of keys": Case({"attn_mask": randn(2, 1, 1, 16, seed=7)}),
    "mask of two dims": Case({"attn_mask": randn(16, 16, seed=8)}),
    "scale": Case({"scale": 0.7, "is_causal": True}),
    "GQA": Case({"is_causal": True}, kv_heads=2),
    "MQA": Case({"is_causal": True}, kv_heads=1),
    "other v": Case({"is_causal": True}, v_dim=6),
    "padding": Case({"is_causal": True, "window": 6}, s=13),
    "padding to a multiple": Case({"is_causal": True}, s=13, multiple=4),
    "sinks": Case({"is_causal": True, "sinks": randn(4, seed=9)}, kv_heads=2),
    "sinks and an additive mask": Case({"attn_mask": randn(1, 4, 13, 13, seed=6), "sinks": randn(4, seed=9)}, s=13),
    "cross": Case(s=16, t=24),
    "cross, padding": Case({"is_causal": True}, s=19, t=10),
}


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", CASES)
def test_equals_one_device(name: str, layout: str, op: str) -> None:
    case = replace(CASES[name], layout=layout)
    close(simulated(op, case, 4), dense(case))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_padding_may_hold_anything(layout: str, op: str) -> None:
    case = replace(CASES["padding"], fill=math.nan, layout=layout)
    close(simulated(op, case, 4), dense(case))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": 9}, {"is_causal": True, "window": 9}], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_padding_between_gathered_keys(packed: bool, options: dict[str, Any]) -> None:
    """Padding of the second chunks of zigzag shards, whose gathered rows are not reordered."""
    for s in (13, 29, 45):
        documents = (torch.arange(s) // 6)[None]
        case = Case({**options, **({"documents": documents} if packed else {})}, s=s, kv_heads=2, layout="zigzag")
        for n in (2, 3, 4):
            assert case.lengths(n)
            for got, want in zip(simulated("gathered", case, n), dense(case), strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_any_number_of_ranks(n: int, op: str) -> None:
    if op == "hybrid" and n % 2 and n > 1:
        pytest.skip("pairs of neighbors need an even number of ranks")
    case = Case({"is_causal": True}, heads=6, kv_heads=3, s=20)
    found = simulated(op, case, n) if n > 1 else whole(case, [attend(op, case, None, 0, 1)])
    close(found, dense(case))


# On real ranks.


def _on_mesh(op: str, mesh: str, case: Case) -> list[Tensor]:
    sp = MESHES[mesh]()
    n = 2 if mesh.startswith("dp") else 4
    return attend(op, case, sp, dist.get_rank() % n, n)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("mesh", MESHES)
def test_real_ranks(ranks, mesh: str, op: str) -> None:
    case = Case({"is_causal": True, "attn_mask": randn(1, 4, 16, 16, seed=6)}, kv_heads=2, layout="zigzag")
    found = ranks.run(4, _on_mesh, op, mesh, case)
    for part in (found[:2], found[2:]) if mesh.startswith("dp") else (found,):
        close(whole(case, part), dense(case))


def _in_group(op: str, case: Case) -> list[Tensor]:
    return attend(op, case, MESHES["process group"](), dist.get_rank(), 2)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["window", "documents", "padding", "cross, padding"])
def test_two_real_ranks(ranks, name: str, op: str) -> None:
    close(whole(CASES[name], ranks.run(2, _in_group, op, CASES[name])), dense(CASES[name]))


def _width_of_mesh() -> list[Tensor]:
    case, mesh = CASES["GQA"], MESHES["ring x ulysses"]()
    OPS["by mesh"] = (sp_compile.hybrid_attention, {})
    return attend("by mesh", case, mesh, dist.get_rank(), 4)


def test_the_mesh_defines_the_ranks_that_share_heads(ranks) -> None:
    close(whole(CASES["GQA"], ranks.run(4, _width_of_mesh)), dense(CASES["GQA"]))


def _mask_gradient_on_rank_0() -> list[Tensor]:
    rank, (q, k, v, _) = dist.get_rank(), (x[:, :, :4].requires_grad_() for x in CASES["full"].operands())
    mask = randn(1, 4, 8, 8, seed=6).requires_grad_(rank == 0)
    out = sp_compile.ring_attention(q, k, v, mesh=MESHES["process group"](), attn_mask=mask)
    out.sum().backward()
    return [q.grad, k.grad, v.grad, *([mask.grad] if rank == 0 else [])]


def test_ranks_may_differ_in_whether_the_mask_needs_a_gradient(ranks) -> None:
    first, second = ranks.run(2, _mask_gradient_on_rank_0)
    assert len(first) == 4
    assert len(second) == 3
    assert all(x.isfinite().all() for x in [*first, *second])
    assert not first[3][:, :, 4:].any()
    assert first[3][:, :, :4].any()


# Dropout, precision, memory layout.


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_dropout_equals_a_single_device(layout: str, op: str) -> None:
    options = {"dropout_p": 0.4, "seed": 11, "is_causal": True}
    whole_case, case = Case(options, kv_heads=2), Case(options, kv_heads=2, layout=layout)
    expected = attend(op, whole_case, None, 0, 1)
    for n in (2, 4):
        close(simulated(op, case, n), expected)
    other = Case({**options, "seed": torch.tensor(12)}, kv_heads=2)
    assert not torch.equal(attend(op, other, None, 0, 1)[0], expected[0])


def test_a_seed_is_drawn_from_this_ranks_generator() -> None:
    case, draws = Case({"dropout_p": 0.5}), []
    for _ in range(2):
        torch.manual_seed(3)
        draws.append(attend("ring", case, None, 0, 1)[0])
    assert torch.equal(*draws)
    assert not torch.equal(attend("ring", case, None, 0, 1)[0], draws[0])


def _error(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]


def _single_device_bf16(case: Case) -> list[Tensor]:
    *leaves, grad = case.operands()
    leaves = [x.requires_grad_() for x in leaves]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("op", OPS)
def test_bf16_is_as_precise_as_on_a_single_device(op: str) -> None:
    case = Case({"is_causal": True}, kv_heads=2, s=64, layout="zigzag", dtype=torch.bfloat16)
    exact, here = dense(case), _error(_single_device_bf16(case), dense(case))
    found = simulated(op, case, 4)
    assert all(x.dtype == torch.bfloat16 for x in found)
    assert all(error <= 2 * single for error, single in zip(_error(found, exact), here, strict=True))


@pytest.mark.parametrize("op", OPS)
def test_autocast_computes_in_the_dtype_of_autocast(op: str) -> None:
    case = Case({"is_causal": True}, s=64, dtype=torch.float32)
    expected = simulated(op, replace(case, dtype=torch.bfloat16), 2)

    def live(rank: int) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return attend(op, case, Ranks(2, SIMULATED_GROUP), rank, 2)

    found = whole(case, run_ranks(2, live))
    assert found[0].dtype == torch.bfloat16
    assert found[1].dtype == torch.float32
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.bfloat16(), b)


class _Copies(TorchDispatchMode):
    """Elements that copying ops write."""

    NAMES = ("clone", "copy_", "_to_copy", "cat", "stack", "contiguous")

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **kwargs or {})
        if op.name().removeprefix("aten::").partition(".")[0] in self.NAMES:
            self.elements += out.numel()
        return out


@pytest.mark.parametrize("op", OPS)
def test_heads_after_the_sequence_cost_no_copy(op: str) -> None:
    """(B, s, H, D) as its transposed view: the same copies as (B, H, s, D)."""
    shapes = [(BATCH, heads, 8, DIM) for heads in (4, 2, 2)]
    plain = [randn(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    views = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in plain]
    fn, extra = OPS[op]

    def live(rank: int) -> list[tuple[int, Tensor]]:
        done = []
        for operands in (plain, [x.transpose(1, 2) for x in views]):
            with _Copies() as copies:
                out = fn(*operands, mesh=Ranks(2, SIMULATED_GROUP), is_causal=True, **extra)
                grads = torch.autograd.grad(out.sum(), operands)
            done.append((copies.elements, torch.cat([x.flatten() for x in (out, *grads)])))
        return done

    for (copies, values), (copies_of_views, same) in run_ranks(2, live):
        assert copies_of_views == copies
        torch.testing.assert_close(same, values)
