"""Train with a transformers Trainer whose ranks share sequences, or a subclass of it, as TRL's.

    from sp_compile.integrations.transformers import SequenceParallel

    class MyTrainer(SequenceParallel, Trainer): ...

By default all ranks share each sequence. For replicas, pass
`TrainingArguments(parallelism_config=ParallelismConfig(dp_replicate_size=2, sp_size=4))`.
To shard weights with FSDP2, pass `TrainingArguments(fsdp=True, fsdp_config={...})`.
Tested with transformers 5.24, TRL 1.16 and PEFT 0.21.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar
from unittest import mock

import transformers.trainer
from transformers.trainer import Trainer

from sp_compile.lowering.base.errors import SpError

from ._compat.counting import ReplicaCounter, check_trainer
from ._compat.sampling import SampleSharer, record_given_total
from ._compat.trainers import ItemCounter, WeightSaver, register_backend_name
from .accelerate import SequenceParallelAccelerator
from .parallelism import SEQUENCE_AXIS
from .shard_cache import shard_cache

__all__ = ["SequenceParallel"]

record_given_total()  # before the user creates arguments


class SequenceParallel(SampleSharer, ReplicaCounter, ItemCounter, WeightSaver):
    """Base class, listed before a Trainer, that compiles the model with backend="sp".

    Training, evaluation, prediction, loaders, gradient accumulation, clipping, metrics and checkpoints remain those of
    the Trainer. A batch is counted once, regardless of the number of ranks that share it. The batch size of a step is
    per_device_train_batch_size * gradient_accumulation_steps * the number of replicas.

    Trainers that sample, such as TRL's GRPOTrainer, sample once for the ranks that share a sequence. With
    `shard_generation = True` in the class, these ranks also share the cache of generation, as `sp_compile.shard_cache`
    documents: prompts run on shards, and each rank stores a part of the keys and values.

    `parallelism_config`, `fsdp` and `torch_compile_backend` of the arguments have the meaning that
    `SequenceParallelAccelerator` documents.
    """

    sp_options: ClassVar[Mapping[str, Any]] = {}  # fields of `sp_compile.SPConfig`
    shard_generation: ClassVar[bool] = False  # share the cache of generation, in GRPO and RLOO of TRL
    accelerator: Any  # the SequenceParallelAccelerator
    model: Any  # the model, or the result of fully_shard
    gather_function: Any  # the function that the Trainer calls to gather predictions

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a class whose Trainer would not call the methods of this one.

        Raises:
            SpError: A Trainer is listed before `SequenceParallel` (SP847).
        """
        super().__init_subclass__(**kwargs)
        bases = cls.__mro__
        if Trainer in bases and bases.index(Trainer) < bases.index(SequenceParallel):
            got = ", ".join(base.__name__ for base in cls.__bases__)
            raise SpError("SP847", f"{cls.__name__}: expected SequenceParallel as the first base, got {got}.")

    def create_accelerator_and_postprocess(self) -> None:
        """Run the Trainer's method with a `SequenceParallelAccelerator` as its Accelerator.

        Returns:
            None.

        Raises:
            SpError: The arguments do not match the processes, see `SequenceParallelAccelerator`, `shard_generation`
                has no effect in this Trainer (SP838), or this Trainer counts processes in other methods (SP839).
        """

        def make_accelerator(**kwargs: Any) -> SequenceParallelAccelerator:
            """Return our Accelerator with the arguments that the Trainer would pass to `Accelerator`.

            Its parallelism_config is always that of the TrainingArguments.
            """
            kwargs.pop("parallelism_config", None)  # the Trainer may pass it, too
            config = self.args.parallelism_config
            return SequenceParallelAccelerator(parallelism_config=config, sp_options=self.sp_options, **kwargs)

        with mock.patch.object(transformers.trainer, "Accelerator", make_accelerator), register_backend_name():
            super().create_accelerator_and_postprocess()  # type: ignore[misc]
        if self.accelerator.sp_size > 1:
            check_trainer(type(self))
        self._count_in_creation()
        if self.shard_generation and (getattr(self.args, "use_vllm", False) or not self._samples_once):
            name = type(self).__name__
            raise SpError("SP838", f"shard_generation: expected a Trainer that samples by `generate()`, got {name}.")
        self.count_generations()  # TRL has set the numbers of completions for processes: set them for replicas

    def share_cache(self) -> AbstractContextManager[Any]:
        """Return a context in which the ranks of a sequence share the cache of generation, if the class selects it.

        Returns:
            The context of `shard_cache`, or one without effect.
        """
        mesh = self.accelerator.mesh
        if mesh is None or not self.shard_generation:
            return super().share_cache()
        return shard_cache(self.model, mesh[SEQUENCE_AXIS], **self.accelerator.sp_options)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Run the Trainer's method, such that predictions are gathered without repeated rows.

        If replicas do not divide the last batch, loaders fill it with rows of the first one. `gather_for_metrics` drops
        these; `Accelerator.gather`, which Seq2SeqTrainer calls, does not. A single replica has no such rows.

        Args:
            *args: Arguments of the Trainer's method.
            **kwargs: The same by name.

        Returns:
            The Trainer's result.
        """
        if self.accelerator.replicas > 1 and self.gather_function == self.accelerator.gather:
            self.gather_function = self.accelerator.gather_for_metrics
        return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def get_tp_size(self) -> int:
        """Return the number of processes with the same batch, which the Trainer reads from this method.

        Returns:
            The Trainer's size times the number of ranks that share a sequence, or 1 where replicas are counted.
        """
        size: int = super().get_tp_size()
        accelerator = self.accelerator
        return size if accelerator.num_processes == accelerator.replicas else size * accelerator.sp_size
