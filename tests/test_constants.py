"""Numbers that tune behaviour stand in one place a layer, each with its unit and what set it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "kvoffload_patch"
LAYERS = [PACKAGE / "integration", PACKAGE / "transfer", PACKAGE / "tier"]
TUNING = sorted(PACKAGE.rglob("tuning.py"))
UNITS = ("BYTES", "S", "MS", "BLOCKS", "TOKENS", "REQUESTS", "SLICES", "COPIES", "BUFFERS")
UNITS += ("THREADS", "PROGRAMS", "REPEATS", "PARTS", "PIECES", "TIMES", "WORDS", "GROUPS", "STEPS")
UNITS += ("ADAPTERS", "CHARACTERS", "LOADS")
# Numbers of other modules: they say what is so, or how it is shown, and tune nothing.
FACTS = {
    "AGAIN",
    "ALIGNMENT",
    "COUNT_BITS",
    "GIB",
    "MAIN",
    "MIX",
    "ONCE",
    "PLACE",
    "SMALL",
    "_REASONS",
    "_ALIGNMENT",
    "_HUGE_PAGE",
    "_LAST_KERNEL_WITHOUT",
    "_LONG_BITS",
    "_MAP_NORESERVE",
    "_MPOL_PREFERRED",
    "_NOT_SUPPORTED",
    "_DEVICE_AND_HOST",
    "_ON_DEVICE",
    "_ON_HOST",
    "_PINNED",
    "_SECONDS",
    "_POINTER",
    "_STREAM_ORDER",
    "_TO_DEVICE",
    "_TO_HOST",
    "_VECTOR",
    "_WORD",
}


# Files that read the wall clock.
SAID = {"cli/engines.py", "cli/top.py", "integration/engine/control.py"}
SAID |= {"integration/engine/reports/spans.py"}


def numbers_of(file: Path) -> Iterator[tuple[str, int]]:
    """Names of a module that are given a number, or arithmetic of numbers, and their lines."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and _is_number(node.value):
            names = [n.id for n in ast.walk(node.targets[0]) if isinstance(n, ast.Name)]
            yield from ((name, node.lineno) for name in names)


def _is_number(node: ast.AST) -> bool:
    if isinstance(node, ast.Tuple):
        return bool(node.elts) and all(_is_number(each) for each in node.elts)
    if isinstance(node, ast.BinOp):
        return _is_number(node.left) or _is_number(node.right)
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def test_numbers_that_tune_behaviour_stand_in_one_place_a_layer() -> None:
    others = [file for layer in LAYERS for file in layer.rglob("*.py") if file not in TUNING]
    found = {name for file in others for name, _ in numbers_of(file)}
    assert found == FACTS


def test_nothing_is_timed_by_the_wall() -> None:
    """It can be set while the engine runs: deadlines, pauses and intervals would be any length."""
    sources = {file: file.read_text() for file in PACKAGE.rglob("*.py")}
    assert sum("time.monotonic()" in text for text in sources.values()) > 5
    wall = re.compile(r"time\.time\(|time_ns\(|datetime|localtime|gmtime")
    found = {str(file.relative_to(PACKAGE)) for file, text in sources.items() if wall.search(text)}
    # What is said to people, and nothing is done by it.
    assert found == SAID


@pytest.mark.parametrize("file", TUNING, ids=lambda file: file.parent.name)
def test_each_has_its_unit_and_says_what_set_it(file: Path) -> None:
    lines = file.read_text().splitlines()
    rows = list(numbers_of(file))
    assert len(rows) > 3
    assert [name for name, _ in rows if name.rpartition("_")[2] not in UNITS] == []
    for name, line in rows:
        above = line - 2
        while above >= 0 and re.match(r"[A-Z]", lines[above]):
            above -= 1  # numbers of one comment
        assert lines[above].startswith("# "), f"{name}: a comment says what set it"
