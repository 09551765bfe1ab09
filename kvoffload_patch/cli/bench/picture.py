"""Bars in a file; the only module here that imports matplotlib, which need not be installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def bars(
    names: Sequence[str], series: Mapping[str, Sequence[float]], label: str, file: Path
) -> bool:
    """A bar for each name, those of all series at one place: the later one lies in front.

    Args:
        series: a value for each name.
        label: of the axis of values.

    Returns:
        False where matplotlib is missing; nothing was written then.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    sheet, axes = pyplot.subplots(figsize=(7, 1.2 + 0.6 * len(names)), layout="constrained")
    for (name, values), color in zip(series.items(), ("lightgrey", "C0")):
        axes.barh(names, values, color=color, label=name)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.legend()
    sheet.savefig(file, dpi=120)
    pyplot.close(sheet)
    return True
