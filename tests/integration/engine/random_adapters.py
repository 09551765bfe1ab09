"""LoRA adapters in a random run: what the tier has of one that is loaded again must not be read."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from integration.engine.random_waits import Waits

from kvoffload_patch.integration.install import older_than


class Adapters:
    """Names adapters for requests, and loads them again, as the seed says: in place, or unloaded.

    In some runs with one step under way at a time vLLM lets a step have one of them. Up to 0.32 it
    ends by itself where others wait and a step leaves out what runs: with more steps under way,
    beside states, and where prompts are throttled (`random_waits`).

    Attributes:
        again: times that one was loaded again while the tier had blocks of it.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"adapters {seed}")
        self._requests: dict[str, list[Any]] = {"x": [], "y": []}
        self._numbers = {"x": 1, "y": 2}
        self._one_in_step = seed % 2 == 0 and not Waits(seed).works
        self.again = 0

    def name(self) -> dict[str, Any]:
        """What a request is made with besides."""
        if self._rng.random() < 0.5:
            return {}
        name = self._rng.choice([*self._requests])
        return {"lora_request": adapter(name, self._numbers[name])}

    def asked(self, request: Any) -> None:
        """A request was made so."""
        if request.lora_request is not None:
            self._requests[request.lora_request.lora_name].append(request)

    def disturb(self, mini: Any) -> None:
        """Perhaps load one again, between two steps; what was planned before is carried out."""
        one = self._one_in_step and mini.in_flight == 1 and not mini.view.state_groups
        if one and mini.scheduler.lora_config is None:
            config = SimpleNamespace(max_loras=1)
            mini.scheduler.lora_config = mini.scheduler.vllm_config.lora_config = config
        if mini.queue or self._rng.random() > 0.6:
            return
        name = self._rng.choice([*self._requests])
        mini.device.drain()
        keys = self._keys(mini, name)
        lost = [slot for key, slot in mini.manager._slot_of.items() if key in keys]
        for slot in lost:
            mini.device.slots[slot][:] = [7] * mini.device.size
        self.again += bool(lost)
        in_place = self._rng.random() < 0.5
        if not in_place:  # as vLLM's API server has it
            self._numbers[name] += 2
        mini.breaker.lora_named(adapter(name, self._numbers[name], in_place))

    def _keys(self, mini: Any, name: str) -> set[Any]:
        groups = range(len(mini.view.block_sizes))
        hashes = [found for request in self._requests[name] for found in request.block_hashes]
        return {mini.view.key(found, group) for found in hashes for group in groups}


def can_load_again() -> bool:
    """Whether keys have an adapter's name; up to 0.11.0 they have a number that none has twice."""
    return not older_than("0.11.1")


def adapter(name: str, number: int, load_inplace: bool = False) -> Any:
    """What vLLM's scheduler and the tier read of a `LoRARequest`, which needs vLLM's models.

    Events have one number for each name: they tell of one key, which is to be described alike.
    """
    path = f"/adapters/{name}"
    return SimpleNamespace(
        lora_name=name,
        name=name,
        lora_int_id=number,
        adapter_id=ord(name),
        lora_path=path,
        load_inplace=load_inplace,
    )
