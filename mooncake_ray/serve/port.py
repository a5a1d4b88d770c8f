"""`Port`: where payloads leave. A small HTTP server beside Serve's proxy, whose bytes go from the disk's cache to the socket by `sendfile`.

A thread for each connection: it does next to nothing in Python, and the kernel sends without the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

from mooncake_ray.errors import MooncakeRayError, TransportError
from mooncake_ray.serve.problems import MEDIA_TYPE, Problem, disk_problems, of_error
from mooncake_ray.serve.ranges import answer
from mooncake_ray.serve.signing import Signer
from mooncake_ray.serve.spans import Content, FileSpan, Held, Span
from mooncake_ray.serve.turnstile import Turnstile
from mooncake_ray.serve.wire import Connection, Request, answer_head

__all__ = ["Port", "listen"]

logger = logging.getLogger("mooncake_ray")

_BACKLOG = 512
_AT_ONCE = 1 << 30  # bytes given to one sendfile
_SPARE_CONNECTIONS = 128  # beyond those that may transfer or wait: idle ones, and those that are told to come again
_MOST_DROPPED = 1 << 20  # bytes of a refused body that are read, so that the connection can be used again
_END_S = 5.0

Receive = Callable[[str, Request, Connection], tuple[int, bytes]]
Find = Callable[[str], AbstractContextManager[Content]]


class Port:
    """Answers GET and HEAD with contents and PUT with what `receive` says, all at signed addresses. Ends with `close`."""

    def __init__(
        self,
        find: Find,
        receive: Receive,
        signer: Signer,
        turnstile: Turnstile,
        listener: socket.socket,
        *,
        idle_s: float = 30.0,
    ) -> None:
        """
        Args:
            find: What a path (not quoted) is; good within the `with` block. Raises Problem or MooncakeRayError.
            receive: Takes the body of a PUT to a path, and returns status and JSON to answer with.
            turnstile: How many transfers there are at a time.
            listener: See `listen`. Closed with the port.
            idle_s: How long a client may neither take nor send anything.
        """
        self._find, self._receive, self._signer, self.turnstile, self._idle_s = find, receive, signer, turnstile, idle_s
        self._most = turnstile.limit + turnstile.most_waiting + _SPARE_CONNECTIONS
        self.sent_bytes = self.refused = 0
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False
        self._listener = listener
        self.number: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="mooncake_ray.serve-port", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises TransportError: nobody accepts connections any more."""
        if not self._thread.is_alive():
            raise TransportError(f"the data port {self.number} has ended", "accept")

    def close(self) -> None:
        """Cuts transfers off."""
        with self._lock:
            self._closed = True
            still = list(self._open)
        for sock in (self._listener, *still):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(_END_S)
        self._listener.close()
        end = time.monotonic() + _END_S
        while self._open and time.monotonic() < end:
            time.sleep(0.002)

    # ---- connections

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError as e:
                if self._closed:
                    return
                logger.warning("mooncake_ray: the data port cannot accept: %s", e)  # no descriptors left, say
                time.sleep(0.05)
                continue
            with self._lock:
                room = len(self._open) < self._most and not self._closed
                if room:
                    self._open.add(sock)
            if not room:
                self._turn_away(sock)
                continue
            threading.Thread(target=self._serve, args=(sock,), name="mooncake_ray.serve-client", daemon=True).start()

    def _turn_away(self, sock: socket.socket) -> None:
        with self._lock:
            self.refused += 1
        problem = Problem(503, "busy", f"there are {self._most} connections already", {"Retry-After": "1"})
        with contextlib.suppress(OSError), sock:
            sock.setblocking(False)
            sock.send(_problem_bytes(problem, keep=False))

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Of a blocking socket, so that one call sends a whole file: who takes nothing for so long makes it return.
            seconds, rest = divmod(self._idle_s, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(rest * 1e6)))
            connection = Connection(sock, self._idle_s)
            while self._one(connection):
                pass
        except (OSError, EOFError) as e:
            logger.debug("mooncake_ray: a client of the data port has gone: %s", e)
        except Exception:
            logger.exception("mooncake_ray: a request to the data port")
        finally:
            with self._lock:
                self._open.discard(sock)
            sock.close()

    def _one(self, connection: Connection) -> bool:
        """Answers a request; whether another may follow."""
        try:
            request = connection.request()
        except Problem as e:
            connection.sock.sendall(_problem_bytes(e, keep=False))
            return False
        if request is None:
            return False
        body: int | None = None  # bytes of it that are not read yet; None: nobody knows how many
        try:
            body = _length_of_body(request)
            path = self._signer.check(request.method, request.target, time.time())
            if request.method == "PUT":
                with self.turnstile.through():
                    status, data = self._receive(path, request, connection)
                headers = {"Content-Type": "application/json", "Content-Length": str(len(data))} | _ends(request.keep_alive)
                connection.sock.sendall(answer_head(status, headers) + data)
                return request.keep_alive
            if request.method not in ("GET", "HEAD"):
                raise Problem(405, "method-not-allowed", f"{request.method} is not for this port", {"Allow": "GET, HEAD, PUT"})
            if body and not connection.drop(body):
                return False
            body = 0
            with self.turnstile.through(), ExitStack() as stack:
                with disk_problems():
                    content = stack.enter_context(self._find(path))
                self._give(connection, request, content)
            return request.keep_alive
        except (Problem, MooncakeRayError) as e:
            return self._refuse(connection, request, body, e if isinstance(e, Problem) else of_error(e))

    def _refuse(self, connection: Connection, request: Request, body: int | None, problem: Problem) -> bool:
        if problem.status == 503:
            with self._lock:
                self.refused += 1
        elif problem.status >= 500:
            logger.error("mooncake_ray: %s %s: %s", request.method, request.target.partition("?")[0], problem)
        keep = request.keep_alive and body == 0  # what is left of a body would be taken for the next request
        connection.sock.sendall(_problem_bytes(problem, keep=keep, head=request.method == "HEAD"))
        if body != 0:
            connection.sock.shutdown(socket.SHUT_WR)
            connection.drop(_MOST_DROPPED)  # or the client finds its connection broken before it has read why
        return keep

    def _give(self, connection: Connection, request: Request, content: Content) -> None:
        found = answer(request.method, request.headers, content.nbytes, content.etag)
        headers = {"ETag": content.etag, "Accept-Ranges": "bytes"}
        if found.status in (412, 416):
            what = "has another tag" if found.status == 412 else f"has {content.nbytes} bytes, and none of the range"
            headers |= {"Content-Range": f"bytes */{content.nbytes}"} if found.status == 416 else {}
            raise Problem(found.status, "precondition" if found.status == 412 else "range", f"the file {what}", headers)
        if found.status in (200, 206):
            headers |= {"Content-Type": content.media_type, "Content-Length": str(found.end - found.begin)}
            headers["Cache-Control"] = "private, no-transform"
        if found.status == 206:
            headers["Content-Range"] = f"bytes {found.begin}-{found.end - 1}/{content.nbytes}"
        head = answer_head(found.status, headers | _ends(request.keep_alive))
        spans = content.cut(found.begin, found.end) if request.method == "GET" else []
        with _opened(spans) as files:
            connection.sock.sendall(head, socket.MSG_MORE if spans else 0)
            try:
                self._send(connection.sock, spans, files)
            except MooncakeRayError as e:  # it is too late to say so in another way than by an end before its time
                raise EOFError(str(e)) from e

    def _send(self, sock: socket.socket, spans: Sequence[Span], files: Mapping[str, int]) -> None:
        for span in spans:
            if isinstance(span, Held):
                sock.sendall(span.data)
            elif isinstance(span, FileSpan):
                _send_file(sock, files[span.path], span)
            else:
                for part in span.parts():
                    sock.sendall(part)
            with self._lock:
                self.sent_bytes += span.nbytes


def listen(hosts: Sequence[str], port: int) -> socket.socket:
    """Listens on the first of some hosts that is this machine's. Raises OSError: none is, or the port is taken."""
    for left, host in zip(reversed(range(len(hosts))), hosts, strict=True):
        try:
            (family, _, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        except OSError as e:
            if not left or (not isinstance(e, socket.gaierror) and e.errno != errno.EADDRNOTAVAIL):
                raise
    raise ValueError("no host to listen on")


@contextmanager
def _opened(spans: Sequence[Span]) -> Iterator[Mapping[str, int]]:
    """Descriptors of the files that spans lie in, by path: all of them before the first byte is sent, as an error can be told of until then.

    Raises Problem: one is gone, or cannot be opened.
    """
    with ExitStack() as stack:
        files: dict[str, int] = {}
        for path in dict.fromkeys(span.path for span in spans if isinstance(span, FileSpan)):
            with disk_problems():
                files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, files[path])
        yield files


def _send_file(sock: socket.socket, file: int, span: FileSpan) -> None:
    at, end = span.offset, span.offset + span.nbytes
    while at < end:
        sent = os.sendfile(sock.fileno(), file, at, min(end - at, _AT_ONCE))
        if not sent:
            raise EOFError(f"{span.path} ends at byte {at}, before {end}")
        at += sent


def _length_of_body(request: Request) -> int:
    if "transfer-encoding" in request.headers:
        raise Problem(411, "length-required", "the body must come with a Content-Length")
    text = request.headers.get("content-length", "0")
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise Problem(400, "bad-request", "Content-Length is not a number")
    return int(text)


def _ends(keep: bool) -> Mapping[str, str]:
    """A header, if the connection ends after this answer."""
    return {} if keep else {"Connection": "close"}


def _problem_bytes(problem: Problem, *, keep: bool, head: bool = False) -> bytes:
    body = problem.body()
    headers = {"Content-Type": MEDIA_TYPE, "Content-Length": str(len(body)), **problem.headers, **_ends(keep)}
    return answer_head(problem.status, headers) + (b"" if head else body)
