"""The data port, by hand: whatever comes is answered as HTTP has it, or the connection ends; and nobody holds it up for ever."""

from __future__ import annotations

import errno
import http.client
import json
import os
import socket
import threading
from contextlib import closing, contextmanager, suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from waiting import eventually

from mooncake_ray.errors import SnapshotNotFoundError, TransportError
from mooncake_ray.serve.port import Port, listen
from mooncake_ray.serve.signing import Signer
from mooncake_ray.serve.spans import Content, FileSpan, Held
from mooncake_ray.serve.turnstile import Turnstile

DATA = os.urandom(3000)


@contextmanager
def port_with(folder, size=3000, *, limit=8, waiting=8, idle_s=30.0):
    path = folder / "file"
    path.write_bytes(DATA[:1000] + bytes(size - 1000))

    @contextmanager
    def find(name):
        if name != "/a b":
            raise SnapshotNotFoundError(f"no {name}")
        yield Content([Held(b"head"), FileSpan(str(path), 0, size)], media_type="text/x", etag='"t"')

    def receive(path, request, connection):
        return 201, b"{}"

    port = Port(find, receive, Signer(b"x" * 16), Turnstile(limit, waiting, 30.0), listen(["127.0.0.1"], 0), idle_s=idle_s)
    try:
        yield port
    finally:
        port.close()


@pytest.fixture
def port(tmp_path):
    with port_with(tmp_path) as port:
        yield port


def target(method="GET", path="/a b"):
    return Signer(b"x" * 16).sign(method, path, 1 << 40)


def connected(port):
    return closing(socket.create_connection(("127.0.0.1", port.number), 60))


def test_several_requests_of_a_connection(port):
    whole = b"head" + DATA[:1000] + bytes(2000)
    connection = http.client.HTTPConnection("127.0.0.1", port.number, timeout=60)
    with closing(connection):
        for method, path, headers, status, body in [
            ("GET", target(), {}, 200, whole),
            ("GET", target(), {"Range": "bytes=2-9"}, 206, whole[2:10]),
            ("HEAD", target(), {}, 200, b""),
            ("HEAD", target(), {"Range": "bytes=2-9"}, 200, b""),
            ("GET", "//[", {}, 400, None),
            ("GET", target(), {"If-None-Match": '"t"'}, 304, b""),
            ("GET", target(), {"Range": "bytes=9999-"}, 416, None),
            ("GET", target(), {"If-Match": '"u"'}, 412, None),
            ("GET", target(path="/other"), {}, 404, None),
            ("GET", "/a%20b", {}, 403, None),
            ("DELETE", target("DELETE"), {}, 405, None),
            ("GET", target(), {"Range": "bytes=0-0"}, 206, b"h"),
        ]:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            said = answer.read()
            assert answer.status == status
            assert body is None or said == body
            assert body is not None or answer.headers["Content-Type"] == "application/problem+json"
    with closing(http.client.HTTPConnection("127.0.0.1", port.number, timeout=60)) as connection:
        connection.request("HEAD", target())
        assert connection.getresponse().headers["Content-Length"] == str(len(whole))


def test_requests_one_after_the_other_without_waiting(port):
    with connected(port) as sock:
        one = f"GET {target()} HTTP/1.1\r\nRange: bytes=0-3\r\n\r\n".encode()
        sock.sendall(one * 3 + one.replace(b"HTTP/1.1", b"HTTP/1.0"))
        said = b""
        while piece := sock.recv(4096):
            said += piece
        assert said.count(b"206 Partial Content") == 4 == said.count(b"\r\n\r\nhead")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET {to} HTTP/1.1\r\nTransfer-Encoding: chunked", 411),
        ("GET {to} HTTP/1.1\r\nContent-Length: +99", 400),
        ("GET /not-signed HTTP/1.1\r\nContent-Length: 99", 403),
        ("POST {to} HTTP/1.1\r\nContent-Length: 99", 403),
    ],
)
def test_a_body_that_was_refused_is_not_the_next_request(port, head, status):
    with connected(port) as sock:
        sock.sendall(f"{head.format(to=target())}\r\n\r\nGET {target()} HTTP/1.1\r\n\r\n".encode())
        sock.shutdown(socket.SHUT_WR)
        said = b""
        while piece := sock.recv(4096):
            said += piece
        assert said.startswith(b"HTTP/1.1 %d " % status) and said.count(b"HTTP/1.1") == 1 and b"Connection: close" in said


def test_a_body_that_does_not_end_is_given_up(tmp_path):
    """However busy its sender is."""
    with port_with(tmp_path, idle_s=0.2) as port, connected(port) as sock:
        sock.sendall(f"GET {target()} HTTP/1.1\r\nContent-Length: {1 << 40}\r\n\r\n".encode())
        with pytest.raises(ConnectionError):
            sock.sendall(bytes(1 << 30))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(min_size=1, max_size=200))
def test_nonsense(port, data):
    """It ends with a 400 or without a word; and others are served as before."""
    with connected(port) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        said = b""
        with suppress(ConnectionError):
            while piece := sock.recv(4096):
                said += piece
        assert not said or said.startswith(b"HTTP/1.1 4")
    port.check()


def test_a_head_without_end(port):
    with connected(port) as sock, suppress(ConnectionError):
        sock.sendall(b"GET / HTTP/1.1\r\nx: " + b"y" * 40_000)
        assert sock.recv(4096).startswith(b"HTTP/1.1 431")


def test_a_reader_who_takes_nothing_is_given_up(tmp_path):
    """And its place is free for the next."""
    with port_with(tmp_path, 64 << 20, limit=1, idle_s=0.2) as port, connected(port) as sock:
        sock.sendall(f"GET {target()} HTTP/1.1\r\n\r\n".encode())
        eventually(lambda: port.turnstile.inside == 1)
        eventually(lambda: port.turnstile.inside == 0)


def test_who_says_nothing_is_given_up(tmp_path):
    with port_with(tmp_path, idle_s=0.1) as port, connected(port) as sock:
        assert sock.recv(1) == b""


def test_too_many_connections_are_told_to_come_again(tmp_path, monkeypatch):
    monkeypatch.setattr("mooncake_ray.serve.port._SPARE_CONNECTIONS", 0)
    with port_with(tmp_path, limit=1, waiting=1) as port:
        held = [socket.create_connection(("127.0.0.1", port.number), 60) for _ in range(2)]
        eventually(lambda: len(port._open) == 2)
        with connected(port) as sock:
            said = sock.recv(4096)
            assert said.startswith(b"HTTP/1.1 503") and b"Retry-After: 1" in said
        for sock in held:
            sock.close()
        eventually(lambda: not port._open)
        with connected(port) as sock:
            sock.sendall(f"GET {target()} HTTP/1.1\r\nConnection: close\r\n\r\n".encode())
            assert sock.recv(15) == b"HTTP/1.1 200 OK"


def test_it_ends_while_somebody_reads(tmp_path):
    with port_with(tmp_path, 64 << 20) as port, connected(port) as sock:
        sock.sendall(f"GET {target()} HTTP/1.1\r\n\r\n".encode())
        assert sock.recv(100)
        eventually(lambda: port.turnstile.inside == 1)
        closer = threading.Thread(target=port.close)
        closer.start()
        closer.join(60)
        assert not closer.is_alive() and port.turnstile.inside == 0
        with pytest.raises(TransportError, match="has ended"):
            port.check()


@pytest.mark.parametrize(("error", "status"), [(errno.ENOENT, 404), (errno.EMFILE, 500), (errno.EIO, 500)])
def test_files_that_cannot_be_opened_are_said(port, monkeypatch, error, status):
    """As the first byte is not sent yet; and the connection can be used again."""

    def fails(path, *arguments):
        raise OSError(error, os.strerror(error), path)

    with closing(http.client.HTTPConnection("127.0.0.1", port.number, timeout=60)) as connection:
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", fails)
            connection.request("GET", target())
            answer = connection.getresponse()
            assert answer.status == status and os.strerror(error) in json.loads(answer.read())["detail"]
        connection.request("GET", target())
        assert connection.getresponse().status == 200


def test_a_disk_that_fails_when_it_is_looked_at_is_said(port):
    def find(name):
        raise OSError(errno.EIO, "Input/output error")

    port._find = find
    with closing(http.client.HTTPConnection("127.0.0.1", port.number, timeout=60)) as connection:
        connection.request("GET", target())
        answer = connection.getresponse()
        assert answer.status == 500 and json.loads(answer.read())["type"].endswith(":disk")


def test_a_file_that_has_become_shorter(tmp_path):
    """What was promised is not made up: the connection ends."""
    with port_with(tmp_path) as port:
        (tmp_path / "file").write_bytes(b"short")
        with closing(http.client.HTTPConnection("127.0.0.1", port.number, timeout=60)) as connection:
            connection.request("GET", target())
            with pytest.raises(http.client.IncompleteRead):
                connection.getresponse().read()
