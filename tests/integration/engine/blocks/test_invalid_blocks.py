"""Beside a KV connector: what its loads bring is stored, and what they failed to bring is not."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from integration.engine.connectors import Connector
from integration.engine.mini import BLOCK, Mini
from scheduler_half.scenarios import nothing_held, prompt
from vllm.v1.outputs import KVConnectorOutput


def end_step(mini: Mini, **said: Any) -> None:
    """Take in the oldest output, with what the connector says of it."""
    mini.queue[-1][1].kv_connector_output = KVConnectorOutput(**said)
    mini.end_step()
    for name, sequence in mini.device._sequences.items():
        if name in mini.scheduler.requests:  # tokens that vLLM has dropped are not the model's
            sequence.tokens = mini._tokens(name)


def keys_of(mini: Mini, tokens: list[int], group: int = 0) -> list[Any]:
    """The keys of a prompt's full blocks."""
    from scheduler_half import parts

    request = parts.make_request("keys", tokens, 1)
    return [mini.view.key(block_hash, group) for block_hash in request.block_hashes]


def held(mini: Mini, tokens: list[int]) -> list[bool]:
    """Which of a prompt's full blocks the tier has, or will have."""
    return [mini.manager.holds(key) for key in keys_of(mini, tokens)]


def test_all_that_was_computed_upon_a_failed_load_is_discarded() -> None:
    """Also what another request has computed upon it."""
    mini = Mini(blocks=60)
    known = prompt(4, seed=1)
    connector = Connector(mini, False, known[: 4 * BLOCK])
    connector.fails = True
    own, other = known[: 4 * BLOCK] + prompt(2, 2), known[: 4 * BLOCK] + prompt(2, 3)
    name = mini.add(own, count=3)
    mini.add(other, count=3)
    mini.begin_step()
    assert all(held(mini, own))
    assert len(mini.queue[-1][0].num_scheduled_tokens) == 2
    end_step(mini, invalid_block_ids=set(connector.filled[name][1:]))
    assert held(mini, own) == held(mini, other) == [True, *[False] * 5]
    assert mini.manager.stats.removed["invalid"] == 3 + 2 + 2
    connector.known.clear()
    mini.run()
    assert mini.only_right_tokens()
    mini.settle()
    mini.pool.free_blocks(mini.pool.get_new_blocks(mini.pool.get_num_free_blocks()))
    mini.add(own, count=3)
    mini.add(other, count=3)
    mini.run()
    mini.check()
    nothing_held(mini)


@pytest.mark.parametrize("event", ["aborted", "preempted"])
def test_a_request_that_is_gone_has_computed_upon_it_as_well(event: str) -> None:
    """It is in no list of running requests, so that what it has cached would stay."""
    mini = Mini(blocks=60)
    known = prompt(3, seed=1)
    connector = Connector(mini, False, known[: 3 * BLOCK])
    connector.fails = True
    own = known + prompt(2, seed=2, tail=3)
    name = mini.add(own, count=3)
    mini.begin_step()
    assert all(held(mini, own))
    if event == "aborted":
        mini.abort(name)
    else:
        mini.scheduler._preempt_request(mini.scheduler.running.pop(), 0.0)
    end_step(mini, invalid_block_ids=set(connector.filled[name][1:]))
    assert not any(held(mini, own)), "not even the first is known to be right"


def test_a_session_that_waits_for_input_has_computed_upon_it_as_well() -> None:
    """A connector may find out later, and the session is in no list of running requests."""
    mini = Mini(blocks=60)
    known = prompt(4, seed=1, tail=0)
    connector = Connector(mini, False, known)
    connector.fails = True
    own = known + prompt(2, seed=2, tail=3)
    name = mini.add(own, count=1, resumable=True)
    mini.begin_step()
    end_step(mini)
    assert not mini.scheduler.running
    mini.add(prompt(2, seed=3), count=3)
    mini.begin_step()
    assert all(held(mini, own))
    end_step(mini, invalid_block_ids=set(connector.filled[name][1:]))
    assert held(mini, own) == [True, *[False] * 5]


def test_what_was_computed_behind_a_window_that_does_not_show_it_is_discarded_as_well() -> None:
    """Of whom its window has left behind vLLM itself does not know, and answers wrongly once."""
    mini = Mini(blocks=80, windows=(40,))
    known = prompt(3, seed=1, tail=0)
    connector = Connector(mini, False, known)
    connector.fails = True
    own = known + prompt(6, seed=2, tail=0)
    other = own + prompt(3, seed=3)
    name, behind = mini.add([*own, 5], count=3), mini.add(other, count=3)
    mini.begin_step()
    (table,) = mini.view.block_tables(behind)
    failed = set(connector.filled[name][1:])
    assert mini.hits[behind] == len(own) and failed.isdisjoint(table)
    end_step(mini, invalid_block_ids=failed)
    assert held(mini, other) == [True, *[False] * 11]
    mini.run()
    mini.settle()
    connector.known.clear()
    mini.pool.free_blocks(mini.pool.get_new_blocks(mini.pool.get_num_free_blocks()))
    mini.answers[behind].clear()
    mini.counts[behind] = 0
    mini.add(other, count=3)
    mini.run()
    mini.check()
    nothing_held(mini)


def half_in_cpu(mini: Mini) -> tuple[list[int], Connector, str]:
    """A prompt whose head a connector has and the tier does not, which has the rest; it fails.

    Asked for is another one with that head, by the name that comes last.
    """
    asked = prompt(6, seed=1, tail=3)
    known = asked[: 3 * BLOCK]
    mini.only_in_cpu(asked)
    for key in keys_of(mini, known):
        mini.manager.discard(key)
    connector = Connector(mini, False, known)
    connector.fails = True
    return asked, connector, mini.add(known + prompt(1, seed=2, tail=3), count=30)


@pytest.mark.parametrize("waits_on", [True, False], ids=["waits on", "aborted, too"])
@pytest.mark.parametrize("gone", [True, False], ids=["aborted", "computes them again"])
def test_a_request_that_waits_for_a_load_holds_none_of_them(gone: bool, waits_on: bool) -> None:
    """It is no request that vLLM would compute them again for."""
    mini = Mini(blocks=60, in_flight=2, asynchronous=False, load_mode="parked", late=2)
    asked, connector, name = half_in_cpu(mini)
    mini.begin_step()
    connector.known.clear()
    waits = mini.add(asked, count=3)
    mini.begin_step()
    assert waits in mini.tier._loads._parked
    if gone:
        mini.abort(name)
    if not waits_on:
        mini.abort(waits)
    end_step(mini, invalid_block_ids=set(connector.filled[name][1:]))
    (load,) = mini.tier._loads.under_way
    untrusted = mini.tier._invalid.untrusted
    assert untrusted
    assert not [block for block in load.waiting[0].held if block.block_id in untrusted]
    mini.run()
    mini.check()
    assert mini.hits.get(waits) == ((0 if gone else 6 * BLOCK) if waits_on else None)
    assert not (untrusted or mini.breaker.detached)
    nothing_held(mini)


def test_a_request_that_is_parked_before_they_are_computed_again_holds_none_of_them() -> None:
    """Who computes them again may go before it has; who waits would have them as they are."""
    limits = {"max_num_batched_tokens": BLOCK, "max_num_scheduled_tokens": BLOCK}
    mini = Mini(blocks=60, load_mode="parked", late=3, limits=limits)
    asked, connector, name = half_in_cpu(mini)
    mini.begin_step()
    connector.known.clear()
    end_step(mini, invalid_block_ids=set(connector.filled[name][1:]))
    waits = mini.add(asked, count=3)
    mini.begin_step()
    assert waits in mini.tier._loads._parked
    mini.abort(name)
    mini.run()
    mini.check()
    assert mini.hits[waits] == BLOCK and not mini.tier._invalid.untrusted
    nothing_held(mini)


@pytest.mark.parametrize("gone", [True, False], ids=["aborted", "ended by vLLM"])
def test_nobody_hits_what_was_computed_upon_a_failed_load(gone: bool) -> None:
    """vLLM leaves in its cache what a request that is gone has loaded, and what others computed."""
    mini = Mini(blocks=60)
    mini.scheduler.recompute_kv_load_failures = False
    known = prompt(3, seed=1, tail=0)
    connector = Connector(mini, False, known)
    connector.fails = True
    other = known + prompt(2, seed=3)
    name = mini.add(known + prompt(1, seed=2), count=3)
    if not gone:
        mini.add(other, count=3)
    mini.begin_step()
    if gone:
        mini.abort(name)
    invalid = set(connector.filled[name][1:])
    connector.known.clear()
    end_step(mini, invalid_block_ids=invalid)
    mini.counts = dict.fromkeys(mini.counts, 0)
    again = mini.add(other, count=3)
    mini.run()
    mini.check()
    assert mini.hits[again] == (0 if gone else BLOCK)
    assert not mini.tier._invalid.untrusted
    nothing_held(mini)


def test_what_vllm_leaves_in_its_cache_is_not_stored_again_before_it_is_computed_again() -> None:
    """It does not say when, so once nobody uses it, it leaves that cache."""
    mini = Mini(blocks=6)  # all are handed out again in the end
    known = prompt(4, seed=1)
    connector = Connector(mini, False, known[: 4 * BLOCK])
    connector.fails = True
    name = mini.add(known, count=2)
    mini.begin_step()
    end_step(mini, invalid_block_ids=set(connector.filled[name][1:]))
    connector.known.clear()
    mini.run()
    mini.settle()
    assert held(mini, known) == [True, False, False, False]
    other = mini.add(known, count=2)
    mini.run()
    mini.settle()
    assert mini.hits[other] == BLOCK
    assert all(held(mini, known)), "computed in blocks handed out since, they are right"
    mini.check()
    assert not mini.tier._invalid.untrusted


def test_what_a_connector_has_received_is_stored_though_its_request_must_wait() -> None:
    mini = Mini(blocks=25, load_mode="parked")
    received = prompt(4, seed=1, tail=BLOCK)
    connector = Connector(mini, True, received[: 4 * BLOCK])
    name = mini.add(received, count=2)
    mini.begin_step()
    mini.end_step()
    full = mini.add(prompt(19, seed=2, tail=5), count=8)
    while not mini.answers[full]:
        mini.begin_step()
        connector_says = {}
        if mini.scheduler.requests[full].num_computed_tokens >= 19 * BLOCK:
            connector.fill(name)
            connector_says = {"finished_recving": {name}}
        end_step(mini, **connector_says)
    scheduled = mini.begin_step()
    assert list(scheduled.num_scheduled_tokens) == [full], "there is no room for the other"
    mini.end_step()
    mini.settle()
    assert held(mini, received) == [True] * 4 + [False]
    mini.run()
    mini.check()
    nothing_held(mini)


@pytest.mark.parametrize("failed_in", [0, 1])
def test_what_other_groups_computed_upon_a_failed_load_is_discarded(failed_in: int) -> None:
    """A layer computes upon those before it, whichever group they are of."""
    mini = Mini(windows=(None, 200), blocks=73)  # a window that is wider than the prompt
    asked = prompt(5, seed=1)
    name = mini.add(asked, count=8)
    mini.step()
    keys = [keys_of(mini, asked, group) for group in (0, 1)]
    assert all(map(mini.manager.holds, sum(keys, [])))
    tables = mini.view.block_tables(name)
    mini.tier.on_invalid({tables[failed_in][2]})
    left = [[*map(mini.manager.holds, of_group)] for of_group in keys]
    assert left == [[True] * 2 + [False] * 3] * 2
    assert mini.tier._invalid.untrusted.keys() == {*tables[0][2:5], *tables[1][2:5]}
