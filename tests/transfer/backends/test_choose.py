"""Which backend runs: as asked for, or the first that works, and why."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transfer.layouts import Case, build, equal, needs_gpu

from kvoffload_patch.transfer.backends import choose as backends
from kvoffload_patch.transfer.backends.choose import Chosen, choose_backend
from kvoffload_patch.transfer.backends.slots import SlotMemory
from kvoffload_patch.transfer.devices.cuda import CudaDevice
from kvoffload_patch.transfer.errors import TransferError
from kvoffload_patch.transfer.layout import BlockLayout
from kvoffload_patch.transfer.memory.host_buffer import HostBuffer


class Timed:
    """A backend that takes so many seconds for each copy, on no device at all."""

    groups = ()

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self.seconds = name, seconds
        self.checksums = SimpleNamespace(kept=False)


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`choose_backend` where each backend takes so many seconds, or fails with a text.

    One that takes 0 seconds opens, and its copies fail.
    """
    opened = weakref.WeakSet[Timed]()

    def choose_among(choice: str = "auto", **found: float | str) -> Chosen:
        def opener(name: str) -> Any:
            def open_one(*_: object) -> Any:
                seconds = found[name]
                assert not opened, "the device may have no room for the buffers of two"
                if isinstance(seconds, str):
                    raise RuntimeError(seconds)
                made = Timed(name, seconds)
                opened.add(made)
                return made

            return open_one

        def measure(layout: object, backend: Any, num_slots: int) -> Any:
            assert num_slots == 7
            if not backend.seconds:
                raise RuntimeError("no compiler")
            return backends._Speed(backend.seconds, 2 * backend.seconds)

        monkeypatch.setattr(backends, "_OPEN", {name: opener(name) for name in backends._OPEN})
        monkeypatch.setattr(backends, "_measure", measure)
        layout = SimpleNamespace(device=torch.device("cuda"), block_bytes=3_000_000)
        return choose_backend(cast("BlockLayout", layout), cast("SlotMemory", None), 7, choice)

    return choose_among


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        ({"staged": 9.0, "torch": 1.0}, "staged"),
        ({"staged": 1.0, "torch": "no way"}, "staged"),
        ({"staged": "no driver", "torch": 9.0}, "torch"),
        ({"staged": 0.0, "torch": 9.0}, "torch"),
    ],
)
def test_auto_takes_the_first_that_works(choose: Any, found: dict[str, Any], wanted: str) -> None:
    chosen = choose(**found)
    assert chosen.backend.name == wanted
    assert chosen.load_ms_per_block == 2 * found[wanted]


def test_it_says_what_was_measured_and_what_does_not_work(choose: Any) -> None:
    assert choose(staged=0.06).report == "copies staged (50.0/25.0 GB/s)"
    assert choose(staged="no\n way", torch=0.06).report == (
        "copies torch (50.0/25.0 GB/s; staged does not work here (no way))"
    )


@pytest.mark.parametrize("name", CudaDevice.backends)
def test_the_one_asked_for_is_taken_however_slow(choose: Any, name: str) -> None:
    assert choose(name, **{**dict.fromkeys(backends._OPEN, 0.1), name: 9.0}).backend.name == name


def test_the_one_asked_for_and_no_other(choose: Any) -> None:
    with pytest.raises(TransferError, match=r"found none: staged does not work here \(no driver\)"):
        choose("staged", staged="no driver", torch=1.0)


def test_nothing_works(choose: Any) -> None:
    with pytest.raises(TransferError, match="that works, found none: staged .*; torch "):
        choose(staged="a", torch="b")


def test_one_that_the_device_does_not_have_is_refused(choose: Any) -> None:
    with pytest.raises(TransferError, match="=auto or staged or torch on cuda, found direct"):
        choose("direct", staged=1.0, direct=1.0)


class Copying:
    """A backend that writes down what it is to copy."""

    name = "copying"
    groups = ()

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int], list[int]]] = []

    def store(self, ids: list[int], slots: list[int], streams: Any) -> Any:
        self.calls.append(("store", ids, slots))

    def load(self, ids: list[int], slots: list[int], streams: Any, compared: bool = False) -> Any:
        self.calls.append(("load compared" if compared else "load", ids, slots))


def measure(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float], num_slots: int, num_blocks: int
) -> tuple[Copying, Any]:
    """What is copied, and the speed found, where copies take so long each."""

    def copy_now(device: object, start: Any) -> float:
        start()
        return seconds.pop(0)

    monkeypatch.setattr(backends, "copy_now", copy_now)
    layout = SimpleNamespace(
        device=torch.device("cpu"), num_blocks=1 << 20, num_backed=num_blocks,
        block_bytes=backends.TIMED_BYTES // 64,
    )  # fmt: skip
    backend = Copying()
    found = backends._measure(cast("BlockLayout", layout), cast("Any", backend), num_slots)
    assert seconds == []
    return backend, found


@pytest.mark.parametrize(
    ("num_slots", "num_blocks", "count"),
    [(1, 9, 1), (2, 9, 2), (5, 9, 5), (20, 9, 9), (99, 100, 64), (1000, 1000, 64)],
)
def test_the_best_of_three_is_measured_after_a_pass_over_slots_apart(
    monkeypatch: pytest.MonkeyPatch, num_slots: int, num_blocks: int, count: int
) -> None:
    seconds = [0.9, 0.85, 0.8, 0.32, 0.16, 0.64, 0.48, 0.128, 0.96]
    backend, speed = measure(monkeypatch, list(seconds), num_slots, num_blocks)
    assert speed == backends._Speed(160 / count, 128 / count)
    (store, ids, apart), compared, (load, *same) = backend.calls[:3]
    assert (store, load, same) == ("store", "load", [ids, apart]), "the same bytes are loaded"
    assert compared == ("load compared", ids, apart)
    assert len(ids) == len(apart) == min(count, (num_slots + 1) // 2)
    # No two are neighbours, in whatever order; all are there.
    assert all(b - a > 1 for a, b in zip(sorted(apart), sorted(apart)[1:]))
    assert set(apart) <= set(range(num_slots)) and set(ids) <= set(range(num_blocks))
    every = list(range(count))
    timed = [("store", every, every)] * 3 + [("load", every, every)] * 3
    assert backend.calls[3:] == timed


def open_host(case: Case) -> tuple[HostBuffer, SlotMemory]:
    layout = case.layout()
    host = HostBuffer(5, layout.block_bytes, layout.device)
    host.wait_ready(5)
    return host, SlotMemory(host.slots, host.slots_per_piece)


def check(device: str, choice: str, names: Sequence[str]) -> None:
    case = build("different_dtypes", device=device)
    before = [raw.clone() for raw in case.storages()]
    host, slots = open_host(case)
    chosen = choose_backend(case.layout(), slots, 5, choice)
    assert chosen.backend.name in names
    assert chosen.load_ms_per_block > 0
    assert chosen.report.startswith(f"copies {chosen.backend.name} (")
    assert equal(case.storages(), before), "choosing has changed KV"
    del chosen, slots
    host.close()


def test_checksums_of_the_cpu_device_are_said() -> None:
    host, slots = open_host(build("different_dtypes"))
    said = {}
    for integrity in ("off", "sample", "full"):
        chosen = choose_backend(build("different_dtypes").layout(), slots, 5, "auto", integrity)
        said[integrity] = chosen.report
        assert chosen.backend.checksums.kept == (integrity != "off")
    device = "copies torch (the CPU device)"
    checked = f"{device}, checksums of all blocks"
    assert said == {"off": device, "sample": checked, "full": checked}
    del chosen, slots
    host.close()


def test_torch_makes_no_checksums_on_a_device() -> None:
    """With all loads to be compared it is refused, with some it says nothing of checksums."""
    slots = cast("SlotMemory", None)
    for device, instead in [
        ("cuda", "use KVOFFLOAD_COPY_BACKEND=staged, or set "),
        ("xpu", "set "),
    ]:
        layout = cast("BlockLayout", SimpleNamespace(device=torch.device(device)))
        with pytest.raises(TransferError, match=f"no checksums on this device; {instead}KVOFF"):
            backends._OPEN["torch"](layout, slots, "full", (), True)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("integrity", ["off", "sample", "full"])
def test_a_device_has_checksums(integrity: str) -> None:
    case = build("different_dtypes", device="cuda")
    host, slots = open_host(case)
    chosen = choose_backend(case.layout(), slots, 5, "auto", integrity)
    assert chosen.backend.checksums.kept == (integrity != "off")
    assert ("checksums" in chosen.report) == (integrity != "off")
    assert chosen.backend.checksums.mismatches == 0
    del chosen, slots
    host.close()


@pytest.mark.parametrize("choice", ["auto", *backends._OPEN])
def test_the_cpu_device_has_one(choice: str) -> None:
    check("cpu", choice, ["torch"])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("choice", CudaDevice.backends)
def test_each_works_on_a_device(choice: str) -> None:
    check("cuda", choice, [choice])


@pytest.mark.gpu
@needs_gpu
def test_auto_takes_the_staged_one_on_a_device() -> None:
    check("cuda", "auto", ["staged"])


@pytest.mark.gpu
@needs_gpu
def test_one_that_fails_is_left_out_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(layout: object, slots: object, integrity: str) -> Any:
        raise RuntimeError("as the test asked")

    monkeypatch.setitem(backends._OPEN, "staged", fail)
    check("cuda", "auto", ["torch"])
