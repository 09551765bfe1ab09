"""`kvoffload doctor`: all checks in turn, then every problem with its remedy."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Sequence

from kvoffload_patch import __version__, _bootstrap
from kvoffload_patch.cli.doctor import arming, copies, limits, memory, numa, release
from kvoffload_patch.cli.doctor.findings import Finding
from kvoffload_patch.cli.options import EXIT_OK, EXIT_REFUSED, Parser
from kvoffload_patch.config import ConfigError, Settings, as_given
from kvoffload_patch.memory import MemoryRefused, check_capacity

_DESCRIPTION = """\
Look at everything that a start of vLLM with the CPU tier rests on, and say what would be chosen and
what is wrong. Starts two short child processes: one that copies memory, one that imports vLLM."""


def main(argv: Sequence[str]) -> int:
    """Print what was found; the exit status says whether vLLM would get a tier."""
    parser = Parser(
        prog="kvoffload doctor",
        description=_DESCRIPTION,
        epilog="examples:\n  kvoffload doctor\n  kvoffload --cpu-gib 64 doctor\n"
        "  kvoffload doctor --json\n"
        "exit status: 0 a tier would be served; 2 refused, and the problems say why.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    as_json = parser.parse_args(argv).json
    findings = examine()
    print(as_data(findings) if as_json else as_text(findings))
    return EXIT_REFUSED if any(finding.refused for finding in findings) else EXIT_OK


def examine() -> list[Finding]:
    """Every check; where vLLM or the settings are refused, what rests on them is left out."""
    status = _bootstrap.status()
    findings = [*release.switched_off(), *release.check(status)]
    try:
        settings, wrong = Settings.from_env(), False
    except ConfigError:  # the verdict says it
        settings, wrong = Settings(), True
    sizes = memory.check(settings)
    if status["verdict"] == _never_fits(settings):  # said once
        sizes[-1] = dataclasses.replace(sizes[-1], problem="", refused=False)
    gpu, chosen = numa.has_gpu(), sizes[-1].value
    assert isinstance(chosen, int)
    findings += sizes if not wrong else sizes[:-1]
    on_cpu = not gpu and str(status["release"]).endswith("+cpu")
    findings += limits.check(chosen, gpu, on_cpu) + numa.check() + copies.check(gpu)
    return findings + (arming.check() if status["verdict"] == "ok" else [])


def _never_fits(settings: Settings) -> str:
    """Why the tier can never fit here, whatever else runs; empty if it can."""
    try:
        check_capacity(settings.cpu_bytes)
    except MemoryRefused as refusal:
        return str(refusal)
    return ""


def as_data(findings: Sequence[Finding]) -> str:
    """One JSON object."""
    problems = [f for f in findings if f.problem]
    return json.dumps(
        {
            "version": __version__,
            "ok": not any(f.refused for f in findings),
            "problems": [as_given(f.sentence) for f in problems],
            "findings": [dataclasses.asdict(f) for f in findings],
        },
        indent=1,
    )


def as_text(findings: Sequence[Finding]) -> str:
    """A line for each finding, then the problems, then the verdict."""
    lines = [f"kvoffload_patch {__version__}, Python {platform.python_version()}"]
    width = max(len(f.name) for f in findings)
    group = ""
    for f in findings:
        lines += [f.group] * (f.group != group)
        lines.append(f"  {f.name:{width}}  {f.found}")
        group = f.group
    problems = [f for f in findings if f.problem]
    lines += ["problems"] * bool(problems)
    lines += [f"  {'refused' if f.refused else 'note'}: {as_given(f.sentence)}" for f in problems]
    refused = any(f.refused for f in findings)
    verdict = "vLLM would not start with a CPU tier." if refused else "vLLM would get a CPU tier."
    return "\n".join([*lines, f"verdict: {verdict}"])
