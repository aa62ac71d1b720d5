"""A plan as a picture: memory and seconds of the fastest way by number of ranks."""

from __future__ import annotations

from pathlib import Path

from sp_compile.errors import SpError

from .plan import StepPlan
from .sizes import UNITS

WAYS = ((False, "as written", "o-"), (True, "each layer checkpointed", "s-"))
BEHIND_WORDS = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}


def picture(plan: StepPlan, path: Path) -> None:
    """Write a PNG. Raises SpError: matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator
    except ImportError:
        raise SpError("SP737", "--png: matplotlib is not installed.") from None
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    ranks, unit = sorted({row.ranks for row in plan.rows}), UNITS[plan.unit.name]
    missed, drawn = set(), {left: [plan.memory / unit], right: list[float]()}
    for i, (again, label, style) in enumerate(WAYS):
        ways = [[row for row in plan.rows if (row.ranks, row.checkpoint) == (n, again)] for n in ranks]
        if not any(ways):
            continue
        least = [min(way, key=lambda row: row.memory) for way in ways if way]
        fastest = [min(way, key=lambda row: (not row.fits, row.seconds)) for way in ways if way]
        for axes, rows, values in (
            (left, least, [row.memory / unit for row in least]),
            (right, fastest, [row.seconds for row in fastest]),
        ):
            axes.plot([row.ranks for row in rows], values, style, color=f"C{i}", label=label)
            drawn[axes] += values
            misses = [(row.ranks, value) for row, value in zip(rows, values, strict=True) if not row.fits]
            if misses:
                axes.plot(*zip(*misses, strict=True), style[0], color=f"C{i}", markerfacecolor="white")
                missed.add(axes)
        for row in least:
            if row.host:
                words, at = f"and {plan.unit(row.host)} on the host", (row.ranks, row.memory / unit)
                side = "left" if row.ranks == ranks[0] else "right" if row.ranks == ranks[-1] else "center"
                left.annotate(
                    words, at, (0, -14), textcoords="offset points", ha=side, fontsize="x-small", bbox=BEHIND_WORDS
                )
    device = plan.memory / unit
    left.axhline(device, color="0.4", linestyle="--", label=f"a device: {device:.3g} {plan.unit.name}")
    left.set(ylabel=plan.unit.name, title="Peak memory of a rank, the way that holds least")
    right.set(ylabel="seconds", title="A training step, the fastest way that fits")
    for axes in (left, right):
        if axes in missed:
            axes.plot([], [], "o", color="0.4", markerfacecolor="white", label="does not fit")
        axes.set(xlabel="ranks that share the sequence", xscale="log", yscale="log")
        axes.set_xticks(ranks, labels=ranks)
        axes.minorticks_off()
        wide = max(drawn[axes]) > 4 * min(drawn[axes])  # else hardly any of 1, 2, 5, 10 would be there
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if wide else MaxNLocator(6))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.margins(y=0.15)
        axes.grid(axis="y", color="0.9")
        axes.legend(fontsize="small")
    FigureCanvasAgg(figure).print_png(str(path))
