"""The documents name files and names that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / name
    for name in (
        "README.md",
        "CONTRIBUTING.md",
        "docs/architecture.md",
        "docs/start.md",
        "docs/copies.md",
        "docs/policies.md",
    )
]
# What a path in a text may leave out.
FOLDERS = [ROOT, ROOT / "kvoffload_patch", ROOT / "kvoffload_patch/integration", ROOT / "docs"]
# Made when a command runs, or a pattern for what is to be added; not a file of the tree.
MADE = {"demo-out/ttft.png", "demo-out/", "patches/vllm-X.Y.Z.patch", "tests/data/vllm/X.Y.Z.json"}
ENDINGS = "py|md|json|sh|cfg|toml|pth|patch|png"


def paths_in(text: str) -> Iterator[str]:
    """Paths between backticks, and targets of links within the tree."""
    for quoted in re.findall(r"`([^`\n]+)`", text):
        for word in quoted.split():
            if re.fullmatch(rf"[\w.*/-]+\.({ENDINGS})|[\w.-]+/(?:[\w.-]+/)*", word):
                yield word
    for target in re.findall(r"\]\(([^)#]+)", text):
        if "://" not in target:
            yield target


def exists(path: str) -> bool:
    """Whether a file or folder of the tree has this path, or, of a bare name, this name."""
    if any(any(folder.glob(path.rstrip("/"))) for folder in FOLDERS):
        return True
    return "/" not in path and any(
        any((ROOT / folder).rglob(path)) for folder in ("kvoffload_patch", "tests", "scripts")
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_that_a_document_names_exists(page: Path) -> None:
    found = set(paths_in(page.read_text()))
    assert len(found) > 5, "found hardly any: is this reading the document?"
    absolute = {path for path in found if path.startswith("/")}
    assert sorted(path for path in found - MADE - absolute if not exists(path)) == []


@pytest.mark.parametrize("page", PAGES[2:], ids=lambda page: page.name)
def test_every_name_of_code_in_a_document_occurs_in_the_code(page: Path) -> None:
    code = "".join(
        file.read_text()
        for folder in ("kvoffload_patch", "scripts")
        for file in (ROOT / folder).rglob("*.py")
    )
    words = set(re.findall(r"\w+", code))
    quoted = re.findall(r"`([A-Za-z_][\w.]*)(?:\(\))?`", page.read_text())
    names = {part for name in quoted for part in name.split(".")}
    assert len(names) > 5
    assert sorted(names - words - set(ENDINGS.split("|"))) == []


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("`a/b.py` and `scripts/x go`, `tier/`", ["a/b.py", "tier/"]),
        ("[a](b.md#c) and [d](https://e.f)", ["b.md"]),
        ("`python scripts/bench page`, `request/s`", []),
    ],
)
def test_paths_are_found(text: str, paths: list[str]) -> None:
    assert list(paths_in(text)) == paths
