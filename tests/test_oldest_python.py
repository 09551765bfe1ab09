"""What the oldest Python that the package is for, 3.9, cannot run and newer ones can."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "kvoffload_patch"
_CLASS = re.compile(r"_?[A-Z]\w*[a-z]\w*|int|str|bytes|float|bool|dict|list|set|tuple")


def evaluated(node: ast.AST) -> list[ast.BinOp]:
    """Every ``|`` that is carried out: not those of annotations, which stay texts."""
    found = [node] if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) else []
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                found += evaluated(child) if isinstance(child, ast.AST) else []
    return found


def is_type(node: ast.expr) -> bool:
    """Whether it is a class by its name, one with parameters, or None."""
    if isinstance(node, ast.Subscript):
        return is_type(node.value)
    if isinstance(node, ast.Constant):
        return node.value is None
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return _CLASS.fullmatch(name) is not None


def test_no_union_of_types_is_made_by_an_operator() -> None:
    """It raises there, when its module is imported: with it goes whatever imports that."""
    for file in PACKAGE.rglob("*.py"):
        for union in evaluated(ast.parse(file.read_text())):
            assert not is_type(union.left) and not is_type(union.right), (file, union.lineno)


def test_such_a_union_is_seen() -> None:
    for text in ("A = Mapping[str, int] | None", "A = Queue | OtherQueue", "f(x, int | str)"):
        (union,) = evaluated(ast.parse(text))
        assert is_type(union.left) or is_type(union.right)
    assert evaluated(ast.parse("def f(x: int | None) -> A | B: ...")) == []
