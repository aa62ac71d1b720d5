"""Count the work of eager code between the graphs of a dry run, which every rank does in full.

Dynamo leaves code between graphs, and code that it skips, to eager execution. A dispatch mode intercepts its ops, and
counts them as `sharded_work.py` counts the nodes of a graph: FLOPs of products and attention, and bytes of results
while gradients are recorded, by the user's line. Views have neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from sp_compile.lowering.base.errors import user_line
from sp_compile.lowering.torch_compat import OpOverload, TorchDispatchMode, pytree
from sp_compile.passes.sharding.sharded_work import ShardedWork


class CountEagerWork(TorchDispatchMode):
    """Mode that adds the work of eager ops to `work`.

    Args:
        is_counted: Returns False while a graph is compiled, whose work is counted elsewhere.
    """

    supports_higher_order_operators = True

    def __init__(self, is_counted: Callable[[], bool]) -> None:
        super().__init__()
        self.work, self.is_counted = ShardedWork(), is_counted

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that torch.compile works inside of this mode: torch disables the mode while it compiles.

        Returns:
            True.
        """
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an op, and count its FLOPs and, while gradients are recorded, the bytes of its floating-point results."""
        result = func(*args, **(kwargs or {}))
        if self.is_counted() and isinstance(func, OpOverload) and not func.is_view:
            count_flops = flop_registry.get(func.overloadpacket)
            flops = float(count_flops(*args, **(kwargs or {}), out_val=result)) if count_flops is not None else 0.0
            tensors = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor) and x.is_floating_point()]
            nbytes = float(sum(x.numel() * x.element_size() for x in tensors)) if torch.is_grad_enabled() else 0.0
            if flops or nbytes:
                self.work.add_replicated(user_line(), flops, nbytes)
        return result
