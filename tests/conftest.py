"""The matrix that every test may ask for (event loops, targets) and the detector of noise."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Iterator

# Timing never decides a test, so a slow machine may not fail an example by hypothesis' own clock either.
settings.register_profile("eagle", deadline=None, print_blob=True)
settings.load_profile("eagle")

BACKENDS = [
    pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
    pytest.param(
        ("asyncio", {"use_uvloop": True}),
        id="uvloop",
        marks=pytest.mark.skipif(sys.platform == "win32", reason="uvloop does not exist on Windows"),
    ),
    pytest.param(("trio", {}), id="trio"),
]


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """The event loop an async test runs on: all three, unless the test parametrises this fixture itself."""
    backend: tuple[str, dict[str, Any]] = request.param
    return backend


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def target(request: pytest.FixtureRequest) -> str:
    """Where the test's graphs run: one body for both, the device half skipped where no GPU can be used."""
    name: str = request.param
    return name


def pytest_configure() -> None:
    """Take Ctrl-C as a terminal gives it: a shell that starts the tests in the background has it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU, with the reason; with EAGLE_REQUIRE_GPU set it runs, and fails, all the same."""
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not needs_gpu or os.environ.get("EAGLE_REQUIRE_GPU"):
        return
    from eagle.kernels.device import unusable_reason

    reason = unusable_reason()
    if reason is not None:
        for item in needs_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def silence(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """Fail the test when a warning is logged, or when a thread or a finaliser lets an exception out."""
    noise: list[tuple[str, str]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda got: noise.append(("unraisable", repr(got.exc_value))))
    monkeypatch.setattr(threading, "excepthook", lambda got: noise.append(("thread", repr(got.exc_value))))
    yield noise
    gc.collect()  # what the test dropped is finalised while the hooks are still ours
    noise += [
        (record.name, record.getMessage())
        for when in ("setup", "call")
        for record in caplog.get_records(when)
        if record.levelno >= logging.WARNING
    ]
    assert noise == []
