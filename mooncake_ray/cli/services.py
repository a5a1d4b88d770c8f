"""`mooncake-ray status --cluster`: the node services of all nodes of a Ray cluster, asked through Ray."""

from __future__ import annotations

import argparse
import json
import os
import socket
from typing import Any

from mooncake_ray.cli.status_view import fill_line, service_lines
from mooncake_ray.snapshot import Snapshot

__all__ = ["lines", "run"]

_ANSWER_S = 10.0


def run(args: argparse.Namespace) -> int:
    """Joins the cluster for a moment, as a driver that uses no pool. Raises ConnectionError, TimeoutError: there is none that answers."""
    os.environ["MOONCAKE_RAY"] = "0"  # whatever hook is set: this is not one of the job's processes
    import ray
    from ray._private import services

    from mooncake_ray.objects import nodes

    address = services.canonicalize_bootstrap_address("auto")
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()  # Ray itself would try for minutes
    except OSError as e:
        raise ConnectionError(f"no Ray cluster answers at {address}: {e}") from None
    ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
    try:
        found = nodes.services(_ANSWER_S)
    finally:
        ray.shutdown()
    if args.json:
        print(json.dumps({"services": found}, indent=2))
    else:
        print("\n".join(lines(found)))
    return 1 if any(service.get("error") for service in found) else 0


def lines(found: list[dict[str, Any]]) -> list[str]:
    """What `objects.nodes.services` told, for people."""
    if not found:
        return ["no node service is running in this Ray cluster: nodes do not read each other's pools"]
    out: list[str] = []
    for service in sorted(found, key=lambda s: (s["host"], s["job"])):
        out += ["", f"node {service['host']} ({service['node'][:8]}), job {service['job']}"]
        if service.get("error"):
            out.append(f"  {service['error']}")
            continue
        report = service["report"]
        out.append(f"  {fill_line(Snapshot.of(report['pool'])) if report.get('pool') else 'its pool does not answer'}")
        out += [f"  {line}" for line in service_lines(report)]
    return out[1:]
