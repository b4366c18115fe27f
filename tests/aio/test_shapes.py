"""The rule that picks an entry and a geometry, without a device: it asks only for the entries and the width."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from eagle.aio.shapes import EVEN, UNIFORM, Shape, choose, crowd_of, same_shape

SMS = 132
NUMBERS = [0, 1, 31, 1000, 10_000, 33_791, 33_792, 100_000, 270_335, 270_336, 1_000_000, 2**31 - 1]
EVENNESS = [None, 0.0, 0.14, EVEN, 0.65, UNIFORM, 0.95, 1.0]


def kernel(*, ranged: bool = True, persist: bool = True, sms: int = SMS) -> Any:
    return SimpleNamespace(ranged=object() if ranged else None, persist=object() if persist else None, sm_count=sms)


@pytest.mark.parametrize("n", NUMBERS)
@pytest.mark.parametrize("evenness", EVENNESS)
@pytest.mark.parametrize("ranged", [True, False])
@pytest.mark.parametrize("persist", [True, False])
@pytest.mark.parametrize("sms", [1, 132])
def test_every_shape_can_be_launched(n: int, evenness: float | None, ranged: bool, persist: bool, sms: int) -> None:
    shape = choose(kernel(ranged=ranged, persist=persist, sms=sms), n, evenness)
    assert shape.entry != "range" or ranged
    assert shape.entry != "persist" or persist
    assert shape.block % 32 == 0
    assert 32 <= shape.block <= 1024
    if shape.entry == "persist":
        assert shape.threads_per_sm % shape.block == 0
        assert shape.threads_per_sm <= 2048
        assert shape.chunk.bit_count() == 1  # the entry wants a power of two
    else:
        assert (shape.threads_per_sm, shape.chunk, shape.counts_lanes) == (0, 0, False)


def test_a_batch_that_fits_the_device_has_a_thread_a_sample() -> None:
    for n in (1, 1000, 10_000, 256 * SMS - 1):
        assert choose(kernel(), n, None).entry == "range"
        assert choose(kernel(ranged=False), n, None).entry == "step"
    assert choose(kernel(), 256 * SMS, None).entry == "persist"


def test_without_a_persistent_entry_any_batch_has_a_thread_a_sample() -> None:
    assert choose(kernel(persist=False), 10**6, None).entry == "range"
    assert choose(kernel(persist=False, ranged=False), 10**6, 0.2).entry == "step"


def test_a_small_batch_spreads_over_the_multiprocessors() -> None:
    assert choose(kernel(), 1000, None).block < choose(kernel(), 250 * SMS, None).block


@pytest.mark.parametrize("n", [100_000, 1_000_000])
def test_what_the_first_run_tells_decides_the_next(n: int) -> None:
    first, spread, even = (choose(kernel(), n, evenness) for evenness in (None, 0.14, 0.98))
    assert first.counts_lanes  # the first run looks, the others pay nothing for it
    assert not spread.counts_lanes
    assert not even.counts_lanes
    assert even.threads_per_sm > spread.threads_per_sm
    assert even.chunk > spread.chunk


def test_the_borders_between_even_and_uneven() -> None:
    uneven, middle, even = (choose(kernel(), 10**5, evenness) for evenness in (0.0, 0.65, 1.0))
    assert len({uneven, middle, even}) == 3
    assert choose(kernel(), 10**5, EVEN) == uneven
    assert choose(kernel(), 10**5, EVEN + 1e-9) == choose(kernel(), 10**5, UNIFORM) == middle
    assert choose(kernel(), 10**5, UNIFORM + 1e-9) == even


@pytest.mark.parametrize("before", EVENNESS[1:])
@pytest.mark.parametrize("now", EVENNESS[1:])
def test_it_is_known_when_the_shape_stays(before: float, now: float) -> None:
    if same_shape(before, now):
        assert all(choose(kernel(), n, before) == choose(kernel(), n, now) for n in NUMBERS)
    else:
        assert choose(kernel(), 10**5, before) != choose(kernel(), 10**5, now)


@pytest.mark.parametrize("load", [1, 2, 7, 8, 31, 64, 65, 1000])
@pytest.mark.parametrize("n", NUMBERS)
def test_a_crowd_shares_the_device(load: int, n: int) -> None:
    crowd = crowd_of(load, n, SMS)
    alone, shared = choose(kernel(), n, 0.14), choose(kernel(), n, 0.14, crowd)
    if load < 8 or load * n < 8192 * SMS:
        assert crowd == 1
    else:
        assert crowd.bit_count() == 1
        assert min(load, 256) <= crowd < 2 * load
    if crowd > 1 and n < 256 * SMS:
        assert shared.entry == "persist"
        assert shared.threads_per_sm * crowd <= 512
    else:
        assert shared == alone
    assert choose(kernel(), n, 0.98, crowd) == choose(kernel(), n, 0.98)  # nothing to gain where samples end together
    assert choose(kernel(), n, None, crowd) == choose(kernel(), n, None)  # not known yet
    assert choose(kernel(persist=False), n, 0.14, crowd).entry == "range"


@pytest.mark.parametrize(("entry", "mode"), [("step", "fused_one"), ("range", "fused_one"), ("persist", "persist")])
def test_modes_are_the_published_words(entry: Any, mode: str) -> None:
    assert Shape(entry, 64).mode == mode


def test_shapes_are_values() -> None:
    assert Shape("range", 64) == Shape("range", 64)
    assert hash(Shape("persist", 64, 256, 32)) == hash(Shape("persist", 64, 256, 32))
    with pytest.raises(AttributeError):
        Shape("range", 64).block = 32  # type: ignore[misc]
