"""The options of the backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh

from sp_compile.lowering.torch_compat import JOINT_COMPILERS

from .errors import SpError, did_you_mean
from .frames import LAYOUTS
from .ranks import STRATEGIES, Ranks, resolve

TILES = ("auto", "never")


OFFLOAD = ("never", "auto")


OUTPUTS = ("auto", "lazy", "gather", "local")


CHOICES = {
    "layout": ("auto", *LAYOUTS),
    "inputs": ("global", "local"),
    "param_grads": ("reduce", "partial"),
    "fallback": ("gather", "error"),
    "state": ("replicated", "sharded"),
    "sequence_parallel_linear": ("auto", "never"),
    "merge_reductions": ("auto", "always", "intra_node", "never"),
}


@dataclass(frozen=True)
class IOOptions:
    """What the user says of a program's inputs and results, by their names; see `SPConfig`."""

    seq_dims: str | Mapping[str, int] = "auto"
    inputs: str = "global"
    outputs: str | Mapping[str | int, str] = "auto"


@dataclass(frozen=True, kw_only=True)
class SPConfig:
    """What the backend may be told; every field has a default that works.

    mesh: the DeviceMesh whose ranks share the sequence; None is the default process group (or one rank without one).
    mesh_dim: the axis of a mesh of several axes that splits the sequence; if None, "sp", or "ring" and "ulysses".
    seq_dims: "auto", or {input name: dim} naming the sequence dim of the model's inputs.
    attention: "ulysses" exchanges heads for sequence; "ring" sends keys and values round; "hybrid" does both on a mesh
        with axes ("ring", "ulysses"), or on any that factors; "gather" gathers keys and values; "auto" takes what the
        cost model predicts to be fastest, attention by attention. Others are registered, see
        `sp_compile.passes.strategies.attention`.
    layout: the order of the sequence over the ranks. "zigzag" balances causal rings and gathers: rank r of n holds
        chunks r and 2n - 1 - r of 2n; "auto" takes it where that pays and nothing else depends on the order. "balanced"
        deals chunks so that all ranks attend to about as many pairs, as the documents of each batch have it; "auto"
        takes it for masks of documents, where no other graph takes what stays in shards.
    ulysses_chunks: groups of heads that Ulysses exchanges one by one, each while another is attended to. A number: so
        many, wherever the heads on a rank are so many groups; "auto": as the cost model predicts that it pays.
    cost: constants of the cost model, such as {"flops": 6e14}: the device's defaults with these replaced, instead of
        what was measured on these ranks; {"memory": 8e10}, a device's bytes, alone leaves the rest as it was measured;
        see sp_compile.passes.cost.machine.Machine.
    inputs: "global": every rank passes the whole sequence; "local": each passes its own equal, contiguous shard of the
        inputs named in seq_dims (or found), which needs a dynamic sequence length.
    outputs: "auto": results of at least `LARGE_OUTPUT` bytes that lie in shards stay there, as tensors that know it
        and become whole when eager code reads them, on every rank; "lazy": smaller ones, too. "gather": every rank
        returns whole results. "local": each rank returns its own rows of them. Or {result: one of these}, by the name
        that the result has in the model's code or by its place among the graph's results; the others are as by default.
    param_grads: "reduce": parameter gradients are summed over the ranks in the backward; "partial": they are left
        partial, scaled by the number of ranks, for a DDP or FSDP that averages over an axis that includes these ranks.
    state: "sharded": FSDP shares parameters, their gradients and the optimizer's state over the ranks of the sequence,
        and "auto" of other options counts a rank's shards, and one layer whole, as what lies on its device, with state
        as large as AdamW's; "replicated": all of them, without a state, of which a program shows nothing.
    fallback: "gather" does what cannot be sharded on the whole, and reports it; "error" refuses it.
    sequence_parallel_linear: "auto": linears + all_reduce of a tensor-parallel program run scattered between them where
        that is exact; "never": as they are written.
    merge_reductions: whether reductions of a value over several axes of a mesh become one. "auto": where the cost model
        predicts that this is faster; "always": wherever it is exact; "intra_node": over ranks of one machine; "never".
        The axes have to be declared: `sp_compile.declare_groups(mesh)`.
    tiles: in how many tiles, one behind the other, a rank does token-wise work whose inside is wide: a head with its
        loss, an MLP. "auto": what ends in a number (its gradients are made in the same loop), if the step does not fit
        the device without or that is an eighth of it, and all else, whose inside a backward computes again, if it still
        does not; where the device's memory is unknown, what ends in a number and has an inside of at least 1 GiB. A
        number: all of it; "never".
    offload: what of the values that a forward keeps for its backward waits in the host's memory. A number: this share
        of their bytes, as far as values are of that size; "auto": as few as let the step of each graph, with weights
        and gradients, fit the device (cost={"memory": ...} says another size); "never". See `explain(memory=True)`.
    activation_memory_budget: 0..1, handed to AOTAutograd's partitioner; None leaves it alone.
    check_every: after how many calls the ranks compare checksums of all weights and buffers again, as on the first one;
        0: never. Tokens, modes, sizes and options are compared on every call.
    compiler: "inductor", "aot_eager", or any torch.compile backend (a name or a callable), which gets the local graph;
        only the two named have a place for passes on collectives, so with others those stay as the program has them.

    Raises SpError for an unknown field or value.
    """

    mesh: DeviceMesh | None = None
    mesh_dim: str | None = None
    seq_dims: str | Mapping[str, int] = "auto"
    attention: str = "auto"
    layout: str = "auto"
    ulysses_chunks: str | int = "auto"
    cost: Mapping[str, Any] | None = None
    inputs: str = "global"
    outputs: str | Mapping[str | int, str] = "auto"
    param_grads: str = "reduce"
    state: str = "replicated"
    fallback: str = "gather"
    sequence_parallel_linear: str = "auto"
    merge_reductions: str = "auto"
    tiles: str | int = "auto"
    offload: str | float = "never"
    activation_memory_budget: float | None = None
    check_every: int = 100
    compiler: str | Callable[..., Any] = "inductor"

    def __post_init__(self) -> None:
        for name, allowed in {"attention": ("auto", *sorted(STRATEGIES)), **CHOICES}.items():
            value = getattr(self, name)
            if value not in allowed:
                raise _wrong(name, value, f"one of {', '.join(map(repr, allowed))}", allowed)
        for value in self.outputs.values() if isinstance(self.outputs, Mapping) else [self.outputs]:
            if value not in OUTPUTS:
                known = f"one of {', '.join(map(repr, OUTPUTS))}, or a mapping from results to these"
                raise _wrong("outputs", self.outputs, known, OUTPUTS, value)
        if self.seq_dims != "auto" and not isinstance(self.seq_dims, Mapping):
            raise _wrong("seq_dims", self.seq_dims, "'auto' or a mapping from input name to dim")
        for name, dim in self.seq_dims.items() if isinstance(self.seq_dims, Mapping) else ():
            if type(dim) is not int:
                raise _wrong("seq_dims", self.seq_dims, f"an int as the dim of {name!r}")
        if self.cost is not None and not isinstance(self.cost, Mapping):
            raise _wrong("cost", self.cost, "a mapping from constants of the cost model to numbers")
        if isinstance(self.compiler, str):
            known = torch.compiler.list_backends(exclude_tags=())
            if self.compiler not in known:
                close = did_you_mean(self.compiler, known)
                raise SpError("SP104", f"compiler: expected a backend of torch.compile, got {self.compiler!r}{close}.")
        if self.merge_reductions in ("always", "intra_node") and not self.has_place:
            raise SpError(
                "SP105",
                f"merge_reductions={self.merge_reductions!r} is not supported with compiler={self.compiler!r}, which "
                "has no place for passes on collectives.",
            )
        if self.tiles not in TILES and (type(self.tiles) is not int or self.tiles < 1):
            raise _wrong("tiles", self.tiles, "'auto', 'never' or a number of tiles", TILES)
        chunks = self.ulysses_chunks
        if chunks != "auto" and (type(chunks) is not int or chunks < 1):
            raise _wrong("ulysses_chunks", chunks, "'auto' or a number of groups of heads")
        for strategy in STRATEGIES.values():
            for name in strategy.options if self.attention not in ("auto", strategy.name) else ():
                if getattr(self, name) != "auto":
                    raise SpError(
                        "SP106",
                        f"{name}={getattr(self, name)!r} is not supported with attention={self.attention!r}, only with "
                        f"{strategy.name!r}.",
                    )
        if self.offload not in OFFLOAD and not _is_fraction(self.offload):
            raise _wrong("offload", self.offload, "'never', 'auto' or a number from 0 to 1", OFFLOAD)
        if self.offload != "never" and not self.has_place:
            raise SpError(
                "SP105",
                f"offload={self.offload!r} is not supported with compiler={self.compiler!r}, which has no place for "
                "copies between forward and backward.",
            )
        if type(self.check_every) is not int or self.check_every < 0:
            raise _wrong("check_every", self.check_every, "a number of calls, 0 for never")
        budget = self.activation_memory_budget
        if budget is not None and not _is_fraction(budget):
            raise _wrong("activation_memory_budget", budget, "a number from 0 to 1")

    @property
    def has_place(self) -> bool:
        """Has the compiler a place for passes on collectives?"""
        return self.compiler in JOINT_COMPILERS

    @property
    def io_options(self) -> IOOptions:
        """Of the program's inputs and results."""
        return IOOptions(self.seq_dims, self.inputs, self.outputs)

    def ranks(self) -> Ranks:
        """Those that share the sequence; see `resolve`."""
        return resolve(self.mesh, self.mesh_dim)

    def refuse(self, entry: str, fix: str | None = None, **reasons: str) -> None:
        """Raise SpError for an option that `entry` cannot honour and that is not left at its default.

        Args:
            entry: The name of the function.
            fix: What to do, instead of leaving the option out.
            **reasons: Why `entry` cannot honour each of these options.
        """
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name in reasons and value != option.default:
                raise SpError("SP109", f"{option.name}={value!r}: {entry} {reasons[option.name]}.", fix)

    @staticmethod
    def of(options: AnyOptions) -> SPConfig:
        """A config from torch.compile's `options`."""
        if isinstance(options, SPConfig):
            return options
        if not isinstance(options, Mapping | None):
            raise _wrong("options", options, "a mapping from the names of options to values, or an SPConfig")
        known = [f.name for f in fields(SPConfig)]
        for name in options or {}:
            if name in COMPILE_OPTIONS:
                raise SpError("SP101", f"options: {name!r} is an argument of torch.compile itself, {name}=....")
            if name not in known:
                hint = did_you_mean(name, known)
                raise SpError("SP102", f"options: unknown option {name!r}{hint}, expected one of {', '.join(known)}.")
        return SPConfig(**(options or {}))


AnyOptions: TypeAlias = SPConfig | Mapping[str, Any] | None
"""What `torch.compile` is given: fields of an `SPConfig`, whose values nobody has looked at yet."""


COMPILE_OPTIONS = "mode", "dynamic", "fullgraph", "backend", "disable"
"""What torch.compile takes beside `options`."""


def stronger_output(a: str, b: str) -> str:
    """Of two words of the option `outputs` for one value, the one that both are content with."""
    return max(a, b, key=OUTPUTS.index)


def _is_fraction(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _wrong(name: str, value: Any, expected: str, known: Sequence[str] = (), word: Any = None) -> SpError:
    """Return the error of an option's value, with a hint at the known word that is close to it or to `word`."""
    hint = did_you_mean(value if word is None else word, known)
    return SpError("SP103", f"{name}: expected {expected}, got {value!r}{hint}.")
