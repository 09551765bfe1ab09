"""What the benchmarks share: the machine, medians and spread, JSON files, tables, pictures."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from scripts import ROOT, Refused

GIB = 1 << 30
# A list of numbers alone, as `json.dumps` indents it. No text has a line's end in it there.
_NUMBERS = re.compile(r"\[\n([-\d.eE,\s]+)\]")


def say(text: str) -> None:
    """One line of progress, at once."""
    print(text, flush=True)


def lacks_cuda() -> bool:
    """Whether there is no CUDA GPU, and says so; imports torch, which few of these need."""
    import torch

    if torch.cuda.is_available():
        return False
    print(
        "error: expected a CUDA GPU, but torch finds none here; run this on a machine with one.",
        file=sys.stderr,
    )
    return True


def lacks_tier(command: str) -> bool:
    """Whether this process is to run without a tier, and says how the command is begun with one."""
    from kvoffload_patch.config import is_enabled

    if is_enabled():
        return False
    print(
        "error: expected a CPU tier, but none is asked for; run this as"
        f" `python -m kvoffload_patch --cpu-gib 72 python scripts/bench {command} ...`.",
        file=sys.stderr,
    )
    return True


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """The samples themselves, their median, and their spread."""
    return {
        "samples": list(samples),
        "median": statistics.median(samples),
        "min": min(samples),
        "max": max(samples),
    }


def quantile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least ``share`` of the samples do not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def machine() -> dict[str, Any]:
    """What the numbers were measured on. Does not touch the GPU."""
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": " ".join([os.path.basename(sys.executable), *sys.argv]),
        "gpu": _gpu(),
        "cpu": _field("/proc/cpuinfo", "model name"),
        "cpus": len(os.sched_getaffinity(0)),
        "ram_gib": round(int(_field("/proc/meminfo", "MemTotal").split()[0]) / (1 << 20), 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "triton", "vllm", "lmcache")},
        "commit": _output(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]),
        # The last one that changed what is measured.
        "package": _output(
            ["git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", "kvoffload_patch"]
        ),
    }


def ran_on(machine: dict[str, Any]) -> str:
    """Commit, date and machine of a result, as `machine` has them."""
    gpu = machine.get("gpu", "none")
    where = gpu.split(",")[0] if gpu != "none" else machine.get("cpu", "CPU")
    return (
        f"Commit {machine['commit']}, {machine['date'][:10]}, {where}, {machine['cpus']} cores, "
        f"vLLM {machine['vllm']}"
    )


def ran(*machines: dict[str, Any]) -> list[str]:
    """The same of several results with their commands; one line where only these differ."""
    commands = dict[str, dict[str, None]]()
    for machine in machines:
        commands.setdefault(ran_on(machine), {})[f"`{machine['command']}`"] = None
    return [f"{where}: {', '.join(found)}" for where, found in commands.items()]


def _gpu() -> str:
    query = "name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max"
    found = _output(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"])
    return "; ".join(found.splitlines()) or "none"


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _field(file: str, name: str) -> str:
    for line in Path(file).read_text().splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return "0"


def _version(name: str) -> str:
    for distribution in (name, f"{name}-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return ""


def write_json(path: Path | None, document: Any) -> None:
    """Write the file in one piece: a reader finds the old text or the new one, never half of it.

    Numbers of a list share a line; a line each makes up half of a long file.
    """
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    text = json.dumps(document, indent=1)
    beside.write_text(_NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text))
    beside.replace(path)


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is its head, the first column is text, the others numbers."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(w) if i == 0 else cell.rjust(w)
                          for i, (cell, w) in enumerate(zip(row, widths))) + " |"
        for row in rows
    ]  # fmt: skip
    rule = "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths))
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])


def cell(values: Sequence[float], factor: float = 1.0) -> str:
    """Median, smallest and largest, to three digits."""
    if not values:
        return "-"
    middle, low, high = (factor * f(values) for f in (statistics.median, min, max))
    return f"{digits(middle)} ({digits(low)} to {digits(high)})"


def digits(value: float) -> str:
    """To three digits; thousands to the last one."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def verdict(what: str, value: float | None, limit: float, unit: str = "", most: bool = True) -> str:
    """One line: a value beside its target, which is the most or the least that it may be."""
    target = f"{'at most' if most else 'at least'} {limit:g}{unit}"
    if value is None:
        return f"  -     {what}: not measured, {target}"
    good = value <= limit if most else value >= limit
    return f"  {'ok  ' if good else 'MISS'}  {what}: {value:.3g}{unit}, {target}"


def bars(axes: Any, groups: Sequence[str], series: dict[str, list[dict[str, Any] | None]]) -> None:
    """Grouped bars: for each series one bar a group at its median, with a line from min to max.

    A missing value is an empty place.
    """
    width = 0.8 / max(1, len(series))
    for number, (name, values) in enumerate(series.items()):
        places = [g - 0.4 + width * (number + 0.5) for g in range(len(groups))]
        found = [(place, v) for place, v in zip(places, values) if v]
        heights = [v["median"] for _, v in found]
        spread = [[v["median"] - v["min"] for _, v in found],
                  [v["max"] - v["median"] for _, v in found]]  # fmt: skip
        axes.bar([p for p, _ in found], heights, width * 0.95, yerr=spread, capsize=2,
                 label=name, color=f"C{number}", error_kw={"lw": 0.8})  # fmt: skip
        for (place, v), height in zip(found, heights):
            axes.annotate(
                f"{height:.3g}", (place, v["max"]), xytext=(0, 2), textcoords="offset points",
                ha="center", va="bottom", fontsize=6, rotation=90,
            )  # fmt: skip
    axes.set_xticks(range(len(groups)), groups)
    axes.margins(y=0.18)
    axes.spines[["top", "right"]].set_visible(False)


def pyplot() -> Any:
    """matplotlib's pyplot without a screen, or None where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        say("No picture: matplotlib is not installed.")
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def visible_gpus(count: int) -> list[str]:
    """Names of the first devices that this process may see.

    Raises:
        Refused: there are fewer.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name for name in listed.split(",") if name] if listed else _all_gpus()
    if len(names) < count:
        raise Refused(f"expected {count} GPUs that this process may see, found {len(names)}")
    return names[:count]


def _all_gpus() -> list[str]:
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except OSError:
        return []
    return [str(number) for number, _ in enumerate(found.stdout.splitlines())]
