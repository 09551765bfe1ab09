"""What the ranks of an engine must have in common, and room for; every other one is refused."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from kvoffload_patch import __version__ as VERSION
from kvoffload_patch.config import GIB
from kvoffload_patch.integration.errors import TierRefused
from kvoffload_patch.integration.protocol import RankGeometry
from kvoffload_patch.memory import RESERVE_BYTES


def check_together(ranks: Sequence[RankGeometry]) -> None:
    """Raises TierRefused unless these are all ranks of one engine, and one plan fits them all."""
    refuse_errors(ranks, "cannot take part")
    _refuse_other_versions(ranks)
    _refuse_several_schedulers(ranks)
    if len({(r.num_blocks, r.device) for r in ranks}) != 1:
        found = ", ".join(f"rank {r.rank}: {r.num_blocks} on {r.device}" for r in ranks)
        raise TierRefused(
            f"expected the same KV blocks on every rank, found {found}; set "
            "--num-gpu-blocks-override to what all have room for, or KVOFFLOAD_STRICT=0 to serve "
            "without the CPU tier."
        )


def refuse_errors(answers: Sequence[Any], what: str) -> None:
    """Raises TierRefused naming every rank that has answered with an error."""
    failed = [
        f"rank {a.rank} (pid {a.pid}{_on_host(a)}) {what}: {a.error}" for a in answers if a.error
    ]
    if failed:
        raise TierRefused("; ".join(failed))


def check_size(
    hosts: Mapping[str, Sequence[RankGeometry]],
    cpu_bytes: int | None,
    num_slots: int,
    slot_bytes: int,
) -> None:
    """Raises TierRefused unless each host has memory for so many slots, of at least one block.

    Args:
        hosts: the ranks of each, with what ranks have in common counted once.
        cpu_bytes: what was asked for, over all ranks; None: a share of what hosts can give.
        num_slots: on each rank.
        slot_bytes: of a slot, over all ranks.
    """
    for host, members in hosts.items():
        needed = max(1, num_slots) * sum(r.slot_bytes for r in members)
        room = min(r.available_bytes for r in members) + sum(r.early_bytes for r in members)
        if needed + RESERVE_BYTES > room:
            fits = max(0, room - RESERVE_BYTES) / GIB
            raise TierRefused(
                f"the CPU tier would take {needed / GIB:.1f} GiB on {host}, where {fits:.1f} GiB "
                f"fit: {room / GIB:.1f} GiB are available, of which {RESERVE_BYTES / GIB:.0f} GiB "
                "stay free; lower KVOFFLOAD_CPU_GIB, or free memory."
            )
    if num_slots < 1:
        found = "auto" if cpu_bytes is None else f"{cpu_bytes / GIB:.3g}"
        raise TierRefused(
            f"expected KVOFFLOAD_CPU_GIB to hold at least one block of "
            f"{slot_bytes / GIB:.3g} GiB over all ranks, found {found}; raise it."
        )


def by_host(ranks: Sequence[RankGeometry]) -> dict[str, list[RankGeometry]]:
    """The ranks of each host."""
    found: dict[str, list[RankGeometry]] = defaultdict(list)
    for r in ranks:
        found[r.host].append(r)
    return found


def _refuse_other_versions(ranks: Sequence[RankGeometry]) -> None:
    """Plans are read by the workers' package, and hosts are installed one by one."""
    others = [f"{r.version} for rank {r.rank}{_on_host(r)}" for r in ranks if r.version != VERSION]
    if others:
        raise TierRefused(
            f"expected kvoffload_patch {VERSION} wherever a worker runs, found "
            f"{', '.join(others)}; install the same version on every host."
        )


def _refuse_several_schedulers(ranks: Sequence[RankGeometry]) -> None:
    """Schedulers of which each has one rank must decide alike; when a copy is done differs."""
    together = max(r.of_ranks for r in ranks)
    if together != len(ranks):
        raise TierRefused(
            f"expected one scheduler for all {together} ranks that carry out a step together, "
            f"found one that has {len(ranks)} of them, as with the executor external_launcher; "
            "use the executor mp or ray, or set KVOFFLOAD_STRICT=0 to serve without the CPU tier."
        )


def _on_host(answer: Any) -> str:
    """Where a rank is, if not on the engine's own host."""
    host = getattr(answer, "host", "")
    return f" on {host}" if host not in ("", os.uname().nodename) else ""
