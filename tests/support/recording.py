"""What AOTAutograd makes of a compiled model, and what Inductor generates from it."""

from functools import partial
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd


class Recorder:
    """A compiler that keeps the forward and backward graphs of AOTAutograd, as Inductor would get them."""

    def __init__(self) -> None:
        self.graphs: dict[str, torch.fx.GraphModule] = {}

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        keep = {name: partial(self.keep, name) for name in ("forward", "backward")}
        return aot_autograd(
            fw_compiler=keep["forward"], bw_compiler=keep["backward"], partition_fn=min_cut_rematerialization_partition
        )(gm, inputs)

    def keep(self, name: str, gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.graphs[name] = gm
        return make_boxed_func(gm.forward)

    def collectives(self, name: str, op: str = "") -> list[torch.fx.Node]:
        nodes = self.graphs[name].graph.nodes
        return [n for n in nodes if str(n.target).startswith("_c10d_functional." + op) and "wait" not in str(n.target)]

    def sent(self, name: str) -> list[int]:
        """Bytes of the operand of each all-to-all: all but 1/n of it leaves the rank."""
        operands = [n.args[0].meta["val"] for n in self.collectives(name, "all_to_all_single")]
        return [x.numel() * x.element_size() for x in operands]

    def text(self) -> list[str]:
        return [gm.print_readable(print_output=False) for gm in self.graphs.values()]
