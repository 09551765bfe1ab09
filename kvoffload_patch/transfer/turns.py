"""Whose turn a CPU slot is, where several ranks have the slots in common.

Their blocks hold the same bytes, so each stores to its own slots only: the bus of every device is
used, and no slot has two writers. A slot's rank never changes, so what a rank knows of the slots
that it has stored to (checksums, failures) stays right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Turn(NamedTuple):
    """Of so many ranks in a row, this one.

    Attributes:
        at: counted from 0.
        of: ranks that have the slots in common.
    """

    at: int = 0
    of: int = 1

    def own(
        self, source_ids: Sequence[int], slots: Sequence[int]
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Those blocks of a store that this rank stores, and their slots; may be none."""
        if self.of == 1:
            return source_ids, slots
        pairs = [(s, slot) for s, slot in zip(source_ids, slots) if slot % self.of == self.at]
        return tuple([s for s, _ in pairs]), tuple([slot for _, slot in pairs])


ALONE = Turn()
