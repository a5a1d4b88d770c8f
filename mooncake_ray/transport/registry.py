"""The transports there are, and which one two processes use."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mooncake_ray.errors import ConfigError, TransportUnavailableError
from mooncake_ray.transport.base import Transport

if TYPE_CHECKING:
    from mooncake_ray.config import Config

__all__ = ["choose", "get_transport", "register_transport", "transport_names"]

AUTO = "auto"
_PREFERRED = ("verbs", "tcp")  # what `auto` takes, the best first; all others only by name
_OWN = {name: f"mooncake_ray.transport.{name}" for name in ("verbs", "tcp", "shm", "mooncake", "loopback")}  # imported when first asked for
_registered: dict[str, type[Transport]] = {}


def register_transport(cls: type[Transport]) -> type[Transport]:
    """Makes a transport known by its `name`. Also a class decorator. Raises ValueError if another class has that name."""
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not name or name == AUTO:
        raise ValueError(f"a transport needs a name of its own, {cls.__name__} has {name!r}")
    if (there := _registered.setdefault(name, cls)) is not cls:
        raise ValueError(f"a transport {name!r} is there already: {there.__module__}.{there.__name__}")
    return cls


def transport_names() -> list[str]:
    """All names that `get_transport` knows, sorted. That there is one does not say that it can be used here."""
    return sorted({*_OWN, *_registered})


def get_transport(name: str) -> type[Transport]:
    """Raises ConfigError for a name that there is not."""
    if name not in _registered and name in _OWN:
        try:
            importlib.import_module(_OWN[name])
        except ModuleNotFoundError as e:
            if e.name != _OWN[name]:  # what it needs is missing, not the transport: that is for `unavailable` to say
                raise
    if name not in _registered:
        raise ConfigError(f"there is no transport {name!r}; there are {', '.join(transport_names())}")
    return _registered[name]


def choose(wanted: str, here: Config, there: Mapping[str, Mapping[str, Any]], why_not: Mapping[str, str] | None = None) -> str:
    """The name of the transport to read from a peer with.

    Args:
        wanted: A name, or `auto`: verbs if both ends have it, else tcp.
        here: This process's settings.
        why_not: Why those cannot be used here of which this process has found out, by name: they are, or would be, available, but could not be
            opened, or refused memory.
        there: What the peer's transports say of themselves, by name. One that cannot be used there is missing, or is `{"unavailable": why}`.

    Raises:
        TransportUnavailableError: either end lacks it; gives both ends' reasons. Never another transport in place of one asked for by name.
        ConfigError: there is no such transport.
    """
    reasons = []
    for name in _PREFERRED if wanted == AUTO else (wanted,):
        ours = (why_not or {}).get(name) or _unavailable_here(name, here, wanted)
        theirs = _unavailable_there(name, there)
        if not ours and not theirs:
            return name
        reasons.append(f"{name}: here {ours or 'it can be used'}; at the peer {theirs or 'it can be used'}")
    raise TransportUnavailableError(f"no transport {wanted!r} between these two processes: " + " | ".join(reasons))


def _unavailable_here(name: str, here: Config, wanted: str) -> str:
    try:
        return get_transport(name).unavailable(here)
    except ConfigError:
        if wanted != AUTO:
            raise
        return "this build does not have it"


def _unavailable_there(name: str, there: Mapping[str, Mapping[str, Any]]) -> str:
    if name not in there:
        return "it is not offered"
    why = there[name].get("unavailable", "")
    return str(why) if why else ""
