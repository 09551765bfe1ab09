"""Records on vLLM's own statistics, through vLLM's own encoder and decoder."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvoffload_patch.integration import carrier
from kvoffload_patch.integration.frontend import hooks

RECORD = {"model_name": "m", "values": [["hit_tokens", [], 5], ["copy_seconds", ["load"], [0.5]]]}


def sent(*, record: dict | None) -> Any:
    """What the engine core sends: every field of it differs from its default."""
    stats = SchedulerStats(num_running_reqs=3, step_counter=7, kv_cache_usage=0.25)
    if record is not None:
        carrier.put_on(stats, record)
    outputs = EngineCoreOutputs(
        engine_index=2, scheduler_stats=stats, finished_requests={"a"}, wave_complete=4
    )
    return MsgpackEncoder().encode(outputs)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the front end was handed."""
    found: list[Any] = []
    monkeypatch.setattr(hooks, "publish", lambda *args: found.append(args))
    return found


def decoder(kind: Any = EngineCoreOutputs) -> MsgpackDecoder:
    """The front end's, made through the hook."""
    made = MsgpackDecoder.__new__(MsgpackDecoder)
    hooks.decoder_init(made.__init__, made, (kind,), {})  # type: ignore[misc]
    return made


def test_a_record_arrives_with_the_number_of_its_engine(taken: list[Any]) -> None:
    decoder().decode(sent(record=RECORD))
    assert taken == [(RECORD, 2)]


@pytest.mark.parametrize("record", [None, RECORD])
def test_the_message_is_the_one_that_vllm_would_have_got(record: Any, taken: list[Any]) -> None:
    plain = MsgpackDecoder(EngineCoreOutputs).decode(sent(record=None))
    found = decoder().decode(sent(record=record))
    assert isinstance(found, EngineCoreOutputs) and isinstance(
        found.scheduler_stats, SchedulerStats
    )
    assert found.scheduler_stats.num_running_reqs == 3
    for name in EngineCoreOutputs.__struct_fields__:
        if name not in ("timestamp", "scheduler_stats"):
            assert getattr(found, name) == getattr(plain, name), name
    for name in vars(plain.scheduler_stats):
        assert getattr(found.scheduler_stats, name) == getattr(plain.scheduler_stats, name), name


def test_what_vllm_does_with_a_message_that_has_come_is_still_done(taken: list[Any]) -> None:
    """It gives one without a time the time at which it came."""
    timeless = EngineCoreOutputs()
    timeless.timestamp = 0.0
    sent_without = MsgpackEncoder().encode(timeless)
    assert MsgpackDecoder(EngineCoreOutputs).decode(sent_without).timestamp > 0
    assert decoder().decode(sent_without).timestamp > 0


def test_a_front_end_that_knows_nothing_of_records_skips_them() -> None:
    found = MsgpackDecoder(EngineCoreOutputs).decode(sent(record=RECORD))
    assert type(found.scheduler_stats) is SchedulerStats
    assert not hasattr(found.scheduler_stats, carrier.FIELD)


def test_vllms_own_classes_stay_as_they_are(taken: list[Any]) -> None:
    before = dict(vars(SchedulerStats)), dict(vars(EngineCoreOutputs))
    decoder().decode(sent(record=RECORD))
    assert [dict(vars(c)).keys() for c in (SchedulerStats, EngineCoreOutputs)] == [
        each.keys() for each in before
    ]
    assert type(SchedulerStats()) is SchedulerStats


def test_other_decoders_are_made_as_asked_for(taken: list[Any]) -> None:
    assert decoder(dict[str, int]).decode(MsgpackEncoder().encode({"a": 1})) == {"a": 1}
    assert decoder(None).decode(MsgpackEncoder().encode([1])) == [1]


def test_a_message_that_cannot_be_extended_is_decoded_as_before(
    taken: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carrier, "message_type", lambda *args: 1 / 0)
    found = decoder().decode(sent(record=RECORD))
    assert found.scheduler_stats.num_running_reqs == 3 and taken == []
