"""A copy that is still to be enqueued, which others of the same link can join."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvoffload_patch.transfer.backends.base import Slices, Streams

Ids = Sequence[int]


class BlockCopy:
    """Blocks of a source, and where each goes.

    Args:
        copy: makes a copy, given both and the streams.
        source_ids, target_ids: numbers of blocks.
    """

    def __init__(
        self, copy: Callable[[Ids, Ids, Streams | None], Slices], source_ids: Ids, target_ids: Ids
    ) -> None:
        self._copy = copy
        self._source_ids, self._target_ids = source_ids, target_ids

    def __len__(self) -> int:
        """Blocks to be copied."""
        return len(self._target_ids)

    def __call__(self, streams: Streams | None) -> Slices:
        """Begin."""
        return self._copy(self._source_ids, self._target_ids, streams)

    def shares_targets(self, other: BlockCopy) -> bool:
        """Whether both copy to the same block, so that their order counts.

        A rank that is behind may have both queued: the later one was planned when the rank that
        reports had done the earlier one.
        """
        return not set(self._target_ids).isdisjoint(other._target_ids)

    def join(self, other: BlockCopy) -> None:
        """Copy the blocks of another one as well, which shares no target."""
        self._source_ids = (*self._source_ids, *other._source_ids)
        self._target_ids = (*self._target_ids, *other._target_ids)
