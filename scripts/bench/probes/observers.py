"""Observers of an engine with the tier: what happens when.

They are put around methods of our classes and two of vLLM's, from outside, in the process of the
engine's core, which must also be that of its only worker.
"""

from __future__ import annotations

import functools
import inspect
import time
from pathlib import Path
from typing import Any

from scripts.bench.probes.recorder import DeviceClock, HostClock, Note, Recorder, guarded
from scripts.bench.probes.switches import switch_off


def request_name(number: int, history: int) -> str:
    """What the driver calls a request; ``history``: tokens of the prompt that were asked before."""
    return f"chat-{number}-{history}"


def request_number(name: str) -> int | None:
    """The number of a request that was named so; vLLM puts more behind the name."""
    parts = name.split("-")
    return int(parts[1]) if parts[0] == "chat" else None


def observe(owner: type, name: str, before: Note | None = None, after: Note | None = None) -> None:
    """Call ``before(self, ...)`` and ``after(result, self, ...)`` around each call of a method.

    Raises:
        TypeError: one of them does not take what the method takes.
    """
    wrapped = vars(owner)[name]
    taken = list(inspect.signature(wrapped).parameters)
    for observer, more in ((before, 0), (after, 1)):
        if observer is not None:
            inspect.signature(observer).bind(*[None] * (len(taken) + more))
    first, last = (guarded(f, f"{owner.__name__}.{name}") for f in (before, after))

    @functools.wraps(wrapped)
    def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        first(self, *args, **kwargs)
        result = wrapped.__get__(self, owner)(*args, **kwargs)
        last(result, self, *args, **kwargs)
        return result

    setattr(owner, name, observed)


def observe_scheduler(recorder: Recorder, engine_core: type, scheduler: type, tier: type) -> None:
    """Requests that come in, and steps."""
    began = [0.0]

    def arrives(core: Any, request: Any, *_: Any) -> None:
        if (number := request_number(request.request_id)) is not None:
            recorder.note("arrive", number)

    def added(scheduler: Any, request: Any) -> None:
        if (number := request_number(request.request_id)) is not None:
            recorder.note("add", number, int(request.request_id.split("-")[2]))

    def before_schedule(tier: Any) -> None:
        recorder.tier = tier
        began[0] = time.perf_counter()

    def after_schedule(result: None, tier: Any, output: Any) -> None:
        recorder.step += 1
        output.bench_step = recorder.step
        new = [(request_number(r.req_id), r.num_computed_tokens) for r in output.scheduled_new_reqs]
        new = [found for found in new if found[0] is not None]
        sizes = len(output.num_scheduled_tokens), output.total_num_scheduled_tokens
        recorder.note("schedule", recorder.step, round(began[0], 6), *sizes, new)

    def on_output(tier: Any, scheduled: Any, output: Any) -> None:
        got = zip(output.req_ids, output.sampled_token_ids)
        numbers = [request_number(name) for name, tokens in got if len(tokens)]
        recorder.note("returned", getattr(scheduled, "bench_step", 0), numbers)

    observe(engine_core, "preprocess_add_request", arrives)
    observe(scheduler, "add_request", added)
    observe(tier, "before_schedule", before_schedule)
    observe(tier, "after_schedule", after=after_schedule)
    observe(tier, "on_output", on_output)


def observe_loads(recorder: Recorder, book: type) -> None:
    """Loads that are decided on, and published."""

    def asks(book: Any, request: Any, *_: Any) -> None:
        recorder.asked = request_number(request.request_id)

    def begun(result: Any, book: Any, found: Any, *_: Any) -> None:
        ticket, blocks, _ = result
        recorder.note("load", ticket, recorder.asked, len(blocks))

    def looked_at(result: bool, book: Any, load: Any, within_ms: float) -> None:
        if result:
            recorder.note("published", load.ticket, book._manager.load_done(load.ticket))

    observe(book, "park", asks)
    observe(book, "load_inline", asks)
    observe(book, "_begin", after=begun)
    observe(book, "_is_done", after=looked_at)


def observe_worker(recorder: Recorder, rank: type, engine: type) -> None:
    """Steps on the device: how long each waits for copies, and computes.

    What is awaited layer by layer is within the time that it computes.
    """
    clock = recorder.clock

    def step_begins(rank: Any, plan: Any, step: Any) -> None:
        recorder.marks = [getattr(step, "bench_step", 0)]

    def begins(engine: Any, *_: Any) -> None:
        recorder.marks[1:] = [clock.mark()]

    def held(result: bool, engine: Any, *_: Any) -> None:
        recorder.marks.append(clock.mark())

    def ends(engine: Any, *_: Any, **__: Any) -> None:
        if len(recorder.marks) == 3:
            recorder.note("device", *recorder.marks, clock.mark())
        recorder.marks = []

    observe(rank, "begin_step", step_begins)
    observe(engine, "begin_step", begins, held)
    observe(engine, "end_step", ends)


def observe_host(recorder: Recorder, tier: type, rank: type) -> None:
    """What the engine's thread does for a step, by the parts of `HOST`.

    To be called after the other observers, whose time then counts as well.
    """
    parts = _Parts(recorder)

    def scheduling(tier: Any) -> None:
        parts.begin(recorder.step + 1)

    def planned(result: None, tier: Any, output: Any) -> None:
        parts.end("plan")

    def running(rank: Any, plan: Any, step: Any) -> None:
        parts.begin(getattr(step, "bench_step", 0))

    observe(tier, "before_schedule", scheduling, lambda result, tier: parts.end("lookups"))
    observe(tier, "after_schedule", lambda tier, output: parts.end("schedule"), planned)
    observe(rank, "begin_step", running, lambda result, *_: parts.end("copies before"))
    observe(
        rank, "end_step",
        lambda rank, output: parts.end("launches"),
        lambda result, rank, output: parts.end("copies after"),
    )  # fmt: skip


class _Parts:
    """Notes how long each part of a step took, which begins where the one before it ended."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._step, self._since = 0, 0.0

    def begin(self, step: int) -> None:
        """The first part for a step begins."""
        self._step, self._since = step, time.perf_counter()

    def end(self, part: str) -> None:
        """A part is over."""
        before, self._since = self._since, time.perf_counter()
        self._recorder.note("host", self._step, part, round(1000 * (self._since - before), 3))


def observe_copies(recorder: Recorder, link: type, queue: type, host_queue: type) -> None:
    """Copies on the bus, in order of each direction."""
    from kvoffload_patch.links import LOAD

    clock = recorder.clock
    begun: dict[tuple[int, int], Any] = {}

    def submitted(link: Any, transfer: Any, done: Any) -> None:
        to_gpu = recorder.to_gpu[id(link.queue)] = link.link == LOAD
        recorder.bytes[to_gpu, transfer.ticket] = len(transfer.source_ids) * recorder.block_bytes

    def is_over(queue: Any, ticket: int) -> None:
        if (began := begun.pop((id(queue), ticket), None)) is None:
            return
        to_gpu = recorder.to_gpu.get(id(queue), False)
        end = clock.mark(getattr(queue, "_end", None))
        recorder.note("bus", began, end, to_gpu, ticket, recorder.bytes.pop((to_gpu, ticket), 0))

    def begins(result: Any, queue: Any, job: Any) -> None:
        begun[id(queue), job.ticket] = clock.mark(queue.streams.bus)

    advanced, over = vars(queue)["advance"], guarded(is_over, "CopyQueue.advance")

    def advance(self: Any) -> bool:
        with self._lock:  # nobody else enqueues between the slice and the look at it
            job = self._queue[0] if self._queue else None
            found = bool(advanced(self))
            if job is not None and (not self._queue or self._queue[0] is not job):
                over(self, job.ticket)
            return found

    def host_begins(queue: Any, ticket: int, *_: Any) -> None:
        begun[id(queue), ticket] = clock.mark()

    def host_ends(result: None, queue: Any, ticket: int, *_: Any) -> None:
        is_over(queue, ticket)

    observe(link, "submit", submitted)
    observe(queue, "_begin", after=begins)
    queue.advance = advance  # type: ignore[attr-defined]
    observe(host_queue, "submit", host_begins, host_ends)


def attach(worker: Any, path: str) -> dict[str, Any]:
    """In the engine's process: put the observers in place.

    Raises:
        RuntimeError: the engine has several ranks, whose steps are elsewhere.
    """
    import torch
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    import kvoffload_patch
    from kvoffload_patch.integration.engine.requests.loads import LoadBook
    from kvoffload_patch.integration.engine.tier import SchedulerTier
    from kvoffload_patch.integration.protocol import attached
    from kvoffload_patch.integration.worker.tier import RankTier
    from kvoffload_patch.transfer.engine import CopyEngine
    from kvoffload_patch.transfer.link import LinkCopies
    from kvoffload_patch.transfer.queue import CopyQueue, SyncCopyQueue

    ranks, rank = worker.vllm_config.parallel_config.world_size, attached(worker.model_runner)
    if ranks > 1 or rank is None:
        raise RuntimeError(f"trace: expected one rank with a CPU tier, found {ranks}, {rank}")
    device = worker.device
    recorder = Recorder(Path(path), DeviceClock(torch) if device.type == "cuda" else HostClock())
    recorder.block_bytes = (
        sum(tensor.numel() * tensor.element_size() for tensor in worker.model_runner.kv_caches)
        // worker.model_runner.kv_cache_config.num_blocks
    )
    observe_scheduler(recorder, EngineCore, Scheduler, SchedulerTier)
    observe_loads(recorder, LoadBook)
    observe_worker(recorder, RankTier, CopyEngine)
    observe_copies(recorder, LinkCopies, CopyQueue, SyncCopyQueue)
    observe_host(recorder, SchedulerTier, RankTier)
    kvoffload_patch.__dict__["_bench_recorder"] = recorder
    about = {
        "block_tokens": worker.vllm_config.cache_config.block_size,
        "block_bytes": recorder.block_bytes,
        "device": device.type,
    }
    recorder.note("about", about)
    return about


def begin_period(worker: Any, cycle: int, variant: str, off: str, paused: bool) -> None:
    """In the engine's process: switch, and write down since when.

    Args:
        cycle: number of the cycle.
        variant: what it is called; empty if it does not count.
        off: the mechanism that is switched off.
        paused: the tier neither loads nor stores.

    Raises:
        RuntimeError: the engine's core has not been seen here.
    """
    import kvoffload_patch

    recorder = kvoffload_patch.__dict__["_bench_recorder"]
    if recorder.tier is None:
        raise RuntimeError(
            "trace: expected the engine's core in the process of its worker, found it elsewhere; "
            "leave distributed_executor_backend to vLLM."
        )
    switch_off(worker, off)
    if recorder.tier.paused != paused:
        (recorder.tier.pause if paused else recorder.tier.resume)()
    recorder.note("period", cycle, variant)


def detach(worker: Any) -> None:
    """In the engine's process: write the rest down. The observers stay."""
    import kvoffload_patch

    kvoffload_patch.__dict__["_bench_recorder"].close()
