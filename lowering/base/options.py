"""Define and validate the options of the backend: `torch.compile(model, backend="sp", options={...})`.

`SPConfig` has one field per option, `OPTION_RULES` the valid values of each. `SPConfig.of` validates what users pass.
`SPOptions` repeats the names and types for the keyword arguments of functions; type checkers cannot derive it.
A joint graph has the forward and the backward of a program; passes on it run only if the compiler supports them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypeAlias, TypedDict

import torch
from torch.distributed.device_mesh import DeviceMesh

from sp_compile.lowering.torch_compat import JOINT_COMPILERS

from .errors import SpError, did_you_mean
from .frames import LAYOUTS
from .ranks import STRATEGIES, Ranks, resolve

OUTPUTS = ("auto", "lazy", "gather", "local")  # values of the option `outputs`, from the weakest to the strongest


def _is_fraction(value: Any) -> bool:
    """Return True for a number from 0 to 1, both included; bools are no numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _is_count(value: Any) -> bool:
    """Return True for a positive int; bools are no ints here."""
    return type(value) is int and value >= 1


def _is_mapping_of(is_valid: Callable[[Any], bool], value: Any) -> bool:
    """Return True if the value is a mapping whose values are all valid."""
    return isinstance(value, Mapping) and all(map(is_valid, value.values()))


@dataclass(frozen=True)
class OptionRule:
    """The valid values of one option."""

    words: Sequence[str] = ()  # valid strings
    expected: str = ""  # description of the valid values in error messages; "" lists the strings
    accepts: Callable[[Any], bool] = lambda value: False  # predicate of other valid values
    registered: Callable[[], Iterable[str]] = tuple  # returns further valid strings, which programs may add
    code: str = "SP103"  # code of the error for other values

    @property
    def choices(self) -> tuple[str, ...]:
        """Return all valid strings, in the order in which messages list them.

        Returns:
            `words`, then the registered strings.
        """
        return (*self.words, *self.registered())

    def check(self, name: str, value: Any) -> None:
        """Raise SpError for an invalid value.

        Args:
            name: Name of the option.
            value: Value of the option.

        Raises:
            SpError: The value is invalid. The message suggests a valid string close to it, or to a value of a mapping.
        """
        # `choices` is last: the list of torch's backends imports those that packages provide.
        if value in self.words or self.accepts(value) or value in self.choices:
            return
        expected = self.expected or f"one of {', '.join(map(repr, self.choices))}"
        values = value.values() if isinstance(value, Mapping) else [value]
        hint = "".join(did_you_mean(x, self.choices) for x in values if x not in self.choices)
        raise SpError(self.code, f"{name}: expected {expected}, got {value!r}{hint}.")


# The valid values of each option. `resolve` validates `mesh` and `mesh_dim`.
OPTION_RULES = {
    "seq_dims": OptionRule(
        ("auto",),
        "'auto' or a mapping from names of inputs to ints",
        partial(_is_mapping_of, lambda dim: type(dim) is int),
    ),
    "attention": OptionRule(("auto",), registered=partial(sorted, STRATEGIES)),
    "layout": OptionRule(("auto", *LAYOUTS)),
    "ulysses_chunks": OptionRule(("auto",), "'auto' or a number of groups of heads", _is_count),
    "cost": OptionRule(
        expected="a mapping from constants of the cost model to numbers",
        accepts=lambda value: isinstance(value, Mapping | None),
    ),
    "inputs": OptionRule(("global", "local")),
    "outputs": OptionRule(
        OUTPUTS,
        f"one of {', '.join(map(repr, OUTPUTS))}, or a mapping from results to these",
        partial(_is_mapping_of, OUTPUTS.__contains__),
    ),
    "param_grads": OptionRule(("reduce", "partial")),
    "state": OptionRule(("replicated", "sharded")),
    "fallback": OptionRule(("gather", "error")),
    "sequence_parallel_linear": OptionRule(("auto", "never")),
    "merge_reductions": OptionRule(("auto", "always", "intra_node", "never")),
    "tiles": OptionRule(("auto", "never"), "'auto', 'never' or a number of tiles", _is_count),
    "offload": OptionRule(("never", "auto"), "'never', 'auto' or a number from 0 to 1", _is_fraction),
    "activation_memory_budget": OptionRule(
        expected="a number from 0 to 1", accepts=lambda value: value is None or _is_fraction(value)
    ),
    "check_every": OptionRule(
        expected="a number of calls, 0 for never", accepts=lambda value: type(value) is int and value >= 0
    ),
    "compiler": OptionRule(
        JOINT_COMPILERS,
        "a backend of torch.compile",
        lambda value: not isinstance(value, str),
        partial(torch.compiler.list_backends, exclude_tags=()),
        "SP104",
    ),
}

# Options that change joint graphs: the values that every compiler supports, and what other values need of it.
JOINT_GRAPH_OPTIONS = {
    "merge_reductions": (("auto", "never"), "passes on collectives"),
    "offload": (("never",), "copies between forward and backward"),
}


@dataclass(frozen=True, kw_only=True)
class SPConfig:
    """Options of the backend. Every field has a working default.

    `docs/reference/options.md` describes each option in detail.

    Args:
        mesh: DeviceMesh whose ranks share the sequence. None selects the default process group, or a single rank
            without one.
        mesh_dim: Axis of the mesh that splits the sequence. None selects "sp", or "ring" and "ulysses".
        seq_dims: "auto", or {input name: dim} with the sequence dims of the model's inputs.
        attention: "ulysses" exchanges heads for sequence, "ring" circulates keys and values, "hybrid" does both,
            "gather" gathers keys and values, "auto" selects the fastest predicted strategy for each attention. Others
            are registered, see `sp_compile.passes.strategies.attention`.
        layout: Order of the sequence over the ranks. "zigzag" balances causal attention, "balanced" assigns chunks by
            the documents of each batch, so that all ranks attend to about the same number of pairs. "auto" selects one
            of them where it is faster and the program permits it.
        ulysses_chunks: Number of head groups that Ulysses exchanges separately, each while another group is computed. A
            number applies if it divides the heads of a rank; "auto" follows the cost model.
        cost: Constants of the cost model that replace those of the device, such as {"flops": 6e14}, see
            `sp_compile.passes.cost.machine.Machine`. The links are not measured then, except with
            {"memory": <bytes of a device>} alone.
        inputs: "global": every rank passes the full sequence. "local": each rank passes its equal, contiguous shard of
            the inputs in `seq_dims`, which requires a dynamic sequence length.
        outputs: "auto": large sharded results stay sharded, and are gathered when eager code reads them. "lazy": small
            ones, too. "gather": every rank returns full results. "local": each rank returns its own rows.
            Or {result: one of these}, by the result's name in the model's code or its index.
        param_grads: "reduce": the backward sums parameter gradients over the ranks. "partial": they stay partial,
            scaled by the number of ranks, for a DDP or FSDP that averages over an axis that includes these ranks.
        state: Placement that "auto" of other options assumes for training state. "sharded": FSDP shards parameters,
            gradients and an optimizer state as large as AdamW's over these ranks. "replicated": every device stores
            parameters and gradients, and no optimizer state is counted.
        fallback: "gather": an operation that cannot be sharded runs on gathered operands and is reported. "error":
            raise.
        sequence_parallel_linear: "auto": linears and all_reduces of a tensor-parallel program run scattered where that
            is exact. "never": they run as written.
        merge_reductions: Reductions of a value over several mesh axes to merge: "auto": those with a predicted gain.
            "always": all where it is exact. "intra_node": those over ranks of one machine. "never": none. The axes must
            be declared with `sp_compile.declare_groups(mesh)`.
        tiles: Number of sequential tiles of token-wise work with wide intermediates, such as a head with its loss or an
            MLP. A number tiles all of it, "never" nothing. "auto" tiles as much as the memory of the device requires,
            first the work that ends in a scalar.
        offload: Activations that wait in host memory for the backward. A number: this share of their bytes. "auto": the
            smallest share for which the step of each graph fits the device (cost={"memory": ...} sets its size).
            "never": none.
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
        """Validate each option, then the options that depend on the compiler or on the attention strategy.

        Raises:
            SpError: A value is invalid (SP103, SP104), or the compiler (SP105) or strategy (SP106) excludes it.
        """
        for name, rule in OPTION_RULES.items():
            rule.check(name, getattr(self, name))
        # Other values of these options need passes on the joint graph. `purpose` describes the passes in the error.
        for name, (values_of_any_compiler, purpose) in JOINT_GRAPH_OPTIONS.items():
            value = getattr(self, name)
            if value not in values_of_any_compiler and not self.has_joint_passes:
                cause = f"{name}={value!r} needs {purpose}, which compiler={self.compiler!r} does not support."
                raise SpError("SP105", cause)
        for strategy in STRATEGIES.values():
            if self.attention in ("auto", strategy.name):
                continue
            for name in strategy.options:  # options that only this strategy uses, which is not selected
                value = getattr(self, name)
                if value != "auto":
                    cause = f"{name}={value!r} is not supported with attention={self.attention!r}, only with "
                    raise SpError("SP106", f"{cause}{strategy.name!r}.")

    @property
    def has_joint_passes(self) -> bool:
        """Return True if the compiler runs this package's passes on joint graphs.

        Returns:
            True for the compilers in `JOINT_COMPILERS`.
        """
        return self.compiler in JOINT_COMPILERS

    @property
    def is_inductor(self) -> bool:
        """Return True if Inductor compiles the graphs, for its decompositions and its memory estimate.

        Returns:
            True for the compiler "inductor"; False for all others.
        """
        return self.compiler == "inductor"

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

        An entry point is a function of the package that takes these options, such as `plan` or `parallelize`.

        Args:
            entry: Name of the entry point.
            fix: The remedy. Defaults to omitting the option.
            **reasons: Reason for each unsupported option, which continues the sentence after `entry`: the reason
                mesh="has no mesh" of the entry point "plan" has the message "mesh=...: plan has no mesh."

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
            expected = "a mapping from the names of options to values, or an SPConfig"
            raise SpError("SP103", f"options: expected {expected}, got {options!r}.")
        names = [field.name for field in fields(SPConfig)]
        for name in options or {}:
            if name in ("mode", "dynamic", "fullgraph", "backend", "disable"):
                raise SpError("SP101", f"options: {name!r} is an argument of torch.compile, not a backend option.")
            if name not in names:
                hint = ", pass its items as keyword arguments" if name == "options" else suggest_option(name, names)
                raise SpError("SP102", f"options: unknown option {name!r}{hint}, expected one of {', '.join(names)}.")
        return SPConfig(**(options or {}))


# Names that other packages give to options.
OTHER_NAMES = {
    **dict.fromkeys(("strategy", "sp_strategy", "attention_strategy", "attn_implementation", "method"), "attention"),
    **dict.fromkeys(("device_mesh", "group", "process_group"), "mesh"),
    **dict.fromkeys(("axis", "mesh_axis", "mesh_dim_name"), "mesh_dim"),
    **dict.fromkeys(("num_tiles", "chunks", "loss_chunks"), "tiles"),
    **dict.fromkeys(("seq_dim", "sequence_dim", "buffer_seq_dims"), "seq_dims"),
}


def suggest_option(name: str, known: Iterable[str]) -> str:
    """Return a hint at the option that a name probably means, for the error about an unknown option.

    Args:
        name: The name that the user passed.
        known: The names of the options.

    Returns:
        A hint such as " (did you mean 'tiles'?)", or "" if no option is close.
    """
    other = OTHER_NAMES.get(name)
    return f" (did you mean {other!r}?)" if other is not None else did_you_mean(name, known)


class PlanOptions(TypedDict, total=False):
    """Options of `plan`, which has other arguments for `cost` and `inputs`, and no mesh; see `SPConfig`."""

    seq_dims: str | Mapping[str, int]
    attention: str
    layout: str
    ulysses_chunks: str | int
    outputs: str | Mapping[str | int, str]
    param_grads: str
    state: str
    fallback: str
    sequence_parallel_linear: str
    merge_reductions: str
    tiles: str | int
    offload: str | float
    activation_memory_budget: float | None
    check_every: int
    compiler: str | Callable[..., Any]


class MeshOptions(PlanOptions, total=False):
    """Options of functions with an argument `mesh`, such as `fully_shard_and_compile`; see `SPConfig`."""

    mesh_dim: str | None
    cost: Mapping[str, Any] | None
    inputs: str


class SPOptions(MeshOptions, total=False):
    """The fields of `SPConfig` as keyword arguments, such as those of `parallelize`; see `SPConfig`."""

    mesh: DeviceMesh | None


class ReportOptions(SPOptions, total=False):
    """Options of `explain` and `verify`: the fields of `SPConfig`, and arguments of the model."""

    kwargs: Mapping[str, Any]


# Options as passed to `torch.compile`: an SPConfig, or its fields before validation.
AnyOptions: TypeAlias = SPConfig | Mapping[str, Any] | None


def can_fold_reads(options: AnyOptions) -> bool:
    """Return True if values that a program reads from small integer inputs may become constants of its graph.

    Otherwise a read ends the graph. With inputs="local", a rank's values are not those of the program. With
    outputs="lazy", results between graphs stay sharded, so that a read is cheaper than a program for each value.

    Args:
        options: The options.

    Returns:
        False for inputs="local" and for outputs="lazy".
    """
    fields = vars(options) if isinstance(options, SPConfig) else options or {}
    return fields.get("inputs", SPConfig.inputs) == "global" and fields.get("outputs", SPConfig.outputs) != "lazy"
