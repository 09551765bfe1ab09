"""What ends one question, and nothing else."""

from __future__ import annotations


class Refused(Exception):
    """A question is not answered, or not carried out; the text is one sentence for the user."""
