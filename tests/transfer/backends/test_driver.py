"""`Driver`: what it hands to libcuda, in the layouts of CUDA's headers, by a library of our own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transfer.layouts import needs_gpu

from kvoffload_patch.transfer.backends import driver as module
from kvoffload_patch.transfer.backends.driver import Driver, Runs, RunsOfRows
from kvoffload_patch.transfer.errors import TransferError

STREAM = 0x1234
ADDRESS = 0x7F12_3456_7000  # does not fit into 32 bits


class Function:
    """Something callable that takes attributes, as those of a library do."""

    def __init__(self, call: Callable[..., int]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> int:
        return self._call(*args)


class Library:
    """libcuda, as far as it is used; it moves bytes of the CPU at once.

    Args:
        batches: names under which it has the batched copy.

    Attributes:
        error: what every call answers; nothing is copied then.
        batch_error: the same for the batched copy alone.
    """

    def __init__(self, *batches: str) -> None:
        self.calls: list[Any] = []
        self.error = self.batch_error = 0
        self.cuMemcpyAsync = Function(self._copy)
        self.cuMemcpy2DAsync_v2 = Function(self._copy_2d)
        for name in batches:
            batch = self._batch_3d if "3D" in name else self._batch
            setattr(self, name, Function(partial(batch, name)))

    def _copy(self, target: int, source: int, nbytes: int, stream: int) -> int:
        self.calls.append(("copy", stream))
        if not self.error:
            ctypes.memmove(target, source, nbytes)
        return self.error

    def _copy_2d(self, rectangle: Any, stream: int) -> int:
        r = rectangle._obj
        assert (r.srcMemoryType, r.dstMemoryType) == (4, 4)  # CU_MEMORYTYPE_UNIFIED
        assert not (r.srcXInBytes or r.srcY or r.dstXInBytes or r.dstY)
        self.calls.append(("rows", stream))
        for i in range(r.Height):
            target, source = r.dstDevice + i * r.dstPitch, r.srcDevice + i * r.srcPitch
            ctypes.memmove(target, source, r.WidthInBytes)
        return self.error

    def _batch(
        self, name: str, targets: Any, sources: Any, sizes: Any, count: Any, *rest: Any
    ) -> int:
        attributes, first, number, *place, stream = rest
        assert len(place) == (0 if name.endswith("_v2") else 1)  # for the index of a failure
        assert attributes._obj.srcAccessOrder == 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        assert (first._obj.value, number.value, attributes._obj.flags) == (0, 1, 0)
        self.calls.append((name, stream.value))
        error = self.error or self.batch_error
        columns = [(ctypes.c_uint64 * count.value).from_address(c.value)
                   for c in (targets, sources, sizes)]  # fmt: skip
        for copy in () if error else zip(*columns):
            ctypes.memmove(*copy)
        return error

    def _batch_3d(self, name: str, count: Any, copies: Any, *rest: Any) -> int:
        *place, flags, stream = rest
        assert len(place) == (0 if name.endswith("_v2") else 1)
        assert flags.value == 0
        self.calls.append((name, stream.value))
        error = self.error or self.batch_error
        for copy in () if error else (_Copy3D * count.value).from_address(copies.value):
            assert (copy.src.type, copy.dst.type) == (1, 1)  # CU_MEMCPY_OPERAND_TYPE_POINTER
            assert (copy.srcAccessOrder, copy.flags, copy.depth) == (1, 0, 1)
            assert copy.src.layerHeight >= copy.height
            assert copy.dst.layerHeight >= copy.height
            for i in range(copy.height):
                target = copy.dst.ptr + i * copy.dst.rowLength
                ctypes.memmove(target, copy.src.ptr + i * copy.src.rowLength, copy.width)
        return error


class _Operand(ctypes.Structure):
    """cuda.h: CUmemcpy3DOperand_st, of a pointer."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("ptr", ctypes.c_uint64),
        ("rowLength", ctypes.c_size_t),
        ("layerHeight", ctypes.c_size_t),
        ("location", ctypes.c_int * 2),
    ]


class _Copy3D(ctypes.Structure):
    """cuda.h: CUDA_MEMCPY3D_BATCH_OP_st."""

    _fields_ = [
        ("src", _Operand),
        ("dst", _Operand),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
        ("depth", ctypes.c_size_t),
        ("srcAccessOrder", ctypes.c_int),
        ("flags", ctypes.c_uint),
    ]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Driver, Library]]:
    def use_library(*batches: str) -> tuple[Driver, Library]:
        library = Library(*batches)
        monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
        return Driver(), library

    return use_library


Triple = tuple[int, int, int]


def memory() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)


ALL = slice(0, None)


def runs(*copies: Triple) -> Runs:
    """Of targets, sources and sizes; these are no column of their own, and not contiguous."""
    table = np.array(copies, dtype=np.int64).reshape(-1, 3)
    made = Runs(table[:, 2])
    made.targets[:], made.sources[:] = table[:, 0], table[:, 1]
    return made


def some_copies(source: torch.Tensor, target: torch.Tensor) -> tuple[list[Triple], torch.Tensor]:
    """Three of them, and what the target holds after them."""
    a, b = source.data_ptr(), target.data_ptr()
    wanted = torch.zeros(100, dtype=torch.uint8)
    wanted[0], wanted[50:80], wanted[10:20] = 9, source[:30], source[90:]
    return [(b, a + 9, 1), (b + 50, a, 30), (b + 10, a + 90, 10)], wanted


def test_structures_are_those_of_cudas_headers() -> None:
    """cuda.h: CUDA_MEMCPY2D_st and CUmemcpyAttributes_st, on 64-bit machines."""
    rectangle: Any = module._Rectangle
    assert ctypes.sizeof(rectangle) == 128
    offsets = {name: getattr(rectangle, name).offset for name, _ in rectangle._fields_}
    assert offsets == {
        "srcXInBytes": 0,
        "srcY": 8,
        "srcMemoryType": 16,
        "srcHost": 24,
        "srcDevice": 32,
        "srcArray": 40,
        "srcPitch": 48,
        "dstXInBytes": 56,
        "dstY": 64,
        "dstMemoryType": 72,
        "dstHost": 80,
        "dstDevice": 88,
        "dstArray": 96,
        "dstPitch": 104,
        "WidthInBytes": 112,
        "Height": 120,
    }
    attributes: Any = module._Attributes
    assert ctypes.sizeof(attributes) == 24
    offsets = {name: getattr(attributes, name).offset for name, _ in attributes._fields_}
    assert offsets == {"srcAccessOrder": 0, "srcLocHint": 4, "dstLocHint": 12, "flags": 20}


@pytest.mark.parametrize(
    ("names", "called"),
    [
        (["cuMemcpyBatchAsync_v2"], ["cuMemcpyBatchAsync_v2"]),
        (["cuMemcpyBatchAsync"], ["cuMemcpyBatchAsync"]),
        (["cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"], ["cuMemcpyBatchAsync_v2"]),
        ([], ["copy"] * 3),
    ],
)
def test_many_copies_go_in_one_call_where_the_driver_has_it(
    use: Any, names: list[str], called: list[str]
) -> None:
    driver, library = use(*names)
    source, target = memory()
    copies, wanted = some_copies(source, target)
    driver.copy_many(runs(*copies), ALL, STREAM)
    assert library.calls == [(name, STREAM) for name in called]
    assert torch.equal(target, wanted)


@pytest.mark.parametrize("name", ["cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"])
def test_a_device_without_batches_is_asked_once(use: Any, name: str) -> None:
    """CUDA_ERROR_NOT_SUPPORTED: the driver has the call, and this device does not."""
    driver, library = use(name)
    library.batch_error = 801
    for asked in ([(name, STREAM)], []):
        source, target = memory()
        copies, wanted = some_copies(source, target)
        driver.copy_many(runs(*copies), ALL, STREAM)
        assert torch.equal(target, wanted)
        assert library.calls == [*asked, *[("copy", STREAM)] * 3]
        library.calls.clear()
    library.error = 801  # which from a single copy is an error like any other
    with pytest.raises(TransferError, match=r"\(cuMemcpyAsync answered 801\)"):
        driver.copy_many(runs(*copies), ALL, STREAM)


def test_a_batch_refused_for_another_reason_does_not_end_batches(use: Any) -> None:
    driver, library = use("cuMemcpyBatchAsync_v2")
    source, target = memory()
    copies, wanted = some_copies(source, target)
    library.batch_error = 719
    with pytest.raises(TransferError, match=r"\(cuMemcpyBatchAsync answered 719\)"):
        driver.copy_many(runs(*copies), ALL, STREAM)
    assert int(target.count_nonzero()) == 0
    library.batch_error = 0
    driver.copy_many(runs(*copies), ALL, STREAM)
    assert library.calls == [("cuMemcpyBatchAsync_v2", STREAM)] * 2
    assert torch.equal(target, wanted)


def test_one_copy_needs_no_batch_and_none_no_call(use: Any) -> None:
    driver, library = use("cuMemcpyBatchAsync_v2")
    source, target = memory()
    driver.copy_many(runs(), ALL, STREAM)
    assert library.calls == []
    driver.copy_many(runs((target.data_ptr() + 3, source.data_ptr() + 2, 5)), ALL, STREAM)
    assert library.calls == [("copy", STREAM)]
    assert target[3:8].tolist() == [2, 3, 4, 5, 6]
    assert int(target.count_nonzero()) == 5


def test_rows_are_a_pitch_apart_on_either_side(use: Any) -> None:
    driver, library = use()
    source, target = memory()
    driver.copy_rows(target.data_ptr() + 1, 10, source.data_ptr() + 5, 30, 4, 3, STREAM)
    assert library.calls == [("rows", STREAM)]
    wanted = torch.zeros(100, dtype=torch.uint8)
    for i in range(3):
        wanted[1 + 10 * i : 5 + 10 * i] = source[5 + 30 * i : 9 + 30 * i]
    assert torch.equal(target, wanted)


BATCHES_3D = ["cuMemcpy3DBatchAsync", "cuMemcpy3DBatchAsync_v2"]


def rows(*copies: Triple, nbytes: int = 3, pitch: int = 10) -> RunsOfRows:
    """Of targets, sources and counts."""
    table = np.array(copies, dtype=np.int64).reshape(-1, 3)
    made = RunsOfRows(table[:, 2], nbytes, pitch)
    made.targets[:], made.sources[:] = table[:, 0], table[:, 1]
    return made


def some_rows(source: torch.Tensor, target: torch.Tensor) -> tuple[list[Triple], torch.Tensor]:
    """Rows of 3 bytes, 10 apart: two from byte 40 on, one of byte 7, and what is there then."""
    a, b = source.data_ptr(), target.data_ptr()
    wanted = torch.zeros(100, dtype=torch.uint8)
    wanted[10:13], wanted[13:16], wanted[2:5] = source[40:43], source[50:53], source[7:10]
    return [(b + 10, a + 40, 2), (b + 2, a + 7, 1)], wanted


@pytest.mark.parametrize(
    ("names", "called"),
    [
        ([], ["rows", "rows"]),
        (BATCHES_3D[:1], BATCHES_3D[:1]),
        (BATCHES_3D, BATCHES_3D[1:]),
    ],
)
def test_runs_of_rows_go_in_one_call_where_the_driver_has_it(
    use: Any, names: list[str], called: list[str]
) -> None:
    driver, library = use(*names)
    source, target = memory()
    copies, wanted = some_rows(source, target)
    driver.copy_runs_of_rows(rows(*copies), ALL, STREAM)
    assert library.calls == [(name, STREAM) for name in called]
    assert torch.equal(target, wanted)


@pytest.mark.parametrize("name", BATCHES_3D)
def test_a_device_without_batches_of_rows_is_asked_once(use: Any, name: str) -> None:
    driver, library = use(name)
    library.batch_error = 801  # CUDA_ERROR_NOT_SUPPORTED
    for asked in ([(name, STREAM)], []):
        source, target = memory()
        copies, wanted = some_rows(source, target)
        driver.copy_runs_of_rows(rows(*copies), ALL, STREAM)
        assert torch.equal(target, wanted)
        assert library.calls == [*asked, *[("rows", STREAM)] * 2]
        library.calls.clear()


def test_a_batch_of_rows_that_is_refused_is_an_error(use: Any) -> None:
    driver, library = use("cuMemcpy3DBatchAsync_v2")
    source, target = memory()
    copies, wanted = some_rows(source, target)
    library.batch_error = 719
    with pytest.raises(TransferError, match=r"\(cuMemcpy3DBatchAsync answered 719\)"):
        driver.copy_runs_of_rows(rows(*copies), ALL, STREAM)
    library.batch_error = 0
    driver.copy_runs_of_rows(rows(*copies), ALL, STREAM)
    assert library.calls == [("cuMemcpy3DBatchAsync_v2", STREAM)] * 2
    assert torch.equal(target, wanted)


def test_one_run_of_rows_needs_no_batch_and_none_no_call(use: Any) -> None:
    driver, library = use("cuMemcpy3DBatchAsync_v2")
    source, target = memory()
    copies, _ = some_rows(source, target)
    driver.copy_runs_of_rows(rows(), ALL, STREAM)
    assert library.calls == []
    driver.copy_runs_of_rows(rows(*copies[:1]), ALL, STREAM)
    assert library.calls == [("rows", STREAM)]
    assert int(target.count_nonzero()) == 6


@pytest.mark.parametrize("names", [[], BATCHES_3D, ["cuMemcpyBatchAsync_v2", *BATCHES_3D]])
def test_some_of_the_runs_are_copied_and_then_others_between_other_addresses(
    use: Any, names: list[str]
) -> None:
    driver, _ = use(*names)
    source, target = memory()
    copies, wanted = some_copies(source, target)
    made = runs(*copies)
    for which in (slice(1, 3), slice(0, 1), slice(3, 3)):
        driver.copy_many(made, which, STREAM)
    assert torch.equal(target, wanted)
    other = torch.zeros_like(target)
    made.targets += other.data_ptr() - target.data_ptr()
    driver.copy_many(made, slice(0, 3), STREAM)
    assert torch.equal(other, wanted)

    first, wanted = some_rows(source, target.zero_())
    a, b = source.data_ptr(), target.data_ptr()
    wanted[30:33] = source[60:63]
    made_rows = rows(*first, (b + 30, a + 60, 1))
    for which in (slice(1, 3), slice(0, 1), slice(3, 3)):
        driver.copy_runs_of_rows(made_rows, which, STREAM)
    assert torch.equal(target, wanted)
    other.zero_()
    made_rows.targets[:] = other.data_ptr() + np.array([10, 2, 30])
    driver.copy_runs_of_rows(made_rows, slice(0, 3), STREAM)
    assert torch.equal(other, wanted)


def test_addresses_are_given_whole(use: Any) -> None:
    driver, library = use()
    assert library.cuMemcpyAsync.argtypes == [
        ctypes.c_uint64,
        ctypes.c_uint64,
        ctypes.c_size_t,
        ctypes.c_void_p,
    ]
    library.cuMemcpyAsync._call = lambda *args: library.calls.append(args) or 0
    driver.copy(ADDRESS, ADDRESS + 1, 1 << 33, STREAM)
    assert library.calls == [(ADDRESS, ADDRESS + 1, 1 << 33, STREAM)]


@pytest.mark.parametrize("names", [[], ["cuMemcpyBatchAsync"], ["cuMemcpyBatchAsync_v2"]])
def test_what_the_driver_refuses_is_an_error(use: Any, names: list[str]) -> None:
    driver, library = use(*names)
    library.error = 719
    source, target = memory()
    copy = (target.data_ptr(), source.data_ptr(), 1)
    call = "cuMemcpyBatchAsync" if names else "cuMemcpyAsync"
    for what, wanted in [
        (lambda: driver.copy(*copy, STREAM), "cuMemcpyAsync"),
        (lambda: driver.copy_many(runs(copy, copy), ALL, STREAM), call),
        (lambda: driver.copy_rows(copy[0], 4, copy[1], 4, 1, 1, STREAM), "cuMemcpy2DAsync"),
    ]:
        with pytest.raises(TransferError, match=rf"refused a copy \({wanted} answered 719\)"):
            what()


def test_no_driver_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError(f"{name}: no such file")

    monkeypatch.setattr(ctypes, "CDLL", fail)
    with pytest.raises(TransferError, match=r"expected the NVIDIA driver's libcuda.so.1, found"):
        Driver()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("batches", [True, False])
def test_the_driver_of_this_machine_moves_bytes(batches: bool) -> None:
    driver = Driver()
    if not batches:
        driver._batch = driver._batch_3d = None
    host = torch.randint(0, 256, (4096,), dtype=torch.uint8).pin_memory()
    back = torch.zeros_like(host).pin_memory()
    device = torch.zeros(4096, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    h, d, b = (t.data_ptr() for t in (host, device, back))
    pieces = [(0, 100, 50), (100, 0, 99), (1000, 3000, 1000), (3000, 1001, 1)]
    copies = [(d + t, h + s, n) for t, s, n in pieces]
    driver.copy_many(runs(*copies), ALL, stream.cuda_stream)
    driver.copy_rows(d + 2100, 70, h + 7, 300, 64, 12, stream.cuda_stream)
    found = [(d + 1200, h + 5, 3), (d + 1500, h + 1700, 1), (d + 1600, h + 3000, 2)]
    driver.copy_runs_of_rows(rows(*found, nbytes=40, pitch=500), ALL, stream.cuda_stream)
    driver.copy(b, d, 4096, stream.cuda_stream)
    stream.synchronize()
    wanted = torch.zeros(4096, dtype=torch.uint8)
    for target, source, nbytes in pieces:
        wanted[target : target + nbytes] = host[source : source + nbytes]
    for i in range(12):
        wanted[2100 + 70 * i : 2164 + 70 * i] = host[7 + 300 * i : 71 + 300 * i]
    for t, s, count in ((1200, 5, 3), (1500, 1700, 1), (1600, 3000, 2)):
        for i in range(count):
            row = host[s + 500 * i : s + 500 * i + 40]
            wanted[t + 40 * i : t + 40 * i + 40] = row
    assert torch.equal(back, wanted)
