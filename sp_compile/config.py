"""The options of `torch.compile(model, backend="sp", options={...})`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from .errors import SpError

CHOICES = {
    "attention": ("auto", "ulysses", "ring", "hybrid", "gather"),
    "layout": ("auto", "contiguous", "zigzag"),
    "inputs": ("global", "local"),
    "outputs": ("gather", "local"),
    "param_grads": ("reduce", "partial"),
    "fallback": ("gather", "error"),
    "sequence_parallel_linear": ("auto", "never"),
    "merge_reductions": ("auto", "always", "intra_node", "never"),
}


@dataclass(frozen=True, kw_only=True)
class SPConfig:
    """What the backend may be told; every field has a default that works.

    mesh: the DeviceMesh whose ranks share the sequence; None is the default process group (or one rank without one).
    mesh_dim: the axis of a mesh of several axes that splits the sequence; if None, "sp", or "ring" and "ulysses".
    seq_dims: "auto", or {input name: dim} naming the sequence dim of the model's inputs.
    attention: "ulysses" exchanges heads for sequence; "ring" sends keys and values round; "hybrid" does both on a mesh
        with axes ("ring", "ulysses"), or on any that factors; "gather" gathers keys and values; "auto" takes what the
        cost model predicts to be fastest, attention by attention.
    layout: the order of the sequence over the ranks. "zigzag" balances causal rings and gathers: rank r of n holds
        chunks r and 2n - 1 - r of 2n; "auto" takes it where that pays and nothing else depends on the order.
    cost: constants of the cost model, such as {"flops": 6e14}: the device's defaults with these replaced, instead of
        what was measured on these ranks; see sp_compile.machine.
    inputs: "global": every rank passes the whole sequence; "local": each passes its own equal, contiguous shard of the
        inputs named in seq_dims (or found), which needs a dynamic sequence length.
    outputs: "gather": every rank returns whole results; "local": results that are sharded stay so.
    param_grads: "reduce": parameter gradients are summed over the ranks in the backward; "partial": they are left
        partial, scaled by the number of ranks, for a DDP or FSDP that averages over an axis that includes these ranks.
    fallback: "gather" does what cannot be sharded on the whole, and reports it; "error" refuses it.
    sequence_parallel_linear: "auto": linears + all_reduce of a tensor-parallel program run scattered between them where
        that is exact; "never": as they are written.
    merge_reductions: whether reductions of a value over several axes of a mesh become one. "auto": where the cost model
        predicts that this is faster; "always": wherever it is exact; "intra_node": over ranks of one machine; "never".
        The axes have to be declared: `sp_compile.declare_groups(mesh)`.
    activation_memory_budget: 0..1, handed to AOTAutograd's partitioner; None leaves it alone.
    compiler: "inductor", "aot_eager", or any torch.compile backend (a name or a callable), which gets the local graph;
        only the two named have a place for passes on collectives, so with others those stay as the program has them.

    Raises SpError for an unknown field or value.
    """

    mesh: DeviceMesh | None = None
    mesh_dim: str | None = None
    seq_dims: str | Mapping[str, int] = "auto"
    attention: str = "auto"
    layout: str = "auto"
    cost: Mapping[str, Any] | None = None
    inputs: str = "global"
    outputs: str = "gather"
    param_grads: str = "reduce"
    fallback: str = "gather"
    sequence_parallel_linear: str = "auto"
    merge_reductions: str = "auto"
    activation_memory_budget: float | None = None
    compiler: str | Callable[..., Any] = "inductor"

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise SpError(
                    f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}{_close(value, allowed)}"
                )
        if self.seq_dims != "auto" and not isinstance(self.seq_dims, Mapping):
            raise SpError(f"seq_dims={self.seq_dims!r}: expected 'auto' or a mapping from input name to dim")
        if isinstance(self.compiler, str):
            known = torch.compiler.list_backends(exclude_tags=())
            if self.compiler not in known:
                close = _close(self.compiler, known)
                raise SpError(f"compiler={self.compiler!r}: no torch.compile backend{close}")
        budget = self.activation_memory_budget
        if budget is not None and not 0 <= budget <= 1:
            raise SpError(f"activation_memory_budget={budget}: expected a number from 0 to 1")

    @staticmethod
    def of(options: SPConfig | Mapping[str, Any] | None) -> SPConfig:
        """A config from torch.compile's `options`."""
        if isinstance(options, SPConfig):
            return options
        known = [f.name for f in fields(SPConfig)]
        for name in options or {}:
            if name not in known:
                raise SpError(f"unknown option {name!r}{_close(name, known)}; known: {', '.join(known)}")
        return SPConfig(**(options or {}))


def _close(word: Any, known: Any) -> str:
    close = difflib.get_close_matches(str(word), known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
