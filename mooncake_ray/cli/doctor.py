"""`mooncake-ray doctor`: is this machine fit for a pool?"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict

from mooncake_ray.cli import host_facts, judge, software_facts, spill_facts
from mooncake_ray.cli.judge import Finding
from mooncake_ray.cli.text import count
from mooncake_ray.config import Config

__all__ = ["add", "lines"]


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = commands.add_parser(
        "doctor",
        help="is this machine fit for a pool?",
        description="Checks the kernel, memory, limits, disk, devices, packages and settings. Exit status 1 if a check ends in an error.",
    )
    p.add_argument("--json", action="store_true", help="one JSON document")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    found = examine()
    errors = sum(f.level == judge.ERROR for f in found)
    if args.json:
        print(json.dumps({"ok": not errors, "findings": [asdict(f) for f in found]}, indent=2))
    else:
        print("\n".join(lines(found)))
    return 1 if errors else 0


def examine() -> list[Finding]:
    """Looks at everything, and judges."""
    software = software_facts.collect(os.environ)
    pool_bytes = software.config.pool_bytes if software.config else 0
    root = (software.config or Config()).spill_root
    return [
        *judge.host(host_facts.collect(), pool_bytes, bool(software.ports)),
        *judge.spill(spill_facts.collect(root) if root else None, pool_bytes),
        *judge.leftovers(spill_facts.leftovers(root) if root else []),
        *judge.software(software),
    ]


def lines(found: list[Finding]) -> list[str]:
    """A line a finding, and one below it for what to do."""
    width = max(len(f.check) for f in found)
    out = []
    for f in found:
        out.append(f"{f.level:<7}  {f.check:<{width}}  {f.found}")
        if f.advice:
            out.append(f"{'':7}  {'':{width}}  -> {f.advice}")
    worst = {level: sum(f.level == level for f in found) for level in (judge.ERROR, judge.WARNING)}
    return [*out, "", f"{count(worst[judge.ERROR], 'error')}, {count(worst[judge.WARNING], 'warning')}, {len(found)} checks"]
