"""The tier over kvcached's own pool: `python elastic.py RELEASE=SOURCES KVCACHED`.

SOURCES is the folder that has the release's `vllm/`, KVCACHED that of kvcached's source archive.
vLLM's scheduler and kvcached's Python code are theirs; `vmm_ops` stands in for what kvcached has
compiled, and a block has another value each time its memory comes or goes. So a copy that is late
or early for its memory is a wrong token, and an assertion as well. Prints a line of JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[:0] = [str(_TESTS.parent), str(_TESTS)]

from scheduler_half import vmm_ops  # noqa: E402


def use_kvcached(folder: Path, release: str) -> None:
    """From now on, kvcached's patches are on the vLLM of this process."""
    os.environ["ENABLE_KVCACHED"] = "true"
    sys.path.insert(0, str(folder))
    for name in ("posix_ipc", "kvcached.vmm_ops"):
        sys.modules.setdefault(name, types.ModuleType(name))
    import kvcached
    import kvcached.utils

    kvcached.vmm_ops = sys.modules["kvcached.vmm_ops"] = vmm_ops
    # A block of the scheduler half has 2 KiB of K and as many of V.
    kvcached.utils.PAGE_SIZE = 4 * 2048
    from kvcached.integration.version_utils import VersionManager
    from kvcached.integration.vllm import interfaces, patches

    VersionManager.get_instance()._version_cache["vllm"] = release
    for made in (
        patches.ElasticBlockPoolPatch,
        patches.KVCacheCoordinatorPatch,
        patches.KVCacheManagerAllocateSlotsPatch,
    ):
        patch = made()
        assert patch.apply(importlib.import_module(patch.target_module)), patch.patch_name
    interfaces.init_kvcached(device="cpu")
    interfaces._is_worker = True  # the device is in this process


def make_mini(**about: Any) -> Any:
    """An `ElasticMini` of these arguments, over kvcached's pool."""
    from kvcached import utils
    from kvcached.integration.vllm import interfaces
    from scheduler_half.elastic_mini import BLOCK, ElasticMini

    utils.MAX_CACHED_TOKENS = about.get("limit", 10) * BLOCK
    interfaces._async_sched = about.get("in_flight", 1) > 1
    return ElasticMini(**about)


def geometry() -> dict[str, int]:
    """Kernel blocks and bytes of a block in kvcached's own views, in each of its layouts.

    Every byte of a block is found in the rows of the layout, and no byte of another.
    """
    import torch
    from kvcached.integration.vllm import interfaces

    from kvoffload_patch.transfer.layout import layout_by_bytes

    block, heads, width, layers, blocks, half = 16, 2, 8, 3, 40, 24_576
    nbytes, seen = 2 * block * heads * width * 2, {}
    shapes = {
        "K and V first": (2, 7, block, heads, width), "blocks first": (7, 2, block, heads, width),
    }  # fmt: skip
    for name, shape in shapes.items():
        for contiguous, kernel in ((True, block), (False, block), (False, 8)):
            interfaces._contiguous_layout = contiguous
            raw = [torch.zeros(2 * half * layers**contiguous // 2, dtype=torch.int16)]
            raw *= 1 if contiguous else layers
            raw = [one.clone() for one in raw]
            about = shape, block, torch.bfloat16, "MHA", blocks, half, layers, kernel
            tensors, _ = interfaces.build_kv_views(raw, *about)
            layout = layout_by_bytes(tensors, nbytes, 3)
            assert (layout.num_blocks, layout.block_bytes) == (blocks, layers * nbytes)
            for view in layout.block_views(5):
                view.fill_(1)
            for row in layout.rows:
                assert row[5].view(torch.bfloat16).eq(1).all()
                assert not row[:5].any() and not row[6:].any()
            seen[f"{name}, contiguous {contiguous}, kernel blocks of {kernel}"] = len(layout.rows)
    return seen


def main(asked: str, folder: str) -> None:
    release, _, sources = asked.partition("=")
    from scheduler_half.half import use_release

    use_release(release, Path(sources).resolve())
    use_kvcached(Path(folder).resolve(), release)
    from scheduler_half.elastic_mini import SCENARIOS

    from kvoffload_patch.integration import kvcached

    assert list(kvcached.unknown(make_mini().pool)) == [], "it is not the release that was read"
    seen = {name: scenario(make_mini) for name, scenario in SCENARIOS.items()}
    print(json.dumps({**seen, "geometry": geometry()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
