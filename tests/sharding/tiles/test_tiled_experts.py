"""Mixtures of experts in tiles: loss and every gradient equal a single device's, and no tile stores a weight's gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
import transformers.integrations.moe as grouping
from models.test_experts import EXPERTS, WIDTH, Experts, inverted, not_put_back, without_products
from sharding.tiles.losses import alive
from sharding.tiles.mixtures import MIXTURES, each_its_matrices, layer, one_by_one, rows
from torch import nn
from torch.fx import GraphModule

import sp_compile
from sp_compile.lowering.tiles.tile_program import TileProgram
from sp_compile.passes.localize.tiles.run_in_tiles import programs_of

EXACT = 1e-9
RING: dict[str, Any] = {"attention": "ring"}
WAYS: dict[str, dict[str, Any]] = {
    "auto": {},
    "ulysses": {"attention": "ulysses"},
    "ring": {**RING, "layout": "contiguous"},
    "zigzag": {**RING, "layout": "zigzag"},
}


@pytest.mark.sampled(every=178)
@pytest.mark.parametrize("seq", [13, 16])
@pytest.mark.parametrize("tiles", [1, 2, 5])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("experts", MIXTURES)
def test_one_device(experts: Experts, n: int, tiles: int, seq: int) -> None:
    found = sp_compile.verify(layer(experts), rows(seq), sp=n, tiles=tiles)
    assert found.worst < EXACT
    assert not found.fallbacks, found
    assert len(found.tiled) == (EXPERTS if experts is one_by_one else 1)


@pytest.mark.slow
@pytest.mark.sampled(every=16)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("experts", [inverted, each_its_matrices])
def test_ways_of_attention(experts: Experts, way: str) -> None:
    found = sp_compile.verify(layer(experts), rows(13), sp=3, tiles=2, **WAYS[way])
    assert found.worst < EXACT
    assert len(found.tiled) == 1


def test_values_that_depend_on_the_order_are_not_tiled() -> None:
    """One rank gathers nothing, and the order in a tile differs from that of all rows."""
    found = sp_compile.verify(layer(not_put_back), rows(13), sp=1, tiles=2)
    assert found.worst < EXACT
    assert not found.tiled


def local(experts: Experts, tiles: int, seq: int = 32) -> GraphModule:
    program = torch.export.export(layer(experts), (rows(seq),))
    return sp_compile.parallelize(program, sp=1, tiles=tiles)


def program_of(experts: Experts, tiles: int) -> TileProgram:
    (program,) = programs_of(local(experts, tiles))
    return program


def test_gradients_of_experts_are_added_in_place() -> None:
    """No tile allocates a gradient of all experts' matrices, and the compiled code does not grow with the tiles."""
    program, many = program_of(inverted, 2), program_of(inverted, 16)
    shapes = {(EXPERTS, WIDTH, 3 * WIDTH), (EXPERTS, 3 * WIDTH, WIDTH)}
    ways = {value.shape: value.adds for value in program.gradients if value.dim is None}
    assert {shape: ways.get(shape) for shape in shapes} == dict.fromkeys(shapes, "groups")
    counts = []
    for one in (program, many):
        (body,) = one.bodies.values()
        assert body.gradients is not None
        made = [n for n in body.gradients.graph.graph.nodes if n.op == "call_function" and "val" in n.meta]
        assert all(
            getattr(n.meta["val"], "ndim", 0) < 3 or n.meta["val"].shape[0] != EXPERTS or is_view(n) for n in made
        )
        counts.append(len(made))
    assert counts[0] == counts[1]
    ways = {value.adds for value in program_of(without_products, 2).gradients if value.dim is None}
    assert ways == {"rows"}


def is_view(node: torch.fx.Node) -> bool:
    (first, *_) = node.all_input_nodes
    return node.meta["val"].untyped_storage()._cdata == first.meta["val"].untyped_storage()._cdata


def qwen3(experts: str, **sizes: int) -> nn.Module:
    """A layer of Qwen3-MoE with the loss that balances its experts."""
    transformers.logging.set_verbosity_error()
    given = {
        **{"hidden_size": 16, "moe_intermediate_size": 24, "head_dim": 8, "intermediate_size": 24, "vocab_size": 31},
        **{"num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, **sizes},
    }
    config = transformers.Qwen3MoeConfig(
        **given, output_router_logits=True, experts_implementation=experts, use_cache=False
    )
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(config)


@pytest.mark.slow
@pytest.mark.sampled(every=12)
@pytest.mark.parametrize("n", [2, 1, 3])
@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_transformers(experts: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A float64 model whose router, norms and losses compute in float32."""
    monkeypatch.setattr(grouping, "_can_use_grouped_mm", lambda *given: False)  # torch's own knows no float64
    ids = torch.randint(0, 31, (2, 13), generator=torch.Generator().manual_seed(0))
    found = sp_compile.verify(qwen3(experts).double(), ids, sp=n, tiles=5, kwargs={"labels": ids})
    assert found.worst < 1e-6
    assert any("moe.py" in one.where for one in found.tiled)


def test_a_tile_reads_each_row_once() -> None:
    """A tile also returns one gradient per row: it copies the row for each of its token's experts itself.

    The tiled region ends at the output projection of attention, which also widens rows.
    """
    wide = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 4}
    program = torch.export.export(qwen3("grouped_mm", **wide), (torch.zeros(1, 8, dtype=torch.int64),))
    (tiled,) = sp_compile.parallelize(program, sp=1, tiles=2).graph.find_nodes(
        op="call_function", target=torch.ops.sp.tiled.default
    )
    rows = [x.meta["val"].shape for x in tiled.args[0] if x.meta["val"].is_floating_point()]
    assert max(map(math.prod, rows)) == 8 * 64, rows


@pytest.mark.slow
def test_heads_narrower_than_the_model() -> None:
    """The output projection of attention widens rows, and the residual that it is added to is as wide before it."""
    found = sp_compile.explain(qwen3("grouped_mm", hidden_size=64), torch.zeros(1, 8, dtype=torch.int64), sp=1, tiles=2)
    assert any("moe.py" in one.where for one in found.tiled)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_memory_of_a_step(compiler: str) -> None:
    """Less than half: the sorted rows and the experts' inside are those of a tile."""
    seq, wide = 1024, {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 4}
    ids, peaks = torch.zeros(1, seq, dtype=torch.int64), []
    for tiles in ("never", 16):
        torch.compiler.reset()
        run = torch.compile(qwen3("grouped_mm", **wide), backend="sp", options={"tiles": tiles, "compiler": compiler})
        run(ids, labels=ids).loss.backward()
        peaks.append(alive(lambda run=run: run(ids, labels=ids).loss.backward()))
    assert peaks[1] < 0.5 * peaks[0]
