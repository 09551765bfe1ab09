"""Without the switch, or after a refusal, vLLM's classes are the objects that vLLM made."""

from __future__ import annotations

import subprocess
import sys

import pytest
from engine import engines

PRINT_CLASSES = """
import importlib, sys
from kvoffload_patch.integration.points import POINTS
seen = {}
for point in POINTS:
    owner, method = point.attribute.split(".")
    value = vars(getattr(importlib.import_module(point.module), owner))[method]
    assert type(value).__name__ in ("function", EXPECTED), (point.name, type(value))
    seen[point.name] = type(value).__name__
print("TYPES", sorted({(n in HOOKED, t) for n, t in seen.items()}))
"""
WRAPPED = "[(False, 'function'), (True, 'FunctionWrapper')]"
AS_MADE = "[(False, 'function'), (True, 'function')]"


def types(expected: str, **env: str) -> tuple[int, str]:
    from kvoffload_patch.integration.points import POINTS

    hooked = [p.name for p in POINTS if p.hook]
    code = f"EXPECTED, HOOKED = {expected!r}, {hooked!r}\n{PRINT_CLASSES}"
    done = subprocess.run(
        [sys.executable, "-m", "kvoffload_patch", sys.executable, "-c", code],
        env=engines.environment(**env),
        cwd=engines.ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout


def test_the_switch_wraps_every_point_with_a_hook():
    code, out = types("FunctionWrapper")
    assert code == 0 and WRAPPED in out, out


@pytest.mark.parametrize(
    "env",
    [
        {"KVOFFLOAD_DISABLE": "1"},
        {"KVOFFLOAD_VLLM_VERSION": "0.34.0", "KVOFFLOAD_STRICT": "0"},
    ],
    ids=["disabled", "refused"],
)
def test_vllm_is_as_made(env):
    code, out = types("function", **env)
    assert code == 0 and AS_MADE in out, out


def test_an_unknown_release_is_refused_in_one_sentence():
    code, out = types("function", KVOFFLOAD_VLLM_VERSION="0.34.0")
    assert code == 2
    assert out.strip().count("\n") == 0, out
    assert "0.34.0" in out and ">=0.26,<0.33" in out and "KVOFFLOAD_STRICT=0" in out
