"""What a running engine can be asked, and how each argument is read: alike at both ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvoffload_patch.config import AUTO, VARIABLES, ConfigError, Variable, read
from kvoffload_patch.control.errors import Refused

STATUS, PAUSE, RESUME, EMPTY, RESIZE, SET = "status", "pause", "resume", "empty", "resize", "set"
GIB = "gib"
# Settings that can be changed while an engine serves, by the name of their argument.
LIVE: dict[str, Variable] = {
    row.field: row
    for row in VARIABLES.values()
    if row.field in ("eviction", "gpu_prefixes", "load_mode", "max_stall_ms", "log_interval")
}
# What can be asked, and which arguments each takes.
ARGUMENTS: dict[str, tuple[str, ...]] = {
    STATUS: (), PAUSE: (), RESUME: (), EMPTY: (), RESIZE: (GIB,), SET: tuple(LIVE),
}  # fmt: skip
_LONGEST = 64  # characters of an argument


def _always() -> bool:
    return True


class Command(NamedTuple):
    """What is asked, and the arguments that were given, parsed.

    ``wanted``: whether who has asked still waits for the answer.
    """

    name: str
    values: dict[str, Any]
    wanted: Callable[[], bool] = _always


def read_command(message: Mapping[str, Any]) -> Command:
    """A message as a command.

    Args:
        message: ``{"command": name}``, and its arguments as they were typed.

    Raises:
        Refused: it is none; the text has one sentence for each argument that is wrong.
    """
    name = message.get("command")
    if not isinstance(name, str) or name not in ARGUMENTS:
        raise Refused(
            f"expected one of {', '.join(ARGUMENTS)}, found {_shown(name)}; give one of these."
        )
    given = {key: text for key, text in message.items() if key != "command"}
    unknown = [key for key in given if key not in ARGUMENTS[name]]
    if unknown:
        known = ", ".join(ARGUMENTS[name]) or "no argument"
        raise Refused(f"expected {known} beside {name}, found {_shown(unknown[0])}; leave it out.")
    if name in (RESIZE, SET) and not given:
        raise Refused(
            f"expected {' or '.join(ARGUMENTS[name])} beside {name}, found none; give one."
        )
    values, wrong = dict[str, Any](), list[str]()
    for key, text in given.items():
        try:
            values[key] = _gib(text) if key == GIB else _setting(LIVE[key], text)
        except (Refused, ConfigError) as error:
            wrong.append(str(error))
    if wrong:
        raise Refused(" ".join(wrong))
    return Command(name, values)


def _setting(row: Variable, text: Any) -> object:
    if not isinstance(text, str) or not text.strip() or len(text) > _LONGEST:
        raise Refused(f"{row.name} is {_shown(text)}, expected {row.expected}; correct it.")
    return read(row, {row.name: text})


def _gib(text: Any) -> float:
    row = VARIABLES["KVOFFLOAD_CPU_GIB"]
    try:
        value = row.parse(text) if isinstance(text, str) and len(text) <= _LONGEST else AUTO
    except ValueError:
        value = AUTO
    if value == AUTO:
        expected = row.expected.removesuffix(f", or {AUTO}")
        raise Refused(f"expected {expected}, found {_shown(text)}; give such a size.")
    return float(value)  # type: ignore[arg-type]


def _shown(found: Any) -> str:
    text = repr(found)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
