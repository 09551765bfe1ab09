"""The demonstration's table and picture."""

import statistics
from pathlib import Path

from scripts.demo_app.load import Run
from scripts.demo_app.settings import Settings

OFF, ON = "tier off", "tier on"


def milliseconds(values: list[float]) -> list[str]:
    """The median and the 95th percentile of times in seconds, as text."""
    p95 = statistics.quantiles(values, n=20, method="inclusive")[-1]
    return [f"{value * 1000:.0f} ms" for value in (statistics.median(values), p95)]


def column(run: Run) -> dict[str, str]:
    """One run's figures by name."""
    median, p95 = milliseconds(run.first_token_s)
    later_median, later_p95 = milliseconds(run.returning_s)
    return {
        "requests": str(len(run.answers)),
        "prompt tokens": f"{run.prompt_tokens:,}",
        "  recomputed": f"{run.recomputed_tokens:,}",
        "  found in vLLM's own cache": f"{run.cached_tokens:,}",
        "  loaded from CPU memory": f"{run.loaded_tokens:,}",
        "time to first token, median": median,
        "                     p95": p95,
        "  from turn 2 on,    median": later_median,
        "                     p95 ": later_p95,
    }


def table(runs: dict[str, Run]) -> str:
    """The runs side by side, one row per figure."""
    columns = [column(run) for run in runs.values()]
    lines = [f"{'':30}" + "".join(f"{name:>12}" for name in runs)]
    for name in columns[0]:
        lines.append(f"{name:30}" + "".join(f"{values[name]:>12}" for values in columns))
    return "\n".join(lines)


def draw(runs: dict[str, Run], size: Settings, path: Path) -> None:
    """Time to first token by request in order, the runs over each other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4.8), layout="constrained")
    for (name, run), colour, marker in zip(
        runs.items(), ("#c0504d", "#1f6fb4"), ("o", "s"), strict=True
    ):
        values = [1000 * value for value in run.first_token_s]
        label = f"{name}, median {milliseconds(run.first_token_s)[0]}"
        steps = range(1, len(values) + 1)
        axes.plot(steps, values, marker, ls="-", lw=1, ms=4, color=colour, label=label)
    top = axes.get_ylim()[1] * 1.12
    for turn in range(size.turns):
        start = turn * size.conversations
        if turn:
            axes.axvline(start + 0.5, color="0.75", lw=0.8, zorder=0)
        axes.text(start + size.conversations / 2 + 0.5, top * 0.965, f"turn {turn + 1}",
                  ha="center", va="top", color="0.35")  # fmt: skip
    axes.set(xlim=(0.5, size.turns * size.conversations + 0.5), ylim=(0, top))
    axes.set_xlabel("request, in the order sent (one of every conversation in each turn)")
    axes.set_ylabel("time to first token (ms)")
    axes.set_title(
        f"{size.conversations} conversations in rotation,"
        f" vLLM's own KV cache holds {size.gpu_blocks * size.block_size:,} tokens"
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=150)
    plt.close(figure)
