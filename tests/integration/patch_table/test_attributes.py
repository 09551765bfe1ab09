"""What our own sources read and set of vLLM's objects is in the table, and nothing else is.

Two rules, both by name. On an object that goes by the name of one of vLLM's (`request`, `scheduler`
and so on), an attribute must be listed for that class. On any other object, it must be listed for
some class, or be a name of this package, of Python, or of torch. `getattr` and its like are read as
attributes; where their name is a variable, every text that the file gives to it is.
"""

from __future__ import annotations

import ast
import builtins
import collections
import dataclasses
import functools
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffload_patch.integration.patch_table.attributes import ATTRIBUTES
from kvoffload_patch.integration.patch_table.points import POINTS

PACKAGE = Path(__file__).resolve().parents[3] / "kvoffload_patch"
INTEGRATION = PACKAGE / "integration"
FILES = sorted(
    [
        *INTEGRATION.glob("engine/**/*.py"),
        *INTEGRATION.glob("frontend/*.py"),
        *INTEGRATION.glob("worker/*.py"),
        INTEGRATION / "carrier.py",
        INTEGRATION / "protocol.py",
    ]
)
ASKING = {"getattr", "hasattr", "setattr", "delattr"}
# Names that only vLLM's objects have in these files, and the classes that they are of.
RECEIVERS = {
    "request": "Request",
    "scheduler": "Scheduler",
    "_scheduler": "Scheduler",
    "kv_cache_manager": "KVCacheManager",
    "coordinator": "UnitaryKVCacheCoordinator",
    "_coordinator": "UnitaryKVCacheCoordinator",
    "block": "KVCacheBlock",
    "block_pool": "BlockPool",
    "kv_cache_config": "KVCacheConfig",
    "runner": "GPUModelRunner",
    "_runner": "GPUModelRunner",
    "model_runner": "GPUModelRunner",
    "worker": "WorkerBase",
    "engine_core": "EngineCore",
    "vllm_config": "VllmConfig",
    "parallel_config": "ParallelConfig",
    "cache_config": "CacheConfig",
    "scheduler_config": "SchedulerConfig",
    "compilation_config": "CompilationConfig",
    "model_config": "ModelConfig",
    "RequestStatus": "RequestStatus",
}
# Of torch, and of objects that the standard library makes.
OTHERS = {"cuda", "data_ptr", "device", "numel", "type", "Tensor", "is_integrated", "nodename"}
OTHERS |= {"get_device_properties", "set_device", "synchronize", "annotation", "parameters"}
OTHERS |= {"named_modules"}
OTHERS |= {"from_iterable", "notify_all"}  # of itertools.chain, and of threading.Condition
OTHERS |= {
    "untyped_storage",
    "nbytes",
    "shape",
    "stride",
    "storage_offset",
    "dtype",
}
OTHERS |= {
    "set_",
    "sum",
    "cpu",
    "numpy",
    "tobytes",
    "view",
    "bitwise_xor_",
    "bitwise_or_",
    "mul_",
    "fill_",
    "func",
    "hexdigest",
}
OTHERS |= {"_parameters", "_buffers", "to", "split", "add_done_callback"}
OTHERS |= {"co_names", "co_varnames", "__code__", "__members__", "name", "__cause__", "elements"}
OTHERS |= {"fileno", "write", "put_nowait", "kvoffload"}
# Of kvcached's pool and of the memory behind it, whose sources are compared with a digest.
OTHERS |= {"_wait_post_init", "null_block", "_remove_cached_block_hashes"}
# Of msgspec.
OTHERS |= {"default", "default_factory"}
# Asked for with a name that is not in the file: a stand-in's, and a function called by name.
ANY_NAME = {(file, "(name)") for file in ("lookup.py", "vllm_lookup.py", "rpc.py")}


@dataclasses.dataclass(frozen=True)
class Access:
    """One attribute of one object, somewhere in a file."""

    receiver: str  # its last name, or ""
    name: str
    where: str


def accesses(text: str, file: str, modules: frozenset[str] = frozenset()) -> Iterator[Access]:
    """Every attribute that a file reads or sets, but for those of `self` and of modules."""
    tree = ast.parse(text)
    modules |= {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    kept = _kept_texts(tree)
    for scope in _scopes(tree):
        texts = _texts([tree, scope], kept)
        for node in _walk(scope):
            if isinstance(node, ast.Attribute):
                receiver = _last(node.value)
                if receiver != "self" and next(_path(node.value)) not in modules:
                    yield Access(receiver, node.attr, f"{file}:{node.lineno}")
            elif isinstance(node, ast.Call) and _last(node.func) in ASKING and len(node.args) > 1:
                for name in _named(node.args[1], texts):
                    yield Access(_last(node.args[0]), name, f"{file}:{node.lineno}")


def _kept_texts(tree: ast.Module) -> dict[str, set[str]]:
    """The texts of attributes, which other functions may read."""
    kept: dict[str, set[str]] = collections.defaultdict(set)
    for scope in _scopes(tree):
        texts = _texts([tree, scope], {})
        for node in _walk(scope):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                kept[node.attr] |= texts.get(node.attr, set())
    return kept


def _scopes(tree: ast.Module) -> list[ast.AST]:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [tree, *functions]


def _walk(scope: ast.AST) -> Iterator[ast.AST]:
    """A function's or the module's own nodes, without those of functions inside."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, ast.FunctionDef):
            yield from _walk(node)


def _path(node: ast.expr) -> Iterator[str]:
    """The names that an expression begins with."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    yield node.id if isinstance(node, ast.Name) else ""


def _last(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _named(node: ast.expr, texts: dict[str, set[str]]) -> set[str]:
    found = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
    if not found:
        found = texts.get(_last(node), set())
    return {text for text in found if isinstance(text, str)} or {f"({ast.unparse(node)})"}


def _texts(scopes: list[ast.AST], kept: dict[str, set[str]]) -> dict[str, set[str]]:
    """The texts that each variable of some scopes may have, also through other variables."""
    given: dict[str, set[str]] = collections.defaultdict(set)
    given.update({name: set(texts) for name, texts in kept.items()})
    comes_of: dict[str, set[str]] = collections.defaultdict(set)
    for node in (node for scope in scopes for node in (scope, *_walk(scope))):
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            pairs = [(node.target, node.value)]
        elif isinstance(node, (ast.For, ast.comprehension)):
            pairs = [(node.target, node.iter)]
        for target, value in pairs:
            for name in map(_last, ast.walk(target)):
                inside = list(ast.walk(value))
                given[name] |= {
                    n.value
                    for n in inside
                    if isinstance(n, ast.Constant) and isinstance(n.value, str)
                }
                comes_of[name] |= set(map(_last, inside)) - {"", name}
    for _ in range(4):
        for name, others in comes_of.items():
            given[name] |= {text for other in others for text in given.get(other, ())}
    return given


@functools.cache
def listed() -> dict[str, set[str]]:
    """By class, attributes and functions that the table has for any release."""
    found: dict[str, set[str]] = collections.defaultdict(set)
    for row in ATTRIBUTES:
        found[row.owner] |= set(row.names)
    for point in POINTS:
        owner, _, name = point.attribute.rpartition(".")
        found[owner].add(name)
    for owner in ("HybridKVCacheCoordinator", "KVCacheCoordinator"):
        found["UnitaryKVCacheCoordinator"] |= found[owner]
    found["EngineCore"] |= found["EngineCoreProc"]
    return found


@functools.cache
def own() -> set[str]:
    """Names of this package: what is defined in it, and what its objects are given."""
    found = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.AnnAssign) or (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and _last(node.value) == "self"
            ):
                found.add(_last(node.target if isinstance(node, ast.AnnAssign) else node))
            elif isinstance(node, ast.Constant) and str(node.value).startswith("_kvoffload_"):
                found.add(str(node.value))
    return found


@functools.cache
def python() -> set[str]:
    """Names of Python's own objects."""
    kinds = [value for value in vars(builtins).values() if isinstance(value, type)]
    kinds += [
        collections.deque,
        collections.OrderedDict,
        logging.Logger,
        threading.Event,
        threading.Thread,
        os.stat_result,
        type(python),
    ]
    return {name for kind in kinds for name in dir(kind)} | OTHERS


def complaint(access: Access) -> str:
    """What is wrong with an access, or ""."""
    ours = access.name.startswith(("__", "_kvoffload_")) or access.name.isupper()
    kind = RECEIVERS.get(access.receiver)
    file = access.where.rpartition("/")[2].partition(":")[0]
    if (file, access.name) in ANY_NAME:
        return ""
    if ours and kind != "RequestStatus":
        return ""
    if kind and access.name not in listed()[kind] | python():
        return f"{access.where}: {access.receiver}.{access.name} is not listed for {kind}"
    if not kind and access.name not in set().union(*listed().values(), own(), python()):
        return f"{access.where}: {access.receiver}.{access.name} is not listed"
    return ""


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_attribute_of_vllms_objects_is_listed(file: Path) -> None:
    found = map(complaint, accesses(file.read_text(), str(file.relative_to(PACKAGE))))
    assert [text for text in found if text] == []


def test_every_attribute_that_is_listed_is_used() -> None:
    texts = [file.read_text() for file in FILES]
    words = {
        word
        for text in texts
        for node in ast.walk(ast.parse(text))
        for word in (
            getattr(node, "attr", ""),
            getattr(node, "id", ""),
            getattr(node, "name", ""),
            getattr(node, "value", ""),
        )
        if isinstance(word, str)
    }
    unused = {(row.owner, name) for row in ATTRIBUTES for name in row.names if name not in words}
    assert unused == set()


@pytest.mark.parametrize(
    "line",
    [
        "request.made_up",
        "self._scheduler.made_up = 1",
        "view.scheduler.made_up()",
        "getattr(request, 'made_up', None)",
        "hasattr(anything, 'made_up')",
        "for name in ('running', 'made_up'): getattr(scheduler, name)",
        "NAMES = ['made_up']\nsome = [n for n in NAMES]\nfor name in some: setattr(x, name, 1)",
        "getattr(request, made_up_elsewhere)",
        "scheduler.num_tokens",
        "block.ref_count",
        "request.num_blocks",
        "found[0].made_up",
        "RequestStatus.MADE_UP",
        "runner.vllm_config.parallel_config.made_up",
    ],
)
def test_what_is_not_listed_is_seen(line: str) -> None:
    assert [text for text in map(complaint, accesses(line, "file")) if text]


@pytest.mark.parametrize(
    "line", ["request.num_tokens", "self.whatever", "os.whatever", "scheduler.running.pop().status"]
)
def test_what_is_listed_or_ours_is_not_complained_of(line: str) -> None:
    source = f"import os\n{line}"
    assert not [text for text in map(complaint, accesses(source, "file")) if text]
