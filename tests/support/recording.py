"""Record the graphs of AOTAutograd and the programs of ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from sp_compile import backend
from sp_compile.rank_program import RankProgram


class Recorder:
    """A compiler that records the forward and backward graphs of AOTAutograd, as Inductor would get them."""

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
        """Return the bytes of the operand of each all-to-all; all but 1/n of them are sent."""
        operands = [n.args[0].meta["val"] for n in self.collectives(name, "all_to_all_single")]
        return [x.numel() * x.element_size() for x in operands]

    def text(self) -> list[str]:
        return [gm.print_readable(print_output=False) for gm in self.graphs.values()]


@contextmanager
def lowered_programs() -> Iterator[list[RankProgram]]:
    """Record the programs of this rank that are lowered within the context."""
    found: list[RankProgram] = []
    lower = backend.lower

    def lowered(*args: Any) -> RankProgram:
        found.append(lower(*args))
        return found[-1]

    with mock.patch.object(backend, "lower", lowered):
        yield found


def is_undivided(program: RankProgram) -> bool:
    """Return True if the ranks do not divide the length of the sequence."""
    shards = program.graph.graph.find_nodes(op="call_function", target=torch.ops.sp.shard.default)
    return any(_number(node.args[2][1]) % program.ranks.n for node in shards)


def _number(size: Any) -> int:
    """Return a size, or the hint of a symbol."""
    size = size.meta["val"] if isinstance(size, torch.fx.Node) else size
    return size.node.hint if isinstance(size, torch.SymInt) else size


def checked_as_users_run(fn: Callable[..., Any], *args: Any) -> Any:
    """Return fn(*args); check that it compiles a program with Inductor, for a length that the ranks do not divide."""
    with lowered_programs() as programs:
        result = fn(*args)
    compilers = {str(program.options.compiler) for program in programs}
    assert compilers == {"inductor"}, f"not as users run: compiled by {compilers}"
    assert any(map(is_undivided, programs)), "not as users run: the ranks divide every length"
    return result
