"""Arrays of other frameworks: recognition without importing any, and crossings that share memory where they can."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from eagle.errors import BackendUnavailable
from eagle.kernels.device import unusable_reason
from eagle.kernels.interop import detect, let_frameworks_wait, origin_adapter, to_cupy
from tests.helpers.child import run_script
from tests.helpers.producer import Producer

FRAMEWORKS = ("torch", "jax", "tensorflow", "warp", "cupy")


class Legacy(Producer):
    """One from before DLPack 1.0: it takes no options and cannot say whether it may be written."""

    def __dlpack__(self) -> Any:  # type: ignore[override]
        return self.array.__dlpack__()


class Elsewhere(Producer):
    def __dlpack_device__(self) -> tuple[int, int]:
        return 10, 0


class Half:
    def __dlpack__(self) -> None:
        raise AssertionError("asked though it cannot say where it lies")


# --- recognition ---


@pytest.mark.parametrize(
    "x", [np.zeros(3), np.float64(2), np.zeros((2, 0)), np.bool_(True), np.zeros(2).view(np.matrix)]
)
def test_numpy_arrays_and_scalars_share_one_adapter(x: Any) -> None:
    assert detect(x) is detect(np.zeros(1))
    assert detect(x).name == "numpy"


@pytest.mark.parametrize(
    "x", [None, 1, 2.0, 3j, True, "abc", b"abc", [1.0], (1,), {}, object(), np, np.ndarray, Producer]
)
def test_what_is_no_array_is_none(x: Any) -> None:
    assert detect(x) is None


def test_any_dlpack_producer_is_recognised() -> None:
    adapter = detect(Producer(np.zeros(3)))
    assert adapter.name == "dlpack"
    assert not adapter.strong
    assert adapter is detect(Legacy(np.zeros(3)))


def test_recognition_imports_no_framework() -> None:
    run_script(
        """
        import sys
        import numpy as np
        import eagle
        for x in (None, 1.0, "x", [1], np.zeros(2), np.float32(1), object()):
            eagle.detect(x)
        eagle.origin_adapter([np.zeros(2), 1.0])
        loaded = {"torch", "jax", "tensorflow", "warp", "cupy"} & set(sys.modules)
        assert not loaded, loaded
        """
    ).check()


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_module_that_only_carries_the_name_is_harmless(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # what Python leaves after an import that was blocked
    assert detect(Half()).name == "dlpack"
    monkeypatch.setitem(sys.modules, name, np)  # a module without the classes, or with other things of that name
    assert detect(object()) is None


def test_a_framework_loaded_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tensor:
        pass

    x = Tensor()
    assert detect(x) is None
    module = type(sys)("torch")
    module.Tensor = Tensor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", module)
    assert detect(x).name == "torch"


@pytest.mark.parametrize("candidates", [[], [None, 3.0, "x"], [np.zeros(2), np.float64(1)], [Producer(np.zeros(2))]])
def test_results_go_back_to_numpy_by_default(candidates: list[Any]) -> None:
    assert origin_adapter(candidates).name == "numpy"


# --- NumPy, and DLPack over host memory ---


def test_numpy_crosses_as_it_is() -> None:
    x = np.arange(3.0)
    adapter = detect(x)
    assert adapter.to_numpy(x) is x
    assert adapter.from_numpy(x) is x
    assert (adapter.is_device(x), adapter.device_id(x)) == (False, None)
    assert adapter.writable(x)
    x.flags.writeable = False
    assert not adapter.writable(x)
    assert not adapter.writable(np.float64(1))
    assert adapter.to_numpy(np.float32(1)).shape == ()


def test_a_marked_array_keeps_its_mark() -> None:
    class Marked(np.ndarray):
        pass

    x = np.zeros(3).view(Marked)
    assert detect(x).to_numpy(x) is x


@pytest.mark.parametrize("kind", [Producer, Legacy])
def test_a_host_producer_is_a_view(kind: type[Producer]) -> None:
    x = kind(np.arange(3.0))
    adapter = detect(x)
    view = adapter.to_numpy(x)
    assert np.shares_memory(view, x.array)
    assert (adapter.is_device(x), adapter.device_id(x)) == (False, None)
    assert adapter.writable(x) == view.flags.writeable


def test_a_producer_that_may_be_written_says_so() -> None:
    assert detect(Producer(np.zeros(3))).writable(Producer(np.zeros(3)))


def test_a_view_outlives_its_producer() -> None:
    x = Producer(np.arange(1000.0))
    view = detect(x).to_numpy(x)
    del x
    np.testing.assert_array_equal(view, np.arange(1000.0))


def test_memory_that_nothing_here_reads_is_refused() -> None:
    x = Elsewhere(np.zeros(3))
    with pytest.raises(TypeError, match="DLPack type 10"):
        detect(x).to_numpy(x)
    with pytest.raises(TypeError, match="__dlpack_device__"):
        detect(Half()).to_numpy(Half())


def test_each_framework_on_the_device_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tensor:
        def __init__(self, is_cuda: bool) -> None:
            self.is_cuda = is_cuda

    module = type(sys)("torch")
    module.Tensor = Tensor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", module)
    waited: list[Any] = []
    monkeypatch.setattr(type(detect(Tensor(True))), "wait_for", lambda _self, alias: waited.append(alias))
    given = [Tensor(False), np.zeros(2), 3.0, Tensor(True), Tensor(True)]
    let_frameworks_wait(zip(given, "abcde", strict=True))
    assert waited == ["d"]


@pytest.mark.skipif(unusable_reason() is None, reason="a GPU can be used here")
@pytest.mark.parametrize("x", [np.zeros(3), [1.0], 3.0, None, Producer(np.zeros(3))])
def test_to_cupy_without_a_device_says_why(x: Any) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        to_cupy(x)
    assert str(caught.value) == unusable_reason()


# --- torch, JAX, Warp on the host (where they are installed) ---


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def jax() -> Any:
    return pytest.importorskip("jax")


@pytest.fixture
def warp() -> Any:
    warp = pytest.importorskip("warp")
    warp.config.quiet = True
    return warp


@pytest.mark.parametrize("dtype", ["float64", "float32", "int32", "int64", "bool", "uint8"])
def test_torch_tensors_share_memory_both_ways(torch: Any, dtype: str) -> None:
    x = torch.ones((2, 3), dtype=getattr(torch, dtype))
    adapter = detect(x)
    view = adapter.to_numpy(x)
    assert (adapter.name, adapter.strong, view.dtype) == ("torch", True, np.dtype(dtype))
    view[0, 1] = 0
    assert x[0, 1] == 0
    back = adapter.from_numpy(view)
    assert back.data_ptr() == x.data_ptr()
    assert (adapter.is_device(x), adapter.device_id(x), adapter.writable(x)) == (False, None, True)


def test_torch_views_keep_their_strides(torch: Any) -> None:
    x = torch.arange(6.0, dtype=torch.float64).reshape(2, 3).T
    view = detect(x).to_numpy(x)
    assert view.shape == (3, 2)
    assert not view.flags.c_contiguous
    view[0, 1] = -1
    assert x[0, 1] == -1


def test_a_parameter_of_torch_is_a_tensor(torch: Any) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    assert detect(parameter).name == "torch"
    with pytest.raises(ValueError, match="detach"):
        detect(parameter).to_numpy(parameter)
    assert detect(parameter).to_numpy(parameter.detach()).shape == (3,)


def test_torch_tensors_that_hold_no_plain_memory_are_refused(torch: Any) -> None:
    for x, match in ((torch.eye(3).to_sparse(), "to_dense"), (torch.zeros(3, device="meta"), "meta")):
        with pytest.raises(ValueError, match=match):
            detect(x).to_numpy(x)


def test_a_read_only_result_is_copied_for_torch(torch: Any) -> None:
    fixed = np.zeros(3)
    fixed.flags.writeable = False
    out = detect(torch.zeros(1)).from_numpy(fixed)
    out += 1
    assert fixed[0] == 0


def test_jax_arrays_are_read_only_views(jax: Any) -> None:
    x = jax.device_put(np.arange(6, dtype=np.float32), jax.devices("cpu")[0])
    adapter = detect(x)
    view = adapter.to_numpy(x)
    assert (adapter.name, adapter.strong, adapter.writable(x)) == ("jax", True, False)
    assert not view.flags.writeable
    assert view.ctypes.data == x.unsafe_buffer_pointer()


def test_jax_results_share_nothing_that_changes(jax: Any) -> None:
    source = np.arange(3, dtype=np.float32)
    out = detect(jax.numpy.zeros(1)).from_numpy(source)
    source[0] = 9
    assert isinstance(out, jax.Array)
    assert out[0] == 0


def test_a_traced_value_is_refused_by_name(jax: Any) -> None:
    def inside(x: Any) -> Any:
        with pytest.raises(TypeError, match=r"tracing.*jax\.jit"):
            detect(x).to_numpy(x)
        with pytest.raises(TypeError, match="tracing"):
            detect(x).is_device(x)
        return x

    jax.jit(inside)(jax.numpy.zeros(3))


def test_two_strong_frameworks_are_refused_by_name(torch: Any, jax: Any) -> None:
    with pytest.raises(TypeError, match=r"torch.*jax"):
        origin_adapter([np.zeros(1), torch.zeros(1), jax.numpy.zeros(1)])
    assert origin_adapter([np.zeros(1), torch.zeros(1), torch.zeros(2)]).name == "torch"


def test_warp_arrays_share_memory_both_ways(warp: Any) -> None:
    x = warp.zeros(4, dtype=warp.float64, device="cpu")
    adapter = detect(x)
    adapter.to_numpy(x)[1] = 3
    assert x.numpy()[1] == 3
    assert (adapter.name, adapter.strong, adapter.is_device(x), adapter.device_id(x)) == ("warp", False, False, None)
    source = np.arange(3.0)
    out = adapter.from_numpy(source)
    source[0] = 5
    assert out.numpy()[0] == 5
    assert origin_adapter([np.zeros(1), x]) is adapter
