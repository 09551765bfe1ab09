"""What ends one mode of a benchmark, or all of it."""

from __future__ import annotations


class BenchRefused(Exception):
    """Nothing is started; the text is one sentence for the user."""


class ServerFailed(Exception):
    """A server did not start, or did not answer a request; the text says how."""
