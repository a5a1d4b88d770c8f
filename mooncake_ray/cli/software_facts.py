"""What is installed: versions, the compiled parts, settings, RDMA devices."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import fields as fields_of
from pathlib import Path

from mooncake_ray.config import Config
from mooncake_ray.errors import ConfigError

__all__ = ["INTERNAL_VARIABLES", "RdmaPort", "Software", "collect", "rdma_ports"]

INTERNAL_VARIABLES = frozenset({"MOONCAKE_RAY", "MOONCAKE_RAY_JOB", "MOONCAKE_RAY_CHAINED_RUNTIME_ENV_HOOK"})
_BROKER_ANSWERS_S = 10.0
_METRICS_NEED = ("aiohttp", "grpcio", "opentelemetry-exporter-prometheus")


@dataclass(frozen=True)
class RdmaPort:
    """One port. `gids`: addresses that are set."""

    device: str
    port: int
    state: str
    gids: int


@dataclass(frozen=True, kw_only=True)
class Software:
    """Versions are empty where a package is not installed; errors are empty where all is well."""

    version: str
    ray: str
    torch: str
    not_for_metrics: tuple[str, ...]
    """Packages that Ray's metrics endpoint needs, and that are not there."""
    extension_error: str
    broker_error: str
    broker_version: str
    config_error: str
    pool_bytes: int
    unknown_variables: tuple[str, ...]
    ports: tuple[RdmaPort, ...]
    verbs_error: str


def collect(environ: Mapping[str, str]) -> Software:
    """Looks at what this Python would use."""
    extension_error, broker_error, broker_version = _compiled()
    config_error, pool_bytes = "", 0
    try:
        pool_bytes = Config.from_env(environ).pool_bytes
    except ConfigError as e:
        config_error = str(e)
    known = INTERNAL_VARIABLES | {f"MOONCAKE_RAY_{f.name.upper()}" for f in fields_of(Config)}
    ports = rdma_ports(Path("/sys/class/infiniband"))
    return Software(
        version=_version("mooncake_ray"),
        ray=_version("ray"),
        torch=_version("torch"),
        not_for_metrics=tuple(package for package in _METRICS_NEED if not _version(package)),
        extension_error=extension_error,
        broker_error=broker_error,
        broker_version=broker_version,
        config_error=config_error,
        pool_bytes=pool_bytes,
        unknown_variables=tuple(sorted(name for name in environ if name.startswith("MOONCAKE_RAY") and name not in known)),
        ports=ports,
        verbs_error=_verbs() if ports else "",
    )


def rdma_ports(root: Path) -> tuple[RdmaPort, ...]:
    """What /sys/class/infiniband lists."""
    found = []
    for port in sorted(root.glob("*/ports/*")):
        state = (port / "state").read_text().partition(":")[2].strip()
        gids = 0
        for gid in (port / "gids").iterdir():
            try:
                gids += bool(gid.read_text().strip().replace(":", "").strip("0"))
            except OSError:  # the kernel refuses to read an entry that is not set
                continue
        found.append(RdmaPort(port.parents[1].name, int(port.name), state, gids))
    return tuple(found)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _compiled() -> tuple[str, str, str]:
    """Errors of the extension and of the broker, and what the broker says its version is."""
    try:
        from mooncake_ray._native import pool
    except ImportError as e:
        return str(e), "", ""
    program = Path(pool.__file__).with_name("mooncake-broker")
    if not os.access(program, os.X_OK):
        return "", f"{program} is missing or not executable", ""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=_BROKER_ANSWERS_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        return "", str(e), ""
    return "", "", done.stdout.split()[-1] if done.returncode == 0 and done.stdout.split() else ""


def _verbs() -> str:
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError as e:
        return str(e)
    return ""
