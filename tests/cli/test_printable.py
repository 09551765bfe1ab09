"""Texts that a terminal only shows."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload_patch.cli.printable import printable


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        ("a model, é 模型 \\ '\"", "a model, é 模型 \\ '\""),
        ("\x1b[2J\t\n\x7f\u2028\udc80", r"\x1b[2J\t\n\x7f\u2028\udc80"),
        (
            {"\x07": ["\r", 1, None, True, {"a": 0.5}]},
            {r"\x07": [r"\r", 1, None, True, {"a": 0.5}]},
        ),
    ],
)
def test_what_cannot_be_seen_is_escaped(found: Any, shown: Any) -> None:
    assert printable(found) == shown
