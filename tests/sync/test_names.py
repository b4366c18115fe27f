"""``import eagle.sync as eagle``: the names of the published text, the same objects where nothing waits."""

from __future__ import annotations

import importlib

import pytest

import eagle
import eagle.aio
import eagle.sync

BLOCKING = {"GraphComposer", "GraphPipeline", "Runner", "Simulation", "run_until_done", "simulate", "simulation",
            "until_done"}  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(eagle.__all__) - BLOCKING))
def test_what_does_not_wait_is_the_same_object(name: str) -> None:
    assert getattr(eagle.sync, name) is getattr(eagle, name)
    assert name == "deploy" or getattr(eagle.aio, name) is getattr(eagle, name)  # which has a coroutine form there


@pytest.mark.parametrize("name", sorted(BLOCKING))
def test_what_waits_is_another(name: str) -> None:
    assert getattr(eagle.sync, name) is not getattr(eagle, name)
    assert getattr(eagle.aio, name) is getattr(eagle, name)


@pytest.mark.parametrize("face", [eagle.sync, eagle.aio], ids=["sync", "aio"])
def test_a_loaded_module_does_not_hide_a_function(face: object) -> None:
    importlib.import_module("eagle.sync.simulation")
    importlib.import_module("eagle.aio.simulation")
    assert callable(face.simulation)  # type: ignore[attr-defined]


@pytest.mark.parametrize("face", [eagle.sync, eagle.aio], ids=["sync", "aio"])
def test_names_are_listed_and_others_named(face: object) -> None:
    assert set(eagle.__all__) <= set(dir(face))
    with pytest.raises(AttributeError, match="nonsense"):
        face.nonsense  # type: ignore[attr-defined]  # noqa: B018


def test_only_aio_has_these() -> None:
    for name in ("trace", "statistics", "healthy"):
        assert callable(getattr(eagle.aio, name))
        assert not hasattr(eagle.sync, name)
    assert eagle.aio.deploy is not eagle.deploy
