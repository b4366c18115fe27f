"""Plans: every role of the binary interface, called directly, through deploy, bound, and by name."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import eagle
from eagle.errors import StateError
from eagle.kernels import binding
from tests.helpers import models
from tests.helpers.producer import Producer

X = np.array([0.0, 1.0, -2.0, 4.0])
V = np.arange(12.0).reshape(3, 4)
THETA = np.array([3.0, -1.0])


def both(kernel: Any) -> list[Any]:
    """A kernel as it is called: itself, its plan, and its plan by name."""
    return [kernel, eagle.deploy(kernel), eagle.deploy(eagle.deploy(kernel).plugin)]


# ---- every role ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", both(models.affine), ids=["kernel", "plan", "by name"])
def test_scalars_and_uniforms(call: Any) -> None:
    assert np.array_equal(call(x=X, a=2.0, b=1.0), 2.0 * X + 1.0)


@pytest.mark.parametrize("call", both(models.stretch), ids=["kernel", "plan", "by name"])
def test_vectors(call: Any) -> None:
    assert np.array_equal(call(v=V, a=0.5), 0.5 * V)


@pytest.mark.parametrize("call", both(models.turn), ids=["kernel", "plan", "by name"])
@pytest.mark.parametrize("shape", [(4, 5), (2, 2, 5)])
def test_matrices(call: Any, shape: tuple[int, ...]) -> None:
    m, v = np.arange(20.0).reshape(shape), np.arange(10.0).reshape(2, 5)
    assert np.array_equal(call(m=m, v=v), np.einsum("ijn,jn->in", m.reshape(2, 2, 5), v))


def test_a_matrix_is_changed_in_place() -> None:
    m = np.arange(24.0).reshape(2, 3, 4)
    want = 2.0 * m
    result = models.grow(m, 2.0)
    assert result is m
    assert np.array_equal(m, want)


@pytest.mark.parametrize("call", both(models.line), ids=["kernel", "plan", "by name"])
def test_tables(call: Any) -> None:
    assert np.array_equal(call(x=X, theta=THETA), 3.0 * X - 1.0)
    for wrong in (np.ones(1), np.ones(3), np.ones(0)):
        with pytest.raises(ValueError, match="'theta' is declared with 2 elements"):
            call(x=X, theta=wrong)


def test_tables_of_two_axes() -> None:
    assert np.array_equal(models.grid_value(X, np.arange(6.0).reshape(2, 3)), X + 5.0)


def test_wide_planes() -> None:
    assert np.array_equal(models.edge_sum(np.arange(6.0).reshape(2, 3), X), X + 1.0)
    out = np.zeros((1, 4))
    assert models.spread(X, out) is out
    assert np.array_equal(out[0], X)
    with pytest.raises(ValueError, match=r"'o' needs shape \(rows, 4\)"):
        models.spread(X, np.zeros(3))
    with pytest.raises(ValueError, match="'o'"):
        models.spread(X)


@pytest.mark.parametrize("call", both(models.histogram), ids=["kernel", "plan", "by name"])
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
def test_accumulators(call: Any, dtype: Any) -> None:
    k = np.array([0, 1, 2, 3, 0, 1], dtype)
    x = np.arange(1.0, 7.0)
    want = np.bincount(k, x, 4)
    assert np.array_equal(call(x=x, k=k), want)
    h = np.ones(4)
    assert call(x=x, k=k, h=h) is h
    assert np.array_equal(h, 1.0 + want)


def test_sums_over_the_samples() -> None:
    assert float(models.total(X)) == X.sum()
    assert np.array_equal(models.total_vector(V), V.sum(axis=1))
    assert float(models.total(np.zeros(0))) == 0.0


def test_integers() -> None:
    x = np.array([1, 2, 3], np.int32)
    result = models.count_up(x, 5, np.ones(3))
    assert result["x"] is x
    assert x.tolist() == [6, 7, 8]
    assert result["z"].tolist() == [5.0] * 3
    for wrong in (np.arange(3), np.arange(3, dtype=np.uint32), np.ones(3)):
        with pytest.raises(ValueError, match="'x' must be int32"):
            models.count_up(wrong, 5, np.ones(3))
    with pytest.raises(TypeError, match="'k' is an integer"):
        models.count_up(x, 5.0, np.ones(3))


def test_float32() -> None:
    plan = eagle.deploy(models.affine, scalar_type="float32")
    x = X.astype(np.float32)
    result = plan(x, 2.0, 1.0)
    assert result.dtype == np.float32
    assert np.array_equal(result, 2.0 * x + 1.0)
    with pytest.raises(ValueError, match="'x' must be float32"):
        plan(X, 2.0, 1.0)
    with pytest.raises(ValueError, match="'a' = 1e\\+300 does not fit float32"):
        plan(x, 1e300, 1.0)


def test_grids() -> None:
    lanes = np.arange(24.0)
    want = 100.0 * (np.arange(24) // 8) + np.arange(24) % 8
    for call in both(models.gridded):
        assert np.array_equal(call(x=np.zeros(24)), want)
        with pytest.raises(
            ValueError, match=r"grid \(channel:\?, point:8\), so it takes a multiple of 8 samples; got 23"
        ):
            call(x=np.zeros(23))
    assert np.array_equal(models.filled(lanes[:16]), lanes[:16])
    for n in (8, 24, 7):
        with pytest.raises(ValueError, match=f"so it takes 16 samples; got {n}"):
            models.filled(np.zeros(n))
    with pytest.raises(ValueError, match="'lane'"):
        models.gridded(lane=np.zeros(16), x=np.zeros(16))


def test_the_open_axis_of_a_grid_is_given_by_name() -> None:
    x = np.array([1.0, 2.0, 4.0, 8.0])
    want = [-1.0, -3.0, -2.0, -7.0, -6.0, -4.0]
    for call in both(models.differences):
        assert call(x=x, pair=6).tolist() == want
        assert call(x=x, pair=np.int64(3)).tolist() == want[:3]
        assert call(x=x, pair=0).shape == (0,)
        assert call(x=x, d=np.zeros(6)).tolist() == want
    plan = eagle.deploy(models.differences)
    d = np.zeros(6)
    plan.bind(x=x, d=d, pair=6).launch()
    assert d.tolist() == want
    for extent, error, named in [
        (5, ValueError, "'d' holds 6 samples, and the call asks for 5"),
        (-1, ValueError, "pair=-1"),
        (6.0, TypeError, "pair=6.0"),
        (True, TypeError, "pair=True"),
    ]:
        with pytest.raises(error, match=named):
            plan(x=x, d=np.zeros(6), pair=extent)
    with pytest.raises(ValueError, match="no plane tells its extent; pass pair="):
        plan(x=x)
    with pytest.raises(ValueError, match="'pear'"):
        plan(x=x, pear=6)


def test_dispatches() -> None:
    kind = np.array([0, 1, 2, 1, 7, -1])
    for call in both(models.branching):  # its policy is the runtime's choice
        assert call(kind=kind, x=np.ones(6)).tolist() == [2.0, 2.0, -2.0, 2.0, -2.0, 2.0]
    first, second = eagle.deploy([models.branching, models.branching])
    assert first(0, 1.0) == second(0, 1.0) == 2.0
    with pytest.raises(ValueError, match=r"'segmented' declares dispatch0 as segmented.*policy='switch'"):
        eagle.deploy(models.segmented)


def test_a_promise_to_ascend_is_checked_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = np.array([0, 1, 1, 3]), np.array([0, 2, 1, 3])
    for call in both(models.segments):
        monkeypatch.setenv("HAWK_CHECK_SORTED", "1")
        assert call(segment=right, x=np.ones(4)).tolist() == [1.0, 2.0, 0.0, 1.0]
        assert call(segment=right[:0], x=np.ones(0)).tolist() == [0.0] * 4
        with pytest.raises(ValueError, match="'segment' is declared Sorted and falls after sample 1"):
            call(segment=wrong, x=np.ones(4))
        monkeypatch.delenv("HAWK_CHECK_SORTED")
        call(segment=wrong, x=np.ones(4))


def test_staged_planes() -> None:
    feature = np.arange(15.0).reshape(3, 5)
    assert models.staged(feature, np.array([0, 4])).tolist() == [5.0, 9.0]
    with pytest.raises(ValueError, match="'feature' is declared with 15 elements"):
        models.staged(feature[:, :4].copy(), np.array([0, 3]))


# ---- what a call gives back ------------------------------------------------------------------------------------------


def test_a_tuple_and_a_dict_come_back_as_such() -> None:
    up, twice = models.pair(X)
    assert np.array_equal(up, X + 1.0)
    assert np.array_equal(twice, 2.0 * X)
    result = models.named(X)
    assert list(result) == ["up", "twice"]
    assert np.array_equal(result["twice"], 2.0 * X)


def test_numbers_in_numpy_scalars_out() -> None:
    assert isinstance(models.affine(3.0, 2.0, 1.0), np.float64)
    assert models.pair(2) == (3.0, 4.0)


def test_no_samples() -> None:
    assert models.affine(np.zeros(0), 2.0, 1.0).shape == (0,)
    assert models.stretch(np.zeros((3, 0)), 2.0).shape == (3, 0)


def test_a_kernel_of_the_running_sum_kind_changes_the_callers_array() -> None:
    s = np.ones(4)
    for _ in range(2):
        assert models.running_sum(X, s) is s
    assert np.array_equal(s, 1.0 + 2.0 * X)


# ---- derivatives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", both(models.cubic_vjp), ids=["kernel", "plan", "by name"])
def test_a_derivative_against_the_closed_form(call: Any) -> None:
    got = call(x=X, a=2.0, bar_y=np.full(4, 0.5))
    assert np.array_equal(got["bar_x"], 0.5 * 6.0 * X**2)
    assert np.array_equal(got["bar_a"], 0.5 * X**3)


def test_a_shared_gradient_has_the_extent_of_its_table() -> None:
    for call in (models.line_vjp, eagle.deploy(models.line_vjp)):
        got = call(x=X, theta=THETA, bar_y=np.ones(4))
        assert np.array_equal(got["bar_theta"], [X.sum(), 4.0])
        assert np.array_equal(got["bar_x"], np.full(4, 3.0))
    got = models.grid_vjp(bar_out=np.ones(4))
    assert np.array_equal(got["bar_u"], [0, 0, 0, 0, 0, 4.0])


def test_a_gradient_of_unknown_extent_must_be_given() -> None:
    with pytest.raises(ValueError, match="'bar_w' was not given"):
        models.edge_vjp(bar_out=np.ones(4))
    bar_w = np.zeros((2, 3))
    models.edge_vjp(bar_out=np.ones(4), bar_w=bar_w)
    assert bar_w.tolist() == [[0.0, 4.0, 0.0], [0.0, 0.0, 0.0]]


def test_a_derivative_is_called_by_name() -> None:
    with pytest.raises(ValueError, match="by name only"):
        models.cubic_vjp(X, 2.0, np.ones(4))


# ---- conversions at this door ----------------------------------------------------------------------------------------


@given(values=st.lists(st.integers(-100, 100), min_size=1, max_size=9))
def test_inputs_may_be_lists_integers_and_strided(values: list[int]) -> None:
    want = 2.0 * np.array(values, float) + 1.0
    array = np.array(values)
    every_form = [values, tuple(values), array, array.astype(np.int8), array.astype(float), np.repeat(array, 2)[::2],
                  array.astype(float)[::-1][::-1], np.repeat(array.astype(float), 3)[::3]]  # fmt: skip
    for form in every_form:
        assert np.array_equal(models.affine(form, 2.0, 1.0), want)


def test_float32_inputs_are_widened_with_a_warning_at_the_callers_line() -> None:
    with pytest.warns(UserWarning, match="'x' is float32") as caught:
        result = eagle.deploy(models.affine)(X.astype(np.float32), 2.0, 1.0)
    assert caught[0].filename == __file__
    assert np.array_equal(result, 2.0 * X + 1.0)


@pytest.mark.parametrize(
    ("x", "error"),
    [
        (None, TypeError),
        ("abc", ValueError),
        ([[1.0, 2.0], [3.0]], ValueError),
        (X.astype(complex), ValueError),
        (X.astype(">f8"), ValueError),
        (X.astype(object), ValueError),
        (np.ones((2, 2)), ValueError),
        (np.ma.masked_array(X), ValueError),
        (X.astype("m8[s]"), ValueError),
        (True, ValueError),
    ],
)
def test_inputs_that_are_refused(x: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="'x'"):
        models.affine(x, 2.0, 1.0)


@pytest.mark.parametrize("a", [np.ones(4), [1.0], (2.0,), "1", None, 1j])
def test_a_parameter_is_a_number(a: object) -> None:
    with pytest.raises(TypeError, match="'a'"):
        models.affine(X, a, 1.0)


@pytest.mark.parametrize(
    ("args", "kwargs", "named"),
    [
        ((X,), {"a": 1.0}, "'b'"),
        ((X, 1.0, 2.0), {"c": 3.0}, "'c'"),
        ((X, 1.0, 2.0), {"x": X}, "'x'"),
        ((X, 1.0, 2.0, 3.0), {}, "3 arguments"),
        ((X, 1.0), {"b": 1.0, "nsamples": 3}, "nsamples"),
    ],
)
def test_a_bad_call(args: Any, kwargs: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        eagle.deploy(models.affine)(*args, **kwargs)


# ---- outputs that are given ------------------------------------------------------------------------------------------


def test_an_output_may_be_the_input() -> None:
    x = X.copy()
    assert eagle.deploy(models.affine)(x, 2.0, 1.0, out=x) is x
    assert np.array_equal(x, 2.0 * X + 1.0)


def test_a_marked_input_may_share_memory_with_the_output() -> None:
    v = np.arange(9.0).reshape(3, 3)
    want = 2.0 * v
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", eagle.LayoutWarning)
        result = eagle.deploy(models.stretch)(eagle.samples_first(v), 2.0, out=eagle.samples_first(v))
    assert result is v
    assert np.array_equal(v, want)


@pytest.mark.parametrize(
    "out",
    [
        np.zeros(3),
        np.zeros(4, np.float32),
        np.zeros(8)[::2],
        np.zeros(4, ">f8"),
        np.broadcast_to(0.0, (4,)),
        [0.0] * 4,
        0.0,
    ],
    ids=["short", "float32", "strided", "big-endian", "broadcast", "list", "number"],
)
def test_an_output_that_cannot_be_written_is_refused(out: Any) -> None:
    with pytest.raises(ValueError, match="'out'"):
        eagle.deploy(models.affine)(X, 2.0, 1.0, out=out)


def test_what_lies_beside_a_view_stays() -> None:
    base = np.full((4, 6), -1.0)
    eagle.deploy(models.affine)(np.arange(6.0), 2.0, 0.0, out=base[2])
    assert np.array_equal(base[2], 2.0 * np.arange(6.0))
    assert np.array_equal(np.delete(base, 2, axis=0), np.full((3, 6), -1.0))


# ---- binding ---------------------------------------------------------------------------------------------------------


def test_a_bound_plan_runs_in_place_each_time() -> None:
    s = np.zeros(4)
    bound = eagle.deploy(models.running_sum).bind(x=X, s=s)
    assert bound.n == 4
    bound.launch()
    bound()
    assert np.array_equal(s, 2.0 * X)


def test_binding_converts_nothing() -> None:
    plan = eagle.deploy(models.running_sum)
    for x in (X.astype(int), X.astype(np.float32), X.tolist(), np.repeat(X, 2)[::2]):
        with pytest.raises(ValueError, match="'x'"):
            plan.bind(x=x, s=np.zeros(4))
    with pytest.raises(ValueError, match="'s'"):
        plan.bind(x=X)
    with pytest.raises(ValueError, match="'q'"):
        plan.bind(x=X, s=np.zeros(4), q=1.0)


def test_a_mask_that_is_bound_hides_samples() -> None:
    mask = np.array([False, True, False, False])
    x, c = np.zeros(4), np.zeros(4)
    bound = eagle.deploy(models.climb).bind(x=x, c=c, goal=np.array([1.0, 1.0, 2.0, 3.0]), r=1.0, terminated=mask)
    bound.launch()
    assert x.tolist() == [1.0, 0.0, 1.0, 1.0]
    assert mask.tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    "word",
    [np.zeros(1), np.zeros(2, np.uint32), [0], np.zeros(2, np.uint32)[::2][:0], np.broadcast_to(np.uint32(0), (1,)), 0],
)
def test_the_loops_words_are_checked(word: Any) -> None:
    planes = models.climb_planes(3)
    with pytest.raises(ValueError, match="'finished_count' must be"):
        eagle.deploy(models.climb).bind(finished_count=word, **planes)


def test_the_loops_words_may_be_given() -> None:
    finished, steps = np.zeros(1, np.uint32), np.full(1, 3, np.int64)
    planes = models.climb_planes(5)
    eagle.deploy(models.climb).bind(finished_count=finished, fused_steps=steps, **planes).launch()
    assert planes["c"].max() <= 3.0


# ---- large launches --------------------------------------------------------------------------------------------------


def test_a_launch_over_the_team_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "core_count", lambda: 3)
    for n in (binding.TEAM_MIN_SAMPLES, binding.TEAM_MIN_SAMPLES + 1, 200_001):
        x = np.arange(float(n))
        assert np.array_equal(models.affine(x, 2.0, 1.0), 2.0 * x + 1.0)


def test_a_launch_that_is_interrupted_leaves_when_no_thread_writes_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[tuple[int, int]] = []

    def entry(address: int, base: int, count: int, n: int) -> None:
        entered.append((base, count))

    class Interrupted:
        """An event whose first wait is hit by Ctrl-C."""

        def __init__(self) -> None:
            import threading

            self.event = threading.Event()
            self.hit = False
            self.set, self.is_set = self.event.set, self.event.is_set

        def wait(self) -> None:
            if not self.hit:
                self.hit = True
                raise KeyboardInterrupt
            self.event.wait()

    launch = binding._OneLaunch(entry, binding.ParamBlock([]), 100, 2)
    monkeypatch.setattr(launch, "_done", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        launch.run()
    assert launch._done.is_set()
    seen = list(entered)
    assert launch.work() is False  # nothing is left to take
    assert entered == seen


def test_an_error_of_a_thread_reaches_the_caller() -> None:
    def entry(address: int, base: int, count: int, n: int) -> None:
        raise ZeroDivisionError(base)

    with pytest.raises(ZeroDivisionError):
        binding._OneLaunch(entry, binding.ParamBlock([]), 100, 2).run()


def test_a_launch_that_was_stopped_never_passes_for_done() -> None:
    launch = binding._OneLaunch(lambda *_: None, binding.ParamBlock([]), 100, 2)
    launch.stopping = True
    with pytest.raises(StateError, match="did not run over all samples"):
        launch.run()


def test_marks_on_lists_and_integers_that_do_not_fit() -> None:
    v = [[1.0, 2.0, 3.0]] * 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", eagle.LayoutWarning)
        result = models.stretch(eagle.samples_first(v), 2.0)
    assert np.array_equal(result, 2.0 * np.array(v).T)
    with pytest.raises(ValueError, match="'k' holds values that do not fit the kernel's int64"):
        models.histogram(np.ones(1), np.array([2**63], np.uint64))


def test_a_misaligned_input_is_copied_and_a_misaligned_output_refused() -> None:
    raw = np.zeros(4 * 8 + 16, np.uint8)
    offset = (-raw.ctypes.data) % 8 + 1
    x = raw[offset : offset + 32].view(np.float64)
    x[:] = X
    assert np.array_equal(models.affine(x, 2.0, 1.0), 2.0 * X + 1.0)
    with pytest.raises(ValueError, match="'out'"):
        eagle.deploy(models.affine)(X, 2.0, 1.0, out=x)


def test_foreign_inputs_are_converted_like_our_own() -> None:
    for array in (X, X.astype(int), np.repeat(X, 2)[::2]):
        assert np.array_equal(models.affine(Producer(array), 2.0, 1.0), 2.0 * X + 1.0)
    with pytest.warns(UserWarning, match="float32"):
        assert np.array_equal(models.affine(Producer(X.astype(np.float32)), 2.0, 1.0), 2.0 * X + 1.0)
    x = X.copy()
    eagle.deploy(models.affine)(Producer(x), 2.0, 1.0, out=x)
    assert np.array_equal(x, 2.0 * X + 1.0)
