"""`bench touch`: what it reads of the kernel's tables, and one small run."""

from __future__ import annotations

import pytest
import torch

from scripts.bench.probes import touch

SMAPS = """7f0000000000-7f0000400000 rw-p 00000000 00:00 0
Size:               4096 kB
AnonHugePages:      2048 kB
VmFlags: rd wr
7f0000400000-7f0000600000 rw-p 00000000 00:00 0
AnonHugePages:         0 kB
"""


def test_huge_pages_are_those_of_the_mapping() -> None:
    found = [touch.huge_bytes(SMAPS, 0x7F0000000000 + at) for at in (0, 0x3FFFFF, 0x400000)]
    assert found == [2 << 20, 2 << 20, 0]
    assert touch.huge_bytes(SMAPS, 1) == 0, "no such mapping"


def test_each_way_is_measured_and_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["touch", "--gib", "0.0625", "--threads", "2"])
    touch.main()
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert "so many huge" in head and len(rows) == 8 and touch.FIRST in rows[0]
    assert touch.TIER in rows[1]
    shares = [int(row.split("|")[4].split()[0]) for row in rows]
    assert shares[5:] == [0, 0, 0], "pages of 4 KiB were asked for"
    assert all(0 <= share <= 100 for share in shares)


def test_registering_is_timed_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[int] = []

    class Registrar:
        def enter(self) -> None:
            pass

        def register(self, address: int, nbytes: int) -> int:
            known.append(address)
            return 0

        def unregister(self, address: int) -> int:
            known.remove(address)
            return 0

    device = type("Device", (), {"registrar": lambda self: Registrar()})()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(touch, "device_of", lambda _: device)
    memory = torch.empty(3 * touch.PIECE_BYTES + 9, dtype=torch.uint8)
    assert len(touch.registering(memory)) == 3
    assert known == []
