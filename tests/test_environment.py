"""No module changes the process's environment while it is imported: the next one would inherit it.

A test process imports every module of tests and scripts before its first test.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Triton reads its variable as it is imported, and without a GPU kernels are run by its interpreter.
BEFORE_TRITON = ROOT / "tests" / "transfer" / "conftest.py"
FOLDERS = [ROOT / "kvoffload_patch", ROOT / "scripts", ROOT / "tests"]
FILES = sorted({file for folder in FOLDERS for file in folder.rglob("*.py")} - {BEFORE_TRITON})
CHANGES = {"setdefault", "update", "pop", "clear", "putenv", "unsetenv"}


def changes_at_import(source: str) -> Iterator[int]:
    """The lines outside functions that change ``os.environ``."""
    waiting: list[ast.AST] = list(ast.parse(source).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if _changes(node):
            yield node.lineno  # type: ignore[attr-defined]  # only expressions change it
        waiting += ast.iter_child_nodes(node)


def _changes(node: ast.AST) -> bool:
    if isinstance(node, ast.Subscript):
        return not isinstance(node.ctx, ast.Load) and "environ" in ast.unparse(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        on = ast.unparse(node.func.value)
        return node.func.attr in CHANGES and on in {"os.environ", "environ", "os"}
    return False


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_importing_a_module_leaves_the_environment_as_it_was(file: Path) -> None:
    assert list(changes_at_import(file.read_text())) == []


@pytest.mark.parametrize(
    "source",
    ['os.environ["A"] = "1"', 'os.environ.setdefault("A", "1")', 'if x:\n    os.putenv("A", "1")']
    + ['del os.environ["A"]', 'class A:\n    b = environ.pop("A")'],
)
def test_a_change_is_found(source: str) -> None:
    assert len(list(changes_at_import(source))) == 1


def test_what_a_function_does_is_not_counted() -> None:
    assert list(changes_at_import('def f():\n    os.environ["A"] = "1"\nb = os.environ["A"]')) == []
