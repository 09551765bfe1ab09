"""Configuration: every KVOFFLOAD_* variable, declared once, parsed in one place.

The fields of `Settings` are the table: variable, default, parser, unit and description. An empty
variable counts as unset; a wrong value or an unknown KVOFFLOAD_* name is a `ConfigError`, never a
silent default. Knows nothing of vLLM or of what the values are used for.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

PREFIX = "KVOFFLOAD_"
TRUE = ("1", "true", "yes", "on")
FALSE = ("0", "false", "no", "off")
LOAD_MODES = ("auto", "inline", "parked")
EVICTIONS = ("arc", "lru")
COPY_BACKENDS = ("auto", "staged", "torch")
GIB = 1 << 30

T = TypeVar("T")


class ConfigError(ValueError):
    """A variable has a wrong value or an unknown name; the text is one sentence for the user."""


@dataclass(frozen=True)
class Variable:
    """One row of the table: an environment variable and the field of `Settings` it fills."""

    name: str
    field: str
    default: object
    parse: Callable[[str], object]
    expected: str
    unit: str
    description: str


def _boolean(text: str) -> bool:
    word = text.lower()
    if word not in TRUE + FALSE:
        raise ValueError(text)
    return word in TRUE


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _above_zero(text: str) -> float:
    number = _number(text)
    if number <= 0:
        raise ValueError(text)
    return number


def _not_negative(text: str) -> float:
    number = _number(text)
    if number < 0:
        raise ValueError(text)
    return number


def _rank(text: str) -> int:
    rank = int(text)
    if rank < -1:
        raise ValueError(text)
    return rank


def _load_mode(text: str) -> str:
    if text not in LOAD_MODES:
        raise ValueError(text)
    return text


def _eviction(text: str) -> str:
    if text not in EVICTIONS:
        raise ValueError(text)
    return text


def _copy_backend(text: str) -> str:
    if text not in COPY_BACKENDS:
        raise ValueError(text)
    return text


def _variable(
    name: str,
    default: T,
    parse: Callable[[str], T],
    expected: str,
    description: str,
    unit: str = "",
) -> T:
    """One dataclass field that carries its row of the table."""
    row = {"name": name, "parse": parse, "expected": expected, "unit": unit}
    row["description"] = description
    return dataclasses.field(default=default, metadata=row)


_A_BOOLEAN = "one of 1/true/yes/on or 0/false/no/off"


@dataclass(frozen=True)
class Settings:
    """All settings, parsed; every value is usable as it is."""

    enable: bool = _variable(
        "KVOFFLOAD_ENABLE", False, _boolean, _A_BOOLEAN, "patch vLLM when it is imported"
    )
    disable: bool = _variable(
        "KVOFFLOAD_DISABLE", False, _boolean, _A_BOOLEAN, "leave vLLM alone, whatever else is set"
    )
    strict: bool = _variable(
        "KVOFFLOAD_STRICT",
        True,
        _boolean,
        _A_BOOLEAN,
        "a refusal aborts; when off it is one line on stderr and vLLM runs without the CPU tier",
    )
    cpu_gib: float = _variable(
        "KVOFFLOAD_CPU_GIB",
        4.0,
        _above_zero,
        "a number of GiB above 0",
        "size of the CPU KV cache of the whole server, split over its ranks",
        "GiB",
    )
    load_mode: str = _variable(
        "KVOFFLOAD_LOAD_MODE",
        "auto",
        _load_mode,
        "one of " + ", ".join(LOAD_MODES),
        "load within the step (inline), beside it (parked), or choose per request (auto)",
    )
    eviction: str = _variable(
        "KVOFFLOAD_EVICTION",
        "arc",
        _eviction,
        "one of " + ", ".join(EVICTIONS),
        "which blocks leave a full tier first: the least recently used (lru), or of those used "
        "once and those used again whichever are missed less (arc)",
    )
    copy_backend: str = _variable(
        "KVOFFLOAD_COPY_BACKEND",
        "auto",
        _copy_backend,
        "one of " + ", ".join(COPY_BACKENDS),
        "how a GPU's blocks are copied; auto takes the first that works",
    )
    log_interval: float = _variable(
        "KVOFFLOAD_LOG_INTERVAL",
        10.0,
        _above_zero,
        "a number of seconds above 0",
        "time between two lines of statistics",
        "s",
    )
    vllm_version: str | None = _variable(
        "KVOFFLOAD_VLLM_VERSION",
        None,
        str,
        "a release such as 0.32.0",
        "release to assume instead of the installed metadata, for source trees",
    )
    allow_unverified: bool = _variable(
        "KVOFFLOAD_ALLOW_UNVERIFIED",
        False,
        _boolean,
        _A_BOOLEAN,
        "patch a vLLM release, fork or function body that was not verified; parameters and"
        " attributes must match all the same",
    )
    max_stall_ms: float = _variable(
        "KVOFFLOAD_MAX_STALL_MS",
        20.0,
        _not_negative,
        "a number of milliseconds, 0 or more",
        "how long a load may hold up the running batch, summed over its requests,"
        " before it is parked",
        "ms",
    )
    canary_fault_rank: int = _variable(
        "KVOFFLOAD_CANARY_FAULT_RANK",
        -1,
        _rank,
        "a rank, or -1 for none",
        "test hook: the rank whose start-up canary is made to fail",
    )
    launch: str | None = _variable(
        "KVOFFLOAD_LAUNCH",
        None,
        str,
        "what python -m kvoffload_patch sets",
        "internal: the token of a launch, which the processes below it confirm",
    )

    @property
    def cpu_bytes(self) -> int:
        """Size of the CPU KV cache of the whole server in bytes."""
        return int(self.cpu_gib * GIB)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Parse the environment (default: this process's); raise `ConfigError` on any mistake."""
        env = os.environ if environ is None else environ
        _check_names(env)
        values = {variable.field: read(variable, env) for variable in VARIABLES.values()}
        return cls(**values)  # type: ignore[arg-type]


VARIABLES: dict[str, Variable] = {
    field.metadata["name"]: Variable(field=field.name, default=field.default, **field.metadata)
    for field in dataclasses.fields(Settings)
}


def read(variable: Variable, environ: Mapping[str, str]) -> object:
    """The value of one variable: parsed, or its default where it is unset or empty."""
    text = environ.get(variable.name, "").strip()
    if not text:
        return variable.default
    try:
        return variable.parse(text)
    except ValueError:
        raise ConfigError(
            f"{variable.name} is {text!r}, expected {variable.expected};"
            " correct it or unset it (see python -m kvoffload_patch --help)."
        ) from None


def is_enabled(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the two switches say on; looks at no other variable."""
    env = os.environ if environ is None else environ
    if read(VARIABLES["KVOFFLOAD_DISABLE"], env):
        return False
    return bool(read(VARIABLES["KVOFFLOAD_ENABLE"], env))


def _check_names(environ: Mapping[str, str]) -> None:
    unknown = sorted(name for name in environ if name.startswith(PREFIX) and name not in VARIABLES)
    if unknown:
        import difflib

        closest = difflib.get_close_matches(unknown[0], VARIABLES, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"{unknown[0]} is not a variable of kvoffload_patch, the closest one is {closest};"
            " correct its name or unset it."
        )
