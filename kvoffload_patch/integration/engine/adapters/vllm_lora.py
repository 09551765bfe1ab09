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
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, NamedTuple

from kvoffload_patch.integration.engine.tuning import (
    EXACT_ADAPTERS,
    FORGOTTEN_NAMES_BYTES,
)

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


class _ForgottenNames:
    """Any number of names in so many bits: all that were added are found, and few others.

    A Bloom filter, with 4 bits for each name. A million of them in 1 MiB find 2 % of all others.
    """

    def __init__(self) -> None:
        self._bits = bytearray()

    def __contains__(self, name: str) -> bool:
        bits = self._bits
        return bool(bits) and all(bits[at // 8] >> at % 8 & 1 for at in self._places(name))

    def add(self, name: str) -> None:
        """It is found from now on."""
        self._bits = self._bits or bytearray(FORGOTTEN_NAMES_BYTES)
        for at in self._places(name):
            self._bits[at // 8] |= 1 << at % 8

    def _places(self, name: str) -> list[int]:
        first = hash(name)
        return [(first + nth * (first >> 32 | 1)) % (8 * len(self._bits)) for nth in range(4)]


class LoraNames:
    """The adapters that requests have named, and which of them the tier is not to be used for.

    What was not named for longest is forgotten when there are too many, and the tier is not used
    for such a name either: what was loaded under it before is not known any more.

    Args:
        scheduler: a `vllm.v1.core.sched.scheduler.Scheduler`.

    Attributes:
        stale: names of adapters whose keys may stand for KV of other weights.
    """

    def __init__(self, scheduler: Any) -> None:
        from vllm.v1.core import kv_cache_utils

        self.stale: set[str] = set()
        self._scheduler = scheduler
        # The last one, by what keys have of it; the one that was named last is last.
        self._loaded = OrderedDict[tuple[str, str], _Loaded]()
        self._forgotten = _ForgottenNames()
        self._files: dict[_Loaded, tuple[Hashable, ...]] = {}  # as they were when it was loaded
        reads = kv_cache_utils._gen_lora_extra_hash_keys.__code__.co_names
        self._path_in_keys = "lora_path" in reads

    def is_stale(self, name: str) -> bool:
        """Whether the tier is not to be used for requests that name this adapter."""
        return name in self.stale or name in self._forgotten

    def named(self, lora: Any, to_be_loaded: bool = False) -> None:
        """A request names an adapter, or one is about to be loaded.

        Files are looked at where that is said, or the number or the path is a new one, and not for
        each request.

        Args:
            lora: a `vllm.lora.request.LoRARequest`.
            to_be_loaded: vLLM is asked to load it, and does unless it has one of this number.
        """
        name, now = lora.lora_name, _Loaded(lora.lora_path, lora.lora_int_id)
        known = name, now.path if self._path_in_keys else ""
        before, in_place = self._loaded.pop(known, None), getattr(lora, "load_inplace", False)
        self._loaded[known] = now
        written = to_be_loaded and now in self._files and self._files[now] != _stamps(now.path)
        if written:
            self._files[now] = ()  # which of them it has is not known
        if before == now and not (in_place or written):
            return
        files = self._files_of(now, in_place)
        if len(self._loaded) > EXACT_ADAPTERS:
            (forgotten, _), _ = self._loaded.popitem(last=False)
            self._forgotten.add(forgotten)
        if before is None:
            same = name not in self._forgotten
        else:
            same = bool(files and files == self._files.get(before) and not in_place)
        if same:
            return
        if name not in self.stale:
            if len(self.stale) >= EXACT_ADAPTERS:
                self._forgotten.add(self.stale.pop())
            self.stale.add(name)
            logger.warning(
                "KV offload: LoRA adapter %s was loaded again under its name, or is one of so many "
                "that it was forgotten, so its blocks may be of other weights; reset the prefix "
                "cache to have the CPU tier for it again",
                name,
            )

    def all_forgotten(self) -> None:
        """vLLM has reset its prefix cache, and the tier is empty: no key stands for anything.

        But those of requests that were preempted for it, which compute again.
        """
        self.stale.clear()
        self._loaded.clear()
        self._forgotten = _ForgottenNames()
        for request in self._scheduler.requests.values():
            if request.lora_request is not None:
                self.named(request.lora_request)

    def _files_of(self, loaded: _Loaded, again: bool) -> tuple[Hashable, ...]:
        """What tells whether its files were written since; empty if there are none at the path.

        That is so of one that is downloaded, or is in memory.
        """
        if again or loaded not in self._files:
            if len(self._files) >= EXACT_ADAPTERS:
                del self._files[next(iter(self._files))]
            self._files[loaded] = _stamps(loaded.path)
        return self._files[loaded]


class StepAdapters:
    """The adapters of a step: vLLM passes over a request whose own would be one too many.

    Args:
        most: adapters that a step may have.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._numbers = set[int]()

    def admit(self, request: Any) -> None:
        """This request takes part in the step."""
        if request.lora_request is not None:
            self._numbers.add(request.lora_request.lora_int_id)

    def refuse(self, request: Any) -> bool:
        """Whether vLLM passes over a request that waits, whatever room there is."""
        lora = request.lora_request
        if lora is None or len(self._numbers) < self._most:
            return False
        return lora.lora_int_id not in self._numbers


def adapters_of(scheduler: Any) -> StepAdapters | None:
    """Those of the running requests; None if there are none. O(running requests), as in vLLM."""
    config = scheduler.vllm_config.lora_config
    if config is None:
        return None
    adapters = StepAdapters(int(config.max_loras))
    for request in scheduler.running:
        adapters.admit(request)
    return adapters


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
