"""One job of bench_serve: a mode on an engine, in a process of its own, followed while it runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bench_serve_modes as modes
from bench_common import ROOT, say
from bench_serve_sizes import ENGINES, Sizes

POLL_S = 0.1


@dataclass
class Setup:
    """What all jobs of a run have in common.

    Attributes:
        model: folder of the model; random weights are used if it holds none.
        sizes: the load.
        small: a CPU and a tiny model.
        engine: more arguments of `vllm.LLM`.
        out: folder for logs.
        timeout: seconds after which a job is ended.
    """

    model: Path
    sizes: Sizes
    small: bool
    engine: dict[str, Any]
    out: Path
    timeout: float


@dataclass
class Job:
    """A mode on an engine (see `bench_serve_sizes.ENGINES`), and which scenarios it plays."""

    mode: str
    engine: str
    scenarios: list[str]
    round: int
    warm_up: bool = False
    results: dict[str, Any] = field(default_factory=dict)
    import_s: float | None = None
    start_s: float | None = None
    error: str = ""

    @property
    def name(self) -> str:
        """For people, and for file names."""
        return f"{self.engine}-{self.mode}-{self.round}{'-warm-up' if self.warm_up else ''}"

    def record(self, setup: Setup) -> dict[str, Any]:
        """For JSON."""
        return {
            "mode": self.mode,
            "engine": self.engine,
            "round": self.round,
            "warm_up": self.warm_up,
            "tier_gib": modes.tier_gib(self.mode, self.engine, setup.sizes),
            "arguments": arguments(self, setup),
            "import_s": self.import_s,
            "start_s": self.start_s,
            "results": self.results,
            "error": self.error,
        }


def arguments(job: Job, setup: Setup) -> dict[str, Any]:
    """Arguments of `vllm.LLM`."""
    size = setup.sizes
    blocks = {
        "long": size.s1long_gpu_blocks,
        # Plain vLLM keeps every prefix here: its answers are those to be equal to.
        "tokens": size.tokens_all_gpu_blocks if job.mode == "off" else size.tokens_gpu_blocks,
    }
    longest = size.tokens_max_model_len if job.engine == "tokens" else size.max_model_len
    made: dict[str, Any] = {
        "max_num_seqs": size.max_num_seqs,
        "max_model_len": longest,
        "num_gpu_blocks_override": blocks.get(job.engine, size.gpu_blocks),
        "block_size": size.block_size,
    }
    if not any(_model(job, setup).glob("*.safetensors")):
        made["load_format"] = "dummy"
    if setup.small:
        made.update(enforce_eager=True, dtype="float32")
    elif job.engine != "graphs":  # there vLLM's own default is what is measured
        made["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    gib = modes.tier_gib(job.mode, job.engine, size)
    return {**made, **modes.engine_arguments(job.mode, gib), **setup.engine}


def _model(job: Job, setup: Setup) -> Path:
    return setup.out / "model" if job.engine == "tokens" else setup.model


def run(job: Job, setup: Setup, changed: Any) -> None:
    """Run a job to its end, or to its time limit.

    Args:
        changed: called without arguments whenever the job has more results.
    """
    job.error = modes.unavailable(job.mode)
    if job.error:
        say(f"[{job.name}] skipped: {job.error}")
        changed()
        return
    setup.out.mkdir(parents=True, exist_ok=True)
    events, log = setup.out / f"{job.name}.events", setup.out / f"{job.name}.log"
    events.write_text("")
    spec = setup.out / f"{job.name}.spec"
    spec.write_text(json.dumps(_spec(job, setup, events)))
    gib = modes.tier_gib(job.mode, job.engine, setup.sizes)
    say(f"[{job.name}] starting, {gib:g} GiB of CPU memory")
    with log.open("w") as output:
        process = subprocess.Popen(
            modes.command(job.mode, str(spec)),
            env=modes.environment(job.mode, gib, setup.small),
            cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        _follow(job, process, events, setup.timeout, changed)
    finally:
        _end(process)
    if job.error:
        say(f"[{job.name}] failed: {job.error}; the end of {log}:")
        say("\n".join(log.read_text(errors="replace").splitlines()[-25:]))
    changed()


def _spec(job: Job, setup: Setup, events: Path) -> dict[str, Any]:
    return {
        "model": str(_model(job, setup).resolve()),
        "engine": arguments(job, setup),
        "sizes": setup.sizes.as_dict(),
        "scenarios": job.scenarios,
        "floor": modes.parse(job.mode)[0] in ("off", "ours"),
        "out": str(events.resolve()),
    }


def _follow(
    job: Job, process: subprocess.Popen[bytes], events: Path, timeout: float, changed: Any
) -> None:
    began, ended, line = time.monotonic(), False, ""
    with events.open() as stream:
        while not ended:
            running = process.poll() is None  # asked before the file is read to its end
            while part := stream.readline():
                line += part
                if line.endswith("\n"):
                    ended |= _take(job, json.loads(line), changed)
                    line = ""
            if not running and not ended:
                job.error = job.error or f"ended with status {process.returncode}"
                return
            if time.monotonic() - began > timeout:
                job.error = f"not done after {timeout:.0f} s"
                return
            time.sleep(POLL_S)


def _take(job: Job, event: dict[str, Any], changed: Any) -> bool:
    """Take in one event; true if it is the last."""
    kind = event["event"]
    if kind == "say":
        say(f"[{job.name}] {event['text']}")
    elif kind == "ready":
        job.import_s, job.start_s = event["import_s"], event["start_s"]
        say(f"[{job.name}] engine up after {job.start_s:.1f} s (import {job.import_s:.1f} s)")
    elif kind == "result":
        job.results[event["scenario"]] = event["result"]
        changed()
    elif kind == "failed":
        job.error = f"{event['scenario']}: {event['error']}"
    return kind in ("end", "failed")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave time to end by itself, then end the whole group, and wait for it.

    The next job needs the memory, and tens of GiB take the system a while to take back.
    """
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    until = time.monotonic() + 60
    while _alive(process.pid) and time.monotonic() < until:
        time.sleep(POLL_S)


def _alive(group: int) -> bool:
    """Whether a process of the group is left, other than one that is only not yet collected."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, found = file.read_text().rpartition(")")[2].split()[:3]
            if int(found) == group and state != "Z":
                return True
    return False


def jobs(chosen: list[str], names: list[str], rounds: int, warm_up: bool) -> list[Job]:
    """All jobs in order: the modes take turns on each engine, so that they are compared in time.

    Args:
        chosen: scenarios.
        names: modes.
        rounds: how often the modes take turns, each time on a new engine.
        warm_up: first start an engine that does not count: the first one on a machine reads
            files and compiles kernels for all that follow.
    """
    made: list[Job] = []
    for turn in range(1, rounds + 1):
        for engine, plays in ENGINES.items():
            picked = [name for name in plays if name in chosen]
            if picked or (engine == "main" and "start" in chosen):
                made += [Job(mode, engine, picked, turn) for mode in names]
    if warm_up and made:
        made.insert(0, Job("off", made[0].engine, [], 0, warm_up=True))
    return made


def write_tokens_model(folder: Path, small: bool) -> None:
    """The model of the check of answers: a small one whose answers depend on the whole prompt."""
    shutil.rmtree(folder, ignore_errors=True)
    code = f"import sys; sys.path[:0] = [{str(ROOT / 'tests' / 'engine')!r}]\n" + (
        "import model; from pathlib import Path; model.write_model(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)
    if small:
        return
    # The same weights as two heads of the size that attention kernels for a GPU have.
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config.update(
        num_attention_heads=2, num_key_value_heads=1, head_dim=128, torch_dtype="bfloat16"
    )
    file.write_text(json.dumps(config))
