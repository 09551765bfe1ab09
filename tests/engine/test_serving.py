"""/metrics of real servers, over HTTP."""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from engine import release
from engine.model import write_model
from engine.server import MAX_TOKENS, Server

from kvoffload_patch.cli import plain_servers, processes
from kvoffload_patch.control import client
from kvoffload_patch.control import folder as folders
from kvoffload_patch.control.errors import Refused
from kvoffload_patch.integration.engine.blocks.store_choice import ARGUMENT

BLOCK = min(32, release.block_size())  # some releases know no other than 16
PROMPT_TOKENS = 300
OWN_CACHE = release.prefix_cache_metric()
HITS_BY_SOURCE = "vllm:prompt_tokens_cached_by_source_total"
PATIENCE_S = 60  # on a loaded machine
FULL = PROMPT_TOKENS // BLOCK * BLOCK
# The GPU's cache holds the blocks of one prompt.
BLOCKS = MAX_TOKENS // BLOCK + 2
SMALL = ["--num-gpu-blocks-override", str(BLOCKS), "--max-num-seqs", "4"]
SMALL += ["--block-size", str(BLOCK)]
SERVERS = {
    # As a user starts it, with a worker in a process of its own besides.
    "one": ["--distributed-executor-backend", "mp"],
    "several": ["--api-server-count", "2", "--data-parallel-size", "2"],
}
DASHBOARD = Path(__file__).resolve().parents[2] / "docs/grafana.json"
# What makes the CPU's engine core and its client talk as those of a server do.
APART = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "TEST_FORK_WORKERS": "1"}


def prompts(seed: int, count: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 1000) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def totals(found: dict[str, float]) -> Counter[str]:
    """Samples by name, over all engines; of vLLM's and ours, own labels kept in order."""
    total: Counter[str] = Counter()
    for name, value in found.items():
        base, _, labels = name.partition("{")
        own = [
            label.partition("=")[2].strip('"')
            for label in labels.rstrip("}").split(",")
            if label.partition("=")[0] in ("source", "state", "mode", "direction")
        ]
        total[" ".join([base, *own])] += value
    return total


def check_the_dashboard(found: dict[str, float]) -> None:
    """Every metric that a panel asks for is on /metrics, but why a tier is off: it is on."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    asked = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"kvoffload_\w+", target["expr"])
    }
    assert asked - {name.partition("{")[0] for name in found} == {"kvoffload_tier_off_info"}


def check_nobody_listens(folder: Path) -> None:
    """What an engine leaves that vLLM kills as soon as it has asked it to end, the next removes."""
    if folder.exists():
        opened = folders.open_one(folder)
        try:
            folders.remove_stale(opened)
            assert folders.sockets(opened) == [], "somebody listens"
        finally:
            os.close(opened)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("served"))


@pytest.mark.matrix
@pytest.mark.parametrize("kind", SERVERS)
def test_figures_of_every_engine_are_on_metrics_and_agree(
    kind: str, real: Any, model: Path, tmp_path: Path
) -> None:
    if release.keeps_all_on_the_gpu():
        pytest.skip(f"{release.keeps_all_on_the_gpu()}, so nothing comes back from the tier")
    options, asked = SERVERS[kind], prompts(1, 8)
    num_engines = 2 if "--data-parallel-size" in options else 1
    runtime = {"XDG_RUNTIME_DIR": str(tmp_path), "KVOFFLOAD_CONTROL": "1"}
    runtime |= release.environment(num_engines)  # a rank each
    warm = None if kind == "one" else real.warm
    with Server(model, tmp_path / "log", [*SMALL, *options], runtime, warm) as server:
        at_start = wait_for(server, "kvoffload_tier_state on", num_engines)
        answers = [[server.ask(prompt) for prompt in asked] for _ in range(4)]
        found = wait_for(server, f"{OWN_CACHE}_queries_total", len(asked) * 4 * PROMPT_TOKENS)
        found = settled(server, found)
        check_the_dashboard(server.metrics())
        check_commands(server, runtime, num_engines, asked, warm)
    check_nobody_listens(tmp_path / "kvoffload")
    whole = (tmp_path / "log").read_text().count("divide KVOFFLOAD_CPU_GIB by their number")
    assert whole == (num_engines - 1 if release.tells_engines_apart() else 0)
    assert at_start["kvoffload_tier_state failed"] == at_start["kvoffload_hit_tokens_total"] == 0
    texts = [[answer["choices"][0]["text"] for answer in turn] for turn in answers]
    assert all(turn == texts[0] for turn in texts)
    hit, tokens = found["kvoffload_hit_tokens_total"], len(asked) * 4 * PROMPT_TOKENS
    # With two engines a prompt comes back to one that has not computed it, at times.
    assert 0 < hit <= 3 * len(asked) * FULL and (num_engines > 1 or hit == 3 * len(asked) * FULL)
    assert found["kvoffload_loaded_tokens_total"] == hit
    missed = found["kvoffload_queried_tokens_total"] - hit
    assert found["kvoffload_recomputed_tokens_total"] == missed > 0
    assert found["kvoffload_loaded_blocks_total"] == hit / BLOCK
    assert found["kvoffload_copies_total load"] == found["kvoffload_copy_seconds_count load"] > 0
    on_gpu = found[f"{OWN_CACHE}_hits_total"]
    assert found[f"{OWN_CACHE}_queries_total"] == tokens
    if release.counts_external_hits():
        assert found["vllm:external_prefix_cache_hits_total"] == hit
        assert on_gpu <= FULL, "the prefixes are not in the GPU's cache, as a rule"
    else:
        assert hit <= on_gpu <= hit + FULL
    by_source = {
        source: found[f"vllm:prompt_tokens_by_source_total {source}"]
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
    }
    if sum(by_source.values()):  # from 0.16 on
        assert by_source["external_kv_transfer"] == hit
        assert by_source["local_cache_hit"] == on_gpu
        assert sum(by_source.values()) == tokens
    if release.says_where_hits_came_from():
        rows = f"{HITS_BY_SOURCE} "
        cached = {name.removeprefix(rows): found[name] for name in found if name.startswith(rows)}
        assert +Counter(cached) == +Counter({"device": on_gpu, "host": hit})


def check_commands(
    server: Server, runtime: dict[str, str], num_engines: int, asked: list[list[int]], warm: Any
) -> None:
    """What engines do when they are asked, while they are idle, which takes no step, and serve."""
    folder = Path(runtime["XDG_RUNTIME_DIR"]) / "kvoffload"
    # By name: other engines of this user are none of this test's.
    found_engines = [one for one in client.find(runtime) if one.path.parent == folder]
    assert len(found_engines) == num_engines
    with_tier = {int(one.process) for one in found_engines}
    parts = set(processes.below(server.pid, processes.all_parents()))
    assert with_tier <= parts
    if warm is None:  # a server is known by its command line, and the fork has another's
        assert len(parts & {one["process"] for one in plain_servers.found(set())}) == 1
    assert not parts & {one["process"] for one in plain_servers.found(with_tier)}

    def told(command: str, **arguments: str) -> list[Any]:
        return [client.ask(one, command, **arguments) for one in found_engines]

    assert sorted(one["number"] for one in told("status")) == [*range(num_engines)]
    held = sum(one["used_blocks"] for one in told("status"))
    assert held >= len(asked) * FULL // BLOCK
    if release.takes_arguments_over_http():
        (private,) = prompts(9, 1)
        server.ask(private, arguments={ARGUMENT: 0})
        own = told("status")
        assert sum(one["used_blocks"] for one in own) == held, "it asked not to be stored"
        assert sum(one["dropped_blocks"]["opted_out"] for one in own) == FULL // BLOCK
    assert {one["state"] for one in told("pause")} == {"paused"}
    hit = totals(server.metrics())["kvoffload_hit_tokens_total"]
    texts = [server.ask(prompt)["choices"][0]["text"] for prompt in asked[:3]]
    found = wait_for(server, "kvoffload_tier_state paused", num_engines)
    assert found["kvoffload_hit_tokens_total"] == hit
    told("resume")
    size = told("resize", gib="0.05")[0]
    assert size["capacity_bytes"] <= 0.05 * (1 << 30) < size["largest_blocks"] * size["block_bytes"]
    assert [server.ask(prompt)["choices"][0]["text"] for prompt in asked[:3]] == texts
    with pytest.raises(Refused, match="restart it with a larger"):
        told("resize", gib="50")
    assert sum(one["forgotten_blocks"] for one in told("empty")) > 0
    assert sum(one["used_blocks"] for one in told("status")) == 0


def settled(server: Server, found: Counter[str]) -> Counter[str]:
    """/metrics, once all that was asked for has come back or was computed: told a step later."""
    until = time.monotonic() + PATIENCE_S
    ends = ("hit", "recomputed")
    while (
        sum(found[f"kvoffload_{end}_tokens_total"] for end in ends)
        < (found["kvoffload_queried_tokens_total"])
        or found["kvoffload_loaded_tokens_total"] < found["kvoffload_hit_tokens_total"]
    ):
        assert time.monotonic() < until, "what was asked for is neither hit nor computed"
        time.sleep(0.2)
        found = totals(server.metrics())
    return found


def wait_for(server: Server, name: str, value: float) -> Counter[str]:
    """/metrics, once it says so; what is sent at start comes after the server is up."""
    until = time.monotonic() + PATIENCE_S
    while (found := totals(server.metrics()))[name] != value:
        assert time.monotonic() < until, f"{name} is {found[name]}"
        time.sleep(0.2)
    return found


def test_an_engine_that_is_refused_says_why(real, plain) -> None:
    tier = {"KVOFFLOAD_STRICT": "0", "KVOFFLOAD_CPU_GIB": "0.00001"}
    run = real.on(["figures", "conversations"], tier=tier, **APART)
    found = run["figures"]
    state = [name for name in found if name.startswith("kvoffload_tier_state") and found[name]]
    assert len(state) == 1 and 'state="refused"' in state[0]
    (reason,) = [name for name in found if name.startswith("kvoffload_tier_off_info")]
    assert "to hold at least one block" in reason
    assert run["conversations"]["tokens"] == plain["conversations"]["tokens"]


@pytest.mark.features
def test_hits_are_on_metrics_beside_a_connector(real: Any, model: Path, tmp_path: Path) -> None:
    """What the tier has is not asked of the connector, whose counters stay its own."""
    config = {
        "kv_connector": "FlakyConnector", "kv_connector_module_path": "flaky_connector",
        "kv_role": "kv_both",
    }  # fmt: skip
    options, asked = [*SMALL, "--kv-transfer-config", json.dumps(config)], prompts(2, 8)
    with Server(model, tmp_path / "log", options, {}, real.warm) as server:
        wait_for(server, "kvoffload_tier_state on", 1)
        first, again = ([server.ask(prompt) for prompt in asked] for _ in range(2))
        found = wait_for(server, "kvoffload_hit_tokens_total", len(asked) * FULL)
    texts = [[answer["choices"][0]["text"] for answer in turn] for turn in (first, again)]
    assert texts[0] == texts[1]
    assert found["vllm:external_prefix_cache_queries_total"] > 0, "there is no connector"
    assert found["vllm:external_prefix_cache_hits_total"] == 0
