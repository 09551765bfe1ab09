"""The parser of every command: what is wrong is said at once, each in a sentence, with status 2.

argparse stops at the first value that is wrong and prints its usage. Values are read here after
their options, so all of them are in one line, with what was expected and what is to be done.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from kvoffload_patch._bootstrap import say
from kvoffload_patch.config import VARIABLES, option

EXIT_OK, EXIT_REFUSED = 0, 2

# argparse's own words for what it refuses, and ours.
_WORDS = (
    (r"the following arguments are required: (.*)", r"expected \1, found none; give it"),
    (r"one of the arguments (.*) is required", r"expected one of \1, found none; give one"),
    (
        r"argument (.*): not allowed with argument (.*)",
        r"expected \2 or \1, found both; give one",
    ),
    (r"argument (.*): expected one argument", r"\1 has no value, expected one; give it"),
    (
        r"argument (.*): ignored explicit argument (.*)",
        r"\1 is \2, expected no value; leave it out",
    ),
)


class Parser(argparse.ArgumentParser):
    """Options of one command.

    Args:
        prog: the command, such as ``kvoffload top``.
        description: what it does.
        epilog: examples and exit status, as they are.
        usage: where argparse's own would be wrong.
    """

    def __init__(self, prog: str, description: str, epilog: str, usage: str | None = None) -> None:
        super().__init__(
            prog=prog, description=description, epilog=epilog, usage=usage, allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        self._wrong: list[str] = []
        self._given: list[str] = []

    def add_value(
        self, name: str, parse: Callable[[str], Any], expected: str, **more: Any
    ) -> argparse.Action:
        """An option whose value is read by ``parse``, which raises ValueError for a wrong one."""

        def read(text: str) -> Any:
            try:
                return parse(text)
            except ValueError:
                self._wrong.append(f"{name} is {text!r}, expected {expected}; correct it.")
                return None

        return self.add_argument(name, type=read, **more)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """As argparse does; ends the process if anything is wrong."""
        found, wrong = self.read_args(args, namespace)
        if wrong:
            self._refuse(wrong)
        return found

    def read_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """What is given, and a sentence for each value that is wrong, which is None there.

        For a command that finds more wrong, and says all of it at once. What argparse cannot read
        ends the process.
        """
        self._wrong.clear()
        self._given = list(sys.argv[1:] if args is None else args)
        found, unknown = self.parse_known_args(args, namespace)
        return found, [*self._wrong, *map(self._unknown, unknown)]

    def error(self, message: str) -> NoReturn:
        """What argparse, or a command, finds wrong, behind the values that are wrong."""
        for pattern, words in _WORDS:
            if re.fullmatch(pattern, message):
                self._wrong += map(self._unknown, self._misspelt())
                message = re.sub(pattern, words, message) + f" (see `{self.prog} --help`)."
                break
        self._refuse([*self._wrong, message])

    def _misspelt(self) -> list[str]:
        """Options that there are not: argparse does not come to them if one is missing."""
        given = [word.partition("=")[0] for word in self._given]
        given = given[: given.index("--")] if "--" in given else given
        return [w for w in given if w.startswith("--") and w not in self._option_string_actions]

    def _unknown(self, word: str) -> str:
        name = word.partition("=")[0]
        rows = (row for row in VARIABLES.values() if not row.description.startswith("internal"))
        variable = next((row.name for row in rows if option(row.name) == name), "")
        if variable:
            return (
                f"{name} is not an option of {self.prog}, but a variable has that setting; leave "
                f"it out, and set {variable} in the environment in which vLLM starts."
            )
        near = difflib.get_close_matches(name, self._option_string_actions, n=1, cutoff=0.5)
        closest = f"the closest one is {near[0]}; " if near and word.startswith("-") else ""
        kind = "an option" if word.startswith("-") else "an argument"
        return (
            f"{name} is not {kind} of {self.prog}, {closest}correct it or leave it out"
            f" (see `{self.prog} --help`)."
        )

    def refuse(self, sentence: str) -> int:
        """Say why nothing is done, to programs as well if they asked; returns the exit status."""
        if "--json" in self._given:
            print(json.dumps({"error": sentence}, indent=1), flush=True)
        say(f"kvoffload_patch: {sentence}")
        return EXIT_REFUSED

    def _refuse(self, sentences: Sequence[str]) -> NoReturn:
        sys.exit(self.refuse(" ".join(sentences)))


def whole(least: int, most: int) -> tuple[Callable[[str], int], str]:
    """A parser of whole numbers in ASCII digits, and what it expects."""

    def parse(text: str) -> int:
        number = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1
        if not least <= number <= most:
            raise ValueError(text)
        return number

    return parse, f"a whole number from {least} to {most}"
