"""Which NUMA node a GPU hangs on, and memory that prefers to be there.

By system calls, because neither torch nor the standard library has them. Nothing here is needed
for bytes to be right: whatever the system does not tell or allow is left as it is.
"""

from __future__ import annotations

import ctypes
import platform
from contextlib import suppress
from pathlib import Path

import torch

from kvoffload_patch.transfer.device import device_of

_MBIND = {"x86_64": 237, "aarch64": 235}  # numbers of the system call
_MPOL_PREFERRED = 1
_LONG_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def node_of(device: torch.device, root: Path = Path("/")) -> int | None:
    """The NUMA node of a device; None if there is but one, or nothing tells."""
    nodes = root / "sys/devices/system/node"
    with suppress(OSError, AttributeError, ValueError):
        if len(list(nodes.glob("node[0-9]*"))) < 2:
            return None
        pci = root / "sys/bus/pci/devices" / device_of(device).pci_id()
        node = int((pci / "numa_node").read_text())
        return node if node >= 0 else None
    return None


def prefer_node(address: int, nbytes: int, node: int) -> bool:
    """Have pages that are not taken yet come from a node, or from others once it is full.

    Args:
        address: of the first page.
        nbytes: length, a multiple of the page size.
        node: as `node_of` says.

    Returns:
        Whether the system has agreed; a container may not be allowed to ask.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    words = (ctypes.c_ulong * (node // _LONG_BITS + 1))()
    words[node // _LONG_BITS] = 1 << (node % _LONG_BITS)
    libc = ctypes.CDLL(None, use_errno=True)
    answer = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_long(_MPOL_PREFERRED),
        words,
        ctypes.c_ulong(len(words) * _LONG_BITS + 1),  # the kernel counts one less
        ctypes.c_ulong(0),
    )
    return bool(answer == 0)
