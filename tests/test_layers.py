"""Who imports whom, read from the source: layers point downwards, and one of them meets vLLM."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "kvoffload_patch"
FILES = sorted(PACKAGE.rglob("*.py"))

# What each part may import besides itself and the standard library. A part is a module or a folder;
# of two that hold a module, the longer name counts. Parts of our own package are named with a dot;
# "." is the package itself, which holds its version.
ALLOWED: dict[str, set[str]] = {
    "__init__": {"._bootstrap"},
    "__main__": {".cli"},
    "_sitecustomize": {"._bootstrap"},
    "cli": {
        ".",
        "._bootstrap",
        ".cli.bench.picture",
        ".cli.live",
        ".config",
        ".control",
        ".integration.patch_table",
        ".launch_token",
        ".memory",
        ".patching",
    },
    "cli.bench.picture": {"matplotlib"},
    "cli.live": {"rich"},
    "cli.doctor.copy_speed": {".cli", "torch"},
    "_bootstrap": {
        ".",
        ".config",
        ".integration.install",
        ".launch_token",
        ".memory",
        ".patching",
    },
    "integration": set(),
    "control": {".config"},
    "integration.engine": {
        ".",
        ".config",
        ".control",
        ".integration.engine.adapters",
        ".integration.engine.blocks",
        ".integration.engine.ranks",
        ".integration.engine.reports",
        ".integration.engine.requests",
        ".integration.engine.requests.lookup",
        ".integration.engine.tuning",
        ".integration.errors",
        ".integration.install",
        ".integration.kvcached",
        ".integration.metrics",
        ".integration.protocol",
        ".integration.spec_kinds",
        ".launch_token",
        ".links",
        ".patching",
        ".tier",
        ".plan",
        "vllm",
    },
    "integration.engine.requests": {
        ".config",
        ".integration.engine.adapters",
        ".integration.engine.blocks",
        ".integration.engine.ranks",
        ".integration.engine.reports",
        ".integration.engine.requests.lookup",
        ".integration.engine.tuning",
        ".tier",
    },
    "integration.engine.blocks": {
        ".config",
        ".integration.engine.adapters",
        ".integration.engine.ranks",
        ".integration.engine.requests.lookup",
        ".tier",
    },
    "integration.engine.reports": {
        ".",
        ".integration.carrier",
        ".integration.engine.adapters",
        ".integration.engine.requests.lookup",
        ".integration.engine.tuning",
        ".integration.metrics",
        ".integration.publisher",
        ".links",
        ".tier",
        ".plan",
        "vllm",
    },
    # What a request was found to hit is told to blocks and reports, which requests import.
    "integration.engine.requests.lookup": {".integration.engine.adapters", ".tier"},
    "integration.engine.adapters": {
        ".integration.engine.tuning",
        ".integration.kvcached",
        ".links",
        ".patching",
        ".plan",
        "vllm",
    },
    "integration.engine.ranks": {
        ".",
        ".config",
        ".integration.engine.tuning",
        ".integration.errors",
        ".integration.install",
        ".integration.protocol",
        ".integration.shared_files",
        ".integration.slot_counts",
        ".integration.worker.rpc",  # the ranks are called by RPC: what is called, by name
        ".memory",
        ".plan",
    },
    "integration.engine.tuning": set(),
    "integration.worker.rpc": {
        ".",
        ".integration.protocol",
        ".integration.shared_files",
        ".integration.slot_counts",
        ".integration.spec_kinds",
        ".integration.worker",
        ".launch_token",
        ".memory",
        ".plan",
        ".transfer.errors",
        ".transfer.memory",
    },
    "integration.worker": {
        ".config",
        ".integration.install",
        ".integration.kvcached",
        ".integration.protocol",
        ".integration.shared_files",
        ".integration.slot_counts",
        ".links",
        ".memory",
        ".threads",
        ".plan",
        ".transfer",
        ".transfer.backends",
        ".transfer.backends.slots",
        ".transfer.device",
        ".transfer.integrity",
        ".transfer.layout",
        ".transfer.memory",
        "torch",
    },
    "integration.install": {
        ".config",
        ".integration.kvcached",
        ".integration.patch_table",
        ".patching",
    },
    "integration.kvcached": {".patching"},
    "integration.patch_table": {".patching"},
    "integration.frontend": {".integration.carrier", ".integration.publisher"},
    "integration.carrier": {".integration.metrics", "msgspec", "vllm"},
    "integration.publisher": {".integration.metrics", "prometheus_client"},
    "integration.metrics": {".links"},
    "integration.protocol": {".config"},
    "integration.shared_files": set(),
    "integration.slot_counts": {".links", ".integration.shared_files"},
    "integration.spec_kinds": set(),
    "integration.errors": set(),
    "patching": {"wrapt", "packaging"},
    "tier": {".links", ".policy_names", ".plan"},
    "plan": {".links"},
    "transfer": {
        ".links",
        ".plan",
        ".threads",
        ".transfer.backends",
        ".transfer.device",
        ".transfer.errors",
        ".transfer.integrity",
        ".transfer.layout",
        ".transfer.tuning",
        "torch",
    },
    "transfer.backends": {
        ".transfer.backends.driver",
        ".transfer.backends.slots",
        ".transfer.device",
        ".transfer.errors",
        ".transfer.integrity",
        ".transfer.layout",
        ".transfer.tuning",
        "numpy",
        "torch",
        "triton",
    },
    "transfer.memory": {
        ".memory",
        ".threads",
        ".transfer.device",
        ".transfer.errors",
        ".transfer.tuning",
        "torch",
    },
    "transfer.device": {".transfer.devices", ".transfer.errors", "torch"},
    "transfer.devices": {
        ".transfer.backends.acl",
        ".transfer.backends.driver",
        ".transfer.errors",
        "torch",
    },
    "transfer.backends.acl": {".transfer.backends.slots", ".transfer.errors", "numpy"},
    "transfer.backends.driver": {".transfer.backends.slots", ".transfer.errors", "numpy"},
    "transfer.backends.slots": {"numpy", "torch"},
    "transfer.integrity": {".transfer.errors", "torch"},
    "transfer.layout": {".transfer.errors", "torch"},
    "transfer.errors": {".links"},
    "transfer.tuning": set(),
    "memory": {".config"},
    "config": {".policy_names"},
    "policy_names": set(),
    "launch_token": set(),
    "links": set(),
    "threads": set(),
}


class Import:
    """One imported name. ``top``: its first part, or our own part with a dot before it."""

    def __init__(self, file: Path, line: int, name: str, in_function: bool) -> None:
        self.part = part_of(file)
        self.what = f"{file.relative_to(PACKAGE)} imports {name}"
        self.where = f"{self.what} in line {line}"
        self.in_function = in_function
        first, _, rest = name.partition(".")
        self.top = f".{part_named(rest)}" if first == PACKAGE.name else first


def part_of(file: Path) -> str:
    """The part that a file of the package belongs to."""
    module = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
    return part_named(module.removesuffix(".__init__"))


def part_named(module: str) -> str:
    """The part that a module belongs to, named without the package; "" for the package itself."""
    while module and module not in ALLOWED:
        module = module.rpartition(".")[0]
    return module


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
    # `from kvoffload_patch.a import b`: b is a module of ours, or a name within a.
    own = module.partition(".")[0] == PACKAGE.name
    names = [f"{module}.{alias.name}" for alias in node.names]
    return [name if own and _is_module(name) else module for name in names]


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def _dynamic_name(call: ast.Call) -> list[str]:
    called = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    called = call.func.id if isinstance(call.func, ast.Name) else called
    if called not in ("import_module", "__import__") or not call.args:
        return []
    name = call.args[0]
    known = isinstance(name, ast.Constant) and isinstance(name.value, str)
    return [name.value] if known else []  # type: ignore[attr-defined]


def _within(part: str, name: str) -> bool:
    return f"{name}.".startswith(f"{part}.")


@cache
def all_imports() -> list[Import]:
    """Of the package; read once a test asks, and not in each worker of pytest-xdist."""
    return [found for file in FILES for found in imports_of(file)]


def test_every_module_is_of_a_part_and_every_part_is_found() -> None:
    assert {part_of(file) for file in FILES} == set(ALLOWED)


@pytest.mark.skipif(sys.version_info < (3, 10), reason="needs the list of standard modules")
@pytest.mark.parametrize("part", ALLOWED)
def test_a_part_imports_the_standard_library_itself_and_what_is_below_it(part: str) -> None:
    allowed = ALLOWED[part] | {f".{part}"} | sys.stdlib_module_names
    found = [i for i in all_imports() if i.part == part and i.top not in allowed]
    assert [i.where for i in found] == []


@pytest.mark.parametrize("part", ALLOWED)
def test_what_is_allowed_is_needed(part: str) -> None:
    assert ALLOWED[part] - {i.top for i in all_imports() if i.part == part} == set()


def test_the_table_itself_points_downwards() -> None:
    below = {part: {n[1:] for n in names if n > "."} for part, names in ALLOWED.items()}
    list(TopologicalSorter(below).static_order())  # raises CycleError


@pytest.mark.parametrize(
    ("part", "never"),
    [
        ("tier", "transfer"),
        ("transfer", "tier"),
        ("integration.worker", "integration.engine"),
        ("integration.engine.adapters", "integration.engine.ranks"),
        ("integration.engine.adapters", "integration.engine.requests"),
        ("integration.engine.adapters", "integration.engine.blocks"),
        ("integration.engine.adapters", "integration.engine.reports"),
        ("integration.engine.ranks", "integration.engine.adapters"),
        ("integration.engine.ranks", "integration.engine.requests"),
        ("integration.engine.ranks", "integration.engine.blocks"),
        ("integration.engine.ranks", "integration.engine.reports"),
        ("integration.engine.blocks", "integration.engine.reports"),
        ("integration.engine.reports", "integration.engine.ranks"),
        ("integration.engine.reports", "integration.engine.blocks"),
        ("integration.patch_table", "integration.engine"),
        ("integration.install", "integration.engine"),
        ("integration.install", "integration.worker"),
        ("transfer", "integration"),
        ("tier", "integration"),
        ("patching", "integration"),
    ],
)
def test_no_chain_of_imports_that_are_allowed_leads(part: str, never: str) -> None:
    reached, todo = set[str](), [name for name in ALLOWED if _within(part, name)]
    while todo:
        for name in ALLOWED.get(todo.pop(), set()):
            if name.startswith(".") and name[1:] not in reached:
                reached.add(name[1:])
                todo.append(name[1:])
    assert [name for name in reached if _within(never, name)] == []


def test_vllm_is_imported_in_functions_of_the_integration_only() -> None:
    found = [i for i in all_imports() if i.top == "vllm"]
    assert found, "the integration does import vLLM somewhere"
    assert [i.where for i in found if not _within("integration", i.part) or not i.in_function] == []


def test_torch_is_imported_at_module_level_in_transfer_only() -> None:
    found = [
        i for i in all_imports() if i.top in ("torch", "triton") or _within(".transfer", i.top)
    ]
    assert len(found) > 20
    heavy = [i for i in found if not i.in_function]
    assert [i.where for i in heavy if not _within("transfer", i.part)] == []


def test_patching_does_not_know_the_name_of_its_host() -> None:
    texts = {file: file.read_text().lower() for file in FILES if part_of(file) == "patching"}
    assert texts
    assert [str(file) for file, text in texts.items() if "vllm" in text] == []


@pytest.mark.parametrize("part", ["tier", "transfer"])
def test_tier_and_transfer_say_nothing_of_vllm_in_code(part: str) -> None:
    for file in FILES:
        if _within(part, part_of(file)):
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
        ("kvoffload_patch.integration.frontend.hooks", {"msgspec", "prometheus_client", "vllm"}),
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
        ("from ..transfer import device", [(".transfer.device", False)]),
        ("from ..tier import manager", [(".tier", False)]),
        ("from kvoffload_patch.plan import TransferPlan", [(".plan", False)]),
        ("import kvoffload_patch.integration.worker.hooks", [(".integration.worker", False)]),
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
