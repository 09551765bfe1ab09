"""What a running engine is asked over its control socket, and what it does about it.

Status is read on the thread that asks, from counters that are single numbers, so an engine
that is idle, or whose step hangs, answers too. What changes the tier is carried out on the engine's
own thread, between two steps: the step looks at one deque, which is empty as a rule. An engine
that has nothing to do takes no steps; it is then sent an abort of no request, which vLLM carries
out at once and which has no effect of its own.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from kvoffload_patch import __version__
from kvoffload_patch.config import GIB, Settings, as_given
from kvoffload_patch.control import commands
from kvoffload_patch.control.commands import Command
from kvoffload_patch.control.errors import Refused
from kvoffload_patch.control.listener import Listener
from kvoffload_patch.integration.engine.blocks.weights import MIXED
from kvoffload_patch.integration.engine.breaker import Breaker
from kvoffload_patch.integration.engine.ranks.workers import RankGroup
from kvoffload_patch.integration.engine.reports.metrics import failed_copies
from kvoffload_patch.integration.engine.requests.inline import parks_compared
from kvoffload_patch.integration.engine.tuning import (
    CONTROL_APPLY_S,
    CONTROL_LOOK_S,
    CONTROL_TAKE_S,
    TOLD_ADAPTERS,
)
from kvoffload_patch.integration.errors import TierRefused
from kvoffload_patch.integration.metrics import FAILED, ON, PAUSED
from kvoffload_patch.integration.protocol import CONTROL, engine_number
from kvoffload_patch.links import LOAD, STORE
from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.policies.own import PolicyRefused

logger = logging.getLogger("vllm.kvoffload_patch")


class Asked:
    """A command on its way to the engine's thread, and back."""

    __slots__ = ("command", "done", "error", "result")

    def __init__(self, command: Command) -> None:
        self.command = command
        self.done = threading.Event()
        self.result: dict[str, Any] = {}
        self.error = ""


class Desk:
    """Answers for one engine core.

    Args:
        breaker: of the tier.
        manager: of the tier.
        ranks: the workers, open.
        about: what does not change: the model, which of the server's engines it is, how blocks are
            copied, what nobody has run.
        wake: makes an idle engine look at what is asked; may do nothing.
    """

    def __init__(
        self,
        breaker: Breaker,
        manager: OffloadManager,
        ranks: RankGroup,
        about: Mapping[str, Any],
        wake: Callable[[], None],
    ) -> None:
        self._breaker = breaker
        self._tier = breaker.tier
        self._manager = manager
        self._ranks = ranks
        self._about = dict(about)
        self._wake = wake
        self._since, self._began = time.time(), time.monotonic()
        breaker.answer_asked = self.carry_out

    def open(self) -> None:
        """Answer on a socket until `close`, or until nobody has this engine any more.

        The threads of the socket do not keep it: up to vLLM 0.30 an engine in a user's own process
        is dropped without a word.

        Raises:
            Refused: there is no folder for the socket.
            OSError: it cannot be made.
        """
        answer = weakref.WeakMethod(self.answer)

        def ask(command: Command) -> Mapping[str, Any]:
            found = answer()
            if found is None:
                raise Refused("expected an engine to ask, found it gone; start the server again.")
            return found(command)

        self._close: Callable[[], object] = weakref.finalize(self, Listener(ask).close)

    def close(self) -> None:
        """Take the socket away."""
        self._close()

    # On a thread of the listener

    def answer(self, command: Command) -> Mapping[str, Any]:
        """Carry a command out, or have it carried out; what is to be sent back.

        Raises:
            Refused: why not.
        """
        if command.name == commands.STATUS:
            return self.status()
        asked = Asked(command)
        if not self._breaker.detached:
            self._breaker.asked.append(asked)
            self._wake()
            self._wait(asked)
        else:
            asked.error = self._gone()
        if asked.error:
            raise Refused(asked.error)
        return {**asked.result, **self.status()}

    def status(self) -> dict[str, Any]:
        """What there is to know, numbers since the start included."""
        manager, stats, counts = self._manager, self._manager.stats, self._tier.counts()
        failure, settings = self._breaker.failure, self._tier.settings
        live = dataclasses.asdict(settings)
        return {
            "version": __version__,
            "pid": os.getpid(),
            **self._about,
            "state": FAILED if self._breaker.detached else PAUSED if self._tier.paused else ON,
            "reason": failure or (MIXED if self._tier.weights.mixed else ""),
            "since": self._since,
            "seconds": time.monotonic() - self._began,
            "seconds_since_step": time.monotonic() - self._tier.last_step,
            "store": settings.store,
            "stores_lazily": manager.lazy,
            "integrity": settings.integrity,
            "compares": self._ranks.compares and parks_compared(settings.load_mode),
            "gpu_share": self._tier.gpu_share,
            "load_ms_per_block": self._tier.pace.ms_per_block,
            "largest_blocks": self._ranks.num_slots,
            **self._sizes(),
            "queried_tokens": counts.queried,
            "hit_tokens": counts.hit,
            "dropped_blocks": stats.not_stored,
            "removed_blocks": dict(stats.removed),
            "failed_blocks": stats.failed,
            "failed_copies": stats.failed_copies,
            "failed_by": {
                " ".join(labels): one.copies for labels, one in failed_copies(stats) if one.copies
            },
            "compared_loads": counts.compared,
            "mismatches": stats.mismatches,
            "stale_loras": _some(self._breaker.stale_loras),
            **self._under_way(counts.parked_now),
            "settings": {name: live[name] for name in commands.LIVE},
        }

    def _sizes(self) -> dict[str, Any]:
        """Of the tier, in blocks and in bytes; one that has failed has no memory any more."""
        manager, stats, size = self._manager, self._manager.stats, self._ranks.block_bytes
        works = not self._breaker.detached
        blocks = {
            "capacity": manager.num_slots * works, "used": manager.num_used * works,
            "loaded": stats.loaded, "stored": stats.stored, "evicted": stats.evicted,
        }  # fmt: skip
        return {
            "growing": manager.growing and works,
            "block_bytes": size,
            **{f"{name}_blocks": number for name, number in blocks.items()},
            **{f"{name}_bytes": number * size for name, number in blocks.items()},
        }

    def _under_way(self, parked: int) -> dict[str, int]:
        works, under_way = not self._breaker.detached, self._manager.num_under_way
        return {
            "steps_under_way": max(0, self._tier.pace.in_flight) * works,
            "parked_requests": parked * works,
            "queued_loads": under_way(LOAD) * works,
            "queued_stores": under_way(STORE) * works,
        }

    def _wait(self, asked: Asked) -> None:
        until = time.monotonic() + CONTROL_TAKE_S
        wanted = True
        while wanted and (left := until - time.monotonic()) > 0:
            if asked.done.wait(min(CONTROL_LOOK_S, left)):
                return
            wanted = asked.command.wanted()
        with suppress(ValueError):  # it is being carried out
            self._breaker.asked.remove(asked)
            if not wanted:
                raise Refused(_withdrawn(asked))
            raise Refused(
                f"expected the engine to come to the end of a step within {CONTROL_TAKE_S:.0f} s, "
                "found that it did not; nothing was changed: see by `kvoffload status` whether it "
                "takes steps, and ask again."
            )
        if not asked.done.wait(CONTROL_APPLY_S):
            raise Refused(
                f"expected {asked.command.name} to be carried out within {CONTROL_APPLY_S:.0f} s, "
                "found it still under way; ask for the status later."
            )

    def _gone(self) -> str:
        why = self._breaker.failure or "the engine shuts down; restart the server"
        return f"expected a tier that works, found it detached: {why}."

    # On the engine's thread, between two steps

    def carry_out(self) -> None:
        """Carry out what was asked for; whatever fails is the answer, and the engine goes on."""
        while (asked := self._next()) is not None:
            try:
                if self._breaker.detached:
                    raise Refused(self._gone())
                # Who waits looks now and then, and not while the process is stopped.
                if not asked.command.wanted():
                    raise Refused(_withdrawn(asked))
                self._apply(asked)
            except Refused as refusal:
                asked.error = as_given(str(refusal))
            except BaseException as error:  # noqa: BLE001 - half a change is a tier that has failed
                asked.error = f"expected {asked.command.name} to work, found {error!r}; " + (
                    "the engine ends, because a late answer would be taken for another."
                    if self._ranks.silent
                    else "the CPU tier is detached, and the engine serves without it."
                )
                self._breaker.failed(asked.command.name, error)
            finally:
                asked.done.set()

    def _next(self) -> Asked | None:
        """What was asked first, taken by one call: who asks may give up at any time."""
        with suppress(IndexError):
            asked: Asked = self._breaker.asked.popleft()
            return asked
        return None

    def _apply(self, asked: Asked) -> None:
        name, values, _ = asked.command
        tier = self._tier
        if name == commands.PAUSE:
            tier.pause()
        elif name == commands.RESUME:
            tier.resume()
        elif name == commands.EMPTY:
            asked.result["forgotten_blocks"] = self._manager.num_used
            tier.empty()
        elif name == commands.RESIZE:
            self._resize(values[commands.GIB])
        elif name == commands.SET:
            self._change(dataclasses.replace(tier.settings, **values))
        reporter = self._breaker.reporter
        if reporter is not None:
            reporter.changed(PAUSED if tier.paused else ON, _labels(tier.settings))
        given = " ".join(f"{key}={value}" for key, value in values.items())
        logger.info("KV offload: asked to %s%s", name, f" {given}" if given else "")

    def _change(self, settings: Settings) -> None:
        if settings.integrity == "full" and settings.load_mode != "parked":
            raise Refused(
                f"KVOFFLOAD_LOAD_MODE is {settings.load_mode!r} and this engine's "
                "KVOFFLOAD_INTEGRITY is 'full', expected loads that can be checked before a step "
                "begins; leave it at parked, or restart the server with KVOFFLOAD_INTEGRITY=sample."
            )
        try:
            self._tier.change(settings)
        except PolicyRefused as refusal:
            raise Refused(str(refusal)) from None

    def _resize(self, gib: float) -> None:
        ranks, has = self._ranks, self._manager.num_slots
        num_slots = int(gib * GIB) // ranks.slot_bytes
        least, most = ranks.slot_bytes / GIB, ranks.num_slots * ranks.slot_bytes / GIB
        if num_slots < 1:
            raise Refused(
                f"expected at least a block, {least:.6f} GiB, found {gib:g} GiB; give as much, or "
                "`kvoffload pause` it."
            )
        if num_slots > ranks.num_slots:
            raise Refused(
                f"expected {most:.2f} GiB at most, which this engine mapped when it started, found "
                f"{gib:g} GiB; restart it with a larger KVOFFLOAD_CPU_GIB to have more."
            )
        if ranks.beside_steps and self._tier.pace.in_flight:
            raise Refused(
                "expected no step under way, because workers of Ray's compiled graph carry out a "
                f"change of size beside steps, found {self._tier.pace.in_flight}; ask again when "
                "the engine is idle, or start it with VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1 (from "
                "vLLM 0.20 on)."
            )
        if num_slots > has:
            try:
                ranks.check_room(num_slots - has)
            except TierRefused as refusal:
                if ranks.silent:
                    raise
                raise Refused(str(refusal)) from None
        self._tier.resize(num_slots)


def _withdrawn(asked: Asked) -> str:
    """Says in the log, the only place left, that nobody waits for this command."""
    text = (
        f"expected the one who asked to {asked.command.name} to wait for the answer, found the "
        "connection closed before the engine took it up; nothing was changed."
    )
    logger.warning("kvoffload_patch: %s", text)
    return text


def _some(names: Sequence[str]) -> list[str]:
    """As many of these as an answer has room for."""
    left = len(names) - TOLD_ADAPTERS
    return [*names[:TOLD_ADAPTERS], *([f"and {left} more"] if left > 0 else [])]


def _labels(settings: Settings) -> dict[str, str]:
    return {"load_mode": settings.load_mode, "eviction": settings.eviction}


def listen(
    engine_core: Any,
    breaker: Breaker,
    manager: OffloadManager,
    ranks: RankGroup,
    unverified: Sequence[str] = (),
) -> None:
    """Answer on a socket of this engine core until `close_socket`; without one, say so once.

    Args:
        engine_core: whose tier it is.
        breaker: of the tier.
        manager: slots and tickets.
        ranks: the workers, open.
        unverified: what of the configuration nobody has run, in words.
    """
    try:
        config = engine_core.vllm_config
        about = {
            "model": str(config.model_config.served_model_name), "number": engine_number(config),
            "copies": ranks.copies, "unverified": list(unverified),
        }  # fmt: skip
        desk = Desk(breaker, manager, ranks, about, waker(engine_core))
        desk.open()
        setattr(engine_core, CONTROL, desk)
    except Exception as error:  # noqa: BLE001 - the tier works without it
        remedy = "" if isinstance(error, Refused) else (
            "; make room for it, or start the server with another XDG_RUNTIME_DIR or TMPDIR"
        )  # fmt: skip
        logger.warning(
            "kvoffload_patch: no control socket, so kvoffload status and its like do not find this "
            "engine, which serves all the same: %s%s", error, remedy,
        )  # fmt: skip


def close_socket(engine_core: Any) -> None:
    """The engine core shuts down."""
    desk = engine_core.__dict__.pop(CONTROL, None)
    if desk is not None:
        desk.close()


def waker(engine_core: Any) -> Callable[[], None]:
    """What makes an idle engine core call a hook; one in its user's own process has no such way."""
    queue = getattr(engine_core, "input_queue", None)

    def wake() -> None:
        if queue is None:
            return  # the next step looks
        from vllm.v1.engine import EngineCoreRequestType

        queue.put_nowait((EngineCoreRequestType.ABORT, []))

    return wake
