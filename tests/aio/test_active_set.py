"""Active sets on both targets, against a plain NumPy model of what compaction and reorder mean."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle.aio.active_set import ActiveSet
from eagle.aio.compaction import MIN_REORDER_SPAN, Word
from eagle.aio.guards import Skippable
from eagle.errors import NotBuilt


@pytest.fixture
def xp(target: str) -> Any:
    """NumPy, or CuPy where a GPU can be used."""
    if target == "host":
        return np
    from eagle.kernels.device import require_cupy

    return require_cupy()


def host(x: Any) -> np.ndarray:
    return x if type(x) is np.ndarray else x.get()


def word(x: Any) -> int:
    return int(host(x)[0])


def masked(n: int, share: float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([n, seed]).random(n) < share


def thin_set(xp: Any, n: int, finished: np.ndarray, **planes: np.ndarray) -> tuple[ActiveSet, dict[str, Any]]:
    """A reordering set that owns device copies of `planes`, compacted once over `finished`."""
    active = ActiveSet(xp.asarray(np.zeros(n, bool)), reorder=True)
    copies = {name: xp.asarray(plane.copy()) for name, plane in planes.items()}
    active.own(*copies.values())
    active.mask[...] = xp.asarray(finished)
    active.compact()
    return active, copies


def fire_and_reorder(active: ActiveSet) -> None:
    active.fire[...] = 1
    active.reorder()


def groups_of(live: np.ndarray) -> int:
    return np.unique(live // 32).size


# --- compaction ---


@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 2047, 2048, 2049, 5000, 65_536, 131_105])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("dtype", [np.bool_, np.uint8])
def test_the_map_lists_the_live_samples_in_order(xp: Any, n: int, share: float, dtype: type) -> None:
    finished = masked(n, share).astype(dtype) * (7 if dtype is np.uint8 else True)
    active = ActiveSet(xp.asarray(finished.astype(dtype)), reorder=True)
    active.compact()
    live = np.flatnonzero(finished == 0)
    assert active.live == live.size == word(active.count)
    np.testing.assert_array_equal(host(active.map)[: live.size], live)
    assert word(active.live32) == groups_of(live)


@given(
    pattern=st.lists(st.tuples(st.integers(1, 400), st.booleans()), max_size=60),
    theta=st.sampled_from([0.25, 0.5, 0.75]),
    offset=st.integers(0, 9),
)
def test_any_mask_on_the_host(pattern: list[tuple[int, bool]], theta: float, offset: int) -> None:
    runs = [np.full(length, value) for length, value in pattern]
    finished = np.concatenate([np.zeros(offset, bool), *runs])[offset:]  # also at addresses that no word begins at
    active = ActiveSet(finished, reorder=theta)
    active.compact()
    live = np.flatnonzero(~finished)
    np.testing.assert_array_equal(active.map[: active.live], live)
    assert word(active.live32) == groups_of(live)
    scattered = finished.size >= MIN_REORDER_SPAN and live.size / 32 < theta * groups_of(live)
    assert bool(word(active.fire)) == scattered


@pytest.mark.parametrize("offset", range(9))
def test_a_mask_may_begin_at_any_address(xp: Any, offset: int) -> None:
    finished = masked(6000, 0.6)
    store = xp.asarray(np.concatenate([np.ones(offset, bool), finished, np.zeros(9, bool)]))
    active = ActiveSet(store[offset : offset + 6000])
    active.compact()
    np.testing.assert_array_equal(host(active.map)[: active.live], np.flatnonzero(~finished))


@pytest.mark.parametrize(("n", "fires"), [(4095, False), (4096, True)])
def test_a_small_batch_never_fires(xp: Any, n: int, fires: bool) -> None:
    finished = np.ones(n, bool)
    finished[::32] = False
    active, _ = thin_set(xp, n, finished)
    assert bool(word(active.fire)) is fires


@pytest.mark.parametrize(("every", "fires"), [(1, False), (2, False), (3, True)])
def test_fire_is_a_question_of_the_share(xp: Any, every: int, fires: bool) -> None:
    finished = np.ones(9600, bool)
    finished[::every] = False  # 32 / every live samples in each group, against theta * 32 = 16
    active, _ = thin_set(xp, 9600, finished)
    assert bool(word(active.fire)) is fires


def test_more_samples_than_a_map_can_number_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2147483647 \(2\*\*31 - 1\)"):
        ActiveSet(np.zeros(2**31, np.uint8))  # zero pages, none of them touched


def test_equal_masks_give_equal_maps(xp: Any) -> None:
    active = ActiveSet(xp.asarray(masked(50_000, 0.5)))
    active.compact()
    first = host(active.map).copy()
    for _ in range(3):
        active.compact()
        np.testing.assert_array_equal(host(active.map), first)


# --- reorder, restore ---


@pytest.mark.parametrize("n", [100, 5000, 20_011])
def test_planes_of_every_width_move_with_their_samples(xp: Any, n: int) -> None:
    rng = np.random.default_rng(n)
    planes = {
        "b": rng.integers(0, 255, n).astype(np.uint8),
        "h": rng.random(n).astype(np.float16),
        "f": rng.random((3, n)).astype(np.float32),
        "d": rng.random((2, n)),
        "c": rng.random(n) + 1j * rng.random(n),
    }
    finished = masked(n, 0.8)
    active, moved = thin_set(xp, n, finished, **planes)
    live = active.live
    fire_and_reorder(active)
    perm, inv = host(active.perm), host(active.inv)
    np.testing.assert_array_equal(perm[:live], np.flatnonzero(~finished))
    np.testing.assert_array_equal(perm[live:], np.flatnonzero(finished))
    np.testing.assert_array_equal(perm[inv], np.arange(n))
    np.testing.assert_array_equal(host(active.map), np.arange(n))
    assert (word(active.span), word(active.fire), word(active.reorders), active.permuted) == (live, 0, 1, True)
    for name, plane in planes.items():
        np.testing.assert_array_equal(host(moved[name]), plane[..., perm])
        np.testing.assert_array_equal(host(active.in_sample_order(moved[name])), plane)
    np.testing.assert_array_equal(host(active.in_sample_order(active.mask)), finished)
    active.restore()
    for name, plane in planes.items():
        np.testing.assert_array_equal(host(moved[name]), plane)
    np.testing.assert_array_equal(host(active.mask), finished)
    np.testing.assert_array_equal(host(active.map)[:live], np.flatnonzero(~finished))
    assert (word(active.span), word(active.reorders), active.permuted) == (n, 1, False)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["finish", "revive", "compact", "reorder", "restore", "reset"]), st.integers(0, 2**32 - 1)
    ),
    max_size=14,
)


@given(n=st.integers(0, 200), actions=ACTIONS)
def test_any_history_on_the_host(n: int, actions: list[tuple[str, int]]) -> None:
    """Whatever happens, slot s holds sample perm[s] of every plane, and the words agree with the planes."""
    mask, x = np.zeros(n, bool), np.arange(float(n))
    pair = np.stack([x, x + n]).astype(np.int32) if n else np.zeros((2, 0), np.int32)
    active = ActiveSet(mask, reorder=True).own(x, pair)
    order, done, reorders = np.arange(n), np.zeros(n, bool), 0  # the model: sample in each slot, finished samples
    for action, seed in actions:
        chosen = np.random.default_rng(seed).random(n) < 0.4
        if action in ("finish", "revive"):
            done = done | chosen if action == "finish" else done & ~chosen
            mask[:] = done[order]
        elif action == "compact":
            active.compact()
            np.testing.assert_array_equal(active.map[: active.live], np.flatnonzero(~done[order]))
        elif action == "reorder":
            active.compact()
            live = order[~done[order]]
            fire_and_reorder(active)
            reorders += 1
            np.testing.assert_array_equal(active.perm[: live.size], live)
            assert word(active.span) == live.size
            order = active.perm.copy()
        elif action == "restore":
            active.restore()
            order = np.arange(n)
        else:
            active.restore()  # a reset alone would forget where the samples are
            active.reset()
            order, reorders = np.arange(n), 0
        np.testing.assert_array_equal(x, order)
        np.testing.assert_array_equal(pair, np.stack([order, order + n]))
        np.testing.assert_array_equal(mask, done[order])
        np.testing.assert_array_equal(active.perm[active.inv], np.arange(n))
        assert word(active.reorders) == reorders


def test_live_samples_stay_in_sample_order_over_many_reorders(xp: Any) -> None:
    n = 10_000
    done = np.zeros(n, bool)
    active, moved = thin_set(xp, n, done, x=np.arange(float(n)))
    for round_ in range(5):
        done |= masked(n, 0.4, seed=round_)
        active.mask[...] = xp.asarray(done[host(active.perm)])
        active.compact()
        fire_and_reorder(active)
        np.testing.assert_array_equal(host(active.perm)[: active.live], np.flatnonzero(~done))
    active.restore()
    np.testing.assert_array_equal(host(moved["x"]), np.arange(float(n)))


def test_a_sample_revived_behind_the_span_is_found_again(xp: Any) -> None:
    finished = masked(300, 0.7)
    active, moved = thin_set(xp, 300, finished, x=np.arange(300.0))
    fire_and_reorder(active)
    active.mask[299] = False
    active.compact()
    assert int(host(active.map)[active.live - 1]) == 299
    fire_and_reorder(active)
    assert not host(active.mask)[: active.live].any()
    np.testing.assert_array_equal(host(moved["x"])[host(active.inv)], np.arange(300.0))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_forced_reorder_at_the_extremes_moves_nothing(xp: Any, share: float) -> None:
    finished = np.full(500, bool(share))
    active, moved = thin_set(xp, 500, finished, x=np.arange(500.0))
    fire_and_reorder(active)
    np.testing.assert_array_equal(host(moved["x"]), np.arange(500.0))
    assert word(active.span) == active.live == (0 if share else 500)


def test_reorder_without_fire_does_nothing(xp: Any) -> None:
    active, moved = thin_set(xp, 200, masked(200, 0.5), x=np.arange(200.0))
    active.reorder()
    assert not active.permuted
    np.testing.assert_array_equal(host(moved["x"]), np.arange(200.0))


def test_in_sample_order_writes_where_it_is_told(xp: Any) -> None:
    active, moved = thin_set(xp, 200, masked(200, 0.5), x=np.arange(200.0))
    fire_and_reorder(active)
    out = xp.asarray(np.zeros(200))
    assert active.in_sample_order(moved["x"], out=out) is out
    np.testing.assert_array_equal(host(out), np.arange(200.0))
    for bad in (np.zeros(199), np.zeros(200, np.float32)):
        with pytest.raises(ValueError, match="out="):
            active.in_sample_order(moved["x"], out=xp.asarray(bad))
    with pytest.raises(ValueError, match="shares memory"):
        active.in_sample_order(moved["x"], out=moved["x"])


def test_reset_forgets_and_moves_nothing(xp: Any) -> None:
    active, moved = thin_set(xp, 200, masked(200, 0.5), x=np.arange(200.0))
    fire_and_reorder(active)
    where = host(moved["x"]).copy()
    active.reset()
    assert (active.live, word(active.span), word(active.reorders), active.permuted) == (200, 200, 0, False)
    for array in (active.map, active.perm, active.inv):
        np.testing.assert_array_equal(host(array), np.arange(200))
    np.testing.assert_array_equal(host(moved["x"]), where)


def test_all_words_lie_in_one_array(xp: Any) -> None:
    active, _ = thin_set(xp, 200, masked(200, 0.5))
    words = host(active._arm.words)
    assert words[Word.COUNT] == active.live
    assert words[Word.SIZE] == words[Word.SPAN] == 200


# --- steps ---


def test_when_finished_starts_over_with_the_set(xp: Any) -> None:
    counter = xp.asarray(np.zeros(1, np.uint32))
    active = ActiveSet(xp.asarray(np.zeros(64, bool)))
    step = active.when_finished(counter)
    counter[...] = 5
    active.mask[:5] = True
    step()
    assert active.live == 59
    active.reset()
    step()  # the counter stands where it stood, but the map is the identity again
    assert active.live == 59


def test_two_steps_of_one_counter_keep_their_own_baselines(xp: Any) -> None:
    counter = xp.asarray(np.ones(1, np.uint32))
    active = ActiveSet(xp.asarray(masked(64, 0.5)))
    first, second = active.when_finished(counter), active.when_finished(counter)
    first()
    live = active.live
    active.mask[...] = True
    first()
    assert active.live == live
    second()
    assert active.live == 0


def test_reorder_if_degraded_runs_when_the_batch_thins(xp: Any) -> None:
    active, moved = thin_set(xp, 8192, np.zeros(8192, bool), x=np.arange(8192.0))
    step = active.reorder_if_degraded()
    assert isinstance(step, Skippable)
    step()
    assert not active.permuted
    active.mask[...] = xp.asarray(masked(8192, 0.9))
    active.compact()
    step()
    step()
    assert word(active.reorders) == 1
    np.testing.assert_array_equal(host(moved["x"])[host(active.inv)], np.arange(8192.0))


@pytest.mark.parametrize("bad", [np.zeros(1, np.int32), np.zeros(0, np.uint32), np.array(1, np.uint32)])
def test_a_counter_is_a_uint32_word(xp: Any, bad: np.ndarray) -> None:
    with pytest.raises(ValueError, match="uint32"):
        ActiveSet(xp.asarray(np.zeros(4, bool))).when_finished(xp.asarray(bad))


def test_a_counter_lies_where_the_mask_lies(xp: Any) -> None:
    with pytest.raises(TypeError, match="counter"):
        ActiveSet(xp.asarray(np.zeros(4, bool))).when_finished([0])


# --- deferred parts ---


def test_a_deferred_map_comes_when_asked_for(xp: Any) -> None:
    active = ActiveSet(xp.asarray(masked(100, 0.5)), _lazy_map=True, _lazy_scratch=True)
    assert active.map.shape == (0,)
    assert active.live == 100
    for refused in (active.compact, lambda: active.when_finished(active.count)):
        with pytest.raises(NotBuilt, match="materialize_map"):
            refused()
    active.reset()
    assert active.materialize_map() is True
    assert active.materialize_map() is False
    np.testing.assert_array_equal(host(active.map), np.arange(100))
    active.prepare_compaction()
    active.compact()
    assert active.live == int((~masked(100, 0.5)).sum())
    assert active.planes()["active_map"] is active.map


def test_a_deferred_map_of_a_reordering_set(xp: Any) -> None:
    active = ActiveSet(xp.asarray(masked(100, 0.5)), reorder=True, _lazy_map=True)
    active.prepare_compaction()
    with pytest.raises(NotBuilt):
        active.reorder()
    active.restore()
    active.materialize_map()
    active.compact()
    fire_and_reorder(active)
    assert not host(active.mask)[: active.live].any()


# --- ownership ---


def reordering(xp: Any, n: int = 8) -> ActiveSet:
    return ActiveSet(xp.asarray(np.zeros(n, bool)), reorder=True)


def test_own_takes_all_or_nothing(xp: Any) -> None:
    x, y = xp.asarray(np.zeros(8)), xp.asarray(np.zeros(9))
    active = reordering(xp)
    with pytest.raises(ValueError, match="plane 1"):
        active.own(x, y)
    active.own(x)  # the refused call left x free


def test_one_plane_twice_in_a_call(xp: Any) -> None:
    x = xp.asarray(np.zeros((2, 8)))
    with pytest.raises(ValueError, match="share memory"):
        reordering(xp).own(x, x[1])


def test_a_mask_cannot_be_a_plane(xp: Any) -> None:
    active = reordering(xp)
    with pytest.raises(ValueError, match="the mask"):
        active.own(active.mask)
    with pytest.raises(ValueError, match="another living"):
        reordering(xp).own(active.mask)


def test_one_mask_is_moved_by_one_set(xp: Any) -> None:
    mask = xp.asarray(np.zeros(8, bool))
    first = ActiveSet(mask, reorder=True)
    with pytest.raises(ValueError, match="another living"):
        ActiveSet(mask, reorder=True)
    ActiveSet(mask).compact()  # a plain set moves nothing
    del first
    ActiveSet(mask, reorder=True)


def test_a_dead_set_owns_nothing(xp: Any) -> None:
    x = xp.asarray(np.zeros(8))
    for _ in range(50):  # the addresses and ids of dead sets come back
        reordering(xp).own(x)


def test_a_set_in_a_dead_cycle_owns_nothing(xp: Any) -> None:
    x = xp.asarray(np.zeros(8))
    holder: dict[str, Any] = {"set": reordering(xp).own(x)}
    holder["self"] = holder
    del holder
    reordering(xp).own(x)
    gc.collect()


def test_of_many_threads_one_gets_the_plane() -> None:
    x = np.zeros(8)
    sets = [reordering(np) for _ in range(16)]
    start, won = threading.Barrier(16), []

    def ask(active: ActiveSet) -> None:
        start.wait(10)
        try:
            active.own(x)
        except ValueError:
            return
        won.append(active)

    threads = [threading.Thread(target=ask, args=[active]) for active in sets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(won) == 1


@pytest.mark.parametrize(
    "bad",
    [np.zeros((2, 2, 8)), np.zeros((8, 3)), np.zeros((8, 2)).T, np.zeros(16)[::2], np.zeros(8, "V3")],
    ids=["three axes", "samples first", "transposed", "strided", "three bytes"],
)
def test_planes_that_cannot_move(bad: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"expected|contiguous"):
        reordering(np).own(bad)


def test_objects_and_read_only_planes_do_not_move() -> None:
    with pytest.raises(ValueError, match="object"):
        reordering(np).own(np.array([None] * 8))
    fixed = np.zeros(8)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        reordering(np).own(fixed)
    mask = np.zeros(8, bool)
    mask.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        ActiveSet(mask, reorder=True)
    ActiveSet(mask).compact()  # a plain set only reads it


@pytest.mark.parametrize("bad", [[0.0] * 8, None, 3])
def test_a_plane_is_an_array(xp: Any, bad: object) -> None:
    active = reordering(xp)
    for call in (active.own, active.indirect, active.in_sample_order):
        with pytest.raises(TypeError, match=type(bad).__name__):
            call(bad)


def test_indirect_planes_stay(xp: Any) -> None:
    x = xp.asarray(np.arange(200.0))
    active, _ = thin_set(xp, 200, masked(200, 0.5))
    assert active.indirect(x) is active
    fire_and_reorder(active)
    np.testing.assert_array_equal(host(x), np.arange(200.0))
    with pytest.raises(ValueError, match="does not own"):
        active.in_sample_order(x)


def test_owning_ends_with_the_first_reorder(xp: Any) -> None:
    active = reordering(xp)
    active.reorder()
    with pytest.raises(ValueError, match="too late"):
        active.own(xp.asarray(np.zeros(8)))


def test_binding_knows_every_plane(xp: Any) -> None:
    x, y, z = (xp.asarray(np.zeros(8)) for _ in range(3))
    active = reordering(xp).own(x).indirect(y)
    with pytest.raises(ValueError, match="'z'"):
        active.fix(x=x, z=z)
    active.own(z)
    active.fix(x=x[:], y=y, z=z, terminated=active.mask)
    with pytest.raises(ValueError, match="too late"):
        active.own(xp.asarray(np.zeros(8)))
    ActiveSet(xp.asarray(np.zeros(8, bool))).fix(x=x)  # no rules without a reorder


def test_masked_arrays_are_refused() -> None:
    with pytest.raises(ValueError, match="masked array"):
        ActiveSet(np.ma.zeros(3, bool))
    with pytest.raises(ValueError, match="masked array"):
        ActiveSet(np.zeros(3, bool), reorder=True).own(np.ma.zeros(3))
