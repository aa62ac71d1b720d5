"""What a person calls an input of Dynamo's graph: as the signature of the function that was called has it."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._dynamo.source import NumpyTensorSource, TensorPropertySource
from torch.fx import Node

_ATTRIBUTE = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")


def argument_name(node: Node) -> str:
    """The user's name of a placeholder: `input_ids` of an argument, `layers.0.weight` of a parameter of the model.

    An argument that came through *args has its name in the signature of the model that is compiled now, if any is; one
    of **kwargs its own. Parts of arguments are written as in Python: `batch['ids']`, `ids.size()[1]`.
    """
    source: Any = getattr(node, "_dynamo_source", None)
    if isinstance(source, NumpyTensorSource):
        source = source.base
    base, parts = source, 0
    while base is not None and not hasattr(base, "local_name"):
        base, parts = getattr(base, "base", None), parts + 1
    if base is None:
        return node.name
    local = str(base.local_name)
    whole = source.name() if callable(source.name) else source.name
    rest = _ATTRIBUTE.sub(r".\1", whole.removeprefix(f"L['{local}']").replace('"', "'"))
    if not parts:
        return local
    if getattr(base, "is_varkw", local == "kwargs"):
        return re.sub(r"^\['(\w+)'\]", r"\1", rest)
    if getattr(base, "is_varargs", local == "args"):
        return re.sub(r"^\[(\d+)\]", lambda found: _positional(int(found[1])) or f"{local}[{found[1]}]", rest)
    of_model = source.guard_source.is_unspecialized_nn_module()
    return rest.removeprefix(".") if of_model else local + rest


def is_python_number(node: Node) -> bool:
    """Is the placeholder a number of Python's, a float as a tensor of no dims too? No size of a tensor is one."""
    given = node.meta.get("grapharg")
    if given is None or isinstance(given.source, TensorPropertySource):
        return False
    return bool(given.pass_arg_as_tensor) or isinstance(node.meta.get("example_value"), torch.SymInt)


def _positional(index: int) -> str:
    """What the model that is compiled now calls its argument of this index; "" if it has no name for it."""
    locals_ = _compiled_locals()
    model = locals_.get("self", next(iter(locals_.get("args") or [None]), None))
    if not isinstance(model, torch.nn.Module):
        return ""
    index -= "self" not in locals_  # it is the first of *args
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in inspect.signature(model.forward).parameters.values() if p.kind in kinds]
    return names[index] if 0 <= index < len(names) else ""


def _compiled_locals() -> dict[str, Any]:
    """The local variables of the function that Dynamo compiles now."""
    entries = str(Path(torch._dynamo.__file__).parent / "convert_frame.py")
    frame: FrameType | None = sys._getframe()
    while frame is not None and not (frame.f_code.co_filename == entries and frame.f_code.co_name == "_compile"):
        frame = frame.f_back
    return frame.f_locals.get("locals", {}) if frame is not None else {}
