"""LoRA adapters whose keys may stand for KV of other weights than they have now.

vLLM's keys have an adapter's name, from 0.31 on its path as well. An adapter that is loaded in
place, or up to 0.30 from another path under a name that was used before, has the keys of the one
before it; so has one that was unloaded and loaded again, if its files were written meanwhile.
vLLM's own cache goes on giving KV of that one until its blocks are reused; the tier would for much
longer.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable
from typing import Any, NamedTuple

from kvoffload_patch.integration.engine.tuning import REMEMBERED_ADAPTERS

logger = logging.getLogger("vllm.kvoffload_patch")

# What vLLM reads of an adapter's folder, one of those with weights.
_FILES = (
    "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt",
)  # fmt: skip


class _Loaded(NamedTuple):
    """An adapter as it was loaded.

    Attributes:
        path: where from.
        number: vLLM's; its API server gives another one each time that it loads an adapter.
    """

    path: str
    number: int


class LoraNames:
    """The adapters that requests have named, and which of them the tier is not to be used for.

    Args:
        scheduler: a `vllm.v1.core.sched.scheduler.Scheduler`.

    Attributes:
        stale: names of adapters whose keys may stand for KV of other weights.
    """

    def __init__(self, scheduler: Any) -> None:
        from vllm.v1.core import kv_cache_utils

        self.stale: set[str] = set()
        self._scheduler = scheduler
        self._loaded: dict[Hashable, _Loaded] = {}  # the last one, by what keys have of it
        self._files: dict[_Loaded, tuple[Hashable, ...]] = {}  # as they were when it was loaded
        reads = kv_cache_utils._gen_lora_extra_hash_keys.__code__.co_names
        self._path_in_keys = "lora_path" in reads

    def named(self, lora: Any) -> None:
        """A request names an adapter, or one is about to be loaded.

        Files are looked at where the number or the path is a new one, and not for each request.

        Args:
            lora: a `vllm.lora.request.LoRARequest`.
        """
        name, now = lora.lora_name, _Loaded(lora.lora_path, lora.lora_int_id)
        known = (name, now.path) if self._path_in_keys else name
        before, in_place = self._loaded.get(known), getattr(lora, "load_inplace", False)
        if before == now and not in_place:
            return
        files = self._files_of(now, in_place)
        self._loaded[known] = now
        if before is None or (files and files == self._files.get(before) and not in_place):
            return
        if name not in self.stale:
            self.stale.add(name)
            logger.warning(
                "KV offload: LoRA adapter %s was loaded again under its name, so its blocks may be "
                "of other weights: reset the prefix cache to have the CPU tier for it again",
                name,
            )

    def all_forgotten(self) -> None:
        """vLLM has reset its prefix cache, and the tier is empty: no key stands for anything.

        But those of requests that were preempted for it, which compute again.
        """
        self.stale.clear()
        self._loaded.clear()
        for request in self._scheduler.requests.values():
            if request.lora_request is not None:
                self.named(request.lora_request)

    def _files_of(self, loaded: _Loaded, again: bool) -> tuple[Hashable, ...]:
        """What tells whether its files were written since; empty if there are none at the path.

        That is so of one that is downloaded, or is in memory.
        """
        if again or loaded not in self._files:
            if len(self._files) >= REMEMBERED_ADAPTERS:
                del self._files[next(iter(self._files))]
            self._files[loaded] = _stamps(loaded.path)
        return self._files[loaded]


def _stamps(path: Any) -> tuple[Hashable, ...]:
    """When an adapter's files were written, and where they lie; of those that are at the path."""
    found: list[Hashable] = []
    for name in _FILES:
        try:
            about = os.stat(os.path.join(os.path.expanduser(path), name))
        except (OSError, TypeError, ValueError):  # it is elsewhere, or nowhere
            continue
        found.append((path, name, about.st_size, about.st_mtime_ns, about.st_ino))
    return tuple(found)
