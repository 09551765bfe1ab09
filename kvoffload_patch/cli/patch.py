"""`python -m kvoffload_patch patch`: put the arming lines into a file of an installed vLLM.

For images where nothing of ours may run at interpreter start. Owns options, texts and exit codes of
this command, and finds vLLM, its release and the release's patch file, without importing vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import kvoffload_patch
from kvoffload_patch.cli import patch_files
from kvoffload_patch.cli.options import EXIT_OK, Parser
from kvoffload_patch.config import VARIABLES, ConfigError, read
from kvoffload_patch.integration.patch_table.points import VLLM
from kvoffload_patch.patching import find_source, installed_version
from kvoffload_patch.patching.errors import HostNotFound

EXIT_UNKNOWN = 1
PATCHES = Path(kvoffload_patch.__file__).parent / "patches"  # in a checkout a link to patches/

# A release, also built again (.post1) or for a device (+cu118); other versions are not releases.
_RELEASE = re.compile(r"(\d+(?:\.\d+)+)(?:\.post\d+)?(?:\+[a-zA-Z0-9._-]+)?")

_WORDS = {"released": "as released", "patched": "patched by kvoffload_patch"}
_DESCRIPTION = """\
Put the lines that arm the CPU tier into vLLM's own files, take them out again, or say what is
there. Needed only where neither the start-up file nor vLLM's plugins can be used. The files are
known by their hashes, and any other file is left alone."""
_EPILOG = """\
examples:
  kvoffload patch --check
  kvoffload patch --apply
  kvoffload patch --revert --vllm /opt/image/lib/python3.12/site-packages/vllm
exit status: 0 done, was so already, or (--check) as released or patched; 1 (--check) files that are
neither; 2 refused, nothing was changed."""


class Refused(Exception):
    """One sentence: what was expected, what was found, what to do."""


class UnknownFile(Refused):
    """The file is neither as released nor as patched by us."""


class Installed:
    """One vLLM on disk and what its release's patch file says of it.

    Raises:
        Refused: there is none, its release cannot be told, or there is no patch file for it.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = _find_package() if folder is None else folder.absolute()
        if not (self.folder / "__init__.py").is_file():
            raise Refused(
                f"expected vLLM's package folder, found no __init__.py in {self.folder};"
                " give the folder named vllm, such as .../site-packages/vllm, with --vllm."
            )
        self.version = _version(None if folder is None else self.folder)
        self.release = _release(self.version)
        self.patch = patch_files.parse(_patch_file(self.release).read_bytes())
        self.file = self.folder / self.patch.path[len("vllm/") :]
        self.data = self._read()

    def state(self) -> str:
        """ "released" or "patched".

        Raises:
            UnknownFile: the file is neither.
        """
        state = self.patch.state(self.data)
        if state == "unknown":
            raise UnknownFile(self._difference())
        return state

    def change(self, apply: bool) -> None:
        """Apply the patch or revert it; raises OSError if the file cannot be written."""
        new = self.patch.apply(self.data) if apply else self.patch.revert(self.data)
        patch_files.write(self.file, new)

    def _read(self) -> bytes:
        try:
            return self.file.read_bytes()
        except OSError as error:
            raise UnknownFile(
                f"expected {self.file} of vLLM {self.version}, found that it cannot be read"
                f" ({error.strerror}); reinstall this release."
            ) from None

    def _difference(self) -> str:
        patched_of = self.patch.patched_of
        known = [f"{one[:12]} as released" for one in patched_of]
        known += [f"{one[:12]} patched" for one in patched_of.values()]
        return (
            f"expected {self.file} of vLLM {self.version} with a known sha256"
            f" ({', '.join(known)}), found {patch_files.sha256(self.data)[:12]}; reinstall this"
            " release, or revert with the version of kvoffload_patch that patched it."
        )


def main(argv: Sequence[str]) -> int:
    """Run `patch` with its arguments; returns the exit status, refusals being said on stderr."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        found = _run(arguments)
    except (Refused, ConfigError, patch_files.BadPatchFile, OSError) as error:
        refused = parser.refuse(_text(error))
        unknown = arguments.check and isinstance(error, UnknownFile)
        return EXIT_UNKNOWN if unknown else refused
    line = f"vLLM {found['vllm']} in {found['folder']}: {found['said']}"
    print(json.dumps(found, indent=1) if arguments.json else line)
    return EXIT_OK


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Do it, and what to say: the release, its folder, the file's state, and whether it changed."""
    installed = Installed(arguments.vllm)
    about = {"vllm": installed.version, "folder": str(installed.folder)}
    before = installed.state()
    after = before if arguments.check else "patched" if arguments.apply else "released"
    if before != after:
        installed.change(apply=arguments.apply)
        said = "patched" if arguments.apply else "reverted, as released"
    else:
        said = _WORDS[before] + ("" if arguments.check else " already, nothing to do")
    return {**about, "state": after, "changed": before != after, "said": said}


def _text(error: Exception) -> str:
    if isinstance(error, OSError):
        return (
            f"expected to read and write {error.filename}, found {error.strerror};"
            " nothing was changed; run this as the user who may write there, and see that there is"
            " room."
        )
    if isinstance(error, patch_files.BadPatchFile):
        return f"expected a patch file of ours, found {error}; reinstall kvoffload_patch."
    return str(error)


def _find_package() -> Path:
    try:
        return find_source(VLLM.package).parent
    except FileNotFoundError:
        raise Refused(
            f"expected vLLM in the environment of {sys.executable}, found none;"
            " run the Python that has it, or give its package folder with --vllm."
        ) from None


def _version(folder: Path | None) -> str:
    """The version from KVOFFLOAD_VLLM_VERSION, or of the distribution beside `folder`."""
    assumed = read(VARIABLES["KVOFFLOAD_VLLM_VERSION"], os.environ)
    if assumed:
        return str(assumed)
    try:
        return installed_version(VLLM) if folder is None else _version_beside(folder)
    except HostNotFound:
        where = "this environment" if folder is None else str(folder.parent)
        raise Refused(
            f"expected metadata of {' or '.join(VLLM.distributions)} in {where}, found none;"
            " set KVOFFLOAD_VLLM_VERSION to the release."
        ) from None


def _version_beside(folder: Path) -> str:
    found = metadata.distributions(path=[str(folder.parent)])
    versions = {
        (dist.metadata["Name"] or "").lower().replace("_", "-"): dist.version for dist in found
    }
    for name in VLLM.distributions:
        if versions.get(name):
            return versions[name]
    raise HostNotFound


def _release(version: str) -> str:
    match = _RELEASE.fullmatch(version)
    if match is None:
        raise Refused(
            f"expected a release of vLLM, found version {version}, whose files nobody has listed;"
            " install a release."
        )
    return match.group(1)


def _patch_file(release: str) -> Path:
    file = PATCHES / f"vllm-{release}.patch"
    if not file.is_file():
        known = sorted((f.stem[len("vllm-") :] for f in PATCHES.glob("vllm-*.patch")), key=_key)
        span = f"{known[0]} to {known[-1]}" if known else f"none in {PATCHES}"
        raise Refused(
            f"expected a release with a patch file ({span}), found vLLM {release};"
            " install one of those, or switch the tier on in another way."
        )
    return file


def _key(release: str) -> list[int]:
    return [int(part) for part in release.split(".")]


def _parser() -> Parser:
    parser = Parser("kvoffload patch", _DESCRIPTION, _EPILOG)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--apply", action="store_true", help="add the lines")
    action.add_argument("--revert", action="store_true", help="take the lines out again")
    action.add_argument("--check", action="store_true", help="only report")
    parser.add_argument(
        "--vllm", type=Path, metavar="DIR", help="vLLM's package folder, if not the installed one"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    return parser
