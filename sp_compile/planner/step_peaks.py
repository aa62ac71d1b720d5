"""Predict the peak memory of a step for another attention, placement of the state, or share on the host.

The state is parameters, gradients and optimizer state. FSDP shards it over the ranks, or every rank has all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from sp_compile.lowering.base.errors import UNKNOWN_LINE
from sp_compile.passes.cost.step_memory import StepMemory

# placements of parameters, gradients and optimizer state over the ranks
SHARDED_STATE, REPLICATED_STATE = STATES = ("sharded", "on every rank")


class StepPeak(NamedTuple):
    """The moment of a step with the most bytes."""

    nbytes: float  # live values, and with sharded state what `StepMemory.sharded_bytes` adds
    phase: str  # "forward", "loss" or "backward"


@dataclass(frozen=True)
class StepPeaks:
    """Peaks of a step, each by placement of the state (`STATES`).

    Two peaks are distinguished, since another attention changes only the moments at lines with attention.
    """

    step: StepMemory  # sizes of its state
    near_attention: Mapping[str, StepPeak]  # peaks at lines with attention
    elsewhere: Mapping[str, StepPeak]  # peaks at other lines
    host: float  # bytes on the host

    @staticmethod
    def of(step: StepMemory, n: int) -> StepPeaks:
        """Return the peaks of a step on n ranks. A line of the user's code has attention if one of its moments has."""
        points = list(step.points())
        # `where` is the line of the user's code that computes at the moment.
        attention_lines = {point.moment.where for point in points if point.moment.attends} - {UNKNOWN_LINE}
        near = {state: StepPeak(0.0, "forward") for state in STATES}
        elsewhere = dict(near)
        for point in points:
            peaks = near if point.moment.where in attention_lines else elsewhere
            for state in STATES:
                nbytes = step.sharded_bytes(point, n) if state == SHARDED_STATE else point.nbytes
                peaks[state] = max(peaks[state], StepPeak(nbytes, point.phase))  # tuples: by bytes first
        return StepPeaks(step, near, elsewhere, step.offloaded.nbytes if step.offloaded is not None else 0.0)

    def with_offload(self, offloaded: StepPeaks, share: float) -> StepPeaks:
        """Return estimated peaks with a share of the saved values on the host.

        Args:
            offloaded: The peaks with all offloadable values on the host, share 1; `self` are those of share 0.
            share: The share, from 0 to 1. The bytes are assumed to be linear in it.
        """

        def interpolate(at_none: Mapping[str, StepPeak], at_all: Mapping[str, StepPeak]) -> dict[str, StepPeak]:
            """Interpolate the bytes between the peaks at share 0 and at share 1; the phases are those of the nearer."""
            nearest = at_none if share < 0.5 else at_all
            return {
                state: StepPeak(peak.nbytes + share * (at_all[state].nbytes - peak.nbytes), nearest[state].phase)
                for state, peak in at_none.items()
            }

        near = interpolate(self.near_attention, offloaded.near_attention)
        elsewhere = interpolate(self.elsewhere, offloaded.elsewhere)
        return StepPeaks(self.step, near, elsewhere, share * offloaded.host)

    def memory(self, state: str, n: int, attention_bytes: float = 0.0) -> StepPeak:
        """Return the peak of a rank, with its state.

        Args:
            state: The placement of the state, one of `STATES`.
            n: The number of ranks.
            attention_bytes: The bytes that another attention needs in addition to that of this step; may be negative.
        """
        near = self.near_attention[state]
        values, phase = max(StepPeak(near.nbytes + attention_bytes, near.phase), self.elsewhere[state])
        if state == SHARDED_STATE:
            return StepPeak(self.step.sharded_peak(int(values), n), phase)
        # `step.state` has no gradients: the bytes of those that exist during the backward are among `values`. When the
        # optimizer runs, all gradients exist, with the bytes of the trainable parameters; all other values are freed.
        return StepPeak(self.step.state + max(values, self.step.weights.trainable), phase)
