"""Ascend NPUs, by torch_npu and AscendCL. Not yet run on such a device.

Streams and events are torch_npu's. It hands work to the device from a thread of its own, behind a
queue on the host; asking a stream for its handle waits until that queue is empty
(`NPUStream::stream` in torch_npu's csrc/core/npu/NPUStream.cpp), so what is enqueued by the handle
lies behind what torch_npu was given before. That is why `handle` is asked for each time.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import torch

from kvoffload_patch.transfer.backends.acl import load_library
from kvoffload_patch.transfer.devices.torch import TorchDevice

if TYPE_CHECKING:
    from kvoffload_patch.transfer.backends.acl import AclDriver

_PINNED = 0x10000000  # ACL_HOST_REG_PINNED
# Up to this kernel registering plain memory ends in an exception, as aclrtHostRegisterV2 says.
_LAST_KERNEL_WITHOUT = (5, 10)


KERNEL = os.uname().release


class NpuDevice(TorchDevice):
    """An Ascend NPU."""

    backends: tuple[str, ...] = ("direct",)
    registers = True  # or the driver waits before it reads
    not_run = "Ascend NPU"
    module = "npu"

    def new_stream(self, priority: int = 0) -> Any:
        """As `torch.npu.Stream`, which has no priorities."""
        return self._torch.Stream(device=self._device)

    def handle(self, stream: Any) -> int:
        """Its ``aclrtStream``, once torch_npu has handed everything to it."""
        return int(stream.npu_stream)

    def copier(self) -> AclDriver:
        """AscendCL's copies."""
        from kvoffload_patch.transfer.backends.acl import AclDriver

        return AclDriver(self._index)

    def registrar(self) -> AclRegistrar:
        """AscendCL's registration of memory."""
        return AclRegistrar(self._index, KERNEL)


class AclRegistrar:
    """AscendCL's registration of memory, as pinned.

    Where it has none, before CANN 8.5, or where the kernel is too old for it, memory stays plain:
    AscendCL then waits for the stream and copies before it returns, which is right and slow.

    Args:
        index: of the device.
        kernel: the system's release.
    """

    def __init__(self, index: int, kernel: str) -> None:
        self._index = index
        library = load_library()
        self._unregister = library.aclrtHostUnregister
        numbers = tuple(map(int, re.findall(r"\d+", kernel)[:2]))
        can = hasattr(library, "aclrtHostRegisterV2") and numbers > _LAST_KERNEL_WITHOUT
        self._register = library.aclrtHostRegisterV2 if can else None

    def enter(self) -> None:
        """Called first on the thread that registers."""
        torch.npu.set_device(self._index)

    def register(self, address: int, nbytes: int) -> int:
        """As ``aclrtHostRegisterV2``."""
        return 0 if self._register is None else int(self._register(address, nbytes, _PINNED))

    def unregister(self, address: int) -> int:
        """As ``aclrtHostUnregister``."""
        return 0 if self._register is None else int(self._unregister(address))
