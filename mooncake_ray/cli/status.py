"""`mooncake-ray status`: this node's pools; or the cluster's node services (see `services`)."""

from __future__ import annotations

import argparse
import json
import sys
import time

from mooncake_ray.cli import pools, services, status_view

__all__ = ["add", "no_such_pool"]

_COMMAND = "mooncake-ray status"
_CLEAR = "\x1b[H\x1b[2J"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = commands.add_parser(
        "status", help="every pool of this user on this node", description="Shows every pool of this user on this node."
    )
    p.add_argument("--scope", metavar="NAME", help="only this pool (for Ray: the session's name, such as session_2026-01-31_…)")
    p.add_argument("--objects", type=int, default=10, metavar="N", help="how many pinned objects to name (default 10)")
    p.add_argument(
        "--cluster",
        action="store_true",
        help="instead, the node services of all nodes of the Ray cluster that this node (or RAY_ADDRESS) is of",
    )
    how = p.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="one JSON document")
    how.add_argument("--watch", nargs="?", type=_seconds, const=2.0, metavar="SECONDS", help="look again and again (default: every 2 s)")
    p.set_defaults(run=run)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"between 0.1 and 86400 seconds, got {text}")
    return value


def run(args: argparse.Namespace) -> int:
    if args.watch is None:
        return _show(args)
    screen = sys.stdout.isatty()
    while True:
        sys.stdout.write(_CLEAR if screen else f"--- {time.strftime('%H:%M:%S')}\n")
        _show(args)
        sys.stdout.flush()
        time.sleep(args.watch)


def _show(args: argparse.Namespace) -> int:
    if args.cluster:
        return services.run(args)
    found = pools.listed(args.scope)
    readings = [r for r in (pools.read(pool, _COMMAND) for pool in found) if r is not None]
    if args.json:
        print(json.dumps({"pools": [status_view.as_json(r) for r in readings]}, indent=2))
    elif not readings:
        print(no_such_pool(args.scope))
    else:
        print("\n\n".join("\n".join(status_view.lines(r, args.objects)) for r in readings))
    return 1 if any(r.error for r in readings) or (args.scope is not None and not readings) else 0


def no_such_pool(scope: str | None) -> str:
    """Says that there is nothing to look at."""
    return "no pool of this user is running on this node" if scope is None else f"no pool {scope} of this user is running on this node"
