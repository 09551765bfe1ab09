"""What users of a random run ask for besides tokens, and how they run their server."""

from __future__ import annotations

import random
from typing import Any

from integration.engine.random_adapters import Adapters, can_load_again
from integration.engine.random_sessions import Sessions, has_sessions
from integration.engine.random_waits import Waits
from scheduler_half.device import answer

from kvoffload_patch.integration.engine.blocks.store_choice import ARGUMENT


class Users:
    """In every other 32 runs: as the seed says, by numbers that nothing else rests on.

    Attributes:
        alone: nobody gives commands, puts the engine to sleep or changes weights.
        stopped: requests that end at a token, before the number that they may have.
        unread: requests that do not read the prefix cache.
        private: requests whose blocks are not to be stored.
        pauses: how often vLLM was told to begin no requests, or no steps.
        crowds: how often others have taken blocks that were free, and given them back.
        tails: blocks that were handed out first, so that heads of prefixes stay: in two thirds of
            the runs a part of each is kept, whatever finds more.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"users {seed}")
        self._ask = seed // 32 % 2 == 1
        self.alone = self._ask and seed // 16 % 2 == 1
        self._paused = False
        self._seed = seed
        self._sessions: Sessions | None = None
        self._adapters: Adapters | None = None
        self._waits: Waits | None = None
        self._kept = random.Random(f"kept {seed}").choice([None, 0.3, 0.6])
        self.stopped = self.unread = self.private = self.pauses = self.crowds = self.tails = 0

    def settings(self, about: dict[str, Any], sessions: bool) -> dict[str, Any]:
        """Arguments of `Mini`, with settings of the tier and of vLLM's scheduler besides.

        With more steps under way than run slots vLLM itself may not come to an end, and with more
        than two it forgets tokens of sessions. These are asked, if at all, where all groups are
        attention: the device knows no other request that begins within a block.
        """
        rng = self._rng
        if not self._ask:
            return about
        plain = all(window is None or type(window) is int for window in about["windows"])
        if sessions and plain and about["in_flight"] <= 2 and has_sessions():
            self._sessions = Sessions(self._seed)
        limits = {**about["limits"], "scheduler_reserve_full_isl": rng.random() < 0.5}
        slots = rng.choice([8, 8, 8, 2, 4])
        if slots >= about["in_flight"]:
            limits["max_num_seqs"] = slots
        self._waits = Waits(self._seed)
        if sessions and can_load_again():
            self._adapters = Adapters(self._seed)
        decode, uses = rng.random() < 0.7, rng.choice([1, 1, 2])
        tier = {"store_decode": decode, "store_min_uses": uses, "gpu_prefixes": "auto"}
        return {**about, "limits": limits, **tier}

    def add(self, mini: Any, prompt: list[int], count: int, priority: int) -> str:
        """Ask an engine for ``count`` tokens, or for fewer; returns the request's name."""
        if not self._ask:
            return str(mini.add(prompt, count, priority))
        rng, sampling = self._rng, dict[str, Any]()
        tokens = answer(prompt, count)
        stop = rng.choice(tokens) if rng.random() < 0.3 else None
        if stop is not None:
            sampling["stop_token_ids"] = [stop]
            self.stopped += tokens.index(stop) + 1 < count
        if rng.random() < 0.1:
            sampling["prompt_logprobs"] = 1
            self.unread += 1
        if rng.random() < 0.1:
            sampling["extra_args"] = {ARGUMENT: rng.choice([0, "no"])}
            self.private += 1
        salt = rng.choice([None, None, None, "salt"])
        adapter = self._adapters.name() if self._adapters is not None else {}
        name = str(mini.add(prompt, count, priority, salt=salt, **adapter, **sampling))
        if self._adapters is not None:
            self._adapters.asked(mini.scheduler.requests[name])
        if self._waits is not None:
            self._waits.asked(mini.scheduler.requests[name])
        if stop is not None:
            mini.counts[name] = tokens.index(stop) + 1
        return name

    def disturb(self, mini: Any) -> None:
        """Perhaps pause vLLM's scheduler, or let it go on; or let others have the free blocks."""
        if not self._ask:
            return
        self._keep_heads(mini)
        if self._sessions is not None:
            self._sessions.disturb(mini)
        if self._adapters is not None:
            self._adapters.disturb(mini)
        if self._waits is not None:
            self._waits.disturb(mini)
        free = mini.pool.get_num_free_blocks()
        if free and self._rng.random() < (0.4 if self.alone else 0.15):
            mini.pool.free_blocks(mini.pool.get_new_blocks(self._rng.randint(1, free)))
            self.crowds += 1
        if not _can_pause(mini):
            return
        from vllm.v1.core.sched.interface import PauseState

        if self._paused:
            if self._rng.random() < 0.5:
                self._unpause(mini)
        elif self._rng.random() < 0.08:
            states = PauseState.PAUSED_NEW, PauseState.PAUSED_ALL
            mini.scheduler.set_pause_state(self._rng.choice(states))
            self._paused = True
            self.pauses += 1

    def seen(self) -> dict[str, int]:
        """What has happened."""
        names = "stopped", "unread", "private", "pauses", "crowds", "tails"
        goes_on = self._sessions.goes_on if self._sessions is not None else 0
        again = self._adapters.again if self._adapters is not None else 0
        told = {name: getattr(self, name) for name in names}
        names = ("grammars", "passed_over", "throttled") if self._waits is not None else ()
        waits = {name: getattr(self._waits, name) for name in names}
        return {**told, **waits, "goes on": goes_on, "loaded again": again}

    def check(self, mini: Any, ended: bool = False) -> None:
        """What sessions were answered is right; ``ended``: the engine has, before its time."""
        if self._sessions is not None:
            self._sessions.check(mini, ended)

    def end(self, mini: Any) -> None:
        """Nothing is paused, and sessions end."""
        if self._sessions is not None:
            self._sessions.over(mini)
        if self._waits is not None:
            self._waits.over(mini)
        self._unpause(mini)

    def _keep_heads(self, mini: Any) -> None:
        """Keep this part of each prefix; after a reset of the prefix cache again."""
        heads, adapter = mini.tier._recency.heads, mini.view.adapter
        if self._kept is None or heads is None:
            return
        heads.prefix_share.share, heads.prefix_share._due = self._kept, 1 << 40
        if "hand_out_first" in vars(adapter):
            return
        hand_out_first = adapter.hand_out_first

        def counted(blocks: Any) -> None:
            self.tails += len(blocks)
            hand_out_first(blocks)

        adapter.hand_out_first = counted

    def _unpause(self, mini: Any) -> None:
        if self._paused:
            from vllm.v1.core.sched.interface import PauseState

            mini.scheduler.set_pause_state(PauseState.UNPAUSED)
            self._paused = False


def _can_pause(mini: Any) -> bool:
    """Whether the release can, and answers rightly afterwards.

    From 0.17 to 0.21 an asynchronous one does not, without a tier either, if the prefix cache is
    reset with what runs while no step is under way: each request loses a token.
    """
    from vllm.v1.request import Request

    loses = "discard_latest_async_tokens" in Request.__init__.__code__.co_names
    can = hasattr(mini.scheduler, "set_pause_state")
    return can and not (loses and mini.config.scheduler_config.async_scheduling)
