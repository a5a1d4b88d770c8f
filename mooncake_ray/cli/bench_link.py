"""`mooncake-ray bench-link`: what do the transports get through between two nodes?"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mooncake_ray.cli.network_facts import device_of, parse_address, way_to
from mooncake_ray.cli.text import size, table
from mooncake_ray.config import Config, parse_bytes
from mooncake_ray.errors import ConfigError

if TYPE_CHECKING:
    from mooncake_ray.transport.measure import Measured

__all__ = ["add", "lines"]

_SECRET = "MOONCAKE_RAY_SECRET"
_MOST = 1 << 30
_LEAST = 1 << 12


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = commands.add_parser(
        "bench-link",
        help="how fast are the transports between two nodes?",
        description="On one node: `bench-link --listen HOST[:PORT]`, with the address of that node that the other one reaches it by. On the "
        "other: `bench-link HOST:PORT`, which reads from it by every transport that both have, and prints latency and bandwidth by size. "
        "On a node of a running Ray cluster `bench-link --ray [NODE]` does for both.",
        epilog=f"Both ends need the same secret: set {_SECRET} at both, or copy the one-time token that the listening end prints. It is never "
        "sent. Mooncake's engine is only measured if --transport names it: it listens on every interface, for everybody.",
    )
    p.add_argument(
        "peer", nargs="?", metavar="HOST:PORT", help="the node that listens; with --ray: a node's address, or its id's beginning"
    )
    p.add_argument(
        "--ray", action="store_true", help="have another node of this node's Ray cluster listen (which one may be left out of two)"
    )
    p.add_argument("--listen", metavar="HOST[:PORT]", help="be the end that is read, at this address of this node (port: any free one)")
    p.add_argument("--transport", action="append", metavar="NAME", help="only this one (may be repeated; default: verbs, tcp, shm)")
    p.add_argument("--max", default="1GiB", metavar="SIZE", help="largest read; takes as much memory on both nodes (default: 1GiB)")
    p.add_argument("--streams", type=int, default=4, metavar="N", help="of TCP at most (default: 4)")
    p.add_argument("--token", metavar="TOKEN", help=f"the secret, where {_SECRET} is not set; visible to who lists processes")
    p.add_argument("--json", action="store_true", help="one JSON document")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.listen is not None if args.ray or args.peer else args.listen is None:
        raise ConfigError("bench-link takes one of --listen HOST[:PORT], the HOST:PORT of the node that listens, and --ray [NODE]")
    most = parse_bytes(args.max)
    if not _LEAST <= most <= _MOST:
        raise ConfigError(f"--max must be from {size(_LEAST)} to {size(_MOST)}, got {size(most)}")
    if not 1 <= args.streams <= 64:
        raise ConfigError(f"--streams must be from 1 to 64, got {args.streams}")
    from mooncake_ray.transport import transport_names  # here, as NumPy takes longer to import than other commands to run
    from mooncake_ray.transport.measure import TRANSPORTS

    names = list(dict.fromkeys(args.transport or TRANSPORTS))
    if unknown := [n for n in names if n not in transport_names()]:
        raise ConfigError(f"there is no transport {unknown[0]!r}; there are {', '.join(transport_names())}")
    if args.ray:
        return _measure_ray(args, names, most)
    try:
        host, port = parse_address(args.listen or args.peer)
    except ValueError as e:
        raise ConfigError(str(e)) from None
    secret = os.environ.get(_SECRET) or args.token
    return _listen(args, host, port, secret, names, most) if args.listen else _measure(args, host, port, secret, names, most)


def _listen(args: argparse.Namespace, host: str, port: int, secret: str | None, names: list[str], most: int) -> int:
    from mooncake_ray.transport.measure import Server

    token = secret or secrets.token_hex(16)  # nothing that an option could be taken for
    nics = [nic] if (nic := device_of(host)) else []
    try:
        server = Server(Config.from_env(), host, port, token.encode(), names, most, nics)
    except ValueError as e:
        raise ConfigError(f"cannot listen at {host!r}: {e}") from None
    try:
        there = f"[{host}]:{server.port}" if ":" in host else f"{host}:{server.port}"
        if args.json:
            print(json.dumps({"listening": there, **({} if secret else {"token": token})}), flush=True)
        else:
            command = f"mooncake-ray bench-link {there}"
            run = f"(with the same {_SECRET} set) {command}" if secret else f"{_SECRET}={token} {command}"
            print(f"listening at {there}, until Ctrl-C. On the other node:\n\n  {run}\n", flush=True)
        server.serve()
    finally:
        server.close()
    return 0


def _measure(args: argparse.Namespace, host: str, port: int, secret: str | None, names: list[str], most: int) -> int:
    if not secret:
        raise ConfigError(f"set {_SECRET} to what the listening end printed (or pass it by --token)")
    return _report(args, host, port, secret.encode(), names, most, {"peer": args.peer})


def _measure_ray(args: argparse.Namespace, names: list[str], most: int) -> int:
    from mooncake_ray.cli.far_end import far_end

    with far_end(args.peer or "", names, most) as there:
        if not args.json:
            print(f"from {there}, node {there.node} ({', '.join(there.nics) or 'device unknown'}), to this node")
        facts = {"peer": str(there), "node": there.node, "peer_nics": there.nics}
        return _report(args, there.host, there.port, there.secret, names, most, facts)


def _report(args: argparse.Namespace, host: str, port: int, secret: bytes, names: list[str], most: int, facts: dict[str, Any]) -> int:
    from mooncake_ray.transport.measure import measure

    found = list(measure(Config.from_env(), host, port, secret, names, most, args.streams, lambda: way_to(host, port), _say))
    if args.json:
        print(json.dumps({**facts, "results": [asdict(m) for m in found]}, indent=2))
    else:
        print("\n".join(lines(found)))
    return 0 if any(not m.error for m in found) else 1


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def lines(found: list[Measured]) -> list[str]:
    """A row a transport and size; then why others have none."""
    rows = [
        (
            m.transport,
            size(m.nbytes),
            _time(m.p50_s),
            _time(m.p99_s),
            f"{size(int(m.bytes_per_s))}/s",
            str(m.streams),
            ", ".join(m.nics) or "-",
        )
        for m in found
        if not m.error
    ]
    out = table(("TRANSPORT", "SIZE", "P50", "P99", "BANDWIDTH", "STREAMS", "DEVICES"), rows, right=(1, 2, 3, 4, 5)) if rows else []
    return [*out, *(f"{m.transport}: not measured: {m.error}" for m in found if m.error)]


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
