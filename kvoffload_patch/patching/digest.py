"""Digests of functions and files, the same from every Python that can read the source.

A function's digest is that of its syntax tree: header, decorators and body, without docstrings,
comments and formatting. `ast.dump` is not used, because its text differs between Python versions.
Imports nothing of this package.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

ABSENT = "-"  # in place of the digest of a file that is not there

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# Read or write follows from where a name stands; the others never change what is computed.
_LEFT_OUT = {"ctx", "kind", "type_comment", "type_ignores"}


def of_function(node: ast.AST) -> str:
    """16 hexadecimal digits for a function's definition."""
    return _hash("".join(_text(node)).encode("utf-8", "surrogatepass"))


def of_file(content: bytes | None) -> str:
    """16 hexadecimal digits for a file's bytes; `ABSENT` for None."""
    return ABSENT if content is None else _hash(content)


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _text(value: Any) -> Iterator[str]:
    """One value of a tree, unambiguously: fields are named, texts have their length in front."""
    if isinstance(value, ast.Constant):
        yield _constant(value.value)
    elif isinstance(value, ast.JoinedStr):
        yield "(JoinedStr"
        for part in _parts(value.values):
            yield from _text(part)
        yield ")"
    elif isinstance(value, ast.AST):
        yield f"({type(value).__name__}"
        for name, found in _fields(value):
            yield f" {name}="
            yield from _text(found)
        yield ")"
    elif isinstance(value, list):
        yield "["
        for item in value:
            yield from _text(item)
        yield "]"
    else:
        yield _constant(value)


def _fields(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """A node's fields that say something: newer Pythons have more of them, which are empty."""
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(node, _DEFINITIONS) and _is_text(value[0]):
            value = value[1:]
        if name == "format_spec" and value is not None and not list(_parts(value.values)):
            continue
        if name not in _LEFT_OUT and value is not None and value != []:
            yield name, value


def _is_text(node: ast.AST) -> bool:
    value = getattr(node, "value", None) if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _parts(values: Sequence[ast.expr]) -> Iterator[ast.expr]:
    """The parts of an f-string, neighbouring texts as one: Pythons cut them differently."""
    text = ""
    for part in values:
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            text += part.value
            continue
        if text:
            yield ast.Constant(text)
        text = ""
        yield part
    if text:
        yield ast.Constant(text)


def _constant(value: object) -> str:
    # No repr() of a text: which characters it escapes depends on Python's Unicode tables.
    text = value if isinstance(value, str) else repr(value)
    return f"{type(value).__name__}{len(text)}:{text}"
