"""A simulation service: small requests are batched, long runs report their progress, and who hangs up is cancelled.

    pip install -e ".[hawk,service]"
    python examples/service.py                      # http://127.0.0.1:8000
    python examples/load.py --requests 2000         # in another terminal

    curl -s localhost:8000/simulate -d '{"omega": [1], "zeta": [0.1], "x": [1], "v": [0], "steps": [100]}'
    curl -sN 'localhost:8000/runs?n=1000000&longest=20000'

POST /simulate answers one request of damped oscillators (see oscillators.py). Requests that come while others run are
merged into one launch by `eagle.Batcher`; each answer has the bits that running alone would give. GET /runs makes one
long run and streams its progress as server-sent events. GET /metrics is for Prometheus, GET /healthz for whoever
restarts services.
"""

import argparse
import contextlib
import json
import math
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import numpy as np
from oscillators import DT, LONGEST, oscillate, oscillators

import eagle

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route
    from starlette.types import Receive, Scope, Send
except ImportError as error:
    sys.exit(f'service.py answers through Starlette and uvicorn ({error}); install them: pip install -e ".[service]"')

PLANES = ("omega", "zeta", "x", "v", "steps")
MOST_SAMPLES = 4_096  # of one request
MOST_BYTES = 1 << 20  # of one body
MOST_PENDING = 2_000  # requests; more are turned away, so that those inside are answered in time
MOST_RUNS = 4  # long ones at a time; more wait
TIME_LIMIT_S = 30.0


@contextlib.asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[dict[str, Any]]:
    """Hold the batcher open as long as the service lives; the kernel is compiled before the first request comes."""
    app.state.closing = anyio.Event()
    async with eagle.Batcher(oscillate, dt=DT, max_steps=LONGEST, max_samples=65_536, max_wait=0.005) as batcher:
        yield {
            "closing": app.state.closing,
            "batcher": batcher,
            "pending": anyio.CapacityLimiter(MOST_PENDING),
            "runs": anyio.CapacityLimiter(MOST_RUNS),
        }


# ---- clients that hang up ------------------------------------------------------------------------------------------


async def unless_gone(
    receive: Receive, work: Callable[[], Awaitable[None]], closing: anyio.Event | None = None
) -> bool:
    """Do the work, and cancel it when the client hangs up or the service closes; return whether it was done."""
    done = False
    async with anyio.create_task_group() as tasks:

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            tasks.cancel_scope.cancel()

        async def watch_service(closing: anyio.Event) -> None:
            await closing.wait()
            tasks.cancel_scope.cancel()

        tasks.start_soon(watch)
        if closing is not None:
            tasks.start_soon(watch_service, closing)
        await work()
        done = True
        tasks.cancel_scope.cancel()
    return done


# ---- small requests ------------------------------------------------------------------------------------------------


class Refused(Exception):
    """The request cannot be served; the client is told why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


async def body_of(request: Request) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BYTES:
            raise Refused(413, f"the body is longer than {MOST_BYTES:,} bytes; ask for fewer samples at a time")
    return body


def planes_of(body: bytes) -> dict[str, np.ndarray]:
    """Turn a JSON body into the kernel's planes; whatever is wrong with it is said in words."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON: {error}") from None
    if not isinstance(given, dict) or set(given) != set(PLANES):
        raise Refused(400, f"the body must be an object with exactly the lists {', '.join(PLANES)}")
    planes = {name: numbers(name, given[name]) for name in PLANES}
    lengths = {plane.size for plane in planes.values()}
    if len(lengths) > 1 or not 1 <= max(lengths) <= MOST_SAMPLES:
        raise Refused(400, f"the lists must be of one length, 1 to {MOST_SAMPLES:,}; they have {sorted(lengths)}")
    steps = planes.pop("steps")
    if not ((steps >= 1) & (steps <= LONGEST) & (steps == np.floor(steps))).all():
        raise Refused(400, f"steps must be whole numbers from 1 to {LONGEST}")
    return {**planes, "nstop": steps, "k": np.zeros(steps.size)}


def numbers(name: str, values: object) -> np.ndarray:
    if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
        raise Refused(400, f"{name} must be a list of numbers")
    try:
        plane = np.array(values, float)
    except OverflowError:
        raise Refused(400, f"{name} holds a number that is too large") from None
    if not np.isfinite(plane).all():
        raise Refused(400, f"{name} holds a number that is not finite")
    return plane


async def simulate(request: Request) -> Response:
    """POST /simulate."""
    pending, ticket, answer = request.state.pending, object(), {}
    try:
        planes = planes_of(await body_of(request))
        try:
            pending.acquire_on_behalf_of_nowait(ticket)
        except anyio.WouldBlock:
            raise Refused(503, f"{MOST_PENDING:,} requests are waiting; come back later") from None
    except Refused as error:
        return JSONResponse({"error": str(error)}, error.status)

    async def work() -> None:
        with anyio.move_on_after(TIME_LIMIT_S):
            answer["result"] = await request.state.batcher.simulate(**planes)

    try:
        done = await unless_gone(request.receive, work)
    finally:
        pending.release_on_behalf_of(ticket)
    if "result" not in answer:
        why = f"no answer within {TIME_LIMIT_S:g} s" if done else "the client hung up"
        return JSONResponse({"error": why}, 504 if done else 499)
    result = answer["result"]
    state = {name: result[plane].tolist() for name, plane in (("x", "x"), ("v", "v"), ("steps", "k"))}
    return JSONResponse({"n": result.n, "status": result.status, "wall_s": result.wall_s, **state})


# ---- long runs -----------------------------------------------------------------------------------------------------


class Events:
    """A response of server-sent events; the source is cancelled when the client hangs up.

    Args:
        source: Is given a function that sends one event, and returns when all are sent.
        closing: Set when the service shuts down; the stream ends then.
    """

    def __init__(
        self, source: Callable[[Callable[[str, object], Awaitable[None]]], Awaitable[None]], closing: anyio.Event
    ) -> None:
        self.source = source
        self.closing = closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def emit(event: str, data: object) -> None:
            text = f"event: {event}\ndata: {json.dumps(data)}\n\n"
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})

        await unless_gone(receive, lambda: self.source(emit), self.closing)
        await send({"type": "http.response.body", "body": b"", "more_body": False})  # nothing, to a client that is gone


def query_number(request: Request, name: str, default: int, most: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most):
        raise Refused(400, f"{name}={text[:40]}: give a whole number from 1 to {most:,}")
    return int(text)


async def runs(request: Request) -> Response | Events:
    """GET /runs: one long run, followed."""
    try:
        n = query_number(request, "n", 1_000_000, 2_000_000)
        longest = query_number(request, "longest", LONGEST, 100_000)
    except Refused as error:
        return JSONResponse({"error": str(error)}, error.status)
    limiter = request.state.runs

    async def source(emit: Callable[[str, object], Awaitable[None]]) -> None:
        planes = await anyio.to_thread.run_sync(oscillators, n, longest)  # a million random numbers take a moment
        sim = await eagle.simulation(oscillate, **planes, dt=DT, max_steps=longest, limiter=limiter)

        async def follow(run: AsyncIterator[eagle.Progress]) -> None:
            async for p in run:
                eta = p.eta_s if math.isfinite(p.eta_s) else None
                await emit("progress", {"n": p.n, "finished": p.finished, "steps": p.steps, "eta_s": eta})

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow, sim.progress(interval=0.1))
            result = await sim.run()
        energy = float(np.mean(result.v**2 + (planes["omega"] * result.x) ** 2) / 2.0)
        taken = int(result.k.sum())
        await emit(
            "result", {"n": n, "status": result.status, "steps": taken, "energy": energy, "wall_s": result.wall_s}
        )

    return Events(source, request.state.closing)


# ---- for those who watch -------------------------------------------------------------------------------------------


async def metrics(request: Request) -> Response:
    """GET /metrics."""
    return PlainTextResponse(eagle.aio.statistics().prometheus(), media_type="text/plain; version=0.0.4")


async def healthz(request: Request) -> Response:
    """GET /healthz."""
    healthy = eagle.aio.healthy()
    pending = request.state.pending.borrowed_tokens
    return JSONResponse({"healthy": healthy, "pending": pending}, 200 if healthy else 503)


app = Starlette(
    routes=[
        Route("/simulate", simulate, methods=["POST"]),
        Route("/runs", runs),
        Route("/metrics", metrics),
        Route("/healthz", healthz),
    ],
    lifespan=lifespan,
)


class Server(uvicorn.Server):
    """uvicorn, which on Ctrl-C waits for open requests: those that would go on for long are told first."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        app.state.closing.set()
        await super().shutdown(sockets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default: 8000)")
    options = parser.parse_args()
    config = uvicorn.Config(
        app, host=options.host, port=options.port, log_level="warning", ws="none", timeout_graceful_shutdown=5
    )
    with contextlib.suppress(KeyboardInterrupt):  # which uvicorn raises once more when it has shut down
        Server(config).run()


if __name__ == "__main__":
    main()
