"""The table and the picture of a benchmark."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kvoffload_patch.cli.bench import report


def figures(found: int, first: float) -> dict[str, Any]:
    return {
        "requests": 8, "seconds": 1.25, "prompt_tokens": 1000, "found_tokens": found,
        "first_token_ms": {"p50": first, "p99": 2 * first},
        "output_token_ms": {"p50": 3.0, "p99": 4.0},
    }  # fmt: skip


DOCUMENT: dict[str, Any] = {
    "vllm": "0.32.0", "model": "M", "cpu_gib": 2.0, "chats": 20, "gpu_tokens": 1024,
    "load": {"history": 100, "turns": 3, "at_once": 4},
    "modes": {
        "off": {"first": figures(0, 30.0), "later": figures(10, 40.0)},
        "on": {"first": figures(0, 31.0), "later": figures(900, 10.5)},
        "offloading": {"error": "no"},
    },
}  # fmt: skip


def test_a_row_for_each_mode() -> None:
    head, units, off, on, failed = report.table(DOCUMENT).splitlines()
    assert head.startswith("later turns") and head.endswith("first turns")
    assert units.split()[:3] == ["%", "ms", "ms"]
    assert off.split() == ["no", "tier", "1", "40.0", "80.0", "3.00", "4.00", "1.2", "30.0"]
    assert on.split() == ["kvoffload", "90", "10.5", "21.0", "3.00", "4.00", "1.2", "31.0"]
    assert failed.split() == ["OffloadingConnector", "failed"]
    assert len(head) == len(off) == len(on)


def test_the_load_in_words() -> None:
    assert report.about(DOCUMENT) == (
        "M, vLLM 0.32.0: 20 chats of 100 tokens, 3 turns, 4 at a time; 2,000 tokens to keep, "
        "1,024 in the GPU cache, 2 GiB of CPU memory"
    )
    assert "GPU cache whose size is not known" in report.about({**DOCUMENT, "gpu_tokens": None})
    assert "has nothing to bring back" in report.about({**DOCUMENT, "gpu_tokens": 2000})


def test_a_picture_is_drawn_where_matplotlib_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    assert report.draw(DOCUMENT, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not report.draw(DOCUMENT, tmp_path / "b.png")
    assert not (tmp_path / "b.png").exists()
