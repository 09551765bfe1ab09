"""The settings, the installed vLLM, and whether its files match the patch points."""

from __future__ import annotations

from collections.abc import Mapping

from kvoffload_patch.cli.doctor.findings import Finding


def check(status: Mapping[str, object]) -> list[Finding]:
    """What `kvoffload_patch.status` says, the verdict being the problem if it is not ok."""
    release, points = status["release"], status["points"]
    doubts = status.get("doubts", [])
    assert isinstance(points, list) and isinstance(doubts, list)
    verdict = str(status["verdict"])
    refused = verdict != "ok"
    wrapped = sum(bool(point.get("wrapped", True)) for point in points)
    return [
        Finding(
            "vLLM",
            "release",
            str(release) if release else "not known",
            release,
            problem=verdict if refused else "",
            refused=refused,
        ),
        Finding(
            "vLLM",
            "patch points",
            "not compared" if refused else f"{len(points)} match, {wrapped} of them are wrapped",
            len(points),
        ),
        Finding("vLLM", "unverified", "; ".join(doubts) or "nothing", doubts),
        Finding("vLLM", "switch", "on" if status["enabled"] else "off", status["enabled"]),
    ]
