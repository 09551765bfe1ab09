"""The host's source files: read and parsed once each, and what is defined in them.

Owns how a function or a class is found in a syntax tree, the latter also through imports and base
classes. Must not import the host, and knows nothing of patch points.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Union

Function = Union[ast.FunctionDef, ast.AsyncFunctionDef]
_Definition = Union[ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef]
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# What may stand around a definition without making a scope of its own.
_BLOCKS = (ast.If, ast.Try, ast.With, ast.ExceptHandler)


class SourceNotFound(Exception):
    """A module has no file, or none that can be parsed; the text says which."""


class Sources:
    """Syntax trees of one host.

    Args:
        find_source: gives a module's source file, or raises FileNotFoundError.

    Attributes:
        contents: bytes of each module that was asked for; None where there is no file.
    """

    def __init__(self, find_source: Callable[[str], Path]) -> None:
        self.contents: dict[str, bytes | None] = {}
        self._find_source = find_source
        self._packages: set[str] = set()
        self._trees: dict[str, ast.Module] = {}
        self._imported: dict[str, dict[str, tuple[str, str]]] = {}

    def read(self, module: str) -> bytes | None:
        """A module's source; None if there is no file."""
        if module not in self.contents:
            try:
                path = self._find_source(module)
                content = path.read_bytes()
            except FileNotFoundError:
                self.contents[module] = None
            else:
                self.contents[module] = content
                if path.name == "__init__.py":
                    self._packages.add(module)
        return self.contents[module]

    def tree(self, module: str) -> ast.Module:
        """A module's syntax tree.

        Raises:
            SourceNotFound: there is no file, or it cannot be parsed.
        """
        if module not in self._trees:
            content, file = self.read(module), file_of(module)
            if content is None:
                raise SourceNotFound(f"not found: there is no {file}")
            try:
                self._trees[module] = ast.parse(content)
            except (SyntaxError, ValueError):
                raise SourceNotFound(f"not found: {file} cannot be parsed") from None
        return self._trees[module]

    def attributes(self, module: str, owner: str) -> set[str] | None:
        """Names that a class, or with "" the module itself, gives values or annotations to.

        Those of a class are what its body and the methods' `self` are given, and its base classes',
        as far as they can be found in the host's files.

        Returns:
            None if the class is not there.

        Raises:
            SourceNotFound: the module is not there.
        """
        if not owner:
            return {*_names_of_block(self.tree(module)), *self._imports(module)}
        found = self._class(module, owner)
        return None if found is None else self._class_attributes(*found, set())

    def _class_attributes(
        self, module: str, cls: ast.ClassDef, seen: set[tuple[str, str]]
    ) -> set[str]:
        if (module, cls.name) in seen:
            return set()
        seen.add((module, cls.name))
        names = {*_names_of_block(cls), *_names_of_self(cls)}
        for base in cls.bases:
            found = self._class(module, ast.unparse(_without_index(base)))
            if found is not None:
                names |= self._class_attributes(*found, seen)
        return names

    def _class(self, module: str, name: str) -> tuple[str, ast.ClassDef] | None:
        """A class by the name that it has in a module, and the module that defines it.

        Those of other packages are not found: their files are not the host's, and differ by Python.
        """
        package = module.partition(".")[0]
        for _ in range(9):  # imports that go in a circle end, too
            try:
                tree = self.tree(module)
            except SourceNotFound:
                return None
            for node in definitions(tree, name):
                if isinstance(node, ast.ClassDef):
                    return module, node
            if name not in self._imports(module):
                return None
            module, name = self._imports(module)[name]
            if module.partition(".")[0] != package:
                return None
        return None

    def _imports(self, module: str) -> dict[str, tuple[str, str]]:
        """What `from m import n` at module level brings: local name to (m, n)."""
        if module not in self._imported:
            self._imported[module] = {
                alias.asname or alias.name: (self._absolute(module, node), alias.name)
                for node in _statements(self.tree(module))
                if isinstance(node, ast.ImportFrom)
                for alias in node.names
            }
        return self._imported[module]

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        above = node.level - (module in self._packages)
        return ".".join([*parts[: len(parts) - above], *([node.module] if node.module else [])])


def file_of(module: str) -> str:
    """What a module's file is called in messages."""
    return module.replace(".", "/") + ".py"


def find_def(attribute: str, tree: ast.Module) -> Function | None:
    """The function at a dotted path; base classes are followed within the module only."""
    *classes, name = attribute.split(".")
    scopes: list[ast.AST] = [tree]
    for class_name in classes:
        found = [node for scope in scopes for node in definitions(scope, class_name)]
        scopes = list(found[-1:])
    for scope in scopes:  # grows while it is walked
        for node in reversed(list(definitions(scope, name))):
            return None if isinstance(node, ast.ClassDef) else node
        for base in getattr(scope, "bases", ()):
            parents = definitions(tree, ast.unparse(base))
            scopes.extend(node for node in parents if node not in scopes)
    return None


def find_later(attribute: str, tree: ast.Module, function: Function) -> str:
    """What may put another in the place of a definition, as text; "" if there is nothing.

    That is what binds its name again, in its class or by its path, and a decorator of the class.
    """
    owner, _, name = attribute.rpartition(".")
    for scope, path in ((tree, attribute), *((cls, name) for cls in definitions(tree, owner))):
        for decorator in getattr(scope, "decorator_list", ()):
            text = ast.unparse(decorator)
            if text.partition("(")[0].rpartition(".")[2] != "dataclass":  # it replaces no method
                return f"@{text}"
        for node in _statements(scope):
            if isinstance(node, (*_FUNCTIONS, ast.ClassDef, *_BLOCKS)):
                continue
            if getattr(node, "lineno", 0) > function.lineno and path in _bound(node):
                return ast.unparse(node).partition("\n")[0]
    return ""


def _bound(statement: ast.AST) -> Iterator[str]:
    """Names and dotted paths that a statement gives values to, or takes away."""
    for node in ast.walk(statement):
        if isinstance(node, (ast.Name, ast.Attribute)) and not isinstance(node.ctx, ast.Load):
            yield ast.unparse(node)
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr" and node.args[1:]:
            yield f"{ast.unparse(node.args[0])}.{ast.unparse(node.args[1]).strip(chr(39))}"


def definitions(scope: ast.AST, name: str) -> Iterator[_Definition]:
    """Definitions of `name` in a module or class body, in order, also under if, try and with."""
    for node in _statements(scope):
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)) and node.name == name:
            yield node


def _statements(scope: ast.AST) -> Iterator[ast.AST]:
    """What a module or class body consists of, also under if, try and with."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if isinstance(node, _BLOCKS):
            yield from _statements(node)


def _names_of_block(scope: ast.AST) -> Iterator[str]:
    for node in _statements(scope):
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from _names_in(node.targets)
        elif isinstance(node, ast.AnnAssign):
            yield from _names_in([node.target])


def _names_in(targets: Iterable[ast.expr]) -> Iterator[str]:
    for target in targets:
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                yield node.id


def _names_of_self(cls: ast.ClassDef) -> set[str]:
    """What methods give to their first parameter, in whatever way."""
    names: set[str] = set()
    for method in _statements(cls):
        if not isinstance(method, _FUNCTIONS):
            continue
        first = [*method.args.posonlyargs, *method.args.args][:1]
        for node in ast.walk(method) if first else ():
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.update([node.attr] if ast.unparse(node.value) == first[0].arg else [])
    return names


def _without_index(base: ast.expr) -> ast.expr:
    return base.value if isinstance(base, ast.Subscript) else base
