"""Train with an Accelerator whose ranks share sequences.

    from sp_compile.integrations.accelerate import SequenceParallelAccelerator

    accelerator = SequenceParallelAccelerator()                                    # all ranks share each sequence
    accelerator = SequenceParallelAccelerator(parallelism_config=ParallelismConfig(dp_replicate_size=2, sp_size=4))
    accelerator = SequenceParallelAccelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))  # weights too
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

The rest of the training loop does not change. A replica is a group of ranks that share each sequence of its batches;
every replica has other batches. Tested with accelerate 1.15.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import get_sampler
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import (
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchDynamoPlugin,
    broadcast,
    recursively_apply,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from sp_compile.lowering.base.errors import SpError
from sp_compile.runtime.weights import require_equal_weights

from ._compat.trainers import NAME, choose_fsdp_units, is_prepared, mark_unprepared, register_backend_name, use_fsdp
from .ddp import compile_under_ddp
from .fsdp import compile_under_fsdp
from .over_replicas import collect_tensors, gather_over_replicas, sum_over_replicas
from .parallelism import SEQUENCE_AXIS, axis_sizes, config_of_environment, make_mesh

__all__ = ["SequenceParallelAccelerator", "axis_sizes", "register_backend_name"]

OWN_OPTIONS = ("mesh", "mesh_dim", "param_grads")  # options that the Accelerator sets, so that users cannot
FSDP1_FIX = (
    "Pass FullyShardedDataParallelPlugin(fsdp_version=2), TrainingArguments(fsdp_config={'version': 2}), or "
    "fsdp_version: 2 in accelerate's file."
)
MODE_FIX = (
    "Omit it, and set fields of torch._inductor.config, such as max_autotune=True; CUDA graphs are not supported."
)
REGIONAL_FIX = "Omit it. With FSDP and an auto_wrap_policy, the layers are compiled one by one."
DISPATCH_ERROR = (
    "dispatch_batches=True is not supported: it cuts a batch over all ranks, and ranks that share a sequence need "
    "the same batch."
)


class SequenceParallelAccelerator(Accelerator):
    """Accelerator with replicas of several ranks that share every sequence.

    There are `dp_replicate_size * dp_shard_size` replicas of `sp_size` ranks. Prepared loaders yield the same batches
    on ranks that share a sequence. A prepared model is compiled in place, and wrapped in DDP, or sharded by FSDP2 over
    the `dp_shard_size * sp_size` ranks of a shard group. A prepared scheduler is stepped once for the batch of each
    replica. `gather_for_metrics`, `gather` and `reduce` count each sequence once. With one process, the model is
    compiled without a mesh.

    Args:
        *args: Positional arguments of `Accelerator`, the first of which is `device_placement`.
        parallelism_config: The sizes `dp_replicate_size`, `dp_shard_size` (with FSDP), and `sp_size` or `cp_size`,
            which have the same meaning here. A size of 1 is derived from the others and the number of processes. By
            default they are those of the file of `accelerate launch`; without it all ranks share each sequence.
        fsdp_plugin: The settings of FSDP2, which shards weights. By default those of the file of `accelerate launch`.
        sp_options: Fields of `sp_compile.SPConfig` for the compilation of the model, except `mesh`, `mesh_dim` and
            `param_grads`.
        **kwargs: Arguments of `Accelerator`, such as `mixed_precision` and `gradient_accumulation_steps`, with their
            meaning there. `dynamo_backend` is "sp" or absent. `dynamic`, `fullgraph`, `options` and `disable` of a
            `dynamo_plugin` are used. `dataloader_config` must not set `dispatch_batches`.

    Attributes:
        mesh: The mesh with axes ("dp_replicate", "dp_shard", "cp"), the last of which splits the sequence; None with
            one process.
        sp_size: The number of ranks that share a sequence.
        replicas: The number of replicas, which have different batches.

    Raises:
        SpError: The backend is another one or a setting of it is not supported (SP821), an option is set by the
            Accelerator (SP822), the processes use FSDP1, DeepSpeed or Megatron (SP823), `dispatch_batches` is set
            (SP824), accelerate uses another number of processes (SP825), the sizes or handlers are invalid (SP826,
            SP827), or no layers are named to checkpoint (SP834).
    """

    flag_tensor: torch.Tensor | None  # the trigger of this rank
    batch_group: dist.ProcessGroup  # one rank of each replica
    sequence_group: dist.ProcessGroup  # the ranks of this replica
    command_options: ClassVar[Mapping[str, Any]] = {}  # options of `sp_compile run`, which replace those of all objects
    has_prepared: ClassVar[bool] = False  # True in the process after any object has prepared a model
    _counts_replicas = False  # True within `count_replicas`

    def __init__(
        self,
        *args: Any,
        parallelism_config: ParallelismConfig | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        sp_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Create the Accelerator; see the class.

        Raises:
            SpError: A setting is not supported, as the class lists.
        """
        config = parallelism_config or config_of_environment()
        if fsdp_plugin is None and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
            fsdp_plugin = FullyShardedDataParallelPlugin()
        if fsdp_plugin is not None and fsdp_plugin.fsdp_version != 2:
            raise SpError("SP823", f"fsdp_version: expected 2, got {fsdp_plugin.fsdp_version}.", FSDP1_FIX)
        # The sizes are not passed on: accelerate would split batches for DeepSpeed or for its context parallelism.
        with register_backend_name(), mock.patch.dict(os.environ, ACCELERATE_USE_PARALLELISM_CONFIG="false"):
            super().__init__(*args, fsdp_plugin=fsdp_plugin, **kwargs)
        plugin = self.state.dynamo_plugin
        if plugin.backend not in ("NO", NAME):
            backend = str(plugin.backend.value).lower()
            fix = f"Leave it out or pass 'sp', and sp_options={{'compiler': {backend!r}}}."
            raise SpError("SP821", f"dynamo_backend: expected 'sp', got {backend!r}.", fix)
        if plugin.mode not in (None, "default"):  # torch.compile accepts either a mode or options
            raise SpError("SP821", f"dynamo_plugin: mode={plugin.mode!r} is not supported.", MODE_FIX)
        if plugin.use_regional_compilation:
            raise SpError("SP821", "dynamo_plugin: use_regional_compilation is not supported.", REGIONAL_FIX)
        self.sp_options = {**(sp_options or {}), **(plugin.options or {}), **self.command_options}
        for name in OWN_OPTIONS:
            if name in self.sp_options:
                raise SpError("SP822", f"sp_options: unexpected option {name!r}, which the Accelerator sets itself.")
        self.compile_options = {"fullgraph": plugin.fullgraph, "dynamic": plugin.dynamic}
        self.is_disabled = bool(plugin.disable)  # models then run on all ranks as they are
        self.state.dynamo_plugin = TorchDynamoPlugin(backend="no")  # else accelerate would compile the model with DDP
        self._check_processes()
        sizes = axis_sizes(config, self.num_processes, is_sharded=fsdp_plugin is not None)
        self.replicas, self.sp_size = sizes.replicate * sizes.shard, sizes.sequence
        self.mesh: DeviceMesh | None = None
        if self.num_processes > 1:
            self._check_settings(fsdp_plugin)
            self.mesh, batches = make_mesh(self.device.type, sizes)
            self.batch_group, self.sequence_group = batches.get_group(), self.mesh.get_group(SEQUENCE_AXIS)
            self.dataloader_config.dispatch_batches = False
            if fsdp_plugin is not None:
                use_fsdp(self.state, fsdp_plugin)
                # For accelerate, the ranks of a sequence are further ranks that shard weights. All sizes are passed,
                # since omitted ones are read from the environment.
                shards = {"dp_replicate_size": sizes.replicate, "dp_shard_size": sizes.shard * sizes.sequence}
                self.state.parallelism_config = ParallelismConfig(**shards, tp_size=1, cp_size=1, sp_size=1)

    def _check_settings(self, plugin: FullyShardedDataParallelPlugin | None) -> None:
        """Raise SpError for settings of accelerate that do not support ranks that share a sequence.

        Raises:
            SpError: The distributed type (SP823), `dispatch_batches` (SP824), or checkpointing of no layers (SP834).
        """
        kind = str(self.distributed_type.value)
        if kind != "FSDP" and not kind.startswith("MULTI_"):
            raise SpError("SP823", f"distributed_type: expected DDP or FSDP, got {self.distributed_type}.")
        if self.dataloader_config.dispatch_batches:
            raise SpError("SP824", DISPATCH_ERROR)
        if plugin is not None and plugin.activation_checkpointing and plugin.auto_wrap_policy is None:
            raise SpError(
                "SP834", "activation_checkpointing: expected an auto_wrap_policy that names layers, got none."
            )

    def _check_processes(self) -> None:
        """Raise SpError if accelerate uses fewer processes than were started, as on machines without a GPU.

        Raises:
            SpError: The numbers of processes differ (SP825).
        """
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        started = max(world_size, int(os.environ.get("WORLD_SIZE", "1")))
        if self.num_processes != started:
            effect = f"accelerate uses {self.num_processes}, so each would train its own model"
            raise SpError("SP825", f"{started} processes were started, but {effect}.")

    @property
    def torch_device_mesh(self) -> Any:
        """Return the mesh from which accelerate's loaders derive the ranks that receive the same batches.

        Returns:
            The attribute `mesh`; with one process, the mesh of accelerate.
        """
        return self.mesh if self.mesh is not None else super().torch_device_mesh

    @property
    def num_processes(self) -> int:
        """Return the number of processes; within `count_replicas`, the number of replicas.

        Returns:
            The number of processes or replicas.
        """
        return self.replicas if self._counts_replicas else int(super().num_processes)

    @property
    def process_index(self) -> int:
        """Return the index of this process; within `count_replicas`, the index of its replica.

        Returns:
            A number from 0.
        """
        # `batch_group` has one process of each replica.
        return self.batch_group.rank() if self._counts_replicas else int(super().process_index)

    @contextmanager
    def count_replicas(self) -> Iterator[None]:
        """Count replicas as processes in a context, for code that assumes that each process has other samples.

        Returns:
            A context manager that yields None.
        """
        with mock.patch.object(self, "_counts_replicas", self.mesh is not None):
            yield

    @contextmanager
    def count_processes(self) -> Iterator[None]:
        """Count processes in a context within `count_replicas`, for code that knows which ranks share a batch.

        Returns:
            A context manager that yields None.
        """
        with mock.patch.object(self, "_counts_replicas", False):
            yield

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Run `Accelerator.prepare_data_loader`, with the same random order on all ranks.

        Args:
            data_loader: The DataLoader. A sampler without a generator receives one with a common seed.
            *args: `device_placement` and `slice_fn_for_dispatch` of `Accelerator.prepare_data_loader`.
            **kwargs: The same by name.

        Returns:
            The prepared loader.
        """
        sampler = get_sampler(data_loader)
        lacks_generator = getattr(sampler, "generator", self) is None  # False for a sampler without this attribute
        if self.mesh is not None and lacks_generator:
            seed = broadcast(torch.empty((), dtype=torch.int64, device=self.device).random_())
            sampler.generator = torch.Generator().manual_seed(int(seed))
        with self.count_processes():  # the ranks that share a batch follow from the mesh
            return super().prepare_data_loader(data_loader, *args, **kwargs)

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Run `Accelerator.prepare`; with FSDP, compile the model after its layers are sharded.

        Args:
            *args: Models, optimizers, loaders and schedulers. With FSDP, a model without an optimizer is prepared too.
            **kwargs: `device_placement` of `Accelerator.prepare`.

        Returns:
            The prepared objects in the same order; one object if there is one.

        Raises:
            SpError: An option is invalid, the model is already compiled (SP831), or its weights differ between ranks
                (SP642).
        """
        models = [x for x in args if isinstance(x, torch.nn.Module)]
        if self.mesh is None or not self.is_fsdp2 or not models:
            return super().prepare(*args, **kwargs)
        if not self.state.fsdp_plugin.cpu_ram_efficient_loading:  # else accelerate sends the weights of rank 0 to all
            for model in models:
                require_equal_weights(model, self.mesh)
        with choose_fsdp_units():
            if any(isinstance(x, torch.optim.Optimizer) for x in args):
                prepared = super().prepare(*args, **kwargs)
            else:  # to evaluate; accelerate requires an optimizer, so pass one that is removed again
                if kwargs.get("device_placement") is not None:  # has an entry for each object
                    kwargs["device_placement"] = [*kwargs["device_placement"], None]
                added = torch.optim.SGD(models[0].parameters(), lr=0.0)
                *prepared, optimizer = super().prepare(*args, added, **kwargs)
                self._optimizers.remove(optimizer)
                prepared = prepared[0] if len(args) == 1 else tuple(prepared)
        for model in [prepared] if len(args) == 1 else prepared:
            if isinstance(model, torch.nn.Module):
                self.compile(model)
        return prepared

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Compile a model with backend="sp", then run `Accelerator.prepare_model`; with FSDP, run `prepare`.

        Args:
            model: The model, which is compiled in place.
            device_placement: As for `Accelerator.prepare_model`.
            evaluation_mode: If True, do not wrap the model with DDP. A later call without it does.

        Returns:
            The prepared model.

        Raises:
            SpError: An option is invalid, or the model is already compiled (SP831).
        """
        if self.mesh is not None and self.is_fsdp2:
            return self.prepare(model)
        if getattr(model, "is_for_evaluation", False) and not evaluation_mode:
            # A Trainer that evaluates before it trains prepares its model a second time. accelerate would return the
            # prepared model as it is, without DDP, so undo the first time.
            model.is_for_evaluation = False
            mark_unprepared(model)
            self._models[:] = [other for other in self._models if other is not model]
            self.unwrap_model(model, keep_fp32_wrapper=False)  # restores the forward without casts
        if not is_prepared(model):
            self.compile(model)
            model.is_for_evaluation = evaluation_mode
        return super().prepare_model(model, device_placement, evaluation_mode)

    def compile(self, model: torch.nn.Module) -> None:
        """Compile a model in place, with `compile_under_fsdp` or `compile_under_ddp`.

        A second call has no effect, nor has a call with `disable` of the `dynamo_plugin`.

        Args:
            model: The model.

        Returns:
            None.

        Raises:
            SpError: An option is invalid, or the model is already compiled (SP831).
        """
        SequenceParallelAccelerator.has_prepared = True
        if self.is_disabled or getattr(model, "is_sequence_parallel", False):
            return
        mesh = self.mesh[SEQUENCE_AXIS] if self.mesh is not None else None
        compile_model = compile_under_fsdp if isinstance(model, FSDPModule) else compile_under_ddp
        compile_model(model, mesh, **self.compile_options, **self.sp_options)
        model.is_sequence_parallel = True

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Run `Accelerator.prepare_scheduler`, so that a step counts replicas, not processes.

        Args:
            scheduler: The learning rate scheduler.

        Returns:
            The prepared scheduler.
        """
        prepared = super().prepare_scheduler(scheduler)
        if self.mesh is None or type(prepared) is not AcceleratedScheduler or prepared.split_batches:
            return prepared
        # With `split_batches`, `AcceleratedScheduler.step` is one step, not one for each process.
        by_replica = ReplicaScheduler(
            prepared.scheduler, prepared.optimizers, prepared.step_with_optimizer, split_batches=True
        )
        by_replica.replicas = self.replicas
        self._schedulers[-1] = by_replica  # in place of `prepared`, which the Accelerator has appended
        return by_replica

    def gather(self, tensor: Any) -> Any:
        """Gather tensors over the replicas, as `Accelerator.gather` does over the processes.

        Args:
            tensor: A tensor, or nested lists, tuples and dicts of tensors, equal on ranks that share a sequence.

        Returns:
            The same structure, with the tensors of all replicas concatenated along the first dim.

        Raises:
            SpError: The replicas pass different shapes or dtypes (SP829), or a replica does not arrive.
        """
        if self.mesh is None or collect_tensors(tensor) is None:
            return super().gather(tensor)
        return gather_over_replicas(tensor, self.batch_group)

    def gather_objects(self, objects: list[Any]) -> list[Any]:
        """Gather lists of objects over the replicas, as `accelerate.utils.gather_object` does over the processes.

        Args:
            objects: The list of this replica.

        Returns:
            The lists of all replicas, concatenated.

        Raises:
            SpError: A replica does not arrive.
        """
        gathered: list[Any] = gather_over_replicas(objects, self.batch_group, as_objects=True)
        return gathered

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce tensors, as `Accelerator.reduce` does, but sum over the replicas, not over the processes.

        Args:
            tensor: A tensor, or nested lists, tuples and dicts of tensors.
            reduction: "sum", or another reduction of `Accelerator.reduce`.
            scale: Factor of the result; not used for a sum over replicas.

        Returns:
            The same structure with the reduced tensors.

        Raises:
            SpError: Integers of a sum differ between ranks that share a sequence (SP828).
        """
        if self.mesh is None or reduction != "sum" or collect_tensors(tensor) is None:
            return super().reduce(tensor, reduction, scale)
        groups = self.batch_group, self.sequence_group
        return recursively_apply(lambda x: sum_over_replicas(x, *groups), tensor)

    def check_trigger(self) -> bool:
        """Return True if any rank has called `set_trigger`, and reset it, as `Accelerator.check_trigger`.

        Returns:
            The same value on every rank.
        """
        flag = torch.tensor(0, device=self.device) if self.flag_tensor is None else self.flag_tensor
        is_set = bool(self.reduce(flag, "max").item() >= 1)  # "sum" would be over one rank of each replica
        if is_set:
            self.flag_tensor = None
        return is_set

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather over the replicas, as `Accelerator.gather_for_metrics`, without duplicates of the last batch.

        Args:
            input_data: Tensors, as for `gather`, or lists of objects, which are pickled, as by accelerate.
            use_gather_object: If True, gather tensors as objects, too.

        Returns:
            The gathered tensors, or one list of all objects.

        Raises:
            SpError: The replicas pass different shapes or types (SP829), or a replica does not arrive.
        """
        if self.mesh is None:
            return super().gather_for_metrics(input_data, use_gather_object)
        as_objects = use_gather_object or collect_tensors(input_data) is None
        gathered = gather_over_replicas(input_data, self.batch_group, as_objects=as_objects)
        # Loaders complete the last batch with samples of the first one. `remainder` is the number of samples without
        # these, or not positive if there are none or the number is not known.
        remainder = self.gradient_state.remainder if self.gradient_state.end_of_dataloader else 0
        if remainder <= 0:
            return gathered
        if as_objects:  # one list of the objects of all replicas
            return gathered[:remainder]
        return recursively_apply(lambda x: x[:remainder], gathered)


class ReplicaScheduler(AcceleratedScheduler):
    """A scheduler that is stepped once per replica, since a schedule counts the batches of a single device."""

    replicas = 1  # number of steps of the schedule for each step of the optimizer

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Run `AcceleratedScheduler.step` for each replica, until `total_steps` if there is a limit.

        Without `step_with_optimizer`, the user counts the steps: it is run once, as by accelerate.

        Args:
            *args: Arguments of the scheduler's `step`.
            **kwargs: Arguments of the scheduler's `step`.

        Returns:
            None.
        """
        if not self.step_with_optimizer:
            super().step(*args, **kwargs)
            return
        # In a step that only accumulates gradients, `AcceleratedScheduler.step` does not step the schedule.
        for _ in range(self.replicas if self.gradient_state.sync_gradients else 1):
            if self.scheduler.last_epoch < getattr(self.scheduler, "total_steps", float("inf")):
                super().step(*args, **kwargs)
