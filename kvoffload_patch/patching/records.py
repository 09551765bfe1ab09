"""What was verified of a host: its releases, and digests of functions and files.

Owns the format of the data file and how it is read. A digest holds from the release that it is
listed under until the next one that is listed, because most functions are the same in many
releases. Several digests of a release stand for builds that differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

Digests = Mapping[str, frozenset[str]]
_Eras = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Records:
    """The content of a data file.

    Attributes:
        releases: verified ones, oldest first.
        table: fingerprint of the table that they were verified with.
        bodies: by "module:attribute", digests by the first release that has them.
        files: by module, digests by the first release that has them.
        candidates: what was read of releases that have a candidate and nothing final.
    """

    releases: tuple[str, ...]
    table: str
    bodies: _Eras
    files: _Eras
    candidates: tuple[str, ...] = ()

    @classmethod
    def load(cls, file: Path) -> Records:
        """Read a data file."""
        found = json.loads(file.read_text(encoding="utf-8"))
        lists = {name: tuple(found.get(name, ())) for name in ("releases", "candidates")}
        return cls(**{**found, **lists})

    def nearest(self, release: Version) -> str:
        """The newest verified release that is not newer than `release`; the oldest if none is."""
        older = [known for known in self.releases if Version(known) <= release]
        return (older or self.releases)[len(older) - 1 if older else 0]

    def bodies_of(self, release: str) -> Digests:
        """Digests of functions in a verified release, by "module:attribute"."""
        return self._at(self.bodies, release)

    def files_of(self, release: str) -> Digests:
        """Digests of files in a verified release, by module."""
        return self._at(self.files, release)

    def _at(self, eras: _Eras, release: str) -> Digests:
        place = {known: index for index, known in enumerate(self.releases)}
        found: dict[str, frozenset[str]] = {}
        for name, since in eras.items():
            begun = [first for first in since if place[first] <= place[release]]
            if begun:
                found[name] = frozenset(since[max(begun, key=place.__getitem__)].split())
        return {name: digests for name, digests in found.items() if digests}
