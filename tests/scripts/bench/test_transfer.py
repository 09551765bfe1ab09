"""The layouts of `bench transfer`, its check of bytes, and a run of it in a small size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.bench import page, tables
from scripts.bench.common import summary
from scripts.bench.transfer import command, report, setup
from scripts.bench.transfer.command import keep
from scripts.bench.transfer.measure import FIGURES
from scripts.bench.transfer.shapes import BY_TOKENS, SHAPES

CPU = torch.device("cpu")
LLAMA_8B = 32 * 2 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("name", "token_bytes", "rows", "row_bytes"),
    [
        ("apart", LLAMA_8B, 64, 8 * 128 * 2),
        ("packed", LLAMA_8B, 32, 2 * 8 * 128 * 2),  # K and V of a block are neighbours
        ("mla", 61 * 576 * 2, 61, 576 * 2),
        ("two_heads", 80 * 2 * 2 * 128 * 2, 160, 2 * 128 * 2),
        ("fp8", LLAMA_8B // 2, 64, 8 * 128),
    ],
)
@pytest.mark.parametrize("tokens", [16, 48])
def test_what_a_block_has(
    name: str, token_bytes: int, rows: int, row_bytes: int, tokens: int
) -> None:
    assert SHAPES[name].token_bytes == token_bytes
    layout = setup.KV(name, tokens * token_bytes, 3, CPU).layout
    assert layout.block_bytes == tokens * token_bytes
    assert [row.shape for row in layout.rows] == [(3, tokens * row_bytes)] * rows


class Round:
    """A layout with as many blocks and slots as `check_bytes` needs for some blocks."""

    def __init__(self, name: str, blocks: int = 3, tokens: int = 2) -> None:
        nbytes = tokens * SHAPES[name].token_bytes
        self.kv = setup.KV(name, nbytes, 2 * blocks, CPU)
        self.memory = setup.Slots(4 * blocks * nbytes, nbytes, CPU)
        self.slots = self.memory.of(nbytes)
        self.mover = setup.Mover(self.kv, self.slots, "torch")
        self.blocks = blocks

    def check(self, order: str) -> None:
        setup.check_bytes(self.kv, self.slots, self.mover, order, self.blocks)

    def close(self) -> None:
        self.mover.engine.close()
        del self.mover, self.slots
        self.memory.close()


@pytest.fixture(params=SHAPES)
def copies(request: pytest.FixtureRequest) -> Iterator[Round]:
    made = Round(request.param)
    yield made
    made.close()


@pytest.mark.parametrize("order", setup.ORDERS)
def test_a_byte_that_does_not_arrive_is_found_in_every_layout(
    copies: Round, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies.check(order)
    carry_out, last = setup._carry_out, copies.kv.tensors[-1].view(torch.uint8)

    def spoil(mover: setup.Mover, plan: Any) -> None:
        carry_out(mover, plan)
        if plan.before:  # the load
            last.view(-1)[-1] ^= 1

    monkeypatch.setattr(setup, "_carry_out", spoil)
    with pytest.raises(RuntimeError, match=r"layer \d+ has other bytes than before"):
        copies.check(order)


def test_small_is_every_layout_and_an_unknown_one_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = command.options(["--small"])
    assert small.layouts.split(",") == list(SHAPES)
    assert small.gib < 0.1 and small.repeats == 1 and small.host_only
    with pytest.raises(SystemExit):
        command.options(["--layouts", "apart,gqa"])
    assert "expected some of apart, packed, mla, two_heads, fp8, found gqa" in (
        capsys.readouterr().err
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="as it runs without a GPU")
def test_each_layout_is_measured_with_each_size_of_its_blocks(tmp_path: Path) -> None:
    args = command.options(["--repeats", "1", "--gib", "0.004", "--block-kib", "2048"])
    args.layouts, args.block_tokens = "packed,mla,two_heads,fp8", [16, 32]
    args.json = tmp_path / "found.json"
    bench = command.Bench(args)
    bench.run()
    found = [(case["layout"], case["block_bytes"]) for case in bench.document["cases"]]
    sizes = [(name, n * shape.token_bytes) for name, shape in BY_TOKENS.items() for n in (16, 32)]
    wanted = [("packed", 2 << 20), *sizes]
    assert found == [case for case in wanted for _ in setup.ORDERS]
    assert "torch, 1.072 MiB, mla, fragmented" in report.page(bench.document)
    assert args.json.is_file()


def one_case(backend: str, speeds: dict[str, float]) -> dict[str, Any]:
    kinds = {kind: {"gb_s": {"median": gb_s}} for kind, gb_s in speeds.items()}
    where = {"layout": "mla", "block_bytes": 2 << 20, "order": "fragmented"}
    return {"backend": backend, **where, "kinds": kinds}


def test_checksums_are_shares_of_what_the_same_copies_reach_without() -> None:
    without = dict.fromkeys(report.WORDS, 50.0)
    cases = [one_case("staged off", without), one_case("staged", {**without, "load": 49.9})]
    cases += [{"backend": "staged full", "error": "no memory"}]
    assert "checksums of all blocks" not in report.checksums({"cases": cases})
    cases[-1] = one_case("staged full", {**without, "load": 49.0, "both": 49.6})
    made = report.checksums({"cases": [*cases, one_case("torch full", without)]})
    row = next(line for line in made.splitlines() if "staged" in line)
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[:3] == [
        "staged, 2 MiB, mla, fragmented", "50.0; 1.000; 1.000", "50.0; 0.998; 0.980",
    ]  # fmt: skip
    assert "torch" not in made, "measured without checksums nowhere"
    assert made.endswith(
        "with copies one way 2 of 3 are at least 0.99 of them, the median is 1.000, the least "
        "0.980; with copies both ways at once 1 of 1 are at least 0.99 of them, the median is "
        "0.992, the least 0.992."
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="as it runs without a GPU")
def test_a_result_with_checksums_fills_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = command.options(["--integrity", "off,full,sample", "--repeats", "1", "--gib", "0.004",
                            "--layouts", "apart", "--block-kib", "2048",
                            "--json", str(tmp_path / "transfer-checksums.json")])  # fmt: skip
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.checksums() == "not measured"
    command.Bench(args).run()
    text = page.filled("<!-- table: checksums -->\nold\n<!-- end: checksums -->")
    assert "torch, 2 MiB, contiguous" in text and "torch, 2 MiB, fragmented" in text
    assert " of 6 are at least 0.99" in text and " of 2 are" in text and "Commit" in text


def test_samples_of_a_later_round_are_added_to_those_of_the_first() -> None:
    def case(rate: float, order: str = "contiguous") -> dict[str, Any]:
        found = {name: summary([rate]) for name in FIGURES}
        about = {"backend": "staged full", "layout": "apart", "block_bytes": 512, "order": order}
        return {**about, "kinds": {"store": {**found, "matmul": 1.5}}}

    cases: list[dict[str, Any]] = []
    for one in (case(1.0), case(7.0, "fragmented"), case(3.0), case(2.0)):
        keep(cases, one)
    assert [one["order"] for one in cases] == ["contiguous", "fragmented"]
    store = cases[0]["kinds"]["store"]
    assert store["gb_s"] == {"samples": [1.0, 3.0, 2.0], "median": 2.0, "min": 1.0, "max": 3.0}
    assert store["matmul"] == 1.5
