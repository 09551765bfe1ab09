"""What releases of vllm-ascend have where its table looks: digests, and tests/data/vllm_ascend.

Usage: python scripts/release ascend CLONE     CLONE is a git repository of vllm-ascend with tags

Of each minor release from 0.13 on, its last patch, final where it is and else the last candidate,
the sources are compared with the table, and headers and digests of the functions are written
down. They are read from git and not run: no release of vllm-ascend has run with this package.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import tarfile
import tempfile
from pathlib import Path

from packaging.version import InvalidVersion, Version

from kvoffload_patch.integration.patch_table import ascend
from kvoffload_patch.patching.check import release_of
from scripts import ROOT, Refused
from scripts.bench import arguments
from scripts.release.digests import Facts, facts_of, text_of
from scripts.release.snapshot import found_in
from scripts.release.snapshot import text_of as snapshot_text

FOLDER = ROOT / "tests" / "data" / "vllm_ascend"
OLDEST = Version("0.13")  # before 0.12 the runner samples by itself, and 0.12 was never released


def tags_of(names: list[str]) -> dict[str, str]:
    """The tag of each release that counts: the final one, or the last candidate.

    Args:
        names: of all tags, such as v0.23.0rc1.

    Returns:
        Tags by release, oldest release first.
    """
    found: dict[str, Version] = {}
    for name in names:
        try:
            version = Version(name)
        except InvalidVersion:
            continue
        release = str(release_of(name))
        if version >= OLDEST and (release not in found or version > found[release]):
            found[release] = version
    last: dict[int, str] = {}  # of a minor release only the last patch is read
    for release in sorted(found, key=Version):
        last[Version(release).minor] = release
    return {release: f"v{found[release]}" for release in last.values()}


def unpacked(clone: Path, tag: str, folder: Path) -> Path:
    """A folder that has `vllm_ascend/worker` as it is at a tag."""
    archive = _git(clone, "archive", tag, "vllm_ascend/worker")
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        if hasattr(tarfile, "data_filter"):  # Python 3.11.4 and later
            tar.extractall(folder / tag, filter="data")
        else:
            tar.extractall(folder / tag)
    return folder / tag


def _git(clone: Path, *args: str) -> bytes:
    done = subprocess.run(["git", "-C", str(clone), *args], capture_output=True, check=False)
    if done.returncode:
        found = done.stderr.decode(errors="replace").strip()
        raise Refused(f"expected a git clone of vllm-ascend in {clone}, found {found}; give one")
    return done.stdout


def write(clone: Path) -> None:
    """Write all that is kept of the releases in a clone.

    Raises:
        Differs: a release does not match the table.
        Refused: it is no clone, or has no such releases.
    """
    listed = _git(clone, "tag", "-l", "v*").decode()
    if not tags_of(listed.split()):
        raise Refused(
            f"expected a clone with tags of vllm-ascend, found none in {clone}; fetch them"
        )
    facts: dict[str, Facts] = {}
    candidates: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for release, tag in tags_of(listed.split()).items():
            sources = unpacked(clone, tag, Path(folder))
            if Version(tag).is_prerelease:
                candidates.append(str(Version(tag)))
            facts[release] = facts_of(release, [sources], ascend.VLLM_ASCEND, ascend.POINTS)
            taken = {"release": release, "tag": tag, **found_in(sources, ascend.POINTS, ())}
            FOLDER.mkdir(exist_ok=True)
            (FOLDER / f"{release}.json").write_text(snapshot_text(taken), encoding="utf-8")
    text = text_of(facts, ascend.VLLM_ASCEND, ascend.POINTS, candidates)
    ascend.DATA.write_text(text, encoding="utf-8")


def main() -> None:
    """Write digests and snapshots."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("clone", type=arguments.folder, metavar="CLONE")
    write(parser.parse_args().clone)
    print(ascend.DATA)
