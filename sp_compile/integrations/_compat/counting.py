"""Count replicas in place of processes in a Trainer, and refuse Trainers of TRL in which this is not complete.

A Trainer assumes that each process has other samples: the loss is scaled, samplers are filled, and metrics are gathered
by the number of processes. Tested with transformers 5.24 and TRL 1.16.
"""

from __future__ import annotations

import dis
import importlib.metadata
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any
from unittest import mock

from sp_compile.lowering.base.errors import SpError

STEP_METHODS = "training_step", "prediction_step", "compute_loss"
LOADER_METHODS = "get_train_dataloader", "get_eval_dataloader", "get_test_dataloader"
SAMPLER_METHODS = "_get_train_sampler", "_get_eval_sampler"
SCORING_METHOD = "_generate_and_score_completions"  # which gathers rewards over processes
REWARD_METHOD = "_calculate_rewards"
SAMPLING_METHOD = "_generate_single_turn"
SAMPLER_HOOKS = SAMPLING_METHOD, "_generate", SCORING_METHOD  # a Trainer that samples has all of them
ITEMS_METHOD = "_get_num_items_in_batch"

# Methods that are called by those above, and `__init__`, in which replicas are counted, too. Telemetry does not matter.
INNER_METHODS = "__init__", "_compute_loss", "_prepare_inputs", "_send_telemetry"
COUNTING_METHODS = frozenset((*STEP_METHODS, *LOADER_METHODS, *SAMPLER_METHODS, SCORING_METHOD, *INNER_METHODS))
# By reads of a method's code, an attribute with a dot: the methods in which they have the right meaning.
READERS = {
    ".num_processes": COUNTING_METHODS,
    ".process_index": COUNTING_METHODS,
    ".world_size": frozenset((*LOADER_METHODS, *SAMPLER_METHODS)),
    "gather": frozenset((SCORING_METHOD, REWARD_METHOD)),
    "gather_object": frozenset((SCORING_METHOD,)),
    **dict.fromkeys(
        (".gather_object", ".all_gather", ".all_gather_object", ".all_reduce", "nested_gather"), frozenset()
    ),
    "prepare_fsdp": frozenset(("__init__",)),
    ".prepare_fsdp": frozenset(),  # only a global is replaced
    ".generate": frozenset((SAMPLING_METHOD, "generate_from_model")),  # the latter samples for logs only
}


def _in_replicas(name: str) -> Callable[..., Any]:
    """Return a method that runs that of the next base class, and counts replicas as processes."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the Trainer's method with replicas in place of processes."""
        with self.accelerator.count_replicas(), _count_in_arguments(self, name in STEP_METHODS):
            return getattr(super(ReplicaCounter, self), name)(*args, **kwargs)

    run.__name__, run.__qualname__ = name, f"{ReplicaCounter.__name__}.{name}"
    return run


class ReplicaCounter:
    """Base class that makes a Trainer count replicas as processes in its loss, samplers and loaders."""


for _name in (*STEP_METHODS, *LOADER_METHODS, *SAMPLER_METHODS):
    setattr(ReplicaCounter, _name, _in_replicas(_name))


@contextmanager
def _count_in_arguments(trainer: Any, is_step: bool) -> Iterator[None]:
    """Count replicas in the arguments of a Trainer, too, which samplers and the seeds of a loader's workers read."""
    accelerator, arguments = trainer.accelerator, type(trainer.args)
    if is_step or accelerator.mesh is None:
        yield
        return
    size, index = accelerator.num_processes, accelerator.process_index
    with (
        mock.patch.object(arguments, "world_size", property(lambda _: size)),
        mock.patch.object(arguments, "process_index", property(lambda _: index)),
    ):
        yield


def check_trainer(trainer: type) -> None:
    """Raise SpError for a class of a Trainer in which processes are counted, or samples are drawn, in other methods.

    Args:
        trainer: The class. Its bases of transformers and TRL are checked.

    Returns:
        None.

    Raises:
        SpError: A method reads the number of processes, or draws samples, for each rank, or a method that is to be
            extended does not exist (SP839).
    """
    _check_names(trainer)
    for cls in trainer.__mro__:
        if cls.__module__.partition(".")[0] != "trl":
            continue
        for method, value in vars(cls).items():
            function = getattr(value, "__func__", value)  # of a static method or a class method
            function = inspect.unwrap(function) if callable(function) else None
            for name in sorted(_reads(getattr(function, "__code__", None)) & READERS.keys()):
                if method not in READERS[name]:
                    cause = f"{cls.__name__}.{method} uses {name.strip('.')!r} for each process"
                    raise SpError("SP839", f"{trainer.__name__}: {cause} ({_version_of('trl')}).")


def _check_names(trainer: type) -> None:
    """Raise SpError if transformers or TRL does not have a method that `SequenceParallel` extends, and calls itself."""
    for package in ("transformers", "trl"):
        classes = [cls for cls in trainer.__mro__ if cls.__module__.partition(".")[0] == package]
        names = {name for cls in classes for name in vars(cls)}
        required: set[str] = set()
        if package == "transformers" and classes:
            required = {ITEMS_METHOD, *STEP_METHODS, *LOADER_METHODS, *SAMPLER_METHODS}
        elif names & {*SAMPLER_HOOKS, REWARD_METHOD}:
            creates = [inspect.unwrap(vars(cls)["__init__"]) for cls in classes if "__init__" in vars(cls)]
            has_rewards = any("reward_funcs" in inspect.signature(create).parameters for create in creates)
            required = {*SAMPLER_HOOKS, *([REWARD_METHOD] if has_rewards else [])}
        for name in sorted(required - names):
            raise SpError("SP839", f"{trainer.__name__}: expected the method {name}, not in {_version_of(package)}.")


def _reads(code: CodeType | None) -> set[str]:
    """Return the names of globals, and of attributes with a dot before them, that code and its functions read."""
    found: set[str] = set()
    for one in dis.get_instructions(code) if code is not None else ():
        if one.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            found.add(f".{one.argval}")
        elif one.opname == "LOAD_GLOBAL":
            found.add(str(one.argval))
        elif isinstance(one.argval, CodeType):
            found |= _reads(one.argval)
    return found


def _version_of(package: str) -> str:
    """Return the name and the version of a package."""
    return f"{package} {importlib.metadata.version(package)}"
