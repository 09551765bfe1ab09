"""`scripts/matrix features` on other releases than the installed one: where to run, what to print.

Each release has an environment of its own, made as `scripts/matrix engines` makes it, and a file of
results in docs/measured/features.
"""

from __future__ import annotations

import argparse
import configparser
import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version

from scripts import ROOT
from scripts.bench import arguments
from scripts.matrix import environment, overlay
from scripts.matrix.features_row import NOT_RUN
from scripts.matrix.features_when import dates
from scripts.release.known import with_cpu_build

FOLDER = ROOT / "docs" / "measured" / "features"


class Where(NamedTuple):
    """Which Python runs the tests, with which variables, and where its results go."""

    python: Path
    env: dict[str, str] | None
    release: str
    file: Path | None  # None: that of the installed release


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `where` reads."""
    builds = [*overlay.KERNELS_OF, *with_cpu_build()]
    parser.add_argument(
        "--release",
        type=arguments.one(builds, "releases out"),
        help="run on this release, in an environment of its own",
    )
    parser.add_argument(
        "--work", type=arguments.folder, help="where the environment is made (default: /tmp)"
    )
    parser.add_argument("--keep", action="store_true", help="keep it, and take one that was kept")


@contextlib.contextmanager
def where(options: argparse.Namespace, installed: str) -> Iterator[Where]:
    """The installed release, or an environment of the one asked for."""
    release = options.release
    if release is None or release == installed:
        yield Where(Path(sys.executable), None, installed, None)
        return
    folder = (options.work or Path(tempfile.gettempdir())) / f"features-{release}"
    try:
        python, env = _environment(release, folder)
        _put_as_installed(folder / "env")
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        yield Where(python, {**env, **offline}, release, FOLDER / f"{release}.json")
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)


def _environment(release: str, folder: Path) -> tuple[Path, dict[str, str]]:
    """The one that was kept there, or a new one."""
    whole = folder / "whole"  # there once nothing is missing
    if whole.exists():
        return environment.kept(folder / "env")
    shutil.rmtree(folder, ignore_errors=True)
    made = environment.make(release, folder / "env")
    whole.touch()
    return made


def _put_as_installed(env: Path) -> None:
    """Start-up file and entry points; the package itself is found by PYTHONPATH."""
    for packages in env.glob("lib/python*/site-packages"):
        shutil.copy(ROOT / "kvoffload_patch.pth", packages)
        name_entry_points(packages)


def name_entry_points(packages: Path) -> None:
    """In a folder that Python looks at: workers that Ray starts arm by vLLM's entry point alone."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    groups = setup["options.entry_points"]
    points = "\n".join(f"[{group}]{rows}" for group, rows in groups.items())
    about = packages / "kvoffload_patch-0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    named = "Metadata-Version: 2.1\nName: kvoffload_patch\nVersion: 0\n"
    (about / "METADATA").write_text(named, encoding="utf-8")
    (about / "entry_points.txt").write_text(f"{points}\n", encoding="utf-8")


def files() -> dict[str, Path]:
    """The files of results, by release, the newest first."""
    found = {file.stem: file for file in FOLDER.glob("*.json")}
    return dict(sorted(found.items(), key=lambda item: Version(item[0]), reverse=True))


def table(
    verdicts: dict[str, dict[str, str]], found: dict[str, dict[str, dict[str, Any]]]
) -> list[str]:
    """A column for each release, and below it why something was not run there.

    Args:
        verdicts: by release, then by row: what `features.verdict` says.
        found: the results that they come from.
    """
    if not verdicts:
        return []
    heads = [f"{release}, {dates(found[release].values())}" for release in verdicts]
    rows = list(next(iter(verdicts.values())))
    lines = [
        "",
        "## On other releases",
        "",
        "`python scripts/matrix features --release X.Y.Z` makes an environment of that release and",
        "runs the same tests in it, on the CPU. A number is how many have passed. Rows were run on",
        "several days: the head of a column has the first and the last.",
        "",
        f"| Shape or feature | {' | '.join(heads)} |",
        f"| --- |{' --- |' * len(verdicts)}",
    ]
    for row in rows:
        lines.append(f"| {row} | {' | '.join(_short(of[row]) for of in verdicts.values())} |")
    return lines + _reasons(verdicts)


def _short(verdict: str) -> str:
    """Its first words: what comes behind them is below the table."""
    if not verdict.startswith("green"):
        return verdict.split(":", maxsplit=1)[0]
    counted, left_out, _ = verdict.partition(f"{NOT_RUN}: ")
    return counted.replace(" passed", "") + left_out.removesuffix(": ")


def _why_not_run(verdict: str) -> str:
    """Of all or some of its tests; empty if they were run."""
    if not verdict.startswith((NOT_RUN, "green")):
        return ""
    return verdict.partition(f"{NOT_RUN}: ")[2]


def _reasons(verdicts: dict[str, dict[str, str]]) -> list[str]:
    """Each sentence once, with the rows and releases that it is said of."""
    said: dict[tuple[str, str], list[str]] = {}
    for release, of in verdicts.items():
        for row, verdict in of.items():
            why = _why_not_run(verdict)
            if why:
                # The same on each release but for its number.
                said.setdefault((row, why.replace(release, "of that release")), []).append(release)
    if not said:
        return []
    lines = ["", "Not run there, and why:", ""]
    return lines + [
        f"- {row}: {why.rstrip('.')}. {', '.join(releases)}"
        for (row, why), releases in said.items()
    ]
