"""What a benchmark has found, as a table and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvoffload_patch.cli.bench import picture
from kvoffload_patch.cli.bench.modes import TITLES

_HEAD = (
    "later turns",
    "found",
    "first token p50",
    "p99",
    "per token p50",
    "p99",
    "all",
    "first turns",
)
_UNITS = ("", "%", "ms", "ms", "ms", "ms", "s", "p50, ms")


def table(document: dict[str, Any]) -> str:
    """A row for each mode; figures of the turns that come back, and of the first ones at the end.

    Args:
        document: as `command.measure` makes it.
    """
    rows = [_HEAD, _UNITS, *(_row(mode, found) for mode, found in document["modes"].items())]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_HEAD))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def _row(mode: str, found: dict[str, Any]) -> tuple[str, ...]:
    if "error" in found:
        return (TITLES[mode], "failed", *[""] * (len(_HEAD) - 2))
    later, first = found["later"], found["first"]
    share = 100 * later["found_tokens"] / later["prompt_tokens"]
    return (
        TITLES[mode],
        f"{share:.0f}",
        *(f"{later['first_token_ms'][name]:.1f}" for name in ("p50", "p99")),
        *(f"{later['output_token_ms'][name]:.2f}" for name in ("p50", "p99")),
        f"{later['seconds']:.1f}",
        f"{first['first_token_ms']['p50']:.1f}",
    )


def about(document: dict[str, Any]) -> str:
    """The load in a few words."""
    load, tokens = document["load"], document["gpu_tokens"]
    needed = document["chats"] * load["history"]
    held = (
        "a GPU cache whose size is not known" if tokens is None else f"{tokens:,} in the GPU cache"
    )
    text = (
        f"{document['model']}, vLLM {document['vllm']}: {document['chats']} chats of "
        f"{load['history']:,} tokens, {load['turns']} turns, {load['at_once']} at a time; "
        f"{needed:,} tokens to keep, {held}, {document['cpu_gib']:g} GiB of CPU memory"
    )
    if tokens is not None and needed <= tokens:
        text += "\nThe GPU cache holds all of it, so a tier has nothing to bring back."
    return text


def draw(document: dict[str, Any], file: Path) -> bool:
    """First tokens of the later turns, a bar for each mode; False where matplotlib is missing."""
    later = {TITLES[m]: f["later"] for m, f in document["modes"].items() if "later" in f}
    shares = {
        name: [figures["first_token_ms"][name] for figures in later.values()]
        for name in ("p99", "p50")
    }
    return picture.bars(list(later), shares, "first token of later turns, ms", file)
