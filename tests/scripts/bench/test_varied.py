"""Numbers of a `tuning.py` that a measurement gives other values."""

from __future__ import annotations

from argparse import ArgumentTypeError

import pytest

from kvoffload_patch.tier import exclusive, tuning
from scripts.bench.varied import Varied, asked, tuning_of, varied


def test_a_number_has_the_other_value_where_it_is_read_until_the_end() -> None:
    own = tuning.AHEAD_TIMES
    with pytest.raises(RuntimeError), varied("AHEAD_TIMES", own + 5):
        assert exclusive.blocks_ahead(8, 3) == 3 * (own + 5)
        assert own + 5 == tuning.AHEAD_TIMES
        raise RuntimeError
    assert exclusive.blocks_ahead(8, 3) == 3 * own
    assert own == tuning.AHEAD_TIMES


def test_each_layer_has_numbers() -> None:
    layers = {
        "LOAD_GROUPS": "transfer",
        "AHEAD_PARTS": "tier",
        "BUS_AHEAD_MS": "integration.engine",
        "IDLE_WAIT_S": "integration.worker",
    }
    for name, layer in layers.items():
        assert tuning_of(name).__name__ == f"kvoffload_patch.{layer}.tuning"


def test_the_command_line_gives_a_name_and_values() -> None:
    assert asked("BUS_AHEAD_MS=0,75.5") == Varied("BUS_AHEAD_MS", [0, 75.5])


@pytest.mark.parametrize("text", ["NOTHING=1", "annotations=1", "AHEAD_TIMES", "AHEAD_TIMES=x"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="expected NAME=VALUE,VALUE"):
        asked(text)
