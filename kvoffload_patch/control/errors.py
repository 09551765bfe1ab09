"""What ends one question, and nothing else."""

from __future__ import annotations


class Refused(Exception):
    """A question is not answered, or not carried out; the text is one sentence for the user."""


class Silent(Refused):
    """The other end does not say all that it is to say in time."""
