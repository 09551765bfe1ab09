"""A /dev/shm of a forked engine's own, mounted with the options that TEST_SHM has."""

from __future__ import annotations

import ctypes
import os
import subprocess

_CLONE_NEWNS = 0x20000


def install() -> None:
    """In this process and in those that it starts: what it mounts is seen by no others."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "this process may have no mounts of its own")
    _mount("--make-rprivate", "/")
    _mount("-t", "tmpfs", "-o", os.environ["TEST_SHM"], "tmpfs", "/dev/shm")


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)
