"""A plan as a picture: memory and seconds of the fastest way by number of ranks."""

from __future__ import annotations

from pathlib import Path

from sp_compile.errors import SpError

from .plan import StepPlan


def picture(plan: StepPlan, path: Path) -> None:
    """Write a PNG. Raises SpError: matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise SpError(
            '--png draws with matplotlib, which is not installed: pip install "sp-compile[examples]"'
        ) from None
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for again, label in ((False, "as written"), (True, "each layer checkpointed")):
        ranks = sorted({row.ranks for row in plan.rows if row.checkpoint == again})
        ways = [[row for row in plan.rows if (row.ranks, row.checkpoint) == (n, again)] for n in ranks]
        left.plot(ranks, [min(row.memory for row in way) / 1e9 for way in ways], "o-", label=label)
        right.plot(ranks, [min(row.seconds for row in way) for way in ways], "o-", label=label)
    left.axhline(plan.memory / 1e9, color="0.4", linestyle="--", label="of a device")
    left.set(xlabel="ranks", ylabel="GB of a rank, at least", xscale="log", yscale="log", title="Memory")
    right.set(xlabel="ranks", ylabel="seconds, at best", xscale="log", yscale="log", title="A step")
    for axes in (left, right):
        axes.set_xticks(sorted({row.ranks for row in plan.rows}), labels=sorted({row.ranks for row in plan.rows}))
        axes.minorticks_off()
        axes.legend()
    FigureCanvasAgg(figure).print_png(str(path))
