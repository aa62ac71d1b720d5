"""Identify the model layer of a forward or backward node from Dynamo's module stack."""

from __future__ import annotations

import re

from torch.fx import Node

NAME_PATTERN = re.compile(r"[A-Za-z_]\w*|\d+")
ROOT_PATTERN = re.compile(r"^[LG](\[[^\]]*\])+\.?")
"""Prefix by which Dynamo's paths refer to the model."""


def node_layer(node: Node) -> str:
    """Return the path of the outermost numbered module, such as `layers.3`, or ""."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return next(filter(None, (_numbered_prefix(ROOT_PATTERN.sub("", path)) for path, *_ in stack.values())), "")


def _numbered_prefix(path: str) -> str:
    """Return the path up to its first number: `layers.3` of `layers.3.mlp`; "" without one."""
    names = NAME_PATTERN.findall(path)
    last = next((i for i, name in enumerate(names) if name.isdigit()), None)
    return "" if last is None else ".".join(names[: last + 1])
