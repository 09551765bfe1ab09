"""What is made is used: a rule of the tier that nobody asks is not a rule.

By name alone, over the whole package: it finds what no line refers to, and no more than that.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "kvoffload_patch"


@cache
def _trees() -> list[ast.Module]:
    return [ast.parse(file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))]


@cache
def _nodes() -> list[ast.AST]:
    return [node for tree in _trees() for node in ast.walk(tree)]


# The first two are for tests and benchmarks, which switch the patches off and read what ranks
# report; setup.cfg names the third.
ELSEWHERE = {"disarm", "done_on", "plugin"}


def _referred_to() -> set[str]:
    names = {node.id for node in _nodes() if isinstance(node, ast.Name)}
    names |= {n.attr for n in _nodes() if isinstance(n, ast.Attribute) and _is_read(n)}
    imported = [alias for n in _nodes() if isinstance(n, ast.ImportFrom) for alias in n.names]
    names |= {alias.asname for alias in imported if alias.asname}
    # Points to patch, entries of tables and names exported are strings.
    texts = [n.value for n in _nodes() if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return names | {re.split("[.:]", text)[-1] for text in texts}


def _is_read(node: ast.Attribute) -> bool:
    return not isinstance(node.ctx, ast.Store)


def test_every_function_and_class_is_referred_to() -> None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    made = {node.name for node in _nodes() if isinstance(node, kinds)}
    special = {name for name in made if name.startswith("__") and name.endswith("__")}
    assert made - special - _referred_to() == ELSEWHERE


def test_every_constant_is_referred_to() -> None:
    targets = [target for tree in _trees() for node in tree.body for target in _given(node)]
    made = {node.id for node in targets if isinstance(node, ast.Name) and node.id.isupper()}
    read = {n.id for n in _nodes() if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    imported = {alias.name for n in _nodes() if isinstance(n, ast.ImportFrom) for alias in n.names}
    of_modules = {node.attr for node in _nodes() if isinstance(node, ast.Attribute)}
    assert len(made) > 100, "found hardly any: is this looking at the package?"
    assert made - read - imported - of_modules == set()


def _given(statement: ast.stmt) -> list[ast.AST]:
    """What an assignment gives values to."""
    if isinstance(statement, ast.Assign):
        return [node for target in statement.targets for node in ast.walk(target)]
    return [statement.target] if isinstance(statement, ast.AnnAssign) else []


def test_every_attribute_that_is_set_is_read() -> None:
    kept = {
        node.attr
        for node in _nodes()
        if isinstance(node, ast.Attribute)
        and not _is_read(node)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    assert len(kept) > 100, "found hardly any: is this looking at the package?"
    assert kept - _referred_to() == set()
