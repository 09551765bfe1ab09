"""The vLLM releases that were verified, out of the data that `scripts/release add` writes."""

from __future__ import annotations

from pathlib import Path

from kvoffload_patch.patching import Records

DATA = Path(__file__).parent / "digests" / "vllm.json"
RECORDS = Records.load(DATA)
RELEASES = RECORDS.releases


def _minor(release: str) -> int:
    return int(release.split(".")[1])


# Of the releases verified; and, if the user wants that, of what comes right behind them.
SUPPORTED_VLLM = f">={RELEASES[0]},<0.{_minor(RELEASES[-1]) + 1}"
ATTEMPTED = f">={RELEASES[0]},<0.{_minor(RELEASES[-1]) + 2}"
