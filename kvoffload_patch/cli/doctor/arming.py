"""Whether the patch arms here: shown by a child process that imports vLLM's engine core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvoffload_patch.cli.doctor.child import MARK, ask
from kvoffload_patch.cli.doctor.findings import Finding

TIMEOUT_S = 300.0  # importing vLLM takes 10 s, or minutes from a cold network disk
ENGINE = "vllm.v1.engine.core"

# No model and no device. The engine core imports the scheduler.
_CHILD = f"""\
import importlib, json, sys
started = "kvoffload_patch._bootstrap" in sys.modules
import kvoffload_patch
kvoffload_patch.enable()
importlib.import_module({ENGINE!r})
from kvoffload_patch.integration.install import installed
names = [f"{{owner.__module__}}.{{owner.__qualname__}}.{{name}}" for owner, name in installed()]
found = dict(started=started, installed=sorted(names))
print({MARK!r} + json.dumps(found), flush=True)
"""
_SWITCHES = {"KVOFFLOAD_ENABLE": "1", "KVOFFLOAD_DISABLE": "", "KVOFFLOAD_STRICT": "1"}


def check() -> list[Finding]:
    """Arm in a child, whatever the switches say here."""
    return judge(ask(_CHILD, TIMEOUT_S, **_SWITCHES))


def judge(found: Mapping[str, Any]) -> list[Finding]:
    """What the child's answer means."""
    wrapped = [name for name in found.get("installed", ()) if name.startswith(f"{ENGINE}.")]
    if not wrapped:
        why = found.get("error", f"nothing of {ENGINE} was wrapped")
        remedy = "start Python here and import vllm to see all of it"
        if "UnicodeDecodeError" in why:  # PyTorch reads files of its own as the locale says
            remedy = "set PYTHONUTF8=1, or a locale of UTF-8, such as LC_ALL=C.UTF-8"
        problem = f"a process that imports vLLM's engine was not armed ({why})"
        return [Finding("arming", "engine core", "not armed", False, problem, remedy, refused=True)]
    text = "runs by itself" if found["started"] else "does not run, so start with kvoffload COMMAND"
    return [
        Finding("arming", "engine core", f"armed, {len(wrapped)} functions wrapped", wrapped),
        Finding("arming", "start-up file", text, found["started"]),
    ]
