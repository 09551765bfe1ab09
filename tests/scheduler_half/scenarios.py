"""What a release's scheduler goes through with a tier: each is a function that raises or returns
what was seen. All run on any release; those that one does not have raise `NotThere`.
"""

from __future__ import annotations

import importlib.util
import inspect
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain, count
from types import SimpleNamespace
from typing import Any

from engine.random_left import of_the_tier
from integration.engine.mini import BLOCK, FakeRanks, Mini, Release
from packaging.version import Version
from scheduler_half import parts, preemptions, recomputed, unfilled
from scheduler_half.device import LoadFailed, answer
from scheduler_half.drafts import Drafter
from scheduler_half.sizes import Wide
from scheduler_half.states import STATE
from transfer.resident import kvoffload_threads

from kvoffload_patch.integration.engine.adapters.vllm_experts import limits_hits
from kvoffload_patch.integration.engine.eligibility import check_eligible
from kvoffload_patch.integration.errors import TierRefused
from kvoffload_patch.integration.protocol import PLAN
from kvoffload_patch.links import LOAD

Facts = dict[str, Any]


class NotThere(Exception):
    """This release does not have what the scenario is about; the text says what."""


def prompt(blocks: int, seed: int, tail: int = 1) -> list[int]:
    """A prompt of so many full blocks, and ``tail`` tokens behind them."""
    rng = random.Random(seed)
    return [rng.randrange(3, 999) for _ in range(blocks * BLOCK + tail)]


def free_blocks(mini: Mini) -> int:
    """GPU blocks that nobody holds."""
    return int(mini.pool.get_num_free_blocks())


def statuses(mini: Mini) -> dict[str, str]:
    """The status of each request that is there."""
    return {name: request.status.name for name, request in mini.scheduler.requests.items()}


def nothing_held(mini: Mini) -> None:
    """Nothing is left once all is done: blocks, slots, lookups, counts, prompts, threads."""
    mini.settle()
    mini.begin_step()
    mini.end_step()
    mini.settle()  # it may have stored what was near the front of the free blocks
    assert free_blocks(mini) == len(mini.pool.blocks) - 1, "GPU blocks were lost"
    queued = mini.pool.free_block_queue.get_all_free_blocks()
    assert len({block.block_id for block in queued}) == len(queued) == free_blocks(mini)
    assert not any(block.ref_cnt for block in queued), "a block in use is in the free queue"
    assert not of_the_tier(mini.tier), of_the_tier(mini.tier)
    if mini.replay is not None:
        mini.replay.check(mini.manager)
    assert not kvoffload_threads(), "threads of ours"


def talk(mini: Mini, seed: int, turns: int = 4, talks: int = 10, aborts: float = 0.1) -> None:
    """Conversations that do not fit in the GPU cache together, some with a common beginning."""
    rng = random.Random(seed)
    common = [rng.randrange(3, 999) for _ in range(2 * BLOCK)]
    prompts = []
    for n in range(talks):
        own = [rng.randrange(3, 999) for _ in range(rng.randrange(20, 70))]
        prompts.append([*(common if n % 2 else []), *own])
    for _ in range(turns):
        for prompt in prompts:
            name = mini.add(prompt, count=rng.randrange(1, 6))
            for _ in range(rng.randrange(3)):
                mini.step()
            if rng.random() < aborts and name in mini.scheduler.requests:
                mini.abort(name)
            prompt += [rng.randrange(3, 999) for _ in range(rng.randrange(1, 20))]
        mini.run()
    mini.check()


# Whatever happens, for long


def conversations(load_mode: str = "auto", runs: int = 3, **more: Any) -> Facts:
    """Random conversations, with copies that are late by none to three steps."""
    loaded = stored = resumed = 0
    told: Counter[str] = Counter()
    for seed in range(runs):
        mini = Mini(load_mode=load_mode, late=(3 * seed + runs // 2) % 4, events=True, **more)
        talk(mini, seed)
        nothing_held(mini)
        stats = mini.manager.stats
        assert stats.loaded and stats.stored, f"{stats.loaded} loaded, {stats.stored} stored"
        loaded, stored = loaded + stats.loaded, stored + stats.stored
        resumed += mini.device.resumed
        told += mini.replay.seen
    return {"loaded": loaded, "stored": stored, "resumed": resumed, "told": dict(told)}


def without_tier() -> Facts:
    """The same without a tier, and the model itself is right."""
    for more in ({}, {"windows": (None, 40), "blocks": 49}):
        talk(Mini(tier=False, **more), seed=0)
    return {}


def asynchronous() -> Facts:
    """Two and three steps under way at once, all kinds of loads."""
    if importlib.util.find_spec("vllm.v1.core.sched.async_scheduler") is None:
        raise NotThere("no asynchronous scheduler")
    facts = {}
    for in_flight, load_mode, more in (
        (2, "inline", {}),
        (2, "parked", {}),
        (3, "auto", {"windows": (None, 40), "blocks": 49}),
    ):
        mini = Mini(in_flight=in_flight, load_mode=load_mode, late=in_flight - 1, **more)
        if _refusal(mini):
            raise NotThere(f"refused: {_refusal(mini)}")
        talk(mini, seed=in_flight)
        nothing_held(mini)
        assert mini.manager.stats.loaded
        facts[f"{load_mode}, {in_flight} steps"] = mini.manager.stats.loaded
    return facts


def _refusal(mini: Mini) -> str:
    """Why the tier would not be attached here, or nothing; its own stand-in does not count."""
    coordinator = vars(mini.kv_manager.coordinator)
    stand_in = coordinator.pop("find_longest_cache_hit", None)
    try:
        check_eligible(mini.config, mini.scheduler)
    except TierRefused as refusal:
        return str(refusal)
    finally:
        if stand_in is not None:
            coordinator["find_longest_cache_hit"] = stand_in
    return ""


def hybrid() -> Facts:
    """Full attention beside a sliding window."""
    more: dict[str, Any] = {"windows": (None, 40), "blocks": 49, "num_slots": 800}
    return {
        mode: conversations(mode, runs=2, **more)["loaded"] for mode in ("inline", "parked", "auto")
    }


def watch_loads(mini: Mini) -> Counter[str]:
    """See that no load writes to a block which its own step takes from a request it preempts.

    From 0.14 on vLLM tells a KV connector of those with the step, within `execute_model`, so that
    it ends what it saves in the background; the loads of that step have begun by then.
    """
    seen, begin_step = Counter[str](), mini.begin_step

    def begin() -> Any:
        running = [request.request_id for request in mini.scheduler.running]
        tables = {name: set(chain(*mini.view.block_tables(name))) for name in running}
        scheduled = begin_step()
        plan = getattr(scheduled, PLAN, None)
        written = {block for load in plan.before for block in load.target_ids} if plan else set()
        seen["steps with loads"] += bool(written)
        for name, blocks in tables.items():
            if mini.scheduler.requests[name].status.name == "PREEMPTED":
                seen["preempted"] += 1
                assert not written & blocks, f"a load writes to what {name} has lost"
        return scheduled

    mini.begin_step = begin  # type: ignore[method-assign]
    return seen


def preemption() -> Facts:
    """Requests that outgrow the GPU are preempted, and resumed with what the tier has."""
    facts: Facts = {}
    for load_mode, second_runner in (("inline", False), ("parked", False), ("parked", True)):
        mini = Mini(load_mode=load_mode, late=2, blocks=25, events=True)
        if second_runner and not hasattr(mini.scheduler, "use_v2_model_runner"):
            continue
        mini.scheduler.use_v2_model_runner = second_runner
        seen = watch_loads(mini)
        for seed in range(4):
            mini.add(prompt(4, seed=seed), count=60 + 20 * seed)
        mini.run()
        assert seen["steps with loads"] and seen["preempted"], seen
        mini.check()
        nothing_held(mini)
        assert mini.device.resumed, "nothing was preempted"
        assert mini.manager.stats.loaded, "nothing was loaded for those that were preempted"
        facts[f"{load_mode}{', second runner' * second_runner}"] = mini.manager.stats.loaded
    return facts


def failing_loads() -> Facts:
    """Parked loads that fail are computed; an inline one ends the engine before any wrong token."""
    rng = random.Random(5)
    mini = Mini(lambda direction, _: rng.random() < 0.4, load_mode="parked", late=1, events=True)
    talk(mini, seed=3)
    nothing_held(mini)
    assert mini.manager.stats.failed and mini.manager.stats.loaded
    facts: Facts = {"failed": mini.manager.stats.failed}
    mini = Mini(lambda direction, ticket: direction == "load" and ticket == 2, load_mode="inline")
    try:
        talk(mini, seed=3)
    except LoadFailed as error:
        assert str(error) == str([(LOAD, 2)]) and mini.only_right_tokens()
        return facts
    raise AssertionError("a step has read a load that failed")


def crowd() -> Facts:
    """Many short requests, old and new prompts, that queue for little room and a slow bus."""
    facts = {}
    for seed, load_mode in ((5, "parked"), (1, "auto"), (2, "inline")):
        rng = random.Random(seed)
        late, blocks = rng.randrange(4), rng.choice([25, 40])
        ranks = FakeRanks(rng.choice([0.1, 1.0, 15.0, 60.0]))
        mini = Mini(load_mode=load_mode, late=late, blocks=blocks, num_slots=2000, ranks=ranks)
        known = [prompt(rng.randrange(1, 12), seed=1000 + n) for n in range(10)]
        mini.only_in_cpu(*known)
        for _ in range(60):
            n = rng.randrange(15)
            asked = known[n] if n < 10 else prompt(rng.randrange(6), seed=rng.randrange(10**6))
            own = prompt(0, seed=rng.randrange(10**6), tail=rng.choice([1, 40]))
            mini.add(asked + own, count=rng.randrange(1, 6))
            for _ in range(rng.choice([0, 0, 1, 3])):
                if mini.queue or mini.scheduler.has_requests():
                    mini.step()
        mini.run(steps=1000)
        mini.check()
        nothing_held(mini)
        assert mini.manager.stats.loaded > 60
        facts[load_mode] = mini.manager.stats.loaded
    return facts


def priority() -> Facts:
    """A waiting queue that is a heap: who is admitted next is who is looked up next."""
    if importlib.util.find_spec("vllm.v1.core.sched.request_queue") is None:
        raise NotThere("requests have no priority")
    facts = {}
    for load_mode in ("inline", "parked"):
        mini = Mini(load_mode=load_mode, policy="priority", late=2, blocks=41)
        known = [prompt(2 + n, seed=20 + n) for n in range(8)]
        mini.only_in_cpu(*known)
        rng = random.Random(7)
        for n in rng.sample(range(8), 8) * 2:
            mini.add(known[n], count=3, priority=rng.randrange(3))
        mini.run(steps=500)
        mini.check()
        nothing_held(mini)
        facts[load_mode] = mini.manager.stats.loaded
        assert facts[load_mode] >= sum(range(2, 10))
    return facts


def grammar() -> Facts:
    """A request that waits for its grammar is not looked up before it has it."""
    from vllm.v1.request import RequestStatus

    facts = {}
    for load_mode in ("inline", "parked"):
        mini = Mini(load_mode=load_mode, late=2)
        mini.only_in_cpu(prompt(6, seed=1))
        name = mini.add(prompt(6, seed=1))
        request = mini.scheduler.requests[name]
        names = ("WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR", "WAITING_FOR_FSM")
        (waits,) = (RequestStatus[n] for n in names if n in RequestStatus.__members__)
        request.status = waits
        request.structured_output_request = SimpleNamespace(grammar=None)
        mini.add(prompt(1, seed=2), count=4)
        for _ in range(3):
            mini.step()
        assert request.status == waits and not mini.manager.stats.loaded
        request.structured_output_request.grammar = object()
        mini.run(steps=100)
        mini.check()
        nothing_held(mini)
        assert mini.hits[name] == 6 * BLOCK
        facts[load_mode] = mini.manager.stats.loaded
    return facts


# Requests that wait for a load, and those behind them


def behind_the_bus() -> Facts:
    """While loads wait for the bus, others begin, and cost those that wait not a step."""
    facts = {}
    for load_mode in ("auto", "parked"):
        begun = [_seven_loads(load_mode, fresh) for fresh in (0, 40)]
        assert begun[0] == begun[1], f"alone, and with others behind them: {begun}"
        facts[load_mode] = begun[0]
    return facts


def _seven_loads(load_mode: str, others: int) -> list[int]:
    """The steps in which seven requests began whose loads the bus takes one at a time."""
    limits = {"max_num_seqs": 60}
    ranks = FakeRanks(40.0)
    mini = Mini(blocks=60, late=4, load_mode=load_mode, limits=limits, ranks=ranks)
    known = [prompt(4, seed=seed) for seed in range(1, 8)]
    mini.only_in_cpu(*known)
    mini.add(prompt(1, seed=8), count=90)
    mini.step()
    hits = [mini.add(one, count=2) for one in known]  # 5 blocks each, of 59
    fresh = [mini.add(prompt(2, seed=seed), count=9) for seed in range(20, 20 + others)]
    began: dict[str, int] = {}
    step = 0
    while mini.scheduler.has_unfinished_requests():
        mini.step()
        step += 1
        if step == 1:
            assert len(mini.tier._loads.arriving) == 4, "the bus is full with one load"
            now = sum(name in mini.hits for name in fresh)
            # Of 59 blocks 2 are used, 5 are for the load under way, 6 for each that waits, with the
            # one that it leaves to those running; and 4 for each of these.
            assert now == min(others, 4), f"{now} began; those that wait leave room for 4"
        began |= {name: step for name in mini.hits if name not in began}
    mini.check()
    nothing_held(mini)
    assert [mini.hits[name] for name in hits] == [4 * BLOCK] * 7
    return [began[name] for name in hits]


def behind_stores() -> Facts:
    """A load waits a step for what it would overwrite to be stored; one behind it does not."""
    mini = Mini(blocks=49, load_mode="parked", store="auto", weighs=False)
    old = prompt(14, seed=1)
    mini.only_in_cpu(old)
    mini.manager._stores_ahead = False
    mini.tier._front._ahead = 0
    mini.add(prompt(1, seed=2), count=40)
    for seed in (3, 4, 5):
        mini.add(prompt(14, seed=seed), count=1)
    while len(mini.scheduler.running) + len(mini.scheduler.waiting) > 1:
        mini.step()
    waits, behind = mini.add(old, count=1), mini.add(prompt(1, seed=6), count=1)
    loaded = sum(len(plan.before) for plan in mini.plans)
    mini.step()
    assert behind in mini.hits and waits not in mini.hits
    assert sum(len(plan.before) for plan in mini.plans) == loaded, "its load has begun"
    mini.run()
    mini.check()
    nothing_held(mini)
    assert mini.hits[waits] == 14 * BLOCK
    return {"loaded": mini.manager.stats.loaded}


def priority_behind_the_bus() -> Facts:
    """One that waits for the bus keeps its room, but not from those of a higher priority."""
    if importlib.util.find_spec("vllm.v1.core.sched.request_queue") is None:
        raise NotThere("requests have no priority")
    mini = Mini(blocks=24, late=4, load_mode="parked", policy="priority", ranks=FakeRanks(40.0))
    known = [prompt(4, seed=seed) for seed in range(1, 4)]
    mini.only_in_cpu(*known)
    first, *waiting = [mini.add(one, count=2, priority=5) for one in known]
    mini.step()
    assert statuses(mini)[first] == "WAITING_FOR_REMOTE_KVS"
    asked = ((18, 9), (8, 1))  # 23 blocks have room: the one behind has none beside those waiting
    behind, before = (mini.add(prompt(n, seed=n), count=2, priority=p) for n, p in asked)
    mini.step()
    assert before in mini.hits and behind not in mini.hits
    mini.run(steps=200)
    mini.check()
    nothing_held(mini)
    assert list(mini.hits)[3:] == [before, first, *waiting, behind]
    assert [mini.hits[name] for name in waiting] == [4 * BLOCK] * 2
    return {"loaded": mini.manager.stats.loaded}


# What running requests take


class DemandChecked:
    """Running requests take no more in a step than the tier has reckoned with before it."""

    def __init__(self, mini: Mini) -> None:
        self._mini = mini
        self.prompts = 0  # steps in which a running request computed a part of its prompt
        self.blocks = 0  # that running requests have taken

    def step(self) -> None:
        """One step of the engine, compared."""
        mini, view = self._mini, self._mini.view
        tokens, bound = view.demand_of_running()
        exact, before = view.count_blocks_for_running(), self._blocks_of_running()
        preempted = mini.device.resumed + len(mini.scheduler.waiting)
        scheduled = mini.begin_step()
        taken = scheduled.num_scheduled_tokens
        if mini.device.resumed + len(mini.scheduler.waiting) <= preempted:
            after = self._blocks_of_running()
            blocks = sum(after[name] - held for name, held in before.items() if name in after)
            assert blocks <= exact <= bound, (blocks, exact, bound)
            assert sum(taken.get(name, 0) for name in before) <= tokens
            self.blocks += blocks
            self.prompts += any(taken.get(name, 0) > 1 for name in before)
        while len(mini.queue) >= mini.in_flight:
            mini.end_step()

    def _blocks_of_running(self) -> dict[str, int]:
        managers = self._mini.kv_manager.coordinator.single_type_managers
        names = [request.request_id for request in self._mini.scheduler.running]
        return {name: sum(len(m.req_to_blocks[name]) for m in managers) for name in names}


def demand_of_running(in_flight: int = 1, lookahead: int = 0) -> Facts:
    """Prompts computed in parts, decodes and requests that begin again, beside each other."""
    facts = {}
    for windows in ((None,), (None, 40)):
        mini = Mini(in_flight=in_flight, blocks=130, windows=windows, lookahead=lookahead)
        checked, rng = DemandChecked(mini), random.Random(in_flight)
        for seed in range(12):
            mini.add(prompt(rng.choice([1, 5, 20, 40]), seed=seed), count=rng.randrange(2, 60))
            for _ in range(rng.randrange(4)):
                checked.step()
        while mini.scheduler.has_unfinished_requests():
            checked.step()
        while mini.queue:
            mini.end_step()
        mini.check()
        nothing_held(mini)
        assert checked.prompts > 5 and checked.blocks > 50, vars(checked)
        facts[f"groups: {len(windows)}"] = checked.blocks
    return facts


def running_prompt() -> Facts:
    """A load takes no blocks that a running request needs for the rest of its prompt."""
    resumed = {}
    for load_mode in ("inline", "parked"):
        mini = Mini(load_mode=load_mode, blocks=41)
        hit = prompt(12, seed=1)
        mini.only_in_cpu(hit)
        mini.add(prompt(30, seed=2), count=3)  # in two steps
        mini.step()
        mini.add(hit, count=3)
        mini.run()
        mini.check()
        nothing_held(mini)
        resumed[load_mode] = mini.device.resumed
    assert not any(resumed.values()), f"preempted: {resumed}, which plain vLLM never does here"
    return {}


def headroom() -> Facts:
    """A load waits that would take the block that a running request needs in the next step."""
    resumed = {}
    for load_mode in ("inline", "parked"):
        mini = Mini(load_mode=load_mode, blocks=25, late=4)
        hit = prompt(17, seed=1)
        mini.only_in_cpu(hit)
        for seed in (2, 3):
            mini.add(prompt(2, seed=seed, tail=14), count=20)  # 3 blocks, and soon one more
        mini.step()
        name = mini.add(hit, count=2)  # 18 blocks of the 18 that are free
        mini.run()
        mini.check()
        nothing_held(mini)
        assert mini.hits[name] == 17 * BLOCK
        resumed[load_mode] = mini.device.resumed
    assert not any(resumed.values()), f"preempted: {resumed}"
    return {}


def preemptions_counted() -> Facts:
    """A few random loads preempt no more than without a tier, and never beside a load."""
    found = preemptions.compare((0, 2))  # the second one fails where a load leaves no room
    assert found["more"] == [] and not found["beside loads"] and found["tier"], found
    return found


def computed_twice() -> Facts:
    """A preempted request computes its last blocks again, and nothing before them.

    With `lazy` the step that preempts may hand out one that is not stored yet, and otherwise one
    whose store is under way, or that running requests take in the step that admits it again.
    """
    facts: Facts = {}
    for in_flight in (1, 2) if _schedules_ahead() else (1,):
        for store, weighs, most in (
            ("eager", True, 1), ("lazy", True, 2), ("auto", True, 1), ("auto", False, 1),
        ):  # fmt: skip
            about: dict[str, Any] = {"in_flight": in_flight, "store": store, "weighs": weighs}
            modes = "inline", "parked"
            seen = [recomputed.play(n, load_mode=mode, **about) for n, mode in enumerate(modes)]
            blocks = [n for one in seen for n in one.blocks]
            tokens = [n for one in seen for n in one.tokens]
            lost, preempted = sum(one.lost for one in seen), sum(one.preempted for one in seen)
            found = f"{in_flight}, {about}: {preempted=}, {lost=}, {blocks=}, {tokens=}"
            assert preempted >= 10, found
            assert max(blocks) <= most and sum(blocks) <= preempted / 10, found
            # With the tokens behind the last full block, those of steps under way included.
            assert max(tokens) < (most + 1) * BLOCK and sum(tokens) < preempted * BLOCK, found
            assert lost <= (preempted / 10 if store == "lazy" else 0), found
            facts[f"{in_flight}, {store}{'' if weighs else ' at once'}"] = sum(tokens) // preempted
    return facts


def _schedules_ahead() -> bool:
    """Whether the tier takes part in asynchronous scheduling here."""
    there = importlib.util.find_spec("vllm.v1.core.sched.async_scheduler") is not None
    return there and not _refusal(Mini(in_flight=2))


# One thing at a time


def hit_inline() -> Facts:
    """An evicted prefix is there in the very step that asks for it."""
    mini = Mini(load_mode="inline", late=3)
    mini.only_in_cpu(prompt(6, seed=1))
    name = mini.add(prompt(6, seed=1))
    mini.begin_step()
    assert mini.hits[name] == 6 * BLOCK
    mini.end_step()
    mini.run()
    mini.check()
    nothing_held(mini)
    return {"hit": mini.hits[name]}


def hit_parked() -> Facts:
    """A request waits for its prefix while another runs, and steps without tokens go on."""
    mini = Mini(load_mode="parked", late=3)
    mini.only_in_cpu(prompt(6, seed=1))
    name = mini.add(prompt(6, seed=1))
    scheduled = mini.begin_step()
    assert not scheduled.num_scheduled_tokens and scheduled.total_num_scheduled_tokens == 0
    assert statuses(mini) == {name: "WAITING_FOR_REMOTE_KVS"}
    mini.end_step()
    other = mini.add(prompt(1, seed=2), count=2)
    mini.step()
    assert other in mini.hits and name not in mini.hits, "the other one does not wait"
    mini.run()
    assert mini.hits[name] == 6 * BLOCK
    mini.check()
    nothing_held(mini)
    return {"hit": mini.hits[name]}


def last_block() -> Facts:
    """Of a prompt of whole blocks that is known in full, one token is computed."""
    whole, rest = prompt(5, seed=1, tail=0), {"parked": BLOCK}
    for load_mode in ("inline", "auto", "parked"):
        mini = Mini(load_mode=load_mode)
        mini.only_in_cpu(whole)
        for _ in ("in the tier", "and on the GPU"):
            name = mini.add(whole, count=3)
            while name not in mini.hits:
                scheduled = mini.begin_step()
                mini.end_step()
            assert scheduled.num_scheduled_tokens == {name: rest.get(load_mode, 1)}
            assert scheduled.total_num_scheduled_tokens == rest.get(load_mode, 1)
            assert mini.hits[name] == 5 * BLOCK - rest.get(load_mode, 1)
            mini.run()
        mini.check()
        nothing_held(mini)
        assert mini.manager.stats.loaded == (4 if load_mode == "parked" else 6)
    return {"loaded": sum(_repeat(seed) for seed in range(4))}


def _repeat(seed: int) -> int:
    """Prompts of whole blocks, again and again."""
    rng = random.Random(seed)
    mini = Mini(load_mode=("inline", "auto")[seed % 2], late=seed, blocks=30)
    known = [prompt(n, seed=seed + n, tail=0) for n in range(1, 9)]
    mini.only_in_cpu(*known)
    ones = 0
    for _ in range(40):
        name = mini.add(rng.choice(known), count=rng.randrange(1, 20))
        for _ in range(rng.randrange(4)):
            mini.step()
        ones += mini.hits.get(name, 0) % BLOCK == BLOCK - 1
    mini.run()
    mini.check()
    nothing_held(mini)
    assert ones, "no request came to compute its last token only"
    return int(mini.manager.stats.loaded)


_DRAFTED = (
    (None,), (40,), (None, 40), (None, 40, 40), (None, STATE),
    (None, Wide(2 * BLOCK)), (Wide(3 * BLOCK), None), (None, Wide(2 * BLOCK), 40),
)  # fmt: skip


def beside_drafts() -> Facts:
    """With EAGLE as much is hit as where the GPU has all, whatever it lacks, and no more loaded."""
    facts = {}
    for windows in _DRAFTED:
        try:
            hit, blocks = _hit_beside_drafts(windows, "", 0)
        except (AssertionError, AttributeError) as reason:  # of vLLM's own; 0.9.1 has no states
            facts[str(windows)] = f"{reason}"
            continue
        for load_mode in ("inline", "parked"):
            for lost in (0, 1, 2, 10):
                found, loaded = _hit_beside_drafts(windows, load_mode, lost)
                assert found == hit, f"{windows}, {load_mode}, {lost} lost: {found}, not {hit}"
                assert loaded <= blocks and (loaded == blocks or lost < 10), (windows, loaded)
        facts[str(windows)] = hit
    assert facts["(None,)"] == 9 * BLOCK
    return facts


def _hit_beside_drafts(windows: tuple[Any, ...], load_mode: str, lost: int) -> tuple[int, int]:
    """Tokens that are hit of ten blocks, and blocks loaded.

    The GPU has lost the last so many blocks, of each group those of their tokens; without a load
    mode there is no tier, and the blocks are those that are hit.
    """
    drafter = Drafter(2, seed=1, reads_layers=True, always=False)
    more = {"load_mode": load_mode} if load_mode else {"tier": False}
    mini = Mini(windows=windows, drafter=drafter, blocks=120, **more)
    asked = prompt(10, seed=5)
    name = mini.add(asked, count=2)
    mini.step()
    tables = mini.kv_manager.get_block_ids(name)
    mini.run()
    mini.settle()
    kept = (10 - lost) * BLOCK
    for table, window in zip(tables, windows):
        size = int(window) if isinstance(window, Wide) else BLOCK
        for block_id in filter(None, table[kept // size : 10 * BLOCK // size]):
            mini.pool._maybe_evict_cached_block(mini.pool.blocks[block_id])
    asked = [*asked, *[9] * 20]
    blocks = 0 if load_mode else _hit_blocks(mini, asked)
    name = mini.add(asked, count=3)
    mini.run()
    mini.check()
    if load_mode:
        nothing_held(mini)
        blocks = mini.manager.stats.loaded
    return mini.hits[name], blocks


def _hit_blocks(mini: Mini, tokens: list[int]) -> int:
    """Blocks of a prompt's hit, of all groups; up to 0.22 vLLM finds more of some than it takes."""
    request = parts.make_request("looked-up", tokens, 1)
    blocks, hit, *_ = mini.kv_manager.get_computed_blocks(request)
    getattr(mini.kv_manager, "free_block_hashes", lambda _: None)(request)
    sizes = [manager.block_size for manager in mini.kv_manager.coordinator.single_type_managers]
    taken = [of[: hit // size] for of, size in zip(blocks.blocks, sizes)]
    return sum(not block.is_null for of in taken for block in of)


def keys_with_the_next_tokens() -> Facts:
    """From 0.33 on keys have the tokens that EAGLE reads behind a block, which is no miss then."""
    from vllm.v1.core.block_pool import BlockPool

    if "num_hash_lookahead_tokens" not in inspect.signature(BlockPool.__init__).parameters:
        raise NotThere("keys have the tokens of their blocks alone")
    facts = {}
    for seed, (ahead, in_flight) in enumerate(((1, 1), (1, 2), (3, 1), (3, 2))):
        for load_mode in ("inline", "parked"):
            drafter = Drafter(3, seed, True, in_flight > 1, hash_lookahead=ahead)
            mini = Mini(drafter=drafter, in_flight=in_flight, load_mode=load_mode, blocks=41)
            mini.only_in_cpu(prompt(10, seed=5))
            name = mini.add([*prompt(10, seed=5), 9, 9], count=3)
            mini.run()
            # The last one's key needs more than the one token that came behind it then.
            assert mini.hits[name] == (10 if ahead == 1 else 9) * BLOCK
            talk(mini, seed)
            nothing_held(mini)
            facts[f"{ahead} {in_flight} {load_mode}"] = mini.manager.stats.loaded
    return facts


def two_for_one_prefix() -> Facts:
    """Two requests for one evicted prefix load it once."""
    facts = {}
    for load_mode in ("inline", "parked"):
        mini = Mini(load_mode=load_mode, late=2, blocks=41)
        mini.only_in_cpu(prompt(6, seed=1))
        names = [mini.add([*prompt(6, seed=1), *prompt(0, seed=9 + n, tail=5)]) for n in range(2)]
        mini.run()
        mini.check()
        nothing_held(mini)
        assert [mini.hits[name] for name in names] == [6 * BLOCK] * 2
        assert mini.manager.stats.loaded == 6, mini.manager.stats.loaded
        facts[load_mode] = mini.manager.stats.loaded
    return facts


def abort_while_parked() -> Facts:
    """The request is gone at once; its load ends, and every block comes back."""
    mini = Mini(load_mode="parked", late=3)
    mini.only_in_cpu(prompt(6, seed=1))
    free = free_blocks(mini)
    name = mini.add(prompt(6, seed=1))
    mini.step()
    assert statuses(mini) == {name: "WAITING_FOR_REMOTE_KVS"} and free_blocks(mini) == free - 6
    mini.abort(name)
    assert name not in mini.scheduler.requests and not mini.scheduler.has_unfinished_requests()
    mini.add(prompt(14, seed=2), count=3)  # it may not take blocks that are being written
    mini.run()
    again = mini.add(prompt(6, seed=1))
    mini.run()
    mini.check()
    nothing_held(mini)
    assert free_blocks(mini) == free and mini.hits[again] == 6 * BLOCK
    return {"free": free}


def abort_all_while_parked() -> Facts:
    """Requests are aborted by the list; parked, waiting and running ones."""
    mini = Mini(load_mode="parked", late=3)
    mini.only_in_cpu(prompt(6, seed=1), prompt(14, seed=2))
    names = [mini.add(prompt(2, seed=3), count=20)]
    mini.step()
    names += [mini.add(prompt(6, seed=1)), mini.add(prompt(14, seed=2)), mini.add(prompt(1, 4))]
    mini.step()
    mini.abort(*names)
    assert not mini.scheduler.requests
    last = mini.add(prompt(6, seed=1))
    mini.run()
    mini.check()
    nothing_held(mini)
    return {"hit": mini.hits[last]}


def reset_idle() -> Facts:
    """After a reset nothing is found, on the GPU or in the tier."""
    mini = Mini(load_mode="inline", events=True)
    mini.add(prompt(6, seed=1))
    mini.run()
    assert mini.scheduler.reset_prefix_cache()
    mini.device.scramble()
    assert mini.manager.num_used == 0
    name = mini.add(prompt(6, seed=1))
    mini.run()
    mini.check()
    nothing_held(mini)
    assert mini.hits[name] == 0
    return {}


def reset_while_loading() -> Facts:
    """A reset waits for the copies, and requests that were parked are computed."""
    mini = Mini(load_mode="parked", late=5, events=True)
    mini.only_in_cpu(prompt(6, seed=1), prompt(4, seed=2))
    names = [mini.add(prompt(6, seed=1)), mini.add(prompt(4, seed=2))]
    mini.step()
    assert set(statuses(mini).values()) == {"WAITING_FOR_REMOTE_KVS"}
    assert mini.scheduler.reset_prefix_cache(), "something still holds blocks"
    assert mini.ranks.drains == 1 and mini.manager.num_used == 0
    mini.device.scramble()
    mini.run()
    mini.check()
    nothing_held(mini)
    assert [mini.hits[name] for name in names] == [0, 0]
    return {}


def reset_while_running() -> Facts:
    """What runs is undisturbed, whether or not the release resets beside it."""
    mini = Mini(load_mode="parked", late=3, events=True)
    mini.only_in_cpu(prompt(6, seed=1))
    mini.add(prompt(2, seed=3), count=20)
    mini.step()
    mini.add(prompt(6, seed=1))
    mini.step()
    done = mini.scheduler.reset_prefix_cache()
    mini.run()
    mini.check()
    nothing_held(mini)
    return {"reset": bool(done)}


def reset_with_running_requests() -> Facts:
    """They are preempted, and computed again with other weights' values gone."""

    mini = Mini(load_mode="inline", late=2, events=True)
    if (
        "reset_running_requests"
        not in inspect.signature(type(mini.scheduler).reset_prefix_cache).parameters
    ):
        raise NotThere("running requests cannot be reset")
    mini.only_in_cpu(prompt(6, seed=1))
    mini.add(prompt(2, seed=3), count=20)
    mini.add(prompt(6, seed=1), count=9)
    mini.step()
    mini.step()
    assert mini.scheduler.reset_prefix_cache(reset_running_requests=True)
    mini.device.scramble()
    mini.run()
    mini.check()
    nothing_held(mini)
    return {"resumed": mini.device.resumed}


# Traps


def touch() -> Facts:
    """Blocks that the tier holds are held once each, whatever `touch` takes."""
    mini = Mini()
    mini.add(prompt(5, seed=1), count=1)
    mini.run()
    free = free_blocks(mini)
    blocks = [mini.pool.blocks[i] for i in mini.plans[0].after[0].source_ids]
    assert len(blocks) == 5 and all(block.ref_cnt == 0 for block in blocks)
    mini.view.hold(blocks)
    assert all(block.ref_cnt == 1 for block in blocks) and free_blocks(mini) == free - 5
    mini.view.release(reversed(blocks))
    assert all(block.ref_cnt == 0 for block in blocks) and free_blocks(mini) == free
    return {}


def given_up_twice() -> Facts:
    """Two requests give the same blocks up; from 0.10 to 0.23 no call may name one twice.

    `free_blocks` would put it into its queue of free blocks twice there, and break that.
    """
    mini = Mini(load_mode="parked", late=2, blocks=41)
    mini.only_in_cpu(prompt(6, seed=1))
    names = [mini.add([*prompt(6, seed=1), *prompt(0, seed=9 + n, tail=5)]) for n in range(2)]
    mini.step()
    assert set(statuses(mini).values()) == {"WAITING_FOR_REMOTE_KVS"}
    mini.abort(*names)
    mini.add(prompt(1, seed=3), count=8)
    mini.run()
    nothing_held(mini)
    for seed in range(3):
        mini.add(prompt(20, seed=seed))
    mini.run()
    mini.check()
    nothing_held(mini)
    return {}


def residency() -> Facts:
    """vLLM's metrics of residency count a use of a block where a request hits it, and no other."""
    if importlib.util.find_spec("vllm.v1.core.kv_cache_metrics") is None:
        raise NotThere("no metrics of residency")
    from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector

    facts = {}
    for load_mode in ("inline", "parked"):
        mini = Mini(load_mode=load_mode, blocks=60, late=1)
        mini.only_in_cpu(prompt(6, seed=1))
        mini.add(prompt(5, seed=2))
        mini.run()
        collector = mini.pool.metrics_collector = KVCacheMetricsCollector(1.0)
        uses: list[int] = []
        collector.on_block_accessed = lambda block, uses=uses: uses.append(block.block_id)
        mini.hits.clear()
        for seed, blocks in ((2, 5), (1, 6), (2, 3)):  # the second one loads while they run
            mini.add(prompt(blocks, seed=seed))
        mini.run()
        mini.check()
        assert mini.manager.stats.loaded == 6 and list(mini.hits.values()) != [0] * 3
        assert len(uses) == sum(mini.hits.values()) // BLOCK, (uses, mini.hits)
        assert mini.pool.metrics_collector is collector
        facts[load_mode] = len(uses)
    return facts


def publish() -> Facts:
    """A hash enters the prefix cache by the release's own way, and leaves it as others do."""
    mini = Mini()
    mini.add(prompt(3, seed=1), count=1)
    mini.run()
    keys = [mini.view.cached_key(i) for i in mini.plans[0].after[0].source_ids]
    assert len(set(keys)) == 3 and None not in keys
    mini.settle()
    mini.begin_step()  # gives up what is held
    mini.end_step()
    mini.pool.free_blocks(mini.pool.get_new_blocks(free_blocks(mini)))
    assert not _cached(mini, prompt(3, seed=1))
    blocks = mini.view.take_blocks(3)
    for index, (key, block) in enumerate(zip(keys, blocks)):
        mini.view.publish([key], [(index + 1) * BLOCK], [block])
        assert mini.view.still_cached(block.block_id, key)
    assert _cached(mini, prompt(3, seed=1)) == [block.block_id for block in blocks]
    mini.view.release(reversed(blocks))
    assert _cached(mini, prompt(3, seed=1)) == [block.block_id for block in blocks]
    mini.pool.free_blocks(mini.pool.get_new_blocks(free_blocks(mini)))
    assert not _cached(mini, prompt(3, seed=1)), "it was not evicted"
    return {}


def _cached(mini: Mini, tokens: list[int]) -> list[int]:
    """GPU blocks of a prompt's prefix, as the release finds them."""
    from scheduler_half import parts

    request = parts.make_request("looked-up", tokens, 1)
    (blocks, *_), *_ = mini.kv_manager.get_computed_blocks(request)[0].blocks, None
    getattr(mini.kv_manager, "free_block_hashes", lambda _: None)(request)
    return [block.block_id for block in blocks]


def parked_is_not_a_connectors() -> Facts:
    """No parked request reaches `_update_waiting_for_remote_kv`, which asserts a connector."""
    from vllm.v1.core.sched.scheduler import Scheduler

    def reached(self: Any, request: Any, *_: Any) -> bool:
        raise AssertionError(f"{request.request_id} is taken for a connector's")

    # Another function in its place would be refused, and so is other code unless asked for.
    function, decision = Scheduler._update_waiting_for_remote_kv, vars(Release)["decision"]
    forgiving = replace(Release.decision(), allow_unverified=True)
    original, function.__code__ = function.__code__, reached.__code__
    Release.decision = staticmethod(lambda: forgiving)  # type: ignore[assignment,method-assign]
    try:
        return conversations("parked", runs=1)
    finally:
        function.__code__ = original
        Release.decision = decision  # type: ignore[method-assign]


def zeroed_blocks() -> Facts:
    """Blocks that the runner zeroes in a step hold nothing that was loaded for it."""
    from vllm.v1.kv_cache_interface import KVCacheConfig

    if not hasattr(KVCacheConfig, "needs_kv_cache_zeroing"):
        raise NotThere("no blocks are zeroed")
    zeroed = loaded = 0
    needed = KVCacheConfig.needs_kv_cache_zeroing
    KVCacheConfig.needs_kv_cache_zeroing = True
    try:
        for load_mode in ("inline", "parked"):
            mini = Mini(load_mode=load_mode, late=2)
            talk(mini, seed=2)
            assert mini.manager.stats.loaded and any(mini.device.zeroed)
            loaded += mini.manager.stats.loaded
            zeroed += sum(map(len, mini.device.zeroed))
    finally:
        KVCacheConfig.needs_kv_cache_zeroing = needed
    return {"loaded": loaded, "zeroed": zeroed}


def block_copies() -> Facts:
    """Only hits that end within a block have blocks copied; whole ones come back beside them."""
    mini = Mini(windows=(None, 40), blocks=49, late=2)
    if not hasattr(mini.kv_manager, "take_kv_cache_block_copies"):
        raise NotThere("no blocks are copied")
    talk(mini, seed=0)
    assert mini.manager.stats.loaded and not mini.device.copied
    assert mini.kv_manager.coordinator.enable_partial_hash_hits is False
    assert not _refusal(mini)
    facts: Facts = {}
    for unit in (4, 8):
        mini = Mini(windows=(None, STATE), blocks=49, late=2, unit=unit)
        assert mini.kv_manager.coordinator.enable_partial_hash_hits is True
        talk(mini, seed=unit)
        nothing_held(mini)
        assert mini.manager.stats.loaded and mini.device.copied
        facts[f"copied, by {unit} tokens"] = mini.device.copied
    return facts


def empty_steps() -> Facts:
    """Pipelines and asynchronous scheduling are refused where empty steps are not sent."""
    mini, seen = Mini(), []
    assert not _refusal(mini)
    for part, name, value in (
        ("parallel_config", "pipeline_parallel_size", 2),
        ("scheduler_config", "async_scheduling", True),
    ):
        config = getattr(mini.config, part)
        before = getattr(config, name)
        setattr(config, name, value)
        seen.append(_refusal(mini))
        setattr(config, name, before)
    old = Release.number() < Version("0.10.2")
    assert ["before vLLM 0.10.2" in text for text in seen] == [old, old], seen
    return {"refusals": seen}


def no_spin() -> Facts:
    """A step with nothing but parked work is one that the ranks know to be idle, and wait in."""
    mini = Mini(load_mode="parked", late=4)
    mini.only_in_cpu(prompt(6, seed=1))
    mini.add(prompt(6, seed=1))
    idle = 0
    while True:
        scheduled = mini.begin_step()
        mini.end_step()
        if scheduled.num_scheduled_tokens:
            break
        idle += 1
        assert scheduled.total_num_scheduled_tokens == 0, "by this the ranks know"
        assert mini.scheduler.has_requests(), "the engine would stop stepping"
    assert idle >= 3
    mini.run()
    mini.check()
    return {"idle_steps": idle}


def invalid_blocks() -> Facts:
    """Blocks that a connector failed to fill leave the tier, and what was computed upon them."""
    mini = Mini(load_mode="inline")
    handle = getattr(mini.scheduler, "_handle_invalid_blocks", None)
    if handle is None:
        raise NotThere("connectors cannot say which blocks they failed to fill")
    mini.add(prompt(4, seed=1), count=30)
    mini.step()
    mini.step()
    mini.settle()
    block_ids = mini.plans[0].after[0].source_ids
    keys = [mini.view.cached_key(i) for i in block_ids]
    assert all(mini.manager.holds(key) for key in keys)
    known = inspect.signature(type(mini.scheduler)._handle_invalid_blocks).parameters
    scheduled = [{}] if "num_scheduled_tokens" in known else []
    if handle({block_ids[1]}, *scheduled):  # up to 0.12 only what was loaded is recomputed
        mini.device.kv[block_ids[1]] = [7] * BLOCK
    assert [mini.manager.holds(key) for key in keys] == [True, False, False, False]
    mini.run()
    mini.check()
    nothing_held(mini)
    unfilled.session()
    return {"parked": unfilled.parked(), "runs again": unfilled.runs_again()}


def many_hits_at_once() -> Facts:
    """More hits than fit, over a slow bus: each comes to its end, and hits all that it could."""
    facts = {}
    for load_mode in ("auto", "parked"):
        mini = Mini(blocks=60, load_mode=load_mode, late=1, ranks=FakeRanks(15.0), num_slots=2000)
        known = [prompt(2 + n, seed=100 + n) for n in range(9)]
        mini.only_in_cpu(*known)
        names = [mini.add(p, count=3) for p in known]
        mini.run(steps=500)
        mini.check()
        nothing_held(mini)
        assert [mini.hits[name] for name in names] == [(2 + n) * BLOCK for n in range(9)]
        facts[load_mode] = mini.manager.stats.loaded
    return facts


def tier_raises() -> Facts:
    """The tier raises in the middle of a step, and vLLM's objects are again as they were."""
    served = 0
    for seed, (load_mode, part, method, nth) in enumerate((
        ("inline", "", "_computed", 12),
        ("parked", "", "_look_at_handed_out", 30),
        ("parked", "_loads", "after_schedule", 25),
        ("auto", "_manager", "make_plan", 20),
    )):  # fmt: skip
        mini = Mini(load_mode=load_mode, late=seed, events=True)
        raise_at(mini, part, method, nth)
        talk(mini, seed)
        assert mini.breaker.detached, method
        assert mini.changed() == mini.before, method
        assert statuses(mini) == {} and free_blocks(mini) == len(mini.pool.blocks) - 1
        mini.replay.check()  # nothing is in the tier any more
        talk(mini, seed + 9, turns=1)
        served += len(mini.answers)
    return {"served": served}


def raise_at(mini: Mini, part: str, method: str, nth: int) -> None:
    """Make the nth call of a method of the tier, or of one of its parts, raise."""
    owner = getattr(mini.tier, part) if part else mini.tier
    as_made, calls = getattr(owner, method), [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == nth:
            raise LookupError(f"{method} is made to fail")
        return as_made(*args, **kwargs)

    setattr(owner, method, call)
    mini.hooks.remove()  # a hook is bound to what it calls
    mini.hooks.install(mini.breaker)


def common_prefix(load_mode: str) -> Facts:
    """Blocks that a load holds are not taken for ones that all running requests have.

    Up to 0.31 vLLM tells by the references of a block, and a runner may read such blocks once for
    all requests of a step (cascade attention).
    """
    mini = Mini(load_mode=load_mode, late=3, blocks=120)
    shared = prompt(20, seed=1, tail=0)
    mini.only_in_cpu(shared + prompt(2, seed=2))
    mini.add(shared + prompt(0, seed=3, tail=5), count=60)
    for _ in range(8):
        mini.step()
    mini.add(prompt(22, seed=4), count=60)
    for _ in range(8):
        mini.step()
    mini.add(shared + prompt(2, seed=2), count=4)  # its end is in the tier, the rest on the GPU
    mini.run()
    mini.check()
    assert mini.manager.stats.loaded
    nothing_held(mini)
    return {"loaded": mini.manager.stats.loaded}


def session_keys() -> Facts:
    """A session forgets its last token; up to 0.31 vLLM keeps the key of the block that it ended.

    So the block gets it with another token, and the tier would give it to who asks for the first.
    """
    if not hasattr(Mini(tier=False).scheduler, "num_waiting_for_streaming_input"):
        raise NotThere("this release has no sessions that go on")
    mini = Mini()
    said, more = prompt(1, seed=1, tail=14), prompt(0, seed=2, tail=5)
    name = mini.add(said, count=2, resumable=True)
    for goes_on in (True, False):
        while statuses(mini)[name] != "WAITING_FOR_STREAMING_REQ":
            mini.step()
        update = parts.make_request(name, more, 1, size=BLOCK, resumable=goes_on)
        mini.scheduler.add_request(update)
    answered = mini.answers[name][:2]
    mini.settle()
    mini.pool.free_blocks(mini.pool.get_new_blocks(free_blocks(mini)))
    stored = mini.manager.num_used
    hits = []
    for seed in (3, 4, 5):  # the second one hits what the first one has computed upon it
        asked = mini.add([*said, *answered, *prompt(2, seed=9), *prompt(0, seed=seed, tail=3)])
        mini.run()
        assert mini.answers[asked] == answer(mini.prompts[asked], len(mini.answers[asked]))
        hits.append(mini.hits[asked])
        mini.settle()
        mini.pool.free_blocks(mini.pool.get_new_blocks(free_blocks(mini)))
    assert hits[0] == BLOCK, "its first block has the right key, the second one has another"
    return {"stored": stored, "hits": hits}


def session_prompt() -> Facts:
    """A session's next turn is no prompt all but the last block of which is a hit."""
    if not hasattr(Mini(tier=False).scheduler, "num_waiting_for_streaming_input"):
        raise NotThere("this release has no sessions that go on")
    mini = Mini(blocks=60)
    whole, turn = prompt(3, seed=1, tail=8), 40
    mini.only_in_cpu(whole)
    name = mini.add(whole[:turn], count=1, resumable=True)
    while statuses(mini)[name] != "WAITING_FOR_STREAMING_REQ":
        mini.step()
    assert mini.scheduler.requests[name].num_computed_tokens == turn, "as many as it keeps"
    rest = parts.make_request(name, whole[turn:], 1, size=BLOCK, resumable=True)
    mini.scheduler.add_request(rest)
    while len(mini.answers[name]) < 2:
        mini.step()
    assert mini.answers[name][1:] == answer(whole, 1)
    asked = mini.add([*whole, *answer(whole, 20)])
    while len(mini.answers[asked]) < mini.counts[asked]:
        mini.step()
    assert mini.answers[asked] == answer(mini.prompts[asked], mini.counts[asked])
    return {"hit": mini.hits[asked]}


def stale_load(load_mode: str) -> Facts:
    """Nobody hits what a load under way brings where weights are updated meanwhile."""
    mini = Mini(late=50, load_mode=load_mode, store="eager", blocks=25)
    mini.only_in_cpu(prompt(6, seed=1))
    mini.add(prompt(2, seed=2), count=30)
    mini.step()
    mini.step()
    name = mini.add(prompt(6, seed=1, tail=3))
    mini.step()
    assert mini.tier._loads.num_parked == 1
    mini.breaker.weights_updated()
    mini.run()
    mini.check()
    assert mini.hits[name] == 0
    return {"loaded": mini.manager.stats.loaded}


def reset_refused() -> Facts:
    """vLLM refuses a reset while something runs; what may not be stored is not stored after it."""
    mini = Mini(store="lazy", blocks=40, weighs=False)
    mini.add(prompt(4, seed=1), count=3, extra_args={"kvoffload_store": 0})
    mini.step()
    assert not mini.scheduler.reset_prefix_cache()
    mini.run()
    for seed in range(10, 18):
        mini.add(prompt(12, seed=seed), count=1)
        mini.run()
    asked = mini.add(prompt(4, seed=1, tail=2), count=1)
    mini.run()
    assert mini.manager.stats.stored and mini.hits[asked] == 0
    nothing_held(mini)
    return {"stored": mini.manager.stats.stored}


def window_without_groups() -> Facts:
    """Where vLLM has one group for all layers, windows free no blocks, and are not counted so."""
    plain = parts.make_kv_cache_config

    def windowed(*args: Any, **kwargs: Any) -> Any:
        config = plain(*args, **kwargs)
        for group in config.kv_cache_groups:
            group.kv_cache_spec = replace(group.kv_cache_spec, sliding_window=2 * BLOCK)
        return config

    parts.make_kv_cache_config = windowed
    try:
        mini = Mini(late=1, blocks=100, limits={"max_num_batched_tokens": 256})
    finally:
        parts.make_kv_cache_config = plain
    mini.only_in_cpu(prompt(70, seed=1, tail=5))
    mini.add(prompt(40, seed=2), count=200)
    for _ in range(6):
        mini.step()
    mini.add(prompt(70, seed=1, tail=5), count=2)
    mini.run()
    mini.check()
    assert not mini.breaker.detached, mini.breaker.failure
    nothing_held(mini)
    return {"loaded": mini.manager.stats.loaded}


def expert_records() -> Facts:
    """A hit has vLLM's records of the experts of its tokens, whatever becomes of loads."""
    from scheduler_half.experts import RecordsMini

    if not limits_hits(RecordsMini(tier=False).scheduler):
        raise NotThere("this release does not know which blocks have such records")
    seen = Counter[str]()
    for seed, mode in enumerate(("inline", "parked", "auto")):
        for slots, talks in ((120, 10), (60, 40)):  # with the second, more is lost than kept
            how = {"load_mode": mode, "late": seed, "in_flight": 1 + seed % 2}
            mini = RecordsMini(num_slots=slots, step_ms=2.0, **how)
            talk(mini, seed, talks=talks, aborts=0.3)
            nothing_held(mini)
            seen[f"{mode}, loaded"] += mini.manager.stats.loaded
            capacity = mini.scheduler.aux_output_connector._capacity
            mini.breaker.withdraw()
            assert capacity == mini.scheduler.aux_output_connector._capacity + slots
        assert seen[f"{mode}, loaded"]
    for aborts in (False, True):
        _records_while_loading(aborts)
    return dict(seen)


def _records_while_loading(aborts: bool) -> None:
    """More is computed during a load than there are records of; the one that waits may go."""
    from scheduler_half.experts import RecordsMini

    mini, others = RecordsMini(load_mode="parked", late=60, num_slots=8), count(10)
    mini.only_in_cpu(prompt(6, seed=1))
    name = mini.add(prompt(6, seed=1, tail=3))
    mini.step()
    assert mini.tier._loads.num_parked == 1
    if aborts:
        mini.abort(name)
    while mini.tier._loads.under_way:
        other = mini.add(prompt(4, seed=next(others)), count=1)
        while other in mini.scheduler.requests:
            mini.step()
    mini.add(prompt(6, seed=1, tail=5))
    mini.run()
    mini.check()
    nothing_held(mini)


SCENARIOS: dict[str, Callable[[], Facts]] = {
    "experts of each token": expert_records,
    "the tier raises": tier_raises,
    "without tier": without_tier,
    "hit inline": hit_inline,
    "hit parked": hit_parked,
    "last block": last_block,
    "hits beside drafts": beside_drafts,
    "keys with the next tokens": keys_with_the_next_tokens,
    "two for one prefix": two_for_one_prefix,
    "many hits at once": many_hits_at_once,
    "conversations inline": partial(conversations, "inline"),
    "conversations parked": partial(conversations, "parked", num_slots=60, store="lazy"),
    "conversations auto": partial(conversations, "auto", store="auto", weighs=False),
    "a crowd": crowd,
    "demand of running requests": demand_of_running,
    "a load beside a running prompt": running_prompt,
    "a load leaves a block to each": headroom,
    "preemptions beside plain vLLM": preemptions_counted,
    "what is preempted is computed once": computed_twice,
    "abort while parked": abort_while_parked,
    "abort all while parked": abort_all_while_parked,
    "preemption": preemption,
    "hybrid groups": hybrid,
    "asynchronous": asynchronous,
    "priorities": priority,
    "behind one that waits for the bus": behind_the_bus,
    "behind one that waits for stores": behind_stores,
    "priorities while loads wait for the bus": priority_behind_the_bus,
    "structured output": grammar,
    "reset idle": reset_idle,
    "reset while loading": reset_while_loading,
    "reset while running": reset_while_running,
    "reset with running requests": reset_with_running_requests,
    "failing loads": failing_loads,
    "a common prefix beside an inline load": partial(common_prefix, "inline"),
    "a common prefix beside a parked load": partial(common_prefix, "parked"),
    "a prompt of a session": session_prompt,
    "keys of a session": session_keys,
    "new weights while loading": partial(stale_load, "parked"),
    "a reset that is refused": reset_refused,
    "windows in one group": window_without_groups,
    "invalid blocks": invalid_blocks,
    "trap: touch": touch,
    "trap: a block given up twice": given_up_twice,
    "trap: metrics of residency": residency,
    "trap: hash insertion": publish,
    "trap: parked is not a connector's": parked_is_not_a_connectors,
    "trap: zeroed blocks": zeroed_blocks,
    "trap: block copies": block_copies,
    "trap: steps without tokens": empty_steps,
    "trap: no spin": no_spin,
}
