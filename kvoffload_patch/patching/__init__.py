"""Version-gated, reversible patches for one installed host package.

Owns three steps: decide from installed files and metadata (`decide`), install when the target
modules are imported (`PatchSet.arm`) or on single objects (`ObjectHooks.install`), and restore the
original objects (`remove` of either).
Must not know which host it patches: names, ranges and hooks arrive as `Host` and `PatchPoint`.
Importing this package imports neither the host nor wrapt.
"""

from __future__ import annotations

from .check import decide, release_of
from .errors import (
    HostNotFound,
    InstallFailed,
    PatchRefused,
    PatchTableError,
    SignatureMismatch,
    UnreadableVersion,
    UnsupportedVersion,
    UnverifiedHost,
)
from .locate import find_source, installed_version
from .objects import ObjectHooks, is_set_on
from .patchset import PatchSet, load_wrapt
from .point import Attributes, Decision, Host, PatchPoint
from .records import Records

__all__ = [
    "Attributes", "Decision", "Host", "HostNotFound", "InstallFailed", "ObjectHooks", "PatchPoint",
    "PatchRefused", "PatchSet", "PatchTableError", "Records", "SignatureMismatch",
    "UnreadableVersion", "UnsupportedVersion", "UnverifiedHost", "decide", "find_source",
    "installed_version", "is_set_on", "load_wrapt", "release_of",
]  # fmt: skip
