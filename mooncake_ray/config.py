"""Settings. `Config.from_env()` is the only code that reads `MOONCAKE_RAY_*` variables."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from mooncake_ray.errors import ConfigError

__all__ = ["Config"]

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


def machine_bytes() -> int:
    """Memory this process may use, in bytes: the machine's, or its cgroup's limit where that is lower."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as f:
                limit = f.read().strip()
        except OSError:
            continue
        if limit.isdigit():
            total = min(total, int(limit))
    return total


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
    put_timeout_s: float = 10.0
    """How long a put waits for room. Then Ray's own store takes the object (a `Store` raises StoreFullError)."""
    start_timeout_s: float = 30.0
    """How long to wait for a broker to start."""
    linger_s: float = 5.0
    """How long a broker stays after the last process has left it."""
    enabled: bool = True
    """`MOONCAKE_RAY_ENABLED=0` (or `MOONCAKE_RAY=0`) turns routing off."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if not math.isfinite(value):
                raise ConfigError(f"{f.name} must be finite, got {value}")
            if value < 0:
                raise ConfigError(f"{f.name} must not be negative, got {value}")
        if 0 < self.capacity_bytes < 1 << 20:
            raise ConfigError(f"capacity_bytes must be at least 1 MiB, got {self.capacity_bytes}")
        if self.capacity_bytes > (limit := machine_bytes()):
            raise ConfigError(f"capacity_bytes is {self.capacity_bytes}, more than the {limit} bytes of memory there are")

    @property
    def pool_bytes(self) -> int:
        """The capacity in bytes with its default worked out."""
        return self.capacity_bytes or machine_bytes() * 3 // 10

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: object) -> Config:
        """The defaults, then the environment, then `overrides`."""
        env = os.environ if environ is None else environ
        values: dict[str, object] = {}
        for f in fields(cls):
            text = env.get(f"MOONCAKE_RAY_{f.name.upper()}")
            if text is None:
                continue
            try:
                if f.name.endswith("_bytes"):
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
