from __future__ import annotations

import importlib.util
import json
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from eagle import bench, doctor, selftest
from eagle.__main__ import main
from tests.helpers.child import run_command, run_script

if TYPE_CHECKING:
    import pathlib

needs_hawk = pytest.mark.skipif(importlib.util.find_spec("hawk") is None, reason="hawk is not installed")

WELL: dict[str, Any] = {"ok": {"checked": ["pipeline"]}}


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """What the self-tests say, instead of running them."""
    said = {"host": WELL, "cuda": {"unusable": "CuPy is not installed"}}
    monkeypatch.setattr(doctor, "_self_test", lambda target: said[target])
    return said


def install_cupy(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    monkeypatch.setattr(doctor, "_cupy", lambda: ("cupy-cuda12x", "14.2.0") if installed else None)


def test_all_well(answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install_cupy(monkeypatch, False)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "host  works" in out
    assert "cuda  not set up" in out
    assert "CuPy is not installed" in out
    for name in ("numpy", "anyio", "raptor-core", "cupy", "cuda-core", "raptor-hawk", "compiler", "kernel cache"):
        assert name in out


@pytest.mark.parametrize(
    ("cupy", "host", "cuda", "status", "last"),
    [
        (False, WELL, {"unusable": "no CuPy"}, 0, "All that should work does."),
        (True, WELL, {"unusable": "no driver"}, 1, "cuda should work"),
        (True, WELL, {"failed": "wrong numbers"}, 1, "cuda should work"),
        (False, {"failed": "no compiler"}, {"unusable": "no CuPy"}, 1, "host should work"),
        (True, {"failed": "a"}, {}, 1, "host and cuda should work"),
        (True, WELL, WELL, 0, "All that should work does."),
    ],
)
def test_the_status_is_1_when_what_should_work_does_not(
    cupy: bool,
    host: dict[str, Any],
    cuda: dict[str, Any],
    status: int,
    last: str,
    answers: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install_cupy(monkeypatch, cupy)
    answers |= {"host": host, "cuda": cuda}
    assert doctor.doctor() == status
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith(last)
    for answer in (host, cuda):
        for reason in answer.values():
            if isinstance(reason, str):
                assert reason in out


def child_says(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, body: str) -> None:
    """Put a script in the place of the interpreter that runs the self-test."""
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nimport os, sys, time\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


@pytest.mark.skipif(sys.platform == "win32", reason="scripts are not executables there")
@pytest.mark.parametrize(
    ("body", "answer"),
    [
        ("print('noise'); print('{\"ok\": {}}')", {"ok": {}}),
        ("print('no answer')", "status 0"),
        ("sys.exit('could not even start')", "could not even start"),
        ("os.abort()", "status -6"),
        ("print('{\"ok\": {}}'); sys.stdout.flush(); os.abort()", "status -6"),  # right, then a crash at exit
        ("print('[1]')", "status 0"),
        ("time.sleep(60)", "did not end within 1 s"),
    ],
)
def test_a_self_test_may_crash_or_hang(
    body: str, answer: object, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    child_says(monkeypatch, tmp_path, body)
    monkeypatch.setattr(doctor, "_SELF_TEST_S", 1.0 if "sleep" in body else 60.0)
    got = doctor._self_test("host")
    if isinstance(answer, str):
        assert answer in got["failed"]
    else:
        assert got == answer


def test_a_self_test_that_raises_says_what(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(target: str) -> None:
        raise AssertionError(f"{target} counts wrong")

    monkeypatch.setattr(selftest, "_check_pipeline", fail)
    selftest.main("host")
    assert json.loads(capsys.readouterr().out) == {"failed": "AssertionError: host counts wrong"}


def test_the_host_passes_its_self_test() -> None:
    answer = selftest.self_test("host")
    assert "pipeline" in answer["ok"]["checked"], answer


def test_the_device_passes_its_self_test_or_says_why_not() -> None:
    answer = selftest.self_test("cuda")
    assert answer.keys() <= {"ok", "unusable"}, answer
    assert answer.get("unusable", "said why")


def test_doctor_as_a_user_types_it() -> None:
    ended = run_command([sys.executable, "-m", "eagle", "doctor"], limit_s=400)
    assert "host  works" in ended.out, ended
    assert ended.err == ""
    assert ended.status in (0, 1)


def test_doctor_loads_neither_cupy_nor_hawk() -> None:
    run_script("""
        import sys
        from eagle import doctor
        doctor._self_test = lambda target: {"unusable": "not asked"}
        doctor.doctor()
        assert not {"cupy", "hawk", "torch", "jax"} & set(sys.modules)
    """).check()


def test_a_missing_command_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert "doctor" in capsys.readouterr().err


@pytest.mark.parametrize("odd", ["0", "-5", "many"])
def test_a_size_that_is_none_is_refused(odd: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--n", odd])
    assert odd in capsys.readouterr().err


@needs_hawk
def test_the_card(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_REPEATS", 1)
    assert main(["bench", "--n", "100", "2_000"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if " ms" in line]
    assert len(rows) >= 4
    assert any(line.split()[:3] == ["2,000", "uniform", "host"] for line in rows)


def test_the_card_without_hawk(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "eagle.oscillators", None)
    import eagle

    monkeypatch.delattr(eagle, "oscillators", raising=False)
    assert main(["bench"]) == 1
    assert "eagle-aio[hawk]" in capsys.readouterr().out


@needs_hawk
class TestOscillators:
    def test_the_numpy_loop_agrees_with_the_closed_form(self) -> None:
        from eagle import oscillators

        given = oscillators.planes(300)
        x, _ = oscillators.masked_numpy(given)
        np.testing.assert_allclose(x, oscillators.exact(given), rtol=0, atol=1e-6)

    def test_the_kernel_agrees_with_the_numpy_loop(self) -> None:
        import eagle.sync
        from eagle import oscillators

        given = oscillators.planes(300)
        ours = {name: plane.copy() for name, plane in given.items()}
        result = eagle.sync.simulate(oscillators.oscillate, **ours, dt=oscillators.DT, max_steps=oscillators.LONGEST)
        assert result.done
        x, v = oscillators.masked_numpy(given)
        np.testing.assert_allclose(result.x, x, rtol=0, atol=1e-12)
        np.testing.assert_allclose(result.v, v, rtol=0, atol=1e-12)
        np.testing.assert_array_equal(result.k, given["nstop"])
