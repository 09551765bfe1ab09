"""Where the host is installed: its version and its source files.

Owns look-ups in installation metadata and on the import path. Must not import the host, and so
asks the import system about top-level names only: looking for a submodule imports its parents.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib import metadata
from pathlib import Path

from .errors import HostNotFound
from .point import Host


def installed_version(host: Host) -> str:
    """Version string of the host's distribution that is installed.

    Of several that differ, the one that lists the package's files counts: an empty distribution
    of the usual name may have been left behind by another release.

    Raises:
        HostNotFound: none is installed.
    """
    versions = {name: text for name in host.distributions if (text := _version(name))}
    if not versions:
        raise HostNotFound(
            f"{host.name} is not installed for {sys.executable} (looked for "
            f"{', '.join(host.distributions)}); install it there, or use the Python that has it."
        )
    if len({text.partition("+")[0] for text in versions.values()}) > 1:
        for name, text in versions.items():
            if _owns(name, host.package):
                return text
    return next(iter(versions.values()))


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution) or ""
    except (metadata.PackageNotFoundError, KeyError):  # KeyError: metadata without a version
        return ""


def _owns(distribution: str, package: str) -> bool:
    """Whether a distribution lists the file that importing the package would execute."""
    found = metadata.distribution(distribution)
    listed = (f for f in found.files or () if f.parts == (package, "__init__.py"))
    try:
        return any(Path(str(found.locate_file(f))) == find_source(package) for f in listed)
    except FileNotFoundError:
        return False


def find_source(module: str) -> Path:
    """Path of the source file of `module`, found without importing any part of its package.

    Raises:
        FileNotFoundError: there is no such source file; the text is the path looked for.
    """
    package, *names = module.split(".")
    spec = importlib.util.find_spec(package)
    relative = Path(*names)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        base = Path(location) / relative
        for candidate in (base / "__init__.py", base.with_suffix(".py")):
            if candidate.is_file():
                return candidate
    if spec and spec.origin and not names and Path(spec.origin).suffix == ".py":
        return Path(spec.origin)
    raise FileNotFoundError(Path(package, relative).with_suffix(".py").as_posix())
