"""Run ops and functions on the fake values of nodes, and trace functions to graphs.

A fake value, `node.meta["val"]`, has the shape, dtype and device of a node's result but no data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.torch_compat import FakeTensor, enable_python_dispatcher, make_fx, pytree


def fake_mode_of(values: Any) -> AbstractContextManager[Any]:
    """Return the mode of the first fake tensor in the nested values, or a null context if there is none."""
    modes = [x.fake_mode for x in pytree.tree_leaves(values) if isinstance(x, FakeTensor)]
    return modes[0] if modes else nullcontext()


def infer_value(target: Any, args: Any, kwargs: Any = None, like: Node | None = None) -> Any:
    """Return the result of an op on the fake values of its operands, as the fake value of a new node.

    The fake mode is that of the operands; if these are no tensors, that of the node `like` and its inputs.
    """
    args, kwargs = torch.fx.map_arg((args, kwargs or {}), lambda n: n.meta["val"])
    values_of_like = [n.meta.get("val") for n in (like, *like.all_input_nodes)] if like is not None else []
    with torch.no_grad(), fake_mode_of((args, kwargs, values_of_like)), enable_python_dispatcher():
        return target(*args, **kwargs)


def trace_function(
    run: Callable[..., Any],
    values: Sequence[Any],
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    pre_dispatch: bool = False,
    gradients: bool = False,
) -> GraphModule:
    """Trace `run(*values)` to a graph with fake values and without dead code.

    Args:
        run: Function to trace. Its exceptions propagate.
        values: Fake tensors of one mode, and constants.
        decompositions: Decompositions of ATen ops, as for make_fx.
        pre_dispatch: Keep composite ops.
        gradients: Trace with autograd enabled, for functions that compute gradients.

    Returns:
        The traced graph.
    """
    # "real": make_fx uses the values as they are; these are fake tensors already.
    tracer = make_fx(run, dict(decompositions or {}), tracing_mode="real", pre_dispatch=pre_dispatch)
    with fake_mode_of(values), enable_python_dispatcher(), nullcontext() if gradients else torch.no_grad():
        gm = tracer(*values)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm
