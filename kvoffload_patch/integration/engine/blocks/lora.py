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

from kvoffload_patch.integration.engine.adapters.vllm_scheduler import SchedulerView

logger = logging.getLogger("vllm.kvoffload_patch")


class LoraNames:
    """The adapters that requests have named, and which of them the tier is not to be used for.

    Args:
        view: the scheduler, whose ``stale_loras`` are kept here.
        path_in_keys: whether vLLM's keys have an adapter's path, and not its name alone.
    """

    def __init__(self, view: SchedulerView, path_in_keys: bool) -> None:
        self._scheduler, self._stale = view.scheduler, view.stale_loras
        self._paths: dict[Hashable, str] = {}  # by what keys have of an adapter
        self._path_in_keys = path_in_keys

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
        if before is not None and name not in self._stale:
            self._stale.add(name)
            logger.warning(
                "KV offload: LoRA adapter %s was loaded again under its name, so its blocks may be "
                "of other weights: reset the prefix cache to have the CPU tier for it again",
                name,
            )

    def all_forgotten(self) -> None:
        """vLLM has reset its prefix cache, and the tier is empty: no key stands for anything.

        But those of requests that were preempted for it, which compute again.
        """
        self._stale.clear()
        self._paths.clear()
        for request in self._scheduler.requests.values():
            if request.lora_request is not None:
                self.named(request.lora_request)
