"""The command line: ``python -m eagle doctor`` and ``python -m eagle bench``."""

from __future__ import annotations

import argparse
import sys

import eagle

_MOST = 100_000_000  # some 6 GB of planes


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m eagle", description=eagle.__doc__.partition("\n")[0])
    parser.add_argument("--version", action="version", version=eagle.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="what is installed, which targets work and why not; status 1 when one fails")
    card = commands.add_parser("bench", help="a short benchmark card of this machine")
    card.add_argument(
        "--n", type=_count, nargs="+", default=[1_000, 10_000, 100_000], metavar="N", help="numbers of samples"
    )
    chosen = parser.parse_args(arguments)
    if chosen.command == "doctor":
        from eagle.doctor import doctor

        return doctor()
    from eagle.bench import bench

    return bench(tuple(chosen.n))


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number <= _MOST:
        raise argparse.ArgumentTypeError(f"{text} is no number of samples; give 1 to {_MOST:,}")
    return number


if __name__ == "__main__":
    sys.exit(main())
