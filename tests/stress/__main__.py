"""`make stress`, `make chaos`, `make soak`, or `PYTHONPATH=$PWD/tests python -m stress WHAT` in the top directory: see `--help`."""

from __future__ import annotations

import argparse
import contextlib
import random
import sys

from stress import storm
from stress.outcome import Outcome


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m stress", description="Long runs that try to break the pool. Exit status 1 if one did.")
    what = out.add_subparsers(dest="what", required=True, metavar="WHAT")

    def command(name: str, does: str) -> argparse.ArgumentParser:
        cli = what.add_parser(name, help=does)
        cli.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(31), help="of what is chosen; timing stays as it is")
        cli.add_argument("--json", action="store_true", help="nothing but a line of JSON")
        return cli

    store = command("store", "kill clients of the store at random, under spill pressure")
    store.add_argument("--kills-per-second", type=positive, default=storm.Options.kills_per_second, metavar="N")
    store.add_argument(
        "--broker-kills", action="store_true", help="kill the broker too, every few seconds; what was on disk must come back"
    )
    ray = command("ray", "the same over a Ray job, whose workers are killed")
    both = command("both", "one after the other, each for half the time")
    chaos = command("chaos", "in a cluster of four nodes: cut links, kill nodes, kill and stop brokers and node services")
    chaos.add_argument("--nodes", type=int, default=4, metavar="N")
    weights = command("weights", "in a cluster: cut links, and kill trainers, engines and the coordinator of a group that syncs weights")
    weights.add_argument("--nodes", type=int, default=4, metavar="N")
    loops = command("loops", "in a cluster: kill workers, learners, the buffer and nodes of an asynchronous loop")
    loops.add_argument("--nodes", type=int, default=3, metavar="N")
    for cli in (store, ray, both, chaos, weights, loops):
        cli.add_argument("--seconds", type=positive, default=60.0, metavar="S")
    command("soak", "a steady load; no process may grow").add_argument("--minutes", type=positive, default=30.0, metavar="M")
    return out


def positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be more than 0, got {text}")
    return value


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    runs = {
        "store": [over_store],
        "ray": [over_ray],
        "both": [over_store, over_ray],
        "soak": [soaking],
        "chaos": [chaotic],
        "weights": [chaotic],
        "loops": [chaotic],
    }[options.what]
    outcomes: list[Outcome] = []
    for run in runs:
        with contextlib.redirect_stdout(sys.stderr):  # Ray's messages
            outcomes.append(run(options))
        if not options.json:
            print(outcomes[-1].summary(), flush=True)
        if outcomes[-1].interrupted:
            break
    for outcome in outcomes:
        print(outcome.as_json(), flush=True)
    return max(outcome.status for outcome in outcomes)


def over_store(options: argparse.Namespace) -> Outcome:
    if options.what == "both":
        return storm.run(storm.Options(seconds=options.seconds / 2, seed=options.seed))
    return storm.run(storm.Options(options.seconds, options.kills_per_second, options.seed, options.broker_kills))


def over_ray(options: argparse.Namespace) -> Outcome:
    from stress import ray_storm

    seconds = options.seconds / 2 if options.what == "both" else options.seconds
    return ray_storm.run(ray_storm.Options(seconds=seconds, seed=options.seed))


def chaotic(options: argparse.Namespace) -> Outcome:
    from stress import chaos

    load, every_s = {"chaos": ("chaos_load", 4.0), "weights": ("weights_load", 4.0), "loops": ("loops_load", 90.0)}[options.what]
    return chaos.run(chaos.Options(options.seconds, options.seed, options.nodes, every_s, load))


def soaking(options: argparse.Namespace) -> Outcome:
    from stress import soak

    return soak.run(soak.Options(60 * options.minutes, options.seed))


if __name__ == "__main__":
    sys.exit(main())
