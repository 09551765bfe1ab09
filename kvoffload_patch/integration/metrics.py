"""Every metric of the tier: name, kind, labels and what it means; the table in docs is made of it.

The engine core measures and the front end publishes, in another process. What passes between them
are records: what was added to counters since the record before, what gauges are now, and what
histograms have seen. `carrier` says how.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from kvoffload_patch.links import FAILURES

Kind = Literal["counter", "gauge", "histogram"]
# {"model_name": str, "values": [[name, [label, ...], value], ...]}; plain, as it is serialised.
# The value of a histogram is a list of what it has seen.
Record = dict[str, Any]

PREFIX = "kvoffload_"
# What the log says where they fail, with the error.
STOPPED = (
    "kvoffload_patch: /metrics of the CPU tier stand still: %r; the tier works on, restart the "
    "server to have them again."
)
# vLLM's own labels, which every metric has before those of its own.
COMMON_LABELS = ("model_name", "engine")
LOADS, STORES = "load", "store"
DIRECTION = (("direction", (LOADS, STORES)),)
FAILED_COPY = (*DIRECTION, ("reason", FAILURES))
# What `tier_state` says: exactly one of these is 1.
STATES = ON, PAUSED, NOT_NEEDED, REFUSED, FAILED = (
    "on", "paused", "not_needed", "refused", "failed",
)  # fmt: skip

# Why blocks are not stored, as labels and counters of the tier name it.
NOT_STORED = ("no_room", "overwritten", "few_uses", "decode", "opted_out", "paused")
# Why blocks leave the tier otherwise than to make room, as labels and counters of the tier name it.
REMOVED = ("reset", "emptied", "weights", "resized", "failed", "invalid")

# Labels of `build_info` besides the versions.
ABOUT = ("load_mode", "store", "eviction", "integrity", "copies")

# Upper bounds of histograms of times.
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_SINCE = "from the plan of its step to the step in which the scheduler learns that it is done"


# Of a metric in bytes, which stands below its like in blocks.
_SAME = "The same in bytes, over all ranks of the engine."


class Metric(NamedTuple):
    """One metric.

    Attributes:
        name: without the prefix, and without the ``_total`` that counters end with.
        kind: as Prometheus knows it.
        help: what it means, with its unit.
        labels: besides the common ones: each with all its values, or with none where these are not
            known beforehand.
        buckets: upper bounds of a histogram.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def label_names(self) -> tuple[str, ...]:
        """Its own labels."""
        return tuple(name for name, _ in self.labels)


METRICS = (
    Metric(
        "build_info",
        "gauge",
        "1 for the labels that hold: which versions run, and how blocks are stored, evicted, "
        "copied; 0 for those before `kvoffload set` changed them.",
        (("version", ()), ("vllm_version", ()), *((name, ()) for name in ABOUT)),
    ),
    Metric(
        "tier_state",
        "gauge",
        "1 for the state that the tier is in, 0 for the others: on; paused by command, or "
        "after weights were updated; not_needed, as prefix caching is off; refused at start; "
        "failed and detached since.",
        (("state", STATES),),
    ),
    Metric(
        "tier_off_info",
        "gauge",
        "1 where the tier is off; the label says why, in a sentence.",
        (("reason", ()),),
    ),
    Metric("growing", "gauge", "1 while more CPU slots are to become usable."),
    Metric("capacity_blocks", "gauge", "CPU slots usable so far; each holds a block."),
    Metric("capacity_bytes", "gauge", _SAME),
    Metric("used_blocks", "gauge", "CPU slots in use, those being written included."),
    Metric("used_bytes", "gauge", _SAME),
    Metric(
        "gpu_prefix_ratio",
        "gauge",
        "Of a prefix that nobody uses and the tier has, what the GPU keeps, from its head on; 1: "
        "all of it, as vLLM does by itself.",
    ),
    Metric("queried_tokens", "counter", "Tokens that admitted requests did not find on the GPU."),
    Metric("hit_tokens", "counter", "Of these, the tokens that the tier had."),
    Metric(
        "recomputed_tokens",
        "counter",
        "Queried tokens that were no hits: they were computed, unless a KV connector had them, or "
        "they are of a prompt's last block, which vLLM leaves out of hits and the tier loads.",
    ),
    Metric(
        "recomputed_hit_tokens",
        "counter",
        "Of these, the tokens that the tier had: their load would have taken clearly longer than "
        "computing them (KVOFFLOAD_RECOMPUTE).",
    ),
    Metric(
        "loaded_tokens",
        "counter",
        "Tokens of the blocks loaded; with several KV cache groups, on average over these. More "
        "than hit_tokens where a request went, or its blocks were reused, before it was admitted, "
        "and by a prompt's last block, which is no hit.",
    ),
    Metric("loaded_blocks", "counter", "Blocks loaded; one of each KV cache group counts once."),
    Metric("loaded_bytes", "counter", _SAME),
    Metric("stored_blocks", "counter", "Blocks stored; one of each KV cache group counts once."),
    Metric("stored_bytes", "counter", _SAME),
    Metric("evicted_blocks", "counter", "Blocks thrown out to make room."),
    Metric("evicted_bytes", "counter", _SAME),
    Metric(
        "removed_blocks",
        "counter",
        "Blocks that left the tier otherwise, those still being stored included; reset: vLLM's "
        "prefix cache was, as at sleep; emptied: by command; weights: the model's were updated; "
        "resized: by command, to less; failed: a copy of them did; invalid: a KV connector had "
        "not filled the GPU's blocks that they are copies of.",
        (("reason", REMOVED),),
    ),
    Metric("removed_bytes", "counter", _SAME, (("reason", REMOVED),)),
    Metric(
        "dropped_blocks",
        "counter",
        "Blocks that were not stored; no_room: every slot was being read or written; overwritten: "
        "the GPU had lost them before, as happens while the tier grows; few_uses: they had been "
        "used less than KVOFFLOAD_STORE_MIN_USES says; decode: an answer filled them, and "
        "KVOFFLOAD_STORE_DECODE is off; opted_out: their request asked for it; paused: the tier "
        "was, by command or after an update of weights.",
        (("reason", NOT_STORED),),
    ),
    Metric("dropped_bytes", "counter", _SAME, (("reason", NOT_STORED),)),
    Metric(
        "skipped_blocks",
        "counter",
        "Blocks that were computed and need no store; held: the tier had them already.",
        (("reason", ("held",)),),
    ),
    Metric("skipped_bytes", "counter", _SAME, (("reason", ("held",)),)),
    Metric(
        "failed_blocks",
        "counter",
        "Blocks whose copy failed; raised: the device, its driver or the copy itself raised; late: "
        "it was still queued at its deadline; no_slots: the CPU memory for it could not be had; "
        "mismatch: it brought other bytes than were stored; not_stored: what it was to load had "
        "failed to be stored on its rank.",
        FAILED_COPY,
    ),
    Metric("failed_bytes", "counter", _SAME, FAILED_COPY),
    Metric("failed_copies", "counter", "Copies that failed, of however many blocks.", FAILED_COPY),
    Metric("compared_copies", "counter", "Loads that are compared with checksums."),
    Metric(
        "mismatched_copies",
        "counter",
        "Loads that brought other bytes than were stored, by their checksums; among failed_copies.",
    ),
    Metric("copies", "counter", "Copies that ended, failed ones included.", DIRECTION),
    Metric(
        "copy_seconds",
        "histogram",
        f"Time of a copy on the scheduler's clock, {_SINCE}; its wait for other copies and for "
        "the forward pass is part of it.",
        DIRECTION,
        _SECONDS,
    ),
    Metric(
        "copy_bytes_per_second",
        "histogram",
        f"Bytes of a copy over all ranks by its time, {_SINCE}: a lower bound of the bandwidth.",
        DIRECTION,
        (1e8, 2e8, 5e8, 1e9, 2e9, 5e9, 1e10, 2e10, 3e10, 4e10, 5e10, 6e10, 1e11),
    ),
    Metric(
        "load_slowdown",
        "gauge",
        "How long loads take lately, in times of what they took when the tier was opened; 1 before "
        "any was measured. Others may use the bus, or the host be late.",
    ),
    Metric("queued_copies", "gauge", "Copies planned and not known to be done.", DIRECTION),
    Metric("parked_requests", "gauge", "Requests that wait for a load beside the step."),
    Metric(
        "parked_seconds",
        "histogram",
        "Time that a request waited beside the step, for its own load or another's; aborted ones "
        "are not counted.",
        (),
        _SECONDS,
    ),
    Metric(
        "loading_requests",
        "counter",
        "Requests for which loads were begun, within their step (inline) or beside it (parked).",
        (("mode", ("inline", "parked")),),
    ),
    Metric(
        "stalled_seconds",
        "counter",
        "Time that loads within a step were expected to hold its requests up, summed over these "
        "as KVOFFLOAD_MAX_STALL_MS counts it.",
    ),
)
BY_NAME = {metric.name: metric for metric in METRICS}
