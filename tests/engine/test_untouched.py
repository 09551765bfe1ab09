"""Without the switch, or after a refusal, vLLM's classes are the objects that vLLM made."""

from __future__ import annotations

import subprocess
import sys

from engine import engines

from kvoffload_patch.integration.patch_table.points import POINTS, VLLM
from kvoffload_patch.patching import decide, installed_version

PRINT_CLASSES = """
import importlib
seen = {}
for name, module, attribute in POINTS:
    owner, _, method = attribute.rpartition(".")
    value = importlib.import_module(module)
    value = vars(getattr(value, owner) if owner else value)[method]
    assert type(value).__name__ in ("function", EXPECTED), (name, type(value))
    seen[name] = type(value).__name__
print("TYPES", sorted({(n in HOOKED, t) for n, t in seen.items()}))
"""
WRAPPED = "[(False, 'function'), (True, 'FunctionWrapper')]"
AS_MADE = "[(False, 'function'), (True, 'function')]"


def asking(expected: str) -> str:
    """Python code that says of what type the points are."""
    points = [p for p in decide(VLLM, POINTS, installed_version(VLLM)).points if not p.absent]
    hooked = [p.name for p in points if p.hook and p.on == "class"]
    listed = [(p.name, p.module, p.attribute) for p in points]
    return f"EXPECTED, HOOKED, POINTS = {expected!r}, {hooked!r}, {listed!r}\n{PRINT_CLASSES}"


def launched(code: str, **env: str) -> tuple[int, str]:
    """Run Python code through the command; its exit status, and what it printed."""
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


def test_the_switch_wraps_the_points_on_classes_and_no_others(real):
    code, out = real.warm.play({"code": asking("FunctionWrapper")}, {}, {})
    assert code == 0 and WRAPPED in out, out


def test_vllm_is_as_made_after_a_refusal():
    code, out = launched(asking("function"), KVOFFLOAD_VLLM_VERSION="0.34.0", KVOFFLOAD_STRICT="0")
    assert code == 0 and AS_MADE in out, out


def test_disabled_there_is_nothing_that_could_change_vllm():
    looks = "import sys; print([f for f in sys.meta_path if 'kvoffload' in type(f).__module__])"
    code, out = launched(looks, KVOFFLOAD_DISABLE="1")
    assert code == 0 and out.splitlines()[-1] == "[]", out
    code, out = launched(looks)
    assert code == 0 and "VLLMFinder" in out, "it looks for the wrong thing"


def test_an_unknown_release_is_refused_in_one_sentence():
    code, out = launched(asking("function"), KVOFFLOAD_VLLM_VERSION="0.34.0")
    assert code == 2
    assert out.strip().count("\n") == 0, out
    assert "0.34.0" in out and "not one of those verified" in out and "KVOFFLOAD_STRICT=0" in out
