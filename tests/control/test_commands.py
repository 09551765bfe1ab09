"""A message is a command with arguments that are known and right, or refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload_patch.control.commands import Command, read_command
from kvoffload_patch.control.errors import Refused


@pytest.mark.parametrize("name", ["status", "pause", "resume", "empty"])
def test_some_have_no_argument(name: str) -> None:
    assert read_command({"command": name}) == Command(name, {})
    with pytest.raises(Refused, match=f"expected no argument beside {name}, found 'gib'"):
        read_command({"command": name, "gib": "1"})


def test_values_are_parsed_as_variables_are() -> None:
    assert read_command({"command": "resize", "gib": "1.5"}).values == {"gib": 1.5}
    given_ = {"eviction": "lru", "load_mode": "parked", "max_stall_ms": "0", "log_interval": "5"}
    values = read_command({"command": "set", **given_}).values
    assert values == {
        "eviction": "lru", "load_mode": "parked", "max_stall_ms": 0.0, "log_interval": 5.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    "gib", ["0", "-1", "1e300", "auto", "", "nan", "\u0661", 1.5, None, "1" * 65]
)
def test_a_size_is_a_number_of_gib(gib: Any) -> None:
    whole = "expected a number of GiB above 0, 65536 at most, found .*; give such a size[.]"
    with pytest.raises(Refused, match=whole):
        read_command({"command": "resize", "gib": gib})


@pytest.mark.parametrize("text", ["", " ", 3, ["lru"], "x" * 65])
def test_a_setting_is_text_that_is_not_empty(text: Any) -> None:
    with pytest.raises(Refused, match="KVOFFLOAD_EVICTION is .*, expected one of adaptive.*; c"):
        read_command({"command": "set", "eviction": text})


def test_all_wrong_values_are_said_at_once() -> None:
    wrong = {"eviction": "x", "max_stall_ms": "-1", "load_mode": "auto"}
    with pytest.raises(Refused, match="EVICTION is 'x'.*MAX_STALL_MS is '-1'") as refused:
        read_command({"command": "set", **wrong})
    assert "LOAD_MODE" not in str(refused.value)


@pytest.mark.parametrize("name", ["resize", "set"])
def test_some_need_an_argument(name: str) -> None:
    with pytest.raises(Refused, match=f"beside {name}, found none"):
        read_command({"command": name})


@pytest.mark.parametrize("message", [{}, {"command": 1}, {"command": "exit"}, {"command": ["set"]}])
def test_what_is_no_command_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="expected one of status, pause, resume, empty, resize, set"):
        read_command(message)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
NAMES = st.sampled_from(["command", "gib", "eviction", "load_mode", "max_stall_ms"]) | st.text()


@given(st.dictionaries(NAMES, ANYTHING | st.sampled_from(["set", "resize", "pause", "1", "lru"])))
def test_whatever_is_sent_is_a_command_or_refused(message: dict[str, Any]) -> None:
    try:
        assert read_command(message).name == message["command"]
    except Refused as refusal:
        assert len(str(refusal)) < 2000
