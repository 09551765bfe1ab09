"""python scripts/bench step [--quick] [--json FILE] [--only a,b1k,...]

What the CPU tier adds to a scheduler step on the host: vLLM's own scheduler, no model, no copies.

Two schedulers of one configuration take turns, one plain with the patches off, one with a tier and
the patches on. A step is `schedule()` and `update_from_output()`, timed in CPU time of the thread;
what stands for the model in between gives one token to each request that gets one, and says that
all transfers planned so far are done. Needs an installed vLLM that the patches accept.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count, islice, repeat
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

BLOCK = 16
CPU_SLOTS = 100_000
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32",
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 32_000,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16_384,
}  # fmt: skip


class Ranks:
    """Stands for the workers of a `SchedulerTier`."""

    load_ms_per_block = 0.02
    copies_overlap = True
    num_ranks = 1

    def loads_done(self) -> int:
        """What is done comes with a step's output."""
        return 0


class Sim:
    """A scheduler, with a tier or without, and what stands for its model."""

    def __init__(self, tier: bool, slots: int, blocks: int = 20_000):
        self.tier = tier
        self.scheduler, self._hasher = _scheduler(slots, blocks)
        self.loads_end = True
        self._done = [0, 0]
        self._ids = count()
        if not tier:
            return
        from kvoffload_patch.config import Settings
        from kvoffload_patch.integration.engine.tier import SchedulerTier
        from kvoffload_patch.integration.engine.vllm_scheduler import SchedulerView
        from kvoffload_patch.integration.protocol import TIER
        from kvoffload_patch.tier.manager import OffloadManager

        view = SchedulerView(self.scheduler)
        self.manager = OffloadManager(CPU_SLOTS)
        attached = SchedulerTier(view, self.manager, Ranks(), Settings(log_interval=1e9))
        for owner in (self.scheduler, view.pool):
            setattr(owner, TIER, attached)

    def add(self, seed: int, tokens: int, max_tokens: int) -> None:
        """A request whose prompt is its own from the first block on, one for each seed."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        prompt = [seed % 32_000, seed // 32_000, *repeat(7, tokens - 2)]
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request_id = f"request-{next(self._ids)}"
        request = Request(request_id, prompt, sampling, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)

    def step(self) -> float:
        """One step; microseconds of CPU time."""
        began = time.thread_time_ns()
        scheduled = self.scheduler.schedule()
        between = time.thread_time_ns()
        output = self._run(scheduled)
        resumed = time.thread_time_ns()
        self.scheduler.update_from_output(scheduled, output)
        return (time.thread_time_ns() - resumed + between - began) / 1000

    def _run(self, scheduled: Any) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        ids = list(scheduled.num_scheduled_tokens)
        requests = self.scheduler.requests
        tokens: list[list[int]] = [
            [11] if requests[i].num_computed_tokens >= requests[i].num_tokens else [] for i in ids
        ]
        output = ModelRunnerOutput(ids, {i: n for n, i in enumerate(ids)}, tokens)
        if self.tier:
            self._answer(scheduled, output)
        return output

    def _answer(self, scheduled: Any, output: Any) -> None:
        from kvoffload_patch.integration.protocol import PLAN, RESULT
        from kvoffload_patch.tier.plan import TransferResult

        plan = getattr(scheduled, PLAN, None)
        if plan is not None and plan.loads and self.loads_end:
            self._done[0] = plan.loads[-1].ticket
        if plan is not None and plan.store:
            self._done[1] = plan.store.ticket
        setattr(output, RESULT, TransferResult(*self._done))

    def totals(self) -> dict[str, int]:
        """Blocks that the tier has stored and loaded so far."""
        return {"stored": self.manager.stats.stored, "loaded": self.manager.stats.loaded}

    def run_until(self, running: int) -> None:
        """Step until this many requests run and none of them is in its prompt."""
        for _ in range(1000):
            self.step()
            now = self.scheduler.running
            if len(now) == running and all(r.num_output_tokens for r in now):
                return
        raise RuntimeError(f"expected {running} running requests, found {len(now)}")


def _scheduler(slots: int, blocks: int) -> tuple[Any, Any]:
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        config = EngineArgs(
            model=folder, skip_tokenizer_init=True, block_size=BLOCK, max_model_len=16_384,
            max_num_seqs=slots, max_num_batched_tokens=8192, async_scheduling=False,
        ).create_engine_config()  # fmt: skip
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layers.0", "layers.1"], spec)]
    init_none_hash(sha256)
    kv = KVCacheConfig(blocks, [], groups)
    grammars = StructuredOutputManager(config)
    scheduler = Scheduler(config, kv, grammars, block_size=BLOCK, log_stats=True)
    return scheduler, get_request_block_hasher(BLOCK, sha256)


# A scenario readies a scheduler and returns what is to be done, untimed, before each step.
Before = Iterator[None]


def decodes(tier: bool, quick: bool, waiting: int = 0) -> tuple[Sim, Before]:
    """256 running requests in all run slots; they fill 16 blocks in a step between them."""
    sim = Sim(tier, slots=256)
    for seed in range(256):
        sim.add(seed, 256 + seed % BLOCK, 10_000)
    sim.run_until(256)
    for seed in range(1000, 1000 + waiting):
        sim.add(seed, 256, 10)
    return sim, repeat(None)


def no_room(tier: bool, quick: bool, in_cpu: bool = False, parked: bool = False) -> Any:
    """64 running, 1,000 waiting for 512 blocks each, of which fewer than 500 are left.

    With ``in_cpu``, the tier has the whole prompt of the first that waits. With ``parked``, one
    more request waits in front of them for a load, in blocks of its own, that never ends.
    """
    parked_blocks = 128 if parked and tier else 0
    sim = Sim(tier, slots=256, blocks=680 + parked_blocks)
    for seed, tokens in ((1000 if in_cpu else 998, 8192), (999, 2064), (997, 10_500)):
        sim.add(seed, tokens, 1)  # the last one takes the GPU blocks of those before it
        while sim.scheduler.has_unfinished_requests():
            sim.step()
    for seed in range(64):
        sim.add(seed, 32 + seed % BLOCK, 10_000)
    sim.run_until(64)
    if parked_blocks:
        sim.loads_end = False
        sim.add(999, 2064, 1)
        sim.step()
    for seed in range(1000, 2000):
        sim.add(seed, 8192, 10)
    return sim, repeat(None)


def prefills(tier: bool, quick: bool, tokens: int, prompts: int = 10**6) -> tuple[Sim, Before]:
    """A request a step, done with it: the prompts in turn, each gone from the GPU by its next."""
    sim = Sim(tier, slots=256)

    def one_more() -> Before:
        for n in count():
            sim.add(n % prompts, tokens, 1)
            yield

    before = one_more()
    for _ in range(min(prompts, 300 if quick else 800)):
        next(before)
        sim.step()
    return sim, before


# Name: title, what readies it, its options, and the steps of a turn.
SCENARIOS: dict[str, tuple[str, Callable[..., tuple[Sim, Before]], dict[str, Any], int]] = {
    "a": ("256 decode, 0 wait", decodes, {}, 30),
    "b1k": ("256 decode, 1,000 wait for run slots", decodes, {"waiting": 1000}, 30),
    "b10k": ("256 decode, 10,000 wait for run slots", decodes, {"waiting": 10_000}, 30),
    "c": ("64 decode, 1,000 wait for blocks", no_room, {}, 7),
    "c-hit": ("c, the tier has the first one's 512 blocks", no_room, {"in_cpu": True}, 7),
    "c-parked": ("c, behind a parked load under way", no_room, {"parked": True}, 7),
    "d": ("prefill of 2,048 tokens, 128 blocks stored", prefills, {"tokens": 2048}, 30),
    "e": ("prompt of 2,065 tokens, 2,064 known", prefills, {"tokens": 2065, "prompts": 300}, 30),
    "e-full": ("prompt of 2,064 tokens, all known", prefills, {"tokens": 2064, "prompts": 300}, 30),
}  # fmt: skip


def chunk(sim: Sim, before: Before, steps: int) -> list[float]:
    """The times of some steps."""
    from kvoffload_patch.integration import install

    install.arm() if sim.tier else install.disarm()
    if any("Scheduler.schedule" in name for name in install.installed_attributes()) != sim.tier:
        raise RuntimeError(f"the patches should be {'on' if sim.tier else 'off'}")
    gc.collect()
    return [sim.step() for _ in islice(before, steps + 1)][1:]  # the first after the switch


def measure(name: str, repeats: int, quick: bool) -> dict[str, Any]:
    """One scenario: the two schedulers in turns; microseconds, over all steps."""
    from kvoffload_patch.integration import install

    title, ready, options, steps = SCENARIOS[name]
    steps = 5 if quick else steps
    install.disarm()
    plain = ready(False, quick, **options)
    install.arm()
    tier = ready(True, quick, **options)
    gc.collect()
    gc.freeze()
    before = tier[0].totals()
    runs = [(chunk(*plain, steps), chunk(*tier, steps)) for _ in range(repeats)]
    moved = {k: (n - before[k]) / repeats / (steps + 1) for k, n in tier[0].totals().items()}
    install.disarm()
    gc.unfreeze()
    row = {"name": name, "title": title, "steps": repeats * steps}
    for side, what in enumerate(("plain", "tier")):
        times = [t for run in runs for t in run[side]]
        row[f"{what}_median"] = statistics.median(times)
        row[f"{what}_p95"] = statistics.quantiles(times, n=20)[-1]
    row["added_median"] = row["tier_median"] - row["plain_median"]
    row["added_p95"] = row["tier_p95"] - row["plain_p95"]
    row["added_by_repeat"] = [statistics.median(b) - statistics.median(a) for a, b in runs]
    return {**row, **moved}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows, in Markdown."""
    numbers = [
        f"{side}_{what}" for side in ("plain", "tier", "added") for what in ("median", "p95")
    ]
    lines = [
        "| | scenario | plain: median | p95 | tier: median | p95 | added: median | p95 "
        "| added, by repeat | blocks stored | loaded |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        low, *_, high = sorted(row["added_by_repeat"])
        cells = [row["name"], row["title"], *(f"{row[n]:.0f}" for n in numbers)]
        cells += [f"{low:.0f} to {high:.0f}", f"{row['stored']:.0f}", f"{row['loaded']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[1])
    parser.add_argument("--quick", action="store_true", help="a few steps: does it run at all?")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the numbers there")
    parser.add_argument("--only", default=",".join(SCENARIOS), help="scenarios, by name")
    parser.add_argument("--repeats", type=int, help="turns of each scheduler (2 or more)")
    args = parser.parse_args()
    import vllm
    import vllm.v1.core.sched.scheduler  # noqa: F401 - before the patches are told to arm

    rows = []
    repeats = args.repeats or (2 if args.quick else 10)
    for name in args.only.split(","):
        print(f"{name}: {SCENARIOS[name][0]}", file=sys.stderr, flush=True)
        rows.append(measure(name, repeats, args.quick))
    print(f"Microseconds of a step, blocks stored and loaded in a step; vLLM {vllm.__version__}\n")
    print(table(rows))
    if args.json:
        found = {"vllm": vllm.__version__, "repeats": repeats, "rows": rows}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
