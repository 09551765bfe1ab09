"""What the copy engine takes and gives: anything with these attributes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Batch(Protocol):
    """Blocks moved under one ticket."""

    @property
    def ticket(self) -> int: ...
    @property
    def gpu_block_ids(self) -> Sequence[int]: ...
    @property
    def cpu_slots(self) -> Sequence[int]: ...


class Plan(Protocol):
    """What the tier plans for one step; `kvoffload_patch.tier.plan` says what it means."""

    @property
    def loads(self) -> Sequence[Batch]: ...
    @property
    def store(self) -> Batch | None: ...
    @property
    def wait_load(self) -> int: ...
    @property
    def wait_store(self) -> int: ...
    @property
    def stores_done(self) -> int: ...
    @property
    def loads_done(self) -> int: ...


class Progress(NamedTuple):
    """What is done: every ticket up to these numbers, and which of them failed.

    A failure is told again until a plan shows that the scheduler has heard of it.
    """

    loads_done: int
    stores_done: int
    failed_loads: tuple[int, ...] = ()
    failed_stores: tuple[int, ...] = ()
