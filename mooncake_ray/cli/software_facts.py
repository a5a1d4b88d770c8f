"""What is installed: versions, the compiled parts, settings, RDMA devices."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mooncake_ray.config import Config
from mooncake_ray.errors import ConfigError, StoreError

__all__ = ["RdmaPort", "Software", "collect", "rdma_ports"]

_BROKER_ANSWERS_S = 10.0
_BROKER_BYTES = str(1 << 20)
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
    config_error: str
    config: Config | None
    ports: tuple[RdmaPort, ...]
    verbs_error: str


def collect(environ: Mapping[str, str]) -> Software:
    """Looks at what this Python would use."""
    extension_error, broker_error = _compiled()
    config_error, config = "", None
    try:
        config = Config.from_env(environ)
    except ConfigError as e:
        config_error = str(e)
    ports = rdma_ports(Path("/sys/class/infiniband"))
    return Software(
        version=_version("mooncake_ray"),
        ray=_version("ray"),
        torch=_version("torch"),
        not_for_metrics=tuple(package for package in _METRICS_NEED if not _version(package)),
        extension_error=extension_error,
        broker_error=broker_error,
        config_error=config_error,
        config=config,
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


def _compiled() -> tuple[str, str]:
    """Errors of the extension, and of the broker: one that lives for a moment is started and spoken to."""
    try:
        from mooncake_ray._native import pool
    except ImportError as e:
        return str(e), ""
    program = Path(pool.__file__).with_name("mooncake-broker")
    name = f"mooncake_ray/{os.geteuid()}/doctor-{os.getpid()}"
    command = [program, "--name", name, "--capacity", _BROKER_BYTES, "--prefault", "0", "--watch-pid", str(os.getpid()), "--linger", "0"]
    try:
        with tempfile.TemporaryFile() as complaints:  # no pipe: the broker, which goes on, would keep it open
            code = subprocess.run(command, stdout=complaints, stderr=complaints, timeout=_BROKER_ANSWERS_S, check=False).returncode
            complaints.seek(0)
            if code:
                return "", complaints.read().decode(errors="replace").strip() or f"{program} ended with status {code}"
        pool.Client.connect(name, "mooncake-ray doctor").close()
    except (OSError, StoreError, subprocess.TimeoutExpired) as e:
        return "", str(e)
    return "", ""


def _verbs() -> str:
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError as e:
        return str(e)
    return ""
