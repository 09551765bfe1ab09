"""Launches of one Triton kernel, again and again."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from kvoffload_patch.transfer.device import Device


class Launcher:
    """Launches a kernel on a stream, with what Triton has compiled for it before.

    At each launch Triton looks at every argument to find the compiled kernel for it. That costs
    more than the launch (`scripts/bench enqueue`), and a step pays for it with each slice of a
    copy. So arguments are said to be of a kind, and the kernel is looked for once for each.

    Args:
        kernel: a function of `triton.jit`, or what stands in for one; its numbers are not
            specialized, and its constants come last.
        device: of the streams.
        constants: of every launch, as the kernel names and orders those that a launch does not.
        options: of the compiler.
    """

    def __init__(
        self, kernel: Any, device: Device, constants: dict[str, Any], **options: Any
    ) -> None:
        self._kernel = kernel
        self._device = device
        self._constants, self._options = constants, options
        self._values = tuple(constants.values())
        self._compiled: dict[Hashable, Any] = {}

    def launch(self, programs: int, stream: Any, kind: Hashable, *args: Any) -> None:
        """Launch so many programs.

        Args:
            kind: launches of one kind have the same types of arguments, the same ones that are
                None, and addresses that 16 divides; numbers are below 2**31. None: of no kind.
            args: those that come before ``constants``, in the kernel's order.
        """
        compiled = self._compiled.get(kind)
        if compiled is not None:
            handle = self._device.handle(stream)
            compiled[(programs, 1, 1)](*args, *self._values, stream=handle)
            return
        with self._device.on(stream):
            compiled = self._kernel[(programs,)](*args, **self._constants, **self._options)
        # Triton's interpreter, for one, has nothing to be kept.
        if kind is not None and compiled is not None:
            self._compiled[kind] = compiled


def aligned(*tensors: Any) -> bool:
    """Whether 16 divides the addresses of all of these that are not None, as Triton looks at it."""
    return not any(tensor.data_ptr() & 15 for tensor in tensors if tensor is not None)
