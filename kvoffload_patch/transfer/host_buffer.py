"""CPU memory for the slots, mapped by ourselves.

PyTorch's pinned allocator rounds up to powers of two, which at tens of GiB is what gets a
process killed; an anonymous mapping takes what is asked for.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable
from contextlib import suppress

import torch

from kvoffload_patch.transfer.errors import TransferError


class HostBuffer:
    """``slots``: a ``uint8`` tensor ``[num_slots, block_bytes]`` over an anonymous mapping.

    Pages are taken from the system when they are first written. For a CUDA device the mapping
    is registered with the driver, so that copies need no bounce buffer.

    Args:
        num_slots: number of slots.
        block_bytes: bytes of a slot.
        device: the device that copies from and to it.

    Raises:
        TransferError: the driver refuses to register the memory.
    """

    def __init__(self, num_slots: int, block_bytes: int, device: torch.device) -> None:
        self.nbytes = num_slots * block_bytes
        self._map = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE)
        flat = torch.frombuffer(self._map, dtype=torch.uint8)
        self.slots = flat.view(num_slots, block_bytes)
        self._unregister: Callable[[], object] | None = None
        if device.type == "cuda":
            self._register(flat.data_ptr())

    def close(self) -> None:
        """Give the memory back. No copy may be under way."""
        if self._unregister is not None:
            self._unregister()
        # The mapping goes with the last tensor that refers to it.
        del self.slots, self._map

    def _register(self, pointer: int) -> None:
        driver = torch.cuda.cudart()
        error = int(driver.cudaHostRegister(pointer, self.nbytes, 0))
        if error:
            raise TransferError(
                f"cannot register {self.nbytes / 2**30:.1f} GiB of CPU memory with the CUDA "
                f"driver (error {error}); lower KVOFFLOAD_CPU_GIB or raise the limit on locked "
                "memory (ulimit -l)."
            )
        # Also for a buffer that is dropped unclosed: its addresses may be mapped anew, and the
        # driver would take the new memory for the old.
        unregister = weakref.finalize(self, driver.cudaHostUnregister, pointer)
        unregister.atexit = False  # the driver may be gone by then
        self._unregister = unregister
