"""The entries of an automatic kernel, launched by hand with counters of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import eagle.sync
from eagle.kernels.binding import struct_values
from tests.helpers import models

pytestmark = pytest.mark.gpu
N = 700


class Hand:
    """`logistic` bound to device planes, its counters, and what launches need."""

    def __init__(self, n: int = N) -> None:
        import cupy

        self.cupy, self.n = cupy, n
        self.given = models.logistic_planes(23, n=n)
        self.planes = {k: cupy.array(v) if isinstance(v, np.ndarray) else v for k, v in self.given.items()}
        sim = eagle.sync.simulation(models.logistic, max_steps=1000, **self.planes)
        self.loop = sim.runner.bound
        self.kernel = self.loop.kernel
        self.values = struct_values(self.kernel.sidecar, self.loop.planes, self.loop.bound[0].words)
        self.words = cupy.zeros(8, np.uint64)  # claim, largest, sum, active lanes, lane slots
        self.base = int(self.words.data.ptr)

    def budget(self, steps: int) -> None:
        """Steps that a launch may take; the counters start at 0."""
        self.loop.fused_steps[...] = steps
        self.loop.finished[...] = 0
        self.words[...] = 0

    def counted(self) -> dict[str, int]:
        """What the last launch counted."""
        names = ("claim", "largest", "sum", "active", "slots")
        counted = dict(zip(names, self.words.get().tolist(), strict=False))
        return {**counted, "finished": int(self.loop.finished.get()[0])}

    def range(self) -> Any:
        """The range entry."""
        return self.kernel.packed_range(
            self.values, self.n, steps=self.base + 8, step_sum=self.base + 16, block=64, keep=self
        )

    def persist(self, block: int = 64, threads_per_sm: int = 64, chunk: int = 8, *, util: bool = True) -> Any:
        """The persistent entry, by default with a grid that must claim more than once."""
        return self.kernel.packed_persist(
            self.values,
            self.n,
            claim=self.base,
            util=self.base + 24 if util else 0,
            steps=self.base + 8,
            step_sum=self.base + 16,
            block=block,
            threads_per_sm=threads_per_sm,
            chunk=chunk,
            keep=self,
        )

    def check_end(self) -> None:
        """Every sample is at its own end."""
        given = self.given
        np.testing.assert_array_equal(self.planes["k"].get(), given["last"])
        np.testing.assert_array_equal(
            self.planes["x"].get(), models.logistic_loop(given["x"], given["last"], given["r"])
        )
        assert bool(self.loop.mask.all())


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.mark.sanitize
def test_the_step_entry_takes_the_steps_of_its_word(hand: Hand) -> None:
    hand.budget(7)
    hand.kernel.packed(hand.values, hand.n, keep=hand).launch()
    np.testing.assert_array_equal(hand.planes["k"].get(), np.minimum(hand.given["last"], 7.0))
    assert hand.counted()["finished"] == np.count_nonzero(hand.given["last"] <= 7)


@pytest.mark.sanitize
def test_the_range_entry_runs_to_the_end_and_counts(hand: Hand) -> None:
    hand.budget(1000)
    hand.range().launch()
    counted, last = hand.counted(), hand.given["last"]
    assert (counted["finished"], counted["largest"], counted["sum"]) == (N, last.max(), last.sum())
    hand.check_end()


@pytest.mark.sanitize
def test_the_persistent_entry_runs_to_the_end_and_counts(hand: Hand) -> None:
    hand.budget(1000)
    hand.persist().launch()
    counted, last = hand.counted(), hand.given["last"]
    assert (counted["finished"], counted["largest"], counted["sum"]) == (N, last.max(), last.sum())
    assert 0 < counted["active"] <= counted["slots"]
    hand.check_end()


@pytest.mark.parametrize("block", [32, 64, 256])
@pytest.mark.parametrize("threads_per_sm", [32, 256, 2048])
@pytest.mark.parametrize("chunk", [1, 32, 128])
def test_no_geometry_changes_a_bit(hand: Hand, block: int, threads_per_sm: int, chunk: int) -> None:
    hand.budget(1000)
    hand.persist(block, threads_per_sm, chunk, util=False).launch()
    hand.check_end()


@pytest.mark.sanitize
@pytest.mark.parametrize("entry", ["range", "persist"])
def test_samples_that_had_finished_are_counted_again(hand: Hand, entry: str) -> None:
    """So every launch starts from a counter of 0; that is what the device's runs rely on."""
    launch = getattr(hand, entry)()
    last, done = hand.given["last"], 0
    for budget in (20, 100, 1000):
        hand.budget(budget)
        launch.launch()
        done += budget
        counted = hand.counted()
        assert counted["finished"] == np.count_nonzero(last <= done)
        assert counted["largest"] <= budget
    hand.check_end()


def test_no_samples_are_no_launch() -> None:
    hand = Hand(0)
    hand.budget(10)
    for launch in (hand.range(), hand.persist(), hand.kernel.packed(hand.values, 0, keep=hand)):
        assert launch.grid[0] == 0
        launch.launch()
    assert hand.counted()["finished"] == 0
