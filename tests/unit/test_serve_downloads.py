"""The client reads from an endpoint in this process: what arrives is what was published, whatever breaks on the way."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
import safetensors.torch
from disk_models import same
from serve_site import CONFIG, TENSORS, data_of, full_disk, halves, sites
from waiting import eventually

from mooncake_ray.errors import ChecksumError, ConfigError, SnapshotError, SnapshotNotFoundError, SyncTimeoutError, TransportError
from mooncake_ray.serve import download as downloads
from mooncake_ray.serve import schema, versions
from mooncake_ray.serve.client import WeightClient
from mooncake_ray.serve.contents import Volume
from mooncake_ray.serve.download import Download
from mooncake_ray.serve.port import Port
from mooncake_ray.serve.ranged import RangeReader


@pytest.fixture
def site_with(tmp_path):
    """Endpoints over a store with version 3."""
    with sites(tmp_path / "store") as make:
        yield make


@pytest.fixture
def site(site_with):
    return site_with()


def same_file(path):
    return same(safetensors.torch.load_file(path), TENSORS)


@pytest.mark.parametrize("cut", [False, True], ids=["one rank", "cut across rows"])
def test_download(site_with, tmp_path, cut):
    site = site_with(halves() if cut else None)
    told = []
    got = WeightClient(site.url).download("latest", tmp_path / "got", on_progress=lambda there, total: told.append((there, total)))
    assert (got.version, got.resumed_bytes, got.broken) == (3, 0, 0)
    assert sorted(p.name for p in (tmp_path / "got").iterdir()) == ["config.json", "model.safetensors"]
    assert same_file(tmp_path / "got" / "model.safetensors")
    assert (tmp_path / "got" / "config.json").read_text() == CONFIG["config.json"]
    assert told[-1] == (got.nbytes, got.nbytes) and got.nbytes == sum(p.stat().st_size for p in got.files)
    assert site.desk.leases.of() == []


def test_tensors(site):
    client = WeightClient(site.url)
    assert same(client.tensors(3), TENSORS)
    assert same(client.tensors("latest", ["scale", "layers.0.w"]), {name: TENSORS[name] for name in ("scale", "layers.0.w")})
    with pytest.raises(SnapshotNotFoundError, match="1: nothing"):
        client.tensors(3, ["scale", "nothing"])


def flaky(monkeypatch, cuts):
    """The data port ends its first answers after so many bytes."""
    left, send, lock = list(cuts), Port._send, threading.Lock()

    def cut_off(self, sock, spans, files):
        with lock:
            most = left.pop(0) if left else None
        if most is None:
            return send(self, sock, spans, files)
        short = []
        for span in spans:
            short.append(span.cut(0, min(most, span.nbytes)))
            most -= short[-1].nbytes
        send(self, sock, short, files)
        raise EOFError("cut off")

    monkeypatch.setattr(Port, "_send", cut_off)
    return left


@pytest.mark.parametrize("cut", [False, True], ids=["one rank", "cut across rows"])
def test_connections_that_break(site_with, tmp_path, monkeypatch, cut):
    site = site_with(halves() if cut else None)
    monkeypatch.setattr(downloads, "CHUNK_BYTES", 20_000)
    left = flaky(monkeypatch, [0, 1, 7, 5000, 300, 0, 19_999, 64])
    got = WeightClient(site.url, connections=3).download(3, tmp_path / "got")
    assert not left and got.broken >= 7
    assert same_file(tmp_path / "got" / "model.safetensors")


def test_a_replica_that_is_started_anew(site, tmp_path, monkeypatch):
    """The addresses it gave out are good no more, as its port is another."""
    send, once = Port._send, []

    def restart_once(self, sock, spans, files):
        if not once:
            once.append(1)
            send(self, sock, [spans[0].cut(0, 10)], files)
            threading.Thread(target=site.restart).start()
            raise EOFError("killed")
        return send(self, sock, spans, files)

    monkeypatch.setattr(Port, "_send", restart_once)
    got = WeightClient(site.url, connections=1).download(3, tmp_path / "got")
    assert got.broken and same_file(tmp_path / "got" / "model.safetensors")


def test_an_address_that_is_over(site_with, tmp_path, monkeypatch):
    """The client asks for another one."""
    site = site_with(link_s=1e-9)  # over at the end of this second
    signed = []
    sign = site.desk._signer.sign

    def too_early(method, path, expires):
        signed.append(path)
        return sign(method, path, expires - 10 if len(signed) < 3 else expires + 100)

    monkeypatch.setattr(site.desk._signer, "sign", too_early)
    assert same(WeightClient(site.url).tensors(3, ["scale"]), {"scale": TENSORS["scale"]})
    assert len(signed) == 3


def test_a_download_goes_on_where_it_was(site, tmp_path, monkeypatch):
    monkeypatch.setattr(downloads, "CHUNK_BYTES", 10_000)
    about = WeightClient(site.url).describe(3)["files"][0]
    path = tmp_path / "got" / "model.safetensors"
    path.parent.mkdir()
    asked = []
    monkeypatch.setattr(Download, "__init__", lambda self, *a, init=Download.__init__: init(self, *a, chunk_bytes=10_000))

    class Killed(Exception):
        pass

    def killed(there, total):
        asked.append(there)
        if there > 25_000:
            raise Killed

    with pytest.raises(Killed):
        WeightClient(site.url, connections=1).download(3, path.parent, on_progress=killed)
    with open(path.with_name("model.safetensors.part.done"), "a") as journal:
        journal.write("1")  # cut off: of chunk 12, say
    assert not path.exists()
    got = WeightClient(site.url).download(3, path.parent)
    assert got.resumed_bytes == 20_000
    assert same_file(path) and path.stat().st_size == about["nbytes"]
    assert sorted(p.name for p in path.parent.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("endpoint_is_gone", [False, True])
def test_a_download_that_is_interrupted_ends_at_once(site, tmp_path, monkeypatch, endpoint_is_gone):
    """By Ctrl-C, say: the other connections do not go on with what is missing."""
    monkeypatch.setattr(Download, "__init__", lambda self, *a, init=Download.__init__: init(self, *a, chunk_bytes=1000))
    begun, fetched = threading.Event(), []

    def interrupted(tasks, **options):
        begun.wait(60)
        if endpoint_is_gone:
            site.close()
        raise KeyboardInterrupt

    def slowly(there, total):
        fetched.append(there)
        begun.set()
        time.sleep(0.01)

    monkeypatch.setattr(downloads, "wait", interrupted)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        WeightClient(site.url, connections=2, timeout_s=1.0).download(3, tmp_path / "got", on_progress=slowly, timeout_s=200.0)
    assert time.monotonic() - began < 60 and len(fetched) < 30
    assert not (tmp_path / "got" / "model.safetensors").exists()


class Proxy:
    """Answers each request with the next of some answers; the last one again and again."""

    def __init__(self, *answers):
        self._answers, self._listener = list(answers), socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        with suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                with sock:
                    sock.recv(1 << 16)
                    sock.sendall(self._answers.pop(0) if len(self._answers) > 1 else self._answers[0])

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


def said(body, status="200 OK", length=None, more=""):
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body) if length is None else length}\r\n{more}\r\n{body}".encode()


def read_deltas(client):
    return client.deltas().read("deltas.json")


def test_an_answer_that_ends_too_early_is_asked_for_again():
    with Proxy(said('{"versions": [', length=200), said('{"versions": [{"version": 7, "whole": true}]}')) as proxy:
        assert WeightClient(proxy.url).versions() == [7]


@pytest.mark.parametrize(
    ("ask", "answer", "why"),
    [
        (WeightClient.versions, said("<html>hello</html>"), "no JSON"),
        (read_deltas, said("", "307 Elsewhere"), "sent to 'nowhere:'"),
        (read_deltas, said("", "307 Elsewhere", more="Location: file:///etc/passwd\r\n"), "sent to 'file:"),
    ],
)
def test_answers_that_make_no_sense(ask, answer, why):
    with Proxy(answer) as proxy, pytest.raises(TransportError, match=why):
        ask(WeightClient(proxy.url, timeout_s=20.0))


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "..", "", "a/b"])
def test_a_file_that_would_be_elsewhere_is_refused(site, tmp_path, monkeypatch, name):
    monkeypatch.setattr(Volume, "files", property(lambda self: ["model.safetensors"]))
    monkeypatch.setattr(versions, "_file", lambda *_: schema.File(name=name, nbytes=1, etag='"x"', media_type="text/plain"))
    with pytest.raises(TransportError, match="is no name of one"):
        WeightClient(site.url).download(3, tmp_path / "got")
    assert not list((tmp_path / "got").iterdir())


@pytest.mark.parametrize("act", ["download", "tensors"])
def test_all_of_a_call_ends_in_its_time(act, tmp_path):
    """Not only what moves most bytes."""
    client = WeightClient("http://127.0.0.1:9", timeout_s=3600.0)
    with pytest.raises(SyncTimeoutError, match=r"within 0\.(1|0\d+) s"):
        client.download(3, tmp_path, timeout_s=0.1) if act == "download" else client.tensors(3, timeout_s=0.1)


def test_what_is_left_of_another_version_is_not_used(site, tmp_path):
    nbytes = WeightClient(site.url).describe(3)["files"][0]["nbytes"]
    (tmp_path / "model.safetensors.part").write_bytes(b"x" * nbytes)
    head = {"etag": "other", "nbytes": nbytes, "chunk": downloads.CHUNK_BYTES}
    (tmp_path / "model.safetensors.part.done").write_text(json.dumps(head) + "\n0\n")
    got = WeightClient(site.url).download(3, tmp_path)
    assert got.resumed_bytes == 0 and same_file(tmp_path / "model.safetensors")


def damaged(monkeypatch, times):
    """The data port flips a bit of its first answers, in the middle."""
    left, send = [times], Port._send

    def flip(self, sock, spans, files):
        nbytes = sum(s.nbytes for s in spans)
        if not left[0] or nbytes < 1000:
            return send(self, sock, spans, files)
        left[0] -= 1
        data = bytearray(data_of(spans))
        data[nbytes // 2] ^= 1
        sock.sendall(data)

    monkeypatch.setattr(Port, "_send", flip)


def test_what_comes_damaged_is_fetched_again(site, tmp_path, monkeypatch):
    damaged(monkeypatch, 1)
    WeightClient(site.url).download(3, tmp_path / "got")
    assert same_file(tmp_path / "got" / "model.safetensors")


def test_what_is_damaged_for_good_is_refused(site, tmp_path, monkeypatch):
    damaged(monkeypatch, 100)
    client = WeightClient(site.url)
    with pytest.raises(ChecksumError, match="not what was published, in 1: "):
        client.download(3, tmp_path / "got")
    assert not (tmp_path / "got" / "model.safetensors").exists()
    with pytest.raises(ChecksumError, match=r"embed.weight: what came is not"):
        client.tensors(3, ["embed.weight"])


def test_other_content_is_not_mixed_in(site):
    client = WeightClient(site.url)
    about = client.manifest(3)
    reader = RangeReader(client._caller, "versions/3/files/model.safetensors", '"other"')
    try:
        with pytest.raises(SnapshotError, match="412"):
            reader.read(0, about["nbytes"], lambda at, piece: None, until=client._until(60))
    finally:
        reader.close()


def test_a_disk_that_is_full_is_said_at_once(site, tmp_path, monkeypatch):
    """And not taken for a connection that breaks, which would be tried for an hour."""
    client = WeightClient(site.url)
    for call in ("posix_fallocate", "pwrite"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full_disk)
            with pytest.raises(OSError, match="No space left"):
                client.download(3, tmp_path / "got")
    assert client.download(3, tmp_path / "got").version == 3 and same_file(tmp_path / "got" / "model.safetensors")


def test_nobody_answers():
    with pytest.raises(SyncTimeoutError, match=r"GET http://127\.0\.0\.1:9/v1/versions: not done within 0\.1"):
        WeightClient("http://127.0.0.1:9", timeout_s=0.1).versions()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"url": "ftp://x"}, "not an HTTP URL"),
        ({"url": "http://x:y"}, "not an HTTP URL"),
        ({"url": "http://x", "connections": 0}, "positive"),
    ],
)
def test_clients_that_make_no_sense(arguments, why):
    with pytest.raises(ConfigError, match=why):
        WeightClient(**arguments)


def test_readers_beyond_what_may_wait_come_again_and_get_it(site_with, tmp_path):
    """None is turned away for good, and never more than so many transfer at a time."""
    site = site_with(max_transfers=2, max_waiting=1, wait_s=0.01)
    found = []

    def read():
        found.append(same(WeightClient(site.url).tensors(3), TENSORS))

    with site.desk.port.turnstile.through(), site.desk.port.turnstile.through():
        readers = [threading.Thread(target=read) for _ in range(16)]
        for reader in readers:
            reader.start()
        eventually(lambda: site.desk.port.refused >= 16)
    for reader in readers:
        reader.join()
    assert found == [True] * 16


HUB = """
import sys
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import RemoteEntryNotFoundError, RevisionNotFoundError
tag = sys.argv[1]
print(snapshot_download("any/name", revision="3"))
print(hf_hub_download("any/name", "model.safetensors"))
print(hf_hub_download("any/name", "model.safetensors", revision=tag))
for name, revision, error in (
    ("tokenizer.json", "main", RemoteEntryNotFoundError),
    ("config.json", "9", RevisionNotFoundError),
    ("config.json", "0" * 40, RevisionNotFoundError),
):
    try:
        hf_hub_download("any/name", name, revision=revision)
        print("found", name, revision)
    except error:
        pass
"""


def test_as_a_hub(site_with, tmp_path):
    """The hub's own client finds versions as revisions, and caches them by their tags."""
    site = site_with(publish_token="secret")
    WeightClient(site.url, token="secret").publish(4, {"scale": TENSORS["scale"]}, files=CONFIG)
    with site.desk.volume(3) as volume:
        tag = volume.tag
    env = os.environ | {"HF_ENDPOINT": f"{site.url}/hub", "HF_HOME": str(tmp_path), "NO_PROXY": "*", "HF_HUB_DISABLE_TELEMETRY": "1"}
    env.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run([sys.executable, "-c", HUB, tag], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    third, newest, again = done.stdout.splitlines()
    assert third.endswith(tag) and again == f"{third}/model.safetensors" and same_file(again)
    assert same(safetensors.torch.load_file(newest), {"scale": TENSORS["scale"]})
