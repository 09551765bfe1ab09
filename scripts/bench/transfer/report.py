"""What `bench transfer` found: lines, tables, targets met or missed, a picture."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from kvoffload_patch.config import VARIABLES
from scripts.bench.common import bars, pyplot, say, table, verdict

WORDS = {"store": "store", "load": "load", "inline": "load inline", "both": "both ways"}
DEFAULT = str(VARIABLES["KVOFFLOAD_INTEGRITY"].default)
MIB = 1 << 20
LEAST = 0.99  # of the speed without checksums, with those of all blocks


def named(backend: str, integrity: str) -> str:
    """What a backend with such checksums is called here."""
    return backend if integrity == DEFAULT else f"{backend} {integrity}"


def size(nbytes: int) -> str:
    """A block's bytes."""
    return f"{nbytes / MIB:.4g} MiB" if nbytes >= MIB else f"{nbytes >> 10} KiB"


def line(case: dict[str, Any]) -> str:
    """One case while the benchmark runs."""
    name = " ".join([case["backend"], case.get("layout", ""), case.get("order", "")])
    parts = []
    for kind, found in case["kinds"].items():
        text = f"{kind} {found['gb_s']['median']:.1f} GB/s {found['host_us']['median']:.0f} us"
        if "matmul" in found:
            text += f" matmul x{found['matmul']['ratio']['median']:.2f}"
        parts.append(text)
    return f"{size(case['block_bytes']):>8} {name:28} " + "; ".join(parts)


def _good(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [case for case in document["cases"] if "kinds" in case]


def _limit(document: dict[str, Any], block_bytes: int, kind: str) -> float:
    """GB/s of the plain copy measured beside this block size."""
    kind = "load" if kind == "inline" else kind
    for found in document["memcpy"]:
        if found["block_bytes"] == block_bytes:
            return float(found["kinds"][kind]["gb_s"]["median"])
    raise KeyError(block_bytes)


def share(document: dict[str, Any], case: dict[str, Any], kind: str) -> float:
    """GB/s over those of the plain copy."""
    median = float(case["kinds"][kind]["gb_s"]["median"])
    return median / _limit(document, case["block_bytes"], kind)


def text(document: dict[str, Any]) -> str:
    """Tables and verdicts."""
    parts = [_plain(document), _speeds(document), _costs(document)]
    errors = [f"{c['backend']}: {c['error']}" for c in document["cases"] if "error" in c]
    auto = [f"auto, {size(a['block_bytes'])}: {a['report']}" for a in document["auto"]]
    return "\n\n".join(filter(None, [*parts, "\n".join(errors + auto), _verdicts(document)]))


def page(document: dict[str, Any]) -> str:
    """The table of docs/mechanisms.md."""
    return _speeds(document)


def _plain(document: dict[str, Any]) -> str:
    rows = [["plain memcpy", "GB/s", "smallest", "largest", "matmul takes"]]
    for kind in ("store", "load", "both"):
        found = [m["kinds"][kind] for m in document["memcpy"]]
        if found:
            speeds = [s for f in found for s in f["gb_s"]["samples"]]
            slow = [s for f in found if "matmul" in f for s in f["matmul"]["ratio"]["samples"]]
            slower = f"{statistics.median(slow):.2f}" if slow else "-"
            values = (statistics.median(speeds), min(speeds), max(speeds))
            rows.append([WORDS[kind], *(f"{value:.1f}" for value in values), slower])
    return table(rows)


def _name(case: dict[str, Any]) -> str:
    layout = "" if case["layout"] == "apart" else f", {case['layout']}"
    return f"{case['backend']}, {size(case['block_bytes'])}{layout}, {case['order']}"


def _speeds(document: dict[str, Any]) -> str:
    """GB/s, and its share of the plain copy."""
    rows = [["GB/s (of plain memcpy)", *WORDS.values()]]
    for case in _good(document):
        cells = []
        for kind in WORDS:
            value = case["kinds"][kind]["gb_s"]
            cells.append(f"{value['median']:.1f} ({share(document, case, kind):.2f})")
        rows.append([_name(case), *cells])
    return table(rows)


def _costs(document: dict[str, Any]) -> str:
    """Host time of a step and of the process, and what matmuls suffer."""
    rows = [["host us; CPU ms; matmul takes", *WORDS.values()]]
    for case in _good(document):
        cells = []
        for kind in WORDS:
            found = case["kinds"][kind]
            cell = f"{found['host_us']['median']:.0f}; {found['cpu_ms']['median']:.1f}"
            if "matmul" in found:
                matmul = found["matmul"]
                cell += f"; {matmul['ratio']['median']:.2f}"
                if matmul["covered"]["median"] < 0.99:
                    cell += f" ({matmul['covered']['median']:.0%} of the time)"
            cells.append(cell)
        rows.append([_name(case), *cells])
    return table(rows)


def _best(document: dict[str, Any], block_bytes: int, order: str) -> list[dict[str, Any]]:
    """The cases of one size and order of the backend that `auto` has chosen for this size.

    Where it was not asked or not measured: of the one that is fastest over both orders. Either way
    of one backend, so that its strengths are not mixed with another one's.
    """
    here = [c for c in _good(document) if c["block_bytes"] == block_bytes]
    speeds: dict[str, list[float]] = {}
    for case in here:
        values = [case["kinds"][kind]["gb_s"]["median"] for kind in ("store", "load")]
        speeds.setdefault(case["backend"], []).extend(values)
    if not speeds:
        return []
    best = max(speeds, key=lambda name: statistics.mean(speeds[name]))
    chosen = [a["name"] for a in document["auto"] if a["block_bytes"] == block_bytes]
    best = chosen[0] if chosen and chosen[0] in speeds else best
    return [c for c in here if c["backend"] == best and c["order"] == order]


def _verdicts(document: dict[str, Any]) -> str:
    """For each size one backend against the targets."""
    lines = ["Targets (the backend that `auto` chooses for each size, the lower of its layouts):"]
    for block_bytes in sorted({c["block_bytes"] for c in _good(document)}):
        for order, least in (("contiguous", 0.97), ("fragmented", 0.95)):
            cases = _best(document, block_bytes, order)
            if not cases:
                continue
            name = f"{size(block_bytes)} {order} {cases[0]['backend']}"
            for kind, limit in (("store", least), ("load", least), ("both", 0.9)):
                lowest = min(share(document, case, kind) for case in cases)
                lines.append(verdict(f"{name} {WORDS[kind]} of memcpy", lowest, limit, most=False))
            slow = [f["matmul"]["ratio"]["median"] for c in cases
                    for f in c["kinds"].values() if "matmul" in f]  # fmt: skip
            lines.append(verdict(f"{name} matmul, worst way", max(slow) if slow else None, 1.15))
    return "\n".join([*lines, *_checksums(document)])


def _checksums(document: dict[str, Any]) -> list[str]:
    """What checksums of all blocks cost where none were measured beside them."""
    lines = []
    for (_, layout, nbytes, order, kind), found in _by_integrity(document).items():
        if "full" in found:
            name = f"{size(nbytes)} {layout} {order} {WORDS[kind]}, checksums of all blocks"
            share_of = found["full"] / found["off"]
            lines.append(verdict(f"{name} of none", share_of, LEAST, most=False))
    return lines


def _by_integrity(document: dict[str, Any]) -> dict[tuple[Any, ...], dict[str, float]]:
    """GB/s by checksums, for each backend, layout, block size, order and way measured without."""
    rates: dict[tuple[Any, ...], dict[str, float]] = {}
    for case in _good(document):
        backend, _, integrity = case["backend"].partition(" ")
        where = backend, case["layout"], case["block_bytes"], case["order"]
        for kind, found in case["kinds"].items():
            of = rates.setdefault((*where, kind), {})
            of[integrity or DEFAULT] = found["gb_s"]["median"]
    return {where: found for where, found in rates.items() if "off" in found}


def checksums(document: dict[str, Any]) -> str:
    """The table of docs/performance.md: without checksums, and the share of it with them."""
    rates = _by_integrity(document)
    rows = [["GB/s with `off`; share with `sample`; with `full`", *WORDS.values()]]
    for backend, layout, nbytes, order in dict.fromkeys(where[:-1] for where in rates):
        case = {"backend": backend, "layout": layout, "block_bytes": nbytes, "order": order}
        found = [rates[backend, layout, nbytes, order, kind] for kind in WORDS]
        rows.append([_name(case), *map(_shares, found)])
    said = checksums_said(document)
    return f"{table(rows)}\n\n{said}" if said else table(rows)


def checksums_said(document: dict[str, Any]) -> str:
    """How near copies with checksums of all blocks come to those without; empty: not measured."""
    shares: dict[bool, list[float]] = {False: [], True: []}
    for (*_, kind), found in _by_integrity(document).items():
        if "full" in found:
            shares[kind == "both"].append(found["full"] / found["off"])
    words = {False: "with copies one way", True: "with copies both ways at once"}
    said = [f"{words[both]} {_reached(full)}" for both, full in shares.items() if full]
    if not said:
        return ""
    return f"Figures with checksums of all blocks beside those without: {'; '.join(said)}."


def _reached(shares: list[float]) -> str:
    reached = sum(share >= LEAST for share in shares)
    middle, least = statistics.median(shares), min(shares)
    of = f"{reached} of {len(shares)} are at least {LEAST:g} of them"
    return f"{of}, the median is {middle:.3f}, the least {least:.3f}"


def _shares(found: dict[str, float]) -> str:
    shares = [f"{found[name] / found['off']:.3f}" if name in found else "-"
              for name in ("sample", "full")]  # fmt: skip
    return "; ".join([f"{found['off']:.1f}", *shares])


def draw(document: dict[str, Any], path: Path) -> None:
    """One picture: GB/s by block size for each way and order; matmuls in the last row."""
    plt, cases = pyplot(), [c for c in _good(document) if c["layout"] == "apart"]
    if plt is None or not cases:
        return
    sizes = sorted({c["block_bytes"] for c in cases})
    orders = list(dict.fromkeys(c["order"] for c in cases))
    matmul = any("matmul" in f for c in cases for f in c["kinds"].values())
    kinds = ["store", "load", "both"]
    panels = [(order, "gb_s") for order in orders]
    panels += [(order, "matmul") for order in orders] if matmul else []
    sheet, grid = plt.subplots(
        len(panels), 3, figsize=(14, 3.2 * len(panels)), layout="constrained", squeeze=False
    )
    for row, (order, what) in enumerate(panels):
        for axes, kind in zip(grid[row], kinds):
            plain = {m["block_bytes"]: m["kinds"] for m in document["memcpy"]}
            series = {"memcpy": [_value(plain.get(s), kind, what) for s in sizes]}
            for name in dict.fromkeys(c["backend"] for c in cases):
                found = {c["block_bytes"]: c["kinds"] for c in cases
                         if c["backend"] == name and c["order"] == order}  # fmt: skip
                series[name] = [_value(found.get(s), kind, what) for s in sizes]
            bars(axes, [size(s) for s in sizes], series)
            unit = "GB/s" if what == "gb_s" else "matmuls take (times)"
            axes.set_title(f"{WORDS[kind]}, {order} slots: {unit}", fontsize=9)
            axes.tick_params(labelsize=7)
            if what == "matmul":
                axes.axhline(1.0, color="0.6", lw=0.8, zorder=0)
    handles, labels = grid[0][0].get_legend_handles_labels()
    sheet.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    sheet.suptitle(
        f"{document['machine']['gpu']}, transfers of {document['gib']:g} GiB", fontsize=8
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.savefig(path, dpi=150)
    plt.close(sheet)
    say(f"Picture: {path}")


def _value(kinds: dict[str, Any] | None, kind: str, what: str) -> dict[str, Any] | None:
    if kinds is None:
        return None
    found: dict[str, Any] = kinds[kind]
    if what == "gb_s":
        return found["gb_s"]  # type: ignore[no-any-return]
    return found["matmul"]["ratio"] if "matmul" in found else None
