"""Replace composite sp:: collectives in a graph below autograd by functional collectives and ATen ops.

AOTAutograd does this while it lowers a graph; joint graphs are already lowered and need this pass. Opaque ops remain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import GraphModule, Node, map_arg

from sp_compile.lowering.base.library import COMPOSITES

from .edit import GraphEditor


def lower_exchanges(gm: GraphModule, decompositions: Mapping[Any, Callable[..., Any]] | None = None) -> int:
    """Replace every composite sp:: op by its body and return the number of replaced ops.

    The code of the module is not recompiled.

    Args:
        gm: Graph to change.
        decompositions: Decompositions of ATen ops in the bodies, as for make_fx.
    """
    editor = GraphEditor().edit(gm.graph)
    found = [node for node in gm.graph.nodes if node.op == "call_function" and node.target in COMPOSITES]
    for node in found:
        _inline(editor, node, decompositions or {})
    return len(found)


def _inline(editor: GraphEditor, node: Node, decompositions: Mapping[Any, Callable[..., Any]]) -> None:
    operands = node.all_input_nodes

    def body(*given: Any) -> Any:
        """Run the node's function on other operands."""
        args, kwargs = map_arg((node.args, node.kwargs), dict(zip(operands, given)).__getitem__)
        return node.target(*args, **kwargs)

    with editor.graph.inserting_before(node):
        results = editor.inline_function(body, operands, node, decompositions=decompositions)
    editor.replace(node, results)
