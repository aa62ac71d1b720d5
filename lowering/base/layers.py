"""Find the layer of the model that a node of a forward or backward graph belongs to.

Dynamo stores the path of the calling modules, such as `L['self'].layers.3.mlp`, in `node.meta["nn_module_stack"]`.
AOTAutograd copies it to backward nodes as `fwd_nn_module_stack`. A layer is the outermost module whose name is a
number, as in an `nn.ModuleList`: here `layers.3`. Reports and the cost model sum over its nodes.
"""

import re

import torch
from torch.fx import Node

from sp_compile.lowering.torch_compat import argument_name

MODULE_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)  # contain the layers of a model
ROOT_PATTERN = re.compile(r"^[LG](\[[^\]]*\])+\.?")  # prefix of a path: `L['self'].`


def node_layer(node: Node) -> str:
    """Return the path of the node's layer, such as `layers.3`, or "" for a node outside of layers."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    module_paths = (ROOT_PATTERN.sub("", path) for path, *_ in stack.values())  # from the outermost module
    return next(filter(None, map(_numbered_prefix, module_paths)), "")


def weight_layer(placeholder: Node) -> str:
    """Return the path of the layer of a parameter or buffer, such as `layers.3`, or "" if it is outside of layers.

    Args:
        placeholder: The placeholder of the value, with Dynamo's source.
    """
    module_path, _, _ = argument_name(placeholder).rpartition(".")
    return _numbered_prefix(module_path)


def _numbered_prefix(path: str) -> str:
    """Return a module's path up to its first number, `layers.3` for `layers.3.mlp`; "" without a number."""
    names = re.findall(r"[A-Za-z_]\w*|\d+", path)
    number = next((i for i, name in enumerate(names) if name.isdigit()), None)
    return "" if number is None else ".".join(names[: number + 1])
