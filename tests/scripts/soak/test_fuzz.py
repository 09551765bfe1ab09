"""Any bytes are a value or the one error that a parser documents, soon and without much memory.

With hypothesis, on what `scripts/soak fuzz` gives to atheris for longer.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
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
@settings(deadline=None)  # a machine may be busy
@given(data=st.binary(max_size=300))
def test_any_bytes_are_taken_or_refused(target: str, data: bytes) -> None:
    fuzz.TARGETS[target](data)


@pytest.mark.parametrize(("target", "seed"), CASES)
@settings(deadline=None)
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
        began = time.thread_time()
        fuzz.TARGETS[target](data)
        assert time.thread_time() - began < fuzz.TIMEOUT_S
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_seeds_are_what_a_parser_takes() -> None:
    assert len(fuzz.patch_files.parse(fuzz.SEEDS["patch"][0]).lines) == 2
    *lines, pairs = fuzz.SEEDS["control"]
    for message in (*map(fuzz.wire.parse, lines), fuzz._pairs(pairs)):
        assert fuzz.read_command(message).name


def test_each_target_begins_with_its_seeds(tmp_path: Path) -> None:
    for target in fuzz.TARGETS:
        words = fuzz.child(target, tmp_path, 30)
        assert words[:4] == [sys.executable, "-m", "scripts.soak.fuzz", target]
        assert len(list(Path(words[4]).iterdir())) == len(fuzz.SEEDS[target])
        assert "-max_total_time=30" in words
        listed = Path(words[5].removeprefix("-dict=")).read_text().splitlines()
        assert len(listed) == len(fuzz.WORDS[target])


def test_words_are_written_as_libfuzzer_reads_them() -> None:
    assert fuzz.dictionary(['a "b"', "\0", "\\", "\n+"]) == (
        '"a \\x22b\\x22"\n"\\x00"\n"\\x5c"\n"\\x0a+"\n'
    )


def test_what_atheris_says_in_the_end_is_kept() -> None:
    said = [
        "#2\tINITED cov: 10 ft: 11 corp: 1/1b exec/s: 0 rss: 30Mb\n",
        "#50\tDONE   cov: 43 ft: 125 corp: 32/16Kb lim: 8192 exec/s: 25 rss: 50Mb\n",
        "Done 50 runs in 2 second(s)\n",
        "stat::number_of_executed_units: 50\n",
        "stat::peak_rss_mb:              51\n",
    ]
    figures = fuzz.figures(said)
    assert figures == {"branches": 43, "number_of_executed_units": 50, "peak_rss_mb": 51}


def test_a_target_that_fails_is_said_and_what_failed_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = (
        "import pathlib, sys; pathlib.Path(sys.argv[1], 'patch-crash-1').write_text('x'); "
        "print('stat::peak_rss_mb: 7', file=sys.stderr); sys.exit(77)"
    )
    child = lambda target, folder, seconds: [sys.executable, "-c", text, str(folder)]  # noqa: E731
    monkeypatch.setattr(fuzz, "child", child)
    found = fuzz.played("patch", 1, tmp_path)
    assert found == {"status": 77, "found": ["patch-crash-1"], "peak_rss_mb": 7}
    assert (tmp_path / "patch-crash-1").read_text() == "x"


def test_it_says_that_atheris_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: object) -> None:
    monkeypatch.setattr(fuzz.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["fuzz"])
    with pytest.raises(SystemExit) as caught:
        fuzz.main()
    assert caught.value.code == 2
