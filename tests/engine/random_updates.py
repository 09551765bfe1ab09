"""New weights for the engine of a random run while it is asked: its own, or of its adapters.

There are two sets of them, between which it goes back and forth. What has begun to be computed is
aborted before, because its answer would be of both; what waits, also for a load, is not. vLLM's own
cache is made to hold nothing of the weights before: it is reset, or loses its blocks as to other
prompts, of which the tier is told nothing.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import random_plan
from vllm.lora.request import LoRARequest

_FACTOR = 1.25  # of the second weights


class Adapters:
    """Those of ``TEST_LORAS`` in folders of the run's own; the second set has them exchanged."""

    def __init__(self) -> None:
        self._own = tempfile.TemporaryDirectory(prefix="adapters-")
        self._folders, self._numbers, self._made = list[Path](), [1, 2], 2
        self.write(False)

    def write(self, second: bool, elsewhere: bool = False) -> None:
        """Write this set to the same folders, or to new ones."""
        if elsewhere or not self._folders:
            self._folders = [Path(tempfile.mkdtemp(dir=self._own.name)) for _ in self._numbers]
        sources = os.environ["TEST_LORAS"].split(os.pathsep)
        for source, folder in zip(sources[:: -1 if second else 1], self._folders):
            shutil.copytree(source, folder, dirs_exist_ok=True)

    def renumber(self) -> None:
        """The same names, with numbers that no request has named."""
        self._numbers = [self._made + 1, self._made + 2]
        self._made += 2

    @property
    def numbers(self) -> list[int]:
        """By which the engine has them."""
        return list(self._numbers)

    def named(self, adapter: int, **more: Any) -> LoRARequest | None:
        """How a request names one, counted from 1; none for 0."""
        if not adapter:
            return None
        folder = str(self._folders[adapter - 1])
        return LoRARequest(f"adapter {adapter}", self._numbers[adapter - 1], folder, **more)


class Weights:
    """The two sets of weights of an engine.

    Attributes:
        second: whether it has the second.
    """

    def __init__(self, stage: Any, plan: random_plan.Plan) -> None:
        self._engine, self._core = stage.llm.llm_engine, stage.core
        self.second = False
        self._adapters = Adapters() if plan.kind == "lora" else None

    def lora_of(self, request: random_plan.Request) -> LoRARequest | None:
        """The adapter of a request as it is now."""
        return self._adapters.named(request.lora) if self._adapters else None

    def choose(self, rng: random.Random) -> str:
        """How the next change is to be made, a name of `random_plan.UPDATES`."""
        adapters, model = random_plan.UPDATES[:3], random_plan.UPDATES[3:]
        return rng.choice(adapters if self._adapters else model)

    def outdates(self, name: str, how: str) -> bool:
        """Whether a request that waits would be of the weights before, or of both."""
        if how in ("adapters unloaded", "adapters elsewhere"):  # it names one that is gone
            return True
        return any(
            one.num_computed_tokens or one.num_preemptions
            for one in self._core.scheduler.requests.values()
            # Behind its name is a random part; before that of a sample, its number.
            if one.request_id.rpartition("-")[0].rpartition("_")[2] == name
        )

    def change(self, how: str, rng: random.Random) -> None:
        """Go over to the other set; nothing runs, and no step is under way."""
        self.second = not self.second
        self._engine.reset_mm_cache()
        self._engine.reset_encoder_cache()  # what it has of images is of the weights before
        if self._adapters is not None:
            self._change_adapters(self._adapters, how, rng)
        elif how == "weights asleep":
            self._engine.sleep(1, mode="keep")
            self._engine.wake_up(["weights"])
            self._engine.collective_rpc(_write, args=(self.second,))
            self._engine.wake_up(["kv_cache"])
        else:
            before, after = {
                "weights behind a reset": (self._reset, _nothing),
                "weights before a reset": (_nothing, self._reset),
                "weights without a reset": (self._empty_gpu, _nothing),
            }[how]
            before()
            self._engine.collective_rpc(_update_weights, args=(self.second,))
            after()

    def _change_adapters(self, adapters: Adapters, how: str, rng: random.Random) -> None:
        before, after = rng.choice([(_nothing, self._reset), (self._empty_gpu, _nothing)])
        before()
        adapters.write(self.second, elsewhere=how == "adapters elsewhere")
        if how == "adapters in place":
            for at in (1, 2):
                self._engine.add_lora(adapters.named(at, load_inplace=True))
        else:
            for number in adapters.numbers if how == "adapters unloaded" else ():
                self._engine.remove_lora(number)
            adapters.renumber()
        after()

    def _reset(self) -> None:
        assert self._core.reset_prefix_cache(), "vLLM did not reset its prefix cache"

    def _empty_gpu(self) -> None:
        """As if other prompts had taken all its blocks."""
        pool = self._core.scheduler.kv_cache_manager.block_pool
        pool.evict_blocks({block.block_id for block in pool.blocks if not block.is_null})


def _nothing() -> None:
    """No reset."""


def _write(worker: Any, second: bool) -> None:
    """Runs on each worker."""
    named = dict(worker.model_runner.get_model().named_parameters())
    if not hasattr(worker, "_test_first_weights"):
        worker._test_first_weights = {name: one.data.clone() for name, one in named.items()}
    for name, first in worker._test_first_weights.items():
        named[name].data.copy_(first * _FACTOR if second else first)


def _update_weights(worker: Any, second: bool) -> None:
    """The same, by a name that says so."""
    _write(worker, second)
