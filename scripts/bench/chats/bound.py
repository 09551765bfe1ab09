"""What an ideal tier would take in `bench chats`: the floor, the bus, and the queue for the bus."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from scripts.bench.chats.server import FLOOR
from scripts.bench.common import digits, quantile, table
from scripts.bench.probes.trace_figures import first_come_first_served

PHASE = "later"
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "largest": 1.0}
_SAID = re.compile(r"KV offload: CPU tier of .*, ([0-9.]+) ms a block;")


def ms_per_block(log: Path) -> float | None:
    """What a block takes the bus, as the tier has said at its start; None if it has not."""
    if not log.is_file():
        return None
    said = _SAID.search(log.read_text(encoding="utf-8", errors="replace"))
    return float(said[1]) if said else None


def table_of(document: dict[str, Any]) -> str:
    """First tokens of turns that come back: the floor's, what the bus adds, what was measured.

    Of the last run that has both, with the times of each request (`--times`); else nothing. Each
    load begins as its request is sent, and the bus takes them in that order, one after the other.
    """
    for job in reversed(document["jobs"]):
        floor = _floor_of(document, job)
        if floor is not None and job["mode"] == "ours" and job.get("ms_per_block"):
            return _table(_parts(job, floor), job["ms_per_block"])
    return ""


def _floor_of(document: dict[str, Any], job: dict[str, Any]) -> dict[str, Any] | None:
    same = [one for one in document["jobs"] if (one["mode"], one["run"]) == (FLOOR, job["run"])]
    played = [one for one in (*same, job) if one["results"].get(PHASE, {}).get("requests")]
    return same[0] if len(played) == 2 else None


def _parts(job: dict[str, Any], floor: dict[str, Any]) -> dict[str, list[float]]:
    """Milliseconds of each request, in the order in which they were sent."""
    result = job["results"][PHASE]
    first = {r["name"]: r["at"][0] - r["sent"] for r in floor["results"][PHASE]["requests"]}
    tier = result["tier"]
    # Of what is found the GPU may have a part; which of each request's is not known.
    blocks_a_token = tier["kvoffload_loaded_blocks_total"] / sum(result["cached"])
    pairs = sorted(zip(result["requests"], result["cached"]), key=lambda pair: pair[0]["sent"])
    bus = [cached * blocks_a_token * job["ms_per_block"] for _, cached in pairs]
    sent = [request["sent"] for request, _ in pairs]
    return {
        "floor": [first[request["name"]] for request, _ in pairs],
        "bus": bus,
        "queueing for the bus": first_come_first_served(zip(sent, bus)),
        "measured": [request["at"][0] - at for (request, _), at in zip(pairs, sent)],
    }


def _table(parts: dict[str, list[float]], per_block: float) -> str:
    floor, bus, queue = parts["floor"], parts["bus"], parts["queueing for the bus"]
    measured = parts.pop("measured")
    shown = {
        **parts,
        "floor and bus": [sum(three) for three in zip(floor, bus)],
        "floor, bus and queueing": [sum(three) for three in zip(floor, bus, queue)],
        "measured": measured,
    }
    rows = [["later turns: first token, ms", *SHARES]]
    for name, values in shown.items():
        rows.append([name, *(digits(quantile(values, share)) for share in SHARES.values())])
    return f"{table(rows)}\n\nA block takes the bus {per_block} ms."
