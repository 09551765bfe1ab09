"""Which copy backend runs: the one asked for, or the first that works; its speed is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from kvoffload_patch.transfer.backends.base import CopyBackend, Slices, copy_now, new_streams
from kvoffload_patch.transfer.backends.slots import SlotMemory
from kvoffload_patch.transfer.backends.torch import HostChecksums, TorchBackend
from kvoffload_patch.transfer.device import device_of
from kvoffload_patch.transfer.errors import TransferError, one_line
from kvoffload_patch.transfer.integrity import FULL, OFF, Checksums, in_words
from kvoffload_patch.transfer.layout import BlockLayout, Rows
from kvoffload_patch.transfer.tuning import (
    LOAD_GROUP_BYTES,
    LOAD_GROUPS,
    TIMED_BYTES,
    TIMED_REPEATS,
)


class Chosen(NamedTuple):
    """A backend, and what is known of it.

    Attributes:
        load_ms_per_block: milliseconds that a block takes to load.
        report: what was measured and why this one, for the log; one sentence.
    """

    backend: CopyBackend
    load_ms_per_block: float
    report: str


def choose_backend(
    layout: BlockLayout,
    slots: SlotMemory,
    num_slots: int,
    choice: str = "auto",
    integrity: str = OFF,
    groups: Sequence[Rows] = (),
    complete: bool = True,
) -> Chosen:
    """Open a backend, and measure it; ``auto`` takes the first that works.

    Blocks are stored and the same bytes loaded, so no KV changes.

    Args:
        layout: whose first blocks are moved; none is in use yet.
        slots: the CPU slots; the first ``num_slots`` are usable, and lose what they hold.
        choice: its name, as users choose it, or ``auto``.
        integrity: which loads are compared with checksums.
        groups: of rows, in which loads are to bring them; a backend may bring all at once.
        complete: whether this rank stores all that it loads.

    Raises:
        TransferError: the backend asked for does not work here, or none does.
    """
    device = device_of(layout.device)
    if device.is_host:
        checksums = HostChecksums(_num_sums(slots, integrity), layout, complete)
        on_cpu = TorchBackend(layout, slots, checksums)
        load_ms = _measure(layout, on_cpu, num_slots).load
        return Chosen(on_cpu, load_ms, f"copies torch (the CPU device){in_words(checksums.kept)}")
    if choice not in ("auto", *device.backends):
        raise TransferError(
            f"expected KVOFFLOAD_COPY_BACKEND={' or '.join(('auto', *device.backends))} on "
            f"{layout.device}, found {choice}; leave it out."
        )
    names = device.backends if choice == "auto" else (choice,)
    reasons: list[str] = []
    for name in names:
        try:
            # One that fails is kept by nobody: the next may need its device memory.
            backend, speed = _opened(name, layout, slots, num_slots, integrity, groups, complete)
        except Exception as error:  # noqa: BLE001 - another one may work
            reasons.append(f"{name} does not work here ({one_line(error)})")
            continue
        said = "; ".join([speed.in_words(layout.block_bytes), *reasons])
        words = in_words(backend.checksums.kept)
        return Chosen(backend, speed.load, f"copies {name} ({said}){words}")
    raise TransferError(
        f"expected a copy backend that works, found none: {'; '.join(reasons)}; see whether other "
        "programs can copy to the device, or set KVOFFLOAD_STRICT=0 to serve without the CPU tier."
    )


def _opened(
    name: str, layout: BlockLayout, slots: SlotMemory, num_slots: int,
    integrity: str, groups: Sequence[Rows], complete: bool,
) -> tuple[CopyBackend, _Speed]:  # fmt: skip
    backend = _OPEN[name](layout, slots, integrity, groups, complete)
    return backend, _measure(layout, backend, num_slots)


def load_groups(layout: BlockLayout) -> list[Rows]:
    """The groups in which loads may bring rows; one if a block has too few bytes for more."""
    return layout.cut(LOAD_GROUPS, LOAD_GROUP_BYTES)


class _Speed(NamedTuple):
    """Milliseconds a block, each way."""

    store: float
    load: float

    def in_words(self, block_bytes: int) -> str:
        """GB/s, each way."""
        store, load = (block_bytes / ms / 1e6 for ms in self)
        return f"{store:.1f}/{load:.1f} GB/s"


def _measure(layout: BlockLayout, backend: CopyBackend, num_slots: int) -> _Speed:
    count = min(num_slots, layout.num_backed, max(1, TIMED_BYTES // layout.block_bytes))
    ids = list(range(count))
    apart = list(range(0, num_slots, 2))[:count]
    streams = new_streams(layout.device)

    def ms(copy: Callable[..., Slices], slots: list[int]) -> float:
        moved = ids[: len(slots)]
        seconds = copy_now(layout.device, lambda: copy(moved, slots, streams))
        return seconds * 1000 / len(slots)

    # The first time pays for page faults, for compiling kernels and for warming up, and tries
    # what is done with slots that are not neighbours.
    ms(backend.store, apart)
    ms(partial(backend.load, compared=True), apart)
    ms(backend.load, apart)
    # The best of a few: whatever else the machine does while an engine starts makes them slower.
    store = min(ms(backend.store, ids) for _ in range(TIMED_REPEATS))
    load = min(ms(backend.load, ids) for _ in range(TIMED_REPEATS))
    return _Speed(store, load)


def _num_sums(slots: SlotMemory, integrity: str) -> int:
    return 0 if integrity == OFF else len(slots.slots)


def _staged(
    layout: BlockLayout, slots: SlotMemory, integrity: str, groups: Sequence[Rows], complete: bool
) -> CopyBackend:
    from kvoffload_patch.transfer.backends.staged import StagedBackend

    driver = device_of(layout.device).copier()
    checksums = Checksums(_num_sums(slots, integrity), layout.device, complete)
    return StagedBackend(layout, slots, driver, checksums, groups)


def _direct(
    layout: BlockLayout, slots: SlotMemory, integrity: str, groups: Sequence[Rows], complete: bool
) -> CopyBackend:
    from kvoffload_patch.transfer.backends.direct import DirectBackend

    _refuse_checksums(layout, integrity)
    return DirectBackend(layout, slots, device_of(layout.device).copier())


def _torch(
    layout: BlockLayout, slots: SlotMemory, integrity: str, groups: Sequence[Rows], complete: bool
) -> CopyBackend:
    # Its operations would need memory for checksums, which no copy may take.
    _refuse_checksums(layout, integrity)
    return TorchBackend(layout, slots)


def _refuse_checksums(layout: BlockLayout, integrity: str) -> None:
    if integrity == FULL:
        has_staged = "staged" in device_of(layout.device).backends
        instead = "use KVOFFLOAD_COPY_BACKEND=staged, or " if has_staged else ""
        raise TransferError(
            f"it makes no checksums on this device; {instead}set KVOFFLOAD_INTEGRITY=off"
        )


_OPEN: dict[str, Callable[[BlockLayout, SlotMemory, str, Sequence[Rows], bool], CopyBackend]] = {
    "staged": _staged,
    "direct": _direct,
    "torch": _torch,
}
