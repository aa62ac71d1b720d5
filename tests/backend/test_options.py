"""Every option at every entry: its effect can be seen, or an SpError names it. None is dropped."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, get_args, get_type_hints
from unittest import mock

import pytest
import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from support.parallel.merging import mesh_axis_groups
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import sp_compile
from sp_compile import SPConfig, SpError, SPOptions, backend, pipeline, rank_program
from sp_compile.integrations.ddp import compile_under_ddp
from sp_compile.integrations.fsdp import compile_under_fsdp
from sp_compile.passes.context import NoteKind
from sp_compile.passes.cost import known_groups
from sp_compile.passes.cost.known_groups import KnownGroups
from sp_compile.runtime.guard import GuardedProgram, WorldProgram
from sp_compile.runtime.sharded_values import ShardedProgram

WIDTH, WORLD = 16, (2, 4)
Options = dict[str, Any]


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Return the mesh of eight simulated ranks, over whose axes reductions may be merged."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    found = init_device_mesh("cpu", WORLD, mesh_dim_names=("dp", "sp"))
    world = dist.group.WORLD
    members = {group.group_name: mesh_axis_groups(WORLD, dim) for dim, group in enumerate(found.get_all_groups())}
    with mock.patch.dict(
        known_groups._declared_groups, {world: KnownGroups({**members, world.group_name: (tuple(range(8)),)})}
    ):
        yield found
    dist.destroy_process_group()


class Model(nn.Module):
    """A model with linears, attention of four heads, and ops that no strategy shards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = self.up(x).unflatten(-1, (4, 4)).transpose(1, 2)
        h = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
        return self.down(h).sin()


class Sorted(Model):
    """Attention, and an op that needs the full sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sort(1).values


class Wide(Model):
    """Attention, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(super().forward(x)).sin())


class TensorParallel(Model):
    """A layer over one axis of a mesh, and sums over both in turn: nothing with a sequence to split."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.first, self.second = (group.group_name for group in mesh.get_all_groups())

    def forward(self, x: Tensor) -> Tensor:
        h = funcol.all_reduce(self.up(x), "sum", self.second).sin()
        h = funcol.all_reduce(self.down(h), "sum", self.first) * 0.5
        return funcol.all_reduce(h, "sum", self.second).sin()


def of_backend(model: nn.Module, x: Tensor, options: Options) -> str:
    """Return the compiled graphs, their options, and the reports of passes on collectives."""
    seen: list[Any] = []
    plain = rank_program.compile_local

    def keep(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        seen.append((gm.code, functorch_config.activation_memory_budget))
        return gm.forward

    def watched(lowered: rank_program.RankProgram, mode: str | None) -> Any:
        run = plain(lowered, mode)
        seen.append((lowered.graph.code, str(lowered.joint and lowered.joint.report)))
        return run

    guard = backend.guard_program

    def guarded(*args: Any) -> Any:
        run = guard(*args)
        checked = run
        while isinstance(checked, WorldProgram | ShardedProgram):
            seen.append(type(checked).__name__)
            checked = checked.run
        seen.append(checked.info.check_every)
        return run

    compiler = "aot_eager" if isinstance(model, TensorParallel) else keep
    with (
        mock.patch.object(rank_program, "compile_local", watched),
        mock.patch.object(backend, "guard_program", guarded),
        mock.patch.object(GuardedProgram, "_agree"),
    ):
        torch.compile(model, backend="sp", options={"compiler": compiler, **options})(x)
    return str(seen)


def of_explain(model: nn.Module, x: Tensor, options: Options) -> str:
    return str(sp_compile.explain(model, x, **options))


def of_verify(model: nn.Module, x: Tensor, options: Options) -> str:
    report = sp_compile.verify(model, x, **options)
    assert report.worst < 1e-4
    report.errors = []  # rounding
    return str(report)


def of_parallelize(model: nn.Module, x: Tensor, options: Options) -> str:
    program = torch.export.export(model, (x,))
    return sp_compile.parallelize(program, **options).code


ENTRIES = (of_backend, of_explain, of_verify, of_parallelize)


def given(option: str, mesh: DeviceMesh) -> tuple[nn.Module, Options, Any]:
    """A program, options beside the one that is tried, and a value of that."""
    slow = {"all_to_all_latency": 10.0}
    plain: dict[str, tuple[Options, Any]] = {
        "mesh": ({}, mesh),
        "mesh_dim": ({"mesh": mesh}, "dp"),
        "seq_dims": ({"mesh": mesh}, {"x": 0}),
        "attention": ({"mesh": mesh}, "ring"),
        "layout": ({"mesh": mesh, "attention": "ring", "cost": {"call": 10.0}}, "zigzag"),
        "cost": ({"mesh": mesh}, slow),
        "inputs": ({"mesh": mesh}, "local"),
        "outputs": ({"mesh": mesh}, "local"),
        "param_grads": ({"mesh": mesh}, "partial"),
        "activation_memory_budget": ({"mesh": mesh}, 0.5),
        "check_every": ({"mesh": mesh}, 7),
        "offload": ({"mesh": mesh}, 0.5),
        "ulysses_chunks": ({"mesh": mesh["dp"], "attention": "ulysses"}, 2),
    }
    if option == "fallback":
        return Sorted(), {"mesh": mesh}, "error"
    if option == "state":
        return Model(), *_fitting_device(mesh)
    if option == "tiles":
        return Wide(), {"mesh": mesh}, 2
    if option in plain:
        return Model(), *plain[option]
    of_exchanges: dict[str, tuple[Options, Any]] = {
        "sequence_parallel_linear": ({}, "never"),
        "merge_reductions": ({"merge_reductions": "never", "sequence_parallel_linear": "never"}, "always"),
        "compiler": ({}, "eager"),
    }
    return TensorParallel(mesh), *of_exchanges[option]


def _fitting_device(mesh: DeviceMesh) -> tuple[Options, str]:
    """Return options of a device on which the fastest attention just fits next to replicated weights."""
    slow = {"all_to_all_bandwidth": 1e5}
    found = sp_compile.explain(Model(), of_text(), mesh=mesh, cost={**slow, "memory": 1e15})
    memory = found.memory[0].used + found.attention[0].chosen.memory + 1
    return {"mesh": mesh, "cost": {**slow, "memory": memory}}, "sharded"


def of_text() -> Tensor:
    return torch.randn(8, 32, WIDTH, generator=torch.Generator().manual_seed(0))


def outcome(entry: Callable[..., str], model: nn.Module, options: Options, option: str) -> str:
    """Return the observable results of a compilation, or of an error that it names the option."""
    torch._dynamo.reset()
    x = of_text()
    with torch.no_grad() if isinstance(model, TensorParallel) else torch.enable_grad():
        try:
            return entry(model, x, options)
        except SpError as error:
            return f"refused: {error}"


@pytest.fixture(scope="module")
def plainly() -> Callable[..., str]:
    """Return `outcome` of the reference configuration, computed once for several options."""
    known: dict[str, str] = {}

    def found(entry: Callable[..., str], model: nn.Module, options: Options, option: str) -> str:
        key = f"{entry.__name__} {type(model).__name__} {options}"
        if key not in known:
            known[key] = outcome(entry, model, options, option)
        return known[key]

    return found


@pytest.mark.sampled(every=11)
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("option", [f.name for f in fields(SPConfig)])
def test_an_option_is_honored_or_refused(
    mesh: DeviceMesh, plainly: Callable[..., str], entry: Callable[..., str], option: str
) -> None:
    model, others, value = given(option, mesh)
    if entry in (of_parallelize, of_verify):  # they refuse what is only there to have the others show something
        others = {name: one for name, one in others.items() if name not in pipeline.CALL_OPTIONS}
    without = {name: one for name, one in others.items() if name != option}
    plain = plainly(entry, model, others, option)
    found = outcome(entry, model, {**without, option: value}, option)
    if found.startswith("refused"):
        assert re.search(rf"\b{option}\b", found), found
    else:
        assert found != plain


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("entry", [of_backend, of_explain])
@pytest.mark.parametrize(
    "options",
    [
        {"seq_dims": {"x": 1}},
        {"attention": "ring"},
        {"layout": "zigzag"},
        {"inputs": "local"},
        {"outputs": "local"},
        {"param_grads": "partial"},
        {"state": "sharded"},
        {"fallback": "error"},
        {"tiles": 2},
        {"ulysses_chunks": 2},
    ],
)
def test_options_of_a_sequence_that_no_ranks_are_left_for(mesh: DeviceMesh, entry: Any, options: Options) -> None:
    (option,) = options
    found = outcome(entry, TensorParallel(mesh), options, option)
    assert re.match(rf"refused: .*SP109: {option}=", found, re.DOTALL), found


def test_options_of_a_sequence_in_another_piece(mesh: DeviceMesh) -> None:
    """Between graph breaks one piece may have the sequence, and another the exchanges."""

    class Broken(TensorParallel):
        def forward(self, x: Tensor) -> Tensor:
            h = x.sin()
            torch._dynamo.graph_break()
            return super().forward(h)

    assert not outcome(of_backend, Broken(mesh), {"attention": "ring"}, "attention").startswith(
        "refused: SP109: attention="
    )


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("outputs", ["lazy", {0: "lazy"}], ids=str)
def test_results_that_know_their_shard(mesh: DeviceMesh, entry: Callable[..., str], outputs: Any) -> None:
    """`parallelize` and `verify` refuse lazy outputs: a single graph has none, and verify compares full tensors."""
    found = outcome(entry, Model(), {"mesh": mesh, "outputs": outputs}, "outputs")
    if entry in (of_verify, of_parallelize):
        assert re.match(r"refused: SP1\d\d: outputs", found), found
    else:
        assert found != outcome(entry, Model(), {"mesh": mesh}, "outputs")


@pytest.mark.parametrize("options", [{"attention": "ring"}, {"layout": "zigzag"}])
def test_options_for_several_ranks_are_reported_on_one(options: Options) -> None:
    (asked,) = options.values()
    report = sp_compile.explain(Model(), torch.randn(2, 8, WIDTH), sp=1, **options)
    assert report.find_notes(NoteKind.DECLINED, subject=asked), report
    assert not sp_compile.explain(Model(), torch.randn(2, 8, WIDTH), sp=1).find_notes(NoteKind.DECLINED)


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_compiler_of_a_program_with_a_sequence(mesh: DeviceMesh, entry: Callable[..., str]) -> None:
    """It gets the local graph, or there is no use for it."""
    called: list[int] = []

    def compiler(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        called.append(1)
        return gm.forward

    found = outcome(entry, Model(), {"mesh": mesh, "compiler": compiler}, "compiler")
    assert called if entry is of_backend else re.search(r"refused: SP109: compiler=", found), found


OPTION_NAMES = {field.name for field in fields(SPConfig)}
TYPED_ENTRIES = {
    sp_compile.explain: {"kwargs"},
    sp_compile.verify: {"kwargs"},
    sp_compile.plan: {"kwargs"},
    sp_compile.parallelize: set(),
    sp_compile.fully_shard_and_compile: set(),
    compile_under_ddp: set(),
    compile_under_fsdp: set(),
}
UNTYPED_OPTIONS = {sp_compile.plan: {"mesh", "mesh_dim"}}


def test_types_are_those_of_the_config() -> None:
    assert get_type_hints(SPOptions) == get_type_hints(SPConfig)


@pytest.mark.parametrize("entry", TYPED_ENTRIES, ids=lambda entry: entry.__name__)
def test_signature_has_every_option(entry: Callable[..., Any]) -> None:
    parameters = inspect.signature(entry).parameters
    (declared,) = get_args(get_type_hints(entry)["options"])
    named, typed = {*parameters} - {"options"}, {*get_type_hints(declared)}
    assert not named & typed
    assert (named | typed) & (OPTION_NAMES | {"kwargs"}) == (OPTION_NAMES | TYPED_ENTRIES[entry]) - UNTYPED_OPTIONS.get(
        entry, set()
    )
