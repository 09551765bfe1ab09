"""`kvoffload top`: running engines as they work, on any terminal, or line by line."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvoffload_patch.cli import engines
from kvoffload_patch.cli.options import Parser

EXIT_OK, EXIT_REFUSED = 0, 2

# Two codes that every terminal since the VT100 knows: to the first place, and clear behind it.
_CLEAR = "\x1b[H\x1b[J"
_MOST_S = 3600.0
_HEAD = ("ENGINE", "STATE", "USED", "GIB", "HIT", "LOAD MB/S", "STORE MB/S", "EVICT/S", "PARKED",
         "FAILED", "STEP AGO")  # fmt: skip
_COUNTERS = ("queried_tokens", "hit_tokens", "loaded_bytes", "stored_bytes", "evicted_blocks")


def main(argv: Sequence[str]) -> int:
    """Show engines again and again, until interrupted, or once."""
    asked = _parser().parse_args(argv)
    try:
        return _watch(asked)
    except KeyboardInterrupt:
        return EXIT_OK
    except BrokenPipeError:  # the reader has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


def rates(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, float]:
    """What an engine has done between two answers: per second, and the share of hits.

    Empty if either is no answer, or they are of no two moments.
    """
    if "seconds" not in now or "seconds" not in before or now["seconds"] <= before["seconds"]:
        return {}
    seconds = now["seconds"] - before["seconds"]
    done = {name: now[name] - before[name] for name in _COUNTERS}
    return {
        "hit_rate": done["hit_tokens"] / max(1, done["queried_tokens"]),
        "loaded_bytes_per_second": done["loaded_bytes"] / seconds,
        "stored_bytes_per_second": done["stored_bytes"] / seconds,
        "evicted_blocks_per_second": done["evicted_blocks"] / seconds,
    }


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """A line for each engine, its ``rates`` included."""
    if not found:
        return "no running engine of this user"
    rows = [_HEAD, *map(_row, found)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in rows]
    reasons = [f"{one['engine']}: {why}" for one in found
               if (why := one.get("error") or one.get("reason"))]  # fmt: skip
    return "\n".join([line.rstrip() for line in lines] + reasons)


def _row(one: Mapping[str, Any]) -> tuple[str, ...]:
    if "error" in one:
        return (one["engine"], "silent", *[""] * (len(_HEAD) - 2))
    speed = one["rates"]
    return (
        one["engine"],
        one["state"] + ("+" if one["growing"] else ""),
        f"{100 * one['used_blocks'] / max(1, one['capacity_blocks']):.0f}%",
        f"{one['capacity_bytes'] / (1 << 30):.2f}",
        f"{100 * speed.get('hit_rate', 0.0):.0f}%",
        f"{speed.get('loaded_bytes_per_second', 0.0) / 1e6:.1f}",
        f"{speed.get('stored_bytes_per_second', 0.0) / 1e6:.1f}",
        f"{speed.get('evicted_blocks_per_second', 0.0):.0f}",
        str(one["parked_requests"]),
        str(one["failed_copies"]),
        f"{one['seconds_since_step']:.0f} s",
    )


def _watch(asked: argparse.Namespace) -> int:
    before: dict[str, dict[str, Any]] = _sample(asked.engine)
    while True:
        time.sleep(asked.interval)
        now = _sample(asked.engine)
        found = [{**one, "rates": rates(before.get(name, {}), one)} for name, one in now.items()]
        _show(found, asked.json, asked.once)
        if asked.once:
            return EXIT_OK if found else EXIT_REFUSED
        before = now


def _sample(name: str | None) -> dict[str, dict[str, Any]]:
    return {
        one["engine"]: one
        for one in engines.status()
        if name in (None, one["engine"], one["engine"].partition("-")[0])
    }


def _show(found: Sequence[Mapping[str, Any]], as_json: bool, once: bool) -> None:
    if as_json:
        print(json.dumps({"time": time.time(), "engines": found}), flush=True)
        return
    shown = table(found)
    if sys.stdout.isatty() and not once and os.environ.get("TERM", "dumb") != "dumb":
        width = shutil.get_terminal_size().columns
        cut = "\n".join(line[:width] for line in shown.splitlines())
        print(
            f"{_CLEAR}{time.strftime('%H:%M:%S')}  kvoffload top, Ctrl-C ends it\n{cut}", flush=True
        )
    else:
        print(shown, flush=True)


def _seconds(text: str) -> float:
    number = float(text) if text.isascii() else 0.0
    if not 0.1 <= number <= _MOST_S:
        raise ValueError(text)
    return number


def _parser() -> Parser:
    parser = Parser(
        prog="kvoffload top",
        description="Running engines of this user as they work: how full their tiers are, what "
        "they hit, load and store. Figures are those of the last interval; a + behind the state "
        "says that the tier still grows.",
        epilog="examples:\n  kvoffload top\n  kvoffload top --once\n  kvoffload top --json "
        "--interval 10 >> tier.jsonl\nexit status: 0; 2 if --once finds no engine.",
    )
    parser.add_argument("--once", action="store_true", help="one interval, then end")
    parser.add_argument("--json", action="store_true", help="one JSON object on a line each time")
    parser.add_value(
        "--interval", _seconds, f"0.1 to {_MOST_S:.0f} seconds",
        default=1.0, metavar="S", help="seconds between two looks",
    )  # fmt: skip
    engines.add_choice(parser)
    return parser
