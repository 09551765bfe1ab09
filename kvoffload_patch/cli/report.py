"""`python -m kvoffload_patch status`: everything the decision rests on, as text."""

from __future__ import annotations

import os

from kvoffload_patch import _bootstrap


def text() -> str:
    """The report, a few lines and one line per patch point."""
    found = _bootstrap.status()
    flag = os.environ.get(_bootstrap.FLAG)
    points = found["points"]
    assert isinstance(points, list)
    lines = [
        f"kvoffload_patch {found['version']}",
        f"switch:       {'on' if found['enabled'] else 'off'} ({_switches(flag)})",
        f"vLLM:         {found['release'] or 'not found'}",
        f"supported:    {found['supported'] or 'unknown'}",
        f"patch points: {len(points)}",
    ]
    width = max((len(p["name"]) for p in points), default=0)
    lines += [f"  {p['name']:{width}}  {p['module']}:{p['attribute']}{_note(p)}" for p in points]
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
