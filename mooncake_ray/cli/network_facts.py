"""Which of this machine's network devices lead to a host."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

__all__ = ["device_of", "parse_address", "way_to"]

_SIOCGIFADDR = 0x8915
_INET6 = Path("/proc/net/if_inet6")
_DEVICES = Path("/sys/class/net")


def parse_address(text: str, default_port: int = 0) -> tuple[str, int]:
    """`HOST`, `HOST:PORT` or `[HOST]:PORT`. Raises ValueError."""
    host, port = text, ""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"not an address: {text!r}")
        port = rest[1:]
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    number = int(port) if port.isdecimal() else default_port if not port else -1
    if not host or not 0 <= number < 1 << 16:
        raise ValueError(f"not an address: {text!r} (HOST, HOST:PORT or [HOST]:PORT)")
    return host, number


def way_to(host: str, port: int = 1) -> tuple[str, list[str]]:
    """This machine's address towards that host, and its device with its speed. Sends nothing. Raises OSError if there is no way."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as s:
        s.connect(address)
        ours = s.getsockname()[0]
    return ours, [name] if (name := device_of(ours)) else []


def device_of(address: str) -> str:
    """The device that has the address, `"eth0 (10 Gbit/s)"`; "" if none has."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    names = (name for _, name in socket.if_nameindex() if ip in _addresses(name))
    return next((name + _speed(name) for name in names), "")


def _addresses(device: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    found: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            answer = fcntl.ioctl(s, _SIOCGIFADDR, struct.pack("16s240x", device.encode()[:15]))
            found.append(ipaddress.IPv4Address(answer[20:24]))
        except OSError:  # it has none
            pass
    try:
        lines = _INET6.read_text().splitlines()
    except OSError:
        lines = []
    return found + [ipaddress.IPv6Address(int(line.split()[0], 16)) for line in lines if line.split()[-1] == device]


def _speed(device: str) -> str:
    try:
        megabits = int((_DEVICES / device / "speed").read_text())
    except (OSError, ValueError):
        return ""
    return f" ({megabits / 1000:g} Gbit/s)" if megabits > 0 else ""
