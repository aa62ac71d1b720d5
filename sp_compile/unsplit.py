"""Programs that exchange over groups of their own and have no sequence: they run as they are written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.fx import GraphModule

from ._compat import known_process_group, process_group, pytree
from .alike import is_exchange
from .axes import find_sequences, name_axes
from .capture import capture
from .errors import SpError
from .passes.canonicalize import Canonicalize
from .passes.rewrite import Note

WHY = "the program has exchanges of its own and no sequence, so nothing of it is split"


def runs_as_written(gm: GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Is a Dynamo graph a program of its own groups alone? Not where options name the sequence or its ranks.

    What the program holds decides, and nobody is asked: all ranks with one program find the same.
    """
    if options.get("mesh") is not None or options.get("seq_dims", "auto") != "auto" or not any(_groups(gm)):
        return False
    try:
        graph = capture(gm, example_inputs)
        Canonicalize()(graph)
        axes = name_axes(graph)
        find_sequences(graph, axes)
    except SpError:  # whoever compiles it says so
        return False
    return not axes.sequences


def note() -> Note:
    """What the report says of such a program."""
    return Note("replicated", "graph", "the whole graph", WHY)


def _groups(gm: GraphModule) -> Iterator[str]:
    """The groups of several ranks that the program's exchanges name, bodies of regions included."""
    for node in gm.graph.nodes:
        body = getattr(gm, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(body, GraphModule):
            yield from _groups(body)
        elif dist.is_initialized() and is_exchange(node):
            names = [a for a in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(a, str)]
            yield from (a for a in names if known_process_group(a) and process_group(a).size() > 1)
