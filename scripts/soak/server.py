"""One `vllm serve` on the tiny model of the tests, plain or with the tier, and what it is asked."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvoffload_patch.cli.bench import server
from scripts import ROOT
from scripts.demo_app.settings import has_gpu_vllm

NAME = "soak"
MAX_TOKENS = 1024
START_LIMIT_S = 400.0
STOP_LIMIT_S = 60.0
# A request waits for a hung copy, and for others on a busy machine.
ANSWER_LIMIT_S = 120.0


def write_model(folder: Path) -> None:
    """The model of the engine tests, whose answers depend on the whole prompt."""
    script = ROOT / "tests/engine/model.py"
    head_dim = ["128"] if has_gpu_vllm() else []  # which every attention kernel of a GPU takes
    subprocess.run([sys.executable, str(script), str(folder), *head_dim], check=True)


def _options(block_size: int, gpu_blocks: int, ranks: int) -> list[str]:
    # Servers share a GPU: each needs little of it, and measures nothing while the others begin.
    share = ["--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(1 << 30)]
    share = share if has_gpu_vllm() else []
    return [
        *share,
        "--host", "127.0.0.1", "--served-model-name", NAME, "--max-model-len", str(MAX_TOKENS),
        "--dtype", "bfloat16" if has_gpu_vllm() else "float32", "--enforce-eager",
        "--enable-prefix-caching", "--max-num-seqs", "8", "--seed", "0",
        "--block-size", str(block_size), "--num-gpu-blocks-override", str(gpu_blocks),
        "--tensor-parallel-size", str(ranks),
    ]  # fmt: skip


def _with_root() -> str:
    """PYTHONPATH, on which a vLLM of its own may lie, behind this tree."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


class Server(server.Server):
    """One server, ready within the ``with``.

    Args:
        model: folder of the model.
        log: file for what it prints.
        tier: KVOFFLOAD_* variables; None: plain vLLM.
        faults: see `faulty`; only with the tier.
        ranks: tensor-parallel ranks, each a process if there are several.

    Attributes:
        ended_after: seconds that it took to end, once asked to; None if it had to be killed.
    """

    def __init__(
        self, model: Path, log: Path, tier: dict[str, str] | None, faults: dict[str, Any],
        ranks: int = 1,
    ) -> None:  # fmt: skip
        port = server.free_port()
        through = ["-m", "kvoffload_patch", sys.executable] if tier is not None else []
        command = [
            sys.executable, *through, "-m", "scripts.soak.faulty", "serve", str(model),
            "--port", str(port), *_options(32, 96, ranks),
        ]  # fmt: skip
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVOFFLOAD_", "VLLM_"))}
        env = {
            **kept, **(tier or {}), "PYTHONPATH": _with_root(), "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        if has_gpu_vllm():
            # Not every GPU has the other sampler, and all answers are greedy.
            env |= {"VLLM_BATCH_INVARIANT": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        if faults:
            env["SOAK_FAULTS"] = json.dumps(faults)
        self.ended_after: float | None = None
        super().__init__(command, env, port, log, START_LIMIT_S, STOP_LIMIT_S)

    def end(self) -> float | None:
        """Ask it to end, and end what is left of it then."""
        self.ended_after = super().end()
        return self.ended_after

    def send(self, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPConnection:
        """POST; the response is not waited for.

        Raises:
            OSError, http.client.HTTPException: nobody takes it.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_LIMIT_S)
        header = {"Content-Type": "application/json", "Connection": "close"}
        connection.request("POST", path, json.dumps(body or {}), header)
        return connection

    def post(self, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        """The response, not read yet; closing it closes the connection. Raises as `send`."""
        return self.send(path, body).getresponse()

    def ask(self, prompt: list[int], count: int, **more: Any) -> Iterator[tuple[int, float]]:
        """Tokens of the answer, each with what it was ahead of the second best (log of a ratio).

        Raises:
            RuntimeError: the server refuses, or does not end its answer.
        """
        body = {
            "model": NAME, "prompt": prompt, "max_tokens": count, "temperature": 0,
            "ignore_eos": True, "stream": True, "logprobs": 2, "return_tokens_as_token_ids": True,
            **more,
        }  # fmt: skip
        with self.post("/v1/completions", body) as answer:
            if answer.status != 200:
                raise RuntimeError(f"status {answer.status}: {answer.read(500)!r}")
            for line in answer:
                text = line.decode().strip().removeprefix("data: ")
                if text == "[DONE]":
                    return
                if text:
                    yield from _tokens_in(json.loads(text))
        raise RuntimeError("the answer has no end")

    def metrics(self) -> dict[str, float]:
        """Samples of the tier, summed over labels but the state's."""
        found: dict[str, float] = {}
        for line in self.get("/metrics").decode().splitlines():
            if line.startswith("kvoffload_"):
                name, _, value = line.rpartition(" ")
                base, _, labels = name.partition("{")
                key = base + (":on" if 'state="on"' in labels else "")
                found[key] = found.get(key, 0.0) + float(value)
        return found


def _tokens_in(chunk: dict[str, Any]) -> Iterator[tuple[int, float]]:
    if "choices" not in chunk:
        raise RuntimeError(f"expected tokens, found {chunk}")
    for choice in chunk["choices"]:
        found = choice.get("logprobs")
        for token, best in zip(found["tokens"], found["top_logprobs"]) if found else ():
            logs = sorted(best.values(), reverse=True)
            yield int(token.removeprefix("token_id:")), logs[0] - logs[1]
