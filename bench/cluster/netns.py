"""Hosts on one machine: each with a network, processes and /dev/shm of its own, on links that can be slowed, made lossy and cut.

Linux namespaces and nothing else. A *hub* process holds a network namespace with a bridge, and a process namespace; each host is a process in
it with namespaces of its own: network (a veth pair to the bridge, 198.18.0.0/24, no way out), processes, and mounts (its own /proc, /dev/shm
and /mnt, all in memory). No namespace has a name, and nothing is on disk: all of it lasts as long as the hub, and the hub ends when the pipe
from the program that made it closes. So a program that is killed leaves nothing behind.

Needs root, or a system that lets users have namespaces; and iproute2 and util-linux.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["PRIVATE", "Host", "Link", "Network", "NetworkError", "unavailable"]

PRIVATE = "/mnt"
"""A directory that every host has to itself."""
_START_S = 20.0
_COMMAND_S = 20.0
_SAID = 2000  # characters of what a failed command said
_MAX_HOSTS = 200
_SHOT, _PASS = 2, 0xFFFFFFFF  # what a filter answers: drop it; no opinion
_RANDOM = 0xFFFFF000 + 56  # where classic BPF programs read random numbers
_MTU = 1500  # as most networks have, whatever the device could do
# The shell is process 1: while it waits for `cat` it also reaps what others leave. It ends, and everything with it, when its pipe closes.
_WAIT = "cat /dev/stdin"
_HOLD = f"{_WAIT} >/dev/null; exit 0"
_PID = "read pid rest </proc/self/stat"  # as the machine counts, while its /proc is still there


class NetworkError(RuntimeError):
    """A command that sets up or changes the network failed."""


@dataclass(frozen=True)
class Link:
    """How a host is connected, in both directions."""

    bits_per_s: float | None = None
    """None: as fast as the machine can."""
    delay_s: float = 0.0
    """One way. Needs a kernel with netem; NetworkError otherwise."""
    loss: float = 0.0
    """Share of the packets that are dropped, 0 to 1. Of what is sent in one large piece, all is lost or nothing."""

    def __post_init__(self) -> None:
        if self.bits_per_s is not None and not self.bits_per_s > 0:
            raise ValueError(f"bits_per_s must be more than 0, got {self.bits_per_s}")
        if not 0 <= self.loss <= 1:
            raise ValueError(f"loss must be from 0 to 1, got {self.loss}")
        if not 0 <= self.delay_s <= 10:
            raise ValueError(f"delay_s must be from 0 to 10, got {self.delay_s}")

    def qdiscs(self, device: str) -> list[str]:
        """The arguments of `tc` that shape what leaves by a device which has no qdisc of its own."""
        out = []
        if self.delay_s:
            out.append(f"qdisc add dev {device} root handle 1: netem delay {self.delay_s * 1e6:.0f}us limit 100000")
        if self.bits_per_s is not None:
            burst = max(256 << 10, int(self.bits_per_s / 8 * 1e-3))  # what a timer that ticks each millisecond lets through
            place = "parent 1: handle 2:" if self.delay_s else "root"
            out.append(f"qdisc add dev {device} {place} tbf rate {self.bits_per_s:.0f}bit burst {burst} latency 20ms")
        return out

    def filters(self, device: str) -> list[str]:
        """The same for what a device drops on its way out and in."""
        if not self.loss:
            return []
        limit = min(int(self.loss * 2**32), 2**32 - 1)
        # A classic BPF program: load a random number; below the limit, drop. Most kernels have that, and not all have netem.
        program = f"4,32 0 0 {_RANDOM},53 0 1 {limit},6 0 0 {_PASS},6 0 0 {_SHOT},"
        ways = (f"filter add dev {device} {way} bpf direct-action bytecode {program!r}" for way in ("egress", "ingress"))
        return [f"qdisc add dev {device} clsact", *ways]


def unavailable() -> str:
    """Why there cannot be such a network here; "" if there can."""
    command = ["unshare", *_rights(), "--net", "--mount", "--pid", "--fork", "sh", "-c", "mount -t tmpfs tmp /mnt && ip link set lo up"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    except OSError as e:
        return str(e)
    return done.stderr.strip() or f"unshare ended with {done.returncode}" if done.returncode else ""


def _environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """With the commands of administrators (`tc` is one) within reach, as they are not for everybody."""
    env = dict(os.environ if env is None else env)
    return env | {"PATH": f"{env.get('PATH', os.defpath)}:/usr/sbin:/sbin"}


def _rights() -> list[str]:
    return [] if os.geteuid() == 0 else ["--user", "--map-root-user"]


def _ended(process: subprocess.Popen[Any]) -> None:
    if process.stdin:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    process.kill()
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe:
            pipe.close()


class _Holder:
    """A process in new namespaces that keeps them until it is told to end, or its maker has ended."""

    def __init__(self, command: Sequence[str], setup: Sequence[str]) -> None:
        script = " && ".join([_PID, *setup, "echo $pid"]) + f" || exit 1; {_HOLD}"
        # A session of its own: Ctrl-C is for the program, which then ends its hosts.
        self._process = subprocess.Popen(
            [*command, "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdout and self._process.stderr
        line = b""
        if select.select([self._process.stdout], [], [], _START_S)[0]:
            line = self._process.stdout.readline()
        if not line:
            self._process.kill()
            said = self._process.stderr.read().decode(errors="replace").strip()
            _ended(self._process)
            raise NetworkError(f"no new namespaces within {_START_S} s: {said}")
        self.pid = int(line)
        self.namespace = os.readlink(f"/proc/{self.pid}/ns/pid")

    def end(self) -> None:
        """Kills process 1, with which all others of its process namespace die."""
        if self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)  # still that process: `nsenter` or `unshare` has not been waited for
        _ended(self._process)

    def enter(self, *kinds: str) -> list[str]:
        """What to put before a command that is to run in these namespaces."""
        user = [] if os.geteuid() == 0 else ["--user"]
        return ["nsenter", f"--target={self.pid}", *user, *(f"--{kind}" for kind in kinds), "--"]

    @property
    def alive(self) -> bool:
        return self._process.poll() is None


def _file(path: str, text: str) -> list[str]:
    """Shell commands that give a host a file of its own in place of one that there is."""
    own = f"{PRIVATE}/{Path(path).name}"
    return [f"printf '{text}' >{own}", f"(! [ -e {path} ] || mount --bind {own} {path})"]


class Host:
    """A machine of its own, as far as its processes can tell, but for the CPUs, the clock and the disk."""

    def __init__(self, hub: _Holder, number: int, shm_bytes: int) -> None:
        self.number, self.address = number, f"198.18.0.{number + 1}"
        self._hub, self._port, self._link = hub, f"v{number}", Link()
        mounts = [
            "mount -t proc proc /proc",
            f"mount -t tmpfs -o size={shm_bytes},mode=1777 shm /dev/shm",
            f"mount -t tmpfs -o mode=1777 tmp {PRIVATE}",
            "ip link set lo up",
            *_file("/etc/hosts", f"127.0.0.1 localhost\\n{self.address} host{number}\\n"),
            *_file("/etc/resolv.conf", "nameserver 127.0.0.1\\n"),  # where nobody listens: a name is unknown at once
        ]
        new = ["unshare", "--net", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child"]
        mac = f"02:00:c6:12:00:{number + 1:02x}"  # a host that comes back is known to its neighbours
        self._holder = _Holder([*hub.enter("pid"), *new], [*mounts, f"hostname host{number}"])
        try:
            _ip(
                hub,
                f"link add {self._port} mtu {_MTU} type veth peer name eth0 mtu {_MTU} address {mac} netns {self._holder.pid}",
                f"link set {self._port} master bridge up",
            )
            _ip(self._holder, f"addr add {self.address}/24 dev eth0", "link set eth0 up", "route add default dev eth0")
        except BaseException:
            self.kill()
            raise

    @property
    def alive(self) -> bool:
        return self._holder.alive

    def command(self, command: Sequence[str]) -> list[str]:
        """What to run to have a command run on this host. Whoever kills that kills the command."""
        return [*self._holder.enter("net", "mount", "pid", "ipc", "uts"), "setpriv", "--pdeathsig", "KILL", *command]

    def popen(self, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[Any]:
        """Starts a command on this host; the arguments are those of `subprocess.Popen`. Its pid is that of a process that waits for it."""
        return subprocess.Popen(self.command(command), env=_environment(env), **options)

    def run(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = _COMMAND_S, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on this host, and returns what it said.

        Raises:
            NetworkError: it failed, and `check` is set; says what it said.
            subprocess.TimeoutExpired: it took longer; it is killed.
        """
        done = subprocess.run(self.command(command), env=_environment(env), capture_output=True, text=True, timeout=timeout_s, check=False)
        if check and done.returncode:
            words = " ".join(command)
            raise NetworkError(f"status {done.returncode} on host {self.number}: {words}\n{done.stdout[-_SAID:]}{done.stderr[-_SAID:]}")
        return done

    def file(self, path: str) -> Path:
        """Where this machine sees a file of the host, as long as the host is alive."""
        return Path(f"/proc/{self._holder.pid}/root{path}")

    def pids(self, words: str = "") -> list[int]:
        """The processes of the host, as this machine counts; only those whose command line has a match of a regular expression.

        Without process 1 and its child, with which the host would end.
        """
        found = []
        for entry in os.scandir("/proc"):
            if not entry.name.isdigit() or int(entry.name) == self._holder.pid:
                continue
            with contextlib.suppress(OSError):  # it has ended
                if os.readlink(f"/proc/{entry.name}/ns/pid") != self._holder.namespace:
                    continue
                line = Path(f"/proc/{entry.name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if line and line.strip() != _WAIT and re.search(words, line):
                    found.append(int(entry.name))
        return found

    def signal(self, number: int, words: str = "") -> list[int]:
        """Sends a signal to what `pids` finds. Returns whom it reached."""
        reached = []
        for pid in self.pids(words):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                reached.append(pid)
        if number == signal.SIGCONT:
            self._wake()
        return reached

    def kill(self) -> None:
        """Ends the host with all that runs on it, at once, as a power cut does. Its link goes with it."""
        self._holder.end()
        end = time.monotonic() + _START_S
        while self._wake() and time.monotonic() < end:
            time.sleep(0.01)

    def _wake(self) -> bool:
        """Continues whoever waits for a command of this host: `nsenter` stops when its command is stopped. Whether there is one."""
        start, found = self._holder.enter()[:2], False
        for entry in os.scandir("/proc"):
            with contextlib.suppress(OSError):  # it has ended
                if entry.name.isdigit() and Path(f"/proc/{entry.name}/cmdline").read_text(errors="replace").split("\0")[:2] == start:
                    os.kill(int(entry.name), signal.SIGCONT)
                    found = True
        return found

    def cut(self) -> None:
        """Takes the cable out: what is sent is lost, and nobody is told."""
        _ip(self._hub, f"link set {self._port} down")

    def mend(self) -> None:
        _ip(self._hub, f"link set {self._port} up")

    @property
    def link(self) -> Link:
        return self._link

    def shape(self, link: Link) -> None:
        """Changes the link of this host; what is under way at that moment is lost.

        Raises:
            NetworkError: the kernel cannot do that. Then the link is unshaped.
        """
        self._link = Link()
        for holder, device in ((self._hub, self._port), (self._holder, "eth0")):
            for old in ("root", "clsact"):
                subprocess.run(
                    [*holder.enter("net"), "tc", "qdisc", "del", "dev", device, old], env=_environment(), capture_output=True, check=False
                )
        try:
            _tc(self._hub, [*link.qdiscs(self._port), *link.filters(self._port)])
            _tc(self._holder, link.qdiscs("eth0"))
        except NetworkError:
            if link != Link():
                self.shape(Link())
            raise
        self._link = link


def _ip(holder: _Holder, *lines: str) -> None:
    _checked(holder, ["ip", "-batch", "-"], "\n".join(lines))


def _tc(holder: _Holder, lines: Iterable[str]) -> None:
    if lines := list(lines):
        _checked(holder, ["tc", "-batch", "-"], "\n".join(lines))


def _checked(holder: _Holder, command: Sequence[str], text: str) -> None:
    done = subprocess.run(
        [*holder.enter("net"), *command], input=text, env=_environment(), capture_output=True, text=True, timeout=_COMMAND_S, check=False
    )
    if done.returncode:
        raise NetworkError(f"{command[0]} refused: {done.stderr.strip()}\n{text}")


class Network:
    """Hosts on one bridge. A context manager: leaving it ends them all."""

    def __init__(self, shm_bytes: int = 1 << 30) -> None:
        """
        Args:
            shm_bytes: Size of the /dev/shm of each host; memory is used as it fills.

        Raises:
            NetworkError: there cannot be namespaces here; says why.
        """
        self.hosts: dict[int, Host] = {}
        self._shm_bytes, self._lock = shm_bytes, threading.Lock()
        self._hub = _Holder(["unshare", *_rights(), "--net", "--pid", "--fork", "--kill-child"], [])
        try:
            _ip(self._hub, "link set lo up", f"link add bridge mtu {_MTU} type bridge", "link set bridge up")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def add(self, number: int, link: Link | None = None) -> Host:
        """Makes a host, with the address 198.18.0.{number + 1}; also in place of one that was killed.

        Raises:
            ValueError: the number is not 0 to 199, or that host is alive.
        """
        if not 0 <= number < _MAX_HOSTS:
            raise ValueError(f"a host's number must be from 0 to {_MAX_HOSTS - 1}, got {number}")
        with self._lock:
            if number in self.hosts and self.hosts[number].alive:
                raise ValueError(f"host {number} is alive")
            self._await_gone(f"v{number}")
            host = self.hosts[number] = Host(self._hub, number, self._shm_bytes)
        if link:
            host.shape(link)
        return host

    def _await_gone(self, port: str) -> None:
        """The kernel takes a dead host's network apart when it has time."""
        command = [*self._hub.enter("net"), "ip", "link", "show", port]
        end = time.monotonic() + _START_S
        while subprocess.run(command, env=_environment(), capture_output=True, check=False).returncode == 0:
            if time.monotonic() > end:
                raise NetworkError(f"the link {port} of a dead host is still there after {_START_S} s")
            time.sleep(0.02)

    def close(self) -> None:
        for host in self.hosts.values():
            host.kill()
        self._hub.end()
