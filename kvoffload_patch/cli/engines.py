"""Running engines on the command line: what each says of itself, and commands for them."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvoffload_patch import __version__
from kvoffload_patch._bootstrap import say
from kvoffload_patch.cli.options import EXIT_OK, EXIT_REFUSED, Parser
from kvoffload_patch.cli.printable import printable
from kvoffload_patch.config import GIB, as_given, option
from kvoffload_patch.control import client, commands, folder
from kvoffload_patch.control.errors import Refused

NONE_RUNS = "no running engine of this user has a CPU tier"
# What a status has in every version that this one can show.
_NEEDED = (
    "block_bytes", "capacity_blocks", "capacity_bytes", "copies", "dropped_blocks",
    "evicted_blocks", "failed_blocks", "failed_copies", "growing", "hit_tokens", "largest_blocks",
    "loaded_blocks", "loaded_bytes", "mismatches", "model", "parked_requests", "queried_tokens",
    "queued_loads", "queued_stores", "reason", "seconds", "seconds_since_step", "settings",
    "since", "state", "stored_blocks", "stored_bytes", "used_blocks", "used_bytes",
)  # fmt: skip

_ABOUT = {
    commands.PAUSE: (
        "Load and store nothing more; what is under way ends, and what is held is kept. vLLM "
        "serves as without a tier until `kvoffload resume`."
    ),
    commands.RESUME: "Load and store again, after `kvoffload pause`.",
    commands.EMPTY: "Forget every block that the tier holds.",
    commands.RESIZE: (
        "Use so many GiB of CPU memory, over all ranks of an engine. A smaller tier forgets what "
        "lies in the part that it gives back to the system. It can grow up to the size that it had "
        "when the engine started."
    ),
    commands.SET: (
        "Change settings of a running engine, until it ends. `kvoffload resize` changes its size; "
        "all others are those that it started with."
    ),
}
_EXAMPLES = {
    commands.PAUSE: "kvoffload pause --all",
    commands.RESUME: "kvoffload resume --engine 4242",
    commands.EMPTY: "kvoffload empty",
    commands.RESIZE: "kvoffload resize 24 --engine 4242",
    commands.SET: "kvoffload set --eviction lru --max-stall-ms 50",
}


def main(name: str, argv: Sequence[str]) -> int:
    """Have engines carry out a command; the exit status says whether all of them did."""
    parser = _parser(name)
    asked = parser.parse_args(argv)
    given = {key: getattr(asked, key) for key in (commands.GIB, *commands.LIVE)
             if getattr(asked, key, None) is not None}  # fmt: skip
    if name == commands.SET and not given:
        names = " or ".join(option(row.name) for row in commands.LIVE.values())
        parser.error(f"expected {names}, found none; give one (see `kvoffload set --help`).")
    try:
        commands.read_command({"command": name, **given})
        engines = chosen(client.find(), asked.engine, asked.all)
    except Refused as refusal:
        return parser.refuse(_by_option(refusal))
    results = [_ask(engine, name, given) for engine in engines]
    if asked.json:
        print(json.dumps(results, indent=1))
    for found in () if asked.json else results:
        if "error" in found:
            say(f"kvoffload_patch: {found['engine']}: {found['error']}")
        else:
            print(_line(name, found))
    return EXIT_REFUSED if any("error" in found for found in results) else EXIT_OK


def chosen(found: Sequence[client.Engine], name: str | None, every: bool) -> list[client.Engine]:
    """The engines that are meant.

    Raises:
        Refused: none runs, none has this name, or there are several and nobody has said which.
    """
    names = ", ".join(engine.name for engine in found)
    wrong = [] if found else client.not_looked_into()
    if wrong:
        raise Refused(" ".join(wrong))
    if not found:
        looked = ", ".join(map(str, folder.candidates()))
        raise Refused(
            f"expected a running engine of this user with a CPU tier, found none in {looked}; "
            "start one, ask as the user that runs it and with its XDG_RUNTIME_DIR and TMPDIR, see "
            "whether its log says `no control socket` or it has KVOFFLOAD_CONTROL=0, or restart "
            "it if that folder was removed, as a logout removes XDG_RUNTIME_DIR."
        )
    if name is not None:
        matching = [e for e in found if name in (e.name, e.process)]
        if not matching:
            raise Refused(f"--engine is {name!r}, expected one of {names}; see `kvoffload status`.")
        return matching
    if len(found) > 1 and not every:
        raise Refused(f"expected one engine, found {names}; name one by --engine, or say --all.")
    return list(found)


def none_runs() -> str:
    """What is said where no engine was found: why not, if a folder could not be looked into."""
    return " ".join(client.not_looked_into()) or NONE_RUNS


def status() -> list[dict[str, Any]]:
    """What every running engine of this user says of itself, or why it does not."""
    return [_ask(engine, commands.STATUS, {}) for engine in client.find()]


def text(found: Mapping[str, Any]) -> str:
    """A few lines on one engine."""
    if "error" in found:
        return f"engine {found['engine']}: {found['error']}"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found["since"]))
    dropped = found["dropped_blocks"]
    removed = found.get(
        "removed_blocks", {}
    )  # an older engine does not tell, nor why copies failed
    rate = 100 * found["hit_tokens"] / max(1, found["queried_tokens"])
    lines = [
        f"engine {found['engine']}: {_state(found)}, since {since}, model {found['model']}"
        f"{_number(found)}",
        f"  size:      {size(found)}{', growing' if found['growing'] else ''}; at most "
        f"{found['largest_blocks'] * found['block_bytes'] / GIB:.2f} GiB",
        f"  hits:      {found['hit_tokens']} of {found['queried_tokens']} tokens that the GPU "
        f"lacked ({rate:.1f}%)",
        f"  blocks:    {found['loaded_blocks']} loaded, {found['stored_blocks']} stored, "
        f"{found['evicted_blocks']} evicted, "
        f"{sum(removed.values())} removed otherwise{_by(removed)}, "
        f"{sum(dropped.values())} not stored{_by(dropped)}",
        f"  speed:     {_speed(found)}",
        f"  failed:    {found['failed_copies']} copies of {found['failed_blocks']} blocks"
        f"{_by(found.get('failed_by', {}))}; "
        f"{found['mismatches']} loads{_compared(found)} brought other bytes than were stored",
        f"  under way: {found['queued_loads']} loads, {found['queued_stores']} stores, "
        f"{found['parked_requests']} requests parked; last step "
        f"{found['seconds_since_step']:.1f} s ago{_unfinished(found)}",
        f"  settings:  {_settings(found)}",
        f"  copies:    {found['copies']}",
    ]
    if stale := found.get("stale_loras"):
        why = "LoRA adapters that were loaded again, until the prefix cache is reset"
        lines.append(f"  left out:  {why}: {', '.join(stale)}")
    lines += [f"  unverified: {doubt}" for doubt in found.get("unverified", ())]
    return "\n".join(lines)


def _compared(found: Mapping[str, Any]) -> str:
    """Of how many loads that is known; older engines do not tell."""
    compared = found.get("compared_loads")
    return "" if compared is None else f" of {compared} compared"


def _number(found: Mapping[str, Any]) -> str:
    """Which engine it is in the server's metrics; older ones do not tell."""
    number = found.get("number")
    return "" if number is None else f', engine="{number}" in /metrics'


def _by(counts: Mapping[str, int]) -> str:
    """What a sum consists of, in parentheses; nothing for nothing."""
    some = ", ".join(f"{number} {kind}" for kind, number in counts.items() if number)
    return f" ({some})" if some else ""


def _store(found: Mapping[str, Any]) -> dict[str, str]:
    """When blocks are stored, and what `auto` does now; older engines do not tell."""
    store, lazily = found.get("store"), found.get("stores_lazily")
    if store == "auto" and lazily is not None:
        store = f"auto ({'lazily' if lazily else 'as they are computed'} now)"
    return {"store": store} if store else {}


def _integrity(found: Mapping[str, Any]) -> dict[str, str]:
    """Which loads are compared with checksums; older engines do not tell."""
    integrity = found.get("integrity")
    if integrity == "sample" and not found["compares"]:
        integrity = "sample (no load is compared now)"
    return {"integrity": integrity} if integrity else {}


def _gpu_prefixes(found: Mapping[str, Any]) -> dict[str, str]:
    """What the GPU keeps of prefixes by `auto`; older engines do not tell."""
    share = found.get("gpu_share")
    if share is None or found["settings"].get("gpu_prefixes") != "auto":
        return {}
    kept = "whole" if share == 1 else f"the first {100 * share:.0f}%"
    return {"gpu_prefixes": f"auto ({kept} now)"}


def _unfinished(found: Mapping[str, Any]) -> str:
    """What tells a step that hangs from an engine that is idle; older engines do not tell."""
    return ", still under way" if found.get("steps_under_way") else ""


def _speed(found: Mapping[str, Any]) -> str:
    """What the bus did when the engine started, which older ones do not tell, and since."""
    ms, seconds = found.get("load_ms_per_block", 0.0), max(found["seconds"], 1e-9)
    bus = f"{found['block_bytes'] / ms / 1e6:.1f} GB/s when it started, " if ms else ""
    loaded, stored = (found[f"{name}_bytes"] / seconds / 1e6 for name in ("loaded", "stored"))
    return f"{bus}on average {loaded:.1f} MB/s loaded, {stored:.1f} MB/s stored since"


def size(found: Mapping[str, Any]) -> str:
    """How full a tier is, in words."""
    used, capacity = found["used_bytes"], found["capacity_bytes"]
    return (
        f"{used / GIB:.2f} of {capacity / GIB:.2f} GiB used ({100 * used / max(1, capacity):.0f}%)"
    )


def _state(found: Mapping[str, Any]) -> str:
    return f"{found['state']} ({found['reason']})" if found["reason"] else str(found["state"])


def _line(name: str, found: Mapping[str, Any]) -> str:
    """What a command has led to."""
    forgotten = found.get("forgotten_blocks")
    more = "" if forgotten is None else f", {forgotten} blocks forgotten"
    if name == commands.SET:
        more += f"; {_settings(found)}"
    return f"engine {found['engine']}: {_state(found)}, {size(found)}{more}"


def _settings(found: Mapping[str, Any]) -> str:
    told = {**found["settings"], **_store(found), **_integrity(found), **_gpu_prefixes(found)}
    return ", ".join(f"{name} {value}" for name, value in told.items())


def _ask(engine: client.Engine, name: str, given: Mapping[str, str]) -> dict[str, Any]:
    try:
        answer = _known(client.ask(engine, commands.STATUS))
        if name != commands.STATUS:  # only of an engine whose answer can be read
            answer = client.ask(engine, name, **given)
        return {"engine": engine.name, **printable(answer)}
    except Refused as refusal:
        return {"engine": engine.name, "error": printable(_by_option(refusal))}


def _known(status: dict[str, Any]) -> dict[str, Any]:
    """The status of an engine, if this version can show it; Refused otherwise."""
    missing = [name for name in _NEEDED if name not in status]
    if missing:
        raise Refused(
            f"expected a status as that of kvoffload_patch {__version__}, found one of version "
            f"{status.get('version', 'unknown')} without {', '.join(missing[:3])}; ask with the "
            "kvoffload of the environment that runs it, or restart the server with this one."
        )
    return status


def _by_option(refusal: Refused) -> str:
    """The sentence, in which a setting is called by its option."""
    names = ",".join(row.name for row in commands.LIVE.values())
    return as_given(str(refusal), {"KVOFFLOAD_OPTIONS": names})


def _parser(name: str) -> Parser:
    parser = Parser(
        prog=f"kvoffload {name}",
        description=_ABOUT[name],
        epilog=f"example: {_EXAMPLES[name]}\nexit status: 0 done; 2 refused, in one sentence.",
    )
    if name == commands.RESIZE:
        parser.add_argument(commands.GIB, metavar="GIB", help="of each engine")
    for field, row in commands.LIVE.items() if name == commands.SET else ():
        parser.add_argument(option(row.name), dest=field, metavar="VALUE", help=row.expected)
    choice = parser.add_mutually_exclusive_group()
    add_choice(choice)
    choice.add_argument("--all", action="store_true", help="every engine of this user")
    parser.add_argument("--json", action="store_true", help="one JSON array, for programs")
    return parser


def add_choice(options: argparse._ActionsContainer) -> None:
    """The option that names an engine."""
    options.add_argument(
        "--engine", metavar="NAME", help="as `kvoffload status` names it, or its process"
    )
