"""Snapshots on disk: any layout in, any layout out, bit for bit; and what stays, what goes, what is refused."""

from __future__ import annotations

import errno
import json
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from disk_models import filled, is_held, layouts, models, same, shards
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_ray.errors import (
    ChecksumError,
    ConfigError,
    CorruptBlockError,
    PlanError,
    SnapshotError,
    SnapshotNotFoundError,
    StaleVersionError,
)
from mooncake_ray.weights import manifest
from mooncake_ray.weights.hf_export import export_hf
from mooncake_ray.weights.meta import ITEMSIZE
from mooncake_ray.weights.placement import Placement
from mooncake_ray.weights.plan import publish_plan
from mooncake_ray.weights.shard import Shard
from mooncake_ray.weights.snapshot import SnapshotSource, SnapshotStore
from mooncake_ray.weights.source import ModuleSource, StateDictSource


def model(seed=0):
    return {
        "embed.weight": filled((40, 8), torch.bfloat16, seed),
        "layers.0.w": filled((16, 8), torch.float32, seed + 1),
        "layers.1.w": filled((8, 8), torch.float8_e4m3fn, seed + 2),
        "scale": filled((), torch.float32, seed + 3),
    }


def halves(tensors):
    """Two ranks: each tensor of several rows by rows, the others by both."""
    out = {}
    for rank in range(2):
        held, boxes = {}, {}
        for name, t in tensors.items():
            rows = slice(rank * len(t) // 2, (rank + 1) * len(t) // 2) if t.dim() else ()
            held[name] = t[rows].clone()
            boxes[name] = (tuple(t.shape), (rows.start, *[0] * (t.dim() - 1)) if t.dim() else ())
        out[f"r{rank}"] = StateDictSource(held, boxes)
    return out


def plan_of(by_rank):
    return publish_plan(Placement.join([Placement.of(rank, shard.fragments()) for rank, shard in by_rank.items()]))


def whole(store, version=None):
    """All tensors of a version."""
    with store.open(version) as snapshot:
        out = {m.name: torch.zeros(m.shape, dtype=getattr(torch, m.dtype)) for m in snapshot.manifest.metas}
        snapshot.load_into(StateDictSource(out), ignore=())
    return out


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(["full", "read"]))
def test_any_layout_comes_back_in_any_other(tmp_path_factory, data, verify):
    tensors = data.draw(models())
    shapes = {name: t.shape for name, t in tensors.items()}
    source, target = data.draw(layouts(shapes, "t")), data.draw(layouts(shapes, "e"))
    store = SnapshotStore(tmp_path_factory.mktemp("store"), fsync=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "BLOCK_BYTES", data.draw(st.sampled_from([16, 4 << 20])))
        patch.setattr("mooncake_ray.weights.draft.BLOCK_BYTES", manifest.BLOCK_BYTES)
        store.save(3, shards(source, tensors))
        restored = shards(target, tensors, empty=True)
        with store.open() as snapshot:
            snapshot.verify()
            stored = sum(len(snapshot._maps[p.file]) for p in snapshot.manifest.parts)
            assert sum(t.nbytes for t in tensors.values()) <= stored
            for rank, shard in restored.items():
                got = snapshot.load_into(shard, rank=rank, verify=verify)
                assert set(got.digests) == {f.meta.name for f in shard.fragments() if 0 not in shard.mapping[f.buffer].shape}
    assert is_held(target, restored, tensors)


def test_each_region_is_written_once_and_shared_out(tmp_path):
    tensors = {f"layers.{n}.w": filled((64, 64), torch.float32, n) for n in range(8)}
    store = SnapshotStore(tmp_path)
    store.save(1, {f"r{n}": StateDictSource(tensors) for n in range(4)})
    with store.open() as snapshot:
        sizes = [p.nbytes for p in snapshot.manifest.parts]
        total = sum(t.nbytes for t in tensors.values())
        assert total < sum(sizes) < total + 4 * 4096
        assert max(sizes) < 1.1 * min(sizes)


def test_safetensors_own_loader_reads_it(tmp_path):
    import safetensors.torch

    tensors = model() | {f"d{n}": filled((3, 2), d, n) for n, d in enumerate([torch.bool, torch.int8, torch.int64, torch.uint16])}
    store = SnapshotStore(tmp_path)
    store.save(7, halves(tensors))
    loaded = [safetensors.torch.load_file(f) for f in sorted(tmp_path.glob("version-00000007/*.safetensors"))]
    assert len(loaded) == 2
    assert same({"embed.weight[0:20,0:8]": loaded[0]["embed.weight[0:20,0:8]"]}, {"embed.weight[0:20,0:8]": tensors["embed.weight"][:20]})
    joined = {
        name: torch.cat([part[key] for part in loaded for key in part if key.split("[")[0] == name])
        for name, t in tensors.items()
        if t.dim()
    }
    assert same(joined, {name: t for name, t in tensors.items() if t.dim()})


def test_every_dtype(tmp_path):
    from safetensors import safe_open

    tensors = {name: filled((6, 8), getattr(torch, name), n) for n, name in enumerate(ITEMSIZE)}
    store = SnapshotStore(tmp_path)
    store.save(1, StateDictSource(tensors))
    with safe_open(tmp_path / "version-00000001" / "part-00000-of-00001.safetensors", "pt") as file:
        assert same({key: file.get_tensor(key) for key in file.keys()}, tensors)  # noqa: SIM118  (it is no mapping)
    restored = {name: filled((6, 8), t.dtype, 99) for name, t in tensors.items()}
    with store.open() as snapshot:
        snapshot.load_into(StateDictSource(restored))
    assert same(restored, tensors)


def test_it_is_written_from_where_it_lies(tmp_path, monkeypatch):
    """A packed shard is not copied: what is given to the disk is its own memory."""
    from mooncake_ray.weights.files import Files

    tensors, seen = {"w": filled((256, 4), torch.float32, 0)}, []
    monkeypatch.setattr(
        Files, "write", lambda self, file, data, write=Files.write: (seen.append(_address(data)), write(self, file, data))[1]
    )
    SnapshotStore(tmp_path).save(1, StateDictSource(tensors))
    assert tensors["w"].data_ptr() in seen


def _address(data):
    import numpy as np

    return np.frombuffer(data, np.uint8).ctypes.data


def test_several_processes_write_one_version(tmp_path):
    program = """
import pickle, sys
from test_snapshots import halves, model
draft, rank = pickle.load(sys.stdin.buffer)
draft.save(halves(model())[rank], rank=rank)
"""
    tensors = model()
    by_rank = halves(tensors)
    store = SnapshotStore(tmp_path)
    draft = store.begin(5, plan_of(by_rank))
    with pytest.raises(SnapshotError, match="lacks the parts of ranks 2: r0, r1"):
        store.commit(draft)

    def save(rank):
        run = [sys.executable, "-c", program]
        subprocess.run(run, input=pickle.dumps((draft, rank)), check=True, timeout=120, cwd=Path(__file__).parent)

    save("r0")
    with pytest.raises(SnapshotError, match="lacks the parts of ranks 1: r1"):
        store.commit(draft)
    assert store.latest() is None
    save("r1")
    store.commit(draft)
    assert same(whole(store), tensors)
    with pytest.raises(SnapshotError, match="is committed"):
        draft.save(by_rank["r0"], rank="r0")


def test_ranks_without_a_driver_agree_on_the_attempt(tmp_path):
    tensors = model()
    by_rank = halves(tensors)
    plan = plan_of(by_rank)
    drafts = {rank: SnapshotStore(tmp_path).begin(5, plan, attempt="epoch-3") for rank in by_rank}
    for rank, draft in drafts.items():
        draft.save(by_rank[rank], rank=rank)
    SnapshotStore(tmp_path).commit(drafts["r1"])
    assert same(whole(SnapshotStore(tmp_path)), tensors)


def test_a_part_that_is_being_written_again_is_not_taken(tmp_path, monkeypatch):
    """The save that died in between leaves a file that looks right, and nothing that says so."""
    from mooncake_ray.weights.files import Files

    draft = SnapshotStore(tmp_path).begin(1, plan_of({"rank": StateDictSource(model(1))}))
    draft.save(StateDictSource(model(1)), rank="rank")

    def died(self, path, parts):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Files, "put", died)
        with pytest.raises(KeyboardInterrupt):
            draft.save(StateDictSource(model(2)), rank="rank")
    with pytest.raises(SnapshotError, match="lacks the parts"):
        draft.commit()
    draft.save(StateDictSource(model(2)), rank="rank")
    SnapshotStore(tmp_path).commit(draft)
    assert same(whole(SnapshotStore(tmp_path)), model(2))


@pytest.mark.parametrize("why", [errno.EROFS, errno.EACCES])
def test_a_disk_for_reading_only(tmp_path, monkeypatch, why):
    """Whoever may not write there may read, and what is read stays."""
    store = SnapshotStore(tmp_path, keep=1)
    store.save(1, StateDictSource(model(1)))

    def refusing(path, flags, *more, opened=os.open):
        if flags & os.O_RDWR:
            raise OSError(why, os.strerror(why), str(path))
        return opened(path, flags, *more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refusing)
        reader = store.open()
    reader.verify()
    store.save(2, StateDictSource(model(2)))
    assert store.versions() == [1, 2]


def test_parts_of_another_try_are_not_taken(tmp_path):
    by_rank = halves(model(1))
    first = SnapshotStore(tmp_path).begin(5, plan_of(by_rank))
    first.save(by_rank["r0"], rank="r0")
    newer = halves(model(2))
    second = SnapshotStore(tmp_path).begin(5, plan_of(newer))
    second.save(newer["r1"], rank="r1")
    with pytest.raises(SnapshotError, match="r0"):
        SnapshotStore(tmp_path).commit(second)


def test_versions_only_grow(tmp_path):
    store = SnapshotStore(tmp_path)
    store.save(5, StateDictSource(model()))
    plan = plan_of({"rank": StateDictSource(model())})
    for version in (5, 4):
        with pytest.raises(StaleVersionError, match=f"version 5 .* write {version}"):
            store.begin(version, plan)
    a, b = store.begin(6, plan), store.begin(6, plan)
    for draft in (a, b):
        draft.save(StateDictSource(model()), rank="rank")
    a.commit()
    with pytest.raises(StaleVersionError):
        b.commit()


def test_what_is_open_or_pinned_stays(tmp_path):
    store = SnapshotStore(tmp_path, keep=1)
    store.save(1, StateDictSource(model(1)))
    store.pin(1, "anchor")
    store.save(2, StateDictSource(model(2)))
    reader = store.open()
    store.save(3, StateDictSource(model(3)))
    store.save(4, StateDictSource(model(4)))
    assert store.versions() == [1, 2, 4]
    assert store.pins(1) == ["anchor"]
    out = {name: torch.zeros_like(t) for name, t in model().items()}
    reader.load_into(StateDictSource(out))
    assert same(out, model(2))
    reader.close()
    store.unpin(1, "anchor")
    assert store.clean() == [1, 2]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["version-00000004"]
    assert same(whole(store), model(4))


def test_a_pin_that_comes_just_then(tmp_path, monkeypatch):
    store = SnapshotStore(tmp_path)
    store.save(1, StateDictSource(model(1)))
    answers = [[]]
    with monkeypatch.context() as patch:
        pins = SnapshotStore.pins
        patch.setattr(SnapshotStore, "pins", lambda self, version: answers.pop() if answers else pins(self, version))
        store.pin(1, "just-now")
        assert not store.remove(1)
    assert same(whole(store), model(1))


def test_a_reader_in_another_process_keeps_what_it_reads(tmp_path):
    program = f"""
import sys
from mooncake_ray.weights.snapshot import SnapshotStore
snapshot = SnapshotStore({str(tmp_path)!r}).open()
print("open", flush=True)
sys.stdin.readline()
snapshot.verify()
print(snapshot.version, flush=True)
"""
    store = SnapshotStore(tmp_path, keep=1)
    store.save(1, StateDictSource(model(1)))
    reader = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert reader.stdout.readline() == "open\n"
        store.save(2, StateDictSource(model(2)))
        assert store.versions() == [1, 2]
        assert reader.communicate("\n", timeout=120)[0] == "1\n"
    finally:
        reader.kill()
        reader.wait()
    assert store.clean() == [1]


def test_what_a_dead_writer_left_goes(tmp_path):
    store = SnapshotStore(tmp_path)
    by_rank = halves(model())
    alive = store.begin(1, plan_of(by_rank))
    dead = store.begin(1, plan_of(by_rank))
    alive.save(by_rank["r0"], rank="r0")
    dead.save(by_rank["r0"], rank="r0")
    dead.close()
    (tmp_path / "deleting-00000000-abc").mkdir()
    assert store.clean() == []
    assert [p.name for p in tmp_path.iterdir()] == [alive.path.name]
    alive.abandon()
    assert list(tmp_path.iterdir()) == []


def test_readers_and_writers_at_once(tmp_path):
    """Who opens the newest while others are written and deleted always gets a whole one."""
    store, errors, done = SnapshotStore(tmp_path, keep=1, fsync=False), [], threading.Event()
    store.save(0, StateDictSource(model(0)))

    def read():
        last = 0
        try:
            while not done.is_set():
                with SnapshotStore(tmp_path).open() as snapshot:
                    snapshot.verify()
                    assert snapshot.version >= last
                    last = snapshot.version
        except Exception as e:
            errors.append(e)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    try:
        for version in range(1, 40):
            store.save(version, StateDictSource(model(version)))
    finally:
        done.set()
        for reader in readers:
            reader.join()
    assert not errors


def damaged(tmp_path, change):
    """A store whose newest version had a file changed."""
    store = SnapshotStore(tmp_path)
    store.save(1, halves(model(1)))
    store.save(2, halves(model(2)))
    change(tmp_path / "version-00000002")
    return store


def _flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def test_damage_is_found_before_anything_is_written(tmp_path):
    store = damaged(tmp_path, lambda d: _flip(d / "part-00001-of-00002.safetensors", -1))  # in layers.1.w
    out = {name: torch.zeros_like(t) for name, t in model().items()}
    with store.open() as snapshot:
        with pytest.raises(ChecksumError, match=r"version 2: .*part-00001-of-00002.safetensors .* 1: layers.1.w"):
            snapshot.load_into(StateDictSource(out))
        assert same(out, {name: torch.zeros_like(t) for name, t in model().items()})
        with pytest.raises(ChecksumError, match=r"layers\.1\.w"):
            snapshot.verify()
        with pytest.raises(ChecksumError, match=r"layers\.1\.w"):
            export_hf(snapshot, tmp_path / "hf")
        part = {"layers.1.w": torch.zeros(8, 3, dtype=torch.float8_e4m3fn)}
        boxes = {"layers.1.w": ((8, 8), (0, 0))}
        with pytest.raises(ChecksumError, match=r"layers\.1\.w"):
            snapshot.load_into(StateDictSource(part, boxes))  # the last byte is not in it, but in its block
        assert snapshot.load_into(StateDictSource(part, boxes), verify="read").unverified == ("layers.1.w",)
        part = {"layers.1.w": torch.zeros(4, 8, dtype=torch.float8_e4m3fn)}
        snapshot.load_into(StateDictSource(part, {"layers.1.w": ((8, 8), (0, 0))}))  # is of the other file
    assert same(whole(store, 1), model(1))


def test_parts_that_are_read_add_up(tmp_path):
    """What several ranks got with "read" can be compared by adding."""
    store = SnapshotStore(tmp_path)
    store.save(1, halves(model()))
    with store.open() as snapshot:
        total = 0
        for column in range(4):
            part = {"embed.weight": torch.zeros(40, 2, dtype=torch.bfloat16)}
            got = snapshot.load_into(StateDictSource(part, {"embed.weight": ((40, 8), (0, 2 * column))}), verify="read")
            assert got.unverified == ("embed.weight",)
            total += got.digests["embed.weight"]
        assert total % 2**64 == snapshot.manifest.digests()["embed.weight"]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda d: _flip(d / "manifest.json", 200), ChecksumError, "SHA-256"),
        (lambda d: (d / "manifest.json").write_bytes((d / "manifest.json").read_bytes()[:-7]), ChecksumError, "SHA-256"),
        (lambda d: (d / "manifest.json").write_bytes(b""), CorruptBlockError, "has 0 bytes"),
        (lambda d: (d / "manifest.json").unlink(), CorruptBlockError, "gone"),
        (lambda d: (d / "part-00000-of-00002.safetensors").unlink(), CorruptBlockError, "part-00000-of-00002.safetensors is gone"),
        (lambda d: (d / "part-00000-of-00002.safetensors").write_bytes(b"x"), CorruptBlockError, "has 1 bytes of"),
    ],
)
def test_damaged_files_are_told(tmp_path, change, error, message):
    store = damaged(tmp_path, change)
    with pytest.raises(error, match=message):
        store.open()
    assert same(whole(store, 1), model(1))


def test_nothing_there(tmp_path):
    store = SnapshotStore(tmp_path / "no")
    assert store.latest() is None
    with pytest.raises(SnapshotNotFoundError, match="there is none"):
        store.open()
    with pytest.raises(FileNotFoundError):
        SnapshotSource(tmp_path / "no")
    assert not (tmp_path / "no").exists()
    store.save(3, StateDictSource(model()))
    with pytest.raises(SnapshotNotFoundError, match=r"version 4 .* there is 3"):
        store.open(4)


def test_bad_arguments(tmp_path):
    with pytest.raises(ConfigError, match="keep"):
        SnapshotStore(tmp_path, keep=0)
    store = SnapshotStore(tmp_path)
    by_rank = halves(model())
    with pytest.raises(ConfigError, match="attempt"):
        store.begin(1, plan_of(by_rank), attempt="../x")
    with pytest.raises(ConfigError, match="negative"):
        store.begin(-1, plan_of(by_rank))
    draft = store.begin(1, plan_of(by_rank))
    with pytest.raises(PlanError, match="r7 is not a rank"):
        draft.save(by_rank["r0"], rank="r7")
    with pytest.raises(PlanError, match="r0 should write what it has not got, of tensors"):
        draft.save(by_rank["r1"], rank="r0")
    store.save(1, by_rank)
    with store.open() as snapshot:
        with pytest.raises(ConfigError, match="verify"):
            snapshot.load_into(by_rank["r0"], verify="no")
        with pytest.raises(PlanError, match="x"):
            snapshot.load_into(StateDictSource({"x": torch.zeros(2)}))
        with pytest.raises(PlanError, match="no rank of the target wants"):
            snapshot.load_into(StateDictSource({"scale": torch.zeros(())}), ignore=())
    with pytest.raises(ConfigError, match="pin"):
        store.pin(1, "a/b")
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        SnapshotSource(tmp_path, rank=2, world=2)


def test_a_snapshot_is_a_source_of_several_ranks(tmp_path):
    tensors = model()
    SnapshotStore(tmp_path).save(4, halves(tensors), extra={"step": 17})
    sources = {f"s{n}": SnapshotSource(tmp_path, rank=n, world=3) for n in range(3)}
    assert all(isinstance(s, Shard) and s.version == 4 for s in sources.values())
    assert sources["s0"].snapshot.manifest.extra == {"step": 17}
    again = SnapshotStore(tmp_path / "again")
    again.save(5, sources)
    assert same(whole(again), tensors)
    sources["s0"].buffers()["part-00000-of-00002.safetensors:float32"].zero_()  # its own: no file changes
    assert same(whole(SnapshotStore(tmp_path)), tensors)


def test_no_room_on_the_disk(tmp_path, monkeypatch):
    """An error of the disk is told as it is, and leaves nothing behind."""
    from mooncake_ray.weights.files import Files

    store = SnapshotStore(tmp_path)
    store.save(1, StateDictSource(model(1)))

    def full(self, file, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Files, "write", full)
        with pytest.raises(OSError, match="No space"):
            store.save(2, StateDictSource(model(2)))
    assert [p.name for p in tmp_path.iterdir()] == ["version-00000001"]


def test_transformers_loads_an_export(tmp_path, monkeypatch):
    import tqdm
    import transformers

    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # no thread that watches a progress bar
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8
    )
    torch.manual_seed(0)
    made = transformers.Qwen3ForCausalLM(config).eval()
    for parameter in made.parameters():
        parameter.data = parameter.data.bfloat16()  # and not what it computes angles with
    store = SnapshotStore(tmp_path / "store")
    store.save(1, halves({name: t.detach() for name, t in made.state_dict().items()}))
    tokens = torch.arange(12)[None]
    for limit, most in ((5 << 30, 1), (8192, 99)):
        out = tmp_path / f"hf{most}"
        with store.open() as snapshot:
            files = export_hf(snapshot, out, limit)
            with pytest.raises(ConfigError, match="has weights already"):
                export_hf(snapshot, out, limit)
        assert (len(files) == 1) == (most == 1)
        if most > 1:
            index = json.loads((out / "model.safetensors.index.json").read_text())
            assert set(index["weight_map"]) == set(made.state_dict())
            assert set(index["weight_map"].values()) == {f.name for f in files}
        config.save_pretrained(out)
        loaded, info = transformers.Qwen3ForCausalLM.from_pretrained(out, dtype=torch.bfloat16, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert same(dict(loaded.state_dict()), dict(made.state_dict()))
        assert torch.equal(loaded.eval()(tokens).logits, made(tokens).logits)


def test_a_module_restores_in_place(tmp_path):
    torch.manual_seed(0)
    trained, fresh = (torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16)) for _ in range(2))
    places = [p.data_ptr() for p in fresh.parameters()]
    store = SnapshotStore(tmp_path)
    store.save(1, ModuleSource(trained))
    with store.open() as snapshot:
        assert snapshot.load_into(ModuleSource(fresh)).unverified == ()
    assert same(dict(fresh.state_dict()), dict(trained.state_dict()))
    assert [p.data_ptr() for p in fresh.parameters()] == places


# ---- bugs that others had


def test_sglang_30761_7421_a_reload_that_fails_leaves_the_old_weights(tmp_path):
    """fp8 weights and their scales reloaded from a checkpoint that is damaged: the reload crashed, or rolled back to something wrong. Here
    nothing has been written when the damage is found, wherever it is; and the version before can be loaded."""
    tensors = {"w": filled((256, 128), torch.float8_e4m3fn, 1), "w_scale_inv": filled((2, 1), torch.float32, 2)}
    served = {"w": filled((256, 128), torch.float8_e4m3fn, 3), "w_scale_inv": filled((2, 1), torch.float32, 4)}
    before = {name: t.clone() for name, t in served.items()}
    store = SnapshotStore(tmp_path)
    store.save(1, StateDictSource(tensors))
    store.save(2, StateDictSource({name: bits_flipped(t) for name, t in tensors.items()}))
    path = tmp_path / "version-00000002" / "part-00000-of-00001.safetensors"
    good = path.read_bytes()
    with store.open() as snapshot:
        offsets = [r.offset for _, _, r in snapshot.regions]
    for at in (offsets[0], offsets[1] + 5, len(good) - 1):
        _flip(path, at)
        with store.open() as snapshot, pytest.raises(ChecksumError):
            snapshot.load_into(StateDictSource(served))
        assert same(served, before)
        path.write_bytes(good)
    with store.open(1) as snapshot:
        snapshot.load_into(StateDictSource(served))
    assert same(served, tensors)


def bits_flipped(tensor):
    return (tensor.view(torch.uint8) ^ 0xFF).view(tensor.dtype)
