"""Settings. `Config.from_env()` is the only code that reads `MOONCAKE_RAY_*` variables."""

from __future__ import annotations

import difflib
import ipaddress
import math
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from mooncake_ray.errors import ConfigError
from mooncake_ray.machine import machine_bytes

__all__ = ["Config"]

_CHOICES = {"huge_pages": ("auto", "hugetlb", "never"), "numa": ("auto", "off"), "mooncake_protocol": ("tcp", "rdma")}
# What processes of this package tell each other, and what must not be printed with the settings.
_NOT_SETTINGS = {"MOONCAKE_RAY_JOB", "MOONCAKE_RAY_CHAINED_RUNTIME_ENV_HOOK", "MOONCAKE_RAY_SECRET"}

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_bytes(text: str) -> int:
    """`"512M"`, `"8GiB"`, `"1073741824"` → bytes."""
    raw = text.strip().upper().removesuffix("B").removesuffix("I")
    number, unit = (raw[:-1], raw[-1]) if raw[-1:].isalpha() else (raw, "")
    try:
        value = int(float(number) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise ConfigError(f"not a size: {text!r} (examples: 512M, 8GiB, 1073741824)") from None
    if value < 0:
        raise ConfigError(f"a size must not be negative: {text!r}")
    return value


@dataclass(frozen=True, kw_only=True)
class Config:
    """How the pool is sized and what is routed through it. Every field can be set as `MOONCAKE_RAY_<FIELD>`, in capitals."""

    capacity_bytes: int = 0
    """Size of a node's pool; memory is populated as it is used, up to this. 0: 30 % of the machine's (or cgroup's) memory, as Ray's
    own store. Fixed by the process that starts the broker."""
    prefault_bytes: int = 256 << 20
    """How much populated memory the pool keeps ahead of what is used."""
    min_bytes: int = 100 << 10
    """Objects whose tensors and arrays are smaller than this in total go Ray's own way. The default is what Ray keeps inline."""
    typed_batches: bool = True
    """Batches (`DataProto`, verl's too, and TensorDicts) are stored as what they are: without padding, in the narrowest exact dtypes, each
    column for itself. Off: tensor by tensor as they lie in memory, which takes more of the pool and is got without a copy."""
    arena_bytes: int = 64 << 30
    """The pool is made of arenas of at most this size (a larger object gets a larger one); a further one begins when those there are end."""
    huge_pages: str = "auto"
    """`auto`: transparent huge pages where the kernel has them for shared memory (`shmem_enabled`). `hugetlb`: reserved ones of 2 MiB, or the
    broker does not start; tensors are then copied when they are got, as such pages have no cheap copy-on-write. `never`: pages of 4 KiB."""
    numa: str = "auto"
    """`auto`: on a machine with several NUMA nodes, an arena on each, and a process puts into its own. `off`: wherever the kernel likes."""
    spill_dir: str = ""
    """Where objects go that do not fit: a directory of this user's is made in it. Default: the system's directory for temporary files.
    `off`: nothing is spilled, and a put waits for room."""
    spill_bytes: int = 0
    """How much may be spilled. 0: until the disk is 95 % full."""
    spill_high: float = 0.8
    """Spilling begins when more than this part of the pool is in use, and …"""
    spill_low: float = 0.65
    """… goes on until it is this part."""
    quota_bytes: int = 0
    """How much of the pool's memory one Ray job may have; it spills, and then waits, alone. 0: no quota."""
    put_timeout_s: float = 10.0
    """How long a put waits for room. Then Ray's own store takes the object (a `Store` raises StoreFullError)."""
    pull_timeout_s: float = 60.0
    """How long a get waits for what lies in another node's pool."""
    transport: str = "auto"
    """What moves bytes between nodes. `auto`: `verbs` (RDMA) where both ends have a device that is up, else `tcp`. A name (`verbs`, `tcp`,
    `mooncake`, `shm`) must be usable at both ends, or a get raises TransportUnavailableError."""
    host: str = ""
    """The address of each node that its pool listens on for other nodes: a network that all have an address in, as `10.1.0.0/16`, or an
    address. Default: the nodes' addresses in Ray."""
    start_timeout_s: float = 30.0
    """How long to wait for a broker to start."""
    linger_s: float = 5.0
    """How long a broker stays after the last process has left it."""
    mooncake_protocol: str = "tcp"
    """What Mooncake's transfer engine moves bytes with, where it is the transport: `tcp` or `rdma`."""
    rdma_devices: str = ""
    """Which RDMA devices are used: `device` or `device:port`, with commas between them. Default: all that are up."""
    rdma_traffic_class: int = 0
    """Of RDMA packets: how switches that keep some traffic from being lost know it."""
    cuda_get: str = "as-put"
    """Where tensors go that were put from CUDA devices. `as-put`: to the device of the same number, as Ray has it. `cpu`, `cuda` (the current
    one) or `cuda:1`: all of them there."""
    metrics_interval_s: float = 5.0
    """How often metrics go to Ray's Prometheus endpoint. 0: never. Ray forgets a gauge after 20 s."""
    enabled: bool = True
    """`MOONCAKE_RAY_ENABLED=0` (or `MOONCAKE_RAY=0`) turns routing off."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, str):
                if f.name in _CHOICES and value not in _CHOICES[f.name]:
                    raise ConfigError(f"{f.name} must be one of {', '.join(_CHOICES[f.name])}; got {value!r}")
                continue
            if not math.isfinite(value):
                raise ConfigError(f"{f.name} must be finite, got {value}")
            if value < 0:
                raise ConfigError(f"{f.name} must not be negative, got {value}")
        if 0 < self.capacity_bytes < 1 << 20:
            raise ConfigError(f"capacity_bytes must be at least 1 MiB, got {self.capacity_bytes}")
        if self.capacity_bytes > (limit := machine_bytes()):
            raise ConfigError(f"capacity_bytes is {self.capacity_bytes}, more than the {limit} bytes of memory there are")

        if "/" in self.host:
            try:
                ipaddress.ip_network(self.host, strict=False)
            except ValueError as e:
                raise ConfigError(f"host must be an address or a network such as 10.1.0.0/16: {e}") from None
        if 0 < self.arena_bytes < 1 << 20:
            raise ConfigError(f"arena_bytes must be at least 1 MiB, got {self.arena_bytes}")
        if self.rdma_traffic_class > 255:
            raise ConfigError(f"rdma_traffic_class must be at most 255, got {self.rdma_traffic_class}")
        if not self.spill_low <= self.spill_high <= 1:
            raise ConfigError(f"spill_low <= spill_high <= 1 must hold, got {self.spill_low} and {self.spill_high}")
        if not re.fullmatch(r"as-put|cpu|cuda(:\d+)?", self.cuda_get):
            raise ConfigError(f"cuda_get must be 'as-put', 'cpu', 'cuda' or 'cuda:' and a number, got {self.cuda_get!r}")
        if self.spill_dir not in ("", "off") and not os.path.isabs(self.spill_dir):
            raise ConfigError(f"spill_dir must be an absolute path or 'off', got {self.spill_dir!r}")

    @property
    def pool_bytes(self) -> int:
        """The capacity in bytes with its default worked out."""
        return self.capacity_bytes or machine_bytes() * 3 // 10

    @property
    def spill_root(self) -> Path | None:
        """Where this user's brokers make their spill directories; None for nowhere."""
        return None if self.spill_dir == "off" else Path(self.spill_dir or tempfile.gettempdir()) / f"mooncake_ray-{os.geteuid()}"

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: object) -> Config:
        """The defaults, then the environment, then `overrides`. Raises ConfigError for what there is no setting of that name for."""
        env = os.environ if environ is None else environ
        values: dict[str, object] = {}
        names = [f.name for f in fields(cls)]
        _refuse_unknown(overrides, names)
        variables = [f"MOONCAKE_RAY_{name.upper()}" for name in names]
        _refuse_unknown((v for v in env if v.startswith("MOONCAKE_RAY_") and v not in _NOT_SETTINGS), variables)
        for f in fields(cls):
            text = env.get(f"MOONCAKE_RAY_{f.name.upper()}")
            if text is None:
                continue
            try:
                if isinstance(f.default, str):
                    values[f.name] = text
                elif f.name.endswith("_bytes"):
                    values[f.name] = parse_bytes(text)
                elif f.name == "enabled":
                    values[f.name] = text.strip().lower() not in ("0", "false", "no", "off")
                else:
                    values[f.name] = float(text)
            except ValueError as e:
                raise ConfigError(f"MOONCAKE_RAY_{f.name.upper()}={text!r}: {e}") from None
        if env.get("MOONCAKE_RAY") == "0":
            values["enabled"] = False
        return replace(cls(), **{**values, **overrides})  # type: ignore[arg-type]


def _refuse_unknown(given: Iterable[str], known: list[str]) -> None:
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            raise ConfigError(
                f"there is no setting {name}" + (f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}")
            )
