"""vLLM's own tests of its scheduler and engine, for which the patch must be invisible.

    python scripts/matrix own            # of the installed release
    python scripts/matrix own 0.26.0     # of another one, in an environment of its own

Fetches the tests from the release's source distribution and runs `tests/v1/core` and
`tests/v1/engine` three times: on plain vLLM, with the package armed, and with a tier attached to
every scheduler that a test makes and that can have one. Every test must come to the same outcome.
Left out are the files that start engines, which need a model's weights; other tests that need what
is not here fail each time. Differences that are known, with their
reasons, are listed in KNOWN; any other is an error. Writes `own-X.Y.Z.json` into --out; status 1 if
it is not green.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from scripts import ROOT
from scripts.bench import arguments
from scripts.matrix import environment, results
from scripts.release import installed
from scripts.release.sdist import fetch_tests

FOLDERS = ("tests/v1/core", "tests/v1/engine")
# Their tests start engines on models from the network.
LEFT_OUT = [
    f"tests/v1/{name}.py"
    for name in (
        "core/prefix_cache/test_hybrid_prefix_cache_hit_rate",
        "core/test_reset_prefix_cache_e2e", "core/test_scheduler_e2e",
        "engine/test_abort_final_step", "engine/test_async_llm", "engine/test_engine_core",
        "engine/test_engine_core_client", "engine/test_llm_engine",
        "engine/test_preprocess_error_handling",
    )
]  # fmt: skip
# What the tests import and neither vLLM nor this package's tests need.
PACKAGES = ("tblib", "pytest-asyncio")
TIMEOUT_S = 3000
# Tests whose outcome differs with a tier, and why. `BOUNDED` is run to show that it is the reason.
KNOWN = {
    "tests/v1/core/test_scheduler.py::test_kv_connector_handles_preemption": (
        "its mock connector promises two tokens whatever was found before; where the tier has found"
        " more than the GPU had, these lie behind the request's end, and vLLM's assertion on the"
        " number of computed tokens fails; with a connector that promises what a request has, and"
        " leaves the last token to be computed in a load within the step, the test passes"
    ),
}
WAYS = PLAIN, ARMED, TIER, BOUNDED = "plain", "armed", "tier", "bounded"
# The one model whose config.json the tests read, in a folder as Hugging Face's hub caches it. Its
# config is enough: no weights are loaded.
MODEL = "facebook/opt-125m"
CONFIG = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 768, "ffn_dim": 3072,
    "num_attention_heads": 12, "num_hidden_layers": 12, "word_embed_proj_dim": 768,
    "vocab_size": 50272, "max_position_embeddings": 2048, "bos_token_id": 2, "eos_token_id": 2,
    "pad_token_id": 1, "torch_dtype": "float16",
}  # fmt: skip


def run_release(release: str, work: Path) -> dict[str, Any]:
    """Run the tests in all ways; the result as it is written.

    Raises:
        NotFetched, environment.NotMade: the tests or vLLM could not be had.
    """
    began = time.monotonic()
    tests = fetch_tests(release)
    python, env = Path(sys.executable), dict(os.environ)
    if release != installed.version():
        python, env = environment.make(release, work / "env")
    packages = [str(python), "-m", "pip", "install", "-q", "--no-deps", "--target"]
    subprocess.run([*packages, str(work / "packages"), *PACKAGES], env=env, check=True)
    _write_hub(work / "hub")
    shutil.copytree(tests, work / "vllm")
    with ThreadPoolExecutor() as pool:
        done = {way: pool.submit(_run, way, python, env, work) for way in WAYS}
    reports = {way: future.result() for way, future in done.items()}
    return {
        "kind": "own-tests",
        "release": release,
        "python": ".".join(map(str, sys.version_info[:3])),
        **compared(reports),
        "seconds": round(time.monotonic() - began),
        **results.provenance(),
    }


def _run(way: str, python: Path, env: dict[str, str], work: Path) -> dict[str, Any]:
    """What the plugin wrote; ``tests`` is empty and ``why`` says the reason if it wrote nothing."""
    file, log = work / f"{way}.json", work / f"{way}.log"
    chosen = KNOWN if way == BOUNDED else FOLDERS
    pytest = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:warnings"]
    pytest += ["-p", "scripts.matrix.own_plugin", "--continue-on-collection-errors", *chosen]
    pytest += [f"--ignore={file}" for file in LEFT_OUT]
    armed = [] if way == PLAIN else [str(python), "-m", "kvoffload_patch"]
    with log.open("w") as out, subprocess.Popen(
        [*armed, *pytest],
        env=_environment(env, work) | _variables(way, file),
        cwd=work / "vllm",
        stdout=out,
        stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
    if not file.exists():
        end = log.read_text(encoding="utf-8", errors="replace")[-3000:]
        return {"tests": {}, "why": end}
    return dict(json.loads(file.read_text(encoding="utf-8")))


def _environment(env: dict[str, str], work: Path) -> dict[str, str]:
    kept = {k: v for k, v in env.items() if not k.startswith(("KVOFFLOAD_", "VLLM_"))}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join([str(work / "packages"), str(ROOT)]),
        "HF_HOME": str(work / "hub"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
    }


def _variables(way: str, report: Path) -> dict[str, str]:
    said = {"OWN_REPORT": str(report)}
    if way != PLAIN:
        said["KVOFFLOAD_CPU_GIB"] = "0.25"
    if way in (TIER, BOUNDED):
        said["OWN_TIER"] = way
    return said


def _write_hub(folder: Path) -> None:
    model, commit = folder / "hub" / f"models--{MODEL.replace('/', '--')}", "0" * 40
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(commit)
    snapshot = model / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(CONFIG))


def compared(reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Counts, differences and the verdict, of what the plugin wrote in each way."""
    plain, tier = reports[PLAIN]["tests"], reports[TIER]
    bounded = reports[BOUNDED]["tests"]
    armed = _differences(plain, reports[ARMED]["tests"])
    tiered = _differences(plain, tier["tests"])
    known = {test: reason for test, reason in KNOWN.items() if any(map(_is(test), tiered))}
    unknown = [test for test in tiered if not any(_is(one)(test) for one in KNOWN)]
    found = [f"{way}: {report['why']}" for way, report in reports.items() if "why" in report]
    found += [f"{test}: {was}, armed {now}" for test, (was, now) in armed.items()]
    found += [f"{test}: {tiered[test][0]}, with a tier {tiered[test][1]}" for test in unknown]
    found += [f"{test}: {now}, with a bounded connector" for test, now in bounded.items()
              if now != plain.get(test)]  # fmt: skip
    found += [f"{test}: its tier was detached" for test in tier.get("detached", ())]
    # vLLM's tests as they are hardly evict: what is loaded is loaded after the known preemptions.
    did = {name: sum(reports[way].get(name, 0) for way in (TIER, BOUNDED)) for name in _SHOWN}
    found += [words for name, words in _SHOWN.items() if not did[name]]
    if "passed" not in plain.values() or "passed" not in bounded.values():
        found.append("nothing passed")
    if reports[PLAIN].get("hooks") or not reports[ARMED].get("hooks"):
        found.append("expected hooks in the armed run and none in the plain one")
    return {
        "outcomes": {way: _counts(report) for way, report in reports.items()},
        "differ": {"armed": sorted(armed), "tier": sorted(tiered)},
        "known": known,
        **did,
        "without": tier.get("without", {}),
        "faults": found,
        "verdict": "red" if found else "green",
    }


# Without these a run with a tier has shown nothing.
_SHOWN = {
    "tiers": "no tier was attached",
    "stored": "no tier stored a block",
    "loaded": "no tier loaded a block",
}


def _is(test: str) -> Any:
    return lambda name: name == test or name.startswith(f"{test}[")


def _differences(one: dict[str, str], other: dict[str, str]) -> dict[str, tuple[str, str]]:
    pairs = {
        name: (one.get(name, "absent"), other.get(name, "absent")) for name in {**one, **other}
    }
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _counts(report: dict[str, Any]) -> dict[str, int]:
    return dict(sorted(Counter(report["tests"].values()).items()))


def main() -> int:
    """Run one release, and write what came out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("release", nargs="?", type=arguments.release, default=installed.version())
    parser.add_argument("--out", type=arguments.filled, default=results.FOLDER)
    parser.add_argument("--work", type=arguments.folder, help="where the tests run (default: /tmp)")
    parser.add_argument("--keep", action="store_true", help="keep that folder, with the logs")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix=f"own-{args.release}-", dir=args.work))
    try:
        result = run_release(args.release, work)
    finally:
        if not args.keep:
            shutil.rmtree(work)
    print(results.write(args.out, result), end="")
    return int(result["verdict"] != "green")
