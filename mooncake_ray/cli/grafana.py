"""`mooncake-ray grafana`: the dashboard that comes with the package."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

__all__ = ["DASHBOARD", "add"]

DASHBOARD = Path(__file__).parents[1] / "grafana" / "dashboard.json"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = commands.add_parser(
        "grafana",
        help="prints a Grafana dashboard",
        description="Prints a Grafana dashboard as JSON, for Dashboards > New > Import. Its data source is the Prometheus that scrapes Ray.",
    )
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    sys.stdout.write(DASHBOARD.read_text())
    return 0
