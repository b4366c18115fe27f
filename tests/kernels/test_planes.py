"""Planes: every shape, stride, byte order and overlap is either right or a clear error, and binding writes nothing."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import eagle
from eagle.kernels.layout import check_layout_word, marked, unmarked
from eagle.kernels.planes import bind_number, bind_planes, real_number, refuse_overlaps, shared_array
from eagle.kernels.roles import Arg

F8, F4, I8, BOOL = (np.dtype(kind) for kind in ("f8", "f4", "i8", "?"))

X = Arg("x", "mutable", F8)
G = Arg("g", "per_sample", F8)
P = Arg("p", "mutable", F8, (3,), "gref")
U = Arg("u", "vec_in", F8, (3,), "gref")
V1 = Arg("v1", "vec_in", F8, (1,), "gref")
M = Arg("m", "mat_in", F8, (2, 3), "gref")
MM = Arg("mm", "mutable", F8, (2, 3), "gref")
T = Arg("done", "terminated", BOOL)
THETA = Arg("theta", "lookup", F8)
WIDE = Arg("o", "wide_out", F8)
SUM = Arg("h", "accum_out", F8)
A = Arg("a", "uniform", F8, struct="value")
K = Arg("k", "uniform", I8, struct="value")
FRESH = Arg("fresh", "mutable", F8, prior=False)
FRESH_P = Arg("fresh_p", "mutable", F8, (3,), "gref", prior=False)


def quiet(*args: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", eagle.LayoutWarning)
        return bind_planes(*args, **options)


def content(width: int, n: int) -> np.ndarray:
    """A (width, n) plane of which every element is different."""
    return np.arange(float(width * n)).reshape(width, n) + 1.0


# ---- every way to give a vector plane --------------------------------------------------------------------------------

WAYS = {
    "native": lambda c: c.copy(),
    "view of sample-major": lambda c: np.ascontiguousarray(c.T).T,
    "sample-major view": lambda c: c.copy().T,
    "sample-major": lambda c: np.ascontiguousarray(c.T),
    "strided": lambda c: np.repeat(c, 2, axis=1)[:, ::2],
    "reversed": lambda c: np.ascontiguousarray(c[:, ::-1])[:, ::-1],
    "row of a bigger one": lambda c: np.concatenate([c, c])[: c.shape[0]],
    "columns of a bigger one": lambda c: np.concatenate([c, c], axis=1)[:, : c.shape[1]],
    "big-endian": lambda c: c.astype(">f8"),
    "float32": lambda c: c.astype(np.float32),
    "integers": lambda c: c.astype(np.int64),
    "complex": lambda c: c.astype(complex),
    "objects": lambda c: c.astype(object),
    "misaligned": lambda c: misaligned(c),
    "read-only": lambda c: read_only(c.copy()),
    "subclass": lambda c: c.copy().view(Stubborn),
    "structured": lambda c: np.zeros(c.shape, [("a", "f8")]),
    "masked": lambda c: np.ma.masked_array(c),
    "list": lambda c: c.tolist(),
}
REFUSED = {
    *("view of sample-major", "strided", "reversed", "big-endian", "float32", "integers", "complex", "objects"),
    *("misaligned", "structured", "masked", "list"),
}


class Stubborn(np.ndarray):
    """A subclass that keeps two axes whatever it is asked for, as np.matrix does."""

    def reshape(self, *shape: Any, **options: Any) -> Any:
        result = super().reshape(*shape, **options)
        return result if result.ndim == 2 else np.atleast_2d(result)


def misaligned(c: np.ndarray) -> np.ndarray:
    raw = np.zeros(c.nbytes + 16, np.uint8)
    offset = (-raw.ctypes.data) % 8 + 1
    result = raw[offset : offset + c.nbytes].view(np.float64).reshape(c.shape)
    result[...] = c
    return result


def read_only(c: np.ndarray) -> np.ndarray:
    c.flags.writeable = False
    return c


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("arg", [U, P, M, MM], ids=lambda arg: arg.name)
@pytest.mark.parametrize("n", [0, 1, 2, 7])
def test_a_wide_plane_in_every_form(arg: Arg, way: str, n: int) -> None:
    want = content(arg.width, n)
    array = WAYS[way](want)
    before = list(array) if way == "list" else array.tobytes()
    contiguous = isinstance(array, np.ndarray) and array.flags.c_contiguous
    refused = way in REFUSED or (way == "read-only" and arg.written)
    refused |= way.startswith("columns") and not contiguous
    if way in ("view of sample-major", "strided", "reversed", "misaligned") and contiguous and array.flags.aligned:
        refused = False  # so few elements that nothing is strided
    if refused:
        with pytest.raises(ValueError, match=rf"'{arg.name}'"):
            quiet([arg], {arg.name: array})
    else:
        planes = quiet([arg], {arg.name: array})
        plane = planes.planes[arg.name]
        assert (planes.n, planes.single) == (n, False)
        assert plane.given is array
        assert plane.native.flags.c_contiguous
        assert np.array_equal(plane.native, want)
        assert np.shares_memory(plane.native, array) == (way != "sample-major" or n == 1) or n == 0
    assert (array if way == "list" else array.tobytes()) == before


@pytest.mark.parametrize("n", [0, 1, 7])
def test_a_copied_plane_goes_back_into_the_callers_array(n: int) -> None:
    array = np.ascontiguousarray(content(3, n).T)
    planes = quiet([P], {"p": array})
    planes.planes["p"].native[...] *= 10.0
    planes.write_back()
    assert np.array_equal(array, content(3, n).T * 10.0)
    array[...] = -1.0
    planes.take_in()
    assert np.array_equal(planes.planes["p"].native, np.full((3, n), -1.0))


def test_matrices_of_every_shape() -> None:
    want = content(6, 4)
    rows = np.ascontiguousarray(want.T)
    for array in (want, want.reshape(2, 3, 4), rows, rows.reshape(4, 2, 3)):
        planes = quiet([M], {"m": array})
        assert np.array_equal(planes.planes["m"].native, want)
    for single in (want[:, 0].copy(), want[:, 0].copy().reshape(2, 3)):
        planes = quiet([M], {"m": single})
        assert planes.single
        assert np.array_equal(planes.planes["m"].native, want[:, :1])


@pytest.mark.parametrize("shape", [(2, 4, 3), (3, 2, 4), (5, 4), (4,), (), (6, 4, 1), (2, 3, 4, 1), (0,), (2, 2)])
def test_a_matrix_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="'m'"):
        quiet([M], {"m": np.zeros(shape)})


# ---- layout ----------------------------------------------------------------------------------------------------------


def test_a_square_plane_needs_an_answer() -> None:
    square = content(3, 3)
    with pytest.raises(ValueError, match=r"layout=.*samples_first"):
        quiet([U], {"u": square})
    assert np.array_equal(quiet([U], {"u": square}, layout="samples_last").planes["u"].native, square)
    assert np.array_equal(quiet([U], {"u": square}, layout="samples_first").planes["u"].native, square.T)


def test_a_mark_beats_the_layout_and_passes_twice() -> None:
    square = content(3, 3)
    first = eagle.samples_first(eagle.samples_last(square))
    assert unmarked(first) == (square, "samples_first") or unmarked(first)[0] is square
    assert np.array_equal(quiet([U], {"u": first}, layout="samples_last").planes["u"].native, square.T)
    assert quiet([U], {"u": first}).planes["u"].given is square


def test_marks_of_hawk_pass_too() -> None:
    import hawk

    square = content(3, 3)
    assert np.array_equal(quiet([U], {"u": hawk.samples_first(square)}).planes["u"].native, square.T)
    assert np.array_equal(quiet([U], {"u": hawk.samples_last(square)}).planes["u"].native, square)


@pytest.mark.parametrize(
    ("mark", "shape"), [(eagle.samples_first, (3, 5)), (eagle.samples_last, (5, 3)), (eagle.samples_first, (3, 0))]
)
def test_a_mark_that_the_shape_contradicts(mark: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="marked"):
        quiet([U], {"u": mark(np.zeros(shape))})


def test_one_component_is_never_ambiguous() -> None:
    for shape in ((1, 5), (5, 1), (1, 1)):
        planes = bind_planes([V1], {"v1": np.zeros(shape)})
        assert planes.n == max(shape)


def test_a_mark_on_a_scalar_plane_means_nothing() -> None:
    assert bind_planes([G], {"g": eagle.samples_first(np.zeros(4))}).n == 4


def test_no_mark_is_the_thing_itself() -> None:
    array = np.zeros(3)
    assert marked(array, None) is array
    assert unmarked(array) == (array, None) or unmarked(array)[1] is None


@pytest.mark.parametrize("word", ["first", "samples", 1, True, ["samples_first"]])
def test_an_unknown_layout(word: object) -> None:
    with pytest.raises(ValueError, match="layout="):
        check_layout_word(word)


def test_a_copy_warns_once_per_plane_and_points_at_the_caller() -> None:
    with pytest.warns(eagle.LayoutWarning) as caught:
        bind_planes([U, P], {"u": np.zeros((5, 3)), "p": np.zeros((5, 3))})
    assert sorted(str(w.message).split("'")[1] for w in caught) == ["p", "u"]
    assert {w.filename for w in caught} == {__file__}


def test_no_samples_and_free_views_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bind_planes([U], {"u": np.zeros((0, 3))})
        bind_planes([U], {"u": np.zeros((3, 5)).T})


# ---- the number of samples -------------------------------------------------------------------------------------------


def test_disagreeing_planes_are_all_named() -> None:
    with pytest.raises(ValueError, match=r"'x' has 4.*'u' has 5"):
        quiet([X, U], {"x": np.zeros(4), "u": np.zeros((3, 5))})


def test_one_sample_and_a_batch_do_not_mix() -> None:
    with pytest.raises(ValueError, match=r"'x' is one sample.*'g' hold"):
        quiet([X, G], {"x": 1.0, "g": np.zeros(1)})


@pytest.mark.parametrize("value", [1, 1.5, np.float64(2), np.float32(2), np.int8(3), np.array(2.0)])
def test_one_sample_from_a_number(value: Any) -> None:
    planes = bind_planes([X], {"x": value})
    assert (planes.n, planes.single) == (1, True)
    assert planes.planes["x"].native.tolist() == [float(value)]


def test_a_0d_array_is_written_in_place() -> None:
    value = np.array(2.0)
    planes = bind_planes([X], {"x": value})
    planes.planes["x"].native[0] = 7.0
    assert value == 7.0


@pytest.mark.parametrize("value", [True, "1", b"1", 1j, [1.0], (1.0,), {1.0}, object(), np.array(True), np.array(1)])
def test_what_is_no_plane(value: object) -> None:
    with pytest.raises(ValueError, match="'x'"):
        bind_planes([X], {"x": value})


def test_none_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="'x'"):
        bind_planes([X], {"x": None})


# ---- planes over the same memory -------------------------------------------------------------------------------------


@given(
    starts=st.lists(st.integers(0, 12), min_size=2, max_size=5),
    lengths=st.lists(st.integers(0, 4), min_size=5, max_size=5),
    writes=st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_overlaps_are_refused_exactly_when_one_of_two_is_written(
    starts: list[int], lengths: list[int], writes: list[bool]
) -> None:
    memory = np.zeros(16)
    from eagle.kernels.planes import Plane

    planes = {}
    for i, start in enumerate(starts):
        arg = Arg(f"p{i}", "mutable" if writes[i] else "per_sample", F8)
        view = memory[start : start + lengths[i]]
        planes[f"p{i}"] = Plane(arg, view, view)
    clash = any(
        np.shares_memory(one.native, other.native) and (one.arg.written or other.arg.written)
        for one, other in itertools.combinations(planes.values(), 2)
    )
    if clash:
        with pytest.raises(ValueError, match=r"'p\d' and 'p\d' overlap"):
            refuse_overlaps(planes)
    else:
        refuse_overlaps(planes)


def test_planes_that_are_copied_overlap_too() -> None:
    memory = np.zeros((6, 3))
    for other in (memory[1:], memory[:5], memory.reshape(-1)[1:16].reshape(5, 3)):
        with pytest.raises(ValueError, match=r"'p' and 'u'|'u' and 'p'"):
            quiet([P, U], {"p": memory[:5], "u": other})
    with pytest.raises(ValueError, match="overlap"):
        quiet([P, U], {"p": memory, "u": memory.reshape(3, 6)})


def test_two_readers_may_share() -> None:
    array = np.zeros(5)
    planes = bind_planes([G, Arg("g2", "per_sample", F8)], {"g": array, "g2": array})
    assert planes.planes["g2"].native is not None


def test_a_table_may_not_be_the_state() -> None:
    array = np.zeros(5)
    with pytest.raises(ValueError, match="overlap"):
        bind_planes([X, THETA], {"x": array, "theta": array[:2]})


# ---- shared planes, masks and what is allocated ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("array", "named"),
    [
        (np.zeros(3, np.float32), "float64"),
        (np.zeros(6)[::2], "contiguous"),
        (misaligned(np.zeros(3)), "address"),
        (np.zeros(4), "3 elements"),
    ],
)
def test_a_table_is_checked(array: np.ndarray, named: str) -> None:
    with pytest.raises(ValueError, match=rf"'theta'.*{named}"):
        shared_array(THETA, array, np, 3)


def test_a_table_of_any_shape_is_flat() -> None:
    assert shared_array(THETA, content(2, 3), np, 6).native.shape == (6,)


def test_a_read_only_accumulator_is_refused() -> None:
    with pytest.raises(ValueError, match="read-only"):
        shared_array(SUM, read_only(np.zeros(3)), np, 3)


@pytest.mark.parametrize("size", [1, 3, 5, 7])
def test_a_wide_output_covers_every_sample(size: int) -> None:
    with pytest.raises(ValueError, match=r"'o' needs shape \(rows, 4\)"):
        bind_planes([G, WIDE], {"g": np.zeros(4), "o": np.zeros(size)})


def test_write_only_planes_are_made_and_named() -> None:
    planes = bind_planes([G, FRESH, FRESH_P, SUM], {"g": np.zeros(4)}, extents={"h": 2})
    assert planes.allocated == ("fresh", "fresh_p", "h")
    assert planes.planes["fresh_p"].native.shape == (3, 4)
    assert planes.planes["h"].native.tolist() == [0.0, 0.0]
    single = bind_planes([G, FRESH, FRESH_P], {"g": 1.0})
    assert single.planes["fresh"].given.shape == ()
    assert single.planes["fresh_p"].given.shape == (3,)


def test_an_accumulator_of_unknown_extent_is_never_guessed() -> None:
    with pytest.raises(ValueError, match="'h' was not given"):
        bind_planes([G, SUM], {"g": np.zeros(4)})


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.float64, np.int64, object])
def test_a_mask_is_bool(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"'done' must be bool"):
        bind_planes([G, T], {"g": np.zeros(4), "done": np.zeros(4, dtype)})


# ---- numbers ---------------------------------------------------------------------------------------------------------


@given(value=st.one_of(st.integers(-(2**62), 2**62), st.floats(), st.booleans()))
def test_a_real_number_arrives_as_it_is(value: float) -> None:
    bound = bind_number(A, value)
    assert type(bound) is np.float64
    assert bound == float(value) or np.isnan(bound)


@pytest.mark.parametrize(
    "value",
    [
        np.float64(2),
        np.float32(2),
        np.float16(2),
        np.longdouble(2),
        np.int8(2),
        np.uint64(2),
        np.array(2),
        np.array(2.0),
    ],
)
def test_every_kind_of_number(value: Any) -> None:
    assert bind_number(A, value) == 2.0


@pytest.mark.parametrize(
    "value", [None, "2", b"2", 2j, np.complex128(2), {}, object(), np.array("2"), np.datetime64(0, "s")]
)
def test_what_is_no_number(value: object) -> None:
    with pytest.raises(TypeError, match="'a' is one real number"):
        bind_number(A, value)


@pytest.mark.parametrize("value", [np.ones(2), np.ones(1), np.ones((1, 1)), [1.0], (1.0, 2.0)])
def test_an_array_for_a_number(value: object) -> None:
    with pytest.raises(ValueError, match="'a' is one number"):
        bind_number(A, value)


@pytest.mark.parametrize("value", [1.0, np.float64(2), 0.5, np.array(1.0)])
def test_a_float_for_an_integer(value: Any) -> None:
    with pytest.raises(TypeError, match="'k' is an integer"):
        bind_number(K, value)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**30])
def test_an_integer_that_does_not_fit(value: int) -> None:
    with pytest.raises(ValueError, match=r"'k' = .* does not fit int64"):
        bind_number(K, value)


@pytest.mark.parametrize("value", [2**63 - 1, -(2**63), np.uint8(7), True])
def test_an_integer_that_fits(value: int) -> None:
    assert int(bind_number(K, value)) == int(value)


@pytest.mark.parametrize(("dtype", "value"), [(F4, 1e300), (F4, -1e39), (F8, 10**400)])
def test_a_number_beyond_the_precision_is_refused_and_never_becomes_infinite(dtype: Any, value: float) -> None:
    with np.errstate(all="raise"), pytest.raises(ValueError, match="does not fit"):
        bind_number(Arg("a", "uniform", dtype), value)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 1e-300, 0.1])
def test_float32_takes_what_has_a_nearest_value(value: float) -> None:
    with np.errstate(all="raise"):
        bound = bind_number(Arg("a", "uniform", F4), value)
    with np.errstate(all="ignore"):
        assert bound == np.float32(value) or np.isnan(value)


def test_what_counts_as_a_real_number() -> None:
    assert all(real_number(v) for v in (1, 1.5, np.float32(1), np.int8(1), np.array(1.0), np.array(3)))
    assert not any(real_number(v) for v in (True, None, "1", 1j, np.ones(1), np.array(True), [1]))


# ---- all at once -----------------------------------------------------------------------------------------------------


@given(
    n=st.integers(0, 6),
    ways=st.tuples(*[st.sampled_from(["native", "sample-major view", "sample-major", "strided", "big-endian"])] * 2),
    scalars=st.tuples(*[st.sampled_from(["right", "short", "float32", "strided", "read-only"])] * 2),
)
def test_a_whole_call_is_right_or_refused_and_nothing_is_written(
    n: int, ways: tuple[str, str], scalars: tuple[str, str]
) -> None:
    assume(n != 3)
    forms = {
        "right": lambda: np.arange(float(n)),
        "short": lambda: np.arange(float(n + 1)),
        "float32": lambda: np.arange(n, dtype=np.float32),
        "strided": lambda: np.arange(2.0 * n)[::2],
        "read-only": lambda: read_only(np.arange(float(n))),
    }
    values = {
        "p": WAYS[ways[0]](content(3, n)),
        "u": WAYS[ways[1]](content(3, n)),
        "x": forms[scalars[0]](),
        "g": forms[scalars[1]](),
        "a": 0.5,
    }
    before = {name: np.copy(value) for name, value in values.items()}
    fine = ("native", "sample-major view", "sample-major", *(("strided",) if n == 0 else ()))
    right = all(way in fine for way in ways)
    lengths = {n + (form == "short") for form in scalars} | {n}
    right &= len(lengths) == 1 and "float32" not in scalars and scalars[0] != "read-only"
    right &= "strided" not in scalars or n < 2
    if right:
        planes = quiet([P, U, X, G, A], values)
        assert planes.n == n
        for name, width in (("p", 3), ("u", 3)):
            assert np.array_equal(planes.planes[name].native, content(width, n))
        assert np.array_equal(planes.planes["x"].native, np.arange(float(n)))
    else:
        with pytest.raises(ValueError, match=r"'[puxg]'"):
            quiet([P, U, X, G, A], values)
    for name, value in values.items():
        assert np.array_equal(value, before[name])
