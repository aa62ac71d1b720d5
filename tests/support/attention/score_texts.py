"""Score functions from expressions and as text, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch.fx import Node

from sp_compile.lowering.masks.score import SCORES, register_score
from sp_compile.passes.canonical.attention.proofs import KEY_INDEX, QUERY_INDEX
from sp_compile.passes.canonical.attention.score_functions import SCORE, head_symbol, register_expression

SYMBOLS = {"s": SCORE, "q": QUERY_INDEX, "k": KEY_INDEX, "head0": head_symbol(0)}
SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}


def score_of(text: str) -> str:
    """Register an expression as a score function; "" is none."""
    return register_expression(sympy.sympify(text, SYMBOLS)) if text else ""


def traced_score(fn: Callable[..., Any], fills: bool = False) -> str:
    """Register a function of aten operators whose parameters are the names of inputs."""
    return register_score(torch.fx.symbolic_trace(fn).graph, fills)


def show_score(name: str) -> str:
    """Return a score function as one expression, with fills marked and without casts to the dtype of scores."""

    def word(x: Any) -> str:
        if isinstance(x, list | tuple):
            return f"[{', '.join(map(word, x))}]"
        if not isinstance(x, Node) or x.op == "placeholder":
            return str(x)
        kind = str(x.target).split(".")[1]
        if kind == "type_as":
            return word(x.args[0])
        if kind in SIGNS and len(x.args) == 2:
            return f"({word(x.args[0])} {SIGNS[kind]} {word(x.args[1])})"
        more = [f"{k}={v}" for k, v in x.kwargs.items()]
        return f"{kind}({', '.join([*map(word, x.args), *more])})"

    if not name:
        return ""
    found = SCORES[name]
    (result,) = found.graph.graph.output_node().args
    return ("fills: " if found.fills else "") + word(result)
