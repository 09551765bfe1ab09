"""Intel GPUs, by torch.xpu. Not yet run on such a device.

Torch has no call that makes memory of ours known to such a device, so slots stay plain memory.
"""

from __future__ import annotations

from kvoffload_patch.transfer.devices.torch import TorchDevice


class XpuDevice(TorchDevice):
    """An Intel GPU, with copies by torch."""

    not_run = "XPU"
    module = "xpu"
