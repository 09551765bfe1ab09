"""Who imports whom, read from the source: layers point downwards, and one of them meets vLLM."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "kvoffload_patch"
FILES = sorted(PACKAGE.rglob("*.py"))

# What each part may import besides itself. The parts of our own package are named with a dot;
# "." is the package itself, which holds its version.
ALLOWED: dict[str, set[str]] = {
    "config": set(),
    "memory": {".config"},
    "patching": {"wrapt", "packaging"},
    "links": set(),
    "tier": {".links"},
    "transfer": {".links", "torch", "triton", "numpy"},
    "integration": {
        ".config",
        ".launch_token",
        ".links",
        ".memory",
        ".patching",
        ".tier",
        ".transfer",
        "torch",
        "vllm",
    },
    "launch_token": set(),
    "_bootstrap": {".", ".config", ".launch_token", ".patching", ".integration"},
    "cli": {
        ".",
        "._bootstrap",
        ".config",
        ".integration",
        ".launch_token",
        ".memory",
        ".patching",
    },
    "__init__": {"._bootstrap"},
    "__main__": {".cli"},
    "_sitecustomize": {"._bootstrap"},
}


class Import:
    """One imported name. ``top``: its first part, or our own part with a dot before it."""

    def __init__(self, file: Path, line: int, name: str, in_function: bool) -> None:
        self.file = file
        self.where = f"{file.relative_to(ROOT)}:{line} imports {name}"
        self.in_function = in_function
        parts = name.split(".")
        self.top = parts[0]
        if parts[0] == PACKAGE.name:
            self.top = f".{parts[1]}" if len(parts) > 1 else "."


def part_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(file: Path) -> Iterator[Import]:
    """Every import, those within functions and behind conditions included."""
    tree = ast.parse(file.read_text())
    yield from _imports_in(tree, file, in_function=False)


def _imports_in(node: ast.AST, file: Path, in_function: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        for name in _names(child, file):
            yield Import(file, getattr(child, "lineno", 0), name, in_function)
        inside = in_function or isinstance(
            child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        )
        yield from _imports_in(child, file, inside)


def _names(node: ast.AST, file: Path) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return _names_from(node, file)
    if isinstance(node, ast.Call):
        return _dynamic_name(node)
    return []


def _names_from(node: ast.ImportFrom, file: Path) -> list[str]:
    module = node.module or ""
    if node.level:
        folder = file.parent.relative_to(ROOT).parts
        base = folder[: len(folder) - node.level + 1]
        module = ".".join([*base, *([module] if module else [])])
    if module != PACKAGE.name:
        return [module]
    # `from kvoffload_patch import x`: x is a part of ours, or a name of the package itself.
    return [f"{module}.{alias.name}" if _is_part(alias.name) else module for alias in node.names]


def _is_part(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()


def _dynamic_name(call: ast.Call) -> list[str]:
    called = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    called = call.func.id if isinstance(call.func, ast.Name) else called
    if called not in ("import_module", "__import__") or not call.args:
        return []
    name = call.args[0]
    known = isinstance(name, ast.Constant) and isinstance(name.value, str)
    return [name.value] if known else []  # type: ignore[attr-defined]


ALL = [found for file in FILES for found in imports_of(file)]


def test_every_part_of_the_package_has_its_place_in_the_table() -> None:
    assert {part_of(file) for file in FILES} == set(ALLOWED)


@pytest.mark.skipif(sys.version_info < (3, 10), reason="needs the list of standard modules")
@pytest.mark.parametrize("part", ALLOWED)
def test_a_part_imports_the_standard_library_itself_and_what_is_below_it(part: str) -> None:
    allowed = ALLOWED[part] | {f".{part}"}
    found = [i for i in ALL if part_of(i.file) == part]
    assert [
        i.where for i in found if i.top not in allowed and i.top not in sys.stdlib_module_names
    ] == []


def test_the_table_itself_points_downwards() -> None:
    order = [
        "config",
        "launch_token",
        "memory",
        "patching",
        "tier",
        "transfer",
        "integration",
        "_bootstrap",
    ]
    order += ["cli", "__main__"]
    for i, part in enumerate(order):
        above = {f".{name}" for name in order[i:]}
        assert not ALLOWED[part] & above, f"{part} may import what is above it"
    for one, other in (("tier", "transfer"), ("transfer", "tier")):
        assert f".{other}" not in ALLOWED[one]


def test_vllm_is_imported_in_functions_of_the_integration_only() -> None:
    found = [i for i in ALL if i.top == "vllm"]
    assert found, "the integration does import vLLM somewhere"
    assert [i.where for i in found if part_of(i.file) != "integration" or not i.in_function] == []


def test_torch_is_imported_at_module_level_in_transfer_only() -> None:
    heavy = [i for i in ALL if i.top in ("torch", "triton", ".transfer") and not i.in_function]
    assert [i.where for i in heavy if part_of(i.file) != "transfer"] == []


def test_patching_does_not_know_the_name_of_its_host() -> None:
    texts = {file: file.read_text().lower() for file in FILES if part_of(file) == "patching"}
    assert texts
    assert [str(file) for file, text in texts.items() if "vllm" in text] == []


@pytest.mark.parametrize("part", ["tier", "transfer"])
def test_tier_and_transfer_say_nothing_of_vllm_in_code(part: str) -> None:
    for file in FILES:
        if part_of(file) == part:
            names = {n.id for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Name)}
            assert not any("vllm" in name.lower() for name in names), file


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("kvoffload_patch", {"wrapt", "packaging", "torch", "vllm"}),
        ("kvoffload_patch._bootstrap", {"wrapt", "packaging", "torch", "vllm"}),
        ("kvoffload_patch.tier.manager", {"torch", "vllm", "wrapt"}),
        ("kvoffload_patch.patching", {"torch", "vllm"}),
        ("kvoffload_patch.integration.install", {"torch", "vllm"}),
        ("kvoffload_patch.integration.engine.hooks", {"torch", "vllm"}),
        ("kvoffload_patch.integration.worker.hooks", {"torch", "vllm"}),
        ("kvoffload_patch.integration.engine.step_hooks", {"torch", "vllm"}),
        ("kvoffload_patch.cli.main", {"torch", "vllm"}),
    ],
)
def test_importing_a_module_imports_nothing_heavy(module: str, unwanted: set[str]) -> None:
    # -S: no start-up files, so that the answer does not depend on what the environment does.
    code = (
        f"import sys; sys.path[:0] = {[str(ROOT), *_site_packages()]!r}; "
        f"import {module}; print(*sorted({unwanted!r} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def _site_packages() -> list[str]:
    return [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]


@pytest.mark.parametrize(
    ("text", "tops"),
    [
        ("import vllm.v1", [("vllm", False)]),
        ("def f():\n    from vllm import x", [("vllm", True)]),
        ("class A:\n    import torch", [("torch", False)]),
        ("if a:\n    try:\n        import torch\n    except B: pass", [("torch", False)]),
        ("from ..tier import plan", [(".tier", False)]),
        ("from .. import tier, __version__", [(".tier", False), (".", False)]),
        ("from kvoffload_patch import config", [(".config", False)]),
        ("import importlib; importlib.import_module('vllm.x')", [("importlib", False)]),
        ("f = lambda: __import__('vllm')", [("vllm", True)]),
    ],
)
def test_the_reader_of_imports_sees(
    text: str, tops: list[tuple[str, bool]], tmp_path: Path
) -> None:
    tree = ast.parse(text)
    found = list(_imports_in(tree, PACKAGE / "integration" / "made_up.py", in_function=False))
    wanted = tops + ([("vllm", False)] if "import_module" in text else [])
    assert [(i.top, i.in_function) for i in found] == wanted
