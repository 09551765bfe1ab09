"""The files in patches/: what may be in them, that the script makes them, and that they apply.

vLLM's sources come from $RELEASE_SOURCES or are fetched by `scripts/release sources`; a
release that can be had in neither way is skipped.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from kvoffload_patch.cli import patch_files
from kvoffload_patch.cli.patch_files import BadPatchFile, parse, sha256
from scripts import ROOT
from scripts.release import patches as make_patches
from scripts.release.sources import NotFetched

FILES = {file.stem.partition("-")[2]: file for file in (ROOT / "patches").glob("*.patch")}


RELEASES = sorted(FILES, key=make_patches.release_key)
ADDED = make_patches.ADDED
unreachable: list[str] = []


def source(release: str) -> bytes:
    """The released file, or a skip: after one failure no other release is asked for."""
    cache = os.environ.get("RELEASE_SOURCES") or ROOT / ".vllm-sources"
    if unreachable and not Path(cache, release).is_dir():
        pytest.skip(unreachable[0])
    try:
        return bytes(make_patches.reader(None)(release))
    except (NotFetched, OSError) as error:
        unreachable.append(f"no sources of vLLM {release}: {error}")
        pytest.skip(unreachable[0])


def test_every_known_release_from_0_9_1_has_a_file() -> None:
    known = {file.stem for file in (ROOT / "tests/data/vllm").glob("*.json")}
    assert set(FILES) == {r for r in known if make_patches.release_key(r) >= [0, 9, 1]}
    assert len(FILES) >= 41


@pytest.mark.parametrize("release", RELEASES)
def test_a_file_only_adds_our_lines(release: str) -> None:
    lines = FILES[release].read_text().split("\n")
    kinds = r"# .*|--- a/vllm/\S+\.py|\+\+\+ b/vllm/\S+\.py|@@ -\d+,0 \+\d+,\d+ @@|\+.*|"
    assert [line for line in lines if not re.fullmatch(kinds, line)] == []
    hunks = [line for line in lines if line.startswith("@@")]
    begin = lines.index(hunks[0]) + 1
    assert len(hunks) == 1 and lines[begin:] == [*(f"+{x}" for x in ADDED.splitlines()), ""]
    assert f"vLLM {release}:" in lines[0]
    patch = parse(FILES[release].read_bytes())
    assert patch.path == "vllm/__init__.py"
    assert len(patch.patched_of) == (2 if make_patches.release_key(release) < [0, 17] else 1)


def test_the_lines_hold_no_logic_of_their_own() -> None:
    tree = ast.parse(ADDED)
    named = [n for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom))]
    assert [ast.unparse(n) for n in named] == [
        "import os",
        "import sys",
        "from kvoffload_patch._bootstrap import plugin",
    ]
    start_up = (ROOT / "kvoffload_patch.pth").read_text()
    off = '.strip().lower() in ("", "0", "false", "no", "off")'
    assert off in ADDED and off in start_up


@pytest.mark.parametrize("release", RELEASES)
def test_the_script_makes_the_same_bytes(release: str) -> None:
    ((name, text),) = make_patches.make([release], source)
    assert name == FILES[release].name
    assert text.encode() == FILES[release].read_bytes()


@pytest.mark.parametrize("release", RELEASES)
def test_applied_and_reverted_on_its_release(release: str, tmp_path: Path) -> None:
    patch = parse(FILES[release].read_bytes())
    builds = make_patches.builds(release, source)
    assert source(release) in builds
    assert {sha256(text) for text in builds} == set(patch.patched_of)
    for text in builds:
        patched = patch.apply(text)
        assert (patch.state(text), patch.state(patched)) == ("released", "patched")
        assert patch.revert(patched) == text and patched != text
        assert ast.get_docstring(ast.parse(patched)) == ast.get_docstring(ast.parse(text))
        for tool in ("patch", "git"):
            _apply_with(tool, FILES[release], text, patched, tmp_path)


def _apply_with(tool: str, file: Path, text: bytes, patched: bytes, site: Path) -> None:
    """Apply and revert with `patch` or `git` in `site`, if there is such a command."""
    if shutil.which(tool) is None:
        return
    target = site / "vllm/__init__.py"
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(text)
    commands = {"patch": ["patch", "-p1", "--fuzz=0", "-i"], "git": ["git", "apply"]}
    command = commands[tool] + (["--unidiff-zero"] if tool == "git" else [])
    # Not in the repository that a temporary folder may lie in: git then skips files silently.
    environ = {**os.environ, "GIT_CEILING_DIRECTORIES": str(site.parent)}
    for options, after in (([], patched), (["-R"], text)):
        done = subprocess.run(
            [*command[:2], *options, *command[2:], str(file)],
            cwd=site,
            env=environ,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert target.read_bytes() == after
    assert [p.name for p in target.parent.iterdir()] == ["__init__.py"]  # no .orig, no .rej


def test_the_lines_come_before_the_first_import() -> None:
    with_future = b'"""D."""\nfrom __future__ import annotations\n\nimport a\n'
    patch = parse(make_patches.render("9.9.1", [with_future]).encode())
    assert patch.after == 2
    for text in (b'import a\n"""D."""\n', b"x = f()\n", b""):
        patch = parse(make_patches.render("9.9.1", [text]).encode())
        assert patch.after == 0
    other_build = b"import a\n" * 9 + with_future
    with pytest.raises(make_patches.CannotPatch, match="too late"):
        make_patches.render("9.9.1", [with_future, other_build])
    inside = b'"""D."""\n"""\n' + b"text\n" * 9 + b'"""\n'
    with pytest.raises(make_patches.CannotPatch, match="or change it"):
        make_patches.render("9.9.1", [b'"""D\n"""\n\n', inside])
    with pytest.raises(make_patches.CannotPatch, match="expected a release such as"):
        make_patches.builds("0.34.0rc1", lambda _: b"")


GOOD = f"""\
# words
# sha256 vllm/a.py {"1" * 64} {"2" * 64}
--- a/vllm/a.py
+++ b/vllm/a.py
@@ -1,0 +2,2 @@
+one
+
"""


def test_lines_are_added_and_taken_out_by_line() -> None:
    old, new = b"a\nb\n", b"a\none\n\nb\n"
    patch = replace(parse(GOOD.encode()), patched_of={sha256(old): sha256(new)})
    assert patch.apply(old) == new
    assert patch.revert(new) == old
    assert patch.state(b"a\nb") == "unknown"


def test_a_result_with_another_hash_is_not_used() -> None:
    old = b"a\nb\nc\n"
    patch = replace(parse(GOOD.encode()), patched_of={sha256(old): sha256(b"other")})
    with pytest.raises(BadPatchFile):
        patch.apply(old)
    with pytest.raises(BadPatchFile):
        patch.revert(b"other")


@pytest.mark.parametrize(
    ("found", "instead"),
    [
        ("+one", "-one"),
        ("+one", " one"),
        ("@@ -1,0", "@@ -1,1"),
        ("@@ -1,0", "@@ -5,0"),
        ("+2,2", "+3,2"),
        ("+2,2", "+2,1"),
        ("+2,2", "+2,3"),
        ("+2,2", "+2,0"),
        (" @@\n", " @@\n" + GOOD[GOOD.index("@@") :]),
        (GOOD, GOOD + GOOD[GOOD.index("@@") :]),
        (GOOD, GOOD + GOOD),
        (GOOD[GOOD.index("@@") :], ""),
        (GOOD[GOOD.index("+one") :], ""),
        ("# words", "# sha256 vllm/b.py " + "1" * 64 + " " + "2" * 64),
        ("b/vllm/a.py", "b/vllm/b.py"),
        ("a/vllm/a.py", "a/other/a.py"),
        ("# sha256", "# sha"),
        ("# words", "words"),
        (GOOD[GOOD.index("---") :], ""),
    ],
)
def test_a_file_that_does_anything_else_is_not_read(found: str, instead: str) -> None:
    assert found in GOOD and parse(GOOD.encode()).lines == (b"one\n", b"\n")
    with pytest.raises(BadPatchFile):
        parse(GOOD.replace(found, instead, 1).encode())


def test_a_file_that_cannot_be_written_is_as_it_was_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.py"
    path.write_bytes(b"old")

    def failing(name: str, path: Path) -> None:
        raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr(patch_files.os, "replace", failing)
    with pytest.raises(PermissionError) as raised:
        patch_files.write(path, b"new")
    assert raised.value.filename == str(path)
    assert list(tmp_path.iterdir()) == [path], "no temporary file is left"
    assert path.read_bytes() == b"old"


def test_a_key_that_comes_when_the_file_is_in_place_is_what_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.py"
    path.write_bytes(b"old")
    put = os.replace

    def interrupted(name: str, path: Path) -> None:
        put(name, path)
        raise KeyboardInterrupt

    monkeypatch.setattr(patch_files.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        patch_files.write(path, b"new")


def test_a_file_is_replaced_and_keeps_its_mode(tmp_path: Path) -> None:
    path, linked = tmp_path / "a.py", tmp_path / "cache"
    path.write_bytes(b"old")
    path.chmod(0o640)
    os.link(path, linked)  # as installers do
    patch_files.write(path, b"new")
    assert (path.read_bytes(), linked.read_bytes()) == (b"new", b"old")
    assert path.stat().st_mode & 0o777 == 0o640
