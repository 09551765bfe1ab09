"""Whatever the tier refuses at start is in a row of docs/features.md, with what it says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from scripts import ROOT
from scripts.matrix import features
from scripts.matrix.features_rows import ROWS
from scripts.matrix.features_rows_refused import is_refused

FILES = sorted((ROOT / "kvoffload_patch/integration/engine").glob("elig*.py"))
# How every refusal begins, and goes on (CONTRIBUTING.md): what was expected, what was found.
WORDS = re.compile(r"\bexpected |, found ")


def test_each_sentence_with_which_the_tier_refuses_is_in_a_row() -> None:
    written = [sentence for file in FILES for sentence in sentences(file.read_text("utf-8"))]
    assert len(FILES) == 2 and len(written) > 30
    assert not_said(written, said_by_rows()) == []


def test_a_sentence_that_no_row_says_is_seen() -> None:
    source = """
def problem(kind: str) -> str | None:
    if kind == "a":
        return f"expected another kind, found {kind}" + " (or none)"
    return f"expected no {kind} beside it, " "found one"
"""
    first, second = sentences(source)
    assert not_said([first, second], {"KV cache group 0: expected another kind, found a"}) == [
        "expected no … beside it, found one"
    ]
    said = {"expected another kind, found a; b.", "expected no x beside it, found one; b."}
    assert not_said([first, second], said) == []
    # One with fewer words of its own fits what the other says, which is not said for it.
    loose = "expected no ", "", ", found one"
    assert not_said([loose, second], {"expected no x beside it, found one"}) == [
        "expected no ……, found one"
    ]


def test_what_is_refused_says_so() -> None:
    found = features.load()
    for row in filter(is_refused, ROWS):
        assert features.verdict(row, found.get(row.name)).startswith("refused: "), row.name


def sentences(source: str) -> Iterator[tuple[str, ...]]:
    """What is written of each text with such words: the parts between what is filled in."""
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, (ast.JoinedStr, ast.Constant))]
    within = {id(one) for n in nodes for one in ast.walk(n) if one is not n}
    for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
        parts = _parts(node)
        if id(node) not in within and WORDS.search("".join(parts)):
            yield parts


def _parts(node: ast.JoinedStr | ast.Constant) -> tuple[str, ...]:
    if isinstance(node, ast.Constant):
        return (node.value,) if isinstance(node.value, str) else ("",)
    parts = [""]
    for one in node.values:
        if isinstance(one, ast.Constant):
            parts[-1] += str(one.value)
        else:
            parts.append("")
    return tuple(parts)


def said_by_rows() -> set[str]:
    found = features.load()
    tests = [test for row in ROWS if row.name in found for test in found[row.name]["tests"]]
    return {test["refusal"] for test in tests if "refusal" in test}


def not_said(written: list[tuple[str, ...]], refusals: set[str]) -> list[str]:
    """Those that no refusal is: each is that of which it has the most words."""
    left = dict.fromkeys(written)
    for refusal in refusals:
        fits = [p for p in written if re.search(".*".join(map(re.escape, p)), refusal)]
        if fits:
            left.pop(max(fits, key=lambda parts: sum(map(len, parts))), None)
    return ["…".join(parts) for parts in left]
