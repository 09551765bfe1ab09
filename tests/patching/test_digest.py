"""Digests: what counts, what does not, and that every Python gives the same."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvoffload_patch.patching import digest

# With what Pythons have parsed in different ways: f-strings, unusual texts and numbers, decorators.
SAMPLE = r'''
@decorated(1, key="ä")
def step(self, a: "int", /, b=1.5e300, *args: object, c: list[int] = [], **more) -> tuple[int, ...]:
    """Words."""
    def inner(): "Only words."
    class Kept:
        """More words."""
        x: int = 10 ** 9
    text = f"a{a!r:>{b}}" "b" f"{{c}}{c=}" f"{b:}" + "\ud800\u0378" + u"u" + "\x00"
    data = {**more, None: b"\xff", "k": ..., 1j: -0.0, 2: 123456789012345678901234567890}
    with open(a) as f, b:
        async def later(): return [x async for x in await y() if x]
    try:
        (yield a), lambda q=1, *z: q
    except (A, B) as error:
        raise C from error
    finally:
        del a[1:2, ::3], b.c; global g
    return text if (n := a @ b) is not c else (*data, 0x1F, 1_000)
'''
EXPECTED = "0beaad158ced7888"
PRINT = f"""
import ast, importlib.util, sys
spec = importlib.util.spec_from_file_location("digest", {digest.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.of_function(ast.parse(sys.stdin.read()).body[0]))
"""


def of(text: str) -> str:
    return digest.of_function(ast.parse(text).body[0])


def others() -> list[str]:
    """Pythons of other versions on this machine."""
    folder = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = {}
    for minor in range(9, 16):
        on_path = shutil.which(f"python3.{minor}")
        for python in (on_path, *sorted(map(str, folder.glob(f"3.{minor}.*/bin/python")))):
            if python and minor != sys.version_info.minor:
                done = subprocess.run([python, "-c", "import ast"], capture_output=True)
                if done.returncode == 0:
                    found[minor] = python
    return list(found.values())


def test_a_digest_does_not_depend_on_the_python() -> None:
    assert of(SAMPLE) == EXPECTED


@pytest.mark.parametrize("python", others() or [sys.executable])
def test_another_python_gives_the_same(python: str) -> None:
    done = subprocess.run(
        [python, "-c", PRINT], input=SAMPLE, text=True, capture_output=True, check=True,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    assert done.stdout.strip() == EXPECTED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Words", "Other words"),
        ('"Only words."', "'Different.'"),
        ("a @ b", "a   @ (b)"),
        ("    return", "    # remark\n\n    return"),
        ('"b" f"{{c}}', 'f"b{{c}}'),
        ("0x1F", "31"),
    ],
)
def test_words_remarks_and_spelling_do_not_count(old: str, new: str) -> None:
    assert old in SAMPLE and of(SAMPLE.replace(old, new)) == of(SAMPLE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("b=1.5e300", "b=1.5"),
        ('"int", /', '"int"'),
        ("c: list[int]", "c: list[str]"),
        ("def step", "def walk"),
        ("def step", "async def step"),
        ('key="ä"', 'key="a"'),
        ("a!r", "a!s"),
        (":>{b}", ":<{b}"),
        ("{{c}}", "{c}"),
        ("None: b", "0: b"),
        ("1j: -0.0", "1j: 0.0"),
        ("is not c", "is c"),
        ('b"\\xff"', '"\\xff"'),
        ("if x]", "]"),
        ("return text", "yield text"),
        ("from error", ""),
        ("x: int = 10", "x = 10"),
        ("@decorated(1, ", "@decorated(True, "),
    ],
)
def test_what_is_computed_counts(old: str, new: str) -> None:
    assert old in SAMPLE and of(SAMPLE.replace(old, new)) != of(SAMPLE)


def test_neighbouring_values_cannot_be_taken_for_each_other() -> None:
    bodies = ["f('a', 'b')", "f('ab')", "f('a' 'b', '')", "f(['a', 'b'])", "f('a')['b']", "f(1)"]
    bodies += ["f('1')", "f(1.0)", "f(True)", "f('True')", "f(x='a')", "f(**{'x': 'a'})", "pass"]
    digests = [of(f"def g():\n {body}") for body in bodies]
    assert len(set(digests)) == len(bodies)


def test_a_file_that_is_not_there_has_no_digest_of_a_file() -> None:
    assert digest.of_file(None) != digest.of_file(b"") and digest.of_file(b"") == digest.of_file(
        b""
    )
