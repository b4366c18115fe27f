"""Runs on a device: every launch shape and every way to cut a run short gives the bits that NumPy gives.

Where the host promises the same, one body runs on both targets.
"""

from __future__ import annotations

import gc
import itertools
import warnings
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import eagle
import eagle.sync
from eagle.aio.shapes import Shape
from eagle.errors import Busy, LayoutWarning
from tests.helpers import models
from tests.helpers.deadline import deadline
from tests.helpers.sides import Side
from tests.helpers.steps import until, until_blocking

if TYPE_CHECKING:
    from collections.abc import Callable

gpu = pytest.mark.gpu
sanitize = pytest.mark.sanitize

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "automatic": (models.climb, {}),
    "one": (models.climb_one, {}),
    "four": (models.climb_four, {}),
    "several": ([models.move, models.arrived], {}),
    "listed": (models.climb_listed, {}),
    "listed, reorder": (models.climb_listed, {"reorder": 0.5, "every": 4}),
    "listed automatic": (models.climb_listed_auto, {}),
}
kinds = pytest.mark.parametrize("kind", KINDS)
# Every entry of an automatic kernel, in geometries that leave lanes, warps and blocks empty for a hundred samples.
SHAPES = {
    "range": Shape("range", 64),
    "step": Shape("step", 128),
    "persist": Shape("persist", 64, 256, 32),
    "persist, counted": Shape("persist", 64, 256, 32, counts_lanes=True),
    "persist, wide": Shape("persist", 256, 1024, 128),
}
FOREVER = 2_000_000_000


@pytest.fixture
def side(target: str) -> Side:
    return Side(target)


@pytest.fixture
def device() -> Side:
    return Side("cuda")


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Callable[[Shape], None]:
    """Let every run that is bound from now on take this shape."""

    def use(shape: Shape) -> None:
        monkeypatch.setattr("eagle.aio.device_loop.choose", lambda *_: shape)

    return use


@pytest.fixture
def thin_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of a device that hold one step each."""
    monkeypatch.setattr("eagle.aio.device_loop.SLICE_NS", 1)


def climbing(side: Side, kind: str = "automatic", n: int = 700, longest: int = 60) -> tuple[dict[str, Any], np.ndarray]:
    """Planes of a climb that ends at x = goal, in shuffled order, and the goals on the host."""
    goal = np.random.default_rng(n).integers(1, longest + 1, n).astype(float)
    goal[n // 2] = longest
    planes = side.put({"x": np.zeros(n), "goal": goal, "c": np.zeros(n)})
    if kind == "several":
        del planes["c"]
    return {**planes, "r": 1.0}, goal


def same(side: Side, array: Any, want: Any) -> None:
    np.testing.assert_array_equal(side.get(array), want)


def consistent(side: Side, sim: Any, planes: dict[str, Any], goal: np.ndarray) -> np.ndarray:
    """State, mask and counter agree, wherever the run was cut; gives the steps of every sample."""
    x, mask = side.get(planes["x"]), side.get(sim.terminated)
    same(side, planes["goal"], goal)  # whatever a reorder moved is back
    assert np.array_equal(mask, x >= goal)
    assert np.all(x <= goal)
    if "c" in planes:
        same(side, planes["c"], x)
    assert int(side.get(sim.finished)[0]) == np.count_nonzero(mask)
    return x


# ---- the answer ------------------------------------------------------------------------------------------------------


# racecheck (of CUDA 13.0) crashes over a compaction inside a conditional node; the compaction itself is checked in
# test_active_set_device.py.
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if "listed" in kind else sanitize) for kind in KINDS])
def test_every_kind_runs_each_sample_to_its_own_end(side: Side, kind: str) -> None:
    model, options = KINDS[kind]
    planes, goal = climbing(side, kind)
    result = eagle.sync.simulate(model, max_steps=1000, **options, **planes)
    same(side, planes["x"], goal)
    same(side, result.finished, np.ones(goal.size, bool))
    assert result.x is planes["x"]
    report = result.report
    assert (report.n, report.finished, report.done, result.status) == (700, 700, True, "finished")
    assert report.launches >= 1
    assert report.steps >= 60
    assert report.probe is False
    if "reorder" not in kind:
        assert report.reorders == 0
    assert (report.compactions > 0) == ("listed" in kind)


@kinds
@pytest.mark.parametrize("n", [0, 1, 31, 33, 257])
def test_small_batches(side: Side, kind: str, n: int) -> None:
    model, options = KINDS[kind]
    goal = np.arange(1.0, n + 1.0)[::-1].copy()
    planes = side.put({"x": np.zeros(n), "goal": goal, "c": np.zeros(n)})
    if kind == "several":
        del planes["c"]
    result = eagle.sync.simulate(model, max_steps=1000, r=1.0, **options, **planes)
    same(side, planes["x"], goal)
    assert (result.done, result.n) == (True, n)
    assert (result.report.launches == 0) == (n == 0)


@gpu
@pytest.mark.parametrize(
    "entry", [pytest.param(name, marks=sanitize) if name == "persist, counted" else name for name in SHAPES]
)
def test_every_entry_gives_the_bits_of_numpy(device: Side, force: Callable[[Shape], None], entry: str) -> None:
    force(SHAPES[entry])
    given = models.logistic_planes(3, n=500)
    planes = device.put(given)
    report = eagle.sync.simulate(models.logistic, max_steps=1000, **planes).report
    same(device, planes["x"], models.logistic_loop(given["x"], given["last"], given["r"]))
    same(device, planes["k"], given["last"])
    shape = SHAPES[entry]
    assert (report.entry, report.block, report.mode) == (shape.entry, shape.block, shape.mode)
    assert (report.threads_per_sm, report.chunk) == (shape.threads_per_sm, shape.chunk)
    if shape.counts_lanes:
        assert 0.0 < report.lane_utilisation <= 1.0
    else:
        assert report.lane_utilisation is None
    if shape.entry != "step":
        assert (report.launches, report.steps, report.exact_steps) == (1, given["last"].max(), True)
        assert report.launches_by_k == {int(given["last"].max()): 1}


@pytest.mark.parametrize("n", [97, 3000])
def test_the_twin_on_numpy_planes_gives_the_same_bits(side: Side, n: int) -> None:
    given = models.logistic_planes(7, n=n)
    planes = side.put(given)
    assert eagle.sync.simulate(models.logistic, max_steps=1000, **planes).done
    same(side, planes["x"], models.logistic_loop(given["x"], given["last"], given["r"]))


@sanitize
def test_float32(side: Side) -> None:
    goal = np.arange(1.0, 301.0, dtype=np.float32)
    planes = side.put({"x": np.zeros(300, np.float32), "c": np.zeros(300, np.float32), "goal": goal})
    result = eagle.sync.simulate(models.climb, max_steps=1000, scalar_type="float32", r=1.0, **planes)
    assert result.x.dtype == np.float32
    same(side, planes["c"], goal)


# ---- slices, caps, going on ------------------------------------------------------------------------------------------


@sanitize
@gpu
@pytest.mark.usefixtures("thin_slices")
@pytest.mark.parametrize("entry", ["range", "persist", "step"])
def test_a_run_in_slices_is_the_run_in_one(device: Side, force: Callable[[Shape], None], entry: str) -> None:
    force(SHAPES[entry])
    given = models.logistic_planes(5, n=200, longest=30)
    planes = device.put(given)
    longest = int(given["last"].max())
    report = eagle.sync.simulate(models.logistic, max_steps=1000, **planes).report
    same(device, planes["x"], models.logistic_loop(given["x"], given["last"], given["r"]))
    same(device, planes["k"], given["last"])
    assert (report.launches, report.steps, report.finished, report.done) == (longest, longest, 200, True)
    assert report.launches_by_k == {1: longest}


@pytest.mark.parametrize(
    ("kind", "cap", "taken"),
    [("automatic", 37, 37), ("one", 37, 37), ("four", 38, 40), ("several", 37, 37), ("listed", 20, 32)],
)
def test_the_cap(side: Side, kind: str, cap: int, taken: int) -> None:
    model, options = KINDS[kind]
    planes, _ = climbing(side, kind)
    planes["goal"][...] = np.inf
    result = eagle.sync.simulate(model, max_steps=cap, **options, **planes)
    assert (result.status, result.done, result.steps, result.report.finished) == ("max_steps", False, taken, 0)
    same(side, planes["x"], np.full(700, float(taken)))
    if kind in ("automatic", "one"):
        assert result.report.exact_steps is True


@gpu
@pytest.mark.parametrize("entry", SHAPES)
def test_the_cap_is_exact_in_every_entry(device: Side, force: Callable[[Shape], None], entry: str) -> None:
    force(SHAPES[entry])
    planes, goal = climbing(device)
    result = eagle.sync.simulate(models.climb, max_steps=17, **planes)
    same(device, planes["x"], np.minimum(goal, 17.0))
    assert (result.steps, result.report.exact_steps) == (17, True)
    assert result.report.finished == np.count_nonzero(goal <= 17)


@kinds
def test_a_second_run_goes_on_and_one_after_the_end_does_nothing(side: Side, kind: str) -> None:
    model, options = KINDS[kind]
    planes, goal = climbing(side, kind)
    sim = eagle.sync.simulation(model, max_steps=16, **options, **planes)
    seen = []
    for run in range(1, 6):
        result = sim.run()
        seen.append(result.status)
        taken = consistent(side, sim, planes, goal)
        np.testing.assert_array_equal(taken, np.minimum(goal, 16.0 * run))
        assert result.report.finished == np.count_nonzero(goal <= 16 * run)
    assert seen == ["max_steps"] * 3 + ["finished"] * 2
    assert (result.steps, result.report.launches, result.report.launches_by_k) == (0, 0, {})


@gpu
@pytest.mark.parametrize("entry", ["range", "persist", "step"])
def test_every_entry_goes_on_from_samples_that_have_finished(
    device: Side, force: Callable[[Shape], None], entry: str
) -> None:
    force(SHAPES[entry])
    planes, goal = climbing(device)
    sim = eagle.sync.simulation(models.climb, max_steps=40, **planes)
    first, second = sim.run().report, sim.run().report
    consistent(device, sim, planes, goal)
    assert first.finished == np.count_nonzero(goal <= 40)
    assert (second.finished, second.done) == (700, True)


@kinds
def test_reset_starts_over(side: Side, kind: str) -> None:
    model, options = KINDS[kind]
    planes, goal = climbing(side, kind)
    sim = eagle.sync.simulation(model, max_steps=1000, **options, **planes)
    reports = []
    for _ in range(3):
        planes["x"][...] = 0.0
        if "c" in planes:
            planes["c"][...] = 0.0
        sim.reset()
        same(side, sim.terminated, np.zeros(700, bool))
        assert int(side.get(sim.finished)[0]) == 0
        reports.append(sim.run().report)
        consistent(side, sim, planes, goal)
    assert all(report.finished == 700 for report in reports)


def test_the_counts_of_a_reordering_run_start_over_too(side: Side) -> None:
    n = 20_000
    goal = np.floor(np.exp(np.random.default_rng(4).uniform(0.0, np.log(200.0), n))) + 1.0
    planes = side.put({"x": np.zeros(n), "c": np.zeros(n), "goal": goal})
    sim = eagle.sync.simulation(models.climb_listed, r=1.0, every=4, reorder=0.5, max_steps=1000, **planes)
    counts = []
    for _ in range(3):
        planes["x"][...] = planes["c"][...] = 0.0
        sim.reset()
        report = sim.run().report
        counts.append((report.launches, report.steps, report.reorders))
        consistent(side, sim, planes, goal)
    assert counts[0][2] >= 1
    assert counts == counts[:1] * 3


def test_preset_samples_never_run(side: Side) -> None:
    planes, goal = climbing(side)
    preset = np.arange(700) % 3 == 0
    mask = side.xp.array(preset)
    runner = eagle.sync.until_done(eagle.sync.deploy(models.climb), max_steps=1000, terminated=mask, **planes)
    report = runner.run()
    assert (report.finished, report.done) == (700, True)
    same(side, planes["c"], np.where(preset, 0.0, goal))
    assert runner.terminated is mask


# ---- cancelling ------------------------------------------------------------------------------------------------------


async def cancelled_in_the_middle(sim: Any, *, at_least: int) -> None:
    """Run until the run has begun, and has counted so many sample-steps; then cancel it and wait until it has left."""
    async with anyio.create_task_group() as group:
        group.start_soon(sim.run)
        async for now in sim.progress(0.001):
            if now.steps >= at_least:
                break
        group.cancel_scope.cancel()


@kinds
@deadline
async def test_a_cancelled_run_leaves_everything_agreeing_and_goes_on(side: Side, kind: str) -> None:
    model, options = KINDS[kind]
    n = 700
    goal = 1e9 + np.arange(float(n))
    planes = side.put({"x": np.zeros(n), "goal": goal, "c": np.zeros(n)})
    if kind == "several":
        del planes["c"]
    sim = await eagle.simulation(model, max_steps=FOREVER, r=1.0, **options, **planes)
    # A loop inside one graph tells nothing before its end.
    whole = side.cuda and kind != "automatic"
    for _ in range(2):
        await cancelled_in_the_middle(sim, at_least=0 if whole else 1)
        consistent(side, sim, planes, goal)
    taken = consistent(side, sim, planes, goal)
    assert whole or taken.max() > 0
    if side.cuda:
        assert taken.min() == taken.max()  # every launch is the same steps for all
    near = taken + np.random.default_rng(1).integers(1, 50, n)
    planes["goal"][...] = side.xp.asarray(near)
    result = await sim.run()
    assert result.done
    consistent(side, sim, planes, near)


@gpu
@pytest.mark.usefixtures("thin_slices")
@deadline
async def test_a_cancel_between_thin_slices(device: Side) -> None:
    goal = np.full(300, 1e9)
    planes = device.put({"x": np.zeros(300), "c": np.zeros(300), "goal": goal})
    sim = await eagle.simulation(models.climb, max_steps=FOREVER, r=1.0, **planes)
    await cancelled_in_the_middle(sim, at_least=300 * 5)
    taken = consistent(device, sim, planes, goal)
    assert taken.min() == taken.max() >= 5


@deadline
async def test_one_run_at_a_time(side: Side) -> None:
    planes = side.put(models.endless_planes(500))
    sim = await eagle.simulation(models.climb, max_steps=FOREVER, **planes)
    async with anyio.create_task_group() as group:
        group.start_soon(sim.run)
        async for now in sim.progress(0.001):
            if now.steps:
                break
        with pytest.raises(Busy, match="climb"):
            await sim.run()
        with pytest.raises(Busy, match="climb"):
            sim.reset()
        group.cancel_scope.cancel()
    sim.reset()
    planes["goal"][...] = planes["x"] + 3.0
    assert (await sim.run()).done


def gliding(side: Side, end: float) -> tuple[dict[str, Any], np.ndarray]:
    """Sample-major planes of `glide`, all numbers dyadic: p is exactly t * u, wherever a run ends."""
    n = 200
    u = np.random.default_rng(2).integers(-8, 9, (n, 3)).astype(float)
    ends = np.full(n, end) if np.isinf(end) else np.arange(1.0, n + 1.0) * 0.125
    arrays = {"p": np.zeros((n, 3)), "t": np.zeros(n), "u": u, "end": ends}
    return {**side.put(arrays), "dt": 0.125}, u


@sanitize
def test_a_sample_major_state_is_written_back(side: Side) -> None:
    planes, u = gliding(side, 0.0)
    with pytest.warns(LayoutWarning):
        result = eagle.sync.simulate(models.glide, max_steps=1000, **planes)
    assert result.p is planes["p"]
    same(side, planes["t"], side.get(planes["end"]))
    same(side, planes["p"], side.get(planes["t"])[:, None] * u)


@deadline
async def test_a_sample_major_state_is_written_back_by_a_cancelled_run_too(side: Side) -> None:
    planes, u = gliding(side, np.inf)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LayoutWarning)
        sim = await eagle.simulation(models.glide, max_steps=FOREVER, **planes)
    for _ in range(2):  # the second run takes in what the first one wrote back
        before = side.get(planes["t"])
        await cancelled_in_the_middle(sim, at_least=1)
        t = side.get(planes["t"])
        assert t.max() > before.max()
        same(side, planes["p"], t[:, None] * u)


# ---- the order of samples --------------------------------------------------------------------------------------------


def orders(last: np.ndarray) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "the truth": last,
        "the wrong way": -last,
        "noise": rng.random(last.size),
        "all alike": np.ones(last.size, np.int32),
        "bits": last > last.mean(),
    }


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("the truth", marks=sanitize),
        "noise",
        "the wrong way",
        "all alike",
        "bits",
    ],
)
def test_an_order_changes_no_bit(side: Side, name: str) -> None:
    given = models.logistic_planes(11, n=600)
    cost = side.xp.asarray(orders(given["last"])[name])
    planes = side.put(given)
    sim = eagle.sync.simulation(models.logistic, max_steps=150, order=cost, **planes)
    first = sim.run()
    same(side, planes["k"], np.minimum(given["last"], 150.0))
    same(side, first.finished, given["last"] <= 150)
    while not sim.run().done:
        pass
    same(side, planes["x"], models.logistic_loop(given["x"], given["last"], given["r"]))
    same(side, planes["k"], given["last"])
    same(side, planes["last"], given["last"])


@sanitize
def test_a_learnt_order_changes_no_bit(side: Side) -> None:
    given = models.logistic_planes(13, n=600)
    planes = side.put(given)
    sim = eagle.sync.simulation(models.logistic, max_steps=1000, order="learn", **planes)
    for _ in range(3):
        for name in ("x", "k"):
            planes[name][...] = side.xp.asarray(given[name])
        sim.reset()
        report = sim.run().report
        assert (report.finished, report.done) == (600, True)
        same(side, planes["x"], models.logistic_loop(given["x"], given["last"], given["r"]))
        same(side, planes["k"], given["last"])


@gpu
def test_what_is_learnt_is_what_each_sample_took(device: Side) -> None:
    given = models.logistic_planes(17, n=600)
    planes = device.put(given)
    sim = eagle.sync.simulation(models.logistic, max_steps=1000, order="learn", **planes)
    assert sim.run().report.launches > 1
    cost = device.get(sim.runner.bound.planes.cost)
    assert len(np.unique(cost)) > 2
    longest = -1.0
    for rung in np.unique(cost):
        taken = given["last"][cost == rung]
        assert taken.min() > longest
        longest = taken.max()


def test_a_learnt_order_waits_for_a_run_that_came_to_its_end(side: Side) -> None:
    given = models.logistic_planes(19, n=300)
    planes = side.put(given)
    sim = eagle.sync.simulation(models.logistic, max_steps=40, order="learn", **planes)
    while not sim.run().done:
        pass
    same(side, planes["x"], models.logistic_loop(given["x"], given["last"], given["r"]))


# ---- watching --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("thin_slices")
@deadline
async def test_progress_only_grows_and_ends_with_the_final_value(side: Side) -> None:
    planes, goal = climbing(side, longest=200)
    sim = await eagle.simulation(models.climb, max_steps=1000, **planes)
    values: list[eagle.Progress] = []

    async def watch() -> None:
        values.extend([now async for now in sim.progress(0.0001)])

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        await sim.run()
    assert {value.n for value in values} == {700}
    for one, next_ in itertools.pairwise(values):
        assert one.finished <= next_.finished
        assert one.steps <= next_.steps
        assert one.elapsed_s <= next_.elapsed_s
    assert (values[-1].finished, values[-1].eta_s) == (700, 0.0)
    assert values[-1].steps >= goal.sum()


@pytest.mark.parametrize("kind", ["automatic", "one"])
@deadline
async def test_who_looks_late_still_sees_the_end(side: Side, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watcher that comes while the only launch is in flight must not wait for a run that never comes."""
    monkeypatch.setattr("eagle.aio.device_loop.SLICE_NS", 10**12)
    steps = (20_000_000 if kind == "automatic" else 100_000) if side.cuda else 200_000  # a few tenths of a second
    planes = side.put(models.endless_planes(64))
    sim = await eagle.simulation(KINDS[kind][0], max_steps=steps, **planes)
    runner = sim.runner
    async with anyio.create_task_group() as group:
        group.start_soon(sim.run)
        await until(lambda: runner.bound.running not in (None, runner))
        last = None
        async for now in sim.progress(0.001):
            last = now
    assert last is not None
    assert last.steps >= 64 * steps


# ---- the device ------------------------------------------------------------------------------------------------------


@gpu
def test_the_graph_is_built_once(device: Side) -> None:
    planes, _ = climbing(device)
    sim = eagle.sync.simulation(models.climb_one, max_steps=1000, **planes)
    assert sim.pipeline is None
    first = sim.run().report
    pipeline = sim.pipeline
    second = sim.run().report
    assert first.build_s > 0
    assert second.build_s == 0.0
    assert sim.pipeline is pipeline
    assert isinstance(pipeline, eagle.sync.GraphPipeline)


@gpu
@pytest.mark.parametrize("priority", [0, -1, -2])
@pytest.mark.parametrize("kind", ["automatic", "one"])
def test_priority_is_that_of_the_stream(device: Side, kind: str, priority: int) -> None:
    from eagle.kernels.device_call import cuda_driver

    planes, goal = climbing(device)
    sim = eagle.sync.simulation(KINDS[kind][0], max_steps=1000, priority=priority, **planes)
    assert sim.run().done
    same(device, planes["x"], goal)
    status, found = cuda_driver().cuStreamGetPriority(sim.pipeline.stream)
    assert (int(status), int(found)) == (0, priority)


@pytest.mark.parametrize("kind", ["automatic", "listed"])
@deadline
async def test_runs_at_once_give_the_bits_of_runs_alone(side: Side, kind: str) -> None:
    if kind == "automatic":
        given = [models.logistic_planes(seed, n=300) for seed in range(6)]
        want = [models.logistic_loop(g["x"], g["last"], g["r"]) for g in given]
        model = models.logistic
    else:
        given = [{**models.climb_planes(300), "goal": np.arange(1.0, 301.0) * (seed + 1)} for seed in range(6)]
        want, model = [g["goal"] for g in given], models.climb_listed
    planes = [side.put(g) for g in given]
    sims = [await eagle.simulation(model, max_steps=2000, **p) for p in planes]
    async with anyio.create_task_group() as group:
        for sim in sims:
            group.start_soon(sim.run)
    for bits, p in zip(want, planes, strict=True):
        same(side, p["x"], bits)
    if side.cuda:
        assert len({sim.pipeline.stream for sim in sims}) > 1


@gpu
def test_a_run_follows_and_is_followed_by_the_current_stream(device: Side) -> None:
    cupy = device.xp
    warm, _ = climbing(device)
    planes, goal = climbing(device)
    sim = eagle.sync.simulation(models.climb, max_steps=1000, **planes)
    eagle.sync.simulate(models.climb, max_steps=1000, **warm)
    out, big = cupy.zeros(700), cupy.ones((4096, 4096))
    mine = cupy.cuda.Stream(non_blocking=True)
    device.settle()
    with mine:
        for _ in range(10):
            big = big @ big * 1e-6  # keeps the stream busy while the next ones are queued
        planes["x"][...] = -2.0
        sim.run()
        cupy.copyto(out, planes["x"])
        assert cupy.cuda.get_current_stream().ptr == mine.ptr
    mine.synchronize()
    same(device, out, goal)
    same(device, planes["c"], goal + 2.0)


@gpu
@pytest.mark.parametrize("kind", ["automatic", "listed, reorder"])
def test_dropped_simulations_give_their_device_memory_back(device: Side, kind: str) -> None:
    model, options = KINDS[kind]
    pool = device.xp.get_default_memory_pool()

    def one() -> None:
        planes, _ = climbing(device, kind, n=5000)
        assert eagle.sync.simulation(model, max_steps=1000, **options, **planes).run().done

    one()
    gc.collect()
    device.settle()
    before = pool.used_bytes()
    for _ in range(50):
        one()

    def back() -> bool:
        gc.collect()
        return bool(pool.used_bytes() <= before)

    until_blocking(back)


@gpu
def test_torch_in_torch_out(device: Side) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    goal = np.arange(1.0, 101.0)
    x, c = (torch.zeros(100, dtype=torch.float64, device="cuda") for _ in range(2))
    result = eagle.sync.simulate(models.climb, x, c, torch.as_tensor(goal, device="cuda"), 1.0, max_steps=1000)
    assert result.x is x
    assert isinstance(result.finished, torch.Tensor)
    assert bool(result.finished.all())
    np.testing.assert_array_equal(c.cpu().numpy(), goal)


@gpu
def test_jax_planes_may_be_read_and_not_written(device: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax")
    try:
        put = jax.devices("gpu")[0]
    except RuntimeError:
        pytest.skip("this JAX has no GPU")
    goal = np.arange(1.0, 101.0, dtype=np.float32)
    planes = device.put({"x": np.zeros(100, np.float32), "c": np.zeros(100, np.float32)})
    options: dict[str, Any] = {"r": 1.0, "max_steps": 1000, "scalar_type": "float32"}
    eagle.sync.simulate(models.climb, goal=jax.device_put(goal, put), **options, **planes)
    same(device, planes["c"], goal)
    state = jax.device_put(np.zeros(100, np.float32), put)
    with pytest.raises(ValueError, match="'x'"):
        eagle.sync.simulate(models.climb, x=state, c=planes["c"], goal=device.xp.asarray(goal), **options)
