"""What the endpoint gives out as files: bit for bit what was saved, whatever layout it was saved in, in any range."""

from __future__ import annotations

import json

import pytest
import safetensors
import torch
from disk_models import layouts, models, same, shards
from hypothesis import given, settings
from hypothesis import strategies as st
from serve_site import data_of

from mooncake_ray.errors import CorruptBlockError, SnapshotError, SnapshotNotFoundError
from mooncake_ray.serve import contents
from mooncake_ray.serve.contents import Volume
from mooncake_ray.serve.spans import Content, FileSpan, Gathered, Held
from mooncake_ray.weights.digest import content_digest
from mooncake_ray.weights.snapshot import SnapshotStore
from mooncake_ray.weights.source import StateDictSource
from mooncake_ray.weights.tensor_file import Entry, header, parsed, raw


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_layout_is_given_out_as_one_file(tmp_path_factory, data):
    tensors = data.draw(models())
    layout = data.draw(layouts({name: t.shape for name, t in tensors.items()}, "t"))
    store = SnapshotStore(tmp_path_factory.mktemp("store"), fsync=False)
    store.save(1, shards(layout, tensors))
    with pytest.MonkeyPatch.context() as patch, store.open() as snapshot:
        patch.setattr(contents, "_BLOCK_BYTES", data.draw(st.sampled_from([1, 40, 4 << 20])))
        volume = Volume(snapshot)
        whole = data_of(volume.model.cut(0, volume.model.nbytes))
        assert len(whole) == volume.model.nbytes
        found = {name: (list(t["shape"]), bytes(t["data"])) for name, t in safetensors.deserialize(whole)}
        assert found == {name: (list(t.shape), bytes(raw(t))) for name, t in tensors.items()}
        begin = data.draw(st.integers(0, len(whole)))
        end = data.draw(st.integers(begin, len(whole)))
        assert data_of(volume.model.cut(begin, end)) == whole[begin:end]
        for name, t in tensors.items():
            content, placed = volume.tensor(name), volume.tensors[name]
            piece = data_of(content.cut(0, content.nbytes))
            assert piece == whole[placed.begin : placed.end]
            assert placed.digest == content_digest(t, (0,) * t.dim(), t.shape)
            assert same({"": volume.whole(name)}, {"": t})


def test_what_one_rank_wrote_is_one_stretch_of_its_file(tmp_path):
    """So that one call to the kernel sends it."""
    store = SnapshotStore(tmp_path, fsync=False)
    store.save(1, StateDictSource({f"layers.{n}.w": torch.randn(8, 8).to([torch.float32, torch.bfloat16][n % 2]) for n in range(10)}))
    with store.open() as snapshot:
        model = Volume(snapshot).model
        assert [type(s) for s in model.cut(0, model.nbytes)] == [Held, FileSpan]


def test_a_tensor_that_is_cut_across_its_rows_is_put_together(tmp_path):
    whole = torch.arange(24.0).view(4, 6)
    halves = {f"r{n}": StateDictSource({"w": whole[:, 3 * n : 3 * n + 3].clone()}, {"w": ((4, 6), (0, 3 * n))}) for n in range(2)}
    store = SnapshotStore(tmp_path, fsync=False)
    store.save(1, halves)
    with store.open() as snapshot:
        content = Volume(snapshot).tensor("w")
        (span,) = content.cut(5, 50)
        assert isinstance(span, Gathered)
        assert data_of([span]) == whole.numpy().tobytes()[5:50]


def test_tags_are_of_the_content(tmp_path):
    """The same in whatever process, and others for other versions, tensors and files."""
    store = SnapshotStore(tmp_path, fsync=False)
    for version in (1, 2):
        store.save(version, StateDictSource({"a": torch.full((4,), float(version)), "b": torch.zeros(4)}))
    tags = []
    for _ in range(2):
        for version in (1, 2):
            with store.open(version) as snapshot:
                volume = Volume(snapshot)
                tags += [volume.model.etag, volume.tensor("a").etag, volume.tensor("b").etag]
    assert tags[:6] == tags[6:]
    assert len(set(tags)) == 6


def test_files_beside_the_weights(tmp_path):
    """A version's own come before those of all versions; and nothing else is reached."""
    common = tmp_path / "common"
    common.mkdir()
    (common / "config.json").write_text("common")
    (common / "tokenizer.json").write_text("{}")
    (tmp_path / "secret").write_text("no")
    (common / "folder").mkdir()
    store = SnapshotStore(tmp_path / "store", fsync=False)
    store.save(1, StateDictSource({"a": torch.zeros(1)}), extra={"files": {"config.json": "ä"}})
    with store.open() as snapshot:
        volume = Volume(snapshot, common)
        assert volume.files == ["model.safetensors", "config.json", "tokenizer.json"]
        assert data_of(volume.file("config.json").cut(0, 2)) == "ä".encode()
        assert volume.file("config.json").media_type == "application/json"
        for name in ("../secret", "folder", "", "..", "nothing", "a\0b"):
            with pytest.raises(SnapshotNotFoundError, match="has no file"):
                volume.file(name)
        with pytest.raises(SnapshotNotFoundError, match="has no tensor"):
            volume.tensor("b")


def test_a_snapshot_without_all_of_a_tensor_is_refused(tmp_path):
    store = SnapshotStore(tmp_path, fsync=False)
    store.save(1, StateDictSource({"w": torch.zeros(2, 4)}, {"w": ((4, 4), (0, 0))}))
    with store.open() as snapshot, pytest.raises(SnapshotError, match="w: version 1 holds 8 of 16 elements"):
        Volume(snapshot).model  # noqa: B018


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_contents_are_cut_anywhere(data):
    pieces = data.draw(st.lists(st.binary(max_size=9), max_size=6))
    whole = b"".join(pieces)

    def gathered(piece):
        return Gathered(lambda a, b: iter([memoryview(piece)[a:b]]), 0, len(piece))

    content = Content([data.draw(st.sampled_from([Held, gathered]))(p) for p in pieces], media_type="", etag="")
    begin = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(begin, len(whole)))
    inner = data.draw(st.integers(begin, end))
    assert content.nbytes == len(whole)
    assert data_of(content.cut(begin, end)) == whole[begin:end]
    assert data_of(content.cut(begin, inner) + content.cut(inner, end)) == whole[begin:end]
    with pytest.raises(ValueError, match="bytes"):
        content.cut(0, len(whole) + 1)


def test_headers_are_read_back():
    entries = [Entry("a", "float32", (2, 3)), Entry("b", "float4_e2m1fn_x2", (4,)), Entry("c", "bool", ())]
    head, places = header(entries, {"format": "pt"})
    text = head[8:]
    found, metadata = parsed(text, 24 + 4 + 1)
    assert metadata == {"format": "pt"}
    assert found == [(e, at - len(head)) for e, at in zip(entries, places, strict=True)]


@pytest.mark.parametrize(
    ("text", "nbytes", "why"),
    [
        ("nonsense", 0, "no header"),
        ("[]", 0, "no header"),
        ('{"a": 3}', 0, "no header"),
        ('{"__metadata__": {"x": 3}}', 0, "not text"),
        ('{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', 4, "a length that is not one"),
        ('{"a": {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]}}', 4, "dtype 'X9'"),
        ('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', 4, "it has 8 bytes"),
        ('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}', 8, "ends at 0"),
        ('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', 8, "tensors have 4 bytes, and 8 follow"),
        ('{"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}}', 2, "in pairs"),
    ],
)
def test_what_is_no_header(text, nbytes, why):
    with pytest.raises(CorruptBlockError, match=why):
        parsed(text.encode(), nbytes)


def test_extra_that_is_no_table_of_files_is_nothing(tmp_path):
    store = SnapshotStore(tmp_path, fsync=False)
    store.save(1, StateDictSource({"a": torch.zeros(1)}), extra=json.loads('{"files": 3}'))
    with store.open() as snapshot:
        assert Volume(snapshot).files == ["model.safetensors"]
