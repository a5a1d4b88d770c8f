"""The command line: picks the subcommand, and turns what it returns or raises into an exit status.

0: all is well; 1: a problem was found; 2: wrong usage; 130: Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from mooncake_ray.cli import bench_link, doctor, grafana, memory, plan, serve, status
from mooncake_ray.errors import MooncakeRayError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Errors are one line on stderr."""
    try:
        args = _parser().parse_args(argv)
        code = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read us has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains when it flushes
        return 0
    except (MooncakeRayError, OSError) as e:
        print(f"mooncake-ray: {e}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    description = (
        "Looks at the pools of mooncake_ray on this node, at the node, and at what lies between two nodes; plans syncs of weights; "
        "serves and fetches versions of a model."
    )
    parser = argparse.ArgumentParser(prog="mooncake-ray", description=description)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (status, memory, doctor, bench_link, plan, grafana, serve):
        command.add(commands)
    return parser
