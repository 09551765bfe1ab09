"""ROCm devices, which torch calls CUDA ones. Not yet run on such a device.

torch.cuda is HIP there, and so is `torch.cuda.cudart()`, which registers memory
(torch/csrc/cuda/shared/cudart.cpp is compiled for HIP as well). The driver's copies are not used:
`hipMemcpyBatchAsync` refuses attributes up to ROCm 7.2 and does not batch copies between host and
device (https://github.com/ROCm/clr/issues/273).
"""

from __future__ import annotations

from kvoffload_patch.transfer.devices.cuda import CudaDevice
from kvoffload_patch.transfer.devices.torch import TorchDevice


class RocmDevice(CudaDevice):
    """A ROCm device: as a CUDA one, with copies by torch alone."""

    backends: tuple[str, ...] = ("torch",)
    not_run = "ROCm"
    # Not asked of HIP yet, so slots are on whichever NUMA node the system takes.
    pci_id = TorchDevice.pci_id
    copier = TorchDevice.copier
