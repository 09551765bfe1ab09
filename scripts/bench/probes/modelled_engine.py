"""An engine whose scheduler is vLLM's own, and whose GPU and bus are a model with a clock.

A step is scheduled while the one before it runs, as with asynchronous scheduling. It takes a time
for itself, for each request and for each token of a prompt; loads cross the bus one after the
other, and a step waits for those that its plan names: where they come by layer and the step has a
prompt in it, for each quarter of the last one when it comes to that quarter of its layers. What a
GPU does besides, such as copies that slow each other, is left out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kvoffload_patch.integration.protocol import PLAN, RESULT
from kvoffload_patch.integration.worker.tuning import IDLE_WAIT_S
from kvoffload_patch.links import LOAD, STORE
from kvoffload_patch.plan import TransferResult
from kvoffload_patch.transfer.backends.load_times import LoadTimes
from kvoffload_patch.transfer.tuning import LOAD_BUFFERS, LOAD_GROUPS, LOAD_SLICE_BYTES
from scripts.bench.step_sides import Ranks, Sim, TierSim

BLOCK_BYTES = 2 << 20
SLICE_BLOCKS = LOAD_SLICE_BYTES // BLOCK_BYTES
LOAD_MS = 0.041  # of a block, when the tier is opened
RUN_SLOTS = 256
GPU_BLOCKS = 12_000
FREE_BLOCKS = 40_000  # of a GPU that holds everything


class Costs(NamedTuple):
    """Milliseconds: of a step, and of each request, each token of a prompt and a prompt in it; of
    `schedule()` until the step can begin, and of an output until the next `schedule()`.

    They give the floor of `bench chats` on an H200: decodes of 12 requests take 7.4 ms, and a
    prompt of 8,192 tokens about 0.25 s.
    """

    step: float = 6.2
    request: float = 0.1
    token: float = 0.03
    prompt: float = 2.0
    begin: float = 0.5
    output: float = 0.6


class Clock:
    """The model's time, and an event on it as `LoadTimes` takes them."""

    def __init__(self) -> None:
        self.ms = 0.0

    def __call__(self) -> float:
        return self.ms / 1000

    def new_event(self, timed: bool = False) -> _Event:
        """Recorded with the time at which it comes."""
        return _Event(self)


class _Event:
    def __init__(self, clock: Clock) -> None:
        self._clock, self._at = clock, 0.0

    def record(self, at: float) -> None:
        self._at = at

    def query(self) -> bool:
        return self._clock.ms >= self._at

    def elapsed_time(self, end: _Event) -> float:
        return end._at - self._at


class Bus:
    """One direction, on which tickets are carried out in their order.

    Args:
        clock: of the model.
        ms_per_block: what it takes.

    Attributes:
        blocks: that it has carried, or is to.
        measured: what they take, as a worker says it.
    """

    def __init__(self, clock: Clock, ms_per_block: float) -> None:
        self.blocks = 0
        self._clock = clock
        self._ms_per_block = ms_per_block
        self._times: list[tuple[float, float]] = []  # by ticket
        self._done = 0
        self.measured = LoadTimes(clock, LOAD_BUFFERS)

    def carry(self, blocks: int, at: float) -> None:
        """The next ticket: so many blocks from a time on."""
        self.blocks += blocks
        begin = max(at, self._times[-1][1] if self._times else 0.0)
        end = begin + blocks * self._ms_per_block
        self._times.append((begin, end))
        self.measured.begin()
        for first in range(0, blocks, SLICE_BLOCKS):
            crossed = min(blocks, first + SLICE_BLOCKS)
            nbytes = (crossed - first) * BLOCK_BYTES
            self.measured.crossed(nbytes, begin + crossed * self._ms_per_block)
        self.measured.end(end)

    def times(self, ticket: int) -> tuple[float, float]:
        """When a ticket begins and ends."""
        return self._times[ticket - 1]

    def done(self) -> int:
        """The last ticket done by now."""
        while self._done < len(self._times) and self._times[self._done][1] <= self._clock.ms:
            self._done += 1
        return self._done

    def next_end(self, after: float) -> float:
        """When the first ticket that ends after a time does; that time if none does."""
        return next((end for _, end in self._times[self._done :] if end > after), after)


class Floor(Sim):
    """Plain vLLM whose GPU holds everything; its scheduler."""

    asynchronous = True


class Tiered(TierSim):
    """With the tier, on a clock of the model's.

    Args:
        clock: of the model.
        by_layer: whether a step can wait for a load layer by layer.
    """

    asynchronous = computes_take_time = True

    def __init__(self, clock: Clock, by_layer: bool) -> None:
        self.now = clock
        self.ranks = Ranks()
        self.ranks.load_ms_per_block = LOAD_MS
        self.ranks.overlap = 1 - 1 / LOAD_GROUPS if by_layer else 0.0
        super().__init__(RUN_SLOTS, GPU_BLOCKS)


class Engine:
    """Plain vLLM on a modelled GPU that holds everything.

    Attributes:
        clock: of the model.
        sim: has the scheduler.
        waited_ms: for how long steps have waited for loads with the GPU idle.
    """

    costs = Costs()

    def __init__(self) -> None:
        self.clock = Clock()
        self.waited_ms = 0.0
        self._free_at = 0.0  # the GPU
        self.sim = self._made()

    def play(self, step: Any) -> float:
        """When the GPU is done with a step that has just been scheduled."""
        begin = max(self._free_at, self.clock.ms + self.costs.begin)
        tokens, requests = step.total_num_scheduled_tokens, len(step.num_scheduled_tokens)
        takes = self.costs.step + self.costs.request * requests
        if tokens > requests:
            takes += self.costs.prompt + self.costs.token * (tokens - requests)
        self._free_at = self._end(step, begin, takes) if tokens else self._idle(step, begin)
        self.waited_ms += max(0.0, self._free_at - begin - takes)
        return self._free_at

    def answer(self, step: Any, output: Any) -> None:
        """Put on a step's output what the worker says, at the time of the clock."""

    def _made(self) -> Sim:
        return Floor(RUN_SLOTS, FREE_BLOCKS)

    def _end(self, step: Any, begin: float, takes: float) -> float:
        return begin + takes

    def _idle(self, step: Any, begin: float) -> float:
        return begin


class TierEngine(Engine):
    """With the tier, and a GPU cache that is too small.

    Args:
        slower: what a load takes, in times of what it took when the tier was opened.
        by_layer: whether a step can wait for a load layer by layer.
        follows: whether the worker says how long loads take.

    Attributes:
        loads: the bus into the GPU.
    """

    def __init__(self, slower: float, by_layer: bool, follows: bool) -> None:
        self._by_layer, self._follows = by_layer, follows
        super().__init__()
        self.loads = Bus(self.clock, LOAD_MS * slower)
        self.loads.measured.start_from(LOAD_MS / BLOCK_BYTES)
        self._stores = Bus(self.clock, LOAD_MS)

    def answer(self, step: Any, output: Any) -> None:
        """What is done, and how long loads take."""
        took = self.loads.measured.ms_per_byte() * BLOCK_BYTES
        slowdown = took / LOAD_MS if self._follows else 1.0
        done = (LOAD, self.loads.done()), (STORE, self._stores.done())
        result = TransferResult(done, by_layer=self._by_layer, slowdown=slowdown)
        setattr(output, RESULT, result)

    def _made(self) -> Sim:
        return Tiered(self.clock, self._by_layer)

    def _end(self, step: Any, begin: float, takes: float) -> float:
        awaited = self._carry(step)
        end = begin + takes
        if awaited:
            first, last = self.loads.times(awaited)
            parts = LOAD_GROUPS if self._by_layer and _has_prompt(step) else 1
            for part in range(1, parts + 1):
                there = first + (last - first) * part / parts
                end = max(end, there + takes * (parts - part + 1) / parts)
        plan = getattr(step, PLAN, None)
        for store in plan.after if plan is not None else ():
            self._stores.carry(len(store.source_ids), end)
        return end

    def _idle(self, step: Any, begin: float) -> float:
        """A step without tokens ends when a load does, or after a while."""
        self._carry(step)
        return min(self.loads.next_end(begin), begin + 1000 * IDLE_WAIT_S)

    def _carry(self, step: Any) -> int:
        """A plan's loads begin; the ticket that the step waits for, 0 for none."""
        plan = getattr(step, PLAN, None)
        for load in plan.before if plan is not None else ():
            self.loads.carry(len(load.target_ids), self.clock.ms)
        return plan.waits_for(LOAD) if plan is not None else 0


def _has_prompt(step: Any) -> bool:
    return bool(step.total_num_scheduled_tokens > len(step.num_scheduled_tokens))


def samples(scheduler: Any, step: Any) -> dict[str, bool]:
    """Which requests of a step that has just been scheduled compute a token of their answer."""
    found = {}
    for request_id in step.num_scheduled_tokens:
        request = scheduler.requests[request_id]
        awaited = request.num_output_placeholders
        computed = request.num_computed_tokens - request.num_tokens
        found[request_id] = awaited > 0 and computed == awaited - 1
    return found


def output_of(step: Any, sampled: dict[str, bool]) -> Any:
    """A step's output, with a token for each of those."""
    from vllm.v1.outputs import ModelRunnerOutput

    ids = list(step.num_scheduled_tokens)
    tokens = [[11] if sampled[one] else [] for one in ids]
    return ModelRunnerOutput(ids, {one: n for n, one in enumerate(ids)}, tokens)
