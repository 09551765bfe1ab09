"""The decision before anything starts: settings, memory, and the installed vLLM's files."""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvoffload_patch import __version__, _bootstrap
from kvoffload_patch.config import GIB, ConfigError, Settings, is_enabled
from kvoffload_patch.memory import AUTO_PARTS, auto_bytes, check_cpu_bytes, settings_that, shareable


@dataclass(frozen=True)
class Outcome:
    """What will happen, as one line for the user."""

    line: str
    refused: bool = False
    disabled: bool = False


def decide() -> Outcome:
    """Switch on in the environment and decide; the user's KVOFFLOAD_DISABLE wins."""
    try:
        if not is_enabled({**os.environ, _bootstrap.FLAG: "1"}):
            return Outcome(
                "kvoffload_patch: KVOFFLOAD_DISABLE is set, so nothing is patched.", disabled=True
            )
        os.environ[_bootstrap.FLAG] = "1"
        return _decide_enabled()
    except ConfigError as error:
        return Outcome(_bootstrap.with_name(str(error)), refused=True)


def _decide_enabled() -> Outcome:
    settings = settings_that(check_cpu_bytes)
    found = _bootstrap.status()
    if found["verdict"] != "ok":
        return Outcome(_bootstrap.with_name(str(found["verdict"])), refused=True)
    points, doubts = found["points"], found.get("doubts", [])
    assert isinstance(points, list) and isinstance(doubts, list)
    unverified = f", unverified: {'; '.join(doubts)}" if doubts else ""
    return Outcome(
        f"kvoffload_patch {__version__}: vLLM {found['release']}, {len(points)} patch points match,"
        f" {size(settings)} CPU KV cache, loads {settings.load_mode}{unverified}"
    )


def size(settings: Settings) -> str:
    """How large a tier will be, in words, and why if nobody has said it."""
    if settings.cpu_bytes is not None:
        return f"{settings.cpu_gib} GiB"
    room = shareable()
    return f"about {auto_bytes(room.nbytes) / GIB:.1f} GiB (1/{AUTO_PARTS} of {room})"
