"""Checkpoint regions are inlined and tagged: the partitioner recomputes the same ops as torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.capturing import Backend, assert_same, compile_function, step
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import sp_compile
from sp_compile.lowering.torch_compat import has_policy
from sp_compile.passes.context import NoteKind

aten = torch.ops.aten
D = 16


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(D, 4 * D), nn.Linear(4 * D, D), nn.LayerNorm(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.3)


class Stack(nn.Module):
    def __init__(self, wrap: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.wrap = nn.ModuleList(Block() for _ in range(3)), wrap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.wrap(block, x)
        return x.pow(2).sum()


def plain(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return block(x)


def recompute(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=False)


def around(inside: Callable[..., Any]) -> Callable[..., Any]:
    """A checkpoint of more than a block; inside: plain, or in a checkpoint of its own."""

    def wrapped(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: inside(block, x.tanh()).tanh(), x, use_reentrant=False)

    return wrapped


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    save = op in (aten.mm.default, aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


def selective(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, keep_products)
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


def saved_elements(wrap: Callable[..., Any], capturing: bool = True) -> tuple[int, list[torch.Tensor | None]]:
    """Return the number of floats saved for the backward without inputs, and the results of one training step."""
    saved = []

    def forward_compiler(gm: GraphModule, example_inputs: list[Any]) -> Any:
        results = [n for n in gm.graph.output_node().args[0] if isinstance(n, torch.fx.Node)]
        values = [n.meta["val"] for n in results if n.op != "placeholder"]
        saved.extend(v.numel() for v in values if v.is_floating_point())
        return boxed_nop(gm, example_inputs)

    aot = aot_autograd(
        fw_compiler=forward_compiler, bw_compiler=boxed_nop, partition_fn=min_cut_rematerialization_partition
    )
    torch._dynamo.reset()
    model = Stack(wrap)
    run = torch.compile(model, backend=Backend(aot) if capturing else aot, fullgraph=True)
    outcome = step(run, model, torch.ones(2, 8, D))
    return sum(saved), outcome


def test_checkpoint_saves_less_and_computes_the_same() -> None:
    model = Stack(recompute)
    expected = step(model, model, torch.ones(2, 8, D))
    kept_all, _ = saved_elements(plain)
    kept_by_torch, _ = saved_elements(recompute, capturing=False)
    kept, outcome = saved_elements(recompute)
    assert kept == kept_by_torch
    assert kept * 4 < kept_all
    assert_same(outcome, expected)


def test_a_checkpoint_in_another_keeps_no_more() -> None:
    model = Stack(around(recompute))
    kept, outcome = saved_elements(around(recompute))
    assert kept == saved_elements(around(plain))[0]
    assert_same(outcome, step(model, model, torch.ones(2, 8, D)))


def test_checkpoint_regions_are_tagged() -> None:
    compiled, backend = compile_function(Stack(recompute))
    compiled(torch.ones(2, 8, D, requires_grad=True))
    tagged = [n for n in backend.graphs[0].graph.nodes if "recompute" in n.meta]
    assert [n.target for n in tagged].count(aten.layer_norm.default) == 3
    assert {n.meta["recompute"] for n in tagged} == {CheckpointPolicy.PREFER_RECOMPUTE}
    assert len({n.meta["ac_graph_id"] for n in tagged}) == 3


def test_policies_travel_with_their_nodes() -> None:
    """Policies run when a rank's graph is compiled, see test_saved_by_checkpoints.py."""
    model = Stack(selective)
    compiled, backend = compile_function(model)
    assert_same(step(compiled, model, torch.ones(2, 8, D)), step(model, model, torch.ones(2, 8, D)))
    for node in backend.graphs[0].graph.nodes:
        assert has_policy(node) == ("recompute" in node.meta)


class Marked(nn.Module):
    """Convolutions and an attention, whose first operand is marked as a leaf for checkpoints in training.

    With `marks="assign"` as in models of audio, and with "call" as by `enable_input_require_grads()`.
    """

    def __init__(self, marks: str, returns_leaf: bool = False) -> None:
        super().__init__()
        self.marks, self.returns_leaf = marks, returns_leaf
        self.encode = nn.Sequential(nn.Conv1d(1, 4, 5, 2), nn.GroupNorm(4, 4), nn.Conv1d(4, 4, 3, 2))
        self.project = nn.Linear(4, 4)

    def forward(self, sound: torch.Tensor) -> Any:
        x = sound[:, None] * 2
        if self.marks == "assign":
            x.requires_grad = True
        else:
            x.requires_grad_()
        q = self.project(checkpoint(self.encode, x, use_reentrant=False).mT)
        y = F.scaled_dot_product_attention(q, q, q)
        return (y, x) if self.returns_leaf else y


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("marks", ["assign", "call"])
def test_marked_leaf_is_in_one_graph(marks: str, n: int) -> None:
    """Its graph has all of the FLOPs on shards; the results and gradients are those of eager code."""
    torch.manual_seed(0)
    report = sp_compile.verify(Marked(marks).double(), torch.randn(2, 83).double(), sp=n)
    assert not report.find_notes(NoteKind.GRAPH_BREAK)
    assert report.work.flops_share == 1


def test_result_that_is_a_marked_leaf_breaks_the_graph() -> None:
    """Eager code gives the leaf its gradient, which a graph would not."""
    model, sound = Marked("assign", returns_leaf=True), torch.randn(2, 83)
    y, leaf = torch.compile(model, backend="sp", options={"compiler": "eager"})(sound)
    y.sum().backward()
    expected, expected_leaf = model(sound)
    expected.sum().backward()
    assert leaf.is_leaf
    torch.testing.assert_close(leaf.grad, expected_leaf.grad)
