"""The jobs: each a mode on an engine. How one is run is in `process`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts import ROOT, Refused
from scripts.bench.jobs import AnyJob, Launch
from scripts.bench.serve import modes, pressure
from scripts.bench.serve.sizes import ENGINES, STARTS, Sizes

ARRIVALS = ("s4", "s4graphs")  # what engines can play side by side
SMALL_MODEL = ("tokens", "pressure_tokens")  # engines with the model of the check of answers
PRESSED = ("pressure", "pressure_tokens")  # engines whose scheduler is read


@dataclass
class Setup:
    """What all jobs of a run have in common.

    Attributes:
        model: folder of the model; random weights are used if it holds none.
        sizes: the load.
        small: a CPU and a tiny model.
        engine: more arguments of `vllm.LLM`.
        out: folder for logs.
        timeout: seconds after which a job is ended; side by side, each wait for one of them.
    """

    model: Path
    sizes: Sizes
    small: bool
    engine: dict[str, Any]
    out: Path
    timeout: float


@dataclass
class Job(AnyJob):
    """A mode on an engine (see `sizes.ENGINES`), and which scenarios it plays.

    Attributes:
        together: the name of the set of jobs that run side by side, empty for one alone.
    """

    mode: str
    engine: str
    scenarios: list[str]
    round: int
    together: str = ""

    @property
    def name(self) -> str:
        """For people, and for file names."""
        return f"{self.engine}-{self.mode}-{self.round}"

    def unavailable(self) -> str:
        """Why its mode cannot run here; empty if it can."""
        return modes.unavailable(self.mode)

    def launch(self, setup: Setup, spec: Path, events: Path) -> Launch:
        """Write what the process is told, and say how it is started."""
        spec.write_text(json.dumps(spec_of(self, setup, events)))
        gib = modes.tier_gib(self.mode, self.engine, setup.sizes)
        return Launch(
            modes.command(self.mode, str(spec)),
            {**modes.environment(self.mode, gib, setup.small), **self._variables(setup.small)},
            bool(self.together),
            f"{gib:g} GiB of CPU memory",
        )

    def _variables(self, small: bool) -> dict[str, str]:
        """Of vLLM, for what the engine plays."""
        if self.engine not in PRESSED:
            return {}
        alone = self.engine in SMALL_MODEL and not small  # a CPU has no such kernels
        return {**pressure.IN_PROCESS, **(pressure.AS_IF_ALONE if alone else {})}

    def record(self, setup: Setup) -> dict[str, Any]:
        """For JSON."""
        return {
            "mode": self.mode,
            "engine": self.engine,
            "round": self.round,
            "side_by_side": bool(self.together),
            "set": self.together,
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
        "pressure": size.pressure_gpu_blocks,
        "pressure_tokens": size.pressure_tokens_gpu_blocks,
    }
    longest = size.tokens_max_model_len if job.engine in SMALL_MODEL else size.max_model_len
    made: dict[str, Any] = {
        "max_num_seqs": size.max_num_seqs,
        "max_model_len": longest,
        "num_gpu_blocks_override": blocks.get(job.engine, size.gpu_blocks),
        "block_size": size.block_size,
    }
    if job.engine in PRESSED:
        made["disable_log_stats"] = False  # preemptions are read from vLLM's counters
    if not any(_model(job, setup).glob("*.safetensors")):
        made["load_format"] = "dummy"
    if setup.small:
        made.update(enforce_eager=True, dtype="float32")
    elif job.engine != "graphs":  # there vLLM's own default is what is measured
        made["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    gib = modes.tier_gib(job.mode, job.engine, size)
    return {**made, **modes.engine_arguments(job.mode, gib), **setup.engine}


def _model(job: Job, setup: Setup) -> Path:
    return setup.out / "model" if job.engine in SMALL_MODEL else setup.model


def spec_of(job: Job, setup: Setup, events: Path) -> dict[str, Any]:
    """What `child` is told."""
    return {
        "model": str(_model(job, setup).resolve()),
        "engine": arguments(job, setup),
        "sizes": asdict(setup.sizes),
        "scenarios": job.scenarios,
        "floor": modes.parse(job.mode)[0] in ("off", "ours"),
        "plain": job.mode == "off",
        "side_by_side": bool(job.together),
        "host_copies": setup.small and modes.parse(job.mode)[0] in modes.CONNECTORS,
        "out": str(events.resolve()),
    }


def jobs(
    chosen: list[str], names: list[str], rounds: int, side_by_side: bool = False
) -> list[list[Job]]:
    """All jobs in order: the modes take turns on each engine, so that they are compared in time.

    Args:
        chosen: scenarios.
        names: modes.
        rounds: how often the modes take turns, each time on a new engine.
        side_by_side: engines that play S4 alone are alive together.

    Returns:
        Sets of jobs; those of a set run side by side.

    Raises:
        Refused: what was asked for cannot run side by side.
    """
    if side_by_side and len(set(names)) < len(names):
        raise Refused("--side-by-side: expected each mode once; variables may tell them apart")
    made: list[list[Job]] = []
    for turn in range(1, rounds + 1):
        for engine, plays in ENGINES.items():
            picked = [name for name in plays if name in chosen]
            if side_by_side and names and any(name in ARRIVALS for name in picked):
                if len(picked) > 1:
                    found = ", ".join(picked)
                    raise Refused(f"--side-by-side: expected {engine} to play S4, found {found}")
                # The time tells apart sets of different runs that are put together with --merge.
                together = f"{engine}-{turn} {time.strftime('%Y-%m-%dT%H:%M:%S%z')}"
                made.append([Job(mode, engine, picked, turn, together=together) for mode in names])
            elif picked or STARTS.get(engine) in chosen:
                made += [[Job(mode, engine, picked, turn)] for mode in names]
    return made


def write_tokens_model(folder: Path, small: bool) -> None:
    """The model of the check of answers: a small one whose answers depend on the whole prompt."""
    shutil.rmtree(folder, ignore_errors=True)
    program = ROOT / "tests" / "engine" / "model.py"
    subprocess.run([sys.executable, str(program), str(folder)], check=True)
    if small:
        return
    # The same weights as two heads of the size that attention kernels for a GPU have.
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config.update(
        num_attention_heads=2, num_key_value_heads=1, head_dim=128, torch_dtype="bfloat16"
    )
    file.write_text(json.dumps(config))
