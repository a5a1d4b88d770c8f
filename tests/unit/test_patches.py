"""Patches: whatever changed comes back bit for bit, in any box, in any memory layout; joined, taken back, damaged, and from the wrong base."""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_ray.errors import ChecksumError, DeltaBaseError, MooncakeRayError, PlanError
from mooncake_ray.weights.digest import content_digest
from mooncake_ray.weights.patch import HEAD_BYTES, Classing, Part, Patch, Regions, apply, check, encode, merge, revert

_NO_RESERVE = 0x4000  # MAP_NORESERVE
DENSITIES = (0.0, 0.001, 0.02, 0.2, 0.5, 1.0)


@dataclass
class Object:
    """A published object of some regions, and versions of it."""

    regions: Regions
    size: int
    rng: np.random.Generator

    def random(self) -> np.ndarray:
        return self.rng.integers(0, 256, self.size, np.uint8)

    def values(self, data: np.ndarray, region: int) -> np.ndarray:
        """A view of a region, as unsigned integers."""
        item, offset = int(self.regions.itemsize[region]), int(self.regions.offset[region])
        n = int(self.regions.elements[region])
        return data[offset : offset + n * item].view(f"uint{8 * item}").reshape(self.regions.extents[region])

    def changed(self, data: np.ndarray, density: float, small: bool) -> np.ndarray:
        out = data.copy()
        for r in range(len(self.regions)):
            values = self.values(out, r)
            if self.rng.random() < 0.3:
                continue
            where = self.rng.random(values.shape) < density
            n = int(where.sum())
            top = (1 << 8 * values.itemsize) - 1
            if small:
                steps = self.rng.choice(np.array([1, top, 2, top - 1], values.dtype), n)
            else:
                steps = self.rng.integers(0, top, n, values.dtype, endpoint=True)
            values[where] += steps
        return out


def an_object(rng, shapes, items) -> Object:
    """Regions of tensors that are a little larger than they are."""
    d = max((len(s) for s in shapes), default=0)
    lo, hi, whole, offsets, at = [], [], [], [], 0
    for shape, item in zip(shapes, items, strict=True):
        start = rng.integers(0, 4, len(shape))
        pad = d - len(shape)
        lo.append([0] * pad + start.tolist())
        hi.append([1] * pad + (start + shape).tolist())
        whole.append([1] * pad + (start + shape + rng.integers(0, 4, len(shape))).tolist())
        offsets.append(at)
        at += -(-math.prod(shape) * item // 64) * 64
    arrays = (np.array(x, np.int64).reshape(len(shapes), d) for x in (lo, hi, whole))
    return Object(Regions(*arrays, np.array(items, np.int32), np.array(offsets, np.int64)), at, rng)


@st.composite
def objects(draw):
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    m = draw(st.integers(1, 4))
    shapes = [
        tuple(draw(st.integers(1, (3000, 60, 16, 6)[d - 1] if d else 1)) for _ in range(d))
        for d in (draw(st.integers(0, 4)) for _ in range(m))
    ]
    return an_object(rng, shapes, [draw(st.sampled_from([1, 2, 4, 8])) for _ in range(m)])


def a_part(draw, made: Object, data: np.ndarray, region: int):
    """A box of the region's tensor that somebody holds, with what the base version has where the two meet; and the same as it will be."""
    rng, regions = made.rng, made.regions
    shape = regions.shape[region]
    lo = np.array([draw(st.integers(0, int(s) - 1)) for s in shape], np.int64)
    hi = np.array([draw(st.integers(int(a) + 1, int(s))) for a, s in zip(lo, shape, strict=True)], np.int64)
    order = draw(st.permutations(range(len(shape))))
    every = draw(st.integers(1, 2))
    item = int(regions.itemsize[region])
    extents = (hi - lo)[list(order)]
    memory = rng.integers(0, 256, (*extents, every * item), np.uint8).view(f"uint{8 * item}")[..., 0]
    view = memory.transpose(np.argsort(order)) if len(shape) else memory
    return lo, hi, view


def both(made: Object, region: int, lo, hi):
    """Where a box and a region meet, in either's coordinates; None if nowhere."""
    first, last = np.maximum(lo, made.regions.lo[region]), np.minimum(hi, made.regions.hi[region])
    if np.any(first >= last):
        return None
    mine = tuple(slice(a, b) for a, b in zip(first - lo, last - lo, strict=True))
    theirs = tuple(slice(a, b) for a, b in zip(first - made.regions.lo[region], last - made.regions.lo[region], strict=True))
    return mine, theirs


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_change_of_any_box(data):
    made = data.draw(objects())
    old = made.random()
    new = made.changed(old, data.draw(st.sampled_from(DENSITIES)), data.draw(st.booleans()))
    patch = encode(old, new, made.regions, base_version=3, version=4, epoch=9, object=bytes(range(32)))
    assert (patch.base_version, patch.version, patch.epoch, patch.object) == (3, 4, 9, bytes(range(32)))
    m = len(made.regions)
    differ = [made.values(old, r) != made.values(new, r) for r in range(m)]
    assert patch.touched.tolist() == [bool(x.any()) for x in differ]
    assert patch.changed == sum(int(x.sum()) for x in differ)
    before, after = made.regions.digests(old), made.regions.digests(new)
    for row in patch.table:
        r = row["region"]
        assert (row["before"], row["after"], row["changed"]) == (before[r], after[r], differ[r].sum())
    assert encode(old, new, made.regions, base_version=3, version=4, epoch=9, object=bytes(range(32)), before=before).data.tobytes() == (
        patch.data.tobytes()
    )
    patch = Patch.parse(bytearray(patch.data))

    parts, expected, digests = [], [], []
    for region in range(m):
        lo, hi, view = a_part(data.draw, made, old, region)
        where = both(made, region, lo, hi)
        want = view.copy()
        if where:
            view[where[0]] = made.values(old, region)[where[1]]
            want[where[0]] = made.values(new, region)[where[1]]
        parts.append(Part(region, view, lo.tolist()))
        expected.append((want, int(differ[region][where[1]].sum()) if where else 0))
        shape = made.regions.shape[region].tolist()
        digests.append((content_digest(want, lo.tolist(), shape) - content_digest(view, lo.tolist(), shape)) % 2**64)
    originals = [p.view.copy() for p in parts]
    would = check(patch, made.regions, parts)
    for part, original in zip(parts, originals, strict=True):
        np.testing.assert_array_equal(part.view, original)
    changes = apply(patch, made.regions, parts, version=3)
    assert would == changes
    for part, change, (want, count), digest in zip(parts, changes, expected, digests, strict=True):
        np.testing.assert_array_equal(part.view, want)
        assert (change.changed, change.digest) == (count, digest)
    back = revert(patch, made.regions, parts)
    for part, original in zip(parts, originals, strict=True):
        np.testing.assert_array_equal(part.view, original)
    assert [(-c.digest) % 2**64 for c in back] == digests


def whole_parts(made: Object, data: np.ndarray) -> list[Part]:
    return [Part(r, made.values(data, r), made.regions.lo[r].tolist()) for r in range(len(made.regions))]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_merged_patch_is_all_of_them(data):
    made = data.draw(objects())
    versions = [made.random()]
    for _ in range(data.draw(st.integers(1, 4))):
        if len(versions) > 1 and data.draw(st.booleans()):  # some of it, or all, is again what it was
            back, some = versions[-1].copy(), data.draw(st.integers(0, made.size))
            back[:some] = versions[-2][:some]
            versions.append(back)
        else:
            versions.append(made.changed(versions[-1], data.draw(st.sampled_from(DENSITIES)), data.draw(st.booleans())))
    patches = [encode(a, b, made.regions, base_version=i, version=i + 1) for i, (a, b) in enumerate(itertools.pairwise(versions))]
    merged = merge(patches, made.regions)
    direct = encode(versions[0], versions[-1], made.regions, base_version=0, version=len(patches))
    assert merged.data.tobytes() == direct.data.tobytes()  # also: nothing is in it that is again what it was
    held = versions[0].copy()
    apply(merged, made.regions, whole_parts(made, held))
    for r in range(len(made.regions)):
        np.testing.assert_array_equal(made.values(held, r), made.values(versions[-1], r))
    if len(patches) > 2:
        assert merge([merge(patches[:2], made.regions), *patches[2:]], made.regions).data.tobytes() == direct.data.tobytes()


def one(shape, item=2, seed=1) -> Object:
    return an_object(np.random.default_rng(seed), [shape], [item])


def test_merging_refuses_what_is_not_a_chain():
    made = one((40, 30))
    v = [made.random()]
    for _ in range(3):
        v.append(made.changed(v[-1], 0.1, True))
        v[-1][:2] += 1
    p = [encode(v[i], v[i + 1], made.regions, base_version=i, version=i + 1) for i in range(3)]
    with pytest.raises(DeltaBaseError, match="from version 2 does not follow one to version 1"):
        merge([p[0], p[2]], made.regions)
    other = encode(v[0], v[2], made.regions, base_version=1, version=2)  # by number it would follow
    with pytest.raises(DeltaBaseError, match="1 regions at version 1 are not what the patch to version 2 is against, the first is 0"):
        merge([p[0], other], made.regions)
    with pytest.raises(DeltaBaseError, match="different objects"):
        merge([p[0], encode(v[1], v[2], made.regions, base_version=1, version=2, object=b"x" * 32)], made.regions)
    with pytest.raises(DeltaBaseError, match="of 1 regions, not of 2"):
        merge([p[0]], an_object(made.rng, [(2, 2), (3, 3)], [2, 2]).regions)
    with pytest.raises(DeltaBaseError, match="has 1160 elements, in the patch to version 1 1200"):
        merge([p[0]], one((40, 29)).regions)


def test_the_wrong_base_is_refused_and_nothing_is_changed():
    made = one((100, 50))
    old = made.random()
    new = made.changed(old, 0.05, True)
    new[:2] += 1
    patch = encode(old, new, made.regions, base_version=7, version=8)
    held = old.copy()
    with pytest.raises(DeltaBaseError, match="to version 8 is against version 7; here is version 6"):
        apply(patch, made.regions, whole_parts(made, held), version=6)
    held[:2] += 3  # the number is right, the contents are not
    was = held.copy()
    for attempt in (apply, check):
        with pytest.raises(DeltaBaseError, match="region 0 does not hold version 7: 1 segments would not hold version 8 afterwards"):
            attempt(patch, made.regions, whole_parts(made, held))
        assert held.tobytes() == was.tobytes()
    with pytest.raises(DeltaBaseError, match="region 0 does not hold version 8: 1 segments would not hold version 7 afterwards"):
        revert(patch, made.regions, whole_parts(made, held))
    assert held.tobytes() == was.tobytes()


def test_applied_twice_is_refused():
    made = one((100, 50))
    old = made.random()
    patch = encode(old, made.changed(old, 0.5, True), made.regions, base_version=0, version=1)
    if not patch.changed:
        patch = encode(old, old + np.uint8(1), made.regions, base_version=0, version=1)
    held = old.copy()
    apply(patch, made.regions, whole_parts(made, held))
    was = held.copy()
    with pytest.raises(DeltaBaseError):
        apply(patch, made.regions, whole_parts(made, held))
    assert held.tobytes() == was.tobytes()


def test_what_pieces_of_a_segment_change_adds_up_to_its_row():
    made = one((64, 96))
    old = made.random()
    new = old + np.uint8(3)
    patch = encode(old, new, made.regions, base_version=0, version=1)
    values, lo = made.values(old, 0), made.regions.lo[0]
    columns = [Part(0, values[:, a : a + 32].copy(), (lo[0], lo[1] + a)) for a in (0, 32, 64)]
    changes = [apply(patch, made.regions, [p])[0] for p in columns]
    assert sum(c.digest for c in changes) % 2**64 == int(patch.segments["digest"].sum(dtype=np.uint64))
    assert sum(c.changed for c in changes) == patch.changed
    np.testing.assert_array_equal(np.concatenate([p.view for p in columns], axis=1), made.values(new, 0))


@pytest.mark.parametrize("density", [0.001, 0.05, 1.0])
def test_any_damaged_byte_is_found_before_anything_is_written(density):
    made = an_object(np.random.default_rng(5), [(30, 40), (50,), (2, 3)], [2, 4, 1])
    old = made.random()
    new = made.changed(old, density, True)
    new[:64] += 1
    patch = encode(old, new, made.regions, base_version=0, version=1)
    held, rng = old.copy(), np.random.default_rng(1)
    places = range(len(patch.data)) if len(patch.data) < 1500 else rng.integers(0, len(patch.data), 1500)
    for at in places:
        raw = patch.data.copy()
        raw[at] ^= np.uint8(1 << rng.integers(8))
        with pytest.raises(ChecksumError):
            apply(Patch.parse(raw), made.regions, whole_parts(made, held))
    for size in (0, 3, HEAD_BYTES - 1, HEAD_BYTES, patch.index_bytes - 1, patch.index_bytes, len(patch.data) - 1):
        with pytest.raises(ChecksumError):
            Patch.parse(patch.data[:size])
    with pytest.raises(ChecksumError):
        Patch.parse(np.append(patch.data, np.uint8(0)))
    assert held.tobytes() == old.tobytes()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_nonsense_with_the_right_checksums_raises(data):
    """Not damage, but somebody's broken encoder: never a crash, never a write outside, all or nothing."""
    from mooncake_ray._native import delta as native
    from mooncake_ray.weights.patch_index import HEAD

    made = data.draw(objects())
    old = made.random()
    new = made.changed(old, data.draw(st.sampled_from(DENSITIES[1:])), data.draw(st.booleans()))
    new[0] ^= 1
    patch = encode(old, new, made.regions, base_version=0, version=1)
    raw = patch.data.copy()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(HEAD_BYTES, len(raw) - 1))
        raw[at] = data.draw(st.integers(0, 255))
    segments = raw[patch.index_bytes - 56 * len(patch.segments) : patch.index_bytes].view(patch.segments.dtype)
    for row in segments:
        begin = patch.index_bytes + int(row["offset"])
        if begin + int(row["nbytes"]) <= len(raw):
            row["checksum"] = native.checksum(raw[begin : begin + int(row["nbytes"])])
    head = raw[:HEAD_BYTES].view(HEAD)
    head["checksum"] = 0
    head["checksum"] = native.checksum(raw[: patch.index_bytes])
    held = old.copy()
    try:
        broken = Patch.parse(raw)
        changes = apply(broken, made.regions, whole_parts(made, held))
    except MooncakeRayError:
        assert held.tobytes() == old.tobytes()
    else:
        assert sum(c.changed for c in changes) == broken.changed
    with contextlib.suppress(MooncakeRayError):
        merge([Patch.parse(raw)], made.regions)


def trained(shapes, seed=1) -> tuple[Object, np.ndarray, np.ndarray, np.ndarray]:
    """bfloat16 weights of some tensors, and after one and two steps of about the same length for all of them."""
    made = an_object(np.random.default_rng(seed), shapes, [2] * len(shapes))
    masters = made.rng.standard_normal(made.size // 2).astype(np.float32) * np.float32(0.02)
    versions = []
    for _ in range(3):
        versions.append(torch.from_numpy(masters).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint8).copy())
        masters += made.rng.standard_normal(len(masters)).astype(np.float32) * np.float32(5e-7)
    return made, *versions


@pytest.mark.parametrize(("apart", "saved"), [(False, 0.02), (True, 0.2)])
def test_coded_against_what_was_there(apart, saved):
    made, old, new, newer = trained([(900, 700), (64,), (2500, 1024)])
    m = len(made.regions)
    classing = Classing(np.full(m, 7, np.int32), apart)
    plain = encode(old, new, made.regions, base_version=0, version=1)
    patch = encode(old, new, made.regions, base_version=0, version=1, classing=classing)
    assert patch.classed and not plain.classed
    assert patch.nbytes < (1 - saved) * plain.nbytes
    for change in ("before", "after", "changed"):
        assert patch.table[change].tolist() == plain.table[change].tolist()
    held = old.copy()
    apply(Patch.parse(patch.data.tobytes()), made.regions, whole_parts(made, held), version=0)
    for r in range(m):
        np.testing.assert_array_equal(made.values(held, r), made.values(new, r))
    turned = [Part(r, np.asfortranarray(made.values(old, r)), made.regions.lo[r].tolist()) for r in range(m)]
    apply(patch, made.regions, turned)
    for r, part in enumerate(turned):
        np.testing.assert_array_equal(part.view, made.values(new, r))

    with pytest.raises(DeltaBaseError, match="cannot be taken back"):
        revert(patch, made.regions, whole_parts(made, held))
    columns = [Part(0, made.values(old, 0)[:, :350].copy(), made.regions.lo[0].tolist())]
    with pytest.raises(PlanError, match="coded against what was there, and its part does not hold all of the one at element 0"):
        apply(patch, made.regions, columns)
    apply(plain, made.regions, columns)

    rng = np.random.default_rng(0)
    for _ in range(20):  # whatever is wrong with the base, nothing is changed
        wrong = old.copy()
        values = made.values(wrong, 2)
        for _ in range(rng.integers(1, 20)):
            values[rng.integers(900), rng.integers(700)] ^= 1 << rng.integers(16)
        if np.array_equal(
            values[made.values(old, 2) != made.values(new, 2)], made.values(old, 2)[made.values(old, 2) != made.values(new, 2)]
        ):
            continue  # what changed is right
        was = wrong.tobytes()
        with pytest.raises(DeltaBaseError, match="region 2 does not hold version 0"):
            apply(patch, made.regions, whole_parts(made, wrong))
        assert wrong.tobytes() == was

    some = encode(old, new, made.regions, base_version=0, version=1, classing=Classing(np.array([7, -1, -1], np.int32), apart))
    wrong = old.copy()
    made.values(wrong, 2)[made.values(old, 2) != made.values(new, 2)] += 1
    was = wrong.tobytes()
    with pytest.raises(DeltaBaseError, match="region 2 does not hold version 0"):
        apply(some, made.regions, whole_parts(made, wrong))
    assert wrong.tobytes() == was
    apply(some, made.regions, whole_parts(made, held := old.copy()))
    np.testing.assert_array_equal(made.values(held, 2), made.values(new, 2))

    following = encode(new, newer, made.regions, base_version=1, version=2, classing=classing)
    with pytest.raises(DeltaBaseError, match="cannot be merged without their base"):
        merge([patch, following], made.regions)
    direct = encode(old, newer, made.regions, base_version=0, version=2)
    assert merge([patch, following], made.regions, base=old).data.tobytes() == direct.data.tobytes()
    direct = encode(old, newer, made.regions, base_version=0, version=2, classing=classing)
    for chain in ([patch, following], [plain, following]):
        assert merge(chain, made.regions, base=old, classing=classing).data.tobytes() == direct.data.tobytes()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_change_coded_against_what_was_there(data):
    made = data.draw(objects())
    old = made.random()
    new = made.changed(old, data.draw(st.sampled_from(DENSITIES)), data.draw(st.booleans()))
    classing = Classing(made.rng.integers(-1, 30, len(made.regions)).astype(np.int32), data.draw(st.booleans()))
    patch = encode(old, new, made.regions, base_version=0, version=1, classing=classing)
    assert patch.nbytes <= encode(old, new, made.regions, base_version=0, version=1).nbytes
    held = old.copy()
    changes = apply(patch, made.regions, whole_parts(made, held))
    assert sum(c.changed for c in changes) == patch.changed
    for r in range(len(made.regions)):
        np.testing.assert_array_equal(made.values(held, r), made.values(new, r))


def test_only_the_segments_that_are_needed():
    made = one((9000, 1024))  # five segments of whole rows, 2048 each but the last
    old = made.random()
    new = old.copy()
    made.values(new, 0)[::97, ::31] ^= 3
    made.values(new, 0)[2048:4096] = made.values(old, 0)[2048:4096]  # the second is untouched, and not there
    full = encode(old, new, made.regions, base_version=0, version=1)
    assert full.segments["begin"].tolist() == [0, 4096 * 1024, 6144 * 1024, 8192 * 1024]
    size = Patch.bytes_of_index(full.data[:HEAD_BYTES])
    index = Patch.parse(full.data[:size].tobytes(), whole=False)
    assert (index.nbytes, index.data) == (len(full.data), None)
    base = made.regions.lo[0]
    rows = made.values(old, 0)[4000:5000].copy()
    part = Part(0, rows, (base[0] + 4000, base[1]))
    lo = np.array([[base[0] + 4000, base[1]]])
    which, of = index.needed(made.regions, np.array([0]), lo, lo + np.array([1000, 1024]))
    assert (which.tolist(), of.tolist()) == ([1], [0])
    with pytest.raises(ChecksumError, match="1 of 1 segments of the patch to version 1 are missing"):
        apply(index, made.regions, [part])
    ((offset, nbytes),) = index.ranges(which).tolist()
    with pytest.raises(ChecksumError, match=f"1 segments have {nbytes} bytes; {nbytes - 1} came"):
        index.with_segments(which, full.data[offset : offset + nbytes - 1])
    some = index.with_segments(which, full.data[offset : offset + nbytes].tobytes())
    apply(some, made.regions, [part])
    np.testing.assert_array_equal(rows, made.values(new, 0)[4000:5000])
    assert nbytes < len(full.data) / 3


def test_an_untouched_region_is_one_bit():
    m = 4096
    made = an_object(np.random.default_rng(0), [(16,)] * m, [2] * m)
    old = made.random()
    nothing = encode(old, old, made.regions, base_version=0, version=1)
    assert len(nothing.data) == HEAD_BYTES + m // 8
    assert apply(nothing, made.regions, whole_parts(made, old.copy()))[0].changed == 0
    new = old.copy()
    made.values(new, 77)[3] += 1
    patch = encode(old, new, made.regions, base_version=0, version=1)
    assert np.flatnonzero(patch.touched).tolist() == [77]
    assert len(patch.data) - len(nothing.data) < 120


@pytest.mark.parametrize("item", [1, 2, 4, 8])
@pytest.mark.parametrize("density", [0.0, 0.01, 0.1, 0.24, 0.26, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("small", [True, False])
def test_never_larger_than_dense(item, density, small):
    made = one((512, (1 << 20) // 512 // item), item)
    old = made.random()
    new = made.changed(old, density, small)
    patch = encode(old, new, made.regions, base_version=0, version=1)
    assert patch.nbytes <= 1.001 * made.size
    held = old.copy()
    apply(patch, made.regions, whole_parts(made, held))
    assert held.tobytes() == new.tobytes()


DTYPES = {
    torch.bfloat16: [0x7FC1, 0xFFFF, 0x8000, 0x0000, 0x7F80, 0x0001, 0x8001],  # NaNs with payloads, -0.0, infinity, denormals
    torch.float16: [0x7E01, 0xFFFF, 0x8000, 0x7C00],
    torch.float8_e4m3fn: [0x7F, 0xFF, 0x80],
    torch.float8_e5m2: [0x7D, 0xFE, 0x80, 0x7C],
    torch.float32: [0x7FC00001, 0xFFFFFFFF, 0x80000000, 0x7F800001],  # a signalling NaN, too
    torch.float64: [0x7FF8000000000001, 0x8000000000000000, 0xFFFFFFFFFFFFFFFF],
    torch.int8: [0x80, 0x7F, 0xFF],
    torch.int64: [1 << 63, (1 << 63) - 1, (1 << 64) - 1],
    torch.bool: [0, 1],
    torch.complex64: [0x7FC0000180000000],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_bit_for_bit(dtype):
    item = dtype.itemsize
    made = one((300, 7), item)
    rng = np.random.default_rng(item)
    special = np.array(DTYPES[dtype], f"uint{8 * item}")
    old, new = made.random(), made.random()
    for data in (old, new):
        values = made.values(data, 0)
        if dtype == torch.bool:
            values &= 1
        where = rng.random(values.shape) < 0.3
        values[where] = rng.choice(special, int(where.sum()))
    patch = encode(old, new, made.regions, base_version=0, version=1)
    held = torch.from_numpy(made.values(old, 0).copy().view(f"int{8 * item}")).view(dtype)
    apply(patch, made.regions, [Part(0, held, made.regions.lo[0].tolist())])
    assert held.view(getattr(torch, f"int{8 * item}")).numpy().tobytes() == made.values(new, 0).tobytes()


def test_fp8_with_block_scales_is_exact():
    """verl#7676: FP8 weights after a delta were not those of a full sync. Where a block's scale changes, all of its elements do."""
    torch.manual_seed(0)
    master = torch.randn(512, 384) * 0.02

    def quantized(weight):
        blocks = weight.view(4, 128, 3, 128)
        scale = blocks.abs().amax(dim=(1, 3)) / 448
        return (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).reshape(512, 384), scale.float()

    made = an_object(np.random.default_rng(0), [(512, 384), (4, 3)], [1, 4])

    def published(weight) -> np.ndarray:
        data = np.zeros(made.size, np.uint8)
        q, scale = quantized(weight)
        made.values(data, 0)[:] = q.view(torch.uint8).numpy()
        made.values(data, 1)[:] = scale.view(torch.int32).numpy().view(np.uint32)
        return data

    held_q, held_scale = quantized(master)
    versions = [published(master)]
    patches = []
    for step in range(4):
        master = master + torch.randn_like(master) * 1e-4
        if step == 2:
            master[130, 5] = 0.5  # one outlier: another scale, and another value for nearly all others of its block
        versions.append(published(master))
        patches.append(encode(versions[-2], versions[-1], made.regions, base_version=step, version=step + 1))
        lo = made.regions.lo.tolist()
        changes = apply(patches[-1], made.regions, [Part(0, held_q, lo[0]), Part(1, held_scale, lo[1])])
        want_q, want_scale = quantized(master)
        assert torch.equal(held_q.view(torch.uint8), want_q.view(torch.uint8))
        assert torch.equal(held_scale.view(torch.int32), want_scale.view(torch.int32))
        if step == 2:
            assert changes[1].changed >= 1
    late = versions[0].copy()
    apply(merge(patches, made.regions), made.regions, whole_parts(made, late))
    assert late.tobytes() == versions[-1].tobytes()


def test_parts_that_do_not_fit():
    made = one((10, 10))
    old = made.random()
    patch = encode(old, old + np.uint8(1), made.regions, base_version=0, version=1)
    shape = made.regions.shape[0].tolist()
    with pytest.raises(PlanError, match="has elements of 2 bytes, its part of 4"):
        apply(patch, made.regions, [Part(0, np.zeros(shape, np.float32), (0, 0))])
    with pytest.raises(PlanError, match="is not in a tensor of"):
        apply(patch, made.regions, [Part(0, np.zeros(shape, np.uint16), (1, 0))])
    with pytest.raises(PlanError, match="regions 0 … 0, and parts of 1 … 1"):
        apply(patch, made.regions, [Part(1, np.zeros(shape, np.uint16), (0, 0))])
    with pytest.raises(PlanError, match="of a tensor of 2 dimensions"):
        apply(patch, made.regions, [Part(0, np.zeros((2, 3, 3), np.uint16), (0, 0, 0))])
    with pytest.raises(ValueError, match="from version 1 to 1"):
        encode(old, old, made.regions, base_version=1, version=1)
    with pytest.raises(ValueError, match="an object of 100 bytes; its regions end at byte 200"):
        encode(old[:100], old, made.regions, base_version=0, version=1)
    assert apply(patch, made.regions, []) == []


def test_positions_beyond_four_gibibytes():
    """Byte positions of 32 bits, as other forms have them, wrap in tensors of 4 GiB and more. Only a few pages are really there."""
    rows, columns = 1 << 11, 1 << 21
    n = rows * columns + columns
    old, new = (np.frombuffer(mmap.mmap(-1, n, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE), np.uint8) for _ in range(2))
    shape = np.array([[rows + 1, columns]])
    regions = Regions(np.zeros_like(shape), shape, shape, np.array([1], np.int32), np.array([0]))
    places = [5, (1 << 32) - 1, 1 << 32, (1 << 32) + 5, n - 1]
    new[places] = [1, 2, 3, 4, 255]
    patch = encode(old, new, regions, base_version=0, version=1, before=np.zeros(1, np.uint64))
    assert patch.changed == 5 and patch.nbytes < 1000
    view = old.reshape(rows + 1, columns)
    last = Part(0, view[rows:].copy(), (rows, 0))
    assert apply(patch, regions, [last])[0].changed == 3
    assert np.flatnonzero(last.view).tolist() == [0, 5, columns - 1]
    apply(patch, regions, [Part(0, view, (0, 0))])
    assert old[places].tolist() == [1, 2, 3, 4, 255]
    was, now = (
        [content_digest(np.array([v], np.uint8), (p,), (n,)) for p, v in zip(places, of, strict=True)] for of in ([0] * 5, new[places])
    )
    assert int(patch.table["after"][0]) == (sum(now) - sum(was)) % 2**64
