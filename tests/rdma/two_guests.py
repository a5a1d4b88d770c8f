"""Two emulated machines and a wire between them: one reads the other's memory, also when packets get lost, and learns when it is cut off.

Without arguments this starts both, and succeeds if both do. With a number it is what runs in one of them.
"""

from __future__ import annotations

import hashlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
NBYTES = 4 * MIB
PORT = 18600
LIMIT_S = 400  # of a machine, on a host that does other things as well; half a minute on one that does not
SETUP_S = 1200  # until both run: on a new host a kernel comes first
AFTER_S = 20  # that one may still take when the other has failed
LOST = "2%"


def start_both() -> int:
    end = time.monotonic() + SETUP_S + LIMIT_S
    with tempfile.TemporaryDirectory() as folder:
        wire = Path(folder) / "wire"
        guests = [_start(1, wire)]
        try:
            while not wire.exists():  # the second machine looks for it once
                if guests[0].poll() is not None or time.monotonic() > end - LIMIT_S:
                    sys.exit("two machines: the first one did not start")
                time.sleep(0.05)
            guests.append(_start(2, wire))
            while any(guest.poll() is None for guest in guests):
                if any(guest.poll() for guest in guests):
                    end = min(end, time.monotonic() + AFTER_S)
                if time.monotonic() > end:
                    break
                time.sleep(0.05)
            codes = [guest.poll() for guest in guests]
        finally:
            for guest in guests:
                guest.terminate()  # which ends its machine
                guest.wait()
    print(f"two machines: {['not done' if code is None else code for code in codes]}")
    return 0 if codes == [0, 0] else 1


def _start(number: int, wire: Path) -> subprocess.Popen[bytes]:
    words = [
        "scripts/rdma-vm.sh",
        "-c",
        "1",
        "-m",
        "1536",
        "-t",
        str(LIMIT_S),
        "-w",
        f"{wire},{number}",
        sys.executable,
        __file__,
        str(number),
    ]
    return subprocess.Popen(words, cwd=ROOT)


def _lose(part: str) -> None:
    """From now on the wire loses this part of what this machine sends."""
    subprocess.run(["tc", "qdisc", "replace", "dev", "eth0", "root", "netem", "loss", part], check=True)


def _transport() -> Any:
    from mooncake_ray.config import Config
    from mooncake_ray.transport import get_transport

    return get_transport("verbs")(Config(rdma_devices="rxe1"), "")


def serve() -> None:
    """Machine 1. Answers lines of JSON until the other side is done."""
    import numpy as np

    from mooncake_ray.transport import Memory

    source = np.random.default_rng(5).integers(0, 256, NBYTES, np.uint8)
    transport = _transport()
    transport.register(Memory(0, source.ctypes.data, NBYTES))
    with socket.create_server(("", PORT)) as listener:
        listener.settimeout(LIMIT_S)
        link, _ = listener.accept()
    link.settimeout(LIMIT_S)
    with link, link.makefile("rw") as lines:
        for line in lines:
            asked = json.loads(line)
            if "exchange" in asked:
                answer: Any = transport.accept(1, bytes.fromhex(asked["exchange"])).hex()
            elif "lose" in asked:
                answer = _lose(asked["lose"])
            else:
                answer = [transport.describe(), hashlib.sha256(source).hexdigest()]
            lines.write(json.dumps(answer) + "\n")
            lines.flush()
    transport.close()


def read() -> None:
    """Machine 2."""
    import numpy as np

    from mooncake_ray.errors import PeerLostError
    from mooncake_ray.transport import Memory, Peer

    link = _reach(("198.18.1.1", PORT))
    with link, link.makefile("rw") as lines:

        def ask(**question: Any) -> Any:
            lines.write(json.dumps(question) + "\n")
            lines.flush()
            return json.loads(lines.readline())

        description, digest = ask()
        target = np.zeros(NBYTES, np.uint8)
        transport = _transport()
        transport.register(Memory(0, target.ctypes.data, NBYTES))
        peer = Peer("198.18.1.1", PORT, description, exchange=lambda blob: bytes.fromhex(ask(exchange=blob.hex())))
        connection = transport.connect(peer, 60)
        ranges = np.array([[0, 0, target.ctypes.data, NBYTES]], np.uint64)
        for lost in ("0%", LOST):
            ask(lose=lost)
            _lose(lost)
            target[:] = 0
            begin, retried = time.perf_counter(), _retries()
            connection.read(ranges, 100)
            took, retried = time.perf_counter() - begin, _retries() - retried
            if hashlib.sha256(target).hexdigest() != digest:
                sys.exit(f"with {lost} lost: not the bytes that the other machine has")
            print(f"{lost} lost: {NBYTES / MIB / took:.1f} MiB/s, {retried} packets asked for again", flush=True)
        if not retried:
            sys.exit("no packet was lost: this has shown nothing")
        _lose("100%")
        try:
            connection.read(ranges, 100)
        except PeerLostError as e:
            print(f"cut off: {e}", flush=True)
        else:
            sys.exit("the bytes came although no packet left this machine")
        _lose("0%")
        transport.connect(peer, 60).read(ranges, 60)
        print("and on again", flush=True)
        transport.close()


def _reach(address: tuple[str, int]) -> socket.socket:
    end = time.monotonic() + LIMIT_S
    while True:
        try:
            link = socket.create_connection(address, timeout=5)
        except OSError:  # not up yet
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
        else:
            link.settimeout(LIMIT_S)
            return link


def _retries() -> int:
    """What the device has sent once more so far."""
    counters = Path("/sys/class/infiniband/rxe1/ports/1/hw_counters")
    return sum(int((counters / name).read_text()) for name in ("completer_retry_err", "retry_exceeded_err", "retry_rnr_exceeded_err"))


if __name__ == "__main__":
    sys.exit(start_both() if len(sys.argv) == 1 else [serve, read][int(sys.argv[1]) - 1]())
