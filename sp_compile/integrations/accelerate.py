"""accelerate: an Accelerator whose ranks share sequences.

    from sp_compile.integrations.accelerate import SequenceParallelAccelerator

    accelerator = SequenceParallelAccelerator()                                    # all ranks share each sequence
    accelerator = SequenceParallelAccelerator(parallelism_config=ParallelismConfig(dp_replicate_size=2, sp_size=4))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

Everything else of the loop stays as it is. Tried on accelerate 1.15.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import get_sampler
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import ParallelismConfig, TorchDynamoPlugin, broadcast, recursively_apply
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.ranks import ranks_of
from sp_compile.lowering.torch_compat import is_lost_connection
from sp_compile.runtime.agreement import all_gather_object, format_mismatch
from sp_compile.runtime.control.channel import channel_of
from sp_compile.runtime.control.message import Message

from ._compat import NAME, register_backend_name
from .ddp import compile_under_ddp

__all__ = ["SequenceParallelAccelerator", "axis_sizes", "register_backend_name"]

REPLICA_AXIS, SEQUENCE_AXIS = "dp_replicate", "cp"
"""Axes of the mesh. accelerate calls "cp" an axis along which ranks take the same batches."""

GATHER_METHODS = Message("gathers", "the arguments of a metric")
OWN_ARGUMENTS = ("mesh", "mesh_dim", "param_grads")
DISPATCH_ERROR = (
    "dispatch_batches=True is not supported: it cuts a batch over all ranks, and ranks that share a sequence need "
    "the same batch."
)


class SequenceParallelAccelerator(Accelerator):
    """An Accelerator of `dp_replicate_size` replicas, in each of which `sp_size` ranks share every sequence.

    parallelism_config: these two sizes; one that is 1 is what the other leaves of the processes, so that without any
    all ranks share a sequence. sp_options: fields of `sp_compile.SPConfig` for the model's compilation, but for the
    mesh and what becomes of gradients, which are known here. dynamo_backend: "sp", or none at all, which means the
    same; a dynamo_plugin's `dynamic`, `fullgraph` and `options` are taken.

    What is prepared: loaders give ranks that share a sequence the same batches; a model is compiled in place, under
    DDP; a scheduler is stepped once for each replica's batch, as accelerate does for each process.
    `gather_for_metrics`, `gather` and `reduce` count a sequence once, however many ranks share it. With one process it
    is an Accelerator that compiles. mesh: axes ("dp_replicate", "cp"), the second of which is the sequence's; None with
    one process.

    Raises SpError: sizes that do not fit, another backend, FSDP, DeepSpeed or Megatron.
    """

    flag_tensor: torch.Tensor | None

    def __init__(
        self,
        *args: Any,
        parallelism_config: ParallelismConfig | None = None,
        sp_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        with register_backend_name():
            super().__init__(*args, **kwargs)
        plugin = self.state.dynamo_plugin
        if plugin.backend not in ("NO", NAME):
            other = str(plugin.backend.value).lower()
            raise SpError(
                "SP821",
                f"dynamo_backend: expected 'sp', got {other!r}.",
                f"Leave it out or pass 'sp', and sp_options={{'compiler': {other!r}}}.",
            )
        self.sp_options = dict(sp_options or {}) | dict(plugin.options or {})
        for name in OWN_ARGUMENTS:
            if name in self.sp_options:
                raise SpError("SP822", f"sp_options: {name!r} follows from the processes of the Accelerator.")
        self.compiles = {"fullgraph": plugin.fullgraph, "dynamic": plugin.dynamic}
        self.state.dynamo_plugin = TorchDynamoPlugin(backend="no")  # which would compile around DDP
        self._check_processes()
        replicas, share = axis_sizes(parallelism_config, self.num_processes)
        self.mesh: DeviceMesh | None = None
        if self.num_processes > 1:
            if not str(self.distributed_type.value).startswith("MULTI_"):
                raise SpError("SP823", f"distributed_type: expected DDP, got {self.distributed_type}.")
            names = (REPLICA_AXIS, SEQUENCE_AXIS)
            self.mesh = init_device_mesh(self.device.type, (replicas, share), mesh_dim_names=names)
            if self.dataloader_config.dispatch_batches:
                raise SpError("SP824", DISPATCH_ERROR)
            self.dataloader_config.dispatch_batches = False
        self.sp_size, self.replicas = share, replicas

    def _check_processes(self) -> None:
        """Raise SpError where accelerate takes this for the only process, as it does on machines without a GPU."""
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        there = max(dist.get_world_size() if dist.is_initialized() else 1, launched)
        if self.num_processes != there:
            raise SpError(
                "SP825",
                f"{there} processes were started, but accelerate uses {self.num_processes}, so each would train its "
                "own model.",
            )

    @property
    def torch_device_mesh(self) -> Any:
        """The mesh by which accelerate's loaders find out which ranks take the same batches."""
        return self.mesh if self.mesh is not None else super().torch_device_mesh

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """As `Accelerator.prepare_data_loader`. A random order without a generator is drawn alike on all ranks."""
        sampler = get_sampler(data_loader)
        if self.mesh is not None and getattr(sampler, "generator", self) is None:
            seed = broadcast(torch.empty((), dtype=torch.int64, device=self.device).random_())
            sampler.generator = torch.Generator().manual_seed(int(seed))
        return super().prepare_data_loader(data_loader, *args, **kwargs)

    def prepare_model(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """As `Accelerator.prepare_model`, of a model that is compiled with backend="sp" first; see `compile`."""
        if getattr(model, "_is_accelerate_prepared", False):
            return super().prepare_model(model, *args, **kwargs)
        self.compile(model)
        return super().prepare_model(model, *args, **kwargs)

    def compile(self, model: torch.nn.Module) -> None:
        """Compile a model for the ranks that share its sequence, as `compile_under_ddp` does; once."""
        if getattr(model, "is_sequence_parallel", False):
            return
        mesh = self.mesh[SEQUENCE_AXIS] if self.mesh is not None else None
        compile_under_ddp(model, mesh, **self.compiles, **self.sp_options)
        model.is_sequence_parallel = True

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """As `Accelerator.prepare_scheduler`, of which a step counts replicas, not processes."""
        prepared = super().prepare_scheduler(scheduler)
        if self.mesh is None or type(prepared) is not AcceleratedScheduler or prepared.split_batches:
            return prepared
        mine = ReplicaScheduler(prepared.scheduler, prepared.optimizers, prepared.step_with_optimizer, True)
        mine.replicas = self.replicas
        self._schedulers[-1] = mine
        return mine

    def gather(self, tensor: Any) -> Any:
        """As `Accelerator.gather`, of every replica once: ranks that share a sequence hold the same rows.

        Raises SpError: replicas that hand in different shapes, or do not come.
        """
        if self.mesh is None or _collect_tensors(tensor) is None:
            return super().gather(tensor)
        return gather_over_replicas(tensor, self.mesh.get_group(REPLICA_AXIS))

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """As `Accelerator.reduce`; a sum counts every replica once, by what each rank of it holds.

        Raises SpError: a sum of integers that are not the same on the ranks that share a sequence.
        """
        if self.mesh is None or reduction != "sum" or _collect_tensors(tensor) is None:
            return super().reduce(tensor, reduction, scale)
        groups = [self.mesh.get_group(name) for name in (REPLICA_AXIS, SEQUENCE_AXIS)]
        return recursively_apply(lambda x: _sum_over_replicas(x, *groups), tensor)

    def check_trigger(self) -> bool:
        """As `Accelerator.check_trigger`: has any rank set the trigger?"""
        mine = torch.tensor(0, device=self.device) if self.flag_tensor is None else self.flag_tensor
        found = bool(self.reduce(mine, "max").item() >= 1)
        if found:
            self.flag_tensor = None
        return found

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `Accelerator.gather_for_metrics`, of every replica once.

        Lists of numbers and text go as JSON; only other objects are pickled, as accelerate does.
        Raises SpError: replicas that hand in different shapes or types, or do not come.
        """
        if self.mesh is None:
            return super().gather_for_metrics(input_data, use_gather_object)
        gathered = gather_over_replicas(input_data, self.mesh.get_group(REPLICA_AXIS), use_gather_object)
        left = self.gradient_state.remainder if self.gradient_state.end_of_dataloader else 0
        if left <= 0:
            return gathered
        return gathered[:left] if isinstance(gathered, list) else recursively_apply(lambda x: x[:left], gathered)


def _sum_over_replicas(x: torch.Tensor, replicas: dist.ProcessGroup, sequence: dist.ProcessGroup) -> torch.Tensor:
    """The sum over replicas. Raises SpError, on every rank, where ranks of one sequence hold different integers."""
    total = x.clone()
    dist.all_reduce(total, group=replicas)
    if total.is_floating_point() or total.is_complex():
        return total
    least, most = total.clone(), total.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN, sequence)
    dist.all_reduce(most, dist.ReduceOp.MAX, sequence)
    if not torch.equal(least, most):
        raise SpError(
            "SP828",
            f"reduce: expected the same integers on the {sequence.size()} ranks that share a sequence, got different "
            "ones.",
        )
    return total


def gather_over_replicas(data: Any, group: dist.ProcessGroup, as_objects: bool = False) -> Any:
    """The tensors of all ranks of a group, along their first dim; of anything else the items, in one list.

    First the ranks tell what they have, as JSON, in a wait that ends in words.
    Raises SpError: ranks that hand in different things, or do not come.
    """
    ranks, tensors = ranks_of(group), None if as_objects else _collect_tensors(data)
    plain = not tensors and _is_json(data)
    mine = "values" if plain else "objects" if tensors is None else str([(str(x.dtype), [*x.shape]) for x in tensors])
    everyone = all_gather_object(ranks, GATHER_METHODS.verb, GATHER_METHODS.subject, (mine, data if plain else None))
    rows = [kind for kind, _ in everyone]
    if {*rows} == {"values"}:
        return [x for _, one in everyone for x in one]
    if len({*rows}) > 1 and not {*rows} <= {"values", "objects"}:
        raise SpError("SP829", format_mismatch("gather_for_metrics: the replicas pass different values", rows))
    wire, begun = channel_of(ranks), time.monotonic()
    try:
        if tensors is not None and "objects" not in rows:
            return recursively_apply(lambda x: _all_gather(x, group), data, error_on_other_type=True)
        each: list[Any] = [None] * ranks.n
        dist.all_gather_object(each, data, group)
    except RuntimeError as error:
        if wire is None or not is_lost_connection(error):
            raise
        raise wire.fail_timeout(GATHER_METHODS, time.monotonic() - begun, error) from error
    return [x for one in each for x in one]


def _all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    x = (x[None] if x.ndim == 0 else x).contiguous()
    out = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(out, x, group)
    return torch.cat(out)


def _collect_tensors(data: Any) -> list[torch.Tensor] | None:
    """All there are in nested lists, tuples and dicts; None where something else is."""
    found: list[torch.Tensor] = []
    try:
        recursively_apply(found.append, data, error_on_other_type=True)
    except TypeError:
        return None
    return found


def _is_json(data: Any) -> bool:
    """Does JSON give back just this?"""
    if type(data) in (list, tuple):
        return all(map(_is_json, data))
    if type(data) is dict:
        return all(_is_json(key) and _is_json(value) for key, value in data.items())
    return data is None or type(data) in (bool, int, float, str)


class ReplicaScheduler(AcceleratedScheduler):
    """Steps once for each replica at an optimizer's step: schedules are written for the batches of one device."""

    replicas = 1

    def step(self, *args: Any, **kwargs: Any) -> None:
        """As `AcceleratedScheduler.step`."""
        for _ in range(self.replicas if self.gradient_state.sync_gradients else 1):
            if self.scheduler.last_epoch < getattr(self.scheduler, "total_steps", float("inf")):
                super().step(*args, **kwargs)


def axis_sizes(config: ParallelismConfig | None, processes: int) -> tuple[int, int]:
    """(replicas, ranks that share a sequence) of so many processes. Raises SpError where the config's do not fit."""
    if config is None or processes == 1:
        return 1, processes
    for name in ("tp_size", "cp_size", "dp_shard_size"):
        if getattr(config, name) > 1:
            fix = "Pass sp_size, whose ranks share a sequence." if name == "cp_size" else None
            raise SpError("SP827", f"ParallelismConfig: {name}={getattr(config, name)} is not supported.", fix)
    replicas, share = config.dp_replicate_size, config.sp_size
    if share == 1:
        share = max(processes // replicas, 1)
    elif replicas == 1:
        replicas = max(processes // share, 1)
    if replicas * share != processes:
        raise SpError(
            "SP826",
            f"ParallelismConfig: expected sizes whose product is {processes}, the number of processes, got "
            f"dp_replicate_size={config.dp_replicate_size} and sp_size={config.sp_size}.",
        )
    return replicas, share
