"""Define the configurations of a training step that a plan compares, and their predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .step_peaks import SHARDED_STATE


@dataclass(frozen=True)
class PlanConfig:
    """The number of ranks and the options of one dry run, besides those that are equal in all dry runs of a plan."""

    ranks: int  # number of ranks that share the sequence
    attention: str  # the strategy of attention, as in `SPConfig`
    layout: str  # the layout of the sequence, as in `SPConfig`
    checkpoint: bool  # True if each layer is recomputed in the backward
    tiles: int | str  # number of tiles; "auto" for the number that the memory requires, "never" for none
    state: str  # "sharded" over the ranks by FSDP, or "on every rank" (`STATES`)
    offload: float = 0.0  # the share of saved values on the host

    @property
    def key(self) -> tuple[str, str]:
        """Return the strategy and the layout of its attention, the key of an `AttentionChoice`."""
        return self.attention, self.layout

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of the backend with which a dry run lowers the model."""
        options: dict[str, Any] = {"attention": self.attention, "layout": self.layout, "tiles": self.tiles}
        options["param_grads"] = "partial" if self.state == SHARDED_STATE else "reduce"  # FSDP reduces partial ones
        if self.state == SHARDED_STATE:
            options["state"] = "sharded"
        if self.offload:
            options["offload"] = self.offload
        return options


@dataclass(frozen=True, kw_only=True)
class Variant(PlanConfig):
    """One configuration of a training step, with its predicted memory and time."""

    host: float  # bytes of the values on the host, for each rank
    memory: float  # bytes of a rank at the peak
    phase: str  # the phase of the peak
    kept: float  # bytes that the forward saves for the backward, on the device and the host
    seconds: float  # seconds of a step
    tokens: int  # tokens of the sequence
    fits: bool  # True if the memory is sufficient
    is_measured: bool = True  # True if predicted with exactly these options; False if estimated from others
    most_tiles: int = 0  # the largest number of tiles of a region
    user_options: Mapping[str, Any] = field(default_factory=dict)  # the options passed to `plan`

    @property
    def config(self) -> PlanConfig:
        """Return the configuration of the dry run.

        Returns:
            The number of ranks and the options that vary between dry runs.
        """
        return PlanConfig(*(getattr(self, option.name) for option in fields(PlanConfig)))

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of `torch.compile(model, backend="sp", options=...)`.

        FSDP and checkpoints are not options: the program applies them.

        Returns:
            The options passed to `plan`, with those of this variant added or replaced.
        """
        return merge_options(self.user_options, super().options)

    @property
    def required_changes(self) -> str:
        """Return the changes that the program needs in addition to the options.

        Returns:
            The checkpoints and FSDP of this variant as text; "" if there are none.
        """
        checkpoint = "torch.utils.checkpoint around each layer" if self.checkpoint else ""
        shard = f"fully_shard over the {self.ranks} ranks" if self.state == SHARDED_STATE else ""
        return " and ".join(filter(None, [checkpoint, shard]))

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second of all ranks together.

        Returns:
            Tokens per second; 0 if the duration of a step is not known.
        """
        return self.tokens / self.seconds if self.seconds else 0.0


def merge_options(user_options: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a variant merged with those that the user passed to the plan.

    The variant's replace the user's, except `param_grads`, which a variant only derives from the state.
    """
    merged = {**user_options, **options}
    if "param_grads" in user_options:
        merged["param_grads"] = user_options["param_grads"]
    return merged
