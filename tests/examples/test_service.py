"""The service over real sockets: answers, refusals, progress events, clients that hang up, and the load script."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.helpers.child import PROJECT, run_command

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

httpx = pytest.importorskip("httpx")
uvicorn = pytest.importorskip("uvicorn")
for needed in ("hawk", "starlette"):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed", allow_module_level=True)

LIMIT_S = 60.0


@pytest.fixture(scope="module")
def service() -> Iterator[Any]:
    """The example as a module; its folder is importable only meanwhile."""
    folder = str(PROJECT / "examples")
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module("service")
    finally:
        sys.path.remove(folder)
        for name in ("service", "oscillators"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def url(service: Any) -> Iterator[str]:
    """The address of the running service: uvicorn in a thread, on a port that was free."""
    server = uvicorn.Server(uvicorn.Config(service.app, host="127.0.0.1", port=0, log_level="warning", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive())
        assert server.started
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(LIMIT_S)
        assert not thread.is_alive()


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=LIMIT_S) as client:
        yield client


def until(condition: Any) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def request(n: int, seed: int = 1) -> dict[str, list[float]]:
    rng = np.random.default_rng(seed)
    planes = {
        "omega": rng.uniform(1.0, 3.0, n),
        "zeta": rng.uniform(0.0, 0.2, n),
        "x": rng.uniform(-1.0, 1.0, n),
        "v": rng.uniform(-1.0, 1.0, n),
        "steps": rng.integers(1, 1000, n),
    }
    return {name: plane.tolist() for name, plane in planes.items()}


def exact(given: dict[str, list[float]]) -> np.ndarray:
    w, z, x, v, steps = (np.array(given[name], float) for name in ("omega", "zeta", "x", "v", "steps"))
    t, damped = 0.01 * steps, w * np.sqrt(1.0 - z * z)
    return np.exp(-z * w * t) * (x * np.cos(damped * t) + (v + z * w * x) / damped * np.sin(damped * t))


def metric(client: httpx.Client, name: str) -> float:
    lines = [line for line in client.get("/metrics").text.splitlines() if line.split(" ")[0] == name]
    return float(lines[0].split()[1])


def events(lines: Iterator[str]) -> Iterator[tuple[str, Any]]:
    event = ""
    for line in lines:
        if line.startswith("event: "):
            event = line[7:]
        elif line.startswith("data: "):
            yield event, json.loads(line[6:])


# ---- small requests ----------------------------------------------------------------------------------------------


def test_an_answer_is_right(client: httpx.Client) -> None:
    given = request(50)
    answer = client.post("/simulate", json=given)
    assert answer.status_code == 200
    got = answer.json()
    assert (got["n"], got["status"]) == (50, "finished")
    np.testing.assert_allclose(got["x"], exact(given), rtol=0, atol=1e-6)
    assert got["steps"] == given["steps"]


def test_many_at_once_are_right(url: str) -> None:
    with httpx.Client(base_url=url, timeout=LIMIT_S) as many, ThreadPoolExecutor(16) as pool:
        asked = [request(1 + seed % 7, seed) for seed in range(200)]
        answers = list(pool.map(lambda given: many.post("/simulate", json=given), asked))
    for given, answer in zip(asked, answers, strict=True):
        np.testing.assert_allclose(answer.json()["x"], exact(given), rtol=0, atol=1e-6)


def test_the_bits_do_not_depend_on_the_company(client: httpx.Client, url: str) -> None:
    given = request(20, seed=3)
    alone = client.post("/simulate", json=given).json()
    with httpx.Client(base_url=url, timeout=LIMIT_S) as many, ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda _: many.post("/simulate", json=given).json(), range(40)))
    assert all(answer["x"] == alone["x"] and answer["v"] == alone["v"] for answer in together)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"omega": [1.0]}, "one length"),
        ({"omega": "fast"}, "list of numbers"),
        ({"zeta": [None, 0.1, 0.1]}, "list of numbers"),
        ({"zeta": [True, 0.1, 0.1]}, "list of numbers"),
        ({"x": [math.inf, 0.0, 0.0]}, "not finite"),
        ({"x": [10**400, 0, 0]}, "too large"),
        ({"steps": [1, 2, 1001]}, "whole numbers"),
        ({"steps": [1, 2, 2.5]}, "whole numbers"),
        ({"speed": [1.0, 1.0, 1.0]}, "exactly the lists"),
        ({name: [] for name in ("omega", "zeta", "x", "v", "steps")}, "one length"),
    ],
)
def test_a_bad_request_is_told_why(client: httpx.Client, change: dict[str, Any], said: str) -> None:
    answer = client.post("/simulate", content=json.dumps({**request(3), **change}))
    assert answer.status_code == 400
    assert said in answer.json()["error"]


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 50_000])
def test_junk_is_told_why(client: httpx.Client, body: bytes) -> None:
    answer = client.post("/simulate", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]


def test_a_long_body_is_refused(client: httpx.Client) -> None:
    answer = client.post("/simulate", content=b" " * (1 << 21))
    assert answer.status_code == 413


def test_clients_that_hang_up_leave_nothing_behind(client: httpx.Client, url: str) -> None:
    parts = httpx.URL(url)
    body = json.dumps(request(1000)).encode()
    head = f"POST /simulate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    for at in range(30):
        with socket.create_connection((parts.host, parts.port)) as gone:
            gone.sendall(head + body[: len(body) * (at % 3) // 2])
    until(lambda: client.get("/healthz").json()["pending"] == 0)
    assert client.post("/simulate", json=request(3)).status_code == 200
    until(lambda: metric(client, "eagle_in_flight") == 0)


# ---- long runs ---------------------------------------------------------------------------------------------------


def test_a_long_run_is_followed_to_its_end(client: httpx.Client) -> None:
    with client.stream("GET", "/runs", params={"n": 20_000, "longest": 500}) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        got = list(events(answer.iter_lines()))
    *progress, (last, result) = got
    assert last == "result"
    assert {event for event, _ in progress} == {"progress"}
    finished = [data["finished"] for _, data in progress]
    assert finished == sorted(finished)
    assert finished[-1] == 20_000
    assert result["status"] == "finished"


def test_a_client_that_hangs_up_cancels_its_run(client: httpx.Client, url: str) -> None:
    before = metric(client, "eagle_cancelled_total")
    with (
        httpx.Client(base_url=url, timeout=LIMIT_S) as other,
        other.stream("GET", "/runs", params={"n": 1_000_000, "longest": 100_000}) as answer,
    ):
        event, data = next(events(answer.iter_lines()))  # it runs: some ten seconds on two cores
        assert event == "progress"
        assert data["finished"] < data["n"]
    until(lambda: metric(client, "eagle_cancelled_total") > before)
    until(lambda: metric(client, "eagle_in_flight") == 0)


@pytest.mark.parametrize("query", ["n=0", "n=-1", "n=many", "n=3000000", "longest=0", "n=1e3", "n=²"])
def test_a_run_that_is_too_large_or_no_number_is_refused(client: httpx.Client, query: str) -> None:
    answer = client.get(f"/runs?{query}")
    assert answer.status_code == 400
    assert "whole number" in answer.json()["error"]


# ---- watching and load -------------------------------------------------------------------------------------------


def test_healthz_and_metrics(client: httpx.Client) -> None:
    assert client.get("/healthz").json()["healthy"] is True
    text = client.get("/metrics")
    assert text.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "# TYPE eagle_done_total counter" in text.text


def load(*args: object) -> Any:
    return run_command([sys.executable, str(PROJECT / "examples" / "load.py"), *map(str, args)])


def test_load_prints_rate_and_quantiles(url: str) -> None:
    ended = load("--url", url, "--requests", 100, "--connections", 8, "--samples", 3).check()
    assert ended.out.startswith("100 answers of 3 samples")
    assert "requests/s" in ended.out
    assert "p99" in ended.out
    assert "refused" not in ended.out


@pytest.mark.parametrize(
    "url", ["http://192.0.2.1:8000", "http://example.org", "https://127.0.0.1", "http://0.0.0.0:1"]
)
def test_load_leaves_other_machines_alone(url: str) -> None:
    ended = load("--url", url, "--requests", 1)
    assert ended.status == 2
    assert "not on this machine" in ended.err


def test_load_says_when_nobody_answers() -> None:
    with socket.socket() as taken:  # bound, not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        ended = load("--url", f"http://127.0.0.1:{taken.getsockname()[1]}", "--requests", 3, "--seconds", 1)
    assert ended.status == 1
    assert "is service.py running" in ended.err


# ---- its own process ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="signals differ there")
def test_ctrl_c_ends_the_service_and_its_long_runs() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def use_it(process: subprocess.Popen[str]) -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S) as client:
            until(lambda: answers(client) or process.poll() is not None)
            with client.stream("GET", "/runs", params={"n": 1_000_000, "longest": 100_000}) as answer:
                followed = events(answer.iter_lines())
                assert next(followed)[0] == "progress"
                process.send_signal(signal.SIGINT)
                assert "result" not in dict(followed)  # the stream ends, and well: httpx would complain

    script = str(PROJECT / "examples" / "service.py")
    run_command([sys.executable, script, "--port", str(port)], meanwhile=use_it).check()


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/healthz").status_code == 200
    except httpx.ConnectError:
        return False
