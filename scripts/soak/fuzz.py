"""python scripts/soak fuzz [--targets config,patch,control] [--minutes 2] [--out DIR]

Has atheris make up environments, patch files and control messages, led by the branches that they
reach. Each must give a value or the one error that its parser documents, within 5 s and 1 GiB.
Ends with status 1 if one did not; its bytes are then in --out, and its traceback has been printed.
How many were tried goes to fuzz.json there, for `page`.
Needs `pip install atheris`; the tests do the same with hypothesis, for a shorter time.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from kvoffload_patch import config as config_of
from kvoffload_patch.cli import patch_files
from kvoffload_patch.config import ConfigError, Settings, as_given, is_enabled
from kvoffload_patch.control import wire
from kvoffload_patch.control.commands import ARGUMENTS, LIVE, read_command
from kvoffload_patch.control.errors import Refused
from scripts import ROOT
from scripts.bench import arguments
from scripts.bench.common import machine, say, write_json

# Of one input; and of all together, atheris itself included.
TIMEOUT_S, MOST_MIB, MOST_BYTES = 5, 1024, 8192


def config(data: bytes) -> None:
    """NAME=VALUE, separated by zeros, as an environment."""
    environ = _pairs(data)
    for read in (Settings.from_env, is_enabled):
        try:
            read(environ)
        except ConfigError as error:
            as_given(str(error), environ)


def patch(data: bytes) -> None:
    """A patch file; what it is taken for is put into a file, and out of it again."""
    try:
        found = patch_files.parse(data)
    except patch_files.BadPatchFile:
        return
    found.state(data)
    found.add_lines(data)


def control(data: bytes) -> None:
    """What comes in on a control socket; and NAME=VALUE, separated by zeros, as a message."""
    for message in (lambda: wire.parse(data), lambda: _pairs(data)):
        try:
            read_command(message())
        except Refused as refusal:
            # The sentence is sent back, whatever was asked.
            text = json.dumps({"error": str(refusal)})
            if len(text) > wire.ANSWER_BYTES:
                raise AssertionError(f"a refusal of {len(text)} bytes") from refusal


def _pairs(data: bytes) -> dict[str, str]:
    pairs = [os.fsdecode(part).partition("=") for part in data.split(b"\0")]
    return {name: value for name, _, value in pairs}


TARGETS: dict[str, Callable[[bytes], None]] = {"config": config, "patch": patch, "control": control}
_PATCH = (
    b"# text\n# sha256 vllm/a.py " + b"0" * 64 + b" " + b"1" * 64 + b"\n--- a/vllm/a.py\n"
    b"+++ b/vllm/a.py\n@@ -1,0 +2,2 @@\n+x = 1\n+y = 2\n"
)
SEEDS: dict[str, list[bytes]] = {
    "config": [
        b"KVOFFLOAD_ENABLE=1\0KVOFFLOAD_CPU_GIB=1.5e1\0KVOFFLOAD_OPTIONS=KVOFFLOAD_CPU_GIB",
        b"KVOFFLOAD_INTEGRITY=full\0KVOFFLOAD_LOAD_MODE=inline\0KVOFFLOAD_STRICT=no",
        b"KVOFFLOAD_ENABL=1\0KVOFFLOAD_DISABLE=x\0KVOFFLOAD_LOG_INTERVAL=.5",
    ],
    "patch": [_PATCH],
    "control": [
        b'{"command": "resize", "gib": "24"}\n',
        b'{"command": "set", "eviction": "lru", "max_stall_ms": "50"}\n',
        b'{"command": "status"}\n',
        b"command=set\0eviction=lru\0load_mode=auto\0max_stall_ms=5.5\0log_interval=2",
    ],
}
_CHOICES = (*config_of.LOAD_MODES, *config_of.EVICTIONS, *config_of.STORES, *config_of.INTEGRITIES)
# Parts of inputs that are not come upon by changing bits: names, choices, lines of a patch file.
WORDS: dict[str, list[str]] = {
    "config": [
        *config_of.VARIABLES, *_CHOICES, *config_of.COPY_BACKENDS, "=", "\0", "1e300", "nan",
    ],
    "patch": [
        "# sha256 vllm/a.py ", "--- a/vllm/a.py", "+++ b/vllm/a.py", "@@ -1,0 +2,2 @@", "\n+",
    ],
    "control": [
        *ARGUMENTS, *LIVE, *_CHOICES, '"', ": ", "gib", "command", "\\ud800", "1e300", "\0",
    ],
}  # fmt: skip


def dictionary(words: list[str]) -> str:
    """Words in the form that libFuzzer reads: one a line, in quotes."""
    shown = (re.sub(r'[^ -~]|["\\]', lambda c: f"\\x{ord(c[0]):02x}", word) for word in words)
    return "".join(f'"{word}"\n' for word in shown)


def child(target: str, folder: Path, seconds: float) -> list[str]:
    """The command line that fuzzes one target, with a corpus and findings in a folder."""
    corpus = folder / f"corpus-{target}"
    corpus.mkdir()
    for number, seed in enumerate(SEEDS[target]):
        (corpus / str(number)).write_bytes(seed)
    (folder / "words").write_text(dictionary(WORDS[target]))
    return [
        sys.executable, "-m", "scripts.soak.fuzz", target, str(corpus),
        f"-dict={folder}/words", f"-max_total_time={seconds:.0f}", f"-timeout={TIMEOUT_S}",
        f"-rss_limit_mb={MOST_MIB}",
        f"-max_len={MOST_BYTES}", f"-artifact_prefix={folder}/{target}-", "-print_final_stats=1",
    ]  # fmt: skip


def played(target: str, seconds: float, out: Path) -> dict[str, Any]:
    """Fuzz one target: its exit status, what was found, and what atheris says of it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process = subprocess.Popen(
            child(target, folder, seconds), cwd=ROOT, stderr=subprocess.PIPE,
            text=True, errors="replace",
        )  # fmt: skip
        said = figures(_shown(process.stderr or ()))
        status = process.wait()
        found = [file for file in folder.glob(f"{target}-*") if file.is_file()]
        for file in found:
            shutil.move(file, out / file.name)
    return {"status": status, "found": [file.name for file in found], **said}


def figures(lines: Iterable[str]) -> dict[str, int]:
    """What `-print_final_stats` says, and the branches that were reached, by the last line."""
    found = {}
    for line in lines:
        stat = re.match(r"stat::(\w+):\s+(\d+)", line)
        if stat is not None:
            found[stat[1]] = int(stat[2])
        reached = re.match(r"#\d+\s+\w+\s+cov: (\d+)", line)
        if reached is not None:
            found["branches"] = int(reached[1])
    return found


def _shown(lines: Iterable[str]) -> Iterable[str]:
    for line in lines:
        sys.stderr.write(line)
        yield line


def main() -> int:
    """Every target in a process of its own, which atheris ends."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--minutes", type=arguments.positive, default=2.0, help="for each target")
    parser.add_argument(
        "--out", type=arguments.filled, default=Path("soak-out"), help="for what is found"
    )
    args = parser.parse_args()
    targets = args.targets.split(",")
    if not set(targets) <= set(TARGETS):
        parser.error(f"--targets: expected some of {','.join(TARGETS)}, found {args.targets}")
    if importlib.util.find_spec("atheris") is None:
        parser.error("expected atheris to be installed, found it missing; pip install atheris")
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    about = {**machine(), "atheris": metadata.version("atheris"), "minutes": args.minutes}
    for target in targets:
        one = results[target] = played(target, 60 * args.minutes, args.out)
        status = f"status {one['status']}"
        say(f"{target}: {', '.join(one['found']) or status}")
        write_json(args.out / "fuzz.json", {"machine": about, "fuzzed": results})
    return 1 if any(one["found"] or one["status"] for one in results.values()) else 0


def _fuzz() -> None:
    """In the child: what is tested is imported again, so that its branches are seen."""
    import atheris

    for name in [name for name in sys.modules if name.partition(".")[0] == "kvoffload_patch"]:
        del sys.modules[name]
    with atheris.instrument_imports(include=["kvoffload_patch"]):
        from scripts.soak import fuzz  # this file again, under its own name
    target = fuzz.TARGETS[sys.argv.pop(1)]
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()


if __name__ == "__main__":
    _fuzz()
