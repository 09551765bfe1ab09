"""Beside a KV connector: what its loads bring is stored, and what they failed to bring is not."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from integration.engine.mini import BLOCK, Mini
from scheduler_half.device import value_after
from scheduler_half.scenarios import nothing_held, prompt
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.v1.outputs import KVConnectorOutput

WRONG = [7] * BLOCK


class Connector(KVConnectorBase_V1):
    """Knows prompts, and fills the blocks of those who ask for them, within the step or later.

    Args:
        mini: whose scheduler it is attached to.
        beside: loads go on beside the step, until `arrive`.
        known: the prompts.
    """

    def __init__(self, mini: Mini, beside: bool, *known: list[int]) -> None:
        self._mini = mini
        self._beside = beside
        self.known = list(known)
        self.fails = False
        self._loads: dict[str, tuple[list[int], list[int], int]] = {}
        self.filled: dict[str, list[int]] = {}
        mini.scheduler.connector = self

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        found = self._blocks_known(request.prompt_token_ids) * BLOCK - num_computed_tokens
        return max(0, found), self._beside and found > 0

    def _blocks_known(self, tokens: list[int]) -> int:
        known = [len(one) for one in self.known if tokens[: len(one)] == one]
        return min(max(known, default=0), len(tokens) - 1) // BLOCK

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            tokens = list(request.prompt_token_ids)
            end = self._blocks_known(tokens)
            table = list(blocks.get_block_ids()[0])[:end]
            self._loads[request.request_id] = (tokens, table, end - num_external_tokens // BLOCK)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if not self._beside:
            for name in list(self._loads):
                self.fill(name)
        return KVConnectorMetadata()

    def fill(self, name: str) -> None:
        """A load arrives; of one that fails, only the first block is right."""
        tokens, table, first = self._loads.pop(name)
        values, value = [], 0
        for token in tokens:
            value = value_after(value, token)
            values.append(value)
        blocks = range(first, len(table))
        for at in blocks:
            wrong = self.fails and at > first
            right = values[at * BLOCK : (at + 1) * BLOCK]
            self._mini.device.kv[table[at]] = list(WRONG) if wrong else right
        self.filled[name] = [table[at] for at in blocks]

    def start_load_kv(self, *_: Any, **__: Any) -> None: ...
    def wait_for_layer_load(self, *_: Any) -> None: ...
    def save_kv_layer(self, *_: Any, **__: Any) -> None: ...
    def wait_for_save(self) -> None: ...
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return False, None

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def has_pending_push_work(self) -> bool:
        return False

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return (0,)

    def take_events(self) -> tuple[()]:
        return ()


def end_step(mini: Mini, **said: Any) -> None:
    """Take in the oldest output, with what the connector says of it."""
    mini.queue[-1][1].kv_connector_output = KVConnectorOutput(**said)
    mini.end_step()
    for name, sequence in mini.device._sequences.items():
        if name in mini.scheduler.requests:  # tokens that vLLM has dropped are not the model's
            sequence.tokens = mini._tokens(name)


def keys_of(mini: Mini, tokens: list[int]) -> list[Any]:
    """The keys of a prompt's full blocks."""
    from scheduler_half import parts

    request = parts.make_request("keys", tokens, 1)
    return [mini.view.key(block_hash, 0) for block_hash in request.block_hashes]


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


def test_what_vllm_leaves_in_its_cache_is_not_stored_again_before_it_is_computed_again() -> None:
    """It does not say when, so not before the block is handed out again."""
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
    other = mini.add(known, count=2)  # it hits them on the GPU
    mini.run()
    mini.settle()
    assert mini.hits[other] == 4 * BLOCK and held(mini, known) == [True, False, False, False]
    mini.pool.free_blocks(mini.pool.get_new_blocks(mini.pool.get_num_free_blocks()))
    mini.add(known, count=2)
    mini.run()
    mini.settle()
    assert all(held(mini, known)), "computed in blocks handed out since, they are right"
    mini.check()


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
