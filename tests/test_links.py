"""Places, links, and the tickets that are known of each link."""

from __future__ import annotations

from kvoffload_patch.links import CPU, GPU, LOAD, STORE, ticket_on


def test_a_load_ends_and_a_store_begins_on_the_gpu() -> None:
    assert (LOAD, STORE) == ((CPU, GPU), (GPU, CPU))


def test_a_ticket_is_of_one_link_and_0_stands_before_all() -> None:
    further = ("disk", CPU)
    tickets = ((STORE, 4), (further, 7))
    assert [ticket_on(tickets, link) for link in (STORE, further, LOAD)] == [4, 7, 0]
    assert ticket_on((), LOAD) == 0
