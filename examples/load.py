"""Load for service.py on this machine: a fixed number of requests over some connections; prints rate, p50 and p99.

    python examples/load.py --requests 2000 --connections 64 --samples 10

Each connection asks, waits for the answer and asks again. Only loopback addresses are taken, and it stops by itself:
after the requests, or after `--seconds`.
"""

import argparse
import asyncio
import ipaddress
import json
import random
import sys
import time
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urlsplit

MOST_REQUESTS = 100_000
MOST_SECONDS = 120.0


@dataclass
class Tally:
    """What has come back so far."""

    seconds: list[float] = field(default_factory=list)
    refused: dict[int, int] = field(default_factory=dict)
    lost: int = 0


def loopback(url: str) -> SplitResult:
    """Return the parts of a URL on this machine.

    Raises:
        ValueError: It is none.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        own = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        own = False
    if parts.scheme != "http" or not own:
        raise ValueError(
            f"{url!r} is not on this machine; load goes to http://127.0.0.1:PORT (or another loopback) only"
        )
    return parts


def request_of(samples: int, seed: int) -> bytes:
    rng = random.Random(seed)
    planes = {
        "omega": [rng.uniform(1.0, 3.0) for _ in range(samples)],
        "zeta": [rng.uniform(0.0, 0.2) for _ in range(samples)],
        "x": [rng.uniform(-1.0, 1.0) for _ in range(samples)],
        "v": [rng.uniform(-1.0, 1.0) for _ in range(samples)],
        "steps": [rng.randint(1, 1000) for _ in range(samples)],
    }
    return json.dumps(planes).encode()


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, body: bytes) -> int:
    """Send one request over an open connection, read the whole answer and return its status."""
    head = (
        "POST /simulate HTTP/1.1",
        f"Host: {host}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    writer.write("\r\n".join((*head, "", "")).encode() + body)
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    await reader.readexactly(int(headers["content-length"]))
    return int(lines[0].split()[1])


async def connection(url: SplitResult, bodies: list[bytes], left: list[int], until: float, tally: Tally) -> None:
    """Ask over one connection until the requests or the time is used up; a lost connection is opened again."""
    host, port = url.hostname or "127.0.0.1", url.port or 80
    while left[0] > 0 and time.perf_counter() < until:
        writer = None
        try:
            reader, writer = await asyncio.open_connection(host, port)
            while left[0] > 0 and time.perf_counter() < until:
                left[0] -= 1
                began = time.perf_counter()
                status = await ask(reader, writer, host, bodies[left[0] % len(bodies)])
                if status == 200:
                    tally.seconds.append(time.perf_counter() - began)
                else:
                    tally.refused[status] = tally.refused.get(status, 0) + 1
        except (OSError, asyncio.IncompleteReadError):
            tally.lost += 1
            if tally.lost > 100:
                return
            await asyncio.sleep(0.05)
        finally:
            if writer is not None:
                writer.close()


async def load(url: SplitResult, requests: int, connections: int, samples: int, seconds: float) -> tuple[Tally, float]:
    bodies = [request_of(samples, seed) for seed in range(min(requests, 64))]
    tally, left = Tally(), [requests]
    began = time.perf_counter()
    async with asyncio.timeout(seconds + 30.0), asyncio.TaskGroup() as tasks:
        for _ in range(connections):
            tasks.create_task(connection(url, bodies, left, began + seconds, tally))
    return tally, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the service, on this machine")
    parser.add_argument("--requests", type=int, default=2_000, help=f"at most {MOST_REQUESTS:,} (default: 2,000)")
    parser.add_argument("--connections", type=int, default=64, help="at most 512 (default: 64)")
    parser.add_argument("--samples", type=int, default=10, help="of each request (default: 10)")
    parser.add_argument("--seconds", type=float, default=30.0, help=f"at most {MOST_SECONDS:g} (default: 30)")
    options = parser.parse_args()
    limits = {"requests": MOST_REQUESTS, "connections": 512, "samples": 4_096, "seconds": MOST_SECONDS}
    for name, most in limits.items():
        if not 0 < getattr(options, name) <= most:
            parser.error(f"--{name} is {getattr(options, name)}; give at most {most:g}, and more than 0")
    try:
        url = loopback(options.url)
    except ValueError as error:
        parser.error(str(error))
    work = load(url, options.requests, options.connections, options.samples, options.seconds)
    tally, took = asyncio.run(work)
    if not tally.seconds:
        sys.exit(f"no answer from {options.url} (refused: {tally.refused}, lost: {tally.lost}); is service.py running?")
    times = sorted(1e3 * s for s in tally.seconds)
    print(
        f"{len(times):,} answers of {options.samples:,} samples over {options.connections} connections in {took:.2f} s"
    )
    print(
        f"{len(times) / took:,.0f} requests/s   p50 {quantile(times, 0.5):.1f} ms   p99 {quantile(times, 0.99):.1f} ms"
    )
    if tally.refused or tally.lost:
        print(f"refused: {tally.refused or 'none'}, connections lost: {tally.lost}")


def quantile(ordered: list[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


if __name__ == "__main__":
    main()
