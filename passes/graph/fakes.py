"""What ops and functions give on the fake values of nodes: a value, or a graph to put in a node's place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.torch_compat import FakeTensor, enable_python_dispatcher, make_fx, pytree


def fake_mode_of(values: Any) -> AbstractContextManager[Any]:
    """The mode of the first fake tensor among the values, however nested; nothing to enter where there is none."""
    modes = [x.fake_mode for x in pytree.tree_leaves(values) if isinstance(x, FakeTensor)]
    return modes[0] if modes else nullcontext()


def infer_value(target: Any, args: Any, kwargs: Any = None, like: Node | None = None) -> Any:
    """What an op gives for the fake values of its operands, in the mode that is theirs, or else that of `like`."""
    args, kwargs = torch.fx.map_arg((args, kwargs or {}), lambda n: n.meta["val"])
    near = [n.meta.get("val") for n in (like, *like.all_input_nodes)] if like is not None else []
    with torch.no_grad(), fake_mode_of((args, kwargs, near)), enable_python_dispatcher():
        return target(*args, **kwargs)


def trace_function(
    run: Callable[..., Any],
    values: Sequence[Any],
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    pre_dispatch: bool = False,
    gradients: bool = False,
) -> GraphModule:
    """run(*values) as a graph in which every node knows its fake value, without what nothing reads.

    values: fake tensors of one mode, and constants. decompositions: of ATen ops, as make_fx takes them. pre_dispatch:
    composite ops stay. gradients: autograd is left as it is, not turned off. Raises what `run` does.
    """
    tracer = make_fx(run, dict(decompositions or {}), tracing_mode="real", pre_dispatch=pre_dispatch)
    with fake_mode_of(values), enable_python_dispatcher(), nullcontext() if gradients else torch.no_grad():
        gm = tracer(*values)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm
