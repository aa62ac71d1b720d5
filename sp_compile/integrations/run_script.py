"""Run a training script without changes, such that the Trainers and Accelerators that it creates share sequences.

    accelerate launch --config_file CONFIG -m sp_compile run SCRIPT --learning_rate 1e-4

`python -m sp_compile run` calls `prepare_script`. A Trainer of transformers, or of a subclass such as TRL's, is created
with the base class `SequenceParallel`, and an `Accelerator` as a `SequenceParallelAccelerator`.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.options import SPConfig

__all__ = ["prepare_script"]

log = logging.getLogger(__name__)

NO_EFFECT = (
    "%s: no Trainer of transformers and no Accelerator has prepared a model, so that sp_compile run and its options "
    "have no effect. For a loop without them, use torch.compile(model, backend='sp')."
)


def prepare_script(
    target: str, arguments: Sequence[str] = (), *, is_module: bool = False, options: Mapping[str, Any] | None = None
) -> Callable[[], None]:
    """Replace classes of transformers and accelerate, for the process, and return a function that runs a script.

    The function warns if the script ends without a model that an Accelerator, such as that of a Trainer, has prepared.

    Args:
        target: The path of the script, or the name of the module.
        arguments: Arguments of the script, which it reads from `sys.argv`.
        is_module: True if the target is the name of a module.
        options: Fields of `sp_compile.SPConfig` for the models, such as `attention="ring"`. They replace `sp_options`
            of a script that uses the classes of this package itself.

    Returns:
        A function that runs the script or the module as `__main__`. Exceptions of the script leave it unchanged.

    Raises:
        SpError: The target does not exist (SP736), accelerate is not installed (SP737), or an option is invalid (SP101
            to SP116).
    """
    if not (_is_module(target) if is_module else Path(target).is_file()):
        kind = "the name of a module" if is_module else "the path of a script"
        raise SpError("SP736", f"target: expected {kind}, got {target!r}.")
    SPConfig.of(dict(options or {}))
    if importlib.util.find_spec("accelerate") is None:
        raise SpError("SP737", f"run: {target} cannot share sequences without accelerate, which is not installed.")
    _share_sequences(dict(options or {}))

    def run() -> None:
        """Run the target.

        Raises:
            SystemExit: The target raises it.
        """
        sys.argv = [target, *arguments]
        try:
            if is_module:
                runpy.run_module(target, run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, str(Path(target).resolve().parent))
                runpy.run_path(target, run_name="__main__")
        except SystemExit:
            _warn_unused(target)
            raise
        _warn_unused(target)

    return run


def _warn_unused(target: str) -> None:
    """Log a warning on the first rank if no Accelerator has prepared a model."""
    from .accelerate import SequenceParallelAccelerator

    # The script may have destroyed the process group, so the rank is that of the launcher.
    if not SequenceParallelAccelerator.has_prepared and os.environ.get("RANK", "0") == "0":
        log.warning(NO_EFFECT, target)


def _is_module(name: str) -> bool:
    """Return True if a module of this name can be found."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # a package around it is not found, or the name is relative
        return False


def _share_sequences(options: dict[str, Any]) -> None:
    """Make new Accelerators and Trainers share sequences, with the options of the command."""
    from accelerate import Accelerator

    from .accelerate import SequenceParallelAccelerator

    SequenceParallelAccelerator.command_options = options
    _add_base(Accelerator, SequenceParallelAccelerator)
    if importlib.util.find_spec("transformers") is None:
        return
    from transformers import Trainer

    from .transformers import SequenceParallel

    _add_base(Trainer, SequenceParallel)


def _add_base(owner: Any, base: type) -> None:
    """Make new objects of a class and its subclasses have another base, unless they have it already.

    Args:
        owner: The class, whose `__new__` is replaced.
        base: The class of this package to list before the class of an object.
    """

    @functools.cache
    def with_base(cls: type) -> type:
        """Return a class of the same name with the base."""
        return type(cls.__name__, (base, cls), {"__module__": cls.__module__})

    def make_object(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """Return an object that is not initialized yet; Python calls `__init__` with the arguments."""
        return object.__new__(cls if issubclass(cls, base) else with_base(cls))

    owner.__new__ = make_object
