"""The CUDA target at its own level: capture and its failures, ordering, toggling, loops that are stopped, faults."""

from __future__ import annotations

import gc
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from eagle.aio.completion import Completion
from eagle.aio.guards import RepeatWhile, SkipGuard, Skippable
from eagle.aio.target import Member
from eagle.errors import NonToggleableMemberError, StateError, UnknownMemberError
from tests.helpers.child import run_script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.gpu

SOURCE = r"""
extern "C" __global__ void affine(double* y, double m, double c) { *y = *y * m + c; }
extern "C" __global__ void tick(unsigned int* word) { *word += 1; }
extern "C" __global__ void spin(unsigned long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); } while (now - start < ns);
}
"""


@pytest.fixture(scope="module")
def kernels() -> Any:
    import cupy

    module = cupy.RawModule(code=SOURCE)
    return {name: module.get_function(name) for name in ("affine", "tick", "spin")}


class Kit:
    """Steps over one-element arrays, and graphs made of them."""

    def __init__(self, kernels: Any) -> None:
        import cupy

        self.cp, self._kernels = cupy, kernels
        for name, args in {
            "affine": (cupy.zeros(1), np.float64(1), np.float64(0)),
            "tick": (self.words(0),),
            "spin": (np.uint64(0),),
        }.items():
            kernels[name]((1,), (1,), args)

    def words(self, *values: int) -> Any:
        return self.cp.asarray(values, dtype=self.cp.uint32)

    def affine(self, y: Any, m: float, c: float) -> Callable[[], None]:
        return lambda: self._kernels["affine"]((1,), (1,), (y, np.float64(m), np.float64(c)))

    def tick(self, word: Any) -> Callable[[], None]:
        return lambda: self._kernels["tick"]((1,), (1,), (word,))

    def spin(self, ms: float) -> Callable[[], None]:
        return lambda: self._kernels["spin"]((1,), (1,), (np.uint64(ms * 1e6),))

    def graph(self, *stages: Any, name: str = "g") -> Any:
        from eagle.aio.cuda_graph import CudaGraph

        graph = CudaGraph(name)
        graph.build(members(*stages))
        return graph


def members(*stages: Any) -> list[tuple[Member, ...]]:
    index, built = 0, []
    for stage in stages:
        steps = stage if isinstance(stage, list) else [stage]
        built.append(tuple(Member(index + i, None, step) for i, step in enumerate(steps)))
        index += len(steps)
    return built


def replay(graph: Any, n: int = 1, *, seeds: Any = None, pre_launch: Any = None) -> Any:
    return graph.issue("result", n, pre_launch=pre_launch, seeds=seeds)


@pytest.fixture
def kit(kernels: Any) -> Iterator[Kit]:
    made = Kit(kernels)
    before = made.cp.cuda.get_current_stream().ptr
    yield made
    assert made.cp.cuda.get_current_stream().ptr == before
    made.cp.cuda.runtime.deviceSynchronize()


# ---- replaying -------------------------------------------------------------------------------------------------------


def test_replays_run_in_order_and_the_completion_gives_the_result(kit: Kit) -> None:
    y = kit.cp.zeros(1)
    graph = kit.graph(kit.affine(y, 2.0, 0.0), kit.affine(y, 1.0, 1.0))
    first, second = replay(graph, 3), replay(graph, 2)
    assert second.wait(10) == "result"
    assert first.done()
    assert float(y[0]) == 31.0


def test_no_replays_still_wait_and_prepare(kit: Kit) -> None:
    y, seen = kit.cp.zeros(1), []
    graph = kit.graph(kit.affine(y, 1.0, 1.0))
    replay(graph, 0, pre_launch=lambda: seen.append(kit.cp.cuda.get_current_stream().ptr)).wait(10)
    assert seen == [graph.stream]
    assert float(y[0]) == 0.0


def test_a_pre_launch_that_raises_issues_nothing(kit: Kit) -> None:
    y = kit.cp.zeros(1)
    graph = kit.graph(kit.affine(y, 1.0, 1.0), name="heat")

    def hook() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        replay(graph, 1, pre_launch=hook)
    assert "heat" in "".join(caught.value.__notes__)
    replay(graph).wait(10)
    assert float(y[0]) == 1.0


def test_every_kind_of_seed_comes_first(kit: Kit) -> None:
    y = kit.cp.zeros(1)
    slow = kit.graph(kit.spin(30), kit.affine(y, 0.0, 5.0))
    graph = kit.graph(kit.affine(y, 2.0, 0.0))
    replay(graph, 1, seeds=[replay(slow)]).wait(10)
    assert float(y[0]) == 10.0
    host: Completion[None] = Completion(None)
    waiting = replay(graph, 1, seeds=[host])
    time.sleep(0.02)
    assert not waiting.done()
    host.settle(ValueError("however it ended"))
    waiting.wait(10)
    assert float(y[0]) == 20.0
    event, stream = kit.cp.cuda.Event(), kit.cp.cuda.Stream(non_blocking=True)
    with stream:
        kit.spin(20)()
        kit.affine(y, 0.0, 1.0)()
        event.record(stream)
    replay(graph, 1, seeds=[event]).wait(10)
    assert float(y[0]) == 2.0


def test_many_threads_may_issue_at_once(kit: Kit) -> None:
    count = kit.words(0)
    graph = kit.graph(kit.tick(count))
    done: list[Any] = []

    def issue() -> None:
        done.extend(replay(graph) for _ in range(50))

    threads = [threading.Thread(target=issue) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for completion in done:
        completion.wait(10)
    assert int(count[0]) == 200


def test_hundreds_of_replays_may_wait_behind_a_busy_stream(kit: Kit) -> None:
    count = kit.words(0)
    graph = kit.graph(*[kit.tick(count)] * 8)
    slow = replay(kit.graph(kit.spin(500)))
    first = replay(graph, 1, seeds=[slow])
    last = [replay(graph, seeds=()) for _ in range(300)][-1]
    assert not first.done()  # had a launch blocked, the device would have come this far
    last.wait(20)
    assert int(count[0]) == 301 * 8


# ---- capture ---------------------------------------------------------------------------------------------------------


def test_a_failed_capture_names_the_step_and_leaves_everything_usable(kit: Kit) -> None:
    from eagle.aio.cuda_graph import CudaGraph

    y, flag = kit.cp.zeros(1), kit.words(1)

    def broken() -> None:
        kit.affine(y, 1.0, 1.0)()
        raise KeyError("mine")

    good = kit.affine(y, 1.0, 1.0)
    guard = SkipGuard.nonzero(flag)
    graph = CudaGraph("heat")
    for stages in ([good, broken], [[good, broken, good]], [Skippable(broken, guard)], [RepeatWhile(broken, guard, 3)]):
        with pytest.raises(KeyError, match="mine") as caught:
            graph.build(members(*stages))
        assert "'heat'" in "".join(caught.value.__notes__)
        assert graph.captured is None
    assert gc.isenabled()
    graph.build(members(good))
    replay(graph, 2).wait(10)
    assert float(y[0]) == 2.0


def test_a_step_that_waits_for_the_device_is_an_error_of_that_step(kit: Kit) -> None:
    from eagle.aio.cuda_graph import CudaGraph

    graph = CudaGraph("heat")
    with pytest.raises(Exception, match="capturing") as caught:
        graph.build(members(lambda: kit.cp.cuda.get_current_stream().synchronize()))
    assert "member 0" in "".join(caught.value.__notes__)

    def quiet() -> None:
        try:
            kit.cp.cuda.get_current_stream().synchronize()
        except kit.cp.cuda.runtime.CUDARuntimeError:
            pass

    with pytest.raises(StateError, match="member 0"):
        graph.build(members(quiet))
    y = kit.cp.zeros(1)
    graph.build(members(kit.affine(y, 1.0, 1.0)))
    replay(graph).wait(10)
    assert float(y[0]) == 1.0


def test_the_collector_is_held_off_and_the_users_setting_kept(kit: Kit) -> None:
    seen: list[bool] = []
    kit.graph(lambda: seen.append(gc.isenabled()), kit.tick(kit.words(0)))
    assert seen == [False]
    assert gc.isenabled()
    gc.disable()
    try:
        kit.graph(kit.tick(kit.words(0)))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_temporaries_of_a_step_live_as_long_as_the_graph(kit: Kit) -> None:
    x, y = kit.cp.arange(1000.0), kit.cp.zeros(1000)
    y += x * 2.0 + 1.0  # CuPy compiles on first use
    y.fill(0)

    def step() -> None:
        nonlocal y
        y += x * 2.0 + 1.0

    graph = kit.graph(step)
    junk = [kit.cp.full(1000, 7.0) for _ in range(64)]
    replay(graph, 3).wait(10)
    np.testing.assert_array_equal(y.get(), 3 * (2 * np.arange(1000.0) + 1))
    assert float(junk[0][0]) == 7.0


def test_a_name_that_a_step_rebinds_stays_readable(kit: Kit) -> None:
    a = kit.cp.full(1 << 16, 3.0)
    a * 2.0

    def step() -> None:
        nonlocal a
        a = a * 2.0

    graph = kit.graph(step)
    junk = [kit.cp.full(1 << 16, 9.0) for _ in range(8)]
    for _ in range(3):  # each replay doubles the array that the step found, not its own result
        replay(graph).wait(10)
        assert float(a[0]) == float(a[-1]) == 6.0
    assert len(junk) == 8


def test_a_step_may_not_launch_another_pipeline(kit: Kit) -> None:
    from eagle.aio.cuda_graph import CudaGraph

    inner = kit.graph(kit.tick(kit.words(0)), name="inner")
    outer = CudaGraph("outer")
    with pytest.raises(StateError, match="inner"):
        outer.build(members(lambda: replay(inner)))
    replay(inner).wait(10)


@pytest.mark.parametrize("bad", [np.zeros(1, np.uint32), "int32"])
def test_a_guard_over_other_arrays_is_named_before_anything_is_recorded(kit: Kit, bad: Any) -> None:
    from eagle.aio.cuda_graph import CudaGraph

    called: list[int] = []
    array = kit.cp.zeros(1, bad) if isinstance(bad, str) else bad
    steps = [lambda: called.append(1), Skippable(kit.tick(kit.words(0)), SkipGuard.nonzero(array))]
    with pytest.raises(TypeError, match=r"member 1 .*uint32"):
        CudaGraph("heat").build(members(*steps))
    assert called == []


def test_other_threads_may_use_the_device_while_one_captures(kit: Kit) -> None:
    count, stop, errors = kit.words(0), threading.Event(), []

    def churn() -> None:
        try:
            stream = kit.cp.cuda.Stream(non_blocking=True)
            with stream:
                while not stop.is_set():
                    kit.cp.cuda.alloc_pinned_memory(1 << 16)
                    kit.cp.ones(1000).sum()
                    stream.synchronize()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(30):
            replay(kit.graph(*[kit.tick(count)] * 8)).wait(10)
    finally:
        stop.set()
        thread.join()
    assert errors == []
    assert int(count[0]) == 240


@pytest.mark.parametrize("siblings", [1, 2])
def test_a_capture_that_another_thread_breaks_is_repeated(kit: Kit, siblings: int) -> None:
    calls, count, others = [], kit.words(0), [kit.words(0) for _ in range(siblings)]

    def meddle() -> None:
        with pytest.raises(kit.cp.cuda.runtime.CUDARuntimeError):
            kit.cp.cuda.runtime.deviceSynchronize()

    def step() -> None:
        kit.tick(count)()
        calls.append(1)
        if len(calls) == 1:
            thread = threading.Thread(target=meddle)
            thread.start()
            thread.join()

    ticks = [kit.tick(other) for other in others]  # a word each: siblings may run at the same time
    graph = kit.graph(step, ticks if siblings > 1 else ticks[0])
    assert len(calls) == 2
    replay(graph).wait(10)
    assert [int(word[0]) for word in (count, *others)] == [1] * (1 + siblings)


# ---- members ---------------------------------------------------------------------------------------------------------


def test_replays_keep_the_states_they_were_issued_with(kit: Kit) -> None:
    a, b = kit.words(0), kit.words(0)
    graph = kit.graph(kit.spin(10), kit.tick(a), kit.tick(b))
    for round_ in range(4):
        graph.set_enabled(1, round_ % 2 == 0)
        replay(graph)
    graph.set_enabled(1, False)
    replay(graph, 0).wait(10)
    assert (int(a[0]), int(b[0])) == (2, 4)


def test_nodes_of_a_member_and_nobody_elses(kit: Kit) -> None:
    y, word = kit.cp.zeros(1), kit.words(0)
    guarded = Skippable(kit.tick(word), SkipGuard.nonzero(word))
    graph = kit.graph(lambda: (kit.tick(word)(), kit.affine(y, 1.0, 1.0)()), [kit.tick(word), guarded])
    assert [len(graph.member_nodes(i)) for i in range(3)] == [2, 1, 2]
    assert [graph.is_toggleable(i) for i in range(3)] == [True, True, False]
    assert graph.node_labels() == ["tick", "affine", "tick", "eagle_if", "tick"]
    assert graph.num_nodes() == 5
    with pytest.raises(UnknownMemberError):
        graph.set_node_enabled(12345, False)
    with pytest.raises(NonToggleableMemberError, match="member 2"):
        graph.set_node_enabled(graph.member_nodes(2)[0], False)
    graph.set_node_enabled(graph.member_nodes(0)[1], False)
    replay(graph).wait(10)
    assert float(y[0]) == 0.0


def test_the_drawing_has_the_members_in_it(kit: Kit) -> None:
    from eagle.aio.cuda_graph import CudaGraph

    word = kit.words(0)
    graph = CudaGraph('my "graph"')
    graph.build([(Member(0, "first", kit.tick(word)),), (Member(1, None, kit.tick(word)),)])
    dot = graph.to_dot()
    assert dot.startswith("digraph")
    assert dot.count("{") == dot.count("}")
    for text in ("member 'first'", "member 1", "tick", 'my \\"graph\\"', "->"):
        assert text in dot


# ---- loops -----------------------------------------------------------------------------------------------------------


def endless(kit: Kit, word: Any) -> RepeatWhile:
    return RepeatWhile(kit.tick(word), SkipGuard.nonzero(kit.words(1)), 2**32 - 1)


def test_a_stopped_loop_ends_and_what_stands_behind_it_runs(kit: Kit) -> None:
    word, y = kit.words(0), kit.cp.zeros(1)
    loop = endless(kit, word)
    graph = kit.graph(loop, kit.affine(y, 1.0, 1.0))
    for _ in range(3):
        running = replay(graph)
        time.sleep(0.005)
        assert not running.done()
        running.stop()
        running.wait(10)
    assert float(y[0]) == 3.0
    assert 0 < loop.iterations() <= int(word[0])


def test_a_stop_hits_its_own_work_only(kit: Kit) -> None:
    left, done, y = kit.words(40), kit.words(0), kit.cp.zeros(1)
    loop = RepeatWhile(kit.tick(done), SkipGuard(done, 0, left, 0), 1000)
    graph = kit.graph(lambda: done.fill(0), loop, kit.affine(y, 1.0, 1.0))
    # Held by device work, not by host work: a launch blocks once about a thousand of them are waiting.
    slow = replay(kit.graph(kit.spin(50)))
    first = replay(graph, 2, seeds=[slow])
    second = replay(graph, 300, seeds=())  # more than there are stop slots
    third = replay(graph, 1, seeds=())
    second.stop()
    first.stop()
    third.wait(20)
    assert first.done()
    assert second.done()
    assert loop.iterations() == 40  # the third one ran to its end
    assert float(y[0]) == 303.0
    replay(graph).wait(10)
    assert loop.iterations() == 40


def test_a_late_stop_hits_nothing(kit: Kit) -> None:
    word = kit.words(0)
    total = kit.words(25)
    loop = RepeatWhile(kit.tick(word), SkipGuard(word, 0, total, 0), 1000)
    graph = kit.graph(lambda: word.fill(0), loop)
    first = replay(graph)
    first.wait(10)
    first.stop()
    for _ in range(300):
        replay(graph)
    replay(graph).wait(10)
    assert loop.iterations() == 25


def test_several_loops_count_their_replays_alike(kit: Kit) -> None:
    a, b, y = kit.words(0), kit.words(0), kit.cp.zeros(1)
    graph = kit.graph([endless(kit, a), endless(kit, b)], kit.affine(y, 1.0, 1.0))
    for _ in range(2):
        running = replay(graph)
        time.sleep(0.005)
        running.stop()
        running.wait(10)
    assert float(y[0]) == 2.0


# ---- faults ----------------------------------------------------------------------------------------------------------


def test_a_fault_reaches_everybody_and_stays() -> None:
    ended = run_script(
        """
        import cupy, sys, time
        import numpy as np
        from eagle.aio.cuda_graph import CudaGraph
        from eagle.aio.target import Member
        from eagle.errors import DeviceFault
        from eagle.kernels.device import healthy

        bad = cupy.RawKernel('extern "C" __global__ void bad(double* p) { p[1ull << 40] = 1.0; }', "bad")
        bad.compile()
        x = cupy.zeros(1)
        graphs = []
        for k in range(5):
            graph = CudaGraph(f"pipe-{k}")
            step = (lambda: bad((1,), (1,), (x,))) if k == 2 else (lambda: cupy.add(x, 1.0, out=x))
            if k != 2:
                step()
            graph.build([(Member(0, None, step),)])
            graphs.append(graph)
        pending, refused = [], 0
        for graph in graphs:
            try:
                pending.append(graph.issue(graph, 1, pre_launch=None, seeds=()))
            except DeviceFault:
                refused += 1
        began = time.perf_counter()
        faults = 0
        for completion in pending:
            try:
                completion.wait(5)
            except DeviceFault as error:
                faults += 1
                assert error.pipeline == completion.name and completion.name in str(error), error
        assert faults >= 1 and time.perf_counter() - began < 5
        for graph in graphs:
            try:
                graph.issue(graph, 1, pre_launch=None, seeds=None)
            except DeviceFault as error:
                assert error.code
            else:
                raise AssertionError
        try:
            CudaGraph("new")
        except DeviceFault:
            print("raised", healthy())
        """
    )
    assert (ended.status, ended.out.strip()) == (0, "raised False"), ended.err
