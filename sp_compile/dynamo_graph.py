"""Dynamo graph -> graph in the global view, whose inputs say whether they are parameters and where they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from ._compat import argument_name, is_module_state, refuse_eager_fallback
from .capture import capture
from .config import SPConfig
from .errors import SpError
from .layout import Placement
from .local_inputs import capture_shards


def global_view(
    gm: GraphModule, example_inputs: Sequence[Any], config: SPConfig, n: int, fragment: bool
) -> tuple[GraphModule, dict[str, Placement], dict[str, int] | None]:
    """(graph in the global view, where inputs lie that come in shards, the sequence dims that the user named).

    fragment: the graph is a piece of a model, so it may lack inputs that the user named.
    """
    _mark_inputs(gm, example_inputs)
    seq_dims = None if isinstance(config.seq_dims, str) else _placeholder_names(gm, config.seq_dims, fragment)
    inputs: dict[str, Placement] = {}
    if config.inputs == "local" and n > 1:
        refuse_eager_fallback()
        graph, inputs = capture_shards(gm, example_inputs, n, seq_dims)
    else:
        graph = capture(gm, example_inputs)
    _mark_inputs(graph, example_inputs)
    return graph, inputs, seq_dims


def _mark_inputs(graph: GraphModule, example_inputs: Sequence[Any]) -> None:
    """meta: sp_param, not one of the user's arguments; sp_grad, it may need a gradient."""
    for node, example in zip(graph.graph.find_nodes(op="placeholder"), example_inputs):
        if isinstance(example, torch.Tensor):
            node.meta["sp_grad"] = example.requires_grad
            node.meta["sp_param"] = isinstance(example, torch.nn.Parameter) or is_module_state(node)


def _placeholder_names(
    graph: GraphModule, seq_dims: Mapping[Any, int], fragment: bool
) -> dict[str, int] | None:
    """The user's argument names (or indices) as the names of the graph's placeholders.

    A fragment of the model may lack some of them; one that has none finds its sequence by itself (None).
    """
    tensors = [n for n in graph.graph.find_nodes(op="placeholder") if n.meta.get("sp_param") is False]
    out = {}
    for key, dim in seq_dims.items():
        found = [n for n in tensors if argument_name(n) == key]
        if isinstance(key, int) and key < len(tensors):
            found = [tensors[key]]
        if not found and fragment:
            continue
        if len(found) != 1:
            known = [argument_name(n) for n in tensors]
            raise SpError(f"seq_dims: no input is called {key!r}; the graph's tensor inputs are {known}")
        out[found[0].name] = dim
    return out or None
