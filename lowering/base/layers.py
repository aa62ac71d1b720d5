"""Which layer of a model a node is of, forward and backward, as Dynamo notes of the modules that call it."""

from __future__ import annotations

import re

from torch.fx import Node

WORD_PATTERN = re.compile(r"[A-Za-z_]\w*|\d+")
ROOT_PATTERN = re.compile(r"^[LG](\[[^\]]*\])+\.?")
"""How Dynamo finds the model among what its function is given."""


def node_layer(node: Node) -> str:
    """The outermost module that a number names, all of `layers.3`, by its path in the model; "" of none."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return next(filter(None, (_numbered_prefix(ROOT_PATTERN.sub("", path)) for path, *_ in stack.values())), "")


def _numbered_prefix(path: str) -> str:
    """`layers.3.mlp` up to its first number; "" without one."""
    words = WORD_PATTERN.findall(path)
    last = next((i for i, word in enumerate(words) if word.isdigit()), None)
    return "" if last is None else ".".join(words[: last + 1])
