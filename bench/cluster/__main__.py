"""`make cluster N=3`: a cluster to try things in by hand."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time

from bench.cluster.netns import Link
from bench.cluster.nodes import SETTINGS, Cluster


def main(arguments: list[str] | None = None) -> int:
    """Keeps a cluster up until Ctrl-C."""
    cli = argparse.ArgumentParser(prog="python -m bench.cluster", description="A Ray cluster of several nodes on this machine.")
    cli.add_argument("nodes", type=int, nargs="?", default=3)
    cli.add_argument("--gbit", type=float, help="Gbit/s of every link; by default unlimited")
    options = cli.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    try:
        with Cluster(options.nodes, link=Link(options.gbit * 1e9 if options.gbit else None)) as cluster:
            print(f"{options.nodes} nodes after {time.monotonic() - began:.0f} s. A driver on node N, in another terminal:\n")
            settings = " ".join(f"{name}={shlex.quote(cluster.environment[name])}" for name in SETTINGS)
            for number, host in cluster.hosts.items():
                print(f"  node {number}, {host.address}:  {settings} {shlex.join(host.command([sys.executable, 'PROGRAM.py']))}")
            print("\nCtrl-C ends the cluster.", flush=True)
            signal.pause()
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
