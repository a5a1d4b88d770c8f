"""Readers who do nothing with what they get: `python -m bench.sink URL READERS`.

Each asks once and follows a redirect, and has the kernel throw away what comes (MSG_TRUNC: it is not even copied), so that the server is what is
measured. Says `ready`, begins with a line on stdin, and ends with a line of JSON: when the first began and the last ended, on the machine's
monotonic clock, and bytes.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from urllib.parse import urlsplit

_PIECE = 4 << 20
_TIMEOUT_S = 120.0


def read(url: str) -> int:
    """Bytes of the body."""
    for _ in range(2):
        parts = urlsplit(url)
        with socket.create_connection((parts.hostname, parts.port or 80), _TIMEOUT_S) as sock:
            target = parts.path + (f"?{parts.query}" if parts.query else "")
            sock.sendall(f"GET {target} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode())
            head = b""
            while b"\r\n\r\n" not in head:
                if not (piece := sock.recv(4096)):
                    raise EOFError(head)
                head += piece
            head, _, rest = head.partition(b"\r\n\r\n")
            status, *lines = head.decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            if status.split()[1] == "307":
                url = headers["location"]
                continue
            if status.split()[1] != "200":
                raise RuntimeError(status)
            due, got = int(headers["content-length"]), len(rest)
            sock.settimeout(None)
            spare = bytearray(_PIECE)
            while got < due:
                n = sock.recv_into(spare, min(_PIECE, due - got), socket.MSG_TRUNC | socket.MSG_WAITALL)
                if not n:
                    raise EOFError(f"{got} of {due} bytes")
                got += n
            return got
    raise RuntimeError(f"sent on again: {url}")


def main(url: str, readers: int) -> None:
    got: list[int] = []
    threads = [threading.Thread(target=lambda: got.append(read(url))) for _ in range(readers)]
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"began": began, "ended": time.monotonic(), "bytes": sum(got), "readers": len(got)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
