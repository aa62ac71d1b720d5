"""Name values and graph breaks of Dynamo graphs as the user's code does."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from traceback import StackSummary
from types import FrameType
from typing import Any

import torch
from torch._dynamo.source import NumpyTensorSource, TensorPropertySource
from torch._dynamo.variables import TensorVariable
from torch.fx import GraphModule, Node

_ATTRIBUTE_PATTERN = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")


def argument_name(node: Node) -> str:
    """Return the user's name of a placeholder: `input_ids`, or `layers.0.weight` for a parameter.

    Arguments from *args have the name in the signature of the model that is compiled now, if any; those from **kwargs
    their own. Parts of arguments have Python syntax: `batch['ids']`, `ids.size()[1]`.
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
    full_name = source.name() if callable(source.name) else source.name
    rest = _ATTRIBUTE_PATTERN.sub(r".\1", full_name.removeprefix(f"L['{local}']").replace('"', "'"))
    if not parts:
        return local
    if getattr(base, "is_varkw", local == "kwargs"):
        return re.sub(r"^\['(\w+)'\]", r"\1", rest)
    if getattr(base, "is_varargs", local == "args"):
        return re.sub(r"^\[(\d+)\]", lambda found: _positional_name(int(found[1])) or f"{local}[{found[1]}]", rest)
    of_model = source.guard_source.is_unspecialized_nn_module()
    return rest.removeprefix(".") if of_model else local + rest


def is_python_number(node: Node) -> bool:
    """Return True if the placeholder is a Python scalar, or a float as a 0-dim tensor, but not a size."""
    argument = node.meta.get("grapharg")
    if argument is None or isinstance(argument.source, TensorPropertySource):
        return False
    return bool(argument.pass_arg_as_tensor) or isinstance(node.meta.get("example_value"), torch.SymInt)


def _positional_name(index: int) -> str:
    """Return the name of a positional argument of the model that is compiled now; "" if it has none."""
    locals_ = _compiled_locals()
    model = locals_.get("self", next(iter(locals_.get("args") or [None]), None))
    if not isinstance(model, torch.nn.Module):
        return ""
    index -= "self" not in locals_  # self is the first of *args
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in inspect.signature(model.forward).parameters.values() if p.kind in kinds]
    return names[index] if 0 <= index < len(names) else ""


def result_names(gm: GraphModule) -> dict[str, str]:
    """Return names of the tensors in a compiled function's return value, by the names of their nodes.

    Names are keys of a dict, and fields of a dataclass, as in transformers, or of a named tuple. Empty if there are
    none, for a graph that ends at a graph break, and for torch versions whose internals differ from 2.13.
    """
    reason, locals_ = getattr(gm, "compile_subgraph_reason", None), _dynamo_locals("output_graph", "compile_subgraph")
    returned = locals_.get("stack_values_flat", ())
    if reason is None or reason.graph_break or len(returned) != 1:
        return {}
    try:
        fields = dict(_tracked_fields(returned[0].realize(), locals_["self"].side_effects.store_attr_mutations))
        tensors = {name: value.realize() for name, value in fields.items()}
        named = {name: value.as_proxy().node.name for name, value in tensors.items() if type(value) is TensorVariable}
    except (AttributeError, KeyError, NotImplementedError):
        return {}
    return {node: name for name, node in reversed(named.items())}


UNKNOWN_BREAK = {"step_unsupported": "code there that it does not trace; TORCH_LOGS=graph_breaks shows it"}
"""Texts for graph breaks whose reason Dynamo does not record."""


def graph_break_reason(gm: GraphModule) -> tuple[str, str] | None:
    """Return the stack trace of the graph break after this graph and its reason, or None without a break."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    text, *parts = (line.strip() for line in reason.reason.splitlines())
    text = UNKNOWN_BREAK.get(text, text)
    explained = [part.removeprefix("Explanation: ") for part in parts if part.startswith("Explanation: ")]
    return "".join(StackSummary.from_list(reason.user_stack).format()), ". ".join([text, *explained]).rstrip(".")


def _tracked_fields(value: Any, attributes: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value that Dynamo tracks, by name.

    Args:
        value: Dynamo's variable.
        attributes: Attributes that Dynamo has set on objects that it created.
    """
    yield from attributes.get(value, {}).items()
    items = getattr(getattr(value, "_base_vt", value), "items", None)
    if isinstance(items, dict):
        keys: list[tuple[Any, Any]] = [(getattr(key, "vt", key), item) for key, item in items.items()]
        yield from ((key.as_python_constant(), item) for key, item in keys if key.is_python_constant())
    elif items is not None and hasattr(value, "tuple_cls"):
        yield from zip(getattr(value.tuple_cls, "_fields", ()), items, strict=False)


def _compiled_locals() -> dict[str, Any]:
    """Return the local variables of the function that Dynamo compiles now."""
    return _dynamo_locals("convert_frame", "_compile").get("locals", {})


def _dynamo_locals(module: str, function: str) -> dict[str, Any]:
    """Return the local variables of the innermost running call of a Dynamo function."""
    file = str(Path(torch._dynamo.__file__).parent / f"{module}.py")
    frame: FrameType | None = sys._getframe()
    while frame is not None and not (frame.f_code.co_filename == file and frame.f_code.co_name == function):
        frame = frame.f_back
    return frame.f_locals if frame is not None else {}
