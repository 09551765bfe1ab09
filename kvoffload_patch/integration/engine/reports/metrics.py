"""What the tier says of itself to the front end's /metrics: read, compared, and sent.

Everything is counted anyway; it is read at most once a second, in the last step before the engine
has nothing to do, and after a command for an idle engine. What ends later is said by the next step.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from kvoffload_patch import __version__
from kvoffload_patch.integration import carrier
from kvoffload_patch.integration.engine.tuning import METRICS_INTERVAL_S
from kvoffload_patch.integration.metrics import (
    ABOUT,
    BY_NAME,
    FAILED,
    LOADS,
    ON,
    STATES,
    STOPPED,
    STORES,
    Record,
)
from kvoffload_patch.links import LOAD, STORE, Link
from kvoffload_patch.plan import TransferPlan
from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.stats import FailedCopies, TierStats

logger = logging.getLogger("vllm.kvoffload_patch")

# Name, own labels, value.
Value = tuple[str, tuple[str, ...], Any]
_LINKS = {LOADS: LOAD, STORES: STORE}  # by direction, as labels name it
_DIRECTIONS = {link: direction for direction, link in _LINKS.items()}


class Outbox:
    """Sends records to the front end of one engine core; see `carrier`.

    Args:
        engine_core: a `vllm.v1.engine.core.EngineCore`, constructed, its statistics on.
    """

    def __init__(self, engine_core: Any) -> None:
        self._model = str(engine_core.vllm_config.model_config.served_model_name)
        # An engine core without one is in the front end's own process.
        self._queue = getattr(engine_core, "output_queue", None)

    def send(self, values: Iterable[Value]) -> None:
        """Send outside a step, to the first API server."""
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.metrics.stats import SchedulerStats

        outputs = EngineCoreOutputs(scheduler_stats=SchedulerStats())
        self.put_on(outputs.scheduler_stats, values)
        if self._queue is not None:
            self._queue.put_nowait((0, outputs))

    def put_on(self, stats: Any, values: Iterable[Value]) -> None:
        """Send with statistics that go to the front end anyway."""
        record: Record = {"model_name": self._model, "values": [list(value) for value in values]}
        if self._queue is None:
            from kvoffload_patch.integration.publisher import publish

            publish(record, 0)
        else:
            carrier.put_on(stats, record)


def begin(
    engine_core: Any,
    breaker: Any,
    manager: OffloadManager,
    block_bytes: int,
    about: Mapping[str, str],
) -> None:
    """An engine core's tier is attached: it is reported from now on, if statistics are on.

    Args:
        engine_core: a `vllm.v1.engine.core.EngineCore`, constructed.
        breaker: whose `reporter` is set.
        manager: of the tier.
        block_bytes: of a block, over all ranks.
        about: labels of `build_info` besides the versions.
    """
    with _unseen():
        if engine_core.scheduler.log_stats:
            tier, scheduler = breaker.tier, engine_core.scheduler
            outbox = Outbox(engine_core)
            breaker.reporter = Reporter(outbox, scheduler, manager, tier, block_bytes)
            breaker.reporter.start(about)


def tell_off(engine_core: Any, state: str, reason: str) -> None:
    """Say of an engine core that it has no tier, and why, if statistics are on."""
    with _unseen():
        if engine_core.scheduler.log_stats:
            Outbox(engine_core).send(_tier_off(state, reason))


@contextmanager
def _unseen() -> Iterator[None]:
    """Whatever fails within, the engine goes on without metrics of the tier."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the tier works without being seen
        _warn(error)


def _warn(error: Exception) -> None:
    logger.warning(STOPPED, error)


def _tier_off(state: str, reason: str) -> list[Value]:
    return [*_states(state), ("tier_off_info", (reason,), 1)]


def _states(state: str) -> list[Value]:
    return [("tier_state", (name,), int(name == state)) for name in STATES]


class TierCounts(NamedTuple):
    """What the scheduler's side of a tier has counted since start, and has now.

    Attributes:
        queried, hit: tokens of admitted requests that the GPU lacked, and that the tier had.
        spared: what it had besides, and was computed again.
        inline, parked: requests for which loads were begun, within their step and beside it.
        parked_now: requests that wait for a load.
        block_sizes: tokens of a block, by KV cache group in the prefix cache.
        stalled_ms: that inline loads were expected to hold requests up, summed over these.
        compared: loads that are compared with checksums.
    """

    queried: int
    hit: int
    spared: int
    inline: int
    parked: int
    parked_now: int
    block_sizes: tuple[int, ...]
    stalled_ms: float
    compared: int


class CopyTimes:
    """How long copies take, as the scheduler sees it: no rank has to be asked, or to wait.

    Args:
        manager: of the tier.
        block_bytes: of a block, over all ranks.

    Attributes:
        ended: copies that have ended since start, by direction.
        seconds, rates: of those that have since the last `clear`, and their bytes per second.
    """

    def __init__(self, manager: OffloadManager, block_bytes: int) -> None:
        self._manager = manager
        self._block_bytes = block_bytes
        self._begun: dict[Link, deque[tuple[int, float, int]]] = {LOAD: deque(), STORE: deque()}
        self.ended = dict.fromkeys(_LINKS, 0)
        self.clear()

    def planned(self, plan: TransferPlan) -> None:
        """The copies of a plan begin."""
        now = time.monotonic()
        for copy in (*plan.before, *plan.after):
            begun = self._begun.get((copy.source, copy.target))
            if begun is not None:
                begun.append((copy.ticket, now, len(copy.source_ids)))

    def look(self) -> None:
        """Note the copies that the scheduler knows to be done by now; called every step."""
        for direction, link in _LINKS.items():
            begun = self._begun[link]
            if begun and begun[0][0] <= self._manager.last_done(link):
                self._note(direction, begun, self._manager.last_done(link))

    def clear(self) -> None:
        """What was noted has been sent."""
        self.seconds: dict[str, list[float]] = {direction: [] for direction in _LINKS}
        self.rates: dict[str, list[float]] = {direction: [] for direction in _LINKS}

    def _note(self, direction: str, begun: deque[tuple[int, float, int]], done: int) -> None:
        now = time.monotonic()
        while begun and begun[0][0] <= done:
            _, since, blocks = begun.popleft()
            self.ended[direction] += 1
            self.seconds[direction].append(now - since)
            self.rates[direction].append(blocks * self._block_bytes / max(now - since, 1e-9))


class Reporter:
    """Sends the figures of one tier while it works, and that it has failed.

    Args:
        outbox: of the engine core.
        scheduler: vLLM's.
        manager: of the tier.
        tier: has `counts` and `take_parked_times`.
        block_bytes: of a block, over all ranks.
    """

    def __init__(
        self,
        outbox: Outbox,
        scheduler: Any,
        manager: OffloadManager,
        tier: Any,
        block_bytes: int,
    ) -> None:
        self._outbox = outbox
        self._scheduler = scheduler
        self._manager = manager
        self._tier = tier
        self._block_bytes = block_bytes
        self._times = CopyTimes(manager, block_bytes)
        self._sent: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._next = 0.0
        self._ended = False

    def start(self, about: Mapping[str, str]) -> None:
        """Send everything once, before the first request."""
        self._about, self._state = dict(about), ON
        info: Value = ("build_info", self._labels(), 1)
        self._outbox.send([info, *_states(ON), *self._changes(first=True)])

    def changed(self, state: str, about: Mapping[str, str]) -> None:
        """The tier goes on in this state, and with these labels of `build_info`."""
        if self._ended:
            return
        with _unseen():
            before, self._about = self._labels(), {**self._about, **about}
            values: list[Value] = [] if state == self._state else _states(state)
            if self._labels() != before:
                values += [("build_info", before, 0), ("build_info", self._labels(), 1)]
            self._state = state
            if not self._scheduler.requests:  # no step is to come that would say how full it is
                values += self._changes()
            if values:
                self._outbox.send(values)

    def _labels(self) -> tuple[str, ...]:
        return __version__, _vllm_version(), *(self._about[name] for name in ABOUT)

    def planned(self, plan: TransferPlan | None) -> None:
        """A step was scheduled."""
        if plan is not None and not self._ended:
            self._ended = True  # unless nothing fails
            with _unseen():
                self._times.planned(plan)
                self._ended = False

    def step_ended(self, outputs: Mapping[int, Any]) -> None:
        """`update_from_output` has returned what goes to the front end, by API server."""
        if self._ended:
            return
        try:  # as `_unseen`, which costs each step more
            self._times.look()
            now = time.monotonic()
            if now >= self._next or not self._scheduler.requests:
                self._next = now + METRICS_INTERVAL_S
                self._send_with(outputs)
        except Exception as error:  # noqa: BLE001 - the tier works without being seen
            self._ended = True
            _warn(error)

    def detached(self, reason: str) -> None:
        """The tier has failed."""
        if self._ended:
            return
        self._ended = True
        gone = [(name, labels, 0) for name, labels in self._sent if BY_NAME[name].kind == "gauge"]
        with _unseen():
            self._outbox.send([*gone, *_tier_off(FAILED, reason)])

    def _send_with(self, outputs: Mapping[int, Any]) -> None:
        for one in outputs.values():
            if one.scheduler_stats is not None:  # vLLM gives them to one API server of all
                values = list(self._changes())
                if values:
                    self._outbox.put_on(one.scheduler_stats, values)
                return

    def _changes(self, first: bool = False) -> Iterator[Value]:
        """What differs from what was sent before."""
        for name, labels, now in self._figures():
            before = self._sent.get((name, labels))
            if now == before:
                continue
            self._sent[name, labels] = now
            added = BY_NAME[name].kind == "counter" and before is not None
            yield name, labels, now - before if added else now
        for direction in _LINKS:
            if first or self._times.seconds[direction]:
                yield "copy_seconds", (direction,), self._times.seconds[direction]
                yield "copy_bytes_per_second", (direction,), self._times.rates[direction]
        self._times.clear()
        waits = self._tier.take_parked_times()
        if first or waits:
            yield "parked_seconds", (), waits

    def _figures(self) -> Iterator[Value]:
        """Gauges, and counters since start."""
        manager, counts, stats = self._manager, self._tier.counts(), self._manager.stats
        blocks = {
            "capacity": manager.num_slots, "used": manager.num_used, "loaded": stats.loaded,
            "stored": stats.stored, "evicted": stats.evicted,
        }  # fmt: skip
        for name, number in blocks.items():
            yield f"{name}_blocks", (), number
            yield f"{name}_bytes", (), number * self._block_bytes
        yield "growing", (), int(manager.growing)
        yield "gpu_prefix_ratio", (), self._tier.gpu_share
        yield "queried_tokens", (), counts.queried
        yield "hit_tokens", (), counts.hit
        yield "recomputed_tokens", (), counts.queried - counts.hit
        yield "recomputed_hit_tokens", (), counts.spared
        # A prefix takes one block of each group, whose sizes are the same as a rule.
        sizes = counts.block_sizes
        yield "loaded_tokens", (), round(stats.loaded * sum(sizes) / len(sizes) ** 2)
        for name, labels, number in _not_moved(stats):
            yield f"{name}_blocks", labels, number
            yield f"{name}_bytes", labels, number * self._block_bytes
        for labels, failed in failed_copies(stats):
            yield "failed_copies", labels, failed.copies
        yield "compared_copies", (), counts.compared
        yield "mismatched_copies", (), stats.mismatches
        for direction, link in _LINKS.items():
            yield "copies", (direction,), self._times.ended[direction]
            yield "queued_copies", (direction,), manager.num_under_way(link)
        yield "load_slowdown", (), round(self._tier.pace.slowdown, 2)
        yield "parked_requests", (), counts.parked_now
        yield "loading_requests", ("inline",), counts.inline
        yield "loading_requests", ("parked",), counts.parked
        yield "stalled_seconds", (), round(counts.stalled_ms / 1000, 6)


def _not_moved(stats: TierStats) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """Blocks that were not moved, in vain, or left: what became of them, labels, how many."""
    for why, left in stats.removed.items():
        yield "removed", (why,), left
    for reason, number in stats.not_stored.items():
        yield "dropped", (reason,), number
    yield "skipped", ("held",), stats.held
    for labels, failed in failed_copies(stats):
        yield "failed", labels, failed.blocks


def failed_copies(stats: TierStats) -> Iterator[tuple[tuple[str, str], FailedCopies]]:
    """Copies that failed, by direction and reason."""
    for (link, reason), failed in stats.failed_by.items():
        yield (_DIRECTIONS[link], reason), failed


def _vllm_version() -> str:
    import vllm

    return str(vllm.__version__)
