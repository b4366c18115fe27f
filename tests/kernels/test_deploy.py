"""deploy: what it takes, what it refuses, and that a kernel is built once whoever asks for it, at whatever moment."""

from __future__ import annotations

import os
import shutil
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import hawk
import numpy as np
import pytest
from hawk.diff import vjp

import eagle
from eagle.kernels import build, device
from eagle.kernels.build import cache_root, require_compiler, unit_key
from eagle.kernels.deploy import deploy_for
from eagle.kernels.fork_lock import ForkLock
from eagle.kernels.plugin import Plugin
from eagle.kernels.residency import side_of
from tests.helpers import models
from tests.helpers.child import run_script
from tests.helpers.units import copy_of, edit, restamp

if TYPE_CHECKING:
    from pathlib import Path

X = np.array([0.0, 1.0, -2.0, 4.0])


def snapshot(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that hawk was asked to build for the host; a GPU of this machine is not used."""
    monkeypatch.setattr(device, "unusable_reason", lambda: "hidden by a test")
    names: list[str] = []
    real = hawk.build

    def counted(kernels: Any, *args: Any, **kwargs: Any) -> Any:
        names.extend(kernel.name for kernel in kernels)
        return real(kernels, *args, **kwargs)

    monkeypatch.setattr(hawk, "build", counted)
    return names


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A cache in `tmp_path` that holds `affine` as another process left it; its unit's folder."""
    folder = eagle.deploy(models.affine).plugin.bundle.unit("host").folder
    return copy_of(eagle.deploy(models.affine), tmp_path / "bundles" / folder.name)


# ---- what is taken ---------------------------------------------------------------------------------------------------


def test_a_list_is_a_tuple_of_plans_in_order() -> None:
    plans = eagle.deploy([models.affine, models.stretch, models.affine])
    assert [plan.name for plan in plans] == ["affine", "stretch", "affine"]
    assert np.array_equal(plans[2](X, 1.0, 1.0), X + 1.0)
    assert isinstance(eagle.deploy((models.affine,)), tuple)


def test_plans_and_plugins_are_taken_again() -> None:
    plan = eagle.deploy(models.affine)
    for again in (eagle.deploy(plan), eagle.deploy(plan.plugin), *eagle.deploy([plan, plan.plugin])):
        assert again.plugin is plan.plugin
        assert np.array_equal(again(x=X, a=1.0, b=0.0), X)
        with pytest.raises(ValueError, match="by name only"):
            again(X, 1.0, 0.0)


def test_a_bundle_of_hawk_is_taken(tmp_path: Path) -> None:
    bundle = hawk.build([models.affine, models.stretch], tmp_path / "unit", targets=("host",))
    affine, stretch = eagle.deploy(bundle)
    assert np.array_equal(affine(x=X, a=2.0, b=0.0), 2.0 * X)
    assert stretch(v=np.ones((3, 2)), a=2.0).shape == (3, 2)


def test_a_second_deploy_shares_the_first_ones_code() -> None:
    first, second = eagle.deploy(models.affine), eagle.deploy(models.affine)
    assert first.plugin is second.plugin
    assert eagle.deploy(models.affine, scalar_type="float64").plugin is first.plugin
    assert eagle.deploy(models.affine, scalar_type="float32").plugin is not first.plugin


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("junk", [None, 3, "affine", lambda x: x, object(), {}, b"unit", "no/such/folder", 1.5, X])
def test_what_is_no_kernel(junk: object) -> None:
    with pytest.raises(ValueError, match="deploy takes a hawk kernel"):
        eagle.deploy(junk)


@pytest.mark.parametrize("junk", [[], ()])
def test_an_empty_list(junk: object) -> None:
    with pytest.raises(ValueError, match="empty list"):
        eagle.deploy(junk)


@pytest.mark.parametrize("stranger", [3, None, "affine", lambda x: x])
def test_a_stranger_in_a_list(stranger: object) -> None:
    with pytest.raises(ValueError, match=f"hawk kernels only; got {type(stranger).__name__}"):
        eagle.deploy([models.affine, stranger])


def test_a_derivative_without_a_name_is_told_how_to_get_one() -> None:
    with pytest.raises(ValueError, match=r'hawk\.Kernel\("cubic_vjp", vjp'):
        eagle.deploy(vjp(models.cubic))


@pytest.mark.parametrize("option", ["structure", "inner", "gather", "block", "target"])
def test_an_unknown_option_is_named(option: str) -> None:
    with pytest.raises(ValueError, match=f"'{option}'"):
        eagle.deploy(models.affine, **{option: 1})


@pytest.mark.parametrize("targets", [(), [], "host", ("host", "tpu"), 3, ("HOST",)])
def test_bad_targets(targets: Any) -> None:
    with pytest.raises(ValueError, match="targets="):
        eagle.deploy(models.affine, targets=targets)


@pytest.mark.parametrize("word", ["float16", "double", 64, "", np.float32])
def test_bad_precision(word: Any) -> None:
    with pytest.raises(ValueError, match="scalar_type="):
        eagle.deploy(models.affine, scalar_type=word or "none")


def test_a_unit_without_a_kernel_to_run(tmp_path: Path) -> None:
    folder = copy_of(eagle.deploy(models.affine), tmp_path / "unit")
    edit(folder / "manifest.json", lambda d: d["plugins"][0].update(enabled=False))
    restamp(folder)
    with pytest.raises(eagle.ArtifactError, match="no enabled kernel"):
        eagle.deploy(folder)
    edit(folder / "manifest.json", lambda d: d.update(pattern="neural_block"))
    restamp(folder)
    with pytest.raises(eagle.ArtifactError, match=r"eagle\.load_manifest"):
        eagle.deploy(folder)


@pytest.mark.parametrize("option", [{"targets": ("host",)}, {"scalar_type": "float64"}, {"cache_dir": "x"}])
def test_build_options_mean_nothing_to_what_is_built(option: dict[str, Any], tmp_path: Path) -> None:
    plan = eagle.deploy(models.affine)
    for built in (plan, plan.plugin, [plan], tmp_path):
        with pytest.raises(ValueError, match=f"{next(iter(option))}= is a build option"):
            eagle.deploy(built, **option)


def test_hawks_own_refusal_passes() -> None:
    with pytest.raises(hawk.HawkError):
        eagle.deploy([models.affine, models.line])


@pytest.mark.gpu
def test_both_sides() -> None:
    plan = eagle.deploy(models.affine, targets=("host", "cuda"))
    assert np.array_equal(plan(X, 1.0, 0.0), X)


def test_data_on_a_side_that_was_not_deployed() -> None:
    plugin = eagle.deploy(models.affine, targets=("host",)).plugin
    with pytest.raises(ValueError, match="deployed for host only"):
        plugin.bundle.unit("cuda", "sm_90")


# ---- the cache -------------------------------------------------------------------------------------------------------


def test_a_repeat_call_compiles_nothing_and_touches_no_file(tmp_path: Path, builds: list[str]) -> None:
    first = eagle.deploy(models.affine, cache_dir=tmp_path)
    assert np.array_equal(first(X, 2.0, 0.0), 2.0 * X)
    before = snapshot(tmp_path)
    assert before
    del first
    assert np.array_equal(eagle.deploy(models.affine, cache_dir=str(tmp_path))(X, 3.0, 0.0), 3.0 * X)
    assert snapshot(tmp_path) == before
    assert builds == ["affine"]


def test_a_kernel_that_cannot_be_built_for_the_device_runs_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def refuse(self: Plugin, device: int) -> Any:
        tried.append(device)
        raise hawk.ir.HawkError("no such luck")

    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=types.SimpleNamespace(getDevice=lambda: 0)))
    monkeypatch.setattr(device, "unusable_reason", lambda: None)
    monkeypatch.setattr(device, "require_cupy", lambda: cupy)
    monkeypatch.setattr(Plugin, "device", refuse)
    for _ in range(2):
        assert np.array_equal(eagle.deploy(models.affine, cache_dir=tmp_path)(X, 2.0, 1.0), 2.0 * X + 1.0)
    assert len(tried) == 1
    with pytest.raises(hawk.ir.HawkError, match="no such luck"):  # asked for by name, it is an error at once
        eagle.deploy(models.affine, cache_dir=tmp_path / "named", targets=["host", "cuda"])


@pytest.mark.parametrize("side", ["host", "cuda"])
def test_data_of_one_side_needs_no_build_for_the_other(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(device, "unusable_reason", lambda: None)
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=types.SimpleNamespace(getDevice=lambda: 0)))
    monkeypatch.setattr(device, "require_cupy", lambda: cupy)
    monkeypatch.setattr(Plugin, "device", lambda self, number: asked.append("cuda"))
    monkeypatch.setattr(Plugin, "host", lambda self: asked.append("host"))
    deploy_for(side, [models.affine], None)
    assert asked == [side]


def test_a_number_in_array_form_lies_on_no_side() -> None:
    assert side_of([np.array(0.5), np.float64(2.0), 3]) is None
    assert side_of([np.array(0.5), X]) == "host"


def test_another_process_compiles_nothing_either(tmp_path: Path) -> None:
    assert eagle.deploy(models.affine, cache_dir=tmp_path)(2.0, 3.0, 4.0) == 10.0
    before = snapshot(tmp_path)
    run_script(
        """
        import sys
        import hawk, eagle
        from tests.helpers.models import affine
        def refuse(*a, **k): raise AssertionError("compiled again")
        hawk.build = refuse
        assert eagle.deploy(affine, cache_dir=sys.argv[1])(2.0, 3.0, 4.0) == 10.0
        """,
        args=[str(tmp_path)],
    ).check()
    assert snapshot(tmp_path) == before


def test_many_threads_build_once(tmp_path: Path, builds: list[str]) -> None:
    gate = threading.Barrier(8)

    def ask(_: int) -> Any:
        gate.wait(60)
        return eagle.deploy(models.affine, cache_dir=tmp_path)(X, 2.0, 1.0)

    with ThreadPoolExecutor(8) as pool:
        for result in pool.map(ask, range(8)):
            assert np.array_equal(result, 2.0 * X + 1.0)
    assert builds == ["affine"]
    assert [p for p in (tmp_path / "bundles").iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("name", ["affine.so", "affine.json", "manifest.json", ".hawk_unit", ".eagle_unit"])
def test_a_damaged_unit_of_the_cache_is_built_again(tmp_path: Path, stored: Path, name: str, builds: list[str]) -> None:
    path = stored / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert np.array_equal(eagle.deploy(models.affine, cache_dir=tmp_path)(X, 2.0, 0.0), 2.0 * X)
    assert builds == ["affine"]
    assert [p.name for p in (tmp_path / "bundles").iterdir()] == [stored.name]


def test_a_unit_that_is_there_is_taken(tmp_path: Path, stored: Path, builds: list[str]) -> None:
    plan = eagle.deploy(models.affine, cache_dir=tmp_path)
    assert plan.plugin.bundle.unit("host").folder == stored
    assert builds == []


def test_a_plan_goes_on_without_its_files(tmp_path: Path, stored: Path) -> None:
    plan = eagle.deploy(models.affine, cache_dir=tmp_path)
    shutil.rmtree(tmp_path / "bundles")
    assert np.array_equal(plan(X, 2.0, 0.0), 2.0 * X)
    assert np.array_equal(eagle.deploy(models.affine, cache_dir=tmp_path)(X, 2.0, 0.0), 2.0 * X)


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(kernels: Any, folder: Path, **_: Any) -> None:
        folder.mkdir(parents=True)
        (folder / "half.so").write_bytes(b"")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(hawk, "build", broken)
        eagle.deploy(models.affine, cache_dir=tmp_path)
    assert list((tmp_path / "bundles").iterdir()) == []
    assert np.array_equal(eagle.deploy(models.affine, cache_dir=tmp_path)(X, 2.0, 0.0), 2.0 * X)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match=r"cache_dir= or set \$HAWK_CACHE_DIR"):
        eagle.deploy(models.affine, cache_dir=tmp_path)


def test_a_cache_dir_that_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(PermissionError, match="cache_dir="):
        eagle.deploy(models.affine, cache_dir=path)


def test_relative_folders_stay_where_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    copy_of(eagle.deploy(models.affine), tmp_path / "unit")
    monkeypatch.chdir(tmp_path)
    plan = eagle.deploy("unit")
    built = eagle.deploy(models.stretch, cache_dir="cache", targets=("host",))
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert np.array_equal(plan(x=X, a=1.0, b=0.0), X)
    assert built.plugin.bundle.unit("host").folder.is_relative_to(tmp_path / "cache")
    assert cache_root("cache") == tmp_path / "elsewhere" / "cache"


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HAWK_CACHE_DIR", str(tmp_path / "hawk"))
    assert cache_root(tmp_path / "mine") == tmp_path / "mine"
    assert cache_root(None) == tmp_path / "hawk"
    monkeypatch.delenv("HAWK_CACHE_DIR")
    assert cache_root(None) == tmp_path / "xdg" / "hawk"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root(None) == tmp_path / "home" / ".cache" / "hawk"


def test_the_key_tells_apart_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    def keys() -> set[str]:
        return {
            unit_key(kernels, scalar_type, target, arch)
            for kernels in ([models.affine], [models.stretch], [models.affine, models.stretch], [models.climb])
            for scalar_type in ("float64", "float32")
            for target, arch in (("host", ""), ("cuda", "sm_90"), ("cuda", "sm_80"))
        }

    first = keys()
    assert len(first) == 24
    assert keys() == first
    monkeypatch.setattr(build, "cpu_identity", lambda: "another")
    assert not keys() & first


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CXX", "HAWK_CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(eagle.BackendUnavailable, match=r"install g\+\+ .*pip install ziglang"):
        require_compiler()


# ---- derivatives -----------------------------------------------------------------------------------------------------


def test_a_derivative_is_built_on_a_cold_cache_without_its_primal(tmp_path: Path, builds: list[str]) -> None:
    fresh = hawk.Kernel("cubic_vjp", vjp(models.cubic))
    got = eagle.deploy(fresh, cache_dir=tmp_path)(x=X, a=2.0, bar_y=np.ones(4))
    assert np.array_equal(got["bar_x"], 6.0 * X**2)
    assert builds == ["cubic", "cubic_vjp"]


def test_a_derivative_beside_its_primal_is_one_bundle(tmp_path: Path, builds: list[str]) -> None:
    cubic, cubic_vjp = eagle.deploy([models.cubic, models.cubic_vjp], cache_dir=tmp_path)
    assert np.array_equal(cubic(X, 2.0), 2.0 * X**3)
    assert np.array_equal(cubic_vjp(x=X, a=2.0, bar_y=np.ones(4))["bar_x"], 6.0 * X**2)
    assert len(list((tmp_path / "bundles").iterdir())) == 1


# ---- forks -----------------------------------------------------------------------------------------------------------

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@forks
def test_a_lock_that_a_thread_held_is_free_in_a_forked_child() -> None:
    lock = ForkLock()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    child = os.fork()
    if child == 0:
        with lock:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    done.set()
    thread.join(60)
    with lock, lock:  # reentrant
        pass


@forks
def test_a_child_that_is_forked_during_a_build_builds_too(tmp_path: Path) -> None:
    """The parent's builder holds every lock there is, the store's own among them, when the child is made."""
    run_script(
        """
        import os, sys, threading, warnings
        import numpy as np
        import hawk, eagle
        from tests.helpers.models import affine
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
        real, entered, go = hawk.build, threading.Event(), threading.Event()

        def slow(*args, **kwargs):
            entered.set()
            go.wait(60)
            return real(*args, **kwargs)

        hawk.build = slow
        got = []
        run = lambda folder: eagle.deploy(affine, cache_dir=folder)(2.0, 3.0, 4.0)
        builder = threading.Thread(target=lambda: got.append(run(sys.argv[1])))
        builder.start()
        entered.wait(60)
        child = os.fork()
        if child == 0:
            hawk.build = real
            os._exit(0 if run(sys.argv[2]) == run(sys.argv[1]) == 10.0 else 1)
        go.set()
        builder.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert got == [10.0], got
        """,
        args=[str(tmp_path / "a"), str(tmp_path / "b")],
    ).check()


@pytest.mark.parametrize(("bad", "error"), [("", ValueError), (3, TypeError), (b"x", TypeError)])
def test_a_folder_that_is_none(bad: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="cache_dir"):
        eagle.deploy(models.climb, cache_dir=bad)


def test_the_home_folder_may_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root("~/units") == tmp_path / "units"
