"""Replace composite sp:: collectives in a graph below autograd by functional collectives and ATen ops.

A composite op is one node, such as sp::all_gather, whose body calls other ops (`lowering/base/library.py`). AOTAutograd
traces into the bodies while it lowers a graph; joint graphs (forward and backward in one) are already lowered and need
this pass. Opaque ops, which have no such body, remain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import GraphModule, Node, map_arg

from sp_compile.lowering.base.library import COMPOSITES

from .edit import GraphEditor


def lower_exchanges(gm: GraphModule, decompositions: Mapping[Any, Callable[..., Any]] | None = None) -> int:
    """Replace every composite sp:: op by the ops that it calls, for a compiler; return the number of replaced ops.

    The code of the module is not recompiled.

    Args:
        gm: Graph to change.
        decompositions: Decompositions of ATen ops that they call, as for make_fx.
    """
    editor = GraphEditor().edit(gm.graph)
    composites = [node for node in gm.graph.nodes if node.op == "call_function" and node.target in COMPOSITES]
    for node in composites:
        _inline_op(editor, node, decompositions or {})
    return len(composites)


def _inline_op(editor: GraphEditor, node: Node, decompositions: Mapping[Any, Callable[..., Any]]) -> None:
    """Replace the node by the ops that a trace of its op records."""
    operands = node.all_input_nodes

    def body(*values: Any) -> Any:
        """Run the node's op with these values of its operands, under the tracer."""
        args, kwargs = map_arg((node.args, node.kwargs), dict(zip(operands, values)).__getitem__)
        return node.target(*args, **kwargs)

    with editor.graph.inserting_before(node):
        results = editor.inline_function(body, operands, node, decompositions=decompositions)
    editor.replace(node, results)
