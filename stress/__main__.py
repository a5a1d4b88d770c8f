"""`python -m stress store`: see `--help`."""

from __future__ import annotations

import argparse
import random
import sys

from stress import storm
from stress.outcome import Outcome


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m stress", description="Long runs that try to break the pool. Exit status 1 if one did.")
    what = out.add_subparsers(dest="what", required=True, metavar="WHAT")
    store = what.add_parser("store", help="kill clients of the store at random, under spill pressure")
    common(store)
    store.add_argument("--kills-per-second", type=positive, default=10.0, metavar="N")
    store.add_argument(
        "--broker-kills", action="store_true", help="kill the broker too, every few seconds; what was on disk must come back"
    )
    return out


def common(cli: argparse.ArgumentParser) -> None:
    cli.add_argument("--seconds", type=positive, default=60.0, metavar="S")
    cli.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(31), help="of what is chosen; timing stays as it is")


def positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be more than 0, got {text}")
    return value


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    outcome = run(options)
    print(outcome.summary())
    print(outcome.as_json(), flush=True)
    return outcome.status


def run(options: argparse.Namespace) -> Outcome:
    return storm.run(
        storm.Options(
            seconds=options.seconds, kills_per_second=options.kills_per_second, seed=options.seed, broker_kills=options.broker_kills
        )
    )


if __name__ == "__main__":
    sys.exit(main())
