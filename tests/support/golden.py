"""Graphs as text, one line a node: what the golden tests of the passes compare."""

import torch
from torch import nn

import sp_compile


def captured(fn, *args):
    """An exported function as IR."""

    class Module(nn.Module):
        def forward(self, *inputs):
            return fn(*inputs)

    names = "xyzwuv"[: len(args)]
    module = Module()
    code = f"lambda {', '.join(names)}: fn({', '.join(names)})"
    module.forward = eval(code, {"fn": fn})  # export names the graph's inputs after the arguments
    return sp_compile.capture_export(torch.export.export(module, args))


def show(gm):
    """One line a node: name: shape = target(arguments)."""

    def word(value):
        return str(value).replace("torch.", "")

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
    """What a pass by hand says that it did to the graph, and what it would not do."""
    one(gm)
    return one.notes
