"""Run a training script without changes, such that the Trainers and Accelerators that it creates share sequences.

    accelerate launch --config_file CONFIG -m sp_compile run SCRIPT --learning_rate 1e-4

`python -m sp_compile run` calls `run_script`. A Trainer of transformers, or of a subclass such as TRL's, is created
with the base class `SequenceParallel`, and an `Accelerator` as a `SequenceParallelAccelerator`.
"""

from __future__ import annotations

import functools
import importlib.util
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.options import SPConfig

__all__ = ["run_script"]


def run_script(
    target: str, arguments: Sequence[str] = (), *, is_module: bool = False, options: Mapping[str, Any] | None = None
) -> None:
    """Run a script or a module as `__main__`, after classes of transformers and accelerate are replaced.

    The replacement remains in effect for the process.

    Args:
        target: The path of the script, or the name of the module.
        arguments: Arguments of the script, which it reads from `sys.argv`.
        is_module: True if the target is the name of a module.
        options: Fields of `sp_compile.SPConfig` for the models, such as `attention="ring"`.

    Returns:
        None.

    Raises:
        SpError: The target does not exist (SP736), or an option is invalid (SP101 to SP116).
    """
    exists = importlib.util.find_spec(target) is not None if is_module else Path(target).is_file()
    if not exists:
        kind = "the name of a module" if is_module else "the path of a script"
        raise SpError("SP736", f"target: expected {kind}, got {target!r}.")
    SPConfig.of(dict(options or {}))
    _share_sequences(dict(options or {}))
    sys.argv = [target, *arguments]
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(target).resolve().parent))
        runpy.run_path(target, run_name="__main__")


def _share_sequences(options: dict[str, Any]) -> None:
    """Replace `__new__` of Accelerator, and of Trainer, if transformers is installed, by functions for this backend."""
    from accelerate import Accelerator

    from .accelerate import SequenceParallelAccelerator

    class ScriptAccelerator(SequenceParallelAccelerator):
        """The Accelerator of a script, with the options of the command."""

        __init__ = functools.partialmethod(SequenceParallelAccelerator.__init__, sp_options=options)

    def make_accelerator(cls: type, *args: Any, **kwargs: Any) -> Any:
        """Return an object that is not initialized yet; Python calls `__init__` with the arguments."""
        return object.__new__(ScriptAccelerator if cls is Accelerator else cls)

    Accelerator.__new__ = make_accelerator
    if importlib.util.find_spec("transformers") is None:
        return
    from transformers import Trainer

    from .transformers import SequenceParallel

    @functools.cache
    def with_base(cls: type) -> type:
        """Return a class of Trainers with the base class, which is the same class if it has it already."""
        if issubclass(cls, SequenceParallel):
            return cls
        return type(cls.__name__, (SequenceParallel, cls), {"sp_options": options, "__module__": cls.__module__})

    def make_trainer(cls: type, *args: Any, **kwargs: Any) -> Any:
        """Return an object of the class with the base class; Python calls its `__init__` with the arguments."""
        return object.__new__(with_base(cls))

    Trainer.__new__ = make_trainer
