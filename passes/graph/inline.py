"""sp:: exchanges in a graph below autograd -> the functional collectives and ATen ops that their bodies are.

AOTAutograd does it on its way down; a graph that it has made already needs it done here. What is opaque stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import GraphModule, Node, map_arg

from sp_compile.lowering.base.library import COMPOSITES

from .edit import GraphEditor
from .fakes import trace_function


def lower_exchanges(gm: GraphModule, decompositions: Mapping[Any, Callable[..., Any]] | None = None) -> int:
    """Put every composite sp:: op's body in its place; how many there were. The code is not made anew.

    decompositions: of the ATen ops in it, as make_fx takes them.
    """
    editor = GraphEditor().edit(gm.graph)
    found = [node for node in gm.graph.nodes if node.op == "call_function" and node.target in COMPOSITES]
    for node in found:
        _inline(editor, node, decompositions or {})
    return len(found)


def _inline(editor: GraphEditor, node: Node, decompositions: Mapping[Any, Callable[..., Any]]) -> None:
    operands = node.all_input_nodes
    values = [operand.meta["val"] for operand in operands]

    def body(*given: Any) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), dict(zip(operands, given)).__getitem__)
        return node.target(*args, **kwargs)

    found = trace_function(body, values, decompositions)
    with editor.graph.inserting_before(node):
        results = editor.inline(found, operands, node)
    editor.replace(node, results)
