"""Whether what the tier holds was computed with the weights that the ranks have now.

vLLM resets its prefix cache when it falls asleep. At level 1 the weights come back as they were,
unless a trainer writes new ones before the next request, on the model itself or by functions of its
own; it relies on sleep for the KV cache and resets nothing. So what is kept through sleep is used
after the weights have been compared with those that it was computed with, and not before.

An engine that is awake is given new weights by RPC. What the tier holds is forgotten then. Blocks
that vLLM's own cache still holds, and whatever is computed upon them, are of the weights before; as
long as vLLM uses them, nothing is stored and nothing is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from kvoffload_patch.config import Settings
from kvoffload_patch.integration.engine.ranks.workers import RankGroup
from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.policies import policy_named

logger = logging.getLogger("vllm.kvoffload_patch")

# In names of functions that change weights: of vLLM's workers, and of trainers' own extensions of
# them, such as TRL's `update_named_param` and `receive_lora_update`, ROLL's `broadcast_bucket` and
# `load_states`.
_CHANGE = (
    "weight", "param", "load_model", "load_state", "state_dict", "lora", "adapter", "bucket",
    "refit",
)  # fmt: skip
# Functions of vLLM's workers that leave weights as they are.
_NO_CHANGE = {
    "compute_weight_checksums",
    "init_weight_transfer_engine",
    "list_loras",
    "pin_lora",
    "remove_lora",
    "shutdown_weight_transfer_engine",
    "supports_draft_weight_updates",
}
MIXED = "weights were updated and vLLM's prefix cache has not been reset since; reset it"


class Weights:
    """The weights of one engine, compared where it can sleep.

    Args:
        ranks: the workers.
        manager: of the tier.

    Attributes:
        doubted: they may not be those that the tier's blocks were computed with: `changed` is to
            be asked before any block is looked up or stored.
        mixed: GPU blocks may be of other weights than their keys stand for: none may be stored, and
            nothing may be loaded behind one.
        gpu_empty: no GPU block was handed out since vLLM's prefix cache was reset.
    """

    def __init__(self, ranks: RankGroup, manager: OffloadManager) -> None:
        self._ranks = ranks
        self._manager = manager
        self._watched = self._falls_asleep = self.doubted = self.mixed = False
        self._known: tuple[str, ...] | None = None  # of the tier's blocks
        self.gpu_empty = True

    def watch(self) -> None:
        """Compare them from now on; nothing is stored yet."""
        self._watched = self.doubted = True

    def sleep_begins(self, level: int) -> None:
        """Until `sleep_over`, the next reset of the prefix cache at rest is that of this sleep."""
        self._falls_asleep = self._watched and level == 1

    def sleep_over(self) -> None:
        """vLLM has fallen asleep, or has failed to."""
        self._falls_asleep = False

    def kept_by_reset(self, at_rest: bool) -> bool:
        """Whether blocks may stay through the reset under way, to be asked once for each.

        Args:
            at_rest: no request runs on. One that comes while sleep waits for these is a user's.
        """
        asleep = self._falls_asleep and at_rest
        self._falls_asleep &= not at_rest
        self.doubted = self._watched
        # Weights that were changed before it and are changed back after it are seen here only.
        same = asleep and (self._ranks.asleep or self._same(self._ranks.weights()))
        return same and not self.mixed

    def gpu_emptied(self) -> None:
        """vLLM has reset its prefix cache, so that no GPU block holds anything."""
        self.gpu_empty, self.mixed = True, False

    def updated(self) -> bool:
        """The ranks were asked to change their weights; the tier has forgotten all or will.

        Returns:
            Whether GPU blocks may be of other weights now, as `mixed`.
        """
        if not (self.gpu_empty or self.mixed):
            self.mixed = True
            logger.warning("KV offload: paused: %s to have the CPU tier again", MIXED)
        return self.mixed

    def changed(self) -> bool:
        """Whether the tier has blocks of other weights; what it gets from now on is of these."""
        if self._ranks.asleep:
            return True  # vLLM is about to compute with weights that are not there
        found, before = self._ranks.weights(), self._manager.num_used
        same, self._known = self._same(found), found
        self.doubted = False
        if not before:
            return False
        if same:
            logger.info("KV offload: %d blocks are kept, the weights are the same", before)
        else:
            text = (
                "KV offload: the weights have changed; %d blocks are forgotten, and computed again"
            )
            logger.warning(text, before)
        return not same

    def _same(self, found: tuple[str, ...]) -> bool:
        return all(found) and found == self._known


def changes_weights(method: str | Callable[..., Any]) -> bool:
    """Whether a function called on the workers may change weights, as its name says.

    Args:
        method: as `collective_rpc` gets it: the name of a method, or a function.
    """
    while isinstance(method, partial):
        method = method.func
    kind = type(method).__name__
    name = method if isinstance(method, str) else getattr(method, "__name__", kind)
    return name not in _NO_CHANGE and any(part in name.lower() for part in _CHANGE)


def forget_gpu(manager: OffloadManager, eviction: str) -> None:
    """The GPU holds nothing any more, the tier what it held; no copy is under way. O(slots)."""
    manager.drop_queued()
    if manager.lazy:  # nothing is a copy any more
        manager.change_policy(policy_named(eviction))


def can_keep(vllm_config: Any, scheduler: Any, settings: Settings) -> bool:
    """Whether this engine can sleep, and its weights alone say whether blocks are still right.

    An adapter or a drafting model has weights of its own, and a quantized model may hold some where
    the digest does not look. A connector, or a stream of KV cache events, is told that everything
    is gone.
    """
    pool = scheduler.kv_cache_manager.block_pool
    return (
        settings.keep_asleep
        and not settings.wipe
        and vllm_config.model_config.enable_sleep_mode
        and vllm_config.model_config.quantization is None
        # Up to 0.16 the front end resets the cache before the engine hears of sleep.
        and hasattr(scheduler, "pause_state")
        and vllm_config.lora_config is None
        and vllm_config.speculative_config is None
        and scheduler.connector is None
        and not pool.enable_kv_cache_events
    )
