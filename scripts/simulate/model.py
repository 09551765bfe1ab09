"""A server that answers a trace: steps, the GPU's blocks, the bus, and the tier's own manager.

What is modelled: requests are looked up in the order of their arrival, and admitted while blocks
and the step's tokens last. A prompt is computed in pieces of a step's tokens, at a fixed speed. A
request whose prefix the tier has waits for its load beside the steps. A step waits for the stores
of the blocks that it overwrites. An answer takes a fixed time for each token, whatever else runs.
A request has all its blocks from the beginning to the end of its answer. With ``preempt`` it takes
those of its answer as it fills them; where none is left, the last one admitted gives its blocks
back and begins again.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from itertools import count
from typing import NamedTuple

from kvoffload_patch.integration.engine.tuning import LONGER_LOAD_TIMES
from kvoffload_patch.links import LOAD, STORE
from scripts import Refused
from scripts.simulate.bus import Bus
from scripts.simulate.gpu import GpuPool
from scripts.simulate.orphans import Orphans
from scripts.simulate.rules import Rules, Run
from scripts.simulate.trace import BLOCK_TOKENS, Request

NEVER = float("inf")


class Machine(NamedTuple):
    """What the trace runs on.

    Attributes:
        gpu_blocks, cpu_blocks: of ``block_tokens`` tokens, ``token_bytes`` each.
        load_gbs, store_gbs: the bus, GB/s each way.
        prefill: tokens of prompts computed in a second.
        token_s: seconds for each token of an answer.
        step_tokens: of prompts, that a step computes at most.
        running: requests that have blocks, at most.
        preempt: answers take their blocks as they fill them.
    """

    gpu_blocks: int = 1024
    cpu_blocks: int = 3072
    block_tokens: int = BLOCK_TOKENS
    token_bytes: int = 128 << 10
    load_gbs: float = 46.0
    store_gbs: float = 46.0
    prefill: float = 25_000.0
    token_s: float = 0.02
    step_tokens: int = 8192
    running: int = 256
    preempt: bool = False


class LoadRules(NamedTuple):
    """What `loads` compares; by default everything that is hit is loaded, with a run slot.

    Attributes:
        measured: a prefix is computed where its load, alone on the bus, takes clearly longer, at
            the speeds that the machine really has: the rule of the tier (`Pace.computes_sooner`).
        ahead: requests that load before they have a run slot, at most.
    """

    measured: bool = False
    ahead: int = 0


class Figures(NamedTuple):
    """What came of a trace; blocks are of the machine's size.

    Attributes:
        reusable: blocks of prompts that a cache could have saved, had it kept everything.
        hits_gpu, hits_tier: blocks found there when their request was admitted.
        again: of the reusable ones, those that were computed again.
        stored, loaded: blocks that crossed the bus.
        preempted: how often requests were.
        lost: full blocks that they had, and had to compute again.
        first_token: seconds from arrival to first token, of each request.
        end: seconds until the last answer.
        orphans: share of the tier's blocks that no request could hit, now and then looked at.
    """

    reusable: int
    hits_gpu: int
    hits_tier: int
    again: int
    stored: int
    loaded: int
    evicted: int
    preempted: int
    lost: int
    first_token: list[float]
    end: float
    orphans: float


class Model:
    """One replay of a trace.

    Raises:
        Refused: a request needs more blocks than the GPU has.
    """

    def __init__(
        self, machine: Machine, rules: Rules, trace: Sequence[Request],
        loads: LoadRules = LoadRules(),  # noqa: B008 - it cannot be changed
    ) -> None:  # fmt: skip
        largest = max(request.blocks(machine.block_tokens) for request in trace)
        if largest > machine.gpu_blocks:
            raise Refused(f"expected {largest} GPU blocks or more, found {machine.gpu_blocks}")
        self._machine, self._rules, self._load_rules = machine, rules, loads
        self._manager = rules.manager
        self._gpu = GpuPool(machine.gpu_blocks)
        block_bytes = machine.token_bytes * machine.block_tokens
        self._bus = Bus(block_bytes, machine.load_gbs, machine.store_gbs)
        self._waiting, self._orphans = deque(enumerate(trace)), Orphans(trace)
        self._now, self._loading = 0.0, list[Run]()
        self._prompts: deque[Run] = deque()
        self._admitted: dict[Run, None] = {}
        self._with_slot, self._without_slot = set[Run](), deque[Run]()
        self._begun: list[Run] = []  # whose prompt this step has computed
        self._events: list[tuple[float, int, Callable[[Run], None], Run]] = []
        self._numbers = count()
        self._arriving: dict[int, int] = {}  # GPU block -> ticket of the load that fills it
        self._idle: list[int] = []
        self._put_off: int | None = None  # request that waits for stores, or has done so last
        self._stores_first = False  # it does so in this step
        self._seen: set[int] = set()
        self._first: dict[int, float] = {}  # one that begins again keeps its own
        self._had: dict[int, int] = {}  # full blocks of preempted requests, by number
        self._counts = {"reusable": 0, "gpu": 0, "tier": 0, "again": 0, "preempted": 0, "lost": 0}

    def run(self, progress: Callable[[int], None] = lambda left: None) -> Figures:
        """Replay the whole trace.

        Args:
            progress: is told after each step how many requests have not been admitted.
        """
        while self._waiting or self._admitted:
            self._step()
            self._orphans.look(self._now, self._manager.holds, self._gpu.holds)
            progress(len(self._waiting))
        counts, stats = self._counts, self._manager.stats
        return Figures(
            counts["reusable"], counts["gpu"], counts["tier"], counts["again"],
            self._bus.moved(STORE), self._bus.moved(LOAD), stats.evicted, counts["preempted"],
            counts["lost"], list(self._first.values()), self._now, self._orphans.share,
        )  # fmt: skip

    def _step(self) -> None:
        while self._events and self._events[0][0] <= self._now:
            _, _, happens, run = heapq.heappop(self._events)
            if not run.over:
                happens(run)
        self._manager.apply(self._bus.result(self._now))
        self._publish()
        computed: dict[Hashable, int] = {}
        left = self._compute(computed, self._machine.step_tokens)
        left = self._admit(computed, left)
        self._rules.step(self._gpu, self._idle)
        self._idle = []
        plan = self._manager.make_plan(self._storable, computed)
        if plan is not None:
            self._now = self._bus.start(plan, self._now)
        tokens = self._machine.step_tokens - left
        self._now += tokens / self._machine.prefill
        if plan is not None:
            self._bus.finish(plan, self._now)
        for run in self._begun:
            self._first.setdefault(run.number, self._now - run.request.arrival)
            self._following_block(run, self._now, run.request.prompt_tokens)
        self._begun = []
        if self._stores_first and not tokens:
            self._now += self._machine.token_s  # the next step of answers
        elif not tokens:
            self._now = max(self._now, self._next())
        self._stores_first = False

    def _next(self) -> float:
        arrival = self._waiting[0][1].arrival if self._waiting else NEVER
        if arrival <= self._now:
            arrival = NEVER  # it waits for blocks
        event = self._events[0][0] if self._events else NEVER
        following = min(arrival, event, self._bus.next_load())
        if following == NEVER and (self._waiting or self._admitted):
            raise AssertionError("requests are left, and nothing will happen")
        return following if following < NEVER else self._now

    def _storable(self, block: int, key: object) -> bool:
        return self._gpu.key_of[block] == key

    # Admission

    def _admit(self, computed: dict[Hashable, int], left: int) -> int:
        waiting, slots = self._waiting, self._machine.running
        most = slots + self._load_rules.ahead
        while left and waiting and waiting[0][1].arrival <= self._now:
            run = self._begin(*waiting[0]) if len(self._admitted) < most else None
            if run is None:
                break
            waiting.popleft()
            if len(self._with_slot) >= slots:
                self._without_slot.append(run)
                continue
            self._with_slot.add(run)
            if not run.ticket:
                self._prompts.append(run)
                left = self._compute(computed, left)
        return left

    def _begin(self, number: int, request: Request) -> Run | None:
        """Look a request up and give it its blocks; None if there are not enough."""
        tokens_each, gpu, manager = self._machine.block_tokens, self._gpu, self._manager
        reusable = request.keys[: request.reusable(tokens_each)]
        blocks = gpu.find(reusable)
        on_gpu = len(blocks)
        hit, lookup = on_gpu, manager.lookup
        while hit < len(reusable) and lookup(reusable[hit]):
            hit += 1
        whole = request.blocks(tokens_each)
        if self._machine.preempt:
            whole = -(-(request.prompt_tokens + 1) // tokens_each)
        if whole - on_gpu > len(gpu.free) - gpu.idle(blocks):
            return None
        if self._load_rules.measured and not self._pays():
            hit = on_gpu
        if hit > on_gpu and not self._may_overwrite(number, hit - on_gpu):
            return None
        gpu.hold(blocks)
        arriving = self._arriving
        ticket = max([arriving.get(block, 0) for block in blocks]) if arriving and blocks else 0
        fresh = gpu.allocate(whole - on_gpu)
        manager.note_new_blocks(fresh)
        blocks += fresh
        run = Run(number, request, blocks, hit, on_gpu, ticket, hit * tokens_each, hit)
        self._rules.admitted(run)
        if hit > on_gpu:
            run.ticket = self._load(reusable[on_gpu:hit], blocks[on_gpu:hit])
        if run.ticket:
            self._loading.append(run)
        self._admitted[run] = None
        self._count(run, reusable)
        return run

    def _pays(self) -> bool:
        """Whether a block does not take clearly longer to load than to compute."""
        machine = self._machine
        loading_s = machine.token_bytes / machine.load_gbs / 1e9
        return loading_s <= LONGER_LOAD_TIMES / machine.prefill

    def _may_overwrite(self, number: int, count: int) -> bool:
        """Whether a load can begin; it waits for one step where stores have to be planned first."""
        step_blocks = -(-self._machine.step_tokens // self._machine.block_tokens)
        if self._put_off == number or self._rules.may_overwrite(self._gpu, count + step_blocks):
            return True
        self._put_off, self._stores_first = number, True
        return False

    def _load(self, keys: Sequence[int], blocks: Sequence[int]) -> int:
        """Begin a load. Others may hit its blocks at once, and wait for it."""
        ticket = self._manager.begin_load(keys, blocks)
        for key, block in zip(keys, blocks):
            self._gpu.cache(key, block)
        self._arriving.update(dict.fromkeys(blocks, ticket))
        return ticket

    def _count(self, run: Run, reusable: Sequence[int]) -> None:
        counts, seen = self._counts, self._seen
        counts["gpu"] += run.on_gpu
        counts["tier"] += run.hit - run.on_gpu
        again = len(seen.intersection(reusable[run.hit :]))
        counts["again"] += again
        counts["reusable"] += again + run.hit
        counts["lost"] += max(0, min(self._had.pop(run.number, 0), len(reusable)) - run.hit)
        seen.update(run.request.prompt_keys(self._machine.block_tokens))

    def _publish(self) -> None:
        """Requests whose load has arrived go on."""
        arrived = [run for run in self._loading if self._manager.load_done(run.ticket)]
        if arrived:
            self._loading = [run for run in self._loading if run not in arrived]
            self._prompts.extend([run for run in arrived if run in self._with_slot])
            for ticket in sorted({run.ticket for run in arrived}):
                self._manager.expose_load(ticket)
        if arrived or not self._loading:
            done = self._manager.load_done
            self._arriving = {b: t for b, t in self._arriving.items() if not done(t)}

    # Prompts and answers

    def _compute(self, computed: dict[Hashable, int], left: int) -> int:
        """Compute prompts with what is left of the step's tokens; returns what is left then."""
        tokens_each = self._machine.block_tokens
        while left and self._prompts:
            run = self._prompts[0]
            request = run.request
            now = min(left, request.prompt_tokens - run.tokens)
            left -= now
            run.tokens += now
            full = run.tokens // tokens_each
            if full > run.keyed:
                keys = request.keys[run.keyed : full]
                blocks = run.blocks[run.keyed : full]
                run.keyed = full
                for key, block in zip(keys, blocks):
                    self._gpu.cache(key, block)
                computed.update(self._rules.computed(run, keys, blocks))
            if run.tokens < request.prompt_tokens:
                break
            self._prompts.popleft()
            self._begun.append(run)
        return left

    def _following_block(self, run: Run, at: float, tokens: int) -> None:
        """``tokens`` are there at a time: when is the next block full, or the answer whole?"""
        tokens_each = self._machine.block_tokens
        whole = run.request.prompt_tokens + run.request.answer_tokens
        full = (tokens // tokens_each + 1) * tokens_each
        happens = self._end if full > whole else self._block_full
        at += (min(full, whole) - tokens) * self._machine.token_s
        heapq.heappush(self._events, (at, next(self._numbers), happens, run))

    def _block_full(self, run: Run) -> None:
        """An answer has filled a block."""
        request, place = run.request, run.keyed
        if place < len(request.keys):
            key, block = request.keys[place], run.blocks[place]
            self._gpu.cache(key, block)
            self._seen.add(key)
            self._rules.answered(run, key, block)
        run.keyed += 1
        tokens = run.keyed * self._machine.block_tokens
        if self._machine.preempt and len(run.blocks) <= run.keyed:
            while not self._gpu.free and not run.over:
                self._preempt(next(reversed(self._admitted)))
            if run.over:
                return
            fresh = self._gpu.allocate(1)
            self._manager.note_new_blocks(fresh)
            run.blocks += fresh
        self._following_block(run, self._now, tokens)

    def _end(self, run: Run) -> None:
        self._rules.ended(run)
        self._give_back(run)

    def _give_back(self, run: Run) -> None:
        run.over = True
        del self._admitted[run]
        self._pass_on_slot(run)
        self._idle += self._gpu.release(run.blocks[::-1])

    def _pass_on_slot(self, run: Run) -> None:
        if run not in self._with_slot:
            self._without_slot.remove(run)
            return
        self._with_slot.remove(run)
        if self._without_slot:
            following = self._without_slot.popleft()
            self._with_slot.add(following)
            if following not in self._loading:
                self._prompts.append(following)

    def _preempt(self, run: Run) -> None:
        """A request gives its blocks back and begins again, before those that wait."""
        self._counts["preempted"] += 1
        self._had[run.number] = run.keyed
        self._give_back(run)
        if run in self._prompts:
            self._prompts.remove(run)
        self._loading = [other for other in self._loading if other is not run]
        self._waiting.appendleft((run.number, run.request))
