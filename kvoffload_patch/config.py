"""Configuration: every KVOFFLOAD_* variable, declared once, parsed in one place.

The fields of `Settings` are the table: variable, default, parser, unit and description. An empty
variable counts as unset; wrong values and unknown KVOFFLOAD_* names are a `ConfigError` that says
them all, never a silent default. Numbers have ASCII digits and an upper bound. Knows nothing of
vLLM or of what the values are used for.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvoffload_patch.policy_names import POLICIES, entry_points

PREFIX = "KVOFFLOAD_"
TRUE = ("1", "true", "yes", "on")
FALSE = ("0", "false", "no", "off")
LOAD_MODES = ("auto", "inline", "parked")
RECOMPUTES = ("auto", "never")
EVICTIONS = tuple(POLICIES)
STORES = ("auto", "eager", "lazy")
GPU_PREFIXES = ("whole", "auto")
COPY_BACKENDS = ("auto", "staged", "direct", "torch")
INTEGRITIES = ("off", "sample", "full")
GIB = 1 << 30
AUTO = "auto"
# More than any machine has, and little enough for all arithmetic that follows.
MOST_GIB, MOST_S, MOST_MS, MOST_USES = 65_536, 86_400, 60_000, 1_000

# One way to match each text: the time to refuse one grows with its length and not with its square.
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)

T = TypeVar("T")


class ConfigError(ValueError):
    """Variables have wrong values or unknown names; the text is one sentence for each."""


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


def up_to(most: float, zero: bool = False) -> Callable[[str], float]:
    """A parser of numbers above 0, or from 0 on."""

    def parse(text: str) -> float:
        number = float(text) if _NUMBER.fullmatch(text) else -1.0
        if not 0 <= number <= most or (number == 0 and not zero):
            raise ValueError(text)
        return number

    return parse


def _gib(text: str) -> float | str:
    return AUTO if text.lower() == AUTO else up_to(MOST_GIB)(text)


def _eviction(text: str) -> str:
    if text not in EVICTIONS and not entry_points(text):
        raise ValueError(text)
    return text


def _count(text: str) -> int:
    number = int(text) if re.fullmatch(r"\d{1,4}", text, re.ASCII) else 0
    if not 1 <= number <= MOST_USES:
        raise ValueError(text)
    return number


def _release(text: str) -> str:
    if len(text) > 64 or not re.fullmatch(r"\d+(\.\d+)+[A-Za-z0-9.+-]*", text, re.ASCII):
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


def _switch(name: str, default: bool, description: str) -> bool:
    expected = "one of 1/true/yes/on or 0/false/no/off"
    return _variable(name, default, _boolean, expected, description)


def _choice(name: str, default: str, choices: Sequence[str], description: str) -> str:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(text)
        return text

    return _variable(name, default, parse, "one of " + ", ".join(choices), description)


_INLINE_UNCHECKED = (
    "KVOFFLOAD_LOAD_MODE is 'inline' and KVOFFLOAD_INTEGRITY is 'full', expected loads that can be"
    " checked before a step begins; leave KVOFFLOAD_LOAD_MODE out, or set"
    " KVOFFLOAD_INTEGRITY=sample."
)


@dataclass(frozen=True)
class Settings:
    """All settings, parsed; every value is usable as it is."""

    enable: bool = _switch("KVOFFLOAD_ENABLE", False, "patch vLLM when it is imported")
    disable: bool = _switch("KVOFFLOAD_DISABLE", False, "leave vLLM alone, whatever else is set")
    strict: bool = _switch(
        "KVOFFLOAD_STRICT",
        True,
        "a refusal aborts; when off it is one line on stderr or in vLLM's log, and vLLM runs"
        " without the CPU tier",
    )
    cpu_gib: float | str = _variable(
        "KVOFFLOAD_CPU_GIB",
        AUTO,
        _gib,  # type: ignore[arg-type]
        f"a number of GiB above 0, {MOST_GIB} at most, or {AUTO}",
        "size of the CPU KV cache of the whole server, split over its ranks; auto: half of what"
        " machine and cgroup can give, and 1 GiB less than that at most",
        "GiB",
    )
    load_mode: str = _choice(
        "KVOFFLOAD_LOAD_MODE",
        "auto",
        LOAD_MODES,
        "load within the step (inline), beside it (parked), or choose per request (auto)",
    )
    recompute: str = _choice(
        "KVOFFLOAD_RECOMPUTE",
        "auto",
        RECOMPUTES,
        "compute a prefix again that the tier has where its load takes clearly longer, by what both"
        " take lately (auto), or never",
    )
    load_by_layer: bool = _switch(
        "KVOFFLOAD_LOAD_BY_LAYER",
        True,
        "begin a step on its first layers while the KV of later ones is loaded, where the model"
        " allows it; never beside kvcached",
    )
    eviction: str = _variable(
        "KVOFFLOAD_EVICTION",
        "adaptive",
        _eviction,
        f"one of {', '.join(EVICTIONS)} or an entry point of kvoffload_patch.policies",
        "which blocks leave a full tier first: "
        + "; ".join(f"{row.words} ({name})" for name, row in POLICIES.items()),
    )
    store: str = _choice(
        "KVOFFLOAD_STORE",
        "auto",
        STORES,
        "when blocks are stored: as they are computed (eager), when the GPU is about to lose them "
        "(lazy), or as they are computed, and lazily while that recomputes clearly less (auto; "
        "never beside kvcached); storing lazily costs the engine's thread more",
    )
    store_decode: bool = _switch(
        "KVOFFLOAD_STORE_DECODE",
        True,
        "store the blocks that answers fill, too, and not those of prompts alone",
    )
    store_min_uses: int = _variable(
        "KVOFFLOAD_STORE_MIN_USES",
        1,
        _count,
        f"a whole number from 1 to {MOST_USES}",
        "how often a block must have been computed, or found on the GPU, before it is stored",
    )
    gpu_prefixes: str = _choice(
        "KVOFFLOAD_GPU_PREFIXES",
        "auto",
        GPU_PREFIXES,
        "what the GPU keeps of a prefix that nobody uses and the tier has: all of it, as vLLM does"
        " (whole), or its head alone while more is found on the GPU that way (auto)",
    )
    copy_backend: str = _choice(
        "KVOFFLOAD_COPY_BACKEND",
        "auto",
        COPY_BACKENDS,
        "how a GPU's blocks are copied; auto takes the first that works",
    )
    integrity: str = _choice(
        "KVOFFLOAD_INTEGRITY",
        "sample",
        INTEGRITIES,
        "which loads are compared with checksums before a request gets them: none (off), some"
        " (sample), or all (full); these are parked",
    )
    log_interval: float = _variable(
        "KVOFFLOAD_LOG_INTERVAL",
        10.0,
        up_to(MOST_S),
        f"a number of seconds above 0, {MOST_S} at most",
        "time between two lines of statistics",
        "s",
    )
    vllm_version: str | None = _variable(
        "KVOFFLOAD_VLLM_VERSION",
        None,
        _release,
        "a release such as 0.32.0",
        "release to assume instead of the installed metadata, for source trees",
    )
    allow_unverified: bool = _switch(
        "KVOFFLOAD_ALLOW_UNVERIFIED",
        False,
        "patch a vLLM release, fork or function body that was not verified, and use the tier where"
        " nobody has run it; parameters and attributes must match all the same",
    )
    max_stall_ms: float = _variable(
        "KVOFFLOAD_MAX_STALL_MS",
        20.0,
        up_to(MOST_MS, zero=True),
        f"a number of milliseconds, 0 or more, {MOST_MS} at most",
        "how long a load may hold up the running batch, summed over its requests,"
        " before it is parked",
        "ms",
    )
    wipe: bool = _switch(
        "KVOFFLOAD_WIPE",
        False,
        "overwrite the blocks in CPU memory with zeros whenever all are forgotten: by a reset of"
        " the prefix cache, sleep, or kvoffload empty",
    )
    keep_asleep: bool = _switch(
        "KVOFFLOAD_KEEP_ASLEEP",
        True,
        "keep what is stored through sleep at level 1; it is used again if the weights are still"
        " the same when the engine has woken up (from vLLM 0.17 on)",
    )
    empty_on_update: bool = _switch(
        "KVOFFLOAD_EMPTY_ON_UPDATE",
        True,
        "forget what is stored when weights are updated by an RPC, and use the tier again once"
        " nothing of the weights before is left in vLLM's prefix cache",
    )
    control: bool = _switch(
        "KVOFFLOAD_CONTROL",
        True,
        "each engine has a socket that only its user can open, for kvoffload status, top, pause"
        " and the like",
    )
    launch: str | None = _variable(
        "KVOFFLOAD_LAUNCH",
        None,
        str,
        "what python -m kvoffload_patch sets",
        "internal: the token of a launch, which the processes below it confirm",
    )
    options: str | None = _variable(
        "KVOFFLOAD_OPTIONS",
        None,
        str,
        "what python -m kvoffload_patch sets",
        "internal: the variables that options of the command line have set",
    )

    @property
    def cpu_bytes(self) -> int | None:
        """Size of the CPU KV cache of the whole server in bytes; None: auto."""
        return None if self.cpu_gib == AUTO else int(float(self.cpu_gib) * GIB)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Parse the environment (default: this process's); raise `ConfigError` of all mistakes."""
        settings, wrong = cls.of_what_is_right(environ)
        if wrong:
            raise ConfigError(wrong) from None
        return settings

    @classmethod
    def of_what_is_right(cls, environ: Mapping[str, str] | None = None) -> tuple[Settings, str]:
        """The same with defaults in place of what is wrong, and a sentence for each mistake."""
        env = os.environ if environ is None else environ
        wrong = _unknown_names(env)
        values = {}
        for variable in VARIABLES.values():
            try:
                values[variable.field] = read(variable, env)
            except ConfigError as error:
                wrong.append(str(error))
        if values.get("integrity") == "full":
            if values.get("load_mode") == "inline":
                wrong.append(_INLINE_UNCHECKED)
            values["load_mode"] = "parked"
        return cls(**values), " ".join(wrong)  # type: ignore[arg-type]


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
            " correct it or leave it out (see python -m kvoffload_patch --help)."
        ) from None


def is_enabled(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the two switches say on; looks at others only to say all that is wrong at once."""
    env = os.environ if environ is None else environ
    try:
        return not read(VARIABLES["KVOFFLOAD_DISABLE"], env) and bool(
            read(VARIABLES["KVOFFLOAD_ENABLE"], env)
        )
    except ConfigError:
        Settings.from_env(env)  # raises as well, with everything that is wrong
        raise


def as_given(text: str, environ: Mapping[str, str] | None = None) -> str:
    """A text for the user, in which a variable that an option has set is called by the option."""
    env = os.environ if environ is None else environ
    for name in env.get("KVOFFLOAD_OPTIONS", "").split(","):
        if name in VARIABLES:
            # A misspelled variable is like another variable, whatever set that one.
            text = re.sub(rf"(?<!closest one is )\b{name}\b", option(name), text)
    return text


def option(name: str) -> str:
    """The option of the command line that sets a variable."""
    return "--" + name.removeprefix(PREFIX).lower().replace("_", "-")


def _unknown_names(environ: Mapping[str, str]) -> list[str]:
    """One sentence for each KVOFFLOAD_* name that the table lacks."""
    unknown = sorted(name for name in environ if name.startswith(PREFIX) and name not in VARIABLES)
    return [
        f"{name} is not a variable of kvoffload_patch, {_closest(name)}correct its name or unset it"
        " (see python -m kvoffload_patch --help)."
        for name in unknown
    ]


def _closest(name: str) -> str:
    """What may have been meant, of the variables that users set; names share their prefix."""
    import difflib

    known = {row.name[len(PREFIX) :]: row for row in VARIABLES.values()}
    named = [word for word, row in known.items() if not row.description.startswith("internal")]
    near = difflib.get_close_matches(name[len(PREFIX) :], named, n=1, cutoff=0.5)
    return f"the closest one is {PREFIX}{near[0]}; " if near else ""
