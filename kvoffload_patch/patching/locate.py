"""Where the host is installed: its version and its source files.

Owns look-ups in installation metadata and on the import path. Must not import the host, and so
asks the import system about top-level names only: looking for a submodule imports its parents.
"""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path

from .errors import HostNotFound
from .point import Host


def installed_version(host: Host) -> str:
    """Version string of the first of the host's distributions that is installed.

    Raises:
        HostNotFound: none is installed.
    """
    for name in host.distributions:
        try:
            version = metadata.version(name)
        except (metadata.PackageNotFoundError, KeyError):  # KeyError: metadata without a version
            continue
        if version:
            return version
    names = ", ".join(host.distributions)
    raise HostNotFound(f"{host.name} is not installed (looked for {names}); {host.remedy}.")


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
