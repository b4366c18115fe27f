"""The house rules that a machine can check: sizes, layers, names, errors, the public surface, what an import costs."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import re
import statistics
import types
from typing import TYPE_CHECKING

import pytest

import eagle
import eagle.errors
from tests.helpers.child import PROJECT, run_script

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

PACKAGE = PROJECT / "eagle"
MODULES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((PROJECT / "tests").rglob("*.py"))

MODULE_LINES = 600
TEST_LINES = 800
BODY_LINES = 60
# Function bodies that are longer, each with the reason why splitting it would read worse.
LONG_BODIES: dict[str, str] = {}

# Layer of each room: a module imports its own layer and those below.
LAYERS = {"errors": 0, "kernels": 1, "aio": 2, "sync": 3}
EMPTY_NAMES = {"utils", "util", "misc", "common", "helpers", "helper", "core", "impl", "base", "stuff", "tools"}

# The names of the published text, and those that design.md adds.
PUBLISHED = """
ActiveSet BackendUnavailable DeviceProps GraphComposer GraphPipeline KernelRegistry LayoutWarning LoadedKernel
LoadedPure LoadedVector RepeatWhile RunReport Runner SimResult Simulation SkipGuard Skippable assemble_args
check_aether_abi compaction_body deploy detect device_props launch load_manifest make_gref make_handle np_dtype
origin_adapter pure_prepare repeat_while run_until_done samples_first samples_last simulate simulation skippable
to_cupy until_done
""".split()
OURS = "Batcher Completion Progress EagleError DeviceFault NotBuilt Busy ArtifactError".split()
AIO_ONLY = "deploy healthy statistics trace".split()
NOT_BLOCKING = {"Batcher"}


def name_of(path: pathlib.Path) -> str:
    parts = path.relative_to(PROJECT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def tree_of(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{inside}{node.name}", node
            yield from functions(node, f"{inside}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{inside}{node.name}.")
        else:
            yield from functions(node, inside)


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first, *rest = node.body
    is_doc = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    if is_doc and not rest:
        return 0
    start = rest[0] if is_doc else first
    return (node.end_lineno or 0) - start.lineno + 1


def imported(path: pathlib.Path) -> Iterator[tuple[str, int]]:
    """Every module that a file imports, anywhere in it, by its full name; `from x import y` gives x and x.y."""
    package = name_of(path) if path.name == "__init__.py" else name_of(path).rpartition(".")[0]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            yield module, node.lineno
            for alias in node.names:
                yield f"{module}.{alias.name}", node.lineno


def at_load(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that run when the module is loaded."""
    todo: list[ast.stmt] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            todo += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            todo += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            todo += [child for handler in getattr(node, "handlers", ()) for child in handler.body]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
class TestModule:
    def test_it_is_not_a_giant(self, path: pathlib.Path) -> None:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= MODULE_LINES

    def test_its_functions_are_short(self, path: pathlib.Path) -> None:
        long = {
            f"{name_of(path)}.{name}": lines
            for name, node in functions(tree_of(path))
            if (lines := body_lines(node)) > BODY_LINES
        }
        assert {name: lines for name, lines in long.items() if name not in LONG_BODIES} == {}

    def test_its_name_says_what_it_holds(self, path: pathlib.Path) -> None:
        assert not EMPTY_NAMES.intersection(path.relative_to(PACKAGE).with_suffix("").parts)
        assert not path.stem.endswith("_impl")

    def test_its_docstring_says_so_too(self, path: pathlib.Path) -> None:
        assert ast.get_docstring(tree_of(path))

    def test_it_imports_downwards(self, path: pathlib.Path) -> None:
        room = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if room not in LAYERS:  # the package itself and its command line stand above all rooms
            return
        upwards = [
            (module, line)
            for module, line in imported(path)
            if module.startswith("eagle.") and LAYERS.get(module.split(".")[1], 9) > LAYERS[room]
        ]
        assert upwards == []

    def test_it_imports_no_private_names(self, path: pathlib.Path) -> None:
        private = [
            (module, line)
            for module, line in imported(path)
            if module.startswith("eagle.") and re.search(r"\._(?!_)", module)
        ]
        assert private == []

    def test_it_raises_no_bare_runtime_error(self, path: pathlib.Path) -> None:
        bare = []
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Raise) and node.exc is not None:
                raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
                if isinstance(raised, ast.Name) and raised.id in ("RuntimeError", "Exception", "BaseException"):
                    bare.append((raised.id, node.lineno))
        assert bare == []

    def test_it_loads_no_optional_package(self, path: pathlib.Path) -> None:
        optional = {"cupy", "cupyx", "cuda", "torch", "jax", "tensorflow", "warp", "tqdm", "matplotlib", "starlette"}
        if name_of(path) not in LOADED_ON_PURPOSE:
            optional.add("hawk")
        names = [
            name
            for node in at_load(tree_of(path))
            for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""])
        ]
        assert [name for name in names if name.split(".")[0] in optional] == []


# Modules that hold hawk kernels: nothing imports them before a command asks for them.
LOADED_ON_PURPOSE = {"eagle.oscillators"}


@pytest.mark.parametrize("path", sorted((PACKAGE / "kernels").rglob("*.py")), ids=name_of)
def test_kernels_know_no_event_loop(path: pathlib.Path) -> None:
    loops = {"asyncio", "anyio", "trio", "uvloop", "sniffio"}
    assert [(module, line) for module, line in imported(path) if module.split(".")[0] in loops] == []


def test_no_exception_to_the_size_rule_is_stale() -> None:
    long = {
        f"{name_of(path)}.{name}"
        for path in MODULES
        for name, node in functions(tree_of(path))
        if body_lines(node) > BODY_LINES
    }
    assert set(LONG_BODIES) <= long


def test_the_typical_function_is_short() -> None:
    assert statistics.median(body_lines(node) for path in MODULES for _, node in functions(tree_of(path))) < 10


@pytest.mark.parametrize("path", TESTS, ids=name_of)
class TestTest:
    def test_it_is_not_a_giant(self, path: pathlib.Path) -> None:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= TEST_LINES

    def test_it_imports_no_conftest(self, path: pathlib.Path) -> None:
        assert [module for module, _ in imported(path) if module.split(".")[-1] == "conftest"] == []


def test_every_public_name_is_listed() -> None:
    assert sorted({*PUBLISHED, *OURS} - set(eagle.__all__)) == []


def test_every_error_is_public() -> None:
    assert sorted(set(eagle.errors.__all__) - set(eagle.__all__)) == []


@pytest.mark.parametrize("name", sorted({*PUBLISHED, *OURS, *eagle.__all__}))
def test_every_public_name_can_be_bound(name: str) -> None:
    value = getattr(eagle, name)
    assert callable(value)
    assert value is getattr(eagle, name)
    assert inspect.getdoc(value)


def load_everything() -> None:
    for path in MODULES:
        if path.name != "__main__.py" and name_of(path) not in LOADED_ON_PURPOSE:
            importlib.import_module(name_of(path))


@pytest.mark.parametrize("face", ["eagle", "eagle.aio", "eagle.sync"])
def test_no_module_hides_a_public_name(face: str) -> None:
    # Loading pkg.x binds the module x in pkg, over a function of that name: eagle.aio.simulation must stay callable.
    load_everything()
    package = importlib.import_module(face)
    names = {*PUBLISHED, *OURS}
    if face == "eagle.aio":
        names |= set(AIO_ONLY)
    if face == "eagle.sync":
        names -= NOT_BLOCKING
    hidden = [name for name in sorted(names) if isinstance(getattr(package, name), types.ModuleType)]
    assert hidden == []


def test_a_name_that_is_not_there_is_named() -> None:
    with pytest.raises(AttributeError, match=r"frobnicate.*eagle\.__all__"):
        _ = eagle.frobnicate


def test_all_and_dir_agree() -> None:
    assert set(eagle.__all__) <= set(dir(eagle))


@pytest.mark.parametrize("name", eagle.errors.__all__)
class TestError:
    def test_it_has_the_root_and_a_built_in(self, name: str) -> None:
        error = getattr(eagle.errors, name)
        assert issubclass(error, eagle.errors.EagleError)
        if name != "EagleError":
            built_in = {"BackendUnavailable": RuntimeError, "DeviceFault": RuntimeError, "NotBuilt": RuntimeError,
                        "Busy": RuntimeError, "ArtifactError": ValueError, "AbiMismatch": eagle.errors.ArtifactError,
                        "UnsupportedSchema": eagle.errors.ArtifactError, "UnknownMemberError": KeyError,
                        "NonToggleableMemberError": RuntimeError, "LayoutWarning": UserWarning}  # fmt: skip
            assert issubclass(error, built_in.get(name, Exception))

    def test_it_survives_pickling_with_its_fields(self, name: str) -> None:
        error = getattr(eagle.errors, name)
        own = error.__init__ if inspect.isfunction(error.__init__) else None
        fields = len(inspect.signature(own).parameters) - 2 if own else 0  # without self and the message
        before = error("what happened", *range(7, 7 + fields))
        before.add_note("seen on a Monday")
        after = pickle.loads(pickle.dumps(before))
        assert type(after) is error
        assert str(after) == str(before) == "what happened"
        assert vars(after) == vars(before)

    def test_it_says_what_it_means(self, name: str) -> None:
        assert inspect.getdoc(getattr(eagle.errors, name))


def test_importing_eagle_loads_nothing_heavy() -> None:
    run_script("""
        import sys
        import eagle
        heavy = {"cupy", "cuda", "hawk", "raptor", "anyio", "trio", "uvloop", "asyncio", "numpy", "torch", "jax",
                 "tqdm", "multiprocessing", "subprocess", "ctypes"}
        assert not heavy & set(sys.modules), sorted(heavy & set(sys.modules))
        assert eagle.__version__
    """).check()


def test_using_the_host_loads_no_device_and_no_producer() -> None:
    run_script("""
        import sys
        import eagle, eagle.sync
        for name in eagle.__all__:
            getattr(eagle, name)
        heavy = {"cupy", "cuda", "hawk", "torch", "jax", "trio", "tqdm", "matplotlib"}
        assert not heavy & set(sys.modules), sorted(heavy & set(sys.modules))
    """).check()


def test_what_an_import_costs(record_property: pytest.RecordProperty) -> None:
    ended = run_script("""
        import time
        import numpy
        start = time.perf_counter()
        import eagle
        print(time.perf_counter() - start)
    """)
    seconds = float(ended.check().out)
    record_property("import_eagle_ms", round(seconds * 1000, 2))
    # The promise is 100 ms; ten times that is no measurement but a sign that something heavy is loaded.
    assert seconds < 1.0
