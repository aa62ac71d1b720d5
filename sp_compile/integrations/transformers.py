"""transformers: a Trainer whose ranks share sequences, and so any Trainer that is made of it (TRL's, with PEFT or not).

    from sp_compile.integrations.transformers import SequenceParallel

    class MyTrainer(SequenceParallel, Trainer): ...

All ranks share each sequence; `TrainingArguments(parallelism_config=ParallelismConfig(dp_replicate_size=2, sp_size=4))`
says otherwise. Tried on transformers 5.23, TRL 1.16 and PEFT 0.21.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar
from unittest import mock

import transformers.trainer

from ._compat import ItemCounter, register_backend_name
from .accelerate import SequenceParallelAccelerator

__all__ = ["SequenceParallel"]


class SequenceParallel(ItemCounter):
    """In front of a Trainer among the bases of a class: its model is compiled with backend="sp".

    Training, evaluation and prediction, their loaders, gradient accumulation, clipping, metrics and checkpoints stay
    those of the Trainer, and a batch is counted once, whichever number of ranks share it. The batch of a step is
    per_device_train_batch_size x gradient_accumulation_steps x the number of replicas.

    sp_options: fields of `sp_compile.SPConfig`, as a class attribute. parallelism_config and torch_compile_backend of
    the arguments: as `SequenceParallelAccelerator` takes them, which raises what does not fit.
    """

    sp_options: ClassVar[Mapping[str, Any]] = {}
    accelerator: Any

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer's, whose Accelerator becomes a `SequenceParallelAccelerator`."""

        def make(**kwargs: Any) -> SequenceParallelAccelerator:
            kwargs.pop("parallelism_config", None)
            config = self.args.parallelism_config
            return SequenceParallelAccelerator(parallelism_config=config, sp_options=self.sp_options, **kwargs)

        with mock.patch.object(transformers.trainer, "Accelerator", make), register_backend_name():
            super().create_accelerator_and_postprocess()  # type: ignore[misc]

    def get_tp_size(self) -> int:
        """How many ranks are given the same batch, which is what the Trainer asks this for."""
        size: int = super().get_tp_size()
        return size * self.accelerator.sp_size
