"""`AlternatingStreams`: what else crosses the bus waits for a piece, not for all of a copy."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
from transfer.opened import Open


@pytest.mark.parametrize("jobs", [[6], [1, 1, 3]])
@pytest.mark.parametrize(
    ("backend", "what"), [("staged", "store"), ("staged", "load"), ("groups", "load")]
)
@pytest.mark.parametrize("step", [1, 2])  # from slot to slot: neighbours, or none
def test_each_piece_is_on_the_other_stream_of_the_bus_behind_the_one_before(
    opened: Open, backend: str, what: str, jobs: list[int], step: int
) -> None:
    """So that the copy engine lets others' copies in between: it goes on with a stream that can."""
    setup = opened("kv_outermost", backend, "cpu", chunk=1)  # a piece has one block's bytes
    assert setup.streams is not None and setup.cuda is not None
    seen: list[tuple[int, int]] = []
    made: list[int] = []  # in the order in which the device has done them
    streams = setup.cuda.streams
    enqueue = setup.driver._enqueue

    def noted(target: int, source: int, nbytes: int, stream: int) -> None:
        seen.append((stream, nbytes))
        enqueue(target, source, nbytes, stream)
        streams[stream - 1].append(partial(made.append, len(seen)))

    setup.driver._enqueue = noted
    first = 0
    for count in jobs:
        numbers = [*range(first, first + count)]
        first += count
        getattr(setup, what)(numbers, [step * number for number in numbers])
    pieces = [
        sum(nbytes for _, nbytes in piece) for _, piece in itertools.groupby(seen, lambda c: c[0])
    ]
    assert sum(pieces) == first * setup.layout.block_bytes
    assert max(pieces) <= setup.layout.block_bytes
    assert len(pieces) >= first and len({stream for stream, _ in seen}) == 2
    if backend == "staged":
        assert len(pieces) == first
    assert setup.streams.bus.number in dict(seen), "the end of a copy is behind it"
    assert setup.streams.blocks.number not in dict(seen)
    setup.wait()
    assert made == [*range(1, len(seen) + 1)]
