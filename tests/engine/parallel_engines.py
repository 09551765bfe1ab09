"""Data-parallel engines behind one client, asked as a `vllm.LLM` is, which itself has one only."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any


class ParallelEngines:
    """As many engines as ``data_parallel_size`` says, each in processes of its own.

    Args:
        engine: arguments of `vllm.LLM`.
    """

    def __init__(self, **engine: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._asked = 0
        self._client = self._loop.run_until_complete(_start(engine))
        self.num_engines: int = engine["data_parallel_size"]
        self.llm_engine = SimpleNamespace(
            vllm_config=self._client.vllm_config, engine_core=SimpleNamespace()
        )

    def ask(self, prompt: list[int], sampling: Any, rank: int) -> list[int]:
        """One engine's answer to one prompt."""
        return self._loop.run_until_complete(self._answer(prompt, sampling, rank))

    async def _answer(self, prompt: list[int], sampling: Any, rank: int) -> list[int]:
        self._asked += 1
        given = {"prompt_token_ids": prompt}
        name = f"asked-{self._asked}"
        async for output in self._client.generate(given, sampling, name, data_parallel_rank=rank):
            answer = output
        return list(answer.outputs[0].token_ids)

    def collective_rpc(self, function: Any) -> list[Any]:
        """What the first engine's workers answer; all are asked."""
        return self._loop.run_until_complete(self._client.collective_rpc(function))

    def get_metrics(self) -> list[Any]:
        """Figures of all engines; label ``engine`` tells them apart."""
        from vllm.v1.metrics.reader import get_metrics_snapshot

        return get_metrics_snapshot()

    def close(self) -> None:
        """End the engines."""
        self._client.shutdown()


async def _start(engine: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine))
