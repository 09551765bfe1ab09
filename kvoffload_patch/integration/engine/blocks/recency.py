"""Keeping what requests use on the GPU recent in the tier, and together when they have ended."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

from kvoffload_patch.integration.engine.adapters.prefix_groups import PrefixGroups
from kvoffload_patch.integration.engine.adapters.vllm_scheduler import SchedulerView
from kvoffload_patch.integration.engine.blocks.free_front import FreeFront
from kvoffload_patch.integration.engine.blocks.gpu_heads import GpuHeads
from kvoffload_patch.integration.engine.requests.lookup import LookupResult
from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.prefix_share import NO_HIT, Hit


class Recency:
    """Keeps what requests hit on the GPU recent in the tier, and stores what it has lost since.

    One step later: admitting a request makes a step slow on the host as it is. What a request has
    used and stored at several times is told to the tier once more when it has ended, all together.

    Args:
        view: the scheduler.
        manager: of the tier.
        front: of the free blocks, among which what is hit may have been.

    Attributes:
        heads: of prefixes on the GPU; None while vLLM's own order is left alone.
        used: GPU blocks, and the key of each, of prefixes that were noted.
        keys: of each request that has not ended and stores: what it hit, loaded and computed.
    """

    def __init__(
        self,
        view: SchedulerView,
        manager: OffloadManager,
        front: FreeFront,
    ) -> None:
        self._view = view
        self._manager = manager
        self._front = front
        self.heads: GpuHeads | None = None
        self.used: list[tuple[list[int], list[Hashable]]] = []
        self.keys: dict[str, list[Hashable]] = {}
        self._at_once: dict[str, int] = {}  # how many of these came first, together
        self._hit: dict[str, Hit] = {}  # of the requests in `keys`, those that hit or load anything
        self._in_order = view.in_order
        self._groups = PrefixGroups(view.key, view.manager.coordinator.single_type_managers)
        self._block_tokens = view.block_sizes[self._groups.first or 0]

    @property
    def gpu_share(self) -> float:
        """As `PrefixShare.share`; 1 without heads."""
        return 1.0 if self.heads is None else self.heads.prefix_share.share

    def keep_heads(self, wanted: bool) -> None:
        """From now on the GPU keeps heads of prefixes where it can, or whole ones."""
        if not wanted:
            self.heads = None
        elif self.heads is None and self._groups.first is not None and self._view.adapter.in_order:
            self.heads = GpuHeads(self._view, self._manager)
            # Its clock begins at 0.
            self._hit = {name: hit._replace(uses=0) for name, hit in self._hit.items()}

    def note(self, request_id: str, found: LookupResult) -> None:
        """A request hits this; loads under way may fill some of the GPU blocks."""
        blocks = found.gpu_blocks
        if not (blocks or found.keys):
            self.keys[request_id] = []
            return
        keys = cached = self._view.keys_in(blocks)
        if not all(keys):  # loads under way fill some, and of some a part is hit
            blocks = [block for block, key in zip(blocks, keys) if key is not None]
            cached = [key for key in keys if key is not None]
        if blocks:
            self.used.append(([block.block_id for block in blocks], cached))
        self.keys[request_id] = found.merged(keys, found.keys)
        if keys or found.keys:
            self._at_once[request_id] = len(keys or found.keys)
            uses = self.heads.prefix_share.uses if self.heads is not None else 0
            size, hit_blocks = self._block_tokens, len(blocks) + len(found.keys)
            if not self._in_order:  # these are of all groups
                hit_blocks = found.tokens // size
            self._hit[request_id] = Hit(hit_blocks, found.gpu_tokens // size, uses)

    def computes(self, request_id: str, keys: Collection[Hashable]) -> None:
        """A request computes the blocks of these keys, behind all that were noted for it."""
        known = self.keys.setdefault(request_id, [])
        if not known:
            self._at_once[request_id] = len(keys)
        known += keys

    def ended(self, request_ids: Collection[str], paused: bool = False) -> None:
        """These requests have ended; some may be unknown here.

        Args:
            paused: nothing is loaded now.
        """
        heads, whole = self.heads, paused
        looked = paused  # before any tail is moved, and only where one may be
        for request_id in request_ids:
            keys, hit = self.keys.pop(request_id, []), self._hit.pop(request_id, None)
            several = len(keys) > self._at_once.pop(request_id, 0)
            if several or (hit is not None and None in keys):
                # Some may have been computed twice, as after a preemption.
                once = dict.fromkeys(keys)
                once.pop(None, None)  # of what another request's load has filled
                keys = list(once)
            # What was used or stored at once is together as it is.
            tells = several or (bool(keys) and hit is None)
            rests: Mapping[Hashable, Hashable] | None = {}
            if not self._in_order and (tells or heads is not None):
                # Beside a connector vLLM 0.26 tells of states that it has given no key.
                keys, rests = self._groups.in_order(key for key in keys if key is not None)
            if tells:
                self._tell(keys, rests, together=several)
            if heads is not None and keys and rests is not None:
                if heads.prefix_share.share < 1 and not looked:
                    looked, whole = True, heads.blocks_are_left(len(request_ids))
                heads.ended(keys, rests, hit or NO_HIT, whole)

    def _tell(
        self, keys: list[Hashable], rests: Mapping[Hashable, Hashable] | None, together: bool
    ) -> None:
        """Of a request that has ended; what is known to be together is told for its order alone."""
        if self._in_order:
            self._manager.request_ended(keys, together)
        elif rests or together:
            self._manager.request_ended(keys, together, rests or None)

    def refresh(self) -> None:
        """Make recent what was noted since the last call."""
        for gpu_block_ids, keys in self.used:
            self._manager.hit_on_gpu(gpu_block_ids, keys, self._view.still_cached)
            self._front.hit(gpu_block_ids, keys)
        self.used.clear()

    def clear(self) -> None:
        """Forget what was noted."""
        self.used.clear()
        self.keys.clear()
        self._at_once.clear()
        self._hit.clear()
        if self.heads is not None:
            self.heads.clear()
