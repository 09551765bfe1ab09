"""Intel GPUs, by torch.xpu. Not yet run on such a device.

Torch has no call that makes memory of ours known to such a device, so slots stay plain memory. It
reads that on the host, when a copy to the device is enqueued, into pinned memory that it takes for
the copy (`_copy_xpu` in torch-xpu-ops' src/ATen/native/xpu/Copy.cpp).
"""

from __future__ import annotations

from kvoffload_patch.transfer.devices.torch import TorchDevice


class XpuDevice(TorchDevice):
    """An Intel GPU, with copies by torch."""

    not_run = "XPU"
    module = "xpu"
