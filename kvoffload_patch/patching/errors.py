"""Reasons to refuse patching, one exception class per reason.

Owns the class names that callers catch; texts are written where the facts are known. A refusal
is no ImportError: a host that guards an optional import must not swallow it.
"""

from __future__ import annotations


class PatchRefused(Exception):
    """Base of every refusal; its text is for the user and needs no traceback."""


class HostNotFound(PatchRefused):
    """None of the host's distributions is installed."""


class UnreadableVersion(PatchRefused):
    """The host's version string is not a PEP 440 version."""


class UnsupportedVersion(PatchRefused):
    """The host's version lies outside the supported range."""


class UnverifiedHost(PatchRefused):
    """The release, or the body of a target, is none that was verified; the user may override."""


class PatchTableError(PatchRefused):
    """The table of patch points contradicts itself or what is armed; no fault of the host."""


class SignatureMismatch(PatchRefused):
    """At least one target is missing or does not look as its patch point requires."""


class InstallFailed(PatchRefused):
    """Installing raised; everything installed before has been taken off again."""
