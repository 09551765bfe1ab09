"""Copies that are made late keep the order that a device's streams would give them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine.late_copies import StreamQueue


@pytest.fixture
def queues(monkeypatch: pytest.MonkeyPatch) -> list[StreamQueue]:
    """Of loads and of stores, in the order in which an engine makes them."""
    monkeypatch.setattr(StreamQueue, "made", [])
    return [StreamQueue(), StreamQueue()]


def copy(name: str, made: list[str]):
    def start(_: object) -> Iterator[None]:
        made.append(name)
        yield

    return start


def test_a_load_begins_behind_the_store_that_the_stream_waited_for(queues):
    loads, stores = queues
    made: list[str] = []
    stores.submit(1, copy("store", made), ())
    stores.hold(None, 1)
    loads.submit(1, copy("load", made), ())
    loads.hold(None, 1)
    loads.forward_begins()
    assert made == ["store", "load"]


def test_a_copy_begins_behind_those_of_another_link(queues):
    loads, stores = queues
    made: list[str] = []
    stores.submit(1, copy("store", made), ())
    loads.submit(1, copy("load", made), [(stores, 1)])
    loads.hold(None, 1)
    loads.forward_begins()
    assert made == ["store", "load"]
