"""Define and validate the options of the backend."""

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

TILES = ("auto", "never")  # values of `tiles`, next to a number of tiles


OFFLOAD = ("never", "auto")  # values of `offload`, next to a number from 0 to 1


OUTPUTS = ("auto", "lazy", "gather", "local")  # values of `outputs`, from the weakest to the strongest


# Values of the options that take one of a fixed set.
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
    """Options on a program's inputs and results, by name; see `SPConfig`.

    Args:
        seq_dims: "auto", or the sequence dim of each named input.
        inputs: "global" or "local".
        outputs: A value of `OUTPUTS`, or one for each named result.
    """

    seq_dims: str | Mapping[str, int] = "auto"
    inputs: str = "global"
    outputs: str | Mapping[str | int, str] = "auto"


@dataclass(frozen=True, kw_only=True)
class SPConfig:
    """Options of the backend. Every field has a working default.

    Args:
        mesh: The DeviceMesh whose ranks share the sequence. None selects the default process group, or a single rank
            without one.
        mesh_dim: The axis that splits the sequence, for a mesh of several axes. None selects "sp", or "ring" and
            "ulysses".
        seq_dims: "auto", or {input name: dim} with the sequence dims of the model's inputs.
        attention: "ulysses" exchanges heads for sequence. "ring" circulates keys and values. "hybrid" does both, on a
            mesh with axes ("ring", "ulysses") or on any number of ranks that factors. "gather" gathers keys and values.
            "auto" selects the fastest predicted strategy for each attention. Others are registered, see
            `sp_compile.passes.strategies.attention`.
        layout: The order of the sequence over the ranks. "zigzag" balances causal rings and gathers: rank r of n stores
            chunks r and 2n - 1 - r of 2n. "balanced" assigns chunks by the documents of each batch, so that all ranks
            attend to about the same number of pairs. "auto" selects "zigzag" where it pays and nothing else depends on
            the order, and "balanced" for document masks if no other graph consumes the sharded results.
        ulysses_chunks: Number of head groups that Ulysses exchanges separately, each while another group is computed. A
            number applies if it divides the heads of a rank; "auto" follows the cost model.
        cost: Constants of the cost model, such as {"flops": 6e14}, see sp_compile.passes.cost.machine.Machine. They
            replace those of the device's defaults, and the model is not measured on these ranks. {"memory": 8e10}, the
            bytes of a device, alone keeps the measured constants.
        inputs: "global": every rank passes the full sequence. "local": each rank passes its equal, contiguous shard of
            the inputs in seq_dims (or of those found), which requires a dynamic sequence length.
        outputs: "auto": sharded results of at least `LARGE_OUTPUT` bytes stay sharded, and are gathered on every rank
            when eager code reads them. "lazy": smaller ones, too. "gather": every rank returns full results. "local":
            each rank returns its own rows. Or {result: one of these}, by the result's name in the model's code or by
            its index among the graph's results; other results keep the default.
        param_grads: "reduce": the backward sums parameter gradients over the ranks. "partial": they stay partial,
            scaled by the number of ranks, for a DDP or FSDP that averages over an axis that includes these ranks.
        state: Placement that "auto" of other options assumes for training state. "sharded": FSDP shards parameters,
            gradients and an optimizer state as large as AdamW's over these ranks; a device stores its shards and one
            gathered layer. "replicated": every device stores parameters and gradients, and no optimizer state is
            counted.
        fallback: "gather": an operation that cannot be sharded runs on gathered operands and is reported. "error":
            raise.
        sequence_parallel_linear: "auto": linears and all_reduces of a tensor-parallel program run scattered where that
            is exact. "never": they run as written.
        merge_reductions: Merging of reductions of a value over several mesh axes. "auto": where the cost model predicts
            a gain. "always": wherever it is exact. "intra_node": over ranks of one machine. "never". The axes must be
            declared with `sp_compile.declare_groups(mesh)`.
        tiles: Number of sequential tiles of token-wise work with wide intermediates, such as a head with its loss or an
            MLP. "auto" tiles work that ends in a scalar, whose gradients are computed in the same loop, if the step
            does not fit the device otherwise or the work is an eighth of the device. It then tiles work that the
            backward recomputes, if the step still does not fit. If the memory of the device is unknown, it tiles work
            that ends in a scalar and has intermediates of at least 1 GiB. A number tiles all of it. "never" tiles
            nothing.
        offload: Activations that wait in host memory for the backward. A number: this share of their bytes, as far as
            their sizes allow. "auto": the smallest share for which the step of each graph, with weights and gradients,
            fits the device (cost={"memory": ...} sets its size). "never". See `explain(memory=True)`.
        activation_memory_budget: Budget of AOTAutograd's partitioner, from 0 to 1. None keeps its setting.
        check_every: Number of calls between comparisons of checksums of all weights and buffers across ranks; the first
            call always compares. 0: never. Tokens, modes, sizes and options are compared on every call.
        compiler: "inductor", "aot_eager", or any torch.compile backend (a name or a callable), which compiles the local
            graph. Only the two named ones run passes on collectives; with others the collectives stay unchanged.

    Raises:
        SpError: An option has an invalid value, or two options exclude each other.
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
        """Return True if the compiler runs passes on collectives."""
        return self.compiler in JOINT_COMPILERS

    @property
    def io_options(self) -> IOOptions:
        """Return the options on the program's inputs and results."""
        return IOOptions(self.seq_dims, self.inputs, self.outputs)

    def ranks(self) -> Ranks:
        """Return the ranks that share the sequence; see `resolve`.

        Returns:
            The ranks of `mesh`, or of the default group.

        Raises:
            SpError: The mesh and `mesh_dim` do not match, or this rank is not in the mesh.
        """
        return resolve(self.mesh, self.mesh_dim)

    def refuse(self, entry: str, fix: str | None = None, **reasons: str) -> None:
        """Raise SpError for a non-default option that an entry point does not support.

        Args:
            entry: Name of the entry point.
            fix: The remedy. Defaults to omitting the option.
            **reasons: Reason for each unsupported option, as a predicate of `entry`.

        Raises:
            SpError: One of the options is not at its default.
        """
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name in reasons and value != option.default:
                raise SpError("SP109", f"{option.name}={value!r}: {entry} {reasons[option.name]}.", fix)

    @staticmethod
    def of(options: AnyOptions) -> SPConfig:
        """Return a config for torch.compile's `options`.

        Args:
            options: An SPConfig, a mapping from option names to values, or None for the defaults.

        Returns:
            The validated config.

        Raises:
            SpError: An option is unknown or has an invalid value.
        """
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
"""Options as passed to `torch.compile`: an SPConfig, or its fields before validation."""


COMPILE_OPTIONS = "mode", "dynamic", "fullgraph", "backend", "disable"
"""Arguments of torch.compile next to `options`."""


def stronger_output(a: str, b: str) -> str:
    """Return the stronger of two values of the option `outputs` for one result.

    Args:
        a: A value of `OUTPUTS`.
        b: Another value of `OUTPUTS`.

    Returns:
        The value that satisfies both requests.
    """
    return max(a, b, key=OUTPUTS.index)


def _is_fraction(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _wrong(name: str, value: Any, expected: str, known: Sequence[str] = (), word: Any = None) -> SpError:
    """Return the error for an option's value, with a hint at a known value close to it or to `word`."""
    hint = did_you_mean(value if word is None else word, known)
    return SpError("SP103", f"{name}: expected {expected}, got {value!r}{hint}.")
