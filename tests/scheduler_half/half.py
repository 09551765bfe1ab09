"""The scheduler half of one release: `python half.py RELEASE SOURCES [SCENARIO ...]`.

SOURCES is the folder that has the release's `vllm/`. Prints one JSON object; status 1 if a
scenario has failed. Runs in a process of its own, because it decides which vLLM that process has.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_TESTS.parent), str(_TESTS)]


def use_release(release: str, folder: Path) -> None:
    """From now on, vLLM is this release in this process, and for `Mini`."""
    os.environ["KVOFFLOAD_VLLM_VERSION"] = release
    from scheduler_half import parts, sources

    sources.use(folder)
    from integration.engine.mini import Release

    Release.version = release
    Release.find = staticmethod(lambda module: _source(folder, module))
    Release.config = staticmethod(parts.make_config)


def run(names: list[str]) -> dict[str, dict[str, Any]]:
    """Of each scenario: "passed", "absent" or "failed", seconds, and what was seen or why."""
    from scheduler_half.scenarios import SCENARIOS

    return {name: _outcome(SCENARIOS[name]) for name in names or SCENARIOS}


def _outcome(scenario: Any) -> dict[str, Any]:
    from scheduler_half.scenarios import NotThere

    start = time.perf_counter()
    outcome: dict[str, Any]
    try:
        outcome = {"outcome": "passed", "seen": scenario()}
    except NotThere as reason:
        outcome = {"outcome": "absent", "why": str(reason)}
    except Exception:  # noqa: BLE001 - it is the outcome
        outcome = {
            "outcome": "failed",
            "why": "".join(traceback.format_exc().splitlines(True)[-12:]),
        }
    return {**outcome, "seconds": round(time.perf_counter() - start, 2)}


def _source(folder: Path, module: str) -> Path:
    base = folder.joinpath(*module.split("."))
    for candidate in (base / "__init__.py", base.with_suffix(".py")):
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(str(base.with_suffix(".py").relative_to(folder)))


def main(release: str, folder: str, *names: str) -> int:
    """Print the outcomes."""
    use_release(release, Path(folder).resolve())
    scenarios = run(list(names))
    failed = [name for name, one in scenarios.items() if one["outcome"] == "failed"]
    print(json.dumps({"release": release, "scenarios": scenarios}, indent=1))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
