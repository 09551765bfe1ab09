"""`kvoffload bench`: options, one server for each mode, table, JSON and picture."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvoffload_patch import __version__, _bootstrap
from kvoffload_patch._bootstrap import say
from kvoffload_patch.cli import preflight
from kvoffload_patch.cli.bench import load as loads
from kvoffload_patch.cli.bench import modes, report
from kvoffload_patch.cli.bench.errors import BenchRefused, ServerFailed
from kvoffload_patch.cli.bench.load import Load
from kvoffload_patch.cli.bench.server import HOST, Server, free_port
from kvoffload_patch.cli.options import EXIT_OK, Parser, whole
from kvoffload_patch.cli.signals import ended_in_order
from kvoffload_patch.config import AUTO, GIB, ConfigError, Settings, as_given
from kvoffload_patch.memory import auto_bytes, shareable

EXIT_FAILED = 1

# Enough for the chats of an 8B model beside GPU_BLOCKS.
MOST_AUTO_GIB = 16.0
# Blocks of the GPU cache: few, so that a small load exceeds it. vLLM's blocks have 16 tokens on
# most GPUs, and 128 on a CPU.
GPU_BLOCKS, CPU_BLOCKS = 2048, 256
_SET_HERE = ("--host", "--port", "--uds", "--api-key", "--num-gpu-blocks-override",
             "--kv-transfer-config", "--kv-offloading-size", "--kv-offloading-backend",
             "--no-enable-prefix-caching")  # fmt: skip

_DESCRIPTION = """\
Start `vllm serve` once for each mode on this machine, have it answer the same small load, and
compare: without a tier, with it, and with vLLM's own connectors where the installed release has
them. The load is conversations that the GPU cache cannot hold together, so that each turn's history
has left the GPU when it comes back. What follows `--` goes to every server as it is."""
_EPILOG = """\
examples:
  kvoffload bench --model MODEL                        all modes that can run here
  kvoffload bench --model MODEL --modes off,on -- --tensor-parallel-size 2
  kvoffload bench --model MODEL --out bench-out        bench.json, bench.png and the servers' logs
  kvoffload bench --model MODEL --gpu-blocks 0 --chats 200   vLLM's own size of the GPU cache
One run of each mode: a difference of some percent may be chance.
exit status: 0 measured; 1 a server did not start or failed; 2 refused, in one sentence."""


def main(argv: Sequence[str]) -> int:
    """Measure and print; the exit status says whether every mode was measured."""
    words, serve = list(argv), list[str]()
    if "--" in words:
        at = words.index("--")
        words, serve = words[:at], words[at + 1 :]
    parser = _parser()
    asked, wrong = parser.read_args(words)
    if wrong := [*wrong, *map(as_given, _refusals(asked, serve, not wrong))]:
        return parser.refuse(" ".join(wrong))
    with ended_in_order(), ExitStack() as stack:
        logs = asked.out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        document = measure(asked, serve, logs)
    _show(document, asked)
    failed = [name for name, m in document["modes"].items() if "error" in m]
    if failed:
        say(_failure(failed))
    return EXIT_FAILED if failed else EXIT_OK


def _failure(failed: Sequence[str]) -> str:
    """Which servers failed, and what to do about it."""
    titles = ", ".join(modes.TITLES[name] for name in failed)
    remedy = (
        "see to it first that plain `vllm serve` runs here with this model and these arguments"
        if modes.OFF in failed
        else "mend what they say, or leave them out by --modes"
    )
    return (
        "kvoffload_patch: expected every server to start and to answer, found failures of: "
        f"{titles}; their last lines are above; {remedy}."
    )


def measure(asked: argparse.Namespace, serve: Sequence[str], logs: Path) -> dict[str, Any]:
    """Every mode, one after the other.

    Returns:
        For JSON: what was asked, and of each mode its figures or its error. The size of the GPU
        cache, and with it the number of chats, is that of the first server that says it.
    """
    load = Load(asked.history, asked.new, asked.answer, asked.turns, asked.at_once, asked.seed)
    document: dict[str, Any] = {
        "version": __version__, "vllm": _bootstrap.status()["release"], "model": asked.model,
        "arguments": list(serve), "cpu_gib": asked.gib, "load": dataclasses.asdict(load),
        "chats": asked.chats, "gpu_tokens": None, "modes": {},
    }  # fmt: skip
    for mode in asked.chosen:
        say(f"{modes.TITLES[mode]}: starting")
        port = free_port()
        words = [*_arguments(asked, serve, load, port), *serve]
        command = modes.command(mode, asked.gib, asked.model, words)
        environ = modes.environment(mode, asked.gib, os.environ)
        try:
            with Server(
                command, environ, port, logs / f"{mode}.log", asked.start_timeout
            ) as server:
                document["modes"][mode] = _played(server, mode, load, document)
        except ServerFailed as error:
            say(f"{modes.TITLES[mode]}: {error}")
            document["modes"][mode] = {"error": str(error)}
    return document


def _played(server: Server, mode: str, load: Load, document: dict[str, Any]) -> dict[str, Any]:
    if document["gpu_tokens"] is None:
        document["gpu_tokens"] = server.gpu_tokens()
    if not document["chats"]:
        if document["gpu_tokens"] is None:
            raise server.failure(
                "expected vllm:cache_config_info under /metrics, found none, so it is not known how"
                " many chats exceed the GPU cache; say it by --chats"
            )
        document["chats"] = load.chats_for(document["gpu_tokens"])
    say(f"{modes.TITLES[mode]}: {document['chats']} chats of {load.turns} turns")
    return loads.play(server, load, document["chats"])


def _arguments(asked: argparse.Namespace, serve: Sequence[str], load: Load, port: int) -> list[str]:
    """What every server gets besides what the user has given."""
    words = ["--host", HOST, "--port", str(port), "--enable-prompt-tokens-details"]
    if asked.gpu_blocks is None:
        asked.gpu_blocks = GPU_BLOCKS if modes.installed()[1] else CPU_BLOCKS
    if asked.gpu_blocks:
        words += ["--num-gpu-blocks-override", str(asked.gpu_blocks)]
    if not _given("--max-model-len", serve):
        words += ["--max-model-len", str(load.longest)]
    return words


def _given(option: str, serve: Sequence[str]) -> bool:
    """Whether an option is among arguments; vLLM takes underscores as well."""
    names = {word.partition("=")[0].replace("_", "-") for word in serve}
    return option in names


def _chosen(text: str | None) -> list[str]:
    """The modes to play: those named, or all that can run.

    Raises:
        BenchRefused: a name is unknown, or a mode that is named cannot run.
    """
    names = list(modes.TITLES) if text is None else text.split(",")
    if any(name not in modes.TITLES for name in names):
        known = ", ".join(modes.TITLES)
        raise BenchRefused(
            f"--modes is {text!r}, expected some of {known}, separated by commas; correct it."
        )
    vllm, gpu = modes.installed()
    cannot = {name: why for name in names if (why := modes.unavailable(name, vllm, gpu))}
    if cannot and text is not None:
        raise BenchRefused(f"--modes: {'; '.join(cannot.values())}; leave it out.")
    for why in cannot.values() if vllm else ():  # without vLLM that is what is said
        say(f"left out: {why}.")
    return [name for name in dict.fromkeys(names) if name not in cannot]


def _missing(model: str) -> bool:
    """Whether a model is named by a path that is not there; other names are vLLM's to find."""
    is_path = model.startswith(("/", ".", "~")) or ("://" not in model and model.count("/") > 1)
    return is_path and not os.path.exists(model)


def _refusals(asked: argparse.Namespace, serve: Sequence[str], right: bool) -> list[str]:
    """A sentence for all that is wrong before a server starts; fills in ``gib`` and ``chosen``.

    ``right``: nothing was found wrong before.
    """
    wrong = []
    if _missing(asked.model):
        wrong.append(
            f"--model is {asked.model!r}, expected a model that is there, found no such file or "
            "folder; correct it."
        )
    try:
        asked.gib = _gib(asked.cpu_gib)
    except (BenchRefused, ConfigError) as refusal:
        wrong.append(str(refusal))
    if taken := [option for option in _SET_HERE if _given(option, serve)]:
        wrong.append(
            f"expected no {' and no '.join(taken)} behind --, which bench sets itself; leave out"
            " what it sets."
        )
    if asked.out is not None and (found := _unwritable(asked.out)):
        wrong.append(
            f"--out is {str(asked.out)!r}, expected a folder to write to, found {found}; give "
            "another one."
        )
    try:
        if asked.modes is not None or (right and not wrong):  # or else it is not said what runs
            asked.chosen = _chosen(asked.modes)
    except BenchRefused as refusal:
        wrong.append(str(refusal))
    if right and not wrong and modes.ON in asked.chosen:
        os.environ["KVOFFLOAD_CPU_GIB"] = f"{asked.gib:g}"
        outcome = preflight.decide()
        if outcome.disabled:
            wrong.append("expected a tier to compare, found KVOFFLOAD_DISABLE set; take it out.")
        elif outcome.refused:
            wrong.append(outcome.line.removeprefix("kvoffload_patch: "))
    return wrong


def _unwritable(folder: Path) -> str:
    """Why a folder cannot be made, or nothing written there; empty if it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return str(error.strerror)


def _gib(text: str | None) -> float:
    """CPU memory of each mode that has some.

    Raises:
        ConfigError: it is no size.
        BenchRefused: nobody has said it, and this machine has too little.
    """
    if text is not None:
        os.environ["KVOFFLOAD_CPU_GIB"] = text
        options = os.environ.get("KVOFFLOAD_OPTIONS", "")
        os.environ["KVOFFLOAD_OPTIONS"] = ",".join(filter(None, [options, "KVOFFLOAD_CPU_GIB"]))
    given = Settings.from_env().cpu_gib
    if given != AUTO:
        return float(given)
    room = shareable()
    size = math.floor(10 * min(MOST_AUTO_GIB, auto_bytes(room.nbytes) / GIB)) / 10
    if size <= 0:
        raise BenchRefused(f"expected memory for a tier, found {room}; free some.")
    return size


def _show(document: dict[str, Any], asked: argparse.Namespace) -> None:
    as_json = json.dumps(document, indent=1)
    print(as_json if asked.json else f"{report.about(document)}\n\n{report.table(document)}")
    if asked.out is None:
        return
    (asked.out / "bench.json").write_text(as_json + "\n")
    if not report.draw(document, asked.out / "bench.png"):
        say("no picture was drawn: expected matplotlib, found none; pip install matplotlib.")
    say(f"written to {asked.out}")


def _parser() -> Parser:
    parser = Parser(
        prog="kvoffload bench",
        usage="%(prog)s --model MODEL [options] [-- ARGUMENT ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("--model", required=True, help="as for `vllm serve`")
    add("--modes", help=f"some of {','.join(modes.TITLES)}; default: all that can run here")
    add("--cpu-gib", metavar="GIB", help="CPU memory of each mode that has some; default: "
        f"KVOFFLOAD_CPU_GIB, or {MOST_AUTO_GIB:g} at most")  # fmt: skip
    count = parser.add_value
    count("--gpu-blocks", *whole(0, 10**8), metavar="N", help="blocks of the GPU cache; 0: as "
        f"many as vLLM takes; default: {GPU_BLOCKS}, {CPU_BLOCKS} on a CPU")  # fmt: skip
    count("--chats", *whole(0, 10**6), metavar="N", default=0, help="conversations; default: "
        f"{loads.WORKING_SET:g} times what the GPU cache holds")  # fmt: skip
    for name, least, most, default, text in (
        ("history", 16, 10**7, 2000, "tokens of a chat's first prompt"),
        ("new", 1, 10**6, 64, "tokens that a later turn adds"),
        ("answer", 2, 10**6, 32, "tokens of an answer"),
        ("turns", 2, 1000, 3, "requests of a chat"),
        ("at-once", 1, 4096, 4, "requests at a time"),
        ("seed", 0, 10**8, 0, "another seed, other tokens"),
        ("start-timeout", 1, 10**6, 900, "seconds that a server may take to start"),
    ):
        count(f"--{name}", *whole(least, most), default=default, metavar="N",
              help=f"{text}; default: %(default)s")  # fmt: skip
    add("--out", type=Path, metavar="DIR", help="also write bench.json, bench.png and logs there")
    add("--json", action="store_true", help="one JSON object, for programs")
    return parser
