"""`mooncake-ray serve` and `mooncake-ray pull`: versions of a model over HTTP, given out and fetched."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import time

from mooncake_ray.cli.text import size
from mooncake_ray.errors import ConfigError

__all__ = ["add"]

_READ, _PUBLISH = "MOONCAKE_RAY_READ_TOKEN", "MOONCAKE_RAY_PUBLISH_TOKEN"
_REDRAW_S = 0.2


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = commands.add_parser(
        "serve",
        help="serves versions of a model over HTTP",
        description="Serves the versions in a directory (of a SnapshotStore or a DeltaLog) over HTTP, by Ray Serve, until Ctrl-C. "
        f"Tokens come by the environment: {_READ} is asked of readers, {_PUBLISH} of those who publish; without the latter nobody may.",
    )
    p.add_argument("--store", required=True, metavar="DIR", help="directory of the versions, which all nodes see")
    p.add_argument("--host", default="127.0.0.1", help="address that HTTP is served at (default: 127.0.0.1; 0.0.0.0: all)")
    p.add_argument("--port", type=int, default=8000, metavar="N", help="its port (default: 8000)")
    p.add_argument("--data-host", metavar="HOST", help="what clients reach the data ports by (default: the node's address)")
    p.add_argument("--data-port", type=int, default=0, metavar="N", help="of payloads (default: any free one)")
    p.add_argument("--address", metavar="ADDRESS", help="of the Ray cluster (default: the one that runs here, or a new one)")
    p.add_argument("--replicas", type=int, default=1, metavar="N", help="(default: 1)")
    p.add_argument("--files", metavar="DIR", help="config.json, tokenizer and the like, given out with every version")
    p.add_argument("--group", metavar="NAME", help="a weight sync group whose versions may be stored")
    p.add_argument("--store-every", type=int, metavar="N", help="store every so many of its versions")
    p.add_argument("--keep", type=int, metavar="N", help="delete all but the newest N versions, and those in use (default: delete none)")
    p.add_argument("--max-transfers", type=int, default=64, metavar="N", help="of a replica at a time (default: 64)")
    p.set_defaults(run=run)

    p = commands.add_parser(
        "pull",
        help="fetches a version over HTTP, as a folder that transformers loads",
        description="Fetches a version from an endpoint into a folder, in parallel, and compares it with its digests. Run again, it goes on "
        f"where it was interrupted. A token comes by the environment: {_READ}.",
    )
    p.add_argument("url", metavar="URL", help="of the endpoint: http://host:8000")
    p.add_argument("folder", metavar="FOLDER", help="made if it is not there")
    p.add_argument("--version", default="latest", metavar="N", help="(default: the latest)")
    p.add_argument("--connections", type=int, default=4, metavar="N", help="at a time (default: 4)")
    p.add_argument("--timeout", type=float, default=3600.0, metavar="S", help="seconds (default: 3600)")
    p.add_argument("--quiet", action="store_true", help="print no progress")
    p.set_defaults(run=pull)


def run(args: argparse.Namespace) -> int:
    try:
        import ray
        from ray import serve

        from mooncake_ray.serve.deployment import run as start
    except ImportError as e:
        raise ConfigError(f"{e}: the endpoint needs `pip install mooncake_ray[serve]`") from None
    try:
        ray.init(address=args.address or "auto", log_to_driver=False)
    except ConnectionError:
        if args.address is not None:
            raise
        ray.init(address="local", log_to_driver=False, include_dashboard=False)
    with contextlib.ExitStack() as stack:
        stack.callback(ray.shutdown)
        for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell that is not interactive has begun it, which ignores Ctrl-C
            signal.signal(number, signal.default_int_handler)
        serve.start(http_options={"host": args.host, "port": args.port})
        stack.callback(serve.delete, "weights")
        start(
            args.store,
            replicas=args.replicas,
            host=args.data_host,
            port=args.data_port,
            files=args.files,
            group=args.group,
            store_every=args.store_every,
            keep=args.keep,
            max_transfers=args.max_transfers,
            read_token=os.environ.get(_READ),
            publish_token=os.environ.get(_PUBLISH),
        )
        with contextlib.suppress(KeyboardInterrupt):
            print(f"serving {args.store} at http://{args.host}:{args.port}/v1/versions", flush=True)
            threading.Event().wait()
    return 0


def pull(args: argparse.Namespace) -> int:
    from mooncake_ray.serve.client import WeightClient

    if args.version != "latest" and not (args.version.isascii() and args.version.isdigit()):
        raise ConfigError(f"--version must be a number or 'latest', got {args.version!r}")
    began = time.monotonic()
    progress = None if args.quiet else _Progress(began)
    client = WeightClient(args.url, token=os.environ.get(_READ), connections=args.connections)
    try:
        got = client.download(args.version, args.folder, on_progress=progress, timeout_s=args.timeout)
    finally:
        if progress is not None:
            progress.end()
    seconds = time.monotonic() - began
    resumed = f", {size(got.resumed_bytes)} of it from before" if got.resumed_bytes else ""
    print(f"version {got.version}: {len(got.files)} files, {size(got.nbytes)}{resumed}, in {seconds:.1f} s")
    return 0


class _Progress:
    """A line that is drawn again and again, on a terminal; nothing elsewhere. Called by several threads."""

    def __init__(self, began: float) -> None:
        self._began, self._drawn, self._lock = began, 0.0, threading.Lock()

    def __call__(self, there: int, total: int) -> None:
        now = time.monotonic()
        with self._lock:
            if not sys.stderr.isatty() or now - self._drawn < _REDRAW_S:
                return
            self._drawn = now
            speed = size(int(there / max(0.001, now - self._began)))
            print(f"\r{there * 100 // max(1, total):3d} % of {size(total)}, {speed}/s ", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._drawn:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
