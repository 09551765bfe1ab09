"""Adds a vLLM release that the patch table fits: python scripts/release add X.Y.Z

Compares every build of the release with the table, plays the release's own scheduler with a faked
model, and writes what is kept of a release: digests, snapshot, patches/ file, the scheduler's
result, docs/compatibility.md and the table in README.md. The lists of supported releases are read
from these files. Ends with status 1, and says what to do, where

- the table does not fit: nothing is written;
- functions that the table names have other bodies than in the release before: nothing is written
  until the command is given with --reviewed, which says that somebody has read them;
- the scheduler fails: what was written before stays, to work with.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from packaging.version import Version

from kvoffload_patch.integration.patch_table.verified import DATA
from kvoffload_patch.patching import PatchRefused
from scripts import ROOT
from scripts.bench import arguments
from scripts.matrix import results, scheduler
from scripts.release import compatibility, digests, patches, readme, snapshot
from scripts.release.sources import fetch_builds

STEPS = 'see "How to add a vLLM release" in CONTRIBUTING.md'


class NotAdded(Exception):
    """Why a release was not added, and what to do."""


def add(release: str, reviewed: bool = False) -> None:
    """Write everything that is kept of a release.

    Raises:
        NotAdded, Differs, NotFetched, PatchRefused: as the module says.
    """
    found = digests.facts_of(release, fetch_builds(release))
    kept = digests.current()
    changed = changed_bodies(release, found, kept)
    if changed and not reviewed:
        listed = "".join(f"\n  {name}" for name in changed)
        raise NotAdded(
            f"{len(changed)} functions differ from the release before:{listed}\n"
            f"Read them, then run this again with --reviewed; {STEPS}."
        )
    DATA.write_text(digests.text_of({**kept, release: found}), encoding="utf-8")
    taken = snapshot.text_of(snapshot.take(release))
    (snapshot.FOLDER / f"{release}.json").write_text(taken, encoding="utf-8")
    for name, text in patches.make([release], patches.reader(None)):
        (ROOT / "patches" / name).write_text(text, encoding="utf-8")
    _play(release)
    compatibility.PAGE.write_text(compatibility.page(compatibility.load()), encoding="utf-8")
    readme.PAGE.write_text(readme.page(), encoding="utf-8")


def changed_bodies(
    release: str, found: digests.Facts, kept: Mapping[str, digests.Facts]
) -> list[str]:
    """Functions of a release that are in no build of the newest one kept that is older."""
    older = [known for known in kept if Version(known) < Version(release)]
    before = kept[max(older, key=Version)].bodies if older else {}
    return [name for name, texts in found.bodies.items() if not texts <= before.get(name, set())]


def _play(release: str) -> None:
    result = scheduler.play(release)
    failed = scheduler.failed(result["scenarios"])
    for name, text in failed.items():
        print(f"  {name}: {text.strip().splitlines()[-1]}", flush=True)
    if failed:
        raise NotAdded(f"{len(failed)} scenarios of its scheduler failed; {STEPS}.")
    results.write(results.FOLDER, result)


def main() -> None:
    """Add the release that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("release", type=arguments.release, metavar="X.Y.Z")
    parser.add_argument("--reviewed", action="store_true", help="changed functions were read")
    given = parser.parse_args()
    failures = (NotAdded, digests.Differs, PatchRefused, snapshot.NoSnapshot, patches.CannotPatch)
    try:
        add(given.release, given.reviewed)
    except failures as error:
        raise SystemExit(f"error: {given.release} was not added: {error}") from None
    print(f"{given.release} is added; say it in CHANGELOG.md and run scripts/test.")
