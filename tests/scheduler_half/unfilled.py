"""Requests that do not run when a KV connector says that it has failed to fill blocks of theirs."""

from __future__ import annotations

import inspect
import random

from integration.engine.mini import BLOCK, Mini


def prompt(blocks: int, seed: int) -> list[int]:
    """A prompt of so many full blocks, and a token behind them."""
    rng = random.Random(seed)
    return [rng.randrange(3, 999) for _ in range(blocks * BLOCK + 1)]


def say(mini: Mini, *gpu_block_ids: int) -> None:
    """vLLM is told by a connector that it has failed to fill these."""
    takes = inspect.signature(type(mini.scheduler)._handle_invalid_blocks).parameters
    scheduled = [{}] if "num_scheduled_tokens" in takes else []
    mini.scheduler._handle_invalid_blocks(set(gpu_block_ids), *scheduled)


def table_of(mini: Mini, name: str) -> list[int]:
    """The GPU blocks of a request."""
    (table,) = mini.view.block_tables(name)
    return list(table)


def parked() -> int:
    """One that waits for a load hits nothing of what another has failed to fill, and that is gone.

    Returns:
        Tokens that it hits in the end.
    """
    mini = Mini(blocks=60, load_mode="parked", late=2)
    asked = prompt(6, seed=1)
    mini.only_in_cpu(asked)
    filled = mini.add(asked[: 3 * BLOCK + 1], count=30)
    while not mini.answers[filled]:
        mini.step()
    mini.add(asked, count=3)
    mini.begin_step()
    assert mini.tier._loads.num_parked == 1
    table = table_of(mini, filled)
    mini.abort(filled)
    mini.device.kv[table[1]] = [7] * BLOCK
    say(mini, table[1])
    mini.end_step()
    mini.run()
    mini.check()
    assert not mini.tier._invalid.untrusted
    return list(mini.hits.values())[-1]


def session() -> None:
    """One that waits for more input has computed upon such a block as well."""
    mini = Mini(blocks=60)
    if not hasattr(mini.scheduler, "num_waiting_for_streaming_input"):
        return  # this release has no sessions that go on
    name = mini.add(prompt(4, seed=1), count=1, resumable=True)
    while mini.scheduler.requests[name].status.name != "WAITING_FOR_STREAMING_REQ":
        mini.step()
    table = table_of(mini, name)[:4]
    keys = [mini.view.cached_key(gpu_block_id) for gpu_block_id in table]
    say(mini, table[1])
    assert [mini.manager.holds(key) for key in keys] == [True, False, False, False]


def runs_again() -> bool:
    """One that was preempted since, and has other blocks now, has computed upon it before that.

    Returns:
        Whether it runs again by then: from 0.27 on it waits for its tokens under way.
    """
    mini = Mini(blocks=60, in_flight=3, asynchronous=False)
    name = mini.add(prompt(5, seed=1), count=3)
    scheduled = mini.begin_step()
    table = table_of(mini, name)[:5]
    keys = [mini.view.cached_key(gpu_block_id) for gpu_block_id in table]
    blocks = [mini.pool.blocks[gpu_block_id] for gpu_block_id in table]
    mini.scheduler.connector = object()  # as if one had filled them
    mini.tier._invalid.step_scheduled(scheduled, [(mini.scheduler.requests[name], blocks)])
    mini.scheduler.connector = None
    if not hasattr(mini.scheduler, "_preempt_request"):
        return False
    mini.scheduler._preempt_request(mini.scheduler.running.pop(), 0.0)
    getattr(mini.scheduler, "prev_step_scheduled_req_ids", set()).clear()  # as with its reset
    mini.pool.free_blocks(mini.pool.get_new_blocks(mini.pool.get_num_free_blocks()))
    mini.scheduler.max_num_scheduled_tokens = 2 * BLOCK
    mini.begin_step()
    assert all(map(mini.manager.holds, keys))
    runs = len(table_of(mini, name)) == 2
    say(mini, table[1])
    assert not any(map(mini.manager.holds, keys))
    return runs
