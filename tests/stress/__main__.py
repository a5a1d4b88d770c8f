"""`make stress`, `make soak`, or `PYTHONPATH=$PWD/tests python -m stress --help` in the top directory."""

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
    ray = what.add_parser("ray", help="the same over a Ray job, whose workers are killed")
    common(ray)
    both = what.add_parser("both", help="one after the other, each for half the time")
    common(both)
    soak = what.add_parser("soak", help="a steady job: memory, descriptors and threads of every process must stay where they are")
    common(soak)
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
    outcomes = []
    for run in RUNS[options.what]:
        outcomes.append(run(options))
        print(outcomes[-1].summary(), flush=True)
        if outcomes[-1].interrupted:
            break
    for outcome in outcomes:
        print(outcome.as_json(), flush=True)
    return max(outcome.status for outcome in outcomes)


def seconds(options: argparse.Namespace) -> float:
    return options.seconds / 2 if options.what == "both" else options.seconds


def over_store(options: argparse.Namespace) -> Outcome:
    chosen = {"kills_per_second": options.kills_per_second, "broker_kills": options.broker_kills} if options.what == "store" else {}
    return storm.run(storm.Options(seconds=seconds(options), seed=options.seed, **chosen))


def over_ray(options: argparse.Namespace) -> Outcome:
    from stress import ray_storm

    return ray_storm.run(ray_storm.Options(seconds=seconds(options), seed=options.seed))


def at_rest(options: argparse.Namespace) -> Outcome:
    from stress import soak

    return soak.run(soak.Options(seconds=options.seconds, seed=options.seed))


RUNS = {"store": (over_store,), "ray": (over_ray,), "both": (over_store, over_ray), "soak": (at_rest,)}


if __name__ == "__main__":
    sys.exit(main())
