"""`kvoffload top`: running engines as they work: live, as tables below each other, or as JSON."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from kvoffload_patch._bootstrap import say
from kvoffload_patch.cli import engines
from kvoffload_patch.cli.options import EXIT_OK, EXIT_REFUSED, Parser
from kvoffload_patch.cli.signals import ended_in_order
from kvoffload_patch.config import up_to
from kvoffload_patch.control import client
from kvoffload_patch.control.errors import Refused

_MOST_S = 3600.0
_LEAST_COLUMNS = 60  # with fewer the live view leaves the names of rows out
_HEAD = ("ENGINE", "STATE", "USED", "GIB", "HIT", "ALL", "LOAD MB/S", "STORE MB/S", "EVICT/S",
         "PARKED", "FAILED", "STEP AGO")  # fmt: skip
_COUNTERS = ("queried_tokens", "hit_tokens", "loaded_bytes", "stored_bytes", "evicted_blocks")


def main(argv: Sequence[str]) -> int:
    """Show engines again and again, until it is ended, or once."""
    asked = _parser().parse_args(argv)
    try:
        return _watch(asked)
    except KeyboardInterrupt:
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
        return engines.none_runs()
    rows = [_HEAD, *map(_row, found)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in rows]
    reasons = [f"{one['engine']}: {why}" for one in found
               if (why := one.get("error") or one.get("reason"))]  # fmt: skip
    return "\n".join([line.rstrip() for line in lines] + reasons)


def _row(one: Mapping[str, Any]) -> tuple[str, ...]:
    """The figures of an engine; ALL is the share of hits since it started."""
    if "error" in one:
        return (one["engine"], "silent", *[""] * (len(_HEAD) - 2))
    speed = one["rates"]
    return (
        one["engine"],
        one["state"] + ("+" if one["growing"] else ""),
        f"{100 * one['used_blocks'] / max(1, one['capacity_blocks']):.0f}%",
        f"{one['capacity_bytes'] / (1 << 30):.2f}",
        f"{100 * speed.get('hit_rate', 0.0):.0f}%",
        f"{100 * one['hit_tokens'] / max(1, one['queried_tokens']):.0f}%",
        f"{speed.get('loaded_bytes_per_second', 0.0) / 1e6:.1f}",
        f"{speed.get('stored_bytes_per_second', 0.0) / 1e6:.1f}",
        f"{speed.get('evicted_blocks_per_second', 0.0):.0f}",
        str(one["parked_requests"]),
        str(one["failed_copies"]),
        f"{one['seconds_since_step']:.0f} s",
    )


def _watch(asked: argparse.Namespace) -> int:
    before: dict[str, dict[str, Any]] = _sample(asked.engine)
    if asked.engine and not before and client.find():
        return _refuse(asked)  # others run, and this name is none of theirs
    with ended_in_order(), _view(asked) as show:
        while not getattr(show, "wait", time.sleep)(asked.interval):
            now = _sample(asked.engine)
            found = [
                {**one, "rates": rates(before.get(name, {}), one)} for name, one in now.items()
            ]
            if not found and (asked.once or asked.engine):
                break  # no engine that starts has a name that was given before
            show(found)
            if asked.once:
                return EXIT_OK
            before = now
        else:
            return EXIT_OK
    return _refuse(asked)  # the terminal is the user's again


def _sample(name: str | None) -> dict[str, dict[str, Any]]:
    return {
        one["engine"]: one
        for one in engines.status()
        if name in (None, one["engine"], one["engine"].partition("-")[0])
    }


def _view(asked: argparse.Namespace) -> AbstractContextManager[Callable[[list[Any]], None]]:
    """What shows engines: JSON, a live view on a terminal, or tables."""
    if asked.json:
        return nullcontext(_print_json)
    if asked.once or not sys.stdout.isatty() or not _draws():
        return nullcontext(_print_table)
    try:
        from kvoffload_patch.cli.live import View
    except ImportError:
        say("kvoffload_patch: a live view needs rich, found none; pip install rich.")
        return nullcontext(_print_table)
    return View(table)


def _encoding() -> str:
    return sys.stdout.encoding or "ascii"


def _draws() -> bool:
    """Whether a live view can be drawn: the terminal moves its cursor, has frames and room."""
    try:
        "\u2500\u256d".encode(_encoding())
    except UnicodeEncodeError:
        return False
    moves = os.environ.get("TERM", "dumb") not in ("", "dumb")
    return moves and shutil.get_terminal_size().columns >= _LEAST_COLUMNS


def _print_json(found: Sequence[Mapping[str, Any]]) -> None:
    print(json.dumps({"time": time.time(), "engines": found}), flush=True)


def _print_table(found: Sequence[Mapping[str, Any]]) -> None:
    print(table(found), flush=True)


def _refuse(asked: argparse.Namespace) -> int:
    """Say that there is nothing to show, and what is there instead."""
    if asked.json:
        _print_json([])
    try:
        engines.chosen(client.find(), asked.engine, every=True)
    except Refused as refusal:
        say(f"kvoffload_patch: {refusal}")
    return EXIT_REFUSED


def _seconds(text: str) -> float:
    number = up_to(_MOST_S)(text)
    if number < 0.1:
        raise ValueError(text)
    return number


def _parser() -> Parser:
    parser = Parser(
        prog="kvoffload top",
        description="Running engines of this user as they work: how full their tiers are, what "
        "they hit, load and store. Figures are those of the last interval, ALL is the share of "
        "hits since the engine started; a + behind the state says that the tier still grows. With "
        "rich installed the terminal shows them live, else as tables below each other.",
        epilog="examples:\n  kvoffload top\n  kvoffload top --once\n  kvoffload top --json "
        "--interval 10 >> tier.jsonl\nexit status: 0; 2 if --once finds no engine, or the one "
        "that --engine names does not run, or not any more.",
    )
    parser.add_argument("--once", action="store_true", help="one interval, then end")
    parser.add_argument("--json", action="store_true", help="one JSON object on a line each time")
    parser.add_value(
        "--interval", _seconds, f"0.1 to {_MOST_S:.0f} seconds",
        default=1.0, metavar="S", help="seconds between two looks",
    )  # fmt: skip
    engines.add_choice(parser)
    return parser
