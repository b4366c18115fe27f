"""Device probing, the memory of faults, and what a machine without a GPU answers."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest

from eagle.errors import BackendUnavailable
from eagle.kernels import device
from tests.helpers.child import run_script

FAKE = """
import sys, types

class CUDARuntimeError(RuntimeError):
    def __init__(self, status):
        super().__init__(f"cudaErrorFake{status}: fake")
        self.status = status

def fake_cupy(count):
    cupy = types.ModuleType("cupy")
    def get_count():
        if isinstance(count, Exception):
            raise count
        return count
    cupy.ndarray = type("ndarray", (), {})
    runtime = types.SimpleNamespace(getDeviceCount=get_count, CUDARuntimeError=CUDARuntimeError)
    cupy.cuda = types.SimpleNamespace(runtime=runtime)
    sys.modules["cupy"] = cupy
    device._has_cuda_core = lambda: True
    return cupy

from eagle.errors import BackendUnavailable, DeviceFault
from eagle.kernels import device
"""


def test_without_cupy_the_reason_names_what_to_install() -> None:
    run_script(
        FAKE
        + """
sys.modules["cupy"] = None
reason = device.unusable_reason()
assert "CuPy" in reason and "pip install" in reason, reason
try:
    device.require_cupy()
except BackendUnavailable as error:
    assert str(error) == reason
else:
    raise AssertionError
"""
    ).check()


def test_cupy_without_cuda_core_is_not_enough() -> None:
    run_script(
        FAKE
        + """
fake_cupy(1)
device._has_cuda_core = lambda: False
reason = device.unusable_reason()
assert "cuda-core" in reason and "pip install" in reason, reason
"""
    ).check()


@pytest.mark.parametrize(
    ("count", "word"), [("0", "no device"), ("RuntimeError('driver too old')", "driver too old"), ("2", "")]
)
def test_the_reason_says_what_the_driver_said(count: str, word: str) -> None:
    run_script(
        FAKE
        + f"""
fake_cupy({count})
reason = device.unusable_reason()
assert (reason is None) if not {word!r} else {word!r} in reason, reason
"""
    ).check()


def test_a_device_that_failed_raises_from_then_on_and_others_do_not() -> None:
    run_script(
        FAKE
        + """
fake_cupy(2)
device.check_device(0)
assert device.healthy() and not device.has_failed(0)
fault = device.fault_from(CUDARuntimeError(700), 0, during="heat")
assert (fault.pipeline, fault.code) == ("heat", 700) and "heat" in str(fault) and "compute-sanitizer" in str(fault)
assert not device.healthy() and device.has_failed(0) and not device.has_failed(1)
second = device.fault_from(CUDARuntimeError(719), 0, during="echo")
assert second.pipeline == "echo"
for _ in range(2):
    try:
        device.check_device(0)
    except DeviceFault as error:
        assert (error.pipeline, error.code) == ("heat", 700) and error is not fault
    else:
        raise AssertionError
device.check_device(1)
"""
    ).check()


def test_an_error_that_the_device_survives_is_no_fault() -> None:
    run_script(
        FAKE
        + """
fake_cupy(1)
assert device.fault_from(CUDARuntimeError(2), 0) is None
assert device.fault_from(ValueError("mine"), 0) is None
assert device.healthy()
"""
    ).check()


@pytest.mark.skipif(not hasattr(sys.modules["os"], "fork"), reason="no fork on this platform")
def test_a_fork_of_a_process_that_used_cuda_names_spawn() -> None:
    run_script(
        FAKE
        + """
import os
fake_cupy(1)
assert device.unusable_reason() is None
child = os.fork()
if not child:
    try:
        device.check_device(0)
    except BackendUnavailable as error:
        os._exit(0 if "spawn" in str(error) and "spawn" in device.unusable_reason() else 2)
    os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
device.check_device(0)
"""
    ).check()


@pytest.mark.skipif(not hasattr(sys.modules["os"], "fork"), reason="no fork on this platform")
def test_a_fork_of_a_process_that_did_not_may_use_it() -> None:
    run_script(
        FAKE
        + """
import os
child = os.fork()
if not child:
    fake_cupy(1)
    os._exit(0 if device.unusable_reason() is None else 2)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    ).check()


@pytest.mark.parametrize("thing", [None, 1.0, np.zeros(3), [1], "cupy"])
def test_what_is_no_cupy_array(thing: object) -> None:
    assert device.is_cupy(thing) is False


@pytest.mark.parametrize("bad", [True, "0", 1.0, None])
def test_a_device_number_is_an_int(bad: object) -> None:
    with pytest.raises(TypeError):
        device.device_props(bad)  # type: ignore[arg-type]


def test_two_codes_say_the_same_in_words_of_cuda_core() -> None:
    assert device.cuda_code(ValueError("x")) is None
    assert device.is_unrecoverable(700)
    assert not device.is_unrecoverable(2)
    assert not device.is_unrecoverable(None)


@pytest.mark.gpu
def test_the_devices_own_figures() -> None:
    props = device.device_props(0)
    assert props.sm_count > 0
    assert props.warp_size == 32
    assert props.peak_flops_dp == pytest.approx(props.peak_flops_sp * props.fp64_ratio)
    for dtype in ("float32", "float64"):
        assert 0.1 < props.ridge_flops_per_byte(dtype) < 1000
    assert all(getattr(props, field.name) for field in dataclasses.fields(props) if field.name != "cc_minor")
    assert props == device.device_props()


@pytest.mark.gpu
def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(BackendUnavailable, match="99"):
        device.device_props(99)


@pytest.mark.gpu
def test_a_real_fault_is_recognised_and_remembered() -> None:
    ended = run_script(
        """
        import cupy, numpy
        from eagle.errors import DeviceFault
        from eagle.kernels import device
        cupy = device.require_cupy()
        bad = cupy.RawKernel('extern "C" __global__ void bad(double* p) { p[1ull << 40] = 1.0; }', "bad")
        bad((1,), (1,), (cupy.zeros(4),))
        try:
            cupy.cuda.get_current_stream().synchronize()
        except Exception as error:
            fault = device.fault_from(error, 0, during="heat")
        assert fault.code == 700 and "heat" in str(fault), fault
        try:
            device.check_device(0)
        except DeviceFault as error:
            print("raised again", error.pipeline, device.healthy())
        """
    )
    assert (ended.status, ended.out.strip()) == (0, "raised again heat False"), ended.err
