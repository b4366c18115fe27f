from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import pickle
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from eagle.aio import counters
from tests.helpers.child import run_script


@pytest.fixture(autouse=True)
def own_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process have counted too."""
    monkeypatch.setattr(counters, "_counts", counters._Counts())


def totals() -> tuple[int, ...]:
    now = counters.statistics()
    return now.queued, now.in_flight, now.done, now.failed, now.cancelled


def test_each_way_through_the_states() -> None:
    counters.issued()
    assert totals() == (0, 1, 0, 0, 0)
    counters.finished("done")
    counters.queued()
    assert totals() == (1, 0, 1, 0, 0)
    counters.admitted()
    counters.issued()
    counters.finished("failed")
    counters.queued()
    counters.dropped()
    counters.queued()
    counters.dropped("failed")
    assert totals() == (0, 0, 1, 2, 1)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "done"),
        (ValueError(), "failed"),
        (TimeoutError(), "failed"),
        (asyncio.CancelledError(), "cancelled"),
        (KeyboardInterrupt(), "cancelled"),
    ],
)
def test_what_an_exception_stands_for(error: BaseException | None, outcome: str) -> None:
    assert counters.outcome_of(error) == outcome


def test_counts_of_many_threads_are_exact() -> None:
    def work() -> None:
        for _ in range(2000):
            counters.issued()
            counters.woken(1e-5)
            counters.finished("done")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert totals() == (0, 0, 16_000, 0, 0)
    assert counters.statistics().wake_latency_s.count == 16_000


@pytest.mark.parametrize("start", [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**64])
def test_totals_do_not_wrap(start: int) -> None:
    counters._counts.done = start
    counters.issued()
    counters.finished("done")
    got = counters.statistics().done
    assert got == start + 1
    assert type(got) is int


def test_a_snapshot_is_frozen_and_stays() -> None:
    before = counters.statistics()
    counters.issued()
    counters.finished("done")
    assert before.done == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.done = 3  # type: ignore[misc]
    after = counters.statistics()
    assert pickle.loads(pickle.dumps(after)).done == 1


def test_no_wake_yet_is_nan() -> None:
    wake = counters.statistics().wake_latency_s
    assert math.isnan(wake.p50)
    assert (wake.count, wake.total) == (0, 0.0)


@given(st.lists(st.floats(1e-9, 1e4), min_size=1, max_size=200))
def test_quantiles_are_within_their_precision(seconds: list[float]) -> None:
    counters._counts = counters._Counts()
    for value in seconds:
        counters.woken(value)
    wake, ordered = counters.statistics().wake_latency_s, sorted(seconds)
    for got, hundredths in ((wake.p50, 50), (wake.p90, 90), (wake.p99, 99)):
        want = ordered[math.ceil(len(ordered) * hundredths / 100) - 1]
        assert got == pytest.approx(want, rel=0.033)
    assert wake.count == len(seconds)
    assert wake.total == pytest.approx(sum(seconds))


@pytest.mark.parametrize("odd", [0.0, -1.0, math.nan, math.inf, 1e-300, 1e300])
def test_odd_latencies_do_not_break_the_count(odd: float) -> None:
    counters.woken(odd)
    wake = counters.statistics().wake_latency_s
    assert wake.count == 1
    assert wake.p50 > 0.0


def test_pooled_events_are_a_gauge() -> None:
    counters.count_pooled_with(lambda: 3)
    try:
        assert counters.statistics().events_pooled == 3
    finally:
        counters.count_pooled_with(int)


def test_prometheus_reads_the_text() -> None:
    counters.queued()
    counters.issued()
    counters.issued()
    counters.woken(0.25)
    counters.finished("done")
    families = {family.name: family for family in text_string_to_metric_families(counters.statistics().prometheus())}
    values = {name: family.samples[0].value for name, family in families.items()}
    assert values["eagle_queued"] == 1.0
    assert values["eagle_in_flight"] == 1.0
    assert values["eagle_done"] == 1.0
    assert families["eagle_done"].type == "counter"
    wake = families["eagle_wake_latency_seconds"]
    assert wake.type == "summary"
    assert {sample.labels["quantile"] for sample in wake.samples if sample.labels} == {"0.5", "0.9", "0.99"}
    assert all(family.documentation for family in families.values())


def test_prometheus_reads_the_text_before_the_first_wake() -> None:
    list(text_string_to_metric_families(counters.statistics().prometheus()))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_starts_from_zero() -> None:
    run_script(
        """
        import os, threading
        from eagle.aio import counters
        counters.issued()
        inside, leave = threading.Event(), threading.Event()
        def hold():
            with counters._counts.lock:
                inside.set()
                leave.wait(30)
        threading.Thread(target=hold, daemon=True).start()
        inside.wait(30)
        child = os.fork()  # while another thread holds the lock
        if child == 0:
            counters.issued()
            os._exit(0 if counters.statistics().in_flight == 1 else 1)
        leave.set()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert counters.statistics().in_flight == 1
    """,
        flags=["-W", "ignore::DeprecationWarning"],  # that a fork beside threads is risky is what this is about
    ).check()
