"""How records pass from the engine core to the front end: on vLLM's own statistics.

vLLM serialises `SchedulerStats` field by field, so an attribute that is no field would be lost. The
engine core therefore gives one of these objects, at most once a second, another class: derived,
with one field more. The front end's decoder is made with a derived type of the message, whose
statistics have that field, and which hands over what it finds there. Neither changes anything of
vLLM's own classes, and a front end that knows nothing of us skips the field.

This way is the same in every release since 0.9.1. It goes wherever vLLM's statistics go: to the API
server that gets them, from every data-parallel engine, over the network where the engine is on
another machine. There is no file, socket or name that could be left behind, and an engine whose
statistics are off sends nothing. What else could have carried them:

- `SchedulerStats.kv_connector_stats`: from 0.11 on, and a connector's;
- metrics that the engine core registers with Prometheus itself: they are seen in its multiprocess
  mode only, which vLLM uses with several API servers, and on one machine;
- a file or shared memory: on one machine, to be found by each front end, and to be removed by a
  process that may be killed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Optional

from kvoffload_patch.integration.metrics import Record

FIELD = "kvoffload"

# Called with a record, and the number of the engine that it comes from.
Take = Callable[[Record, int], None]


def put_on(stats: Any, record: Record) -> None:
    """Make a record part of a `SchedulerStats` that is to be sent."""
    stats.__class__ = _stats_type()
    setattr(stats, FIELD, record)


def is_message(kind: object) -> bool:
    """Whether a type is that of the engine core's messages to the front end."""
    return isinstance(kind, type) and (kind.__module__, kind.__name__) == (
        "vllm.v1.engine",
        "EngineCoreOutputs",
    )


def message_type(plain: Any, take: Take) -> Any:
    """vLLM's `EngineCoreOutputs`, each of which hands over its record when it is decoded."""
    import msgspec

    def post_init(self: Any) -> None:
        plain.__post_init__(self)
        record = getattr(self.scheduler_stats, FIELD, None)
        if record:
            take(record, self.engine_index)

    # All fields once more: one that is given another type goes behind the others, and messages
    # are sent without names.
    return msgspec.defstruct(
        plain.__name__,
        [_field(info) for info in msgspec.structs.fields(plain)],
        bases=(plain,),
        module=plain.__module__,
        namespace={"__post_init__": post_init},
    )


def _field(info: Any) -> tuple[str, Any, Any]:
    import msgspec

    ours: Any = Optional[_stats_type()]  # Python 3.9 has no other way at run time
    kind = ours if info.name == "scheduler_stats" else info.type
    if info.default_factory is not msgspec.NODEFAULT:
        return info.name, kind, msgspec.field(default_factory=info.default_factory)
    return info.name, kind, msgspec.field(default=info.default)


@cache
def _stats_type() -> type:
    import dataclasses

    from vllm.v1.metrics.stats import SchedulerStats

    row = (FIELD, Any, dataclasses.field(default=None, repr=False))
    return dataclasses.make_dataclass(SchedulerStats.__name__, [row], bases=(SchedulerStats,))
