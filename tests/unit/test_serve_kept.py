"""What an endpoint in this process keeps, and tells of: versions that are published, pinned, waited for, and those that deltas lead to."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import safetensors.torch
import torch
from disk_models import same
from serve_site import TENSORS, Site, full_disk, sites
from waiting import eventually

from mooncake_ray.errors import (
    ChecksumError,
    CorruptBlockError,
    PeerRefusedError,
    SnapshotError,
    SnapshotNotFoundError,
    StaleVersionError,
    SyncTimeoutError,
    TransportError,
)
from mooncake_ray.serve.client import WeightClient
from mooncake_ray.serve.desk import Desk
from mooncake_ray.serve.settings import Settings
from mooncake_ray.serve.watching import Watch
from mooncake_ray.weights.delta_log import DeltaLog
from mooncake_ray.weights.delta_reader import DeltaReader
from mooncake_ray.weights.snapshot import SnapshotStore
from mooncake_ray.weights.source import StateDictSource


@pytest.fixture
def site_with(tmp_path):
    """Endpoints over a store with version 3."""
    with sites(tmp_path / "store") as make:
        yield make


@pytest.fixture
def site(site_with):
    return site_with()


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


@pytest.mark.parametrize(("spoil", "why"), [(Path.unlink, "No such file"), (lambda p: p.write_bytes(b"x"), "bytes are gone")])
def test_a_file_that_goes_while_it_is_published(site_with, tmp_path, monkeypatch, spoil, why):
    """It is not taken for a connection that breaks, which would be tried for an hour."""
    site, file = site_with(publish_token="secret"), tmp_path / "x.safetensors"
    safetensors.torch.save_file(TENSORS, file)
    client = WeightClient(site.url, token="secret")
    address = client._caller.address

    def spoilt(*arguments, **options):
        spoil(file)
        return address(*arguments, **options)

    monkeypatch.setattr(client._caller, "address", spoilt)
    with pytest.raises(SnapshotError, match=f"cannot be published: .*{why}"):
        client.publish(4, file, timeout_s=20.0)
    assert client.versions() == [3]


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


@pytest.mark.parametrize("call", ["tempfile.TemporaryFile", "os.posix_fallocate", "os.pwrite", "mmap.mmap"])
def test_who_publishes_is_told_that_the_disk_is_full(site_with, monkeypatch, call):
    site = site_with(publish_token="secret")
    client = WeightClient(site.url, token="secret", timeout_s=20.0)
    with monkeypatch.context() as patch:
        patch.setattr(f"mooncake_ray.serve.upload.{call}", full_disk)
        with pytest.raises(TransportError, match=r"507: .*No space left"):
            client.publish(4, TENSORS)
    assert client.versions() == [3]


def test_a_version_that_somebody_has_written_anew_is_another(site):
    """As when a run is deleted by hand and begun again while the endpoint is up."""
    client, store = WeightClient(site.url), SnapshotStore(site.settings.store, fsync=False)
    assert same(client.tensors(3), TENSORS)
    shutil.rmtree(store.directory)
    again = {name: torch.zeros_like(t) for name, t in TENSORS.items()}
    store.save(3, StateDictSource(again))
    assert same(client.tensors(3), again)


def test_names_of_files_that_are_none(site_with):
    """They are kept as the metadata that they are, and no client puts them anywhere."""
    site = site_with(publish_token="secret")
    client = WeightClient(site.url, token="secret")
    client.publish(4, TENSORS, files={"..": "up", "é": "?", "a b": "?", "x" * 201: "?", "ok.json": "{}"})
    assert [f["name"] for f in client.describe(4)["files"]] == ["model.safetensors", "ok.json"]
    assert {"files/..", "files/é"} <= client.describe(4)["extra"]["metadata"].keys()


def test_who_publishes_is_told_so_though_the_version_is_gone_already(site_with, monkeypatch):
    """As when a newer one is stored at once where few are kept."""
    site, save = site_with(publish_token="secret"), SnapshotStore.save

    def saved_and_gone(store, version, *arguments, **options):
        save(store, version, *arguments, **options)
        shutil.rmtree(store.directory / f"version-{version:08d}")

    monkeypatch.setattr(SnapshotStore, "save", saved_and_gone)
    assert WeightClient(site.url, token="secret").publish(4, {"scale": TENSORS["scale"]}) == {"version": 4, "nbytes": 4, "tensors": 1}


def test_who_publishes_asks_for_another_address_when_the_replica_is_another(site_with):
    site = site_with(publish_token="secret")
    sign, signed = site.desk._signer.sign, []

    def of_another(*arguments):
        signed.append(1)
        return sign(*arguments) + ("x" if len(signed) == 1 else "")

    site.desk._signer.sign = of_another
    assert WeightClient(site.url, token="secret").publish(4, TENSORS)["version"] == 4 and len(signed) == 2


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


def test_a_version_that_somebody_has_taken_away_is_gone(site):
    """As on a file system that does not carry locks between hosts."""
    client = WeightClient(site.url)
    client.tensors(3)
    shutil.rmtree(Path(site.settings.store) / "version-00000003")
    with pytest.raises(SnapshotNotFoundError):
        client.tensors(3)


def test_the_latest_is_another_when_it_goes_while_it_is_opened(site_with, monkeypatch):
    site = site_with(publish_token="secret")
    client = WeightClient(site.url, token="secret")
    client.publish(4, TENSORS)
    shutil.rmtree(Path(site.settings.store) / "version-00000003")
    for act in (client.describe, client.manifest, lambda: pinned(client), lambda: downloaded(site)):
        stale, latest = [3], SnapshotStore.latest
        with monkeypatch.context() as patch:
            patch.setattr(SnapshotStore, "latest", lambda store, stale=stale, latest=latest: stale.pop() if stale else latest(store))
            assert act()["version"] == 4 and not stale


def pinned(client):
    with client.pin("latest") as pin:
        return {"version": pin.version}


def downloaded(site):
    """Which version the data port is asked for."""
    with urllib.request.urlopen(f"{site.url}/v1/versions/latest/files/model.safetensors", timeout=60) as answer:
        return {"version": int(answer.url.split("/")[4])}


def test_revisions_are_found_by_their_tags_though_others_go_meanwhile(site_with, monkeypatch):
    site, versions = site_with(), SnapshotStore.versions
    with site.desk.volume(3) as volume:
        tag = volume.tag
    monkeypatch.setattr(SnapshotStore, "versions", lambda store: [*versions(store), 9])
    with urllib.request.urlopen(f"{site.url}/hub/api/models/any/name/revision/{tag}", timeout=60) as answer:
        assert json.load(answer)["sha"] == tag


def refused(site, method, path):
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(urllib.request.Request(site.url + path, method=method), timeout=60)
    with error.value as answer:
        assert answer.headers["Content-Type"] == "application/problem+json"
        return answer.code, answer.headers


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("HEAD", "/v1/versions", "GET, POST"),
        ("DELETE", "/v1/versions/3/tensors/layers/0", "GET, HEAD"),
        ("PATCH", "/v1/versions/3", "GET, PUT"),
        ("POST", "/status", "GET, HEAD"),
    ],
)
def test_what_a_resource_does_not_do(site, method, path, allowed):
    status, headers = refused(site, method, path)
    assert (status, headers["Allow"]) == (405, allowed)


def test_a_disk_that_fails_is_a_problem_like_others(site, monkeypatch):
    def fails():
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(site.desk, "listing", fails)
    assert refused(site, "GET", "/v1/versions")[0] == 500


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
        watch = Watch(lambda: desk)
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


def test_who_waits_is_told_of_what_is_there(tmp_path):
    """And not of a version that was there when somebody waited before; nor does he miss one because the index was not whole for a moment."""
    store = SnapshotStore(tmp_path, fsync=False)
    for version in (3, 8):
        store.save(version, StateDictSource(TENSORS))
    desk = Desk(Settings(str(tmp_path)))

    async def go():
        watch = Watch(lambda: desk)
        waiting = asyncio.create_task(watch.newer(8, "whole", 0.01))  # which looks in the background
        assert await waiting is None
        await watch._task
        store.remove(8)
        gone = await watch.newer(3, "whole", 0.01)
        listing, broken = desk.listing, []

        def damaged():
            broken.append(1)
            if len(broken) == 2:  # the first look is his own
                raise ChecksumError("deltas.json is not what was written")
            return listing()

        desk.listing = damaged
        waiting = asyncio.create_task(watch.newer(3, "whole", 3600.0))
        while len(broken) < 2:
            await asyncio.sleep(0.001)
        store.save(9, StateDictSource(TENSORS))
        async with asyncio.timeout(60):
            return gone, await waiting

    try:
        assert asyncio.run(go()) == (None, 9)
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
