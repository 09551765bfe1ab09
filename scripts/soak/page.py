"""python scripts/soak page [RESULT ...]

Writes docs/reliability.md, and a picture of each run, from results of `run`, `signals` and `fuzz`;
without any from all in docs/measured/soak.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from scripts import ROOT
from scripts.bench import arguments
from scripts.bench.common import pyplot, say, table
from scripts.soak import fuzz, signals
from scripts.soak.run import MOST_GROWTH
from scripts.soak.traffic import TIE

FOLDER = ROOT / "docs/measured/soak"
PAGE = ROOT / "docs/reliability.md"
SERIES = {"rss_mib": "RSS, MiB", "threads": "threads", "descriptors": "descriptors"}

HEAD = """# Reliability

Made by `python scripts/soak page` from the runs in `docs/measured/soak`; do not edit.

`python scripts/soak run` starts `vllm serve` with a tier that is too small for what is asked, and
lets users ask at random: conversations turn by turn, answers broken off, connections closed at
once, cache salts, bursts, resets of the prefix cache, memory taken beside it. Every answer is
compared with that of plain vLLM, which answered each turn once, alone. "Tied": another token where
plain vLLM's two best were closer than {tie:g} (natural log of their ratio), which another batch
may decide. "Left": broken off, and right so far. Faults are put into the tier's copies from
outside the package: a bit of a CPU slot changes, a copy is refused, or takes 2 s. A tier of which 8
copies fail within 60 s is detached, as it is made: "did not stay on" where faults are that many.
Plain vLLM serves the same traffic beside it: a young vLLM grows by itself, and what it holds is the
measure of what the other one may.
"""


FAULTS = (
    (
        "a copy is refused or raises",
        "beside the step: recomputed; promised: the engine ends before a token; 8 within "
        "60 s: the tier is detached",
        "at once",
        "`tests/engine/test_failures.py`, `tests/transfer/test_queue.py`",
    ),
    (
        "a copy never ends",
        "it has failed; or the step that comes next raises it; or, where that step waits for it, "
        "the process of the rank ends with a sentence, and with it the engine, unless it is a "
        'process of the user\'s ([copies.md](copies.md), "deadline"); on the CPU a copy is part '
        "of its step, and holds it up",
        "60 s without progress; 30 s more until the process ends",
        "`tests/transfer/test_deadline.py`; a real engine and a server: "
        "`tests/engine/test_hung_copies.py`",
    ),
    (
        "a bit changes, a store never arrived, slots are mixed up",
        '[copies.md](copies.md), "Checksums"',
        "at the load",
        "`tests/transfer/backends/test_checksums.py`, `tests/engine/test_failures.py`",
    ),
    (
        "the tier's own code raises",
        "it is detached, the engine serves on",
        "that step",
        "`tests/engine/test_failures.py`",
    ),
    (
        "memory runs out, or the driver refuses, while the tier grows",
        "it keeps what it has",
        "at once",
        "`tests/transfer/memory/test_growth.py`",
    ),
    (
        "opening a rank fails part-way",
        "refused, and no thread, descriptor, mapping or shared file is left",
        "1,800 s for a rank that does not answer",
        "`tests/integration/worker/test_tier.py`",
    ),
    (
        "a rank dies",
        "vLLM's own error, which names it, and none of the tier's beside it",
        "60 s for the tier's processes to end; 300 s where the tier waits for a rank's answer",
        "`tests/engine/test_signals.py`, `tests/engine/test_processes.py`",
    ),
    (
        "ranks share no memory: the kernel refuses it, or each has a container",
        "ranks wait for all their slots before the engine serves",
        "at the start",
        "`tests/integration/test_slot_counts.py`",
    ),
    (
        "a cgroup's limit",
        "the size respects it, 1 GiB stays free, and more is refused with its name",
        "at the start",
        "`tests/test_memory.py`; a real engine in a real cgroup: `tests/engine/test_faults.py`",
    ),
    (
        "/dev/shm is full, or cannot be written to",
        "as with plain vLLM: the tier has nothing there; an engine that needs it does not start",
        "at the start",
        "`tests/engine/test_faults.py`; `kvoffload doctor` says it before",
    ),
    (
        "any bytes as a variable, a patch file or a control message",
        "a value, or the one error that is documented; soon, and in little memory",
        "2 s for a client's question",
        "`tests/scripts/soak/test_fuzz.py`, `python scripts/soak fuzz`",
    ),
    (
        "the clock is set, by hours and back",
        "nothing: no interval is measured by it",
        "none",
        "`tests/engine/test_faults.py`, `tests/test_constants.py`",
    ),
    (
        "SIGTERM, SIGINT, SIGKILL of the server, the engine or a worker while starting, "
        "streaming, idle",
        "as with plain vLLM; no process, file or socket is left once it has ended, or was killed",
        "30 s: what takes longer hangs, as plain vLLM does in places",
        '`tests/engine/test_signals.py`; beside plain vLLM `scripts/soak signals`: "Signals"',
    ),
    (
        "an engine ends, and another one begins in its process",
        "a tier of its own; no thread, descriptor or mapping of the one before is left",
        "at its end",
        "`tests/engine/test_restart.py`",
    ),
    (
        "weights change, in sleep or by RPC",
        "what was held is forgotten, or waits for a reset",
        "before the next lookup",
        "`tests/engine/test_sleep.py`",
    ),
)


def section(name: str, found: dict[str, Any]) -> str:
    """What is said of one run."""
    about, counts, metrics = found["machine"], found["counts"], found["metrics"]
    with_faults = ", ".join(f"{kind} every {s:g} s" for kind, s in found["inject"].items())
    ranks = found.get("ranks", 1)  # earlier runs do not say it
    on = "" if ranks == 1 else f"{ranks} ranks, "
    order = "conversations in turns, " if found.get("in_turns") else ""
    side = f"with the tier, {on}{order}{with_faults or 'no faults'}"
    tier = f"tier of {found['cpu_gib']:g} GiB, checksums `{found['integrity']}`, "
    beside = found["beside"]
    clean = "Clean." if not found["unclean"] else f"Not clean: {'; '.join(found['unclean'])}."
    rows = [
        ("answers right, tied, wrong", _counts(counts, "right", "tied", "wrong")),
        ("the same of plain vLLM beside it", _counts(beside["counts"], "right", "tied", "wrong")),
        ("requests failed; left early", _counts(counts, "failed", "left")),
        ("bursts, resets, memory taken", _counts(counts, "bursts", "resets", "pressures")),
        ("blocks stored, loaded, evicted", _metrics(metrics, "stored", "loaded", "evicted")),
        ("faults made", _pairs(found["faults"]) or "none"),
        ("loads that brought other bytes than were stored", _metric(metrics, "mismatched_copies")),
        ("copies failed, those included", _metric(metrics, "failed_copies")),
        ("growth from the second quarter to the last", _pairs(found["growth"])),
        ("the same of plain vLLM beside it", _pairs(beside["growth"])),
        ("processes, files in shared memory left", _left(found)),
        ("seconds to end after SIGTERM", f"{found['ended_after_s'] or 0:.1f}"),
    ]
    if "least_share" in found:
        rows.insert(5, ("least part of a prefix kept on the GPU", f"{found['least_share']:.2f}"))
    lines = "\n".join(f"| {what} | {value} |" for what, value in rows)
    return (
        f"## {found['minutes']:g} min {side}\n\n{about['date'][:10]}. "
        f"{clean} vLLM {about['vllm']}, {_device(about)}, {tier}{found['users']} users, "
        f"{found['turns']} turns in the key; the package of {about['package']}.\n\n"
        f"| | |\n| --- | --- |\n{lines}\n\n"
        f"![over time](measured/soak/{name}.png)\n"
    )


def _device(about: dict[str, Any]) -> str:
    return str(about["cpu"] if about["gpu"] == "none" else about["gpu"])


def _counts(counts: dict[str, int], *names: str) -> str:
    return ", ".join(f"{counts.get(name, 0):,}" for name in names)


def _metric(metrics: dict[str, float], name: str) -> str:
    return f"{metrics.get(f'kvoffload_{name}_total', 0):,.0f}"


def _metrics(metrics: dict[str, float], *names: str) -> str:
    return ", ".join(_metric(metrics, f"{name}_blocks") for name in names)


def _pairs(values: dict[str, float]) -> str:
    return ", ".join(f"{value:g} {name}" for name, value in values.items())


def _left(found: dict[str, Any]) -> str:
    processes = [*found["processes_left"], *found["beside"]["processes_left"]]
    return f"{len(processes)}, {len(found['files_left'])}"


def draw(found: dict[str, Any], file: Path) -> None:
    """What the server held over time."""
    plt = pyplot()
    if plt is None:
        say("no picture: matplotlib is not installed")
        return
    sheet, axes = plt.subplots(len(SERIES), 1, figsize=(8, 6), sharex=True, layout="constrained")
    sides = {"with the tier": found["samples"], "plain": found["beside"]["samples"]}
    for panel, (name, label) in zip(axes, SERIES.items()):
        for side, samples in sides.items():
            at = [sample["at_s"] for sample in samples]
            panel.plot(at, [sample[name] for sample in samples], lw=1, label=side)
        panel.set_ylabel(label)
        panel.margins(y=0.1)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    axes[0].legend(loc="lower right")
    axes[-1].set_xlabel("seconds; all processes of the server together")
    sheet.savefig(file, dpi=110)
    plt.close(sheet)


def signals_section(found: dict[str, Any]) -> str:
    """What is said of the trials of signals."""
    about, bad = found["machine"], signals.worse_ones(found)
    verdict = f"Worse with the tier: {', '.join(bad)}." if bad else "None is worse with the tier."
    packages = {c["package"] for cells in found["trials"].values() for c in cells.values()}
    return (
        f"## Signals\n\n{about['date'][:10]}, vLLM {about['vllm']}, {_device(about)}, the package "
        f"of {', '.join(sorted(packages))}. {verdict} One signal to a new server each time, by "
        "`python scripts/soak signals`: the time until its first process had ended, its status, "
        f"and processes that were left {signals.OTHERS_LIMIT_S:g} s later. What has not ended "
        f"after {signals.LIMIT_S:g} s hangs, and was killed. {_ranks(found)}The same trial can end "
        f"otherwise when it is made again.\n\n{table(signals.rows_of(found))}\n"
    )


def fuzz_section(found: dict[str, Any]) -> str:
    """What is said of inputs that atheris made up."""
    about = found["machine"]
    rows = [["target", "inputs", "branches", "slowest, s", "RSS, MiB", "found"]]
    for target, one in found["fuzzed"].items():
        names = ("number_of_executed_units", "branches", "slowest_unit_time_sec", "peak_rss_mb")
        rows.append([target, *(f"{one.get(name, 0):,}" for name in names)])
        rows[-1].append(", ".join(one["found"]) or ("nothing" if not one["status"] else "failed"))
    return (
        f"## Made-up input\n\n{about['date'][:10]}, atheris {about['atheris']}, Python "
        f"{about['python']}, {about['cpu']}, the package of {about['package']}. "
        f"`python scripts/soak fuzz --minutes {about['minutes']:g}` gave each parser inputs for so "
        "long, led by the branches that they reached: environments, patch files, control messages. "
        f"Each must give a value or the parser's own error, within {fuzz.TIMEOUT_S} s and "
        f"{fuzz.MOST_MIB:,} MiB.\n\n{table(rows)}\n"
    )


def _ranks(found: dict[str, Any]) -> str:
    if not any(name.split()[1] in signals.RANKS for name in found["trials"]):
        return ""
    return f"{' and '.join(signals.RANKS)} are the workers of a server with two ranks. "


def text(runs: dict[str, dict[str, Any]]) -> str:
    """The page, of results by name."""
    sent = {name: found for name, found in runs.items() if "trials" in found}
    fuzzed = {name: found for name, found in runs.items() if "fuzzed" in found}
    runs = {name: found for name, found in runs.items() if name not in {*sent, *fuzzed}}
    limits = _pairs(MOST_GROWTH)
    note = (
        "\nA run is clean if none of this is wrong and nothing grows by more than plain vLLM's and "
        f"{limits}.\n\n"
    )
    parts = [section(name, found) for name, found in runs.items()]
    parts += [*map(signals_section, sent.values()), *map(fuzz_section, fuzzed.values())]
    rows = "".join(f"| {' | '.join(row)} |\n" for row in FAULTS)
    faults = "## Faults, and what shows them\n\n| Fault | What happens | Deadline | Shown by |\n"
    return (
        HEAD.format(tie=TIE)
        + note
        + "\n".join([*parts, f"{faults}| --- | --- | --- | --- |\n{rows}"])
    )


def main() -> None:
    """Write the page and its pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="*", type=arguments.recorded("machine"))
    args = parser.parse_args()
    files = args.results or sorted(FOLDER.glob("*.json"))
    runs = {file.stem: json.loads(file.read_text()) for file in files}
    for name, found in runs.items():
        if "samples" in found:
            draw(found, FOLDER / f"{name}.png")
    PAGE.write_text(text(runs))
    say(f"Written: {PAGE}")
