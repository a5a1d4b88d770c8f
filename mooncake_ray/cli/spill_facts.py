"""What the spill directory's file system can do, and what brokers that are gone left in it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Leftover", "Spill", "collect", "file_system_of", "leftovers"]

_PUNCH_HOLE_KEEP_SIZE = 3
_PAGE = mmap.PAGESIZE


@dataclass(frozen=True, kw_only=True)
class Spill:
    """A probe that failed says why, one that succeeded is empty."""

    directory: str
    probed: str
    """The directory itself, or the first above it that exists."""
    write_error: str
    file_system: str
    free_bytes: int
    direct_error: str
    punch_error: str


@dataclass(frozen=True)
class Leftover:
    """A spill directory whose broker is gone."""

    path: str
    bytes: int


def collect(directory: Path) -> Spill:
    """Writes to a temporary file in the directory, and leaves nothing there."""
    probed = directory
    while not probed.is_dir() and probed != probed.parent:
        probed = probed.parent
    write = direct = punch = ""
    try:
        fd, name = tempfile.mkstemp(prefix=".mooncake_ray_doctor-", dir=probed)
    except OSError as e:
        write = e.strerror or str(e)
    else:
        try:
            direct = _direct(name)
            punch = _punch(fd)
        finally:
            os.close(fd)
            os.unlink(name)
    space = os.statvfs(probed)
    return Spill(
        directory=str(directory),
        probed=str(probed),
        write_error=write,
        file_system=file_system_of(str(probed.resolve()), Path("/proc/self/mounts").read_text()),
        free_bytes=space.f_bavail * space.f_frsize,
        direct_error=direct,
        punch_error=punch,
    )


def file_system_of(path: str, mounts: str) -> str:
    """The type of the file system that holds an absolute path, by the text of /proc/self/mounts."""
    best, kind = "", ""
    for line in mounts.splitlines():
        _, mounted, this, *_ = line.split(" ")
        mounted = mounted.encode().decode("unicode_escape")  # a space in a name is \040
        inside = path == mounted or path.startswith(mounted.rstrip("/") + "/")
        if inside and len(mounted) >= len(best):
            best, kind = mounted, this
    return kind


def leftovers(root: Path) -> list[Leftover]:
    """The directories in `root` that no process has open or was started for: no broker, and none that waits to clean up after one."""
    try:
        directories = sorted(d for d in root.iterdir() if d.is_dir())
    except OSError:
        return []
    if not directories:
        return []
    in_use = _in_use({f"{root}/", f"{root.resolve()}/"})
    return [
        Leftover(str(d), sum(f.stat().st_blocks * 512 for f in d.rglob("*") if f.is_file()))
        for d in directories
        if not any(f"{path}/".startswith((f"{d}/", f"{d.resolve()}/")) for path in in_use)
    ]


def _in_use(prefixes: set[str]) -> set[str]:
    """The paths that begin so among the open files and the command lines of all processes."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = {os.fsdecode(word) for word in (process / "cmdline").read_bytes().split(b"\0")}
            for link in (process / "fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    words.add(os.readlink(link))
        except OSError:  # gone meanwhile, or another user's
            continue
        found.update(word for word in words if word.startswith(tuple(prefixes)))
    return found


def _direct(name: str) -> str:
    try:
        fd = os.open(name, os.O_RDWR | os.O_DIRECT)
        try:
            with mmap.mmap(-1, _PAGE) as page:
                os.pwrite(fd, page, 0)
        finally:
            os.close(fd)
    except OSError as e:
        return e.strerror or str(e)
    return ""


def _punch(fd: int) -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    os.pwrite(fd, b"x" * 2 * _PAGE, 0)
    if libc.fallocate(fd, _PUNCH_HOLE_KEEP_SIZE, ctypes.c_long(0), ctypes.c_long(_PAGE)):
        return os.strerror(ctypes.get_errno())
    return "" if os.pread(fd, 1, 0) == b"\0" else "the hole kept its bytes"
