"""Tests marked `gpu` are collected on a machine that has little beside them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Beside pytest, torch, numpy and Triton, with what these need.
ABSENT = (
    "hypothesis", "matplotlib", "msgspec", "psutil", "rich", "transformers", "vllm", "wrapt",
    "xdist", "zmq",
)  # fmt: skip
_COLLECT = f"""
import sys
sys.modules.update(dict.fromkeys({ABSENT!r}))  # importing one of these fails
import pytest
words = "-m gpu --collect-only -q -p no:cacheprovider tests/transfer"
sys.exit(pytest.main(words.split()))
"""


def test_collecting_it_needs_pytest_torch_numpy_and_triton_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _COLLECT],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
    assert done.stdout.count("::") > 1000
