"""Copies that fail: no wrong token, no hang, no lost block, on vLLM's own scheduler."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm")

from integration.mini import BLOCK, Mini

MODES = ["inline", "auto", "parked"]


def talk(mini: Mini, seed: int, turns: int = 5, talks: int = 11) -> None:
    """Conversations that do not fit in the GPU cache together, some with a common beginning."""
    rng = random.Random(seed)
    common = [rng.randrange(3, 999) for _ in range(2 * BLOCK)]
    prompts = []
    for n in range(talks):
        own = [rng.randrange(3, 999) for _ in range(rng.randrange(20, 70))]
        prompts.append([*(common if n % 2 else []), *own])
    for _ in range(turns):
        for prompt in prompts:
            name = mini.add(list(prompt), count=rng.randrange(1, 6))
            for _ in range(rng.randrange(3)):
                mini.step()
            prompt += [rng.randrange(3, 999) for _ in range(rng.randrange(1, 20))]
            if rng.random() < 0.1:
                for _ in range(rng.randrange(2)):
                    mini.step()
                mini.scheduler.finish_requests(name, _aborted())
        mini.run()


def _aborted():
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED


def all_given_back(mini: Mini) -> None:
    """No GPU block and no CPU slot is held for anybody."""
    mini.tier.on_result(mini.manager.drained())
    mini.begin_step()
    mini.end_step()
    pool = mini.view.pool
    assert pool.get_num_free_blocks() == len(pool.blocks) - 1
    assert mini.manager.num_used == len(mini.manager._blocks)
    assert not any(block.ref_cnt for block in mini.manager._blocks.values())
    assert not mini.tier._loads.inline.unproven and not mini.tier._loads._parked


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("load_mode", MODES)
@pytest.mark.parametrize("in_flight", [1, 2])
def test_answers_are_right_whatever_fails(in_flight: int, load_mode: str, seed: int) -> None:
    rng = random.Random(seed)
    rate = {"load": rng.choice([0.3, 0.6]), "store": rng.choice([0.0, 0.2])}
    mini = Mini(
        fails=lambda direction, ticket: rng.random() < rate[direction],
        in_flight=in_flight,
        late=rng.randrange(3),
        load_mode=load_mode,
    )
    talk(mini, seed)
    mini.check()
    stats = mini.manager.stats
    assert stats.failed and stats.loaded and stats.stored
    all_given_back(mini)


@pytest.mark.parametrize("event", ["preempted", "aborted"])
def test_a_reader_that_is_gone_before_the_failure_is_known(event: str) -> None:
    """Its token does not come out, and nobody reads what it has computed and cached."""
    mini = Mini(
        fails=lambda d, ticket: d == "load" and ticket == 1, in_flight=2, load_mode="inline"
    )
    prompt, other = list(range(100, 100 + 4 * BLOCK)), list(range(5000, 5000 + 24 * BLOCK - 1))
    for asked in (prompt[: 2 * BLOCK + 1], other):
        mini.add(asked, count=1)
        mini.run()
    name = mini.add(prompt)
    assert mini.begin_step().kvoffload_plan.loads
    if event == "preempted":
        mini.scheduler._preempt_request(mini.scheduler.running.pop(), 0.0)
    else:
        mini.scheduler.finish_requests(name, _aborted())
    mini.end_step()
    again = mini.add(prompt)
    mini.run()
    mini.check()
    assert len(mini.answers[again]) == 4 and mini.manager.stats.failed == 2
