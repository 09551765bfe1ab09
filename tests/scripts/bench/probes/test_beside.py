"""The table of `bench beside`, from given results."""

from __future__ import annotations

from scripts.bench.common import summary
from scripts.bench.probes import beside


def test_a_row_for_each_size_of_pieces() -> None:
    def row(piece: int, alone: float, behind: float) -> dict[str, object]:
        steps = {"nothing": summary([alone]), "a copy of its inputs": summary([behind])}
        return {"piece_bytes": piece, "steps": steps, "launch": summary([8.0])}

    head, _, *rows = beside.report([row(0, 4.0, 4.1), row(32 << 20, 4.3, 4.5)]).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (head, *rows)]
    assert cells[0][1:] == [
        "step behind nothing, ms", "step behind a copy of its inputs, ms", "a launch, host, us"
    ]  # fmt: skip
    assert [line[0] for line in cells[1:]] == ["alone", "beside pieces of 32 MiB"]
    assert cells[2][1].startswith("4.3") and cells[2][2].startswith("4.5")
