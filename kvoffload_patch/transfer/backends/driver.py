"""Copies by the CUDA driver, through ctypes: no Python object for each copy, and no GIL held.

Only what torch has no call for, or none that is cheap enough: runs of any length at plain
addresses, rectangles, and many of either in one call. CUDA has those calls since 12.8; their
signatures changed in 13.0
(https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html).
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from kvoffload_patch.transfer.backends.slots import Numbers
from kvoffload_patch.transfer.errors import TransferError

_DEVICE_AND_HOST = 4  # CU_MEMORYTYPE_UNIFIED: the address says which
_NOT_SUPPORTED = 801  # CUDA_ERROR_NOT_SUPPORTED
_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_POINTER = 1  # CU_MEMCPY_OPERAND_TYPE_POINTER
# CUDA_MEMCPY3D_BATCH_OP, of plain addresses: CUmemcpy3DOperand twice, and the rest.
_OPERAND = [
    ("type", "<i8"), ("address", "<u8"), ("row_length", "<u8"), ("layer_height", "<u8"),
    ("location", "<u8"),
]  # fmt: skip
_BATCHED = np.dtype(
    [
        ("source", _OPERAND), ("target", _OPERAND), ("width", "<u8"), ("height", "<u8"),
        ("depth", "<u8"), ("order", "<i4"), ("flags", "<u4"),
    ]
)  # fmt: skip


class _Rectangle(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = [
        field
        for end in ("src", "dst")
        for field in (
            (f"{end}XInBytes", ctypes.c_size_t),
            (f"{end}Y", ctypes.c_size_t),
            (f"{end}MemoryType", ctypes.c_int),
            (f"{end}Host", ctypes.c_void_p),
            (f"{end}Device", ctypes.c_uint64),
            (f"{end}Array", ctypes.c_void_p),
            (f"{end}Pitch", ctypes.c_size_t),
        )
    ] + [("WidthInBytes", ctypes.c_size_t), ("Height", ctypes.c_size_t)]


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = [
        ("srcAccessOrder", ctypes.c_int),
        ("srcLocHint", _Location),
        ("dstLocHint", _Location),
        ("flags", ctypes.c_uint),
    ]


class Runs:
    """Runs of bytes, made ready once to be copied, between other addresses each time.

    Args:
        sizes: bytes of each run.

    Attributes:
        targets, sources: address of each run; to be set before it is copied.
    """

    def __init__(self, sizes: Numbers) -> None:
        self.sizes = np.ascontiguousarray(sizes)
        self.targets, self.sources = np.zeros_like(self.sizes), np.zeros_like(self.sizes)
        columns = (self.targets, self.sources, self.sizes)
        self._begins = [column.ctypes.data for column in columns]

    def at(self, run: int) -> list[ctypes.c_void_p]:
        """Where the driver reads targets, sources and sizes, from this run on."""
        return [ctypes.c_void_p(begin + run * self.sizes.itemsize) for begin in self._begins]


class RunsOfRows:
    """The same of rows.

    Args:
        counts: rows of each run.
        nbytes: of a row.
        pitch: bytes from a row's begin to the next one's in the source; in the target they lie one
            behind the other.

    Attributes:
        targets, sources: address of each run; to be set before it is copied.
    """

    def __init__(self, counts: Numbers, nbytes: int, pitch: int) -> None:
        self.counts, self.nbytes, self.pitch = counts, nbytes, pitch
        copies = np.zeros(len(counts), _BATCHED)
        for end, row in (("source", pitch), ("target", nbytes)):
            operand = copies[end]
            operand["type"], operand["row_length"], operand["layer_height"] = _POINTER, row, counts
        copies["width"], copies["height"], copies["depth"] = nbytes, counts, 1
        copies["order"] = _STREAM_ORDER
        self.targets, self.sources = copies["target"]["address"], copies["source"]["address"]
        self._begin = copies.ctypes.data  # of the memory that `targets` is a view of

    def at(self, run: int) -> ctypes.c_void_p:
        """Where the driver reads what is to be copied, from this run on."""
        return ctypes.c_void_p(self._begin + run * _BATCHED.itemsize)


class Driver:
    """The driver's copies. Every call enqueues on a stream and returns.

    Raises:
        TransferError: no NVIDIA driver is loaded, or it refuses a copy.
    """

    def __init__(self) -> None:
        try:
            self._lib: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise TransferError(
                f"expected the NVIDIA driver's libcuda.so.1, found {error}."
            ) from error
        self._copy = self._lib.cuMemcpyAsync
        self._copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
        self._copy_2d = self._lib.cuMemcpy2DAsync_v2
        self._copy_2d.argtypes = [ctypes.POINTER(_Rectangle), ctypes.c_void_p]
        self._batch, self._reports_index = _batch_call(self._lib, "cuMemcpyBatchAsync")
        self._batch_3d, self._reports_3d = _batch_call(self._lib, "cuMemcpy3DBatchAsync")
        self._attributes = _Attributes(srcAccessOrder=_STREAM_ORDER)
        self._first = ctypes.c_size_t(0)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """One run of bytes."""
        _check(self._copy(target, source, nbytes, stream), "cuMemcpyAsync")

    def copy_many(self, runs: Runs, which: slice, stream: int) -> None:
        """Some of these runs in one call, or one by one where the driver has no such call."""
        sizes = runs.sizes[which]
        if len(sizes) > 1 and self._batch is not None:
            error = self._copy_batch(runs.at(which.start), len(sizes), stream)
            if error != _NOT_SUPPORTED:
                _check(error, "cuMemcpyBatchAsync")
                return
            self._batch = None  # the driver has it, this device does not
        found = (runs.targets[which], runs.sources[which], sizes)
        for target, source, nbytes in zip(*(column.tolist() for column in found)):
            self.copy(target, source, nbytes, stream)

    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int,
        nbytes: int, count: int, stream: int,
    ) -> None:  # fmt: skip
        """``count`` runs of ``nbytes`` each, their starts a pitch apart on either side."""
        rectangle = _Rectangle(
            srcMemoryType=_DEVICE_AND_HOST, srcDevice=source, srcPitch=source_pitch,
            dstMemoryType=_DEVICE_AND_HOST, dstDevice=target, dstPitch=target_pitch,
            WidthInBytes=nbytes, Height=count,
        )  # fmt: skip
        _check(self._copy_2d(ctypes.byref(rectangle), stream), "cuMemcpy2DAsync")

    def copy_runs_of_rows(self, runs: RunsOfRows, which: slice, stream: int) -> None:
        """Some of these runs in one call, or one by one where the driver has no such call."""
        counts = runs.counts[which]
        if len(counts) > 1 and self._batch_3d is not None:
            error = self._copy_batch_3d(runs.at(which.start), len(counts), stream)
            if error != _NOT_SUPPORTED:
                _check(error, "cuMemcpy3DBatchAsync")
                return
            self._batch_3d = None
        found = (runs.targets[which], runs.sources[which], counts)
        for target, source, count in zip(*(column.tolist() for column in found)):
            self.copy_rows(target, runs.nbytes, source, runs.pitch, runs.nbytes, count, stream)

    def _copy_batch(self, columns: list[ctypes.c_void_p], count: int, stream: int) -> int:
        args = [
            *columns,
            ctypes.c_size_t(count),
            ctypes.byref(self._attributes),
            ctypes.byref(self._first),  # the attributes hold from copy 0 on
            ctypes.c_size_t(1),
        ]
        if self._reports_index:
            args.append(ctypes.byref(ctypes.c_size_t(0)))
        return int(self._batch(*args, ctypes.c_void_p(stream)))

    def _copy_batch_3d(self, copies: ctypes.c_void_p, count: int, stream: int) -> int:
        args: list[Any] = [ctypes.c_size_t(count), copies]
        if self._reports_3d:
            args.append(ctypes.byref(ctypes.c_size_t(0)))
        return int(self._batch_3d(*args, ctypes.c_ulonglong(0), ctypes.c_void_p(stream)))


def _batch_call(lib: Any, name: str) -> tuple[Any, bool]:
    """A batched copy, and whether it takes a place for the index of a copy that fails."""
    for version, reports_index in ((f"{name}_v2", False), (name, True)):
        call = getattr(lib, version, None)
        if call is not None:
            return call, reports_index
    return None, False


def _check(error: int, call: str) -> None:
    if error:
        raise TransferError(f"the CUDA driver refused a copy ({call} answered {error}).")
