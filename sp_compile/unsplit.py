"""Programs that exchange over groups of their own and have no sequence: they run as they are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from .axes import find_sequences, name_axes
from .capture import capture
from .errors import SpError
from .passes.canonicalize import Canonicalize
from .passes.rewrite import Note
from .weights import exchanges_by_itself

WHY = "the program has exchanges of its own and no sequence, so nothing of it is split"


def runs_as_written(gm: GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Is a Dynamo graph a program of its own groups alone? Not where options name the sequence or its ranks.

    What the program holds decides, and nobody is asked: all ranks with one program find the same.
    """
    if (
        options.get("mesh") is not None
        or options.get("seq_dims", "auto") != "auto"
        or not exchanges_by_itself(gm)
    ):
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
