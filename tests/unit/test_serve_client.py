"""The client against an endpoint in this process: what arrives is what was published, whatever breaks on the way."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import safetensors.torch
import torch
from disk_models import filled, same
from serve_site import Site
from waiting import eventually

from mooncake_ray.errors import (
    ChecksumError,
    ConfigError,
    CorruptBlockError,
    PeerRefusedError,
    SnapshotError,
    SnapshotNotFoundError,
    StaleVersionError,
    SyncTimeoutError,
    TransportError,
)
from mooncake_ray.serve import download as downloads
from mooncake_ray.serve.client import WeightClient
from mooncake_ray.serve.desk import Desk
from mooncake_ray.serve.download import Download
from mooncake_ray.serve.port import Port
from mooncake_ray.serve.settings import Settings
from mooncake_ray.serve.watching import Watch
from mooncake_ray.weights.delta_log import DeltaLog
from mooncake_ray.weights.delta_reader import DeltaReader
from mooncake_ray.weights.snapshot import SnapshotStore
from mooncake_ray.weights.source import StateDictSource

TENSORS = {
    "embed.weight": filled((300, 64), torch.bfloat16, 1),
    "layers.0.w": filled((64, 64), torch.float32, 2),
    "layers.1.w": filled((64, 48), torch.float8_e4m3fn, 3),
    "scale": filled((), torch.float32, 4),
}
CONFIG = {"config.json": '{"a": 1}'}


def halves():
    """Two ranks, which cut across rows: nothing can be sent from where it lies."""
    out = {}
    for rank in range(2):
        held, boxes = {}, {}
        for name, t in TENSORS.items():
            if t.dim() == 2:
                width = t.shape[1] // 2
                held[name] = t[:, rank * width : (rank + 1) * width].clone()
                boxes[name] = (tuple(t.shape), (0, rank * width))
            else:
                held[name] = t
        out[f"r{rank}"] = StateDictSource(held, boxes)
    return out


@pytest.fixture
def site_with(tmp_path):
    """Endpoints over a store with version 3."""
    sites = []

    def make(shards=None, **settings):
        store = SnapshotStore(tmp_path / "store", fsync=False)
        if 3 not in store.versions():
            store.save(3, shards or StateDictSource(TENSORS), extra={"files": CONFIG})
        sites.append(Site(store.directory, **settings))
        return sites[-1]

    yield make
    for site in sites:
        site.close()


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

    def cut_off(self, sock, spans):
        with lock:
            most = left.pop(0) if left else None
        if most is None:
            return send(self, sock, spans)
        short = []
        for span in spans:
            short.append(span.cut(0, min(most, span.nbytes)))
            most -= short[-1].nbytes
        send(self, sock, short)
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

    def restart_once(self, sock, spans):
        if not once:
            once.append(1)
            send(self, sock, [spans[0].cut(0, 10)])
            threading.Thread(target=site.restart).start()
            raise EOFError("killed")
        return send(self, sock, spans)

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

    def flip(self, sock, spans):
        nbytes = sum(s.nbytes for s in spans)
        if not left[0] or nbytes < 1000:
            return send(self, sock, spans)
        left[0] -= 1
        from test_serve_contents import data_of

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


def test_publish_and_read_back(site_with):
    site = site_with(publish_token="secret", read_token="eye")
    with pytest.raises(PeerRefusedError, match="401"):
        WeightClient(site.url).versions()
    with pytest.raises(PeerRefusedError, match="403"):
        WeightClient(site.url, token="wrong").versions()
    reader, writer = (WeightClient(site.url, token=token) for token in ("eye", "secret"))
    with pytest.raises(PeerRefusedError, match="403"):
        reader.publish(4, TENSORS)
    assert writer.publish(4, TENSORS, files={"config.json": "{}"}) == {"version": 4, "nbytes": 38_400 + 16_384 + 3072 + 4, "tensors": 4}
    assert reader.versions() == [3, 4] == writer.versions()
    assert same(reader.tensors(4), TENSORS)
    assert [f["name"] for f in reader.describe(4)["files"]] == ["model.safetensors", "config.json"]
    with pytest.raises(StaleVersionError, match="there is version 4"):
        writer.publish(4, TENSORS)
    with pytest.raises(PeerRefusedError, match="takes no versions"):
        WeightClient(site_with().url, token="secret").publish(5, TENSORS)


def test_a_file_that_somebody_else_has_written(site_with, tmp_path):
    """The format does not have tensors lie aligned."""
    site = site_with(publish_token="secret")
    file = tmp_path / "x.safetensors"
    head = json.dumps({
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
        "__metadata__": {"files/config.json": "{}", "note": "hi"},
    }).encode()  # fmt: skip
    values = torch.tensor([1.5, -2.0])
    file.write_bytes(len(head).to_bytes(8, "little") + head + b"abc" + values.numpy().tobytes())
    client = WeightClient(site.url, token="secret")
    client.publish(7, file)
    assert same(client.tensors(7), {"a": torch.tensor(list(b"abc"), dtype=torch.uint8), "b": values})
    assert client.describe(7)["extra"] == {"metadata": {"note": "hi"}, "files": {"config.json": "{}"}}


@pytest.mark.parametrize(
    ("change", "status", "why"),
    [
        (lambda body, headers: (body[:-1], headers), 422, "tensors have"),
        (lambda body, headers: (body, headers | {"Content-Digest": "sha-256=:AAAA:"}), 422, "not the one in Content-Digest"),
        (lambda body, headers: (body, headers | {"Content-Digest": "sha-256=:A:"}), 422, "base64"),
        (lambda body, headers: (body, headers | {"Content-Digest": "md5=:AAAA:"}), 422, "no sha-256"),
        (lambda body, headers: (b"", headers), 422, "no file of tensors"),
        (lambda body, headers: (b"\xff" * 100, headers), 422, "no file of tensors"),
        (lambda body, headers: ((2).to_bytes(8, "little") + b"{}", headers), 422, "no tensors"),
        (lambda body, headers: (safetensors.torch.save({"a": torch.empty(0, 3)}), headers), 422, "a has no elements"),
        (lambda body, headers: (body + b"x" * 10_000, headers), 413, "are the most"),
        (lambda body, headers: (iter([body]), headers), 411, "Content-Length"),
    ],
)
def test_uploads_that_are_refused(site_with, change, status, why):
    site = site_with(publish_token="secret", max_upload_bytes=5000)
    body, headers = change(safetensors.torch.save({"a": torch.arange(6.0)}), {})
    request = urllib.request.Request(site.desk.address("PUT", "versions", "9"), body, headers, method="PUT")
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request, timeout=60)
    with error.value as answer:
        said = json.loads(answer.read())
    assert (answer.code, answer.headers["Content-Type"]) == (status, "application/problem+json")
    assert said["status"] == status and why in said["detail"]
    assert SnapshotStore(site.settings.store).versions() == [3]


def test_a_pinned_version_survives_and_one_that_is_read(site_with):
    site = site_with(publish_token="secret", keep=1, linger_s=0.01)
    client = WeightClient(site.url, token="secret")
    with client.pin(3) as pin:
        client.publish(4, TENSORS)
        client.publish(5, TENSORS)
        assert client.versions() == [3, 5]
        assert same(client.tensors(3), TENSORS)
        about = json.load(urllib.request.urlopen(f"{site.url}/v1/versions/3/pins"))
        assert [lease["id"] for lease in about["leases"]] == [pin.id]
    with site.desk.shelf.take(5):
        client.publish(6, TENSORS)

        def swept() -> list[int]:
            site.desk.shelf.sweep()
            site.desk.store.clean()
            return client.versions()

        eventually(lambda: swept() == [5, 6], swept)  # who has read a version lets go of it after its last byte
    site.desk.shelf.sweep(all_of_them=True)
    site.desk.store.clean()
    assert client.versions() == [6]
    with pytest.raises(SnapshotNotFoundError):
        client.pin(3)


def test_waiting_for_a_version(site_with):
    site = site_with(publish_token="secret")
    client = WeightClient(site.url, token="secret")
    assert client.wait() == 3
    with pytest.raises(SyncTimeoutError, match="no version newer than 3"):
        client.wait(3, timeout_s=0.05)
    found = []
    waiting = [threading.Thread(target=lambda: found.append(client.wait(3))) for _ in range(3)]
    events = urllib.request.urlopen(urllib.request.Request(f"{site.url}/v1/events?limit=1", headers={"Last-Event-ID": "3"}), timeout=60)
    for thread in waiting:
        thread.start()
    client.publish(8, TENSORS)
    for thread in waiting:
        thread.join()
    assert found == [8, 8, 8]
    with events:
        assert b'id: 8\nevent: version\ndata: {"version": 8}\n\n' in events.read()


def test_who_waits_is_told_and_does_not_look_himself(tmp_path):
    """All who wait are woken by one who looks; nobody looks when nobody waits."""
    store = SnapshotStore(tmp_path, fsync=False)
    store.save(3, StateDictSource(TENSORS))
    desk = Desk(Settings(str(tmp_path)))

    async def go():
        watch = Watch(desk)
        waiting = [asyncio.create_task(watch.newer(3, "whole", 3600.0)) for _ in range(3)]
        while watch._waiting < 3:
            await asyncio.sleep(0.001)
        store.save(4, StateDictSource(TENSORS))
        async with asyncio.timeout(60):
            found = await asyncio.gather(*waiting)
            await watch._task
        return found, await watch.newer(4, "whole", 0.01)

    try:
        assert asyncio.run(go()) == ([4, 4, 4], None)
    finally:
        desk.close()


def test_deltas_over_http(tmp_path):
    model = {"w": torch.randn(64, 64)}
    log = DeltaLog(tmp_path / "log", fsync=False)
    log.append(1, StateDictSource(model))
    site = Site(tmp_path / "log")
    try:
        mine = {"w": torch.zeros(64, 64)}
        reader = DeltaReader(f"{site.url}/v1/log", StateDictSource(mine))
        assert reader.catch_up().how == "anchor" and same(mine, model)
        model["w"][3, 5:9] += 1
        log.append(2, StateDictSource(model))
        did = reader.catch_up()
        assert (did.how, did.version, did.changed) == ("delta", 2, 4) and same(mine, model)
        client = WeightClient(site.url)
        assert client.versions() == [1] and client.wait(1, whole=False) == 2 and client.wait() == 1
        delta = json.load(urllib.request.urlopen(f"{site.url}/v1/deltas?base=1&version=2"))
        assert delta["nbytes"] == did.nbytes
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{site.url}/v1/log/version-00000001/in-use")
    finally:
        site.close()


def test_deltas_with_a_token(tmp_path):
    model = {"w": torch.randn(64, 64)}
    log = DeltaLog(tmp_path / "log", fsync=False)
    log.append(1, StateDictSource(model))
    site = Site(tmp_path / "log", read_token="eye")
    try:
        mine = {"w": torch.zeros(64, 64)}
        with pytest.raises(PeerRefusedError, match="401"):
            DeltaReader(WeightClient(site.url).deltas(), StateDictSource(mine)).catch_up()
        place = WeightClient(site.url, token="eye").deltas()
        reader = DeltaReader(place, StateDictSource(mine))
        assert reader.catch_up().how == "anchor" and same(mine, model)
        model["w"][3, 5:9] += 1
        log.append(2, StateDictSource(model))
        site.restart()
        sign, signed = site.desk._signer.sign, []

        def stale_once(*arguments):
            signed.append(1)
            return sign(*arguments) + ("x" if len(signed) == 1 else "")

        site.desk._signer.sign = stale_once
        assert reader.catch_up().how == "delta" and same(mine, model)
        data = place.read("deltas.json")
        assert place.read("deltas.json", 3, 9) == data[3:9] and place.read("deltas.json", 4, 4) == b""
        with pytest.raises(SnapshotNotFoundError, match="404"):
            place.read("nothing.json")
        for begin, end in ((0, len(data) + 1), (len(data), len(data) + 5)):
            with pytest.raises(CorruptBlockError, match="ends "):
                place.read("deltas.json", begin, end)
    finally:
        site.close()


def test_other_content_is_not_mixed_in(site):
    client = WeightClient(site.url)
    about = client.manifest(3)
    from mooncake_ray.serve.ranged import RangeReader

    reader = RangeReader(client._caller, "versions/3/files/model.safetensors", '"other"')
    try:
        with pytest.raises(SnapshotError, match="412"):
            reader.read(0, about["nbytes"], lambda at, piece: None, until=client._until(60))
    finally:
        reader.close()


def full(*arguments):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_is_full_is_said_at_once(site_with, tmp_path, monkeypatch):
    """And not taken for a connection that breaks, which would be tried for an hour."""
    site = site_with(publish_token="secret")
    client = WeightClient(site.url, token="secret")
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="No space left"):
            client.download(3, tmp_path / "got")
        with pytest.raises(TransportError, match=r"507: .*No space left"):
            client.publish(4, TENSORS)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        client.download(3, tmp_path / "got")
    monkeypatch.undo()
    assert client.download(3, tmp_path / "got").version == 3 and same_file(tmp_path / "got" / "model.safetensors")


def test_a_version_that_somebody_has_taken_away_is_gone(site):
    """As on a file system that does not carry locks between hosts."""
    client = WeightClient(site.url)
    client.tensors(3)
    shutil.rmtree(Path(site.settings.store) / "version-00000003")
    with pytest.raises(SnapshotNotFoundError):
        client.tensors(3)


def test_nobody_answers():
    with pytest.raises(SyncTimeoutError, match=r"GET http://127\.0\.0\.1:9/v1/versions: not done within 0\.1"):
        WeightClient("http://127.0.0.1:9", timeout_s=0.1).versions()


@pytest.mark.parametrize(
    ("arguments", "why"), [({"url": "ftp://x"}, "not an HTTP URL"), ({"url": "http://x", "connections": 0}, "positive")]
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
