"""A digest is that of the weights: the same for the same bytes, another for any other ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvoffload_patch.integration.worker import weights
from kvoffload_patch.integration.worker.weights import weights_digest


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 40, bias=False))
    model.register_buffer("odd", torch.arange(13, dtype=torch.uint8))
    model[0]._k_scale = torch.tensor(1.0)
    model[0].kv_cache = torch.zeros(64)
    model.tied = torch.nn.Linear(40, 40, bias=False)
    model.tied.weight = model[1].weight
    return model


def swap_values(model: torch.nn.Module) -> None:
    flat = model[0].weight.data.view(-1)
    flat[[2, 900]] = flat[[900, 2]]


def swap_neighbours(model: torch.nn.Module) -> None:
    """The second and third place have the same number, if that is the place made odd."""
    flat = model[0].weight.data.view(-1)
    flat[1:3] = flat[1:3].flip(0)


def swap_tensors(model: torch.nn.Module) -> None:
    first, second = model[0].weight.data.clone(), model[1].weight.data.clone()
    model[0].weight.data.copy_(second)
    model[1].weight.data.copy_(first)


def last_byte(model: torch.nn.Module) -> None:
    model.odd[12] += 1


def one_bit(model: torch.nn.Module) -> None:
    model[1].weight.data.view(torch.int32)[7, 3] ^= 1


def two_signs(model: torch.nn.Module) -> None:
    """The highest bit of two words of 8 bytes: times any odd number it is the highest bit."""
    model[0].weight.data[3, [1, 9]] *= -1


def scale(model: torch.nn.Module) -> None:
    model[0]._k_scale.mul_(2)


@pytest.mark.parametrize(
    "change", [swap_values, swap_neighbours, swap_tensors, last_byte, one_bit, two_signs, scale]
)
@pytest.mark.parametrize("piece", [64, 1 << 21])
def test_other_weights_have_another_digest(
    change: Callable[[torch.nn.Module], None], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "WEIGHT_PIECE_WORDS", piece)
    model = make_model()
    before = weights_digest(model)
    assert before and before == weights_digest(make_model()), "other memory, the same bytes"
    model[0].kv_cache.fill_(3)
    assert weights_digest(model) == before, "what a step writes is no weight"
    change(model)
    assert weights_digest(model) != before


def test_weights_that_are_no_longer_shared_differ() -> None:
    model = make_model()
    before = weights_digest(model)
    model.tied.weight = torch.nn.Parameter(model[1].weight.data.clone())
    assert weights_digest(model) != before


def test_many_weights_in_cpu_memory_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "HOST_WEIGHT_BYTES", 6000)
    assert weights_digest(make_model()) == ""
