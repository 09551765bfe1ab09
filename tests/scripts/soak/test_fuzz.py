"""Any bytes are a value or the one error that a parser documents, soon and without much memory.

With hypothesis, on what `scripts/soak fuzz` gives to atheris for longer.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.soak import fuzz

CASES = [(target, seed) for target, seeds in fuzz.SEEDS.items() for seed in seeds]
# What takes long, or much, if a parser walks back or copies.
LONG = {
    "config": [
        b"KVOFFLOAD_CPU_GIB=" + b"1" * 100_000 + b"x",
        b"KVOFFLOAD_CPU_GIB=1e" + b"9" * 100_000,
        b"KVOFFLOAD_" + b"AB" * 50_000 + b"=1",
        b"\0".join(b"KVOFFLOAD_%d=1" % number for number in range(200)),
    ],
    "patch": [
        fuzz.SEEDS["patch"][0].replace(b"-1,0", b"-" + b"1" * 100_000 + b",0"),
        fuzz.SEEDS["patch"][0].replace(b",2 @@", b",999999999 @@"),
        b"# sha256 " + b"vllm/" * 20_000,
        b"\n" * 100_000,
    ],
    "control": [
        b"[" * 100_000,
        b'{"a":' * 20_000,
        b'{"command": "resize", "gib": "' + b"1" * 100_000 + b'"}',
        b'{"command": "' + b"\\ud800" * 10_000 + b'"}',
        b'{"command": ' + b"1" * 100_000 + b"}",
    ],
}


@pytest.mark.parametrize("target", fuzz.TARGETS)
@given(data=st.binary(max_size=300))
def test_any_bytes_are_taken_or_refused(target: str, data: bytes) -> None:
    fuzz.TARGETS[target](data)


@pytest.mark.parametrize(("target", "seed"), CASES)
@given(cuts=st.tuples(st.integers(0, 400), st.integers(0, 400)), put=st.binary(max_size=8))
def test_what_is_nearly_right_is_taken_or_refused(
    target: str, seed: bytes, cuts: tuple[int, int], put: bytes
) -> None:
    begin, end = sorted(cuts)
    fuzz.TARGETS[target](seed[:begin] + put + seed[end:])
    fuzz.TARGETS[target](seed[:end] + put + seed[begin:])


@pytest.mark.parametrize(
    ("target", "data"), [(name, data) for name, each in LONG.items() for data in each]
)
def test_what_is_long_takes_little(target: str, data: bytes) -> None:
    tracemalloc.start()
    try:
        began = time.monotonic()
        fuzz.TARGETS[target](data)
        assert time.monotonic() - began < fuzz.TIMEOUT_S
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_seeds_are_what_a_parser_takes() -> None:
    (found,) = fuzz.patch_files.parse(fuzz.SEEDS["patch"][0])
    assert [len(hunk.lines) for hunk in found.hunks] == [2, 1]
    *lines, pairs = fuzz.SEEDS["control"]
    for message in (*map(fuzz.wire.parse, lines), fuzz._pairs(pairs)):
        assert fuzz.read_command(message).name


def test_each_target_begins_with_its_seeds(tmp_path: Path) -> None:
    for target in fuzz.TARGETS:
        words = fuzz.child(target, tmp_path, 30)
        assert words[:4] == [sys.executable, "-m", "scripts.soak.fuzz", target]
        assert len(list(Path(words[4]).iterdir())) == len(fuzz.SEEDS[target])
        assert "-max_total_time=30" in words


def test_it_says_that_atheris_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: object) -> None:
    monkeypatch.setattr(fuzz.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["fuzz"])
    with pytest.raises(SystemExit) as caught:
        fuzz.main()
    assert caught.value.code == 2
