"""The documents name files and names that exist, and their links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
        "docs/admission.md",
        "docs/shapes.md",
        "docs/neighbours.md",
        "docs/failures.md",
        "docs/limits.md",
        "docs/policies.md",
        "docs/quick-start.md",
    )
]
# What a path in a text may leave out.
FOLDERS = [ROOT, ROOT / "kvoffload_patch", ROOT / "kvoffload_patch/integration", ROOT / "docs"]
# Made when a command runs, or a pattern for what is to be added; not a file of the tree.
MADE = {"demo-out/ttft.png", "demo-out/", "patches/vllm-X.Y.Z.patch", "tests/data/vllm/X.Y.Z.json"}
ENDINGS = "py|md|json|sh|cfg|toml|pth|patch|png"
# Every page that people read, and the pictures that pages show.
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "patches/README.md"])
LINK = re.compile(r"(?<!`)\]\(([^)#\s]*)(?:#([^)\s]*))?\)")


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


@pytest.mark.parametrize("page", PAGES[2:-1], ids=lambda page: page.name)
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


def anchors_of(page: Path) -> set[str]:
    """The names of a page's headings, as GitHub and mkdocs make them of plain words."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    plain = [re.sub(r"\]\([^)]*\)", "]", head) for head in heads]
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in plain}


def broken_links(page: Path) -> list[str]:
    """Links of a page within the tree that lead to no file, or to no heading of it."""
    broken = []
    for path, anchor in LINK.findall(page.read_text()):
        target = (page.parent / path).resolve() if path else page
        if ":" in path:
            continue
        lost = not target.is_file() or ROOT not in target.parents
        if lost or (anchor and anchor not in anchors_of(target)):
            broken.append(f"{path}#{anchor}")
    return broken


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert broken_links(page) == []


def test_links_are_found_to_be_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    page = tmp_path / "a.md"
    page.write_text(
        "# One\n\n## `Two`: three, 4\n\n[a](#one) [b](a.md#two-three-4) [c](http://d.e)"
    )
    assert broken_links(page) == []
    page.write_text("# One\n[a](#two) ![b](c.png) [d](a.md#one) [e](../f.md)")
    assert broken_links(page) == ["#two", "c.png#", "../f.md#"]
    assert len([page for page in DOCUMENTS if LINK.search(page.read_text())]) > 10


def site_hooks() -> Any:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs/site/hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_has_its_place_in_the_site() -> None:
    text = (ROOT / "docs/site/mkdocs.yml").read_text()
    listed = re.findall(r"^ +- [^:]+: (\S+\.md)$", text, flags=re.MULTILINE)
    assert len(listed) == len(set(listed))
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert set(listed) == pages | set(site_hooks().PAGES.values())


def test_links_are_written_as_the_site_has_them() -> None:
    relinked = site_hooks().relinked
    text = "[a](docs/tuning.md#b) [c](patches/README.md) [d](http://e.f) [g](#h) ![i](docs/j.png)"
    assert relinked(text, "project/readme.md") == (
        "[a](../tuning.md#b) [c](patches.md) [d](http://e.f) [g](#h) ![i](../j.png)"
    )
    text = "[a](../SECURITY.md) [b](start.md#c) [d](measured/e.json)"
    assert relinked(text, "operating.md") == (
        "[a](project/security.md) [b](start.md#c) [d](measured/e.json)"
    )


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the extra docs")
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f"]
    words = [*command, str(ROOT / "docs/site/mkdocs.yml"), "-d", str(tmp_path / "site")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site/comparison.html").is_file()


def test_pages_and_modules_are_without_words_that_plain_prose_does_without() -> None:
    avoided = re.compile("|".join(["who" + "ever", r"(?<![a-z])a" + "new"]), re.IGNORECASE)
    modules = [
        file
        for name in ("kvoffload_patch", "scripts", "tests")
        for file in (ROOT / name).rglob("*.py")
    ]
    assert len(modules) > 300
    found = [
        str(f.relative_to(ROOT)) for f in [*DOCUMENTS, *modules] if avoided.search(f.read_text())
    ]
    assert found == []
