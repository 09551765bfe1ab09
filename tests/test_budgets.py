"""How much code there may be: in a file, in a function, and in the patching layer as a whole.

Of tests/ the modules that tests share are counted, and files of tests are not: these are lists.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, SCRIPTS = ROOT / "kvoffload_patch", ROOT / "scripts"
TESTS = ROOT / "tests"
LISTS = {TESTS / "scheduler_half" / "scenarios.py"}  # of scenarios, one after the other
SHARED = {file for file in TESTS.rglob("*.py") if not file.name.startswith("test_")} - LISTS
FILES = sorted([*PACKAGE.rglob("*.py"), *SCRIPTS.rglob("*.py"), *SHARED])

FILE_LINES = 400
FUNCTION_LINES = 40
PATCHING_LINES = 1620


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


def lines_of(file: Path) -> int:
    return len(file.read_text().splitlines())


def functions_of(source: str) -> Iterator[tuple[str, int]]:
    """Each function and its lines from ``def`` to its end, without its docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                docstring = node.body[0]
                lines -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
            yield f"{node.name} (line {node.lineno})", lines


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_a_file_is_short(file: Path) -> None:
    assert lines_of(file) <= FILE_LINES


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_every_function_is_short(file: Path) -> None:
    found = functions_of(file.read_text())
    assert [(name, lines) for name, lines in found if lines > FUNCTION_LINES] == []


def test_the_patching_layer_is_small() -> None:
    files = [file for file in FILES if file.parent == PACKAGE / "patching"]
    assert len(files) > 3
    assert sum(lines_of(file) for file in files) <= PATCHING_LINES


@pytest.mark.parametrize("folder", [PACKAGE, SCRIPTS, TESTS], ids=lambda folder: folder.name)
def test_files_are_found_to_be_counted(folder: Path) -> None:
    assert len([file for file in FILES if folder in file.parents]) > 20


def test_lines_are_counted_from_def_to_end_without_the_docstring() -> None:
    source = '@decorated\ndef f(\n    a,\n):\n    """One.\n\n    Two.\n    """\n    return a\n'
    assert list(functions_of(source)) == [("f (line 2)", 4)]
