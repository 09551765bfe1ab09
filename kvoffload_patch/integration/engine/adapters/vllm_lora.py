"""LoRA adapters whose keys may stand for KV of other weights than they have now.

vLLM's keys have an adapter's name, from 0.31 on its path as well. An adapter that is loaded in
place, or up to 0.30 from another path under a name that was used before, has the keys of the one
before it. vLLM's own cache goes on giving KV of that one until its blocks are reused; the tier
would for much longer.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Any

logger = logging.getLogger("vllm.kvoffload_patch")


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
        self._paths: dict[Hashable, str] = {}  # by what keys have of an adapter
        reads = kv_cache_utils._gen_lora_extra_hash_keys.__code__.co_names
        self._path_in_keys = "lora_path" in reads

    def named(self, lora: Any) -> None:
        """A request names an adapter, or one is loaded.

        Args:
            lora: a `vllm.lora.request.LoRARequest`.
        """
        name, path = lora.lora_name, lora.lora_path
        known = (name, path) if self._path_in_keys else name
        before = self._paths.get(known)
        if before == path and not getattr(lora, "load_inplace", False):
            return
        self._paths[known] = path
        if before is not None and name not in self.stale:
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
        self._paths.clear()
        for request in self._scheduler.requests.values():
            if request.lora_request is not None:
                self.named(request.lora_request)
