"""Names of eviction policies: those of this package stand in one place, and import none of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvoffload_patch.config import EVICTIONS, VARIABLES
from kvoffload_patch.policy_names import GROUP, POLICIES, entry_points
from kvoffload_patch.tier import policies

ROOT = Path(__file__).resolve().parents[1]
ROW = "POLICIES: dict[str, Row] = {\n"
FIFO = """
from kvoffload_patch.tier.policies.lru import LRUPolicy

class FifoPolicy(LRUPolicy):
    def hit(self, slots):
        pass
"""
ASK = """
from kvoffload_patch.config import EVICTIONS, Settings, VARIABLES
name = Settings.from_env({"KVOFFLOAD_EVICTION": "fifo"}).eviction
from kvoffload_patch.tier.policies import policy_named
print(name in EVICTIONS, policy_named(name).__name__)
print("what came first (fifo)" in VARIABLES["KVOFFLOAD_EVICTION"].description)
"""


@pytest.mark.parametrize("name", POLICIES)
def test_a_row_names_the_class_of_a_file(name: str) -> None:
    made = policies.POLICIES[name]
    assert (made.__name__, made.__module__) == (POLICIES[name].kind, f"{policies.__name__}.{name}")
    assert (ROOT / f"tests/tier/policies/test_{name}.py").is_file()


def test_configuration_and_tier_know_the_same() -> None:
    assert EVICTIONS == tuple(POLICIES) == tuple(policies.POLICIES)
    description = VARIABLES["KVOFFLOAD_EVICTION"].description
    assert all(f"({name})" in description for name in EVICTIONS)


def test_a_policy_is_its_file_and_a_row(tmp_path: Path) -> None:
    package = tmp_path / "kvoffload_patch"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "kvoffload_patch", package, ignore=ignored)
    (package / "tier/policies/fifo.py").write_text(FIFO)
    names = package / "policy_names.py"
    text = names.read_text()
    row = f'{ROW}    "fifo": Row("FifoPolicy", "what came first"),\n'
    names.write_text(text.replace(ROW, row))
    assert text.count(ROW) == 1
    assert _python(ASK, tmp_path) == ["True FifoPolicy", "True"]


def test_configuration_imports_no_policy_and_no_metadata() -> None:
    code = "import sys, kvoffload_patch.config as c; c.Settings.from_env({}); print(*sys.modules)"
    (line,) = _python(code, ROOT)
    ours = {name for name in line.split() if name.startswith("kvoffload_patch.")}
    assert ours == {"kvoffload_patch.config", "kvoffload_patch.policy_names"}
    assert "importlib.metadata" not in line.split()


def test_a_name_without_an_entry_point_has_none() -> None:
    assert entry_points("no policy of any package") == []
    assert GROUP == "kvoffload_patch.policies"


def _python(code: str, folder: Path) -> list[str]:
    """What a Python prints that finds the package in this folder, line by line."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("KVOFFLOAD")}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=folder, capture_output=True, text=True,
        check=False, env={**environ, "PYTHONPATH": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
