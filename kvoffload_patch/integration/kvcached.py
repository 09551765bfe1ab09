"""What is known of kvcached, which takes the memory of GPU blocks that nobody uses away.

It gives vLLM a block pool of its own class, and KV tensors over address space of which only the
pages of blocks in use have memory. Nothing of it is imported here: a process in which it is not
pays a look at the name of a class.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from kvoffload_patch.patching import Decision, PatchPoint, find_source
from kvoffload_patch.patching.digest import of_file

POOL = "ElasticBlockPool"
VERSION = "0.1.6"
# The files of it that say what its pool does, and when a block loses its memory.
DIGESTS = {
    "kvcached.integration.vllm.interfaces": "5be6174b215a241c",
    "kvcached.integration.vllm.native_block_pool": "3a80658fd9292e7d",
    "kvcached.integration.vllm.patches": "6fc2f68b3c5fe13d",
    "kvcached.kv_cache_manager": "9ea52a1d39ff2396",
}
_PACKAGE = "kvcached"


def is_elastic(pool: Any) -> bool:
    """Whether a scheduler's block pool is kvcached's."""
    return type(pool).__name__ == POOL


def unknown(pool: Any) -> Iterator[str]:
    """How a pool and the kvcached that is installed differ from what was read of it."""
    if type(pool).__module__.partition(".")[0] != _PACKAGE:
        yield f"expected kvcached's {POOL}, found one of {type(pool).__module__}"
    try:
        version = metadata.version(_PACKAGE)
    except metadata.PackageNotFoundError:
        version = "none"
    if version != VERSION:
        yield f"expected kvcached {VERSION}, found {version}"
    for module, digest in DIGESTS.items():
        try:
            content = find_source(module).read_bytes()
        except OSError:
            content = None
        if of_file(content) != digest:
            yield f"expected {module} as kvcached {VERSION} has it, found other source"


def with_pool(decision: Decision, pool: Any) -> Decision:
    """The same decision, with what kvcached's pool overrides looked for where it is defined.

    What these functions take is compared as of any other; what they do, by `unknown`.
    """
    if not is_elastic(pool):
        return decision
    points = tuple(_moved(point, type(pool)) for point in decision.points)
    return dataclasses.replace(decision, points=points)


def owners_of(pool: Any) -> dict[str, Any]:
    """The pool, by the name of each class that `with_pool` looks for what it has in."""
    if not is_elastic(pool):
        return {"BlockPool": pool}
    return {kind.__qualname__: pool for kind in type(pool).__mro__ if kind is not object}


def has_tensors() -> bool:
    """Whether the KV tensors of this process are kvcached's."""
    interfaces = sys.modules.get("kvcached.integration.vllm.interfaces")
    return bool(getattr(interfaces, "_kvcached_initialized", False))


def page_bytes() -> int:
    """Bytes of K or of V of a layer that get memory together, and lose it together."""
    return int(sys.modules["kvcached.utils"].PAGE_SIZE)


def _moved(point: PatchPoint, pool: type) -> PatchPoint:
    owner, _, name = point.attribute.rpartition(".")
    if owner != "BlockPool":
        return point
    defined = next((kind for kind in pool.__mro__ if name in vars(kind)), None)
    if defined is None or defined.__module__ == point.module:
        return point
    return dataclasses.replace(
        point, module=defined.__module__, attribute=f"{defined.__qualname__}.{name}"
    )
