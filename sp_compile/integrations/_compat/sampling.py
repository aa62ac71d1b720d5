"""Sample once for the ranks that share a sequence, in Trainers of TRL that sample completions (GRPO, RLOO).

These Trainers expect other samples on each process: other seeds, a batch of generations for each process, and rewards
that are gathered over all processes. Here ranks that share a sequence count as one. Tested with TRL 1.16.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import accelerate.utils
import numpy as np
import torch
import torch.distributed as dist
import transformers

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.origin import has_code_of
from sp_compile.lowering.torch_compat import pytree

from .counting import SAMPLING_METHOD, SCORING_METHOD

GIVEN_TOTAL = "_given_generation_batch_size"  # attribute of arguments: the number that the user has set, or None


def record_given_total() -> None:
    """Make transformers' arguments record the `generation_batch_size` of the user, which TRL computes if it is None.

    Returns:
        None.
    """
    create = transformers.TrainingArguments.__post_init__
    if hasattr(create, GIVEN_TOTAL):
        return

    @functools.wraps(create)
    def record(self: Any) -> None:
        """Record the number, then create the arguments."""
        setattr(self, GIVEN_TOTAL, getattr(self, "generation_batch_size", None))
        create(self)

    setattr(record, GIVEN_TOTAL, None)
    transformers.TrainingArguments.__post_init__ = record


class SampleSharer:
    """Base class that makes a Trainer sample once for the ranks that share a sequence."""

    args: Any  # the TrainingArguments
    accelerator: Any  # the SequenceParallelAccelerator

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Create the Trainer, and continue with the random state of the first rank of the sequence."""
        # TRL shards a reference model by `prepare_fsdp`, which would not compile it.
        with _replace_globals(type(self), "__init__", {"prepare_fsdp": _prepare_reference}), ExitStack() as stack:
            self._creation: ExitStack | None = stack
            super().__init__(*args, **kwargs)
        self._creation = None
        self._share(None)  # no value: only the random state is set

    def _count_in_creation(self) -> None:
        """Count replicas as processes in the rest of `__init__`, except that vLLM's groups are those of processes."""
        if self._creation is not None and not getattr(self.args, "use_vllm", False):
            self._creation.enter_context(self.accelerator.count_replicas())

    @property
    def _samples_once(self) -> bool:
        """True if the Trainer samples by a method that this class extends."""
        return hasattr(super(), SAMPLING_METHOD)

    def share_cache(self) -> AbstractContextManager[Any]:
        """Return a context for generation, here one without effect.

        Returns:
            The context.
        """
        return nullcontext()

    def count_generations(self) -> None:
        """Set the number of completions of a step, as TRL does, but for the number of replicas, not of processes.

        A `generation_batch_size` that the user has set remains, and `steps_per_generation` follows from it.

        Returns:
            None.

        Raises:
            SpError: A step has no full groups of completions of one prompt (SP837), or it is not known which of the
                numbers the user has set (SP840).
        """
        args, replicas = self.args, self.accelerator.replicas
        if getattr(args, "generation_batch_size", None) is None or getattr(args, "num_generations", None) is None:
            return
        of_step = args.per_device_train_batch_size * replicas
        given = vars(args).get(
            GIVEN_TOTAL, None if args.steps_per_generation == args.gradient_accumulation_steps else 0
        )
        if given == 0 and self.accelerator.sp_size > 1:
            numbers = f"generation_batch_size={args.generation_batch_size} or {args.steps_per_generation=}"
            raise SpError(
                "SP840", f"{type(args).__name__}: {numbers.replace('args.', '')}: one follows from the other."
            )
        if given:
            args.steps_per_generation = given // of_step
        args.generation_batch_size = of_step * args.steps_per_generation
        # By name for messages: (number of completions, name of the option for the completions of a prompt).
        sizes = {"generation_batch_size": (args.generation_batch_size, "num_generations")}
        if args.do_eval and args.eval_strategy != "no":
            option = "num_generations_eval" if getattr(args, "num_generations_eval", None) else "num_generations"
            sizes["the batch of an evaluation"] = args.per_device_eval_batch_size * replicas, option
        for name, (size, option) in sizes.items():
            group = getattr(args, option)
            if size % group:
                counted = f"{size} for {replicas} replica(s) of {self.accelerator.sp_size} rank(s)"
                raise SpError("SP837", f"{name}: expected a multiple of {option}={group}, got {counted}.")

    def _share(self, value: Any) -> Any:
        """Return the value of the first rank that shares a sequence with this rank, and take over its random state."""
        if self.accelerator.mesh is None or self.accelerator.sp_size == 1:
            return value
        # A tensor of a GPU would be received on the GPU of its sender, so the values are sent by the CPU.
        is_on_device = pytree.tree_map(lambda x: isinstance(x, torch.Tensor) and x.device.type != "cpu", value)
        sent = pytree.tree_map(lambda x, on_device: x.cpu() if on_device else x, value, is_on_device)
        objects = [sent, is_on_device, _random_state()]
        dist.broadcast_object_list(objects, group=self.accelerator.sequence_group, group_src=0)  # replaces the objects
        shared, is_on_device, random_state = objects
        _set_random_state(random_state)
        device = self.accelerator.device
        return pytree.tree_map(lambda x, on_device: x.to(device) if on_device else x, shared, is_on_device)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Run the Trainer's method on each rank, and return the completions of the first rank of the sequence."""
        # Count processes here, not replicas: vLLM's client calls collectives of all processes.
        with self.accelerator.count_processes(), self.share_cache():
            return self._share(super()._generate_single_turn(*args, **kwargs))  # type: ignore[misc]

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run the Trainer's method, and return the results of the first rank, also of tools and custom rollouts."""
        return self._share(super()._generate(*args, **kwargs))  # type: ignore[misc]

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        """Run the Trainer's method, and return the rewards of the first rank of each replica."""
        return self._share(super()._calculate_rewards(*args, **kwargs))  # type: ignore[misc]

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        """Run the Trainer's method, with rewards and logs that are gathered over the replicas."""
        accelerator = self.accelerator
        if accelerator.mesh is None:
            return getattr(super(), SCORING_METHOD)(*args, **kwargs)
        gather = {"gather": accelerator.gather, "gather_object": accelerator.gather_objects}
        with accelerator.count_replicas(), _replace_globals(type(self), SCORING_METHOD, gather):
            return getattr(super(), SCORING_METHOD)(*args, **kwargs)


def _prepare_reference(model: torch.nn.Module, accelerator: Any) -> torch.nn.Module:
    """Shard and compile a reference model in place of TRL's `prepare_fsdp`, which shards it only."""
    prepared: torch.nn.Module = accelerator.prepare_model(model, evaluation_mode=True)
    return prepared.eval()


@contextmanager
def _replace_globals(owner: type, method: str, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace functions that a method of a class, and of its bases, reads by global names, in a context.

    Only functions of accelerate and TRL with these names are replaced, not those of a user.
    """

    def is_in_package(module: str) -> bool:
        """Return True for a module of accelerate or TRL."""
        return module.partition(".")[0] in (accelerate.__name__, "trl")

    with ExitStack() as stack:
        for cls in owner.__mro__:
            if method not in vars(cls):
                continue
            names = getattr(inspect.unwrap(vars(cls)[method]), "__globals__", {})  # {} for a method that is built in
            for name, new in functions.items():
                if name in names and has_code_of(names[name], is_in_package):
                    stack.callback(names.__setitem__, name, names[name])
                    names[name] = new
        yield


def _random_state() -> list[Any]:
    """Return the states of the random number generators of Python, NumPy, torch's CPU and its current GPU (or None)."""
    device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return [random.getstate(), np.random.get_state(), torch.get_rng_state(), device]


def _set_random_state(state: list[Any]) -> None:
    """Set the states of the random number generators, in the order in which `_random_state` returns them."""
    python, numpy, cpu, device = state
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if device is not None:
        torch.cuda.set_rng_state(device)
