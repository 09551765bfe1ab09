"""What a check has found: for people, for programs, and what to do where something is wrong."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One reading.

    Attributes:
        group: what it belongs to, such as "memory".
        name: of the reading, in its group.
        found: in words.
        value: plain data, for programs.
        problem: what is wrong, without a full stop; empty if nothing is.
        remedy: what to do about it.
        refused: vLLM would not start with a tier, or without the remedy not as asked.
    """

    group: str
    name: str
    found: str
    value: object = None
    problem: str = ""
    remedy: str = ""
    refused: bool = False

    @property
    def sentence(self) -> str:
        """The problem with its remedy."""
        return f"{self.problem}; {self.remedy}." if self.remedy else self.problem
