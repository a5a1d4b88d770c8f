"""`JSONClient` against a plain server of Python's own."""

from __future__ import annotations

import json
import pickle
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mooncake_ray.engines import http
from mooncake_ray.engines.http import HTTPStatusError, JSONClient
from mooncake_ray.errors import ConfigError, SyncTimeoutError, WeightSyncError

DEADLINE_S = 200.0


class Site:
    """Answers with what it was asked, and tells on how many connections."""

    def __init__(self) -> None:
        self.connections = 0
        self.answered: list[str] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                site.connections += 1
                super().setup()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
                asked = {"path": self.path, "key": self.headers["Authorization"], "body": body and json.loads(body)}
                site.answered.append(self.path)
                self._say(503 if "refuse" in self.path else 200, b"plain" if "plain" in self.path else json.dumps(asked).encode())
                self.close_connection = "last" in self.path  # and the client is not told

            do_GET = do_POST

            def _say(self, status: int, text: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *args: object) -> None:
                pass

        self._web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._web.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._web.server_port}"
        self._thread = threading.Thread(target=self._web.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._web.shutdown()
        self._web.server_close()
        self._thread.join()


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


@pytest.fixture
def leaks_allowed():
    from mooncake_ray.testing import Allowed

    return Allowed(threads=("Thread-*",), descriptors=("socket:*",))  # the server's side of connections that are kept


def test_what_is_asked(site):
    client = JSONClient(f"{site.url}/at/", "secret")
    assert client.get("a", timeout_s=DEADLINE_S) == {"path": "/at/a", "key": "Bearer secret", "body": ""}
    found = client.post("b", {"x": 1}, query={"mode": "keep", "n": 2}, timeout_s=DEADLINE_S)
    assert found == {"path": "/at/b?mode=keep&n=2", "key": "Bearer secret", "body": {"x": 1}}
    assert JSONClient(site.url).post("c", timeout_s=DEADLINE_S) == {"path": "/c", "key": None, "body": {}}
    assert client.post("plain", timeout_s=DEADLINE_S) == "plain"


def test_a_thread_keeps_its_connection(site):
    client = JSONClient(site.url)
    for _ in range(3):
        client.post("a", timeout_s=DEADLINE_S)
    client.get("a", timeout_s=DEADLINE_S)
    assert site.connections == 1
    other = threading.Thread(target=client.post, args=("a",), kwargs={"timeout_s": DEADLINE_S})
    other.start()
    other.join()
    assert site.connections == 2
    with pytest.raises(HTTPStatusError, match="refuse/last: 503"):
        client.post("refuse/last", timeout_s=DEADLINE_S)
    client.get("a", timeout_s=DEADLINE_S)
    assert site.connections == 3, "who has failed may have closed"


def test_an_old_connection_is_not_used(site, monkeypatch):
    """Its server may have closed it: whether a request that finds out was obeyed, nobody knows."""
    monkeypatch.setattr(http, "_KEEP_S", 0.0)
    client = JSONClient(site.url)
    for n in range(3):
        client.post("a/last", timeout_s=DEADLINE_S)
        assert site.connections == n + 1


def test_a_request_is_not_made_twice(site, monkeypatch):
    monkeypatch.setattr(http, "_KEEP_S", DEADLINE_S)
    client = JSONClient(site.url)
    expected = []
    for n in range(50):  # it may be heard before that its server has closed a connection, or by the next request
        try:
            client.post(f"{n}/last", timeout_s=DEADLINE_S)
            expected.append(f"/{n}/last")
        except WeightSyncError:
            pass
    assert site.answered == expected


def test_errors(site):
    with pytest.raises(HTTPStatusError) as caught:
        JSONClient(site.url).post("plain/refuse", timeout_s=DEADLINE_S)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.status, again.body, str(again)) == (503, "plain", f"POST {site.url}/plain/refuse: 503: plain")
    for body, shown in (('{"message": "no"}', "no"), ('{"error": {"code": 3}}', '{"code": 3}'), ("[1]", "[1]"), ("", ""), ("{}", "{}")):
        assert str(HTTPStatusError("asked", 400, body)) == f"asked: 400: {shown}"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(SyncTimeoutError, match=r"a: no answer within 0\.1 s"):
            JSONClient(f"http://127.0.0.1:{port}").get("a", timeout_s=0.1)
    with pytest.raises(WeightSyncError, match=f"GET http://127.0.0.1:{port}/a: ConnectionRefusedError"):
        JSONClient(f"http://127.0.0.1:{port}").get("a", timeout_s=DEADLINE_S)


@pytest.mark.parametrize("url", ["", "host:80", "ftp://host", "http://", "http://host:port", "http://host/?query"])
def test_no_url(url):
    with pytest.raises(ConfigError, match="the URL of a server"):
        JSONClient(url)


def test_it_travels_and_hides_its_key():
    client = JSONClient("https://host", "secret")
    assert pickle.loads(pickle.dumps(client)) == client and "secret" not in repr(client)
    assert client.address == ("host", 443) and JSONClient("http://host").address == ("host", 80)
