"""What an ideal tier would take, from given times of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scripts.bench.chats import bound


def job(
    mode: str, firsts: list[float], cached: int, loaded: int = 30, **more: Any
) -> dict[str, Any]:
    """Requests that are sent at once; their first tokens come after so many milliseconds.

    Each finds ``cached`` tokens, and all together load so many blocks.
    """
    requests = [
        {"name": f"chat-{i}", "sent": 100.0, "at": [100.0 + f]} for i, f in enumerate(firsts)
    ]
    tier = {"kvoffload_loaded_blocks_total": float(loaded)}
    later = {"requests": requests, "cached": [cached] * len(firsts), "tier": tier}
    return {"mode": mode, "run": "1", "results": {"later": later}, **more}


def row(text: str, name: str) -> list[str]:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    (found,) = [cells for first, *cells in filter(None, rows) if first == name]
    return found


def test_loads_that_begin_together_cross_one_after_the_other() -> None:
    """Each has 10 blocks of 16 tokens and takes the bus 5 ms."""
    ours = job("ours", [30.0, 35.0, 40.0], 160, ms_per_block=0.5)
    text = bound.table_of({"jobs": [job("floor", [20.0, 20.0, 21.0], 0), ours]})
    assert row(text, "floor") == ["20", "21", "21", "21"]
    assert row(text, "bus") == ["5"] * 4
    assert row(text, "queueing for the bus") == ["5", "10", "10", "10"]
    assert row(text, "floor and bus") == ["25", "26", "26", "26"]
    assert row(text, "floor, bus and queueing") == ["30", "36", "36", "36"]
    assert row(text, "measured") == ["35", "40", "40", "40"]
    assert text.endswith("A block takes the bus 0.5 ms.")


def test_what_the_gpu_has_need_not_cross() -> None:
    """A third of what is found."""
    ours = job("ours", [30.0, 35.0, 40.0], 160, loaded=20, ms_per_block=0.9)
    text = bound.table_of({"jobs": [job("floor", [20.0, 20.0, 21.0], 0), ours]})
    assert row(text, "bus") == ["6"] * 4


def test_nothing_is_said_without_a_floor_of_the_run_or_without_times() -> None:
    floor, ours = job("floor", [20.0], 0), job("ours", [30.0], 160, ms_per_block=0.5)
    assert bound.table_of({"jobs": [ours]}) == ""
    assert bound.table_of({"jobs": [{**floor, "run": "2"}, ours]}) == ""
    assert bound.table_of({"jobs": [floor, {**ours, "ms_per_block": None}]}) == ""
    floor["results"]["later"]["requests"] = []
    assert bound.table_of({"jobs": [floor, ours]}) == ""


def test_what_a_block_takes_is_what_the_tier_has_said(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert bound.ms_per_block(log) is bound.ms_per_block(tmp_path) is None
    log.write_text("vLLM says much\n")
    assert bound.ms_per_block(log) is None
    log.write_text(
        "INFO KV offload: CPU tier of 36864 blocks (72.00 GiB over all ranks), 160 of them usable "
        "so far, loads auto, 0.043 ms a block; copies staged (48.7/48.4 GB/s)\n"
    )
    assert bound.ms_per_block(log) == 0.043
