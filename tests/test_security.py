"""What SECURITY.md says of files, variables and test hooks, read from the package and tried."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox import ROOT

from kvoffload_patch.config import VARIABLES

PACKAGE = ROOT / "kvoffload_patch"
TEXT = (ROOT / "SECURITY.md").read_text()

# All that makes a file, a folder, a socket or memory with a name, by module. What is new here has a
# mode, an end, and a place in SECURITY.md.
MAKES = {
    # TemporaryFile: without a name, gone at once; whether the folder can be written to.
    "cli/bench/command.py": {"TemporaryDirectory", "TemporaryFile", "mkdir", "write_text"},
    "cli/bench/picture.py": {"savefig"},
    "cli/bench/server.py": {"bind", "open"},
    "cli/patch_files.py": {"mkstemp"},
    "cli/watch.py": {"write_text"},  # the name of its own process
    "control/folder.py": {"mkdir"},
    "control/listener.py": {"bind"},
    "integration/shared_files.py": {"memfd_create"},
    "launch_token.py": {"bind", "memfd_create"},  # a socket without a file
}
MAKERS = {
    "mkdir", "makedirs", "mkstemp", "mkdtemp", "TemporaryDirectory", "NamedTemporaryFile",
    "TemporaryFile", "memfd_create", "SharedMemory", "write_text", "write_bytes", "savefig",
    "symlink", "link", "mkfifo", "mknod", "copyfile", "copytree", "copy2",
}  # fmt: skip
# Variables of others that the package asks for by name.
OTHERS = {
    "PYTHONPATH",
    "TERM",
    "XDG_RUNTIME_DIR",
    "VLLM_USE_SIMPLE_KV_OFFLOAD",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
}
# By a name that a constant has.
BY_CONSTANT = {"VLLM_CPU_KVCACHE_SPACE", "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"}  # fmt: skip


def calls(file: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call):
            yield getattr(node.func, "attr", getattr(node.func, "id", "")), node


def makes(file: Path) -> set[str]:
    found = set()
    for name, call in calls(file):
        words = [word.value for word in call.args if isinstance(word, ast.Constant)]
        written = any(re.fullmatch(r"[wxa]b?\+?|rb?\+", str(word)) for word in words)
        created = len(call.args) == 3 and ast.unparse(call.func) == "os.open"
        bound = name == "bind" and len(call.args) == 1
        if name in MAKERS or bound or (name == "open" and (written or created)):
            found.add(name)
    return found


def test_whatever_makes_a_file_is_listed() -> None:
    found = {str(file.relative_to(PACKAGE)): makes(file) for file in PACKAGE.rglob("*.py")}
    assert {name: calls for name, calls in found.items() if calls} == MAKES


def names(text: str) -> set[str]:
    return set(re.findall(r"\bKVOFFLOAD_[A-Z_]*[A-Z]\b", text))


def test_no_variable_changes_what_is_done_but_those_of_the_table() -> None:
    """A hook for tests would be one, and would be reachable in a release."""
    files = [*PACKAGE.rglob("*.py"), ROOT / "kvoffload_patch.pth", *(ROOT / "patches").glob("*")]
    assert set().union(*(names(file.read_text()) for file in files)) <= set(VARIABLES)
    asked = set()
    for file in PACKAGE.rglob("*.py"):
        for name, call in calls(file):
            of = ast.unparse(call.func)
            if name in ("get", "getenv", "setdefault", "pop") and ("environ" in of or "env" in of):
                asked |= {str(a.value) for a in call.args[:1] if isinstance(a, ast.Constant)}
    assert asked - set(VARIABLES) - {""} <= OTHERS
    internal = {name for name, row in VARIABLES.items() if row.description.startswith("internal")}
    told = names((ROOT / "docs/tuning.md").read_text())
    assert told == set(VARIABLES) - internal
    assert set(re.findall(r"`([A-Z_]+)`", TEXT)) >= OTHERS | BY_CONSTANT


def test_variables_that_weaken_a_check_are_named() -> None:
    for name in ("ALLOW_UNVERIFIED", "VLLM_VERSION", "STRICT"):
        assert f"`KVOFFLOAD_{name}" in TEXT


def test_nothing_that_is_installed_knows_the_tests() -> None:
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported = [one.name for one in node.names]
            elif isinstance(node, ast.ImportFrom):
                imported = [node.module or ""]
            else:
                continue
            known = {name.partition(".")[0] for name in imported}
            assert known.isdisjoint({"tests", "scripts", "pytest", "hypothesis", "unittest"}), file


# Makes all that an engine, its ranks and commands make, where a new file would be open to all.
MAKE_ALL = """
import json, os, sys
os.umask(0)
from pathlib import Path
from kvoffload_patch import launch_token
from kvoffload_patch.cli import patch_files
from kvoffload_patch.control import client, folder
from kvoffload_patch.control.listener import Listener
from kvoffload_patch.integration import slot_counts

root = Path(sys.argv[1])
host = root / "host.py"
host.write_bytes(b"old")
host.chmod(0o640)
before = {str(path) for path in root.rglob("*")}

listener = Listener(lambda command: {})
board = slot_counts.make_slot_counts([0, 1])
patch_files.write(host, b"new")
(engine,) = [one for one in client.find() if root in one.path.parents]  # not others that run
client.ask(engine, "status")
made = {p: oct(os.stat(p).st_mode & 0o777) for p in map(str, root.rglob("*")) if p not in before}
made["shared"] = oct(os.stat(board.address.path).st_mode & 0o777)
made["host"] = oct(host.stat().st_mode & 0o777)
listener.close()
board.close()
left = [str(path) for path in root.rglob("*") if str(path) not in before]
print(json.dumps({"made": made, "left": left, "host": host.read_text()}))
"""


def test_what_is_made_is_its_users_alone_and_goes(tmp_path: Path) -> None:
    kept = {key: text for key, text in os.environ.items() if not key.startswith("KVOFFLOAD_")}
    own = {"XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", MAKE_ALL, str(tmp_path)],
        env={**kept, **own}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    made = found["made"]
    assert made.pop("host") == "0o640", "a file that is replaced keeps its mode"
    assert sorted(made.values()) == ["0o600", "0o600", "0o700"]
    assert found["left"] == [] and found["host"] == "new"


@pytest.mark.parametrize(
    "subject",
    [
        "## Tenants", "cache_salt", "**Timing.**", "core dumps", "MADV_DONTDUMP",
        "**The start-up file**", "**The control socket**", "**Tests.**", "## What is left behind",
        "Who can change what it does", "KVOFFLOAD_WIPE",
    ],
)  # fmt: skip
def test_the_threat_model_has_its_subjects(subject: str) -> None:
    assert subject in TEXT
