"""Replays the conversation trace that Mooncake's authors have published, with two sizes of tier.

FILE is FAST25-release/traces/conversation_trace.jsonl of https://github.com/kvcache-ai/Mooncake,
which is not in this tree: an hour of 12,031 requests, without ids of answers. `page` makes the
table of docs/policies.md from the results. Any other trace is replayed by `replay`.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

from scripts import ROOT, Refused
from scripts.bench import arguments
from scripts.bench.common import table, write_json
from scripts.simulate import parallel, report, sides, trace
from scripts.simulate.belady import most_hits
from scripts.simulate.model import Machine, Model

RESULTS = ROOT / "docs" / "measured" / "policies-public.json"
SHA256 = "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df"
MACHINE = Machine(gpu_blocks=2048, prefill=100_000.0, token_s=0.01, step_tokens=16_384)
TIERS = (3072, 12_288)  # blocks
BASE = "lru"
# The others do something else with answers, of which nothing can be found again here.
SIDES = [name for name in (*sides.SIDES, sides.OPTIMUM) if name != "adaptive-prompts"]


def checked(path: Path) -> bytes:
    """The file.

    Raises:
        Refused: it is another one.
    """
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != SHA256:
        raise Refused(
            f"{path}: expected the conversation trace (SHA-256 {SHA256}), found {digest}; "
            "python scripts/simulate replay takes any trace."
        )
    return content


def replayed(job: tuple[str, str, int]) -> dict[str, Any]:
    """Figures of one side with a tier of so many blocks, as `measure` has them."""
    path, side, blocks = job
    machine = MACHINE._replace(cpu_blocks=blocks)
    requests = trace.read(Path(path), machine.block_tokens)
    row = {"side": side, "cpu_blocks": blocks, "requests": len(requests)}
    if side == sides.OPTIMUM:
        hits, reusable = most_hits(requests, machine.gpu_blocks + blocks, machine.block_tokens)
        return {**row, "reusable": reusable, "hits": hits, "again": reusable - hits}
    return {**row, **report.figures(Model(machine, sides.SIDES[side].rules(machine), requests))}


def page(document: dict[str, Any]) -> str:
    """Tokens recomputed by each side, and beside LRU, for each size of the tier."""
    again = {(row["side"], row["cpu_blocks"]): row["again"] for row in document["rows"]}
    tokens = document["model"]["block_tokens"] / 1000
    head = [f"a tier of {blocks:,} blocks" for blocks in TIERS]
    lines = [["recomputed, k tokens, and beside this tier, eager, LRU", *head]]
    for side in SIDES:
        words = sides.OPTIMUM if side == sides.OPTIMUM else sides.SIDES[side].words
        cells = [(again[side, blocks], again[BASE, blocks]) for blocks in TIERS]
        shown = [f"{n * tokens:,.0f} ({100 * (n / base - 1):+.1f} %)" for n, base in cells]
        lines.append([words, *shown])
    made = document["machine"]
    ran = f"Commit {made['commit']}, {made['date'][:10]}: `python scripts/simulate public FILE`."
    return f"{table(lines)}\n\n{ran}"


def main() -> int:
    """Replay and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=arguments.read, help="the trace")
    parser.add_argument("--out", type=arguments.target, default=RESULTS)
    options = parser.parse_args()
    checked(options.file)
    jobs = [(str(options.file), side, blocks) for blocks in TIERS for side in SIDES]
    write_json(options.out, parallel.measured(replayed, jobs, None, MACHINE))
    return 0
