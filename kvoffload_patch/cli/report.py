"""`kvoffload status`: everything the decision rests on, as text or as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

from kvoffload_patch import _bootstrap
from kvoffload_patch.cli import engines, plain_servers
from kvoffload_patch.cli.options import EXIT_OK, EXIT_REFUSED, Parser
from kvoffload_patch.config import as_given
from kvoffload_patch.control import client

EXIT_SILENT = 1


def main(argv: Sequence[str]) -> int:
    """Print the report; the exit status says whether vLLM would get a tier, and engines answer."""
    parser = Parser(
        prog="kvoffload status",
        description="What is installed and whether it matches, without importing vLLM; and what "
        "each running engine of this user says of its tier.",
        epilog="examples:\n  kvoffload status\n  kvoffload --cpu-gib 64 status\n"
        "  kvoffload status --points\n  kvoffload status --json\n"
        "exit status: 0 it matches; 1 it does, and an engine does not answer as one of this\n"
        "version; 2 refused, and the verdict says why.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    parser.add_argument("--points", action="store_true", help="a line for each patch point")
    asked = parser.parse_args(argv)
    found = _bootstrap.status()
    found["verdict"] = as_given(str(found["verdict"]))
    running = engines.status()
    plain = plain_servers.found({int(engine.process) for engine in client.find()})
    wrong = client.not_looked_into()
    if asked.json:
        more = {"engines": running, "not_looked_into": wrong, "without_tier": plain}
        print(json.dumps({**found, **more}, indent=1))
    else:
        unseen = wrong or ([] if running else [engines.NONE_RUNS])
        told = [f"engines:      {why}" for why in [*unseen, *map(plain_servers.text, plain)]]
        print("\n".join([text(found, asked.points), *told, *map(engines.text, running)]))
    if found["verdict"] != "ok":
        return EXIT_REFUSED
    return EXIT_SILENT if any("error" in engine for engine in running) else EXIT_OK


def text(found: Mapping[str, object], each_point: bool) -> str:
    """What `_bootstrap.status` has found, a few lines, and one for each patch point if asked."""
    flag = os.environ.get(_bootstrap.FLAG)
    points, table = found["points"], found["supported"]
    assert isinstance(points, list)
    lines = [
        f"kvoffload_patch {found['version']}",
        f"switch:       {'on' if found['enabled'] else 'off'} ({_switches(flag)})",
        # Without a table the settings were refused before anything was looked for.
        f"vLLM:         {found['release'] or ('not found' if table else 'not looked for')}",
        *([f"supported:    {table}"] if table else []),
        f"patch points: {len(points)}" + ("" if each_point else " (--points lists them)"),
    ]
    listed = points if each_point else []
    width = max((len(p["name"]) for p in listed), default=0)
    lines += [f"  {p['name']:{width}}  {p['module']}:{p['attribute']}{_note(p)}" for p in listed]
    doubts = found.get("doubts", [])
    assert isinstance(doubts, list)
    lines += [f"unverified:   {doubt}" for doubt in doubts]
    return "\n".join([*lines, f"verdict:      {found['verdict']}"])


def _note(point: dict[str, object]) -> str:
    return "" if point.get("wrapped", True) else " (checked only)"


def _switches(flag: str | None) -> str:
    disable = os.environ.get("KVOFFLOAD_DISABLE")
    enabling = f"{_bootstrap.FLAG}={flag}" if flag else f"{_bootstrap.FLAG} is not set"
    return f"{enabling}, KVOFFLOAD_DISABLE={disable}" if disable else enabling
