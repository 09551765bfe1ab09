"""Whether what a load brings is what was stored: a checksum for each CPU slot, and verdicts.

A checksum is made of a block's bytes as they leave the KV tensors, and of loads that are compared
again of those that are put back. It lies beside the slots and not in them: a slot whose bytes were
never written, or were written by another store, has the wrong one. How it is computed is the
backends' affair; each compares its own only. It is an error-detecting code and keeps nobody out who
can write to this memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from kvoffload_patch.transfer.errors import TransferError

# Which loads are compared, as users choose it: none, or all.
OFF, FULL = "off", "full"

# To be called once, when the load is done: what is wrong with its bytes, or None.
Verdict = Callable[[], "str | None"]

# Odd, with bits all over: of the golden ratio, and of splitmix64.
PLACE = 0x9E3779B97F4A7C15 - (1 << 64)
MIX = 0xBF58476D1CE4E5B9 - (1 << 64)


def in_words(has_checksums: bool) -> str:
    """What follows how blocks are copied, in the log."""
    return ", checksums of all blocks" if has_checksums else ""


class Checksums:
    """The checksums of a rank's slots.

    A word of a block counts by its place in it, so that what comes in another order is found, and
    all its bits reach those that are kept.

    Args:
        num_slots: of the rank; 0 for no checksums.
        device: where checksums are computed.
        complete: whether this rank stores every block that it loads: it has no checksum of what
            another has stored to a slot that they have in common.

    Attributes:
        kept: whether there are any.
        complete: as given.
        sums: ``int64 [num_slots]`` on the device. 0: this rank has stored no block in that slot.
        mismatches: loads so far that brought other bytes than were stored.

    Raises:
        torch.OutOfMemoryError: no room on the device.
    """

    def __init__(self, num_slots: int, device: torch.device, complete: bool = True) -> None:
        self.kept, self.complete = num_slots > 0, complete
        self.mismatches = 0
        self.sums = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def forget_all(self) -> None:
        """No slot has a checksum any more; nothing is under way."""
        self.sums.zero_()

    def found(self, slot: int) -> str:
        """A load found another checksum in this slot: counts it, and says it."""
        self.mismatches += 1
        return (
            f"expected the checksum that the block in CPU slot {slot} was stored with, found "
            "another one, so its bytes changed in CPU memory or on the way; look for memory "
            "errors in the kernel's log"
        )


class Verdicts:
    """Words that loads under way write to from the device when they find a mismatch.

    Args:
        checksums: that are compared.
        under_way: so many loads can be, at most.
    """

    # Two words for each: a kernel is compiled for the alignment of what it is given.
    _STRIDE = 2

    def __init__(self, checksums: Checksums, under_way: int) -> None:
        pinned = checksums.sums.device.type != "cpu"
        size = under_way * self._STRIDE
        self._words = torch.zeros(size, dtype=torch.int64, pin_memory=pinned)
        self._read = self._words.numpy()
        self._checksums = checksums
        # The one that was given back longest ago is next: a load that was given up may write late.
        self._free = deque(range(0, size, self._STRIDE))

    def begin(self) -> tuple[torch.Tensor, Verdict, Callable[[], None]]:
        """For a load that begins.

        Returns:
            Where it writes the slot, counted from 1, of any block that does not match; its
            verdict; and what to call instead of that if the load is given up.

        Raises:
            TransferError: more are under way than there can be.
        """
        try:
            at = self._free.popleft()
        except IndexError:
            raise TransferError(
                "expected fewer loads under way than this GPU has blocks, found no place for "
                "what another one finds; report it."
            ) from None
        self._read[at] = 0

        def verdict() -> str | None:
            found = int(self._read[at])
            self._free.append(at)
            return self._checksums.found(found - 1) if found else None

        return self._words[at : at + self._STRIDE], verdict, lambda: self._free.append(at)
