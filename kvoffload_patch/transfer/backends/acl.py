"""Copies by AscendCL, through ctypes: many in one call where CANN has it, else one by one.

Signatures, structures and numbers are those of CANN's header acl/acl_rt.h
(https://github.com/hicann/runtime, include/external/acl/acl_rt.h) and of its reference: a batch
has no order within and goes one way, host to device or device to host; failures of checks name
the copy (https://www.hiascend.com/document/detail/en/canncommercial/850/API/appdevgapi/
aclcppdevg_03_1957.html). Not yet run on such a device.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from kvoffload_patch.transfer.backends.slots import Numbers
from kvoffload_patch.transfer.errors import TransferError

LIBRARY = "libascendcl.so"
# Up to CANN 8.3 addresses have to be multiples of it (aclrtMemcpyAsync, restrictions).
ALIGNMENT = 64

_NOT_SUPPORTED = 207000  # ACL_ERROR_RT_FEATURE_NOT_SUPPORT
_TO_DEVICE, _TO_HOST = 1, 2  # ACL_MEMCPY_HOST_TO_DEVICE, ACL_MEMCPY_DEVICE_TO_HOST
_ON_HOST, _ON_DEVICE = 0, 1  # ACL_MEM_LOCATION_TYPE_HOST, ACL_MEM_LOCATION_TYPE_DEVICE
_ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_size_t


class _Location(ctypes.Structure):
    """aclrtMemLocation."""

    _fields_ = [("id", ctypes.c_uint32), ("type", ctypes.c_int)]


class _Attributes(ctypes.Structure):
    """aclrtMemcpyBatchAttr."""

    _fields_ = [
        ("dstLoc", _Location),
        ("srcLoc", _Location),
        ("rsv", ctypes.c_uint8 * 16),
    ]


def load_library() -> Any:
    """AscendCL, with the types of what is called of it.

    Raises:
        TransferError: it cannot be loaded.
    """
    try:
        library: Any = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise TransferError(f"expected CANN's {LIBRARY}, found {error}.") from error
    library.aclrtMemcpyAsync.argtypes = [
        _ADDRESS, _SIZE, _ADDRESS, _SIZE, ctypes.c_int, _ADDRESS,
    ]  # fmt: skip
    library.aclrtHostUnregister.argtypes = [_ADDRESS]
    optional = {
        "aclrtMemcpyBatchAsync": [*[_ADDRESS] * 4, _SIZE, *[_ADDRESS] * 2, _SIZE, *[_ADDRESS] * 2],
        "aclrtHostRegisterV2": [_ADDRESS, ctypes.c_uint64, ctypes.c_uint32],
    }
    for name, types in optional.items():
        call = getattr(library, name, None)
        if call is not None:
            call.argtypes = types
    return library


class AclDriver:
    """AscendCL's copies. Every call enqueues on a stream and returns, if memory is registered.

    Args:
        index: of the device.

    Raises:
        TransferError: there is no AscendCL, it is too old, or it refuses a copy.
    """

    alignment = ALIGNMENT

    def __init__(self, index: int) -> None:
        library = load_library()
        # The order of copies records events again while streams still wait for the record before.
        if not hasattr(library, "aclrtCreateEventExWithFlag"):
            raise TransferError(
                "expected a CANN whose events can be recorded again (aclrtCreateEventExWithFlag), "
                "found an older one; update CANN."
            )
        self._copy = library.aclrtMemcpyAsync
        self._batch: Any = getattr(library, "aclrtMemcpyBatchAsync", None)
        host, device = _Location(0, _ON_HOST), _Location(index, _ON_DEVICE)
        self._to_device, self._to_host = _Attributes(device, host), _Attributes(host, device)
        self._first = _SIZE(0)

    def copy_many(
        self, targets: Numbers, sources: Numbers, sizes: Numbers, stream: int, to_device: bool
    ) -> None:
        """Runs of bytes in one call, or one by one where CANN or the device has no such call.

        Args:
            targets, sources, sizes: addresses and bytes of each run.
            stream: an ``aclrtStream``.
            to_device: from host to device; else back.
        """
        if len(sizes) > 1 and self._batch is not None:
            error, at = self._copy_batch(targets, sources, sizes, stream, to_device)
            if error != _NOT_SUPPORTED:
                _check(error, f"aclrtMemcpyBatchAsync, copy {at} of {len(sizes)}")
                return
            self._batch = None  # CANN has it, this device does not
        kind = _TO_DEVICE if to_device else _TO_HOST
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist()):
            _check(self._copy(target, size, source, size, kind, stream), "aclrtMemcpyAsync")

    def _copy_batch(
        self, targets: Numbers, sources: Numbers, sizes: Numbers, stream: int, to_device: bool
    ) -> tuple[int, int]:
        to, where, many = (np.ascontiguousarray(each) for each in (targets, sources, sizes))
        attributes = self._to_device if to_device else self._to_host
        failed = _SIZE(0)
        error = self._batch(
            to.ctypes.data, many.ctypes.data, where.ctypes.data, many.ctypes.data, len(many),
            ctypes.byref(attributes), ctypes.byref(self._first), 1, ctypes.byref(failed), stream,
        )  # fmt: skip
        return int(error), failed.value


def _check(error: int, call: str) -> None:
    if error:
        raise TransferError(f"AscendCL refused a copy ({call} answered {error}).")
