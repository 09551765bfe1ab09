"""A trainer beside a random run: it puts the engine to sleep, and gives it other weights."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Trainer:
    """Disturbs one run, as its seed says; what it has made wrong must never be read.

    Args:
        mini: the engine. With KV cache events nothing is kept through sleep, as in an engine.

    Attributes:
        kept: blocks that the tier had through sleep with the same weights.
        updates: with weights that were changed while requests had KV of those before.
    """

    def __init__(self, mini: Any, seed: int) -> None:
        self._mini = mini
        self._rng = random.Random(f"trainer {seed}")
        self._works = seed // 8 % 2 == 1
        self.kept = self.updates = 0
        if self._works and mini.replay is None and hasattr(mini.scheduler, "pause_state"):
            mini.tier.weights.watch()

    def seen(self) -> dict[str, int]:
        """What has happened."""
        return {"kept": self.kept, "updates": self.updates}

    def disturb(self) -> None:
        """Perhaps do something, between two steps."""
        mini, rng = self._mini, self._rng
        if self._works and mini.tier.weights.mixed:
            assert not mini.manager._slot_of, "blocks of the weights before are in the tier"
            if not mini.queue and rng.random() < 0.5:
                self._reset()
        if not self._works or rng.random() > 0.2:
            return
        if rng.random() < 0.2:
            self._update()
        elif not mini.queue:
            self._sleep()

    def _sleep(self) -> None:
        mini, weights = self._mini, self._mini.tier.weights
        weights.sleep_begins(1)
        with _all_paused(mini.scheduler):
            emptied = reset(mini)
        weights.sleep_over()
        if not emptied:
            return
        if self._rng.random() < 0.5:
            self.kept += len(mini.manager._slot_of)
            mini.device.scramble(slots=False)
        else:
            mini.ranks.version += 1
            mini.device.scramble()

    def _update(self) -> None:
        """What runs goes on with what it has, as in vLLM; the tier must give nothing of it.

        What loads under way bring is of the weights before, too.
        """
        mini = self._mini
        mini.ranks.version += 1
        mini.device.scramble(blocks=False)
        mini.breaker.weights_updated()
        self.updates += mini.tier.weights.mixed
        # A tier that fails in this very call keeps what it had, and is asked nothing any more.
        assert mini.breaker.detached or not mini.manager._slot_of, "the tier has old blocks"

    def _reset(self) -> None:
        if reset(self._mini):
            assert self._mini.breaker.detached or not self._mini.tier.weights.mixed
            self._mini.device.scramble()


@contextmanager
def _all_paused(scheduler: Any) -> Iterator[None]:
    """What runs is kept for when the engine wakes up, where the release can."""
    if not hasattr(scheduler, "set_pause_state"):
        yield
        return
    from vllm.v1.core.sched.interface import PauseState

    before = scheduler.pause_state
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    yield
    scheduler.set_pause_state(before)


def reset(mini: Any) -> bool:
    """Reset the prefix cache, with what runs where the release can; whether it is empty then."""
    mini.resets += 1
    try:
        return bool(mini.scheduler.reset_prefix_cache(reset_running_requests=True))
    except TypeError:  # up to 0.11
        return bool(mini.scheduler.reset_prefix_cache())
    except RuntimeError as error:
        if not _others_hold(mini.scheduler) or "Failed to reset KV cache" not in str(error):
            raise
        return False


def _others_hold(scheduler: Any) -> bool:
    """Whether a connector's load may hold blocks, or a session that waits for input."""
    sessions = (getattr(one, "resumable", False) for one in scheduler.requests.values())
    return scheduler.connector is not None or any(sessions)
