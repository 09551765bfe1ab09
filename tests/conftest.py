"""Options of the whole suite."""

from __future__ import annotations

import gc
import logging
import signal
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import replaced
import torch
from costs import Costs
from transfer import resident


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `scripts/test` can be asked for."""
    parser.addoption("--costs", action="store_true", help="print the CPU time of files and tests")


def pytest_configure(config: pytest.Config) -> None:
    """In each worker of xdist: what the tests start hears Ctrl-C, and costs are counted."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as behind a shell's `&`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Others run beside it: threads that wait for a processor make a small operation take 100 times.
    torch.set_num_threads(1)
    if config.getoption("--costs"):
        config.pluginmanager.register(Costs())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Without collections of garbage, each of which looks at all that is imported so far."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Else each collection of garbage looks at all of vLLM, for most of a second."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Python takes everything apart at its end, and libraries complain of what is left."""
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def _package_as_it_was() -> Iterator[None]:
    """Tests of another file would have to do with what one of these has replaced."""
    before = replaced.package()
    yield
    assert not replaced.since(before), "a test has replaced this, and did not put it back"


@pytest.fixture(autouse=True)
def _own_threads() -> None:
    """What earlier tests have left in this process is not counted by a later one."""
    resident.leave_out_running_threads()


@pytest.fixture(autouse=True)
def _heard(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """``caplog`` hears the package, however vLLM or VLLM_LOGGING_LEVEL has set its loggers up."""
    logger = logging.getLogger("vllm.kvoffload_patch")
    caplog.set_level(logging.INFO, logger.name)
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "disabled", False)
