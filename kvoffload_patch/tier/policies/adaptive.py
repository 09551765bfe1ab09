"""Least recently used first, or as `arc` does: whichever would have recomputed less lately.

Which one it is say two models of the tier, one with each policy: a sample of the keys, and as small
a share of the slots (Waldspurger and others, "Cache Modeling and Optimization using Miniature
Simulations", 2017). Until they differ, what was used least recently leaves.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence

from kvoffload_patch.tier.policies.arc import ArcPolicy
from kvoffload_patch.tier.recency_model import KeySample, RecencyModel, sample_of
from kvoffload_patch.tier.tuning import (
    MODEL_BATCH_BLOCKS,
    MODEL_LEAD_PARTS,
    MODEL_MEMORY_TIMES,
)


class ArcModel:
    """A tier in small with `ArcPolicy`: which of the sampled keys it would have.

    Args:
        slots: one at least.

    Attributes:
        policy: its own.
    """

    def __init__(self, slots: int) -> None:
        self._key_of: list[Hashable] = [None] * slots
        self._slot_of: dict[Hashable, int] = {}
        self.policy = ArcPolicy(self._key_of)

    @property
    def keys(self) -> Iterable[Hashable]:
        """Those that it has."""
        return self._slot_of.keys()

    def grow(self, slots: int) -> None:
        """It has so many slots from now on, none fewer than before."""
        self._key_of += [None] * (slots - len(self._key_of))
        self.policy.grow()

    def use(self, keys: Sequence[Hashable]) -> int:
        """These are used, or stored where they are missing; returns how many are missing."""
        slot_of = self._slot_of
        missing = [key for key in dict.fromkeys(keys) if key not in slot_of]
        if len(missing) < len(keys):
            self.policy.hit([slot_of[key] for key in keys if key in slot_of])
        if missing:
            self._store(missing[-len(self._key_of) :])
        return len(missing)

    def ended(self, keys: Iterable[Hashable]) -> None:
        """A request that used these has ended."""
        slot_of = self._slot_of
        self.policy.regroup([slot_of[key] for key in keys if key in slot_of])

    def _store(self, keys: Sequence[Hashable]) -> None:
        key_of, slot_of = self._key_of, self._slot_of
        self.policy.miss(keys)
        used = len(slot_of)
        slots = list(range(used, min(used + len(keys), len(key_of))))
        if len(slots) < len(keys):
            evicted = self.policy.evict(len(keys) - len(slots))
            for slot in evicted:
                del slot_of[key_of[slot]]
            slots += evicted
        for key, slot in zip(keys, slots):
            key_of[slot] = key
            slot_of[key] = slot
        self.policy.insert(slots)


class AdaptivePolicy(ArcPolicy):
    """`ArcPolicy`, but what was used least recently leaves as long as that recomputes no more.

    A model counts each store and each load of a block that it would not have had: that would have
    been recomputed. It does not count hits on the GPU. Old counts fade. The share of blocks used
    once is the model's, too, so that what is evicted is what was modelled.

    Attributes:
        sample: of the keys that are stored.
        by_recency: what was used least recently leaves.
    """

    def __init__(self, key_of: Sequence[Hashable]) -> None:
        super().__init__(key_of)
        self.sample = KeySample()
        self.by_recency = True
        self._lead = 0.0  # blocks that `arc` would have recomputed fewer
        self._begin_models(sample_of(len(key_of)))

    def grow(self) -> None:
        super().grow()
        one_in = sample_of(len(self._key_of))
        if one_in != self._one_in:
            self._begin_models(one_in)
            return
        self._lru_model.slots = self._model_slots()
        self._arc_model.grow(self._model_slots())

    def miss(self, keys: Collection[Hashable]) -> None:
        sampled = self.sample.of(keys, self._one_in)
        if sampled:
            self._known.update(sampled)
            self._stored += reversed(sampled)
            if len(self._stored) >= MODEL_BATCH_BLOCKS:
                self._tell_stored()
        if not self.by_recency:  # else nothing that was evicted is remembered
            share = self.share
            super().miss(keys)
            self.share = share  # it is the model's

    def hit(self, slots: Sequence[int]) -> None:
        if sampled := self._sampled(slots):
            self._lru_model.use(sampled)
            self._arc_model.use(sampled)
        super().hit(slots)

    def regroup(self, slots: Sequence[int]) -> None:
        if sampled := self._sampled(slots):
            self._lru_model.ended(sampled)
            self._arc_model.ended(sampled)
        super().regroup(slots)

    def pin(self, slots: Sequence[int]) -> None:
        if sampled := self._sampled(slots):
            self._count(sampled)
        super().pin(slots)

    def evict(self, count: int) -> Sequence[int]:
        if not self.by_recency:
            return super().evict(count)
        return self._lists.take_oldest_of_all(count)

    # The models

    def _model_slots(self) -> int:
        return max(1, len(self._key_of) // self._one_in)

    def _begin_models(self, one_in: int) -> None:
        self._one_in = one_in
        slots = self._model_slots()
        self._lru_model = RecencyModel(slots)
        self._arc_model = ArcModel(slots)
        self._known = set[Hashable]()  # sampled keys that were stored
        self._stored: list[Hashable] = []  # of them, what the models are not told of yet

    def _sampled(self, slots: Sequence[int]) -> list[Hashable]:
        """Keys of these that are sampled; the models know of what was stored before them then."""
        known = self._known
        sampled = [key for key in map(self._key_of.__getitem__, slots) if key in known]
        if sampled:
            self._tell_stored()
        return sampled

    def _tell_stored(self) -> None:
        if self._stored:
            stored, self._stored = self._stored, []
            self._count(stored)

    def _count(self, keys: Sequence[Hashable]) -> None:
        """These would have been computed again by a tier that has them not."""
        slots = self._model_slots()
        self._lead *= max(0.0, 1 - len(keys) / (MODEL_MEMORY_TIMES * slots))
        self._lead += self._lru_model.use(keys) - self._arc_model.use(keys)
        self.share = self._arc_model.policy.share * self._one_in
        enough = slots / MODEL_LEAD_PARTS
        arc_leads = self._lead >= (enough if self.by_recency else enough / 10)
        if arc_leads == self.by_recency:
            self.by_recency = not arc_leads
            self._forget_all()
        if len(self._known) > MODEL_MEMORY_TIMES * slots:
            self._known = {*self._lru_model.keys, *self._arc_model.keys}
