"""What the copy engine takes and gives: anything with these attributes.

`kvoffload_patch.tier.plan` says what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvoffload_patch.links import Failure, Link, Tickets, ticket_on


class Transfer(Protocol):
    """Blocks copied from one place to another under one ticket."""

    @property
    def ticket(self) -> int: ...
    @property
    def source(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def source_ids(self) -> Sequence[int]: ...
    @property
    def target_ids(self) -> Sequence[int]: ...
    @property
    def compared(self) -> bool: ...


class Plan(Protocol):
    """What the tier plans for one step."""

    @property
    def before(self) -> Sequence[Transfer]: ...
    @property
    def after(self) -> Sequence[Transfer]: ...
    @property
    def done(self) -> Tickets: ...
    @property
    def promised(self) -> Tickets: ...
    def waits_for(self, link: Link) -> int: ...
    def known_done(self, link: Link) -> int: ...


class Progress(NamedTuple):
    """What is done: every ticket up to these, per link, and which of them failed.

    A failure is told again until a plan shows that the scheduler has heard of it.
    """

    done: Tickets
    failed: tuple[Failure, ...] = ()

    def done_on(self, link: Link) -> int:
        """The ticket up to which all of a link are done."""
        return ticket_on(self.done, link)
