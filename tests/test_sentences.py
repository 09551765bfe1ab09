"""Every warning and every refusal of the package says what is so, and what to do or what follows.

Read from the sources: what stands behind a semicolon is what to do, or what goes on all the same.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import ROOT

FILES = sorted((ROOT / "kvoffload_patch").rglob("*.py"))
REFUSALS = {"TierRefused", "TierNotNeeded", "PromiseBroken", "Refused", "PolicyRefused"}
REFUSALS |= {"MemoryRefused", "UnsupportedVersion", "NotArmed"}
# What is refused there goes to a program, or to `kvoffload`, which says what to do.
SAID_BY_OTHERS = {"control/wire.py"}
# What ends with a text that says so, and news that nothing is to be done about.
WHOLE = {
    "kvoffload_patch: %s Serving without the CPU tier.",
    "kvoffload_patch: %s, so this process ends: %s",
    "KV offload: paused: %s to have the CPU tier again",
    "kvoffload_patch: no control socket, so kvoffload status and its like do not find this engine, "
    "which serves all the same: %s%s",
    "kvoffload_patch: copies from %s to %s make progress again.",
}


def text_of(node: ast.expr) -> str | None:
    """As far as it stands there; None for what is made elsewhere, in whole or behind a label."""
    if isinstance(node, ast.Constant):
        text = str(node.value)
    elif isinstance(node, ast.JoinedStr):
        parts = [str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values]
        text = "".join(parts)
    else:
        return None
    words = text.replace("kvoffload_patch", "").replace("{}", "").replace("%s", "")
    return text if any(char.isalpha() for char in words) else None


def sentences(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and node.args):
            continue
        name = ast.unparse(node.func)
        if name in ("logger.warning", "logger.error") or name.rpartition(".")[2] in REFUSALS:
            text = text_of(node.args[0])
            if text is not None:
                yield node.lineno, text


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_warning_and_refusal_says_what_to_do_or_what_follows(file: Path) -> None:
    if str(file.relative_to(ROOT / "kvoffload_patch")) in SAID_BY_OTHERS:
        return
    found = sentences(file.read_text(encoding="utf-8"))
    assert [(line, text) for line, text in found if ";" not in text and text not in WHOLE] == []
