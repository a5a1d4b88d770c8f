"""Mooncake's structured object store, as a peer: a real master, a node that lends memory, and a client in this process, over TCP.

Its transfer engine listens on every interface whatever address it is given, and asks nobody who they are. So all of it lives in a network
namespace of its own, in which there is nothing but the loopback device.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.subjects import Roundtrips

__all__ = ["Mooncake", "enter_own_network"]

_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1
_MASTER_PORT, _METRICS_PORT = 50051, 9003
_START_S = 30.0
_BUFFER_BYTES = 512 << 20  # of the client, for what is under way; with 256 MiB or 2 GiB it is as fast
# What Miles asks for, column by column; what is in none of these goes into the handle.
_RAGGED = ("tokens", "loss_masks", "rollout_log_probs", "log_probs", "ref_log_probs")
_MSGPACK = ("prompt", "metadata", "weight_versions")


def enter_own_network() -> None:
    """Starts the program anew where there is no network but a loopback device, unless it is there already.

    Ends the process if the system does not allow it; `unshare` says why on stderr.
    """
    if [name for _, name in socket.if_nameindex()] != ["lo"]:
        rights = [] if os.geteuid() == 0 else ["--map-root-user"]
        os.execvp("unshare", ["unshare", "--net", *rights, *sys.orig_argv])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anyone:
        fcntl.ioctl(anyone, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


def _client(lent_bytes: int, buffer_bytes: int) -> Any:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    # P2PHANDSHAKE: without a metadata server.
    status = store.setup("127.0.0.1", "P2PHANDSHAKE", lent_bytes, buffer_bytes, "tcp", "", f"127.0.0.1:{_MASTER_PORT}")
    if status:
        raise RuntimeError(f"MooncakeDistributedStore.setup returned {status}")
    return store


class Mooncake(Roundtrips):
    """Puts and gets batches whole. As with Miles, this process lends no memory: every value goes to another process, over TCP."""

    def __init__(self, capacity_bytes: int) -> None:
        """
        Args:
            capacity_bytes: Memory that the node lends.
        """
        import mooncake
        from mooncake.structured_object_store import FieldSchema, MooncakeBundleTransfer

        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._store: Any = None
        master = str(Path(mooncake.__file__).with_name("mooncake_master"))
        local = ["--rpc_address=127.0.0.1", f"--rpc_port={_MASTER_PORT}", "--metrics_host=127.0.0.1", f"--metrics_port={_METRICS_PORT}"]
        try:
            self._start("master", [master, *local], lambda: True)
            node = [sys.executable, "-m", "bench.mooncake_peer", str(capacity_bytes)]
            self._start("node", node, lambda: self._metric("master_total_capacity_bytes") > 0)
            self._store = _client(0, _BUFFER_BYTES)
        except BaseException:
            self.close()
            raise
        self._transfer = MooncakeBundleTransfer(self._store, key_prefix="bench")
        self._schemas = {name: FieldSchema("typed_ragged") for name in _RAGGED} | {name: FieldSchema("msgpack_ragged") for name in _MSGPACK}
        self._in_handle = FieldSchema("auto", metadata={"section": "meta_info"})

    def put(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return self._transfer.put(value)
        return self._transfer.put(value, type="dict", field_schemas={name: self._schemas.get(name, self._in_handle) for name in value})

    def get(self, handle: Any) -> Any:
        if isinstance(self.value, dict):
            return self._transfer.get(handle, type="dict")
        from verl import DataProto

        return self._transfer.get(handle, data_cls=DataProto)

    def drop(self, handles: list[Any]) -> None:
        for handle in handles:
            self._transfer.cleanup_dataproto(handle)
        handles.clear()

    def stored(self) -> int:
        """Bytes: what the master has given out in all, once there is nothing but the batch, and what the handle says by itself."""
        import json

        from mooncake.structured_object_store import export_dataproto_ref

        handles = [self.put(self.value)]
        nbytes = int(self._metric("master_allocated_bytes")) + len(json.dumps(export_dataproto_ref(handles[0])))
        self.drop(handles)
        return nbytes

    def _start(self, what: str, command: list[str], ready: Callable[[], bool]) -> None:
        """Starts a process that ends with this one, and waits for it."""
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command], stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )
        self._processes.append(process)
        deadline = time.monotonic() + _START_S
        while True:
            try:
                self._metric("master_key_count")
                if ready():
                    return
            except urllib.error.URLError:
                pass  # the master does not listen yet
            if process.poll() is not None or time.monotonic() > deadline:
                self._log.seek(0)
                raise RuntimeError(f"Mooncake's {what} did not start: {self._log.read().decode(errors='replace')[-2000:]}")
            time.sleep(0.02)

    def _metric(self, name: str) -> float:
        """A figure of the master; 0 if it does not tell."""
        with urllib.request.urlopen(f"http://127.0.0.1:{_METRICS_PORT}/metrics", timeout=5) as answer:
            lines = (line.split() for line in answer.read().decode().splitlines())
        return next((float(words[1]) for words in lines if len(words) == 2 and words[0] == name), 0.0)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
        for process in reversed(self._processes):
            process.kill()
            process.wait()
        self._log.close()


if __name__ == "__main__":  # the node
    _lender = _client(int(sys.argv[1]), 16 << 20)
    while True:
        time.sleep(3600)
