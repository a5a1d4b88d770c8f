"""Deltas in a directory and over HTTP: whoever reads, in whatever layout and from whatever version on, holds the newest one bit for bit."""

from __future__ import annotations

import functools
import http.server
import os
import pickle
import shutil
import socket
import threading
from pathlib import Path

import pytest
import torch
from disk_models import bits, filled, is_held, layouts, models, same, shards
from hypothesis import given, settings
from hypothesis import strategies as st
from mortal_files import Mortal
from test_snapshot_crashes import one_thread  # noqa: F401  (a fixture)

from mooncake_ray.errors import (
    ChecksumError,
    ConfigError,
    CorruptBlockError,
    DeltaBaseError,
    PlanError,
    SnapshotError,
    SnapshotNotFoundError,
    StaleVersionError,
    SyncTimeoutError,
    TransportError,
)
from mooncake_ray.weights.delta_log import DeltaLog, DeltaRank
from mooncake_ray.weights.delta_reader import DeltaReader
from mooncake_ray.weights.file_source import HttpDirectory, LocalDirectory
from mooncake_ray.weights.generation import FetchedSnapshot
from mooncake_ray.weights.hf_export import export_hf
from mooncake_ray.weights.placement import Placement
from mooncake_ray.weights.plan import publish_plan
from mooncake_ray.weights.snapshot import SnapshotStore
from mooncake_ray.weights.source import ModuleSource, StateDictSource


def model(version=0):
    """Each version changes some elements of each tensor, the more of them the higher it is."""
    out = {
        "layers.0.w": filled((64, 48), torch.bfloat16, 1),
        "layers.1.w": filled((32, 16), torch.float8_e4m3fn, 2),
        "bias": filled((100,), torch.float32, 3),
    }
    for v in range(1, version + 1):
        for tensor in out.values():
            bits(tensor).view(-1)[v :: 29 + v] += 1
    return out


def halves(tensors):
    out = {}
    for rank in range(2):
        rows = {name: slice(rank * len(t) // 2, (rank + 1) * len(t) // 2) for name, t in tensors.items()}
        boxes = {name: (tuple(t.shape), (rows[name].start, *[0] * (t.dim() - 1))) for name, t in tensors.items()}
        out[f"r{rank}"] = StateDictSource({name: t[rows[name]].clone() for name, t in tensors.items()}, boxes)
    return out


def blank(tensors=None):
    return {name: torch.zeros_like(t) for name, t in (tensors or model()).items()}


def reader_of(place, held, version=None, **options):
    return DeltaReader(place, StateDictSource(held), version=version, **options)


def log_of(directory, versions, *, acknowledge=True, **options):
    log = DeltaLog(directory, fsync=False, **options)
    for version in versions:
        log.append(version, halves(model(version)))
        if acknowledge:
            assert log.acknowledge(version)
    return log


def changed(draw, tensors):
    for tensor in tensors.values():
        if tensor.numel():
            flat = bits(tensor).view(-1)
            for at in draw(st.lists(st.integers(0, len(flat) - 1), max_size=5)):
                if tensor.dtype == torch.bool:
                    flat[at] ^= 1
                else:
                    flat[at] += draw(st.sampled_from([1, -1, 3, 100]))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 2))
def test_everybody_gets_every_version(tmp_path_factory, data, anchor_every, keep):
    tensors = data.draw(models())
    shapes = {name: t.shape for name, t in tensors.items()}
    directory = tmp_path_factory.mktemp("log")
    log = DeltaLog(directory, anchor_every=anchor_every, keep=keep, fsync=False)
    source = data.draw(layouts(shapes, "t"))
    engines = [data.draw(layouts(shapes, f"e{n}/")) for n in range(2)]
    held = [shards(layout, tensors, empty=True) for layout in engines]
    readers = [{rank: DeltaReader(directory, shard, rank=rank) for rank, shard in by_rank.items()} for by_rank in held]
    for version in range(1, data.draw(st.integers(2, 6))):
        changed(data.draw, tensors)
        if data.draw(st.integers(0, 9)) == 0:
            source = data.draw(layouts(shapes, "t"))  # trainers were restarted in another layout
        log.append(version, shards(source, tensors), anchor=data.draw(st.integers(0, 4)) == 0)
        if data.draw(st.booleans()):
            log.acknowledge(version)
        for layout, by_rank, shard_by_rank in zip(engines, readers, held, strict=True):
            if data.draw(st.booleans()):
                for reader in by_rank.values():
                    assert reader.catch_up().version == version
                assert is_held(layout, shard_by_rank, tensors)
        index = log.index()
        assert index.newest == version
        assert index.from_anchor(version) is not None
        assert set(SnapshotStore(directory).versions()) == {a.version for a in index.anchors}
        assert {f.file for s in index.steps for f in s.files} == {f"deltas/{name}" for name in os.listdir(directory / "deltas")}


def test_who_is_behind_gets_one_merged_patch(tmp_path):
    log_of(tmp_path, range(1, 6))
    held = model(1)
    reader = reader_of(tmp_path, held, 1)
    places = [t.data_ptr() for t in held.values()]
    got = reader.catch_up()
    assert (got.version, got.how, got.steps) == (5, "delta", 4)
    assert same(held, model(5))
    assert [t.data_ptr() for t in held.values()] == places
    before, after = model(1), model(5)
    assert got.changed == sum(int((bits(before[n]) != bits(after[n])).sum()) for n in before)  # each once, however often it changed
    assert reader.catch_up().how == "nothing"


def test_only_what_is_wanted_is_read(tmp_path):
    tensors = {f"layers.{n}.w": filled((1024, 128), torch.bfloat16, n) for n in range(8)}
    log = DeltaLog(tmp_path, fsync=False)
    log.append(1, StateDictSource(tensors))
    for tensor in tensors.values():
        bits(tensor).view(-1)[torch.randperm(1 << 17, generator=torch.Generator().manual_seed(0))[:50000]] += 1
    step = log.append(2, StateDictSource(tensors))
    held = {"layers.3.w": filled((1024, 128), torch.bfloat16, 3)}
    got = reader_of(tmp_path, held, 1).catch_up(how="delta")
    assert same(held, {"layers.3.w": tensors["layers.3.w"]})
    assert got.nbytes < step.nbytes / 4


def test_an_anchor_is_taken_where_it_is_smaller(tmp_path):
    log = DeltaLog(tmp_path, fsync=False)
    for version in range(1, 6):
        log.append(version, StateDictSource({"w": filled((64, 64), torch.float32, version)}), anchor=version == 4)  # all of it is new
        log.acknowledge(version)
    held = {"w": filled((64, 64), torch.float32, 1)}
    got = reader_of(tmp_path, held, 1).catch_up()
    assert (got.how, got.version, got.steps) == ("anchor", 5, 1)
    assert same(held, {"w": filled((64, 64), torch.float32, 5)})
    held = {"w": filled((64, 64), torch.float32, 1)}
    assert reader_of(tmp_path, held, 1).catch_up(how="delta").steps == 4
    assert same(held, {"w": filled((64, 64), torch.float32, 5)})


def test_anchors_come_regularly_and_go(tmp_path):
    log = log_of(tmp_path, range(1, 12), anchor_every=3, keep=2)
    index = log.index()
    assert [a.version for a in index.anchors] == [7, 10]
    assert [(s.base, s.version) for s in index.steps] == [(7, 8), (8, 9), (9, 10), (10, 11)]
    assert SnapshotStore(tmp_path).versions() == [7, 10]
    assert SnapshotStore(tmp_path).pins(7) == ["deltas"]
    SnapshotStore(tmp_path, keep=1).clean()  # an anchor that the chain needs is not somebody else's to delete
    held = blank()
    assert reader_of(tmp_path, held).catch_up().version == 11
    assert same(held, model(11))


def test_an_anchor_outlives_its_turn_if_all_else_hangs_on_it(tmp_path):
    """Newer anchors that no acknowledged version leads on from are of no use to who wants the newest."""
    log = log_of(tmp_path, [1], keep=1)
    log.append(2, halves(model(2)), anchor=True)
    log.append(3, halves(model(3)))  # against 1: nobody has acknowledged 2
    assert [a.version for a in log.index().anchors] == [1, 2]
    for start in (None, 1):
        held = model(1) if start else blank()
        assert reader_of(tmp_path, held, start).catch_up().version == 3
        assert same(held, model(3))
    held = model(2)
    got = reader_of(tmp_path, held, 2).catch_up()  # no patch leads from there
    assert got.how == "anchor" and same(held, model(3))


def test_ranks_in_several_processes(tmp_path):
    """What ranks get and give may be pickled."""
    by_rank = halves(model(1))
    log = DeltaLog(tmp_path)
    ranks = {rank: DeltaRank(tmp_path, shard, rank) for rank, shard in by_rank.items()}
    plan = publish_plan(Placement.join([Placement.of(rank, shard.fragments()) for rank, shard in by_rank.items()]))
    for version in (1, 2, 3):
        for rank, shard in halves(model(version)).items():
            for name, tensor in shard.mapping.items():
                bits(by_rank[rank].mapping[name]).copy_(bits(tensor))
        update = log.begin(version, plan)
        written = [pickle.loads(pickle.dumps(r.write(pickle.loads(pickle.dumps(update))))) for r in ranks.values()]
        if version > 1:
            with pytest.raises(SnapshotError, match=r"version . lacks the patches of ranks 1: r0"):
                log.commit(update, written[1:])
        log.commit(update, written)
        log.acknowledge(version)
    held = blank()
    reader_of(tmp_path, held).catch_up()
    assert same(held, model(3))
    ranks["r1"] = DeltaRank(tmp_path, by_rank["r1"], "r1")  # was restarted
    update = log.begin(4, plan)
    ranks["r0"].write(update)
    with pytest.raises(DeltaBaseError, match="r1 should write what changed since version 3, and has none"):
        ranks["r1"].write(update)
    log.reset()
    update = log.begin(4, plan)
    assert log.commit(update, [r.write(update) for r in ranks.values()]) is None
    assert log.index().anchors[-1].version == 4


def test_a_restarted_trainer_begins_with_an_anchor(tmp_path):
    log_of(tmp_path, [1, 2])
    again = DeltaLog(tmp_path, fsync=False)
    with pytest.raises(StaleVersionError, match=r"version 2 .* write 2"):
        again.append(2, halves(model(2)))
    assert again.append(3, halves(model(3))) is None
    held = model(2)
    assert reader_of(tmp_path, held, 2).catch_up().how == "anchor"
    assert same(held, model(3))


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("at", [9, 70, -1, -40])
@pytest.mark.parametrize("start", [1, 2])
def test_a_damaged_patch_changes_nothing(tmp_path, at, start):
    """Of two ranks' patches the second one is damaged: what the first one changes is not changed either."""
    log_of(tmp_path, [1, 2, 3])
    flip(sorted(tmp_path.glob("deltas/00000002-*-00001-of-*"))[0], at)
    held = model(start)
    reader = reader_of(tmp_path, held, start)
    with pytest.raises(ChecksumError):
        reader.catch_up()
    assert same(held, model(start))
    assert reader.version == start
    with pytest.raises(ChecksumError):
        reader.catch_up(how="anchor")  # version 3 is only there as that patch
    flip(tmp_path / "version-00000001" / "part-00001-of-00002.safetensors", -1)
    with pytest.raises(ChecksumError):
        reader.catch_up(how="anchor")
    assert same(held, model(start)) and reader.version == start


def test_weights_that_are_not_the_base_are_left_as_they_are(tmp_path):
    log = log_of(tmp_path, [1, 2])
    assert len(log.index().steps[0].files) == 2
    held = model(1)
    reader = reader_of(tmp_path, held, 1)
    at = int((bits(held["bias"]) != bits(model(2)["bias"])).nonzero()[-1])  # in the second rank's part, and changes
    assert at >= 50
    bits(held["bias"])[at] += 1
    before = {name: t.clone() for name, t in held.items()}
    with pytest.raises(DeltaBaseError, match="does not hold version 1"):
        reader.catch_up(how="delta")
    assert same(held, before)  # what the first rank's patch had changed, too
    assert reader.version == 1
    assert reader.catch_up(how="anchor").version == 2
    assert same(held, model(2))


def test_what_there_is_not(tmp_path):
    held = blank()
    with pytest.raises(SnapshotNotFoundError, match="there is no version"):
        reader_of(tmp_path, held).catch_up()
    log_of(tmp_path, [1, 2])
    with pytest.raises(DeltaBaseError, match="lead from nothing to 2: there are 1: 1 to 2"):
        reader_of(tmp_path, held).catch_up(how="delta")
    with pytest.raises(StaleVersionError, match=r"holds version 3; the newest .* is 2"):
        reader_of(tmp_path, held, 3).catch_up()
    with pytest.raises(ConfigError, match="how must be"):
        reader_of(tmp_path, held).catch_up(how="no")
    with pytest.raises(PlanError, match="1: x"):
        reader_of(tmp_path, {"x": torch.zeros(2)}, 1).catch_up(how="delta")
    with pytest.raises(ConfigError, match="anchor_every"):
        DeltaLog(tmp_path, anchor_every=0)
    flip(tmp_path / "deltas.json", 100)
    with pytest.raises(ChecksumError, match=r"deltas\.json is damaged"):
        reader_of(tmp_path, held).catch_up()


@pytest.mark.usefixtures("one_thread")
def test_a_writer_killed_at_every_step(tmp_path):
    """Readers get the version before, or the new one; and the next writer goes on."""
    for anchor in (False, True):
        n = 0
        while True:
            directory = tmp_path / f"{anchor}-{n}"
            log = DeltaLog(directory, keep=1, fsync=False)
            log.append(1, halves(model(1)))
            log.append(2, halves(model(2)))
            log.acknowledge(2)
            child = os.fork()
            if not child:
                try:
                    log._files = log._anchors._files = Mortal(n)
                    for rank in log._ranks.values():
                        rank._files = log._files
                    log.append(3, halves(model(3)), anchor=anchor)
                    os._exit(0)
                except BaseException:
                    os._exit(1)
            _, status = os.waitpid(child, 0)
            done = not os.WIFSIGNALED(status)
            assert not done or os.waitstatus_to_exitcode(status) == 0
            version = DeltaLog(directory).index().newest
            assert version in (2, 3)
            for start in (None, 2):
                held = model(2) if start else blank()
                assert reader_of(directory, held, start).catch_up().version == version
                assert same(held, model(version))
            again = DeltaLog(directory, keep=1, fsync=False)
            again.append(version + 1, halves(model(version + 1)))
            held = blank()
            reader_of(directory, held).catch_up()
            assert same(held, model(version + 1))
            assert SnapshotStore(directory).versions() == [version + 1]
            assert not list(directory.glob("writing-*")) and not list(directory.glob("deltas/*"))
            shutil.rmtree(directory)
            if done:
                break
            n += 1
        assert n > 10


def test_readers_while_versions_come_and_go(tmp_path):
    """What is read may be deleted just then; whoever reads gets a newer one, whole."""
    log = log_of(tmp_path, [1], anchor_every=2, keep=1)
    errors, done = [], threading.Event()

    def read(how):
        held = blank()
        reader = reader_of(tmp_path, held)
        try:
            while not done.is_set() or reader.version != 30:
                version = reader.catch_up(how=how if reader.version else "auto").version
                assert same(held, model(version))
        except Exception as e:
            errors.append(e)

    readers = [threading.Thread(target=read, args=(how,)) for how in ("auto", "anchor", "auto")]
    for reader in readers:
        reader.start()
    try:
        for version in range(2, 31):
            log.append(version, halves(model(version)))
            log.acknowledge(version)
    finally:
        done.set()
        for reader in readers:
            reader.join()
    assert not errors


def test_what_is_deleted_while_it_is_read_is_not_missed(tmp_path, monkeypatch):
    """Who has read an index whose files are gone by now reads the next one."""
    from mooncake_ray.weights.delta_index import Index

    log = log_of(tmp_path, [1, 2], keep=1)
    old = log.index()
    log.append(3, halves(model(3)), anchor=True)
    log.acknowledge(3)
    log.append(4, halves(model(4)), anchor=True)
    assert [a.version for a in log.index().anchors] == [3, 4]
    for start in (None, 1):
        indices = [old]
        held = model(1) if start else blank()
        with monkeypatch.context() as patch:
            patch.setattr(Index, "of", lambda directory, of=Index.of, indices=indices: indices.pop() if indices else of(directory))
            got = reader_of(tmp_path, held, start).catch_up()
        assert (got.version, got.how) == (4, "anchor")
        assert same(held, model(4))


def test_an_update_that_failed_leaves_what_was_acknowledged(tmp_path):
    """Ranks do not have a version any more once they have written the next, so it cannot be the base of patches."""
    log = log_of(tmp_path, [1])
    log.append(2, halves(model(2)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeltaLog, "commit", lambda self, update, written: (_ for _ in ()).throw(SnapshotError("no")))
        with pytest.raises(SnapshotError):
            log.append(3, halves(model(3)))
    assert not log.acknowledge(2)
    step = log.append(3, halves(model(3)))
    assert (step.base, step.version) == (1, 3)
    held = model(1)
    assert reader_of(tmp_path, held, 1).catch_up(how="delta").version == 3
    assert same(held, model(3))


def test_of_two_writers_one_is_late(tmp_path):
    a, b = log_of(tmp_path, [1]), DeltaLog(tmp_path, fsync=False)
    plan = publish_plan(Placement.of("rank", StateDictSource(model()).fragments()))
    late = b.begin(2, plan)
    patch = DeltaRank(tmp_path, StateDictSource(model(2)), "rank").write(late)
    a.append(2, halves(model(2)))
    with pytest.raises(StaleVersionError, match=r"version 2 .* write 2"):
        b.commit(late, [patch])
    held = blank()
    reader_of(tmp_path, held).catch_up()
    assert same(held, model(2))


def test_tied_weights_change_once(tmp_path):
    """What two names have in common is one place for who ties them, and two for who does not."""

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight

    trained, engine = Tied(), Tied()
    untied = {name: torch.zeros(10, 4) for name in ("embed.weight", "head.weight")}
    log = DeltaLog(tmp_path, fsync=False)
    readers = [DeltaReader(tmp_path, ModuleSource(engine)), reader_of(tmp_path, untied)]
    for version, how in ((1, "anchor"), (2, "delta")):
        with torch.no_grad():
            trained.embed.weight[3] += version
        log.append(version, ModuleSource(trained))
        assert [reader.catch_up().how for reader in readers] == [how, how]
        for held in (dict(engine.state_dict()), untied):
            assert same(held, {name: trained.embed.weight.detach() for name in untied})


# ---- HTTP


class Plain(http.server.SimpleHTTPRequestHandler):
    """As `python -m http.server`, which knows no ranges."""

    seen: list

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.seen.append((self.path, self.headers.get("Range")))
        super().do_GET()


class Ranges(Plain):
    """A server that does."""

    def do_GET(self):
        wanted = self.headers.get("Range")
        if not wanted or not Path(self.translate_path(self.path)).is_file():
            return super().do_GET()
        self.seen.append((self.path, wanted))
        data = Path(self.translate_path(self.path)).read_bytes()
        first, last = wanted.removeprefix("bytes=").split("-")
        part = data[int(first) : int(last or len(data)) + 1]
        self.send_response(206 if part else 416)
        self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)
        return None


class Flaky(Ranges):
    """Of six answers one is an error, and one ends before its end."""

    def do_GET(self):
        n = len(self.seen)
        if n % 6 == 0:
            self.seen.append((self.path, None))
            return self.send_error(503)
        if n % 6 == 3:
            self.seen.append((self.path, None))
            self.send_response(200)
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            self.wfile.write(b"some")
            return None
        return super().do_GET()


@pytest.fixture
def served(tmp_path):
    """Serves tmp_path by a handler: (its URL, requests seen)."""
    servers = []

    def serve(handler):
        seen = []
        kind = type("Handler", (handler,), {"seen": seen})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(kind, directory=str(tmp_path)))
        server.daemon_threads = False
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_address[1]}", seen

    yield serve
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("handler", [Plain, Ranges, Flaky])
def test_the_same_files_over_http(tmp_path, served, handler):
    log = log_of(tmp_path, [1, 2])
    url, seen = served(handler)
    held, part = blank(), {"layers.0.w": torch.zeros(64, 10, dtype=torch.bfloat16)}
    readers = [reader_of(url, held), DeltaReader(url + "/", StateDictSource(part, {"layers.0.w": ((64, 48), (0, 20))}))]
    for version in (2, 3, 5):
        for v in range(log.index().newest + 1, version + 1):
            log.append(v, halves(model(v)))
            log.acknowledge(v)
        for reader in readers:
            got = reader.catch_up()
            assert (got.version, got.how) == (version, "anchor" if version == 2 else "delta")
        assert same(held, model(version))
        assert same(part, {"layers.0.w": model(version)["layers.0.w"][:, 20:30]})
    assert any(wanted for _, wanted in seen)


def test_an_http_server_that_has_not_got_it(tmp_path, served):
    url, _ = served(Ranges)
    with pytest.raises(SnapshotNotFoundError, match=r"there is no http://.*/no"):
        HttpDirectory(url).read("no")
    (tmp_path / "short").write_bytes(b"12345")
    directory = HttpDirectory(url)
    assert directory.read("short", 2, 4) == b"34"
    assert directory.read("short", 2) == b"345"
    assert directory.read("short", 2, 2) == b""
    for begin, end in ((3, 9), (7, 9)):
        with pytest.raises(CorruptBlockError, match="ends"):
            directory.read("short", begin, end)
        with pytest.raises(CorruptBlockError, match="ends"):
            LocalDirectory(tmp_path).read("short", begin, end)
    with pytest.raises(ConfigError, match="not an HTTP URL"):
        HttpDirectory("ftp://x")
    with pytest.raises(ConfigError, match="timeout_s"):
        HttpDirectory(url, timeout_s=0)


def test_an_http_server_that_refuses(served):
    class Refuses(Plain):
        def do_GET(self):
            self.send_error(403)

    url, _ = served(Refuses)
    with pytest.raises(TransportError, match="403") as found:
        HttpDirectory(url).read("x")
    assert (found.value.op, found.value.peer) == ("GET", url.removeprefix("http://"))


def test_an_http_server_that_does_not_answer(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(SyncTimeoutError, match=r"deltas\.json: not read within 0\.2 s"):
            reader_of(url, blank(), timeout_s=0.2).catch_up()
    with pytest.raises(SyncTimeoutError):  # nor is there one at all
        reader_of(url, blank(), timeout_s=0.2).catch_up()


def test_a_snapshot_over_http_exports_and_verifies(tmp_path, served):
    SnapshotStore(tmp_path).save(3, halves(model(3)))
    url, _ = served(Plain)
    import safetensors.torch

    stored = FetchedSnapshot(HttpDirectory(url), 3)
    stored.verify()
    (file,) = export_hf(stored, tmp_path / "hf")
    assert same(safetensors.torch.load_file(file), model(3))
    flip(tmp_path / "version-00000003" / "part-00001-of-00002.safetensors", -1)
    held = blank()
    with pytest.raises(ChecksumError, match=r"http://.*part-00001-of-00002\.safetensors"):
        FetchedSnapshot(HttpDirectory(url), 3).load_into(StateDictSource(held))
    assert same(held, blank())


# ---- bugs that others had


def test_skyrl_1902_a_pruned_chain_is_refused(tmp_path):
    """Resuming from a version whose patches were deleted put later patches on top of it, and the weights were garbage."""
    log_of(tmp_path, range(1, 9), anchor_every=3, keep=1)
    held = model(2)
    reader = reader_of(tmp_path, held, 2)
    with pytest.raises(DeltaBaseError, match=r"no patches in .* lead from version 2 to 8"):
        reader.catch_up(how="delta")
    assert same(held, model(2)) and reader.version == 2
    got = reader.catch_up()  # says what it does instead, and is right
    assert got.how == "anchor"
    assert same(held, model(8))


def test_skyrl_1902_files_that_are_gone_are_told(tmp_path):
    """The chain is named, but somebody has deleted a file of it."""
    log_of(tmp_path, range(1, 5))
    next(iter(tmp_path.glob("deltas/00000002-*-00000-of-*"))).unlink()
    held = model(1)
    with pytest.raises(SnapshotNotFoundError, match=r"there is no .*00000002-00000003"):
        reader_of(tmp_path, held, 1).catch_up()
    assert same(held, model(1))


def test_slime_2104_a_patch_that_failed_does_not_advance_the_baseline(tmp_path):
    """A receiver that could not apply a version, while the sender went on from it, was wrong from then on. Here the next patch is against what
    was acknowledged, so the receiver just gets it."""
    log = log_of(tmp_path, [1])
    held = model(1)
    reader = reader_of(tmp_path, held, 1)
    log.append(2, halves(model(2)))
    file = sorted(tmp_path.glob("deltas/*-00000-of-*"))[0]
    good = file.read_bytes()
    flip(file, -1)
    with pytest.raises(ChecksumError):
        reader.catch_up(how="delta")
    assert log.baseline == 1  # nobody has acknowledged 2
    step = log.append(3, halves(model(3)))
    assert (step.base, step.version) == (1, 3)
    assert not log.acknowledge(2)  # too late: patches are not against what the ranks do not have any more
    got = reader.catch_up(how="delta")
    assert (got.version, got.steps) == (3, 1)
    assert same(held, model(3))
    assert log.acknowledge(3) and log.append(4, halves(model(4))).base == 3
    file.write_bytes(good)
