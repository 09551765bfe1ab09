"""Whether GPU and tier hold different blocks, or the tier what the GPU holds as well."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

from kvoffload_patch.tier.recency_model import KeySample, RecencyModel, sample_of, sampled
from kvoffload_patch.tier.tuning import (
    MODEL_BATCH_BLOCKS,
    MODEL_LEAD_PARTS,
    MODEL_MEMORY_TIMES,
    RECOMPUTE_TIMES,
)


class ExclusiveGain:
    """What exclusive caching finds more than inclusive caching, beside what it stores more.

    Two models of GPU and tier together say it, of a sample of the keys: one has the tier's slots
    alone, because those hold what the GPU holds, too; the other has the GPU's blocks besides. What
    the first would recompute and the second would not is the gain. What is loaded has to be stored
    again before the GPU loses it, because its copy was given up: that is the cost. Old counts fade.

    Args:
        slots: of the tier.
        gpu_blocks: of the GPU's prefix cache.

    Attributes:
        sample: of the keys that were computed.
        pays: the gain is larger than the cost.
    """

    def __init__(self, slots: int, gpu_blocks: int) -> None:
        self.sample = KeySample()
        self.pays = False
        self._slots, self._gpu_blocks = slots, gpu_blocks
        self._lead = self._loaded = 0.0  # blocks of the sample
        self._begin_models(sample_of(slots))

    def resize(self, slots: int) -> None:
        """The tier has so many slots from now on."""
        one_in, grows = sample_of(slots), slots >= self._slots
        self._slots = slots
        if one_in == self._one_in and grows:
            self._tell_computed()
            self._inclusive.slots = self._in_small(slots)
            self._exclusive.slots = self._in_small(slots + self._gpu_blocks)
        else:
            self._begin_models(one_in)

    def computed(self, keys: Collection[Hashable]) -> None:
        """These were computed, and the tier does not have them."""
        if some := self.sample.look(keys, self._one_in):
            self._waiting += some
            if len(self._waiting) >= MODEL_BATCH_BLOCKS:
                self._tell_computed()

    def loaded(self, keys: Collection[Hashable]) -> None:
        """These are loaded."""
        if some := sampled(keys, self._one_in):
            self._tell_computed()
            self._count(some, len(some))

    def hit_on_gpu(self, keys: Collection[Hashable]) -> None:
        """These were found on the GPU."""
        if some := sampled(keys, self._one_in):
            self._tell_computed()
            self._inclusive.use(some)
            self._exclusive.use(some)

    def _tell_computed(self) -> None:
        if self._waiting:
            self._count(self._waiting, 0)
            self._waiting.clear()

    def _count(self, keys: Sequence[Hashable], loaded: int) -> None:
        slots = self._in_small(self._slots)
        left = max(0.0, 1 - len(keys) / (MODEL_MEMORY_TIMES * slots))
        self._loaded = self._loaded * left + loaded
        self._lead = self._lead * left + self._inclusive.use(keys) - self._exclusive.use(keys)
        cost = self._loaded / RECOMPUTE_TIMES
        if self.pays:
            self.pays = self._lead > cost / 2
        else:
            self.pays = self._lead > cost + slots / MODEL_LEAD_PARTS

    def _in_small(self, blocks: int) -> int:
        return max(1, blocks // self._one_in)

    def _begin_models(self, one_in: int) -> None:
        self._one_in = one_in
        self._waiting: list[Hashable] = []  # were computed, which the models are not told of yet
        self._inclusive = RecencyModel(self._in_small(self._slots))
        self._exclusive = RecencyModel(self._in_small(self._slots + self._gpu_blocks))
