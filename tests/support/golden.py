"""Graphs as text, one line per node and score functions as expressions, for the golden tests of passes."""

import torch
from torch import nn

import sp_compile
from sp_compile.lowering.masks.score import SCORES

from .attention.score_texts import show_score


def captured(fn, *args):
    """Return the captured graph of an exported function."""

    class Module(nn.Module):
        def forward(self, *inputs):
            return fn(*inputs)

    names = "xyzwuv"[: len(args)]
    module = Module()
    code = f"lambda {', '.join(names)}: fn({', '.join(names)})"
    module.forward = eval(code, {"fn": fn})  # names of the arguments become names of the inputs
    return sp_compile.capture_export(torch.export.export(module, args))


def show(gm):
    """Return one line per node: name: shape = target(arguments)."""

    def word(value):
        return show_score(value) if value in [*SCORES] else str(value).replace("torch.", "")

    lines = []
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        shape = list(value.shape) if isinstance(value, torch.Tensor) else ""
        if node.op == "call_function":
            target = node.target.__name__ if not hasattr(node.target, "namespace") else str(node.target)
            arguments = [word(a) for a in node.args] + [f"{k}={word(v)}" for k, v in node.kwargs.items()]
            lines.append(f"{node.name}: {shape} = {target.removesuffix('.default')}({', '.join(arguments)})")
        elif node.op == "output":
            lines.append(f"return {word(node.args[0])}")
        else:
            lines.append(f"{node.name}: {shape} = {node.op}")
    return "\n".join(lines)


def notes_of(one, gm):
    """Run a pass directly; return its notes about changes and refusals."""
    one(gm)
    return one.notes
