"""Two engines that hand KV over by NIXL, asked as one `vllm.LLM` is.

Each prompt is given to the engine that computes prompts, and then, with what that has said of its
blocks, to the one that answers. `Stage` sees the second; the first is in a forked process, because
a process has one connector only.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import socket
from typing import Any

_TOGETHER = 2
_ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class PrefillDecode:
    """Both engines.

    Args:
        engine: arguments of `vllm.LLM`; of ``kv_transfer_config`` the role is left out.
    """

    def __init__(self, **engine: Any) -> None:
        context = multiprocessing.get_context("fork")
        self._prefill, theirs = context.Pipe()
        process = context.Process(target=_prefill, args=(engine, theirs), daemon=True)
        process.start()
        theirs.close()
        atexit.register(self._prefill.send, None)
        self._decode = _engine(engine, "kv_consumer")
        self.llm_engine = self._decode.llm_engine

    def generate(self, prompts: list[Any], sampling: Any, **extra: Any) -> list[Any]:
        """Answers of the second engine.

        A few at a time: what the first has computed stays in its cache until it has been read, and
        vLLM gives it up unread after a while, telling nobody.
        """
        answers = []
        for at in range(0, len(prompts), _TOGETHER):
            asked = prompts[at : at + _TOGETHER]
            given = self._ask([prompt["prompt_token_ids"] for prompt in asked])
            sampled = [_with(sampling, one) for one in given]
            answers += self._decode.generate(asked, sampled, **extra)
        return answers

    def prefill_stats(self) -> dict[str, int]:
        """The tier's counters in the engine that computes prompts."""
        return self._ask("stats")

    def _ask(self, what: Any) -> Any:
        self._prefill.send(what)
        return self._prefill.recv()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decode, name)


def _prefill(engine: dict[str, Any], pipe: Any) -> None:
    """Answer prompts with what a connector is to be given, until there is None."""
    import scenarios
    from vllm import SamplingParams

    stage = scenarios.Stage(_engine(engine, "kv_producer"))
    sampling = SamplingParams(
        temperature=0, max_tokens=1, extra_args={"kv_transfer_params": dict(_ASKED)}
    )
    while (asked := pipe.recv()) is not None:
        if asked == "stats":
            pipe.send(stage.tier_stats())
            continue
        prompts = [{"prompt_token_ids": tokens} for tokens in asked]
        outputs = stage.llm.generate(prompts, sampling, use_tqdm=False)
        pipe.send([output.kv_transfer_params for output in outputs])


def _with(sampling: Any, params: dict[str, Any] | None) -> Any:
    asked = sampling.clone()
    asked.extra_args = {"kv_transfer_params": params} if params else None
    return asked


def _engine(engine: dict[str, Any], role: str) -> Any:
    from vllm import LLM

    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(_free_port())
    config = {**engine["kv_transfer_config"], "kv_role": role}
    return LLM(**{**engine, "kv_transfer_config": config})


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
