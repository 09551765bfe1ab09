"""Intel GPUs: what each call asks of torch.xpu. None has run any of this."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from kvoffload_patch.transfer.device import device_of


def test_it_asks_torch_for_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    xpu = mock.MagicMock()
    monkeypatch.setattr(torch, "xpu", xpu)
    on = torch.device("xpu", 3)
    device = device_of(on)
    device.use()
    device.new_stream(-1)
    device.new_event()
    device.current_stream()
    device.on("stream")
    device.synchronize()
    assert [call for call in xpu.mock_calls if "__" not in call[0]] == [
        mock.call.set_device(on),
        mock.call.Stream(device=on, priority=-1),
        mock.call.Event(),
        mock.call.current_stream(on),
        mock.call.stream("stream"),
        mock.call.synchronize(on),
    ]


def test_every_call_is_one_that_torch_has() -> None:
    for name in ("set_device", "Stream", "Event", "current_stream", "stream", "synchronize"):
        assert hasattr(torch.xpu, name)
    for name in ("wait_event", "wait_stream", "synchronize"):
        assert hasattr(torch.xpu.Stream, name)
    for name in ("record", "query", "synchronize"):
        assert hasattr(torch.xpu.Event, name)
