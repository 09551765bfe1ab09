"""python scripts/bench long --model DIR [--lengths 32763,120011] [--json FILE]

Long prompts one at a time on a CUDA GPU: with a quiet engine, and beside 8 answers under way.

An engine for each mode, one after the other. Each prompt is asked for once, then while the GPU has
it (the floor), then after all that nobody uses has left the GPU: what comes back from CPU memory.
Beside answers, what counts is also the longest time between two of their tokens until half a second
behind the prompt's first one. vLLM compiles as it does by default unless --engine says otherwise.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

from scripts.bench import arguments
from scripts.bench.common import cell, machine, say, table, write_json
from scripts.bench.serve import modes
from scripts.bench.serve.load import ask, random_prompts

MODES = {
    "ours": "this tier",
    "simple": "SimpleCPUOffloadConnector",
    "offloading": "OffloadingConnector",
}
ENGINE = {
    "load_format": "dummy", "max_model_len": 131_072, "num_gpu_blocks_override": 20_000,
    "max_num_seqs": 64,
}  # fmt: skip
ANSWERS, ANSWER_TOKENS = 8, 30_000  # beside the prompts; they go on to the end
BEHIND_S = 0.5  # that gaps are looked at behind a first token
SETTLES_S = 0.6  # what is still being copied ends meanwhile
_PROGRESS = "- "  # begins a line of a child's that is passed on


class Load:
    """What is asked of an engine in this process.

    Args:
        engine: a `vllm.LLMEngine` whose core is in this process.
        pool: of its GPU blocks.
        vocabulary: token ids of its model.
    """

    def __init__(self, engine: Any, pool: Any, vocabulary: int) -> None:
        self._engine, self._pool, self._vocabulary = engine, pool, vocabulary
        self._count = 0
        self._seen: dict[str, list[float]] = {}  # when each token of a request came
        self._beside: list[str] = []

    def answer_beside(self) -> None:
        """Answers that go on beside what is measured from now on."""
        for prompt in random_prompts("answers", ANSWERS, 200, self._vocabulary):
            self._beside.append(self._add(prompt, ANSWER_TOKENS))
        self.settle()

    def prompt(self, tokens: int) -> list[int]:
        """The one of so many tokens."""
        return random_prompts(f"{tokens}", 1, tokens, self._vocabulary)[0]

    def ask(self, prompt: list[int]) -> tuple[float, float]:
        """Milliseconds to the first token, and the longest between two of an answer beside it."""
        began = time.perf_counter()
        name = self._add(prompt, 1)
        while name not in self._seen:
            self._step()
        first = self._seen[name][0]
        end = first + (BEHIND_S if self._beside else 0.0)
        while time.perf_counter() < end:
            self._step()
        gaps = [self._longest(self._seen[other], began, end) for other in self._beside]
        return 1000 * (first - began), 1000 * max(gaps, default=0.0)

    def settle(self) -> None:
        """Let copies end, beside whatever runs."""
        end = time.perf_counter() + SETTLES_S
        while time.perf_counter() < end:
            if self._engine.has_unfinished_requests():
                self._step()
            else:
                time.sleep(0.01)

    def evict(self) -> None:
        """What nobody uses leaves the GPU's cache."""
        self.settle()
        self._pool.free_blocks(self._pool.get_new_blocks(self._pool.get_num_free_blocks()))

    def _add(self, prompt: list[int], max_tokens: int) -> str:
        self._count += 1
        name = f"long-{self._count}"
        ask(self._engine, name, prompt, max_tokens)
        return name

    def _step(self) -> None:
        outputs, now = self._engine.step(), time.perf_counter()
        for output in outputs:
            self._seen.setdefault(output.request_id, []).append(now)

    @staticmethod
    def _longest(times: list[float], begin: float, end: float) -> float:
        pairs = list(zip(times, times[1:]))
        return max((b - a for a, b in pairs if b >= begin and a <= end), default=0.0)


def play(load: Load, lengths: list[int], repeats: int) -> list[dict[str, Any]]:
    """What came of each length, first with a quiet engine; milliseconds."""
    rows: list[dict[str, Any]] = []
    prompts = {tokens: load.prompt(tokens) for tokens in lengths}
    for beside in (False, True):
        if beside:
            load.answer_beside()
        for tokens, prompt in prompts.items():
            cold, _ = load.ask(prompt)
            load.settle()
            row: dict[str, Any] = {"tokens": tokens, "beside": beside, "gpu": [], "cpu": []}
            for _ in range(repeats):
                row["gpu"].append(load.ask(prompt))
            for _ in range(repeats):
                load.evict()
                row["cpu"].append(load.ask(prompt))
            rows.append(row if beside else {**row, "cold": cold})
            back = cell([first for first, _ in row["cpu"]])
            say(f"{_PROGRESS}{tokens} tokens{', beside answers' * beside}: {back} ms")
    return rows


def child(spec: dict[str, Any]) -> None:
    """One engine: plays, and prints a line that begins with RESULT."""
    from vllm import LLM

    llm = LLM(**spec["engine"])
    core = llm.llm_engine.engine_core.engine_core
    pool = core.scheduler.kv_cache_manager.block_pool
    load = Load(llm.llm_engine, pool, core.vllm_config.model_config.get_vocab_size())
    rows = play(load, spec["lengths"], spec["repeats"])
    print("RESULT " + json.dumps(rows), flush=True)


def run(mode: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A mode in a process of its own.

    Raises:
        RuntimeError: it has no result; what it said is in the message.
    """
    engine = {
        "model": str(options.model), "skip_tokenizer_init": True, "disable_log_stats": True,
        "seed": 0, **options.engine, **modes.engine_arguments(mode, options.cpu_gib),
    }  # fmt: skip
    spec = {"engine": engine, "lengths": options.lengths, "repeats": options.repeats}
    armed = ["-m", "kvoffload_patch", sys.executable] if mode == "ours" else []
    command = [sys.executable, *armed, "-m", __name__, "--child", json.dumps(spec)]
    env = modes.environment(mode, options.cpu_gib, small=False)
    env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    log: list[str] = []
    with subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        for line in process.stdout or ():
            if line.startswith("RESULT "):
                rows: list[dict[str, Any]] = json.loads(line.removeprefix("RESULT "))
                return rows
            log.append(line)
            if line.startswith(_PROGRESS):
                say(line.rstrip())
    said = "".join(log)[-3000:]
    raise RuntimeError(f"{mode}: expected a result, found status {process.returncode}: {said}")


def report(found: dict[str, list[dict[str, Any]]]) -> str:
    """A table: for each length the floor, and what comes back in each mode; milliseconds."""
    names = list(found)
    lines = [["median (smallest to largest), ms", "floor", *(MODES[name] for name in names)]]
    rows = {name: {(r["tokens"], r["beside"]): r for r in found[name]} for name in names}
    for tokens, beside in rows[names[0]]:
        for at, what in enumerate(
            ("first token", "longest between tokens of others")[: 1 + beside]
        ):
            title = f"{tokens:,} tokens, {'beside answers' if beside else 'quiet'}: {what}"
            floor = cell([pair[at] for pair in rows[names[0]][tokens, beside]["gpu"]])
            back = [cell([pair[at] for pair in rows[n][tokens, beside]["cpu"]]) for n in names]
            lines.append([title, floor, *back])
    return table(lines)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench long", description=(__doc__ or "").split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--model", type=arguments.model, help="folder of a model's configuration")
    parser.add_argument(
        "--modes", type=arguments.some(MODES), default=",".join(MODES), help="in this order"
    )
    parser.add_argument(
        "--lengths",
        type=arguments.wholes(1),
        default="8187,32763,65531,120011",
        help="tokens of the prompts",
    )
    parser.add_argument(
        "--repeats", type=arguments.whole(1), default=5, help="samples of each figure"
    )
    parser.add_argument(
        "--cpu-gib", type=arguments.positive, default=56.0, help="of CPU memory for each mode"
    )
    parser.add_argument(
        "--engine", type=arguments.settings, default=ENGINE, help="arguments of vllm.LLM"
    )
    parser.add_argument(
        "--json", type=arguments.written, help="where results go as well; default: nowhere"
    )
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model is None and options.child is None:
        parser.error("expected --model DIR, found none")
    return options


def main() -> int:
    """Every mode in turn; prints the table."""
    options = parse()
    if options.child:
        child(options.child)
        return 0
    document: dict[str, Any] = {"machines": [machine()], "rows": {}}
    for mode in options.modes:
        say(f"{mode}:")
        document["rows"][mode] = run(mode, options)
        write_json(options.json, document)
    say(f"\n{report(document['rows'])}")
    return 0
