"""The decision before anything starts: settings, memory, and the installed vLLM's files."""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvoffload_patch import __version__, _bootstrap
from kvoffload_patch.config import VARIABLES, ConfigError, Settings, read
from kvoffload_patch.memory import check_cpu_bytes


@dataclass(frozen=True)
class Outcome:
    """What will happen, as one line for the user."""

    line: str
    refused: bool = False
    disabled: bool = False


def decide() -> Outcome:
    """Switch on in the environment and decide; the user's KVOFFLOAD_DISABLE wins."""
    try:
        if read(VARIABLES["KVOFFLOAD_DISABLE"], os.environ):
            return Outcome(
                "kvoffload_patch: KVOFFLOAD_DISABLE is set, so nothing is patched.", disabled=True
            )
        os.environ[_bootstrap.FLAG] = "1"
        return _decide_enabled()
    except ConfigError as error:
        return Outcome(_bootstrap.with_name(str(error)), refused=True)


def _decide_enabled() -> Outcome:
    settings = Settings.from_env()
    check_cpu_bytes(settings.cpu_bytes)
    found = _bootstrap.status()
    if found["verdict"] != "ok":
        return Outcome(_bootstrap.with_name(str(found["verdict"])), refused=True)
    points, doubts = found["points"], found.get("doubts", [])
    assert isinstance(points, list) and isinstance(doubts, list)
    unverified = f", unverified: {'; '.join(doubts)}" if doubts else ""
    return Outcome(
        f"kvoffload_patch {__version__}: vLLM {found['release']}, {len(points)} patch points match,"
        f" {settings.cpu_gib} GiB CPU KV cache, loads {settings.load_mode}{unverified}"
    )
