"""A tier that is paused, resumed, made smaller and larger, and emptied between prompts."""

from __future__ import annotations

import os
from threading import Thread
from typing import Any

PROMPTS, LENGTH = 6, 420


def commanded(stage: Any) -> dict[str, Any]:
    """The same prompts, asked one at a time, twice whenever the tier was told something.

    Between the two of them nothing is lost, before each first one the GPU's blocks are. Plain vLLM
    is told nothing.

    Returns: ``tokens`` and ``cached`` of each prompt, by the moment at which it was asked;
    ``states`` and ``capacities`` that the tier has said it is in and has.
    """
    from scenarios import cached_of, prompts, runner, tokens_of

    asked = prompts(41, PROMPTS, LENGTH)
    tokens: dict[str, Any] = {}
    cached: dict[str, list[int]] = {}
    tier = _Told(stage)

    def ask(name: str) -> None:
        stage.push_out(410)
        for twice in ("", ", twice"):
            outputs = [stage.play([prompt])[0] for prompt in asked]
            tokens[name + twice], cached[name + twice] = tokens_of(outputs), cached_of(outputs)

    ask("first")
    ask("stored")
    tier.told("pause")
    ask("paused")
    tier.told("resume")
    ask("resumed")
    tier.told("resize", gib=tier.share(0.5))
    ask("smaller")
    tier.told("resize", gib=tier.share(1.0))
    ask("larger")
    ask("larger, stored")
    for seed in (411, 412):  # what the GPU still has would be stored before it is lost
        stage.push_out(seed)
    tier.told("empty")
    ask("emptied")
    ask("emptied, stored")
    return {
        "tokens": tokens, "cached": cached, "states": tier.states, "capacities": tier.capacities,
        "tier": stage.tier_stats(), "runner": stage.llm.collective_rpc(runner)[0],
    }  # fmt: skip


class _Told:
    """Commands over the control socket of the engine in this process."""

    def __init__(self, stage: Any) -> None:
        self.states: list[str] = []
        self.capacities: list[int] = []
        self._stage = stage
        self._engine = None
        if stage.tier is not None:
            from kvoffload_patch.control import client

            own = f"{os.getpid()}-"
            [self._engine] = [one for one in client.find() if one.name.startswith(own)]

    def told(self, command: str, **arguments: str) -> None:
        """Have it carried out, which takes a step."""
        if self._engine is None:
            return
        answers: list[dict[str, Any]] = []
        thread = Thread(target=lambda: answers.append(self._ask(command, **arguments)))
        thread.start()
        while thread.is_alive():
            self._stage.play([[5, 6, 7]], max_tokens=1)
        [answer] = answers
        self.states.append(answer["state"])
        self.capacities.append(answer["capacity_blocks"])

    def share(self, part: float) -> str:
        """GiB of a tier in which so much of what is used now, or all that is mapped, has room."""
        if self._engine is None:
            return ""
        has = self._ask("status")
        blocks = has["used_blocks"] * part if part < 1 else has["largest_blocks"]
        return repr((int(blocks) + 0.5) * has["block_bytes"] / (1 << 30))

    def _ask(self, command: str, **arguments: str) -> dict[str, Any]:
        from kvoffload_patch.control import client

        return client.ask(self._engine, command, **arguments)
