"""Name values and graph breaks of Dynamo graphs as the user's code does, for messages and options.

Dynamo's placeholders have names such as `l_args_0_` and a source, the path from a local variable of the compiled
function to the value: `L['self']._modules['fc']._parameters['weight']` is the argument `fc.weight` in this module. The
compiled function is the forward of a model or a function of the user. Dynamo represents each value in it by one of its
own variables (VariableTracker).
"""

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
    their own. Parts of arguments have Python syntax: `batch['ids']`, `ids.size()[1]`. Sources and their names:

        L['x']                                             x
        L['self']._modules['fc']._parameters['weight']     fc.weight
        L['args'][0], in a decorator of forward(ids)       ids
        L['args'][0]._parameters['weight'], of the model   weight
        L['kwargs']['mask']                                mask
    """
    source: Any = getattr(node, "_dynamo_source", None)
    if isinstance(source, NumpyTensorSource):
        source = source.base
    base = source  # the source of the local variable from which the value is read
    while base is not None and not hasattr(base, "local_name"):
        base = getattr(base, "base", None)
    if base is None:
        return node.name
    local = str(base.local_name)
    if base is source:
        return local
    full_name = source.name() if callable(source.name) else source.name  # a method in older versions of torch
    # The path from the local variable, such as ".fc.weight" or "[0]['ids']".
    path = _ATTRIBUTE_PATTERN.sub(r".\1", full_name.removeprefix(f"L['{local}']").replace('"', "'"))
    # Older versions of torch do not record which variables are **kwargs and *args: there their names decide.
    if getattr(base, "is_varkw", local == "kwargs"):
        return re.sub(r"^\['(\w+)'\]", r"\1", path)
    is_state = source.guard_source.is_unspecialized_nn_module()  # a parameter or buffer of the model: "fc.weight"
    if getattr(base, "is_varargs", local == "args"):
        if is_state and path.startswith("[0]."):
            return path.removeprefix("[0].")
        return re.sub(r"^\[(\d+)\]", lambda match: _positional_name(int(match[1])) or local + match[0], path)
    return path.removeprefix(".") if is_state else local + path


def is_python_number(node: Node) -> bool:
    """Return True if the placeholder is a Python scalar that the user passed, not the size of a tensor.

    Dynamo passes a float as a 0-dim tensor, and an int whose value may change as a SymInt.
    """
    argument = node.meta.get("grapharg")  # Dynamo's record of the argument; its source may be x.size() of a tensor x
    if argument is None or isinstance(argument.source, TensorPropertySource):
        return False
    return bool(argument.pass_arg_as_tensor) or isinstance(node.meta.get("example_value"), torch.SymInt)


def _positional_name(index: int) -> str:
    """Return the name, in the signature of the model's forward, of the argument at `index` of *args.

    The compiled function may be a decorator around the forward, with the signature (*args, **kwargs). Returns "" if no
    model is compiled, or its forward has no parameter at this position.
    """
    model = compiled_model()
    if model is None:
        return ""
    if "self" not in _compiled_locals():  # the model itself is the first of *args
        index -= 1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in inspect.signature(model.forward).parameters.values() if p.kind in positional]
    return names[index] if 0 <= index < len(names) else ""


def compiled_model() -> torch.nn.Module | None:
    """Return the model whose forward is compiled now, or None for another function.

    A forward has the model as `self`, and a decorator around it as the first of *args.
    """
    local_variables = _compiled_locals()
    arguments = local_variables.get("args")
    first_argument = arguments[0] if isinstance(arguments, tuple) and arguments else None
    model = local_variables.get("self", first_argument)
    return model if isinstance(model, torch.nn.Module) else None


def class_name(model: torch.nn.Module) -> str:
    """Return the name of the class of a model, without that which `fully_shard` derives from it."""
    classes = [cls for cls in type(model).__mro__ if not cls.__module__.startswith("torch.distributed.fsdp")]
    return classes[0].__name__


def describe_training() -> str:
    """Return the modes of the models among the variables of the compiled function, such as "is in train()".

    A module in another mode than its model is named, but not the modules inside of it. Returns "" without a model.
    """
    values: list[Any] = []
    for value in _compiled_locals().values():
        values.extend(value if isinstance(value, tuple) else (value,))  # a tuple: *args
    models = {id(x): x for x in values if isinstance(x, torch.nn.Module)}  # without duplicates
    texts = [(class_name(model), _training_text(model)) for model in models.values()]
    if not texts:
        return ""
    first, *others = {text for _, text in texts}
    if not others:  # all models have the same mode
        return f"is in {first}"
    return "has " + " and ".join(f"{name} in {text}" for name, text in texts)


def _training_text(model: torch.nn.Module) -> str:
    """Return the mode of a model, such as "train() with encoder, head in eval()".

    At most three modules in the other mode are named, and none of their submodules.
    """
    others: list[str] = []
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{other}.") for other in others)
        if module.training != model.training and not is_inside:
            others.append(name)
    mode, other_mode = ("train()", "eval()") if model.training else ("eval()", "train()")
    shown = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
    return f"{mode} with {shown} in {other_mode}" if others else mode


def _compiled_locals() -> dict[str, Any]:
    """Return the variables of the function that Dynamo compiles now, or {}."""
    return _dynamo_locals("convert_frame", "_compile").get("locals", {})


def result_names(gm: GraphModule) -> dict[str, str]:
    """Return the user's names of the tensors in a compiled function's return value, by node name.

    Names are keys of a dict, and fields of a dataclass, as in transformers, or of a named tuple. Empty if there are
    none, for a graph that ends at a graph break, and for torch versions whose internals differ from 2.13.
    """
    reason = getattr(gm, "compile_subgraph_reason", None)
    dynamo_locals = _dynamo_locals("output_graph", "compile_subgraph")
    returned = dynamo_locals.get("stack_values_flat", ())
    if reason is None or reason.graph_break or len(returned) != 1:
        return {}
    try:
        set_attributes = dynamo_locals["self"].side_effects.store_attr_mutations
        fields = {name: x.realize() for name, x in _tracked_fields(returned[0].realize(), set_attributes)}
        nodes = {name: x.as_proxy().node.name for name, x in fields.items() if type(x) is TensorVariable}
    except (AttributeError, KeyError, NotImplementedError):  # internals of another torch version
        return {}
    return {node: name for name, node in reversed(nodes.items())}  # reversed: the first name of a node is used


# Texts for graph breaks whose reason Dynamo does not record.
UNKNOWN_BREAK = {"step_unsupported": "code there that it does not trace; TORCH_LOGS=graph_breaks shows it"}


def graph_break_reason(gm: GraphModule) -> tuple[str, str] | None:
    """Return the user's stack trace and the reason of the graph break that ends this graph, or None.

    Dynamo's reason is a heading, followed by lines such as "Explanation: ..." and "Hint: ...".
    """
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    heading, *lines = (line.strip() for line in reason.reason.splitlines())
    sentences = [UNKNOWN_BREAK.get(heading, heading)]  # a heading that does not help users is replaced
    sentences += [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")]
    return "".join(StackSummary.from_list(reason.user_stack).format()), ". ".join(sentences).rstrip(".")


def _tracked_fields(value: Any, attributes: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and Dynamo's variable of each attribute, dict item or tuple field of a value.

    Args:
        value: Dynamo's variable for the value.
        attributes: Attributes that the traced code has set on objects, by Dynamo's variable of the object.
    """
    yield from attributes.get(value, {}).items()
    items = getattr(getattr(value, "_base_vt", value), "items", None)  # `_base_vt`: of a subclass of dict
    if isinstance(items, dict):
        for key, item in items.items():
            key_variable: Any = getattr(key, "vt", key)  # Dynamo wraps the variables of keys to make them hashable
            if key_variable.is_python_constant():
                yield key_variable.as_python_constant(), item
    elif items is not None and hasattr(value, "tuple_cls"):  # a named tuple
        yield from zip(getattr(value.tuple_cls, "_fields", ()), items, strict=False)


def _dynamo_locals(module: str, function: str) -> dict[str, Any]:
    """Return the local variables of the innermost running call of a Dynamo function; {} if none runs.

    Dynamo passes to backends neither the model nor the returned structure.

    Args:
        module: Name of the module in torch._dynamo.
        function: Name of the function in it.
    """
    file = str(Path(torch._dynamo.__file__).parent / f"{module}.py")
    frame: FrameType | None = sys._getframe()
    while frame is not None and not (frame.f_code.co_filename == file and frame.f_code.co_name == function):
        frame = frame.f_back
    return frame.f_locals if frame is not None else {}
