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


def main(asked: str, folder: str) -> None:
    release, _, sources = asked.partition("=")
    from scheduler_half.half import use_release

    use_release(release, Path(sources).resolve())
    use_kvcached(Path(folder).resolve(), release)
    from scheduler_half.elastic_mini import SCENARIOS

    seen = {name: scenario(make_mini) for name, scenario in SCENARIOS.items()}
    print(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
