"""The table of variables: defaults, spellings, and one sentence for every mistake."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as with_settings
from hypothesis import strategies as st

from kvoffload_patch import _bootstrap
from kvoffload_patch._bootstrap import is_strict
from kvoffload_patch.config import (
    FALSE,
    MOST_GIB,
    TRUE,
    VARIABLES,
    ConfigError,
    Settings,
    as_given,
    is_enabled,
)


def settings(**variables: str) -> Settings:
    return Settings.from_env({f"KVOFFLOAD_{k}": v for k, v in variables.items()})


def test_defaults() -> None:
    assert settings() == Settings(
        enable=False,
        disable=False,
        strict=True,
        cpu_gib="auto",
        load_mode="auto",
        recompute="auto",
        eviction="adaptive",
        integrity="sample",
        store="auto",
        store_decode=True,
        store_min_uses=1,
        log_interval=10.0,
        vllm_version=None,
        allow_unverified=False,
        max_stall_ms=20.0,
        control=True,
        launch=None,
        options=None,
    )


def test_table_has_one_complete_row_per_field() -> None:
    rows = list(VARIABLES.values())
    assert [row.field for row in rows] == [f.name for f in dataclasses.fields(Settings)]
    for row in rows:
        assert row.name == f"KVOFFLOAD_{row.field.upper()}"
        assert row.expected and row.description
    assert VARIABLES["KVOFFLOAD_CPU_GIB"].unit == "GiB"


def test_all_that_is_wrong_is_said_at_once() -> None:
    wrong = {"KVOFFLOAD_CPU_GIB": "lots", "KVOFFLOAD_LOAD_MODE": "fast", "KVOFFLOAD_ENABLE": "?"}
    wrong |= {"KVOFFLOAD_CPU_GB": "4", "KVOFFLOAD_LOD_MODE": "auto"}
    for read in (Settings.from_env, is_enabled):
        with pytest.raises(ConfigError) as caught:
            read(wrong)
        text = str(caught.value)
        assert [name for name in wrong if text.count(f"{name} is ") != 1] == []
        assert "\n" not in text and text.endswith(".")


@pytest.mark.parametrize(("text", "gib"), [("auto", "auto"), ("AUTO", "auto"), ("65536", 65536.0)])
def test_the_size_is_a_number_or_left_to_the_machine(text: str, gib: object) -> None:
    found = settings(CPU_GIB=text)
    assert found.cpu_gib == gib
    assert found.cpu_bytes == (None if gib == "auto" else 65536 << 30)


def test_all_blocks_are_checked_before_a_step_reads_them() -> None:
    assert settings(INTEGRITY="full").load_mode == "parked"
    assert settings(INTEGRITY="sample").load_mode == "auto"
    assert settings(INTEGRITY="sample", LOAD_MODE="inline").load_mode == "inline"
    with pytest.raises(ConfigError, match="KVOFFLOAD_LOAD_MODE is 'inline' and .* is 'full'"):
        settings(INTEGRITY="full", LOAD_MODE="inline")
    with pytest.raises(ConfigError, match="KVOFFLOAD_INTEGRITY is 'some', expected one of off, "):
        settings(INTEGRITY="some")


def test_a_text_calls_settings_as_the_user_gave_them() -> None:
    text = "KVOFFLOAD_CPU_GIB is 'x', KVOFFLOAD_LOAD_MODE is 'y'."
    assert as_given(text, {}) == text
    given = {"KVOFFLOAD_OPTIONS": "KVOFFLOAD_CPU_GIB,KVOFFLOAD_OTHER,,.*"}
    assert as_given(text, given) == "--cpu-gib is 'x', KVOFFLOAD_LOAD_MODE is 'y'."


def test_the_name_that_was_meant_for_a_variable_is_that_of_a_variable() -> None:
    with pytest.raises(ConfigError) as refused:
        settings(CPU_GB="4", CPU_GIB="x")
    said = as_given(str(refused.value), {"KVOFFLOAD_OPTIONS": "KVOFFLOAD_CPU_GIB"})
    assert "KVOFFLOAD_CPU_GB is not a variable of" in said
    assert "the closest one is KVOFFLOAD_CPU_GIB; correct its name" in said
    assert "--cpu-gib is 'x', expected " in said


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings().strict = False  # type: ignore[misc]


def test_every_variable_is_read() -> None:
    found = settings(
        ENABLE="1",
        DISABLE="yes",
        STRICT="off",
        CPU_GIB="0.5",
        LOAD_MODE="parked",
        RECOMPUTE="never",
        LOAD_BY_LAYER="0",
        EVICTION="lru",
        STORE="lazy",
        STORE_DECODE="no",
        STORE_MIN_USES="3",
        GPU_PREFIXES="whole",
        COPY_BACKEND="staged",
        INTEGRITY="off",
        LOG_INTERVAL="2",
        VLLM_VERSION="0.32.0",
        ALLOW_UNVERIFIED="on",
        MAX_STALL_MS="0",
        WIPE="1",
        KEEP_ASLEEP="0",
        EMPTY_ON_UPDATE="0",
        CONTROL="0",
        LAUNCH="0a1b",
        OPTIONS="KVOFFLOAD_LOAD_MODE",
    )
    values = (
        True,
        True,
        False,
        0.5,
        "parked",
        "never",
        False,
        "lru",
        "lazy",
        False,
        3,
        "whole",
        "staged",
        "off",
        2.0,
        "0.32.0",
        True,
        0.0,
        True,
        False,
        False,
        False,
        "0a1b",
    )
    assert found == Settings(*values, options="KVOFFLOAD_LOAD_MODE")
    assert found.cpu_bytes == 1 << 29


@pytest.mark.parametrize("name", VARIABLES)
def test_empty_counts_as_unset(name: str) -> None:
    assert Settings.from_env({name: ""}) == Settings.from_env({name: "  "}) == Settings()


@pytest.mark.parametrize(("words", "value"), [(TRUE, True), (FALSE, False)])
def test_boolean_spellings(words: tuple[str, ...], value: bool) -> None:
    for word in words:
        for text in (word, word.upper(), f" {word} "):
            assert settings(ENABLE=text).enable is value
            assert settings(STRICT=text).strict is value


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("ENABLE", "maybe", "one of 1/true/yes/on or 0/false/no/off"),
        ("DISABLE", "2", "one of 1/true"),
        ("CPU_GIB", "4GiB", "a number of GiB above 0"),
        ("CPU_GIB", "0", "above 0"),
        ("CPU_GIB", "-1", "above 0"),
        ("CPU_GIB", "nan", "above 0"),
        ("CPU_GIB", "inf", "above 0"),
        ("CPU_GIB", "1e300", "65536 at most, or auto"),
        ("CPU_GIB", "65536.1", "65536 at most, or auto"),
        ("CPU_GIB", "\u0664", "above 0"),
        ("CPU_GIB", "1_000", "above 0"),
        ("LOG_INTERVAL", "86401", "86400 at most"),
        ("MAX_STALL_MS", "60001", "60000 at most"),
        ("MAX_STALL_MS", "\u0662", "0 or more"),
        ("LOAD_MODE", "Parked", "one of auto, inline, parked"),
        ("EVICTION", "LRU", "one of adaptive, arc, lru"),
        ("COPY_BACKEND", "dma", "one of auto, staged, direct, torch"),
        ("LOG_INTERVAL", "0", "a number of seconds above 0"),
        ("MAX_STALL_MS", "-0.1", "a number of milliseconds, 0 or more"),
        ("MAX_STALL_MS", "nan", "0 or more"),
    ],
)
def test_wrong_value_is_one_sentence(name: str, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(**{name: text})
    message = str(caught.value)
    assert message.startswith(f"KVOFFLOAD_{name} is {text!r}, expected ")
    assert expected in message
    assert "\n" not in message and message.endswith(".")
    assert caught.value.__suppress_context__  # one sentence even where it is not caught


@pytest.mark.parametrize(
    ("typo", "closest"),
    [
        ("KVOFFLOAD_ENABLED", "KVOFFLOAD_ENABLE"),
        ("KVOFFLOAD_CPU_GB", "KVOFFLOAD_CPU_GIB"),
    ],
)
def test_unknown_variable_names_the_closest(typo: str, closest: str) -> None:
    with pytest.raises(ConfigError, match=f"^{typo} is not a variable.*closest one is {closest}"):
        Settings.from_env({typo: "", "PATH": "/bin"})


@pytest.mark.parametrize("stray", ["KVOFFLOAD_", "KVOFFLOAD_FOO", "KVOFFLOAD_Z"])
def test_what_resembles_no_variable_of_users_names_none(stray: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.from_env({stray: "1"})
    assert str(caught.value) == (
        f"{stray} is not a variable of kvoffload_patch, correct its name or unset it (see python -m"
        " kvoffload_patch --help)."
    )


@pytest.mark.parametrize("text", ["banana", "0", "٠.١", "0.32", "0.33.1.dev5+g1", "0.32.0;x"])
def test_the_release_to_assume_looks_like_one(text: str) -> None:
    if text.startswith("0.") and ";" not in text:
        assert settings(VLLM_VERSION=text).vllm_version == text
    else:
        with pytest.raises(ConfigError, match="expected a release such as 0.32.0"):
            settings(VLLM_VERSION=text)


def test_other_variables_are_none_of_our_business() -> None:
    assert Settings.from_env({"KVOFFLOADER": "x", "kvoffload_enable": "1"}) == Settings()


def test_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVOFFLOAD_CPU_GIB", "7")
    monkeypatch.setenv("KVOFFLOAD_ENABLE", "1")
    monkeypatch.setenv("KVOFFLOAD_STRICT", "0")
    assert Settings.from_env().cpu_gib == 7
    assert is_enabled() and not is_strict()


def test_disable_wins_before_anything_else_is_read() -> None:
    assert not is_enabled({})
    assert is_enabled({"KVOFFLOAD_ENABLE": "1", "KVOFFLOAD_CPU_GIB": "wrong"})
    assert not is_enabled({"KVOFFLOAD_ENABLE": "wrong", "KVOFFLOAD_DISABLE": "1"})
    with pytest.raises(ConfigError):
        is_enabled({"KVOFFLOAD_ENABLE": "wrong"})
    with pytest.raises(ConfigError):
        is_enabled({"KVOFFLOAD_ENABLE": "1", "KVOFFLOAD_DISABLE": "wrong"})


def test_unreadable_strictness_is_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, strict in (("", True), ("wrong", True), *((word.upper(), False) for word in FALSE)):
        monkeypatch.setenv("KVOFFLOAD_STRICT", text)
        assert is_strict() is strict
    assert (_bootstrap.TRUE, _bootstrap.FALSE) == (TRUE, FALSE)


@with_settings(deadline=None)  # looking for entry points takes a while on a busy machine
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_any_text_is_a_value_or_a_config_error(text: str) -> None:
    for name in VARIABLES:
        try:
            found = Settings.from_env({name: text})
        except ConfigError as error:
            assert name in str(error) and "\n" not in str(error)
        else:
            assert found.cpu_gib == "auto" or 0 < float(found.cpu_gib) <= MOST_GIB
            assert found.max_stall_ms >= 0


def test_the_page_on_tuning_has_every_variable_its_default_and_its_values() -> None:
    text = (Path(__file__).parents[1] / "docs/tuning.md").read_text()
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| `KVOFFLOAD_")]
    found = {row[1].split("`")[1]: (row[2].strip(), row[3].strip(), row[4]) for row in rows}
    internal = {name for name, v in VARIABLES.items() if v.description.startswith("internal")}
    assert set(found) == set(VARIABLES) - internal
    words = {"True": "on", "False": "off", "None": "unset"}
    for name, (default, unit, meaning) in found.items():
        variable = VARIABLES[name]
        assert default == words.get(str(variable.default), str(variable.default)), name
        assert unit == variable.unit, name
        if variable.expected.startswith("one of ") and not isinstance(variable.default, bool):
            values = variable.expected.removeprefix("one of ").split(" or ")[0].split(", ")
            assert [value for value in values if f"`{value}`" not in meaning] == [], name


@pytest.mark.parametrize("text", ["0", "1001", "-1", "1.5", "1e2", "two", "\u0662", "00001"])
def test_uses_are_counted_by_whole_numbers(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a whole number from 1 to 1000"):
        settings(STORE_MIN_USES=text)
