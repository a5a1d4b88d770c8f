# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=False
# distutils: language=c++
"""The codec behind `mooncake_ray.weights.patch` and `mooncake_ray.weights.digest`. Private.

Addresses are plain integers: the caller answers for what is there, and for shapes of arrays. What is coded is checked. All release the GIL.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t, uintptr_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

import numpy as np

cdef extern from *:
    """
    #include "delta/digest.h"
    #include "delta/move.h"
    #include "delta/patch.h"
    static inline mcr::delta::Box mcr_box(uint64_t index, uintptr_t at, int32_t item, int64_t d, const int64_t* extents, const int64_t* steps,
                                          const int64_t* lo, const int64_t* hi, const int64_t* strides) {
      mcr::delta::Box box;
      box.index = index;
      box.at = reinterpret_cast<std::byte*>(at);
      box.log = std::countr_zero(uint32_t(item));
      int64_t packed = item;
      for (int64_t k = d; k-- > 0;) {
        box.dims.insert(box.dims.begin(), {extents[k], steps[k], lo ? lo[k] : 0, hi ? hi[k] : extents[k], strides ? strides[k] : packed});
        packed *= extents[k];
      }
      if (!box.empty()) box.simplify();
      return box;
    }
    static inline mcr::delta::Move mcr_move(uintptr_t from, uintptr_t to, int32_t item, int64_t d, const int64_t* extents,
                                            const int64_t* from_strides, const int64_t* to_strides) {
      mcr::delta::Move move{{}, reinterpret_cast<const std::byte*>(from), reinterpret_cast<std::byte*>(to), size_t(item)};
      for (int64_t k = 0; k < d; ++k) move.dims.push_back({extents[k], from_strides[k], to_strides[k]});
      return move;
    }
    static inline mcr::delta::Region mcr_region(uintptr_t old, uintptr_t now, mcr::delta::Box box, int64_t rows, int32_t mantissa, bool apart) {
      const uint64_t n = uint64_t(box.elements());
      return {reinterpret_cast<const std::byte*>(old), reinterpret_cast<const std::byte*>(now), n, rows ? n / uint64_t(rows) : 0, std::move(box),
              {mantissa, apart}};
    }
    static inline mcr::delta::Part mcr_part(uintptr_t coded, const uint8_t* row) {
      mcr::delta::Part part;
      part.coded = reinterpret_cast<const uint8_t*>(coded);
      std::memcpy(&part.segment, row, sizeof part.segment);
      return part;
    }
    static inline void mcr_chain(mcr::delta::Chain& chain, uintptr_t old, int32_t item, int32_t mantissa, bool apart) {
      chain.old = reinterpret_cast<const std::byte*>(old);
      chain.log = std::countr_zero(uint32_t(item));
      chain.classing = {mantissa, apart};
    }
    static inline void mcr_rows(const mcr::delta::Encoded& e, uint8_t* to) {
      if (!e.segments.empty()) std::memcpy(to, e.segments.data(), e.segments.size() * sizeof(mcr::delta::Segment));
    }
    """
    ctypedef struct byte "std::byte":
        pass
    cppclass CBox "mcr::delta::Box":
        CBox()
    cppclass CMove "mcr::delta::Move":
        pass
    cppclass CRegion "mcr::delta::Region":
        pass
    cppclass CPart "mcr::delta::Part":
        pass
    cppclass CSegment "mcr::delta::Segment":
        pass
    cppclass CChange "mcr::delta::Change":
        uint64_t changed, digest
    cppclass COutcome "mcr::delta::Outcome":
        uint8_t what
        CChange change
    cppclass CChain "mcr::delta::Chain":
        CChain()
        vector[CPart] parts
    cppclass CEncoded "mcr::delta::Encoded":
        CEncoded()
        vector[CSegment] segments
        uint64_t nbytes
        void write(byte* to) nogil
    ctypedef enum CMode "mcr::delta::Mode":
        pass
    CBox mcr_box(uint64_t index, uintptr_t at, int32_t item, int64_t d, const int64_t* extents, const int64_t* steps, const int64_t* lo,
                 const int64_t* hi, const int64_t* strides) except + nogil
    CMove mcr_move(uintptr_t source, uintptr_t target, int32_t item, int64_t d, const int64_t* extents, const int64_t* source_strides,
                   const int64_t* target_strides) except + nogil
    CRegion mcr_region(uintptr_t old, uintptr_t now, CBox box, int64_t rows, int32_t mantissa, cbool apart) except + nogil
    CPart mcr_part(uintptr_t coded, const uint8_t* row) nogil
    void mcr_chain(CChain&, uintptr_t old, int32_t item, int32_t mantissa, cbool apart) nogil
    void mcr_rows(const CEncoded&, uint8_t* to) nogil

cdef extern from "delta/move.h" nogil:
    void c_move "mcr::delta::move"(vector[CMove]) except +

cdef extern from "delta/patch.h" nogil:
    vector[uint64_t] c_digests "mcr::delta::digests"(vector[CBox]) except +
    uint64_t c_checksum "mcr::delta::checksum"(const void* at, size_t nbytes)
    CEncoded c_encode "mcr::delta::encode"(const vector[CRegion]&) except +
    vector[size_t] c_damaged "mcr::delta::damaged"(const vector[CPart]&) except +
    vector[COutcome] c_apply "mcr::delta::apply"(const vector[CPart]&, const vector[const CBox*]&, CMode) except +
    CEncoded c_merge "mcr::delta::merge"(const vector[CChain]&, vector[size_t]& bad) except +


def digests(const uint64_t[::1] at, const int32_t[::1] itemsize, const uint64_t[::1] index, const int64_t[:, ::1] extents,
            const int64_t[:, ::1] steps, const int64_t[:, ::1] strides):
    """Of boxes: uint64 (n). `index`: of each one's first element in the whole tensor; `steps`: to the next one there, in elements; `strides`: in
    memory, in bytes."""
    cdef int64_t n = at.shape[0], d = extents.shape[1], i
    cdef vector[CBox] boxes
    cdef vector[uint64_t] found
    cdef const int64_t *none = NULL
    _same(n, (itemsize.shape[0], index.shape[0], extents.shape[0], steps.shape[0], strides.shape[0]), d, (steps.shape[1], strides.shape[1]))
    out = np.empty(n, np.uint64)
    cdef uint64_t[::1] o = out
    with nogil:
        boxes.reserve(n)
        for i in range(n):
            boxes.push_back(mcr_box(index[i], at[i], itemsize[i], d, &extents[i, 0] if d else none, &steps[i, 0] if d else none, none, none,
                                    &strides[i, 0] if d else none))
        found = c_digests(boxes)
        for i in range(n):
            o[i] = found[i]
    return out


def move(const uint64_t[::1] source, const int64_t[:, ::1] source_strides, const uint64_t[::1] target, const int64_t[:, ::1] target_strides,
         const int64_t[:, ::1] extents, const int32_t[::1] itemsize):
    """Copies boxes. Addresses of their first elements, and strides in bytes. Nothing may be read where something is written."""
    cdef int64_t n = source.shape[0], d = extents.shape[1], i
    cdef vector[CMove] moves
    cdef const int64_t *none = NULL
    _same(n, (source_strides.shape[0], target.shape[0], target_strides.shape[0], extents.shape[0], itemsize.shape[0]), d,
          (source_strides.shape[1], target_strides.shape[1]))
    with nogil:
        moves.reserve(n)
        for i in range(n):
            moves.push_back(mcr_move(source[i], target[i], itemsize[i], d, &extents[i, 0] if d else none, &source_strides[i, 0] if d else none,
                                     &target_strides[i, 0] if d else none))
        c_move(moves)


def _same(n, rows, d, columns):
    if any(r != n for r in rows) or any(c != d for c in columns):
        raise ValueError(f"{n} boxes of {d} dimensions; other arrays have {rows} rows and {columns} columns")


def checksum(const uint8_t[::1] data):
    cdef size_t n = data.shape[0]
    cdef const uint8_t* at = &data[0] if n else NULL
    cdef uint64_t out
    with nogil:
        out = c_checksum(at, n)
    return out


cdef stored(const CEncoded& encoded):
    """Rows of the index, uint8 (n, 56), and the payload."""
    rows = np.empty((encoded.segments.size(), 56), np.uint8)
    payload = np.empty(encoded.nbytes, np.uint8)
    cdef uint8_t[:, ::1] r = rows
    cdef uint8_t[::1] p = payload
    if encoded.segments.size():
        with nogil:
            mcr_rows(encoded, &r[0, 0])
            encoded.write(<byte*> &p[0])
    return rows, payload


def encode(const uint64_t[::1] old, const uint64_t[::1] now, const int32_t[::1] itemsize, const uint64_t[::1] index,
           const int64_t[:, ::1] extents, const int64_t[:, ::1] steps, const int32_t[::1] mantissa, cbool apart):
    """What changed in each region, from `old` to `now`: addresses of packed arrays. See `stored`. `mantissa`: bits of an element below its exponent,
    where changes may be coded against what was there, or -1; `apart`: with distances by class."""
    cdef int64_t n = old.shape[0], d = extents.shape[1], i
    cdef vector[CRegion] regions
    cdef CEncoded encoded
    with nogil:
        regions.reserve(n)
        for i in range(n):
            regions.push_back(mcr_region(old[i], now[i], mcr_box(index[i], 0, itemsize[i], d, &extents[i, 0] if d else NULL,
                                                                 &steps[i, 0] if d else NULL, NULL, NULL, NULL), rows_of(extents, i), mantissa[i], apart))
        encoded = c_encode(regions)
    return stored(encoded)


cdef int64_t rows_of(const int64_t[:, ::1] extents, int64_t i) noexcept nogil:
    """How long the first dimension is that is longer than 1."""
    cdef int64_t k
    for k in range(extents.shape[1]):
        if extents[i, k] != 1:
            return extents[i, k]
    return 1


cdef vector[CPart] parts_of(const uint64_t[::1] coded, const uint8_t[:, ::1] rows) except *:
    cdef vector[CPart] parts
    cdef int64_t i
    if rows.shape[0] != coded.shape[0] or rows.shape[1] != 56:
        raise ValueError(f"{coded.shape[0]} parts, an index of {rows.shape[0]} x {rows.shape[1]} bytes")
    for i in range(coded.shape[0]):
        parts.push_back(mcr_part(coded[i], &rows[i, 0]))
    return parts


def damaged(const uint64_t[::1] coded, const uint8_t[:, ::1] rows):
    """Which of the parts, at these addresses, have not the checksum that their rows of the index say."""
    cdef vector[CPart] parts = parts_of(coded, rows)
    cdef vector[size_t] bad
    with nogil:
        bad = c_damaged(parts)
    return bad


def apply(const uint64_t[::1] coded, const uint8_t[:, ::1] rows, const int64_t[::1] box, int mode, const uint64_t[::1] at,
          const int32_t[::1] itemsize, const uint64_t[::1] index, const int64_t[:, ::1] extents, const int64_t[:, ::1] steps,
          const int64_t[:, ::1] lo, const int64_t[:, ::1] hi, const int64_t[:, ::1] strides):
    """Part i goes to box[i]. Mode 0 writes nothing, 1 applies, 2 takes back.

    Returns:
        For each part: what became of it (uint8: 0 done, 1 cannot be decoded, 2 needs elements as they were that are not there, 3 left out because
        of such others); how many elements of the box it changes (uint64), what that adds to their digest (uint64).
    """
    cdef vector[CPart] parts = parts_of(coded, rows)
    cdef int64_t n = box.shape[0], m = at.shape[0], d = extents.shape[1], i
    cdef vector[CBox] boxes
    cdef vector[const CBox*] of
    cdef vector[COutcome] outcomes
    with nogil:
        boxes.reserve(m)
        for i in range(m):
            if d:
                boxes.push_back(mcr_box(index[i], at[i], itemsize[i], d, &extents[i, 0], &steps[i, 0], &lo[i, 0], &hi[i, 0], &strides[i, 0]))
            else:
                boxes.push_back(mcr_box(index[i], at[i], itemsize[i], 0, NULL, NULL, NULL, NULL, NULL))
        for i in range(n):
            of.push_back(&boxes[box[i]])
        outcomes = c_apply(parts, of, <CMode> mode)
    what, changed, digest = np.empty(n, np.uint8), np.empty(n, np.uint64), np.empty(n, np.uint64)
    for i in range(n):
        what[i], changed[i], digest[i] = outcomes[i].what, outcomes[i].change.changed, outcomes[i].change.digest
    return what, changed, digest


def merge(const uint64_t[::1] coded, const uint8_t[:, ::1] rows, const int64_t[::1] first, const int32_t[::1] itemsize,
          const uint64_t[::1] old, const int32_t[::1] mantissa, cbool apart):
    """Parts first[i] … first[i + 1] - 1 are of one segment, of successive patches; old[i] is where its elements are as they were before, or 0.
    See `stored`, and `encode`; and which cannot be decoded."""
    cdef vector[CPart] parts = parts_of(coded, rows)
    cdef int64_t n = itemsize.shape[0], i, k
    cdef vector[CChain] chains
    cdef vector[size_t] bad
    cdef CEncoded encoded
    with nogil:
        chains.resize(n)
        for i in range(n):
            mcr_chain(chains[i], old[i], itemsize[i], mantissa[i], apart)
            for k in range(first[i], first[i + 1]):
                chains[i].parts.push_back(parts[k])
        encoded = c_merge(chains, bad)
    index, payload = stored(encoded)
    return index, payload, bad
