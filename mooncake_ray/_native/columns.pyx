# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=False
# distutils: language=c++
"""The kernels behind typed, ragged columns, as `mooncake_ray.data.kernels` describes them. Private.

Addresses are plain integers: the caller answers for what is there. Everything else is checked. Every kernel releases the GIL.
"""
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport int64_t, uint8_t, uint64_t, uintptr_t
from libcpp cimport bool as cbool

import numpy as np


cdef extern from *:
    """
    #include "columns/pack.h"
    #include "columns/pages.h"
    #include "parallel.h"
    #include "columns/prove.h"
    #include "columns/unpack.h"
    static inline mcr::Cells mcr_cells(uintptr_t at, int64_t rows, int64_t width, int64_t stride, int64_t item) {
      return {reinterpret_cast<std::byte*>(at), rows, width, stride, item};
    }
    static inline std::byte* mcr_bytes(uintptr_t at) { return reinterpret_cast<std::byte*>(at); }
    static inline bool mcr_int_range(const mcr::Cells& c, bool is_signed, const mcr::Spans& s, uint64_t* lo, uint64_t* hi) {
      const auto range = mcr::int_range(c, is_signed, s);
      if (range) *lo = range->first, *hi = range->second;
      return range.has_value();
    }
    """
    ctypedef struct byte "std::byte":
        pass
    cdef struct CCells "mcr::Cells":
        int64_t rows, width, stride, item
    cdef struct CSpans "mcr::Spans":
        const int64_t* starts
        const int64_t* lengths
    cdef struct CRagged "mcr::Ragged":
        const int64_t* offsets
        const int64_t* starts
    CCells mcr_cells(uintptr_t at, int64_t rows, int64_t width, int64_t stride, int64_t item) nogil
    byte* mcr_bytes(uintptr_t at) nogil
    cbool mcr_int_range(const CCells&, cbool is_signed, const CSpans&, uint64_t* lo, uint64_t* hi) except + nogil

cdef extern from * namespace "mcr" nogil:
    cbool c_find_spans "mcr::find_spans"(const CCells&, const byte* one, int64_t* starts, int64_t* lengths) except +
    cbool c_trim "mcr::trim"(const CCells&, const byte* pad, int64_t* starts, int64_t* lengths) except +
    cbool c_outside_is "mcr::outside_is"(const CCells&, const CSpans&, const byte* pad) except +
    cbool c_inside_constant "mcr::inside_constant"(const CCells&, const CSpans&, byte* values) except +
    cbool c_last_hot "mcr::last_hot"(const CCells&, const CSpans&, byte* values) except +
    cbool c_is_positions "mcr::is_positions"(const CCells&, const CSpans&) except +
    cbool c_is_arange "mcr::is_arange"(const CCells&, const CSpans&) except +
    cbool c_rows_equal "mcr::rows_equal"(const CCells&, const CCells&) except +
    cbool c_all_equal "mcr::all_equal"(const CCells&, const byte* value) except +
    void c_pack "mcr::pack"(const CCells&, const CSpans&, byte* to) except +
    void c_pack_ints "mcr::pack_ints"(const CCells&, const CSpans&, byte* to, int64_t to_item) except +
    void c_pack_bits "mcr::pack_bits"(const CCells&, const CSpans&, byte* to) except +
    void c_gather "mcr::gather"(const byte* source, const int64_t* starts, const int64_t* nbytes, int64_t n, byte* to) except +
    void c_unpack "mcr::unpack"(const byte* values, const CRagged&, const CCells&, const byte* pad) except +
    void c_unpack_ints "mcr::unpack_ints"(const byte* values, int64_t from_item, cbool from_signed, const CRagged&, const CCells&,
                                          const byte* pad) except +
    void c_unpack_bits "mcr::unpack_bits"(const byte* values, int64_t bit, const CRagged&, const CCells&, const byte* one, const byte* zero,
                                          const byte* pad) except +
    void c_fill_spans "mcr::fill_spans"(const CCells&, const CSpans&, const byte* inside, const byte* outside) except +
    void c_fill_last "mcr::fill_last"(const CCells&, const CSpans&, const byte* values) except +
    void c_fill_positions "mcr::fill_positions"(const CCells&, const CSpans&) except +
    void c_set_cores "mcr::set_cores"(unsigned cores)
    cdef cppclass CPages "mcr::Pages":
        CPages(size_t bytes) except +
        byte* data()
    size_t c_kept "mcr::Pages::kept"(cbool release)


cdef CCells cells_of(object cells) except *:
    address, rows, width, stride, item = cells
    return mcr_cells(address, rows, width, stride, item)


cdef const int64_t* numbers(const int64_t[::1] array, int64_t expected, str name) except? NULL:
    if array.shape[0] != expected:
        raise ValueError(f"{name} has {array.shape[0]} numbers, not {expected}")
    return &array[0] if expected else NULL


cdef CSpans spans_of(CCells cells, const int64_t[::1] starts, const int64_t[::1] lengths) except *:
    cdef CSpans spans
    spans.starts = numbers(starts, cells.rows, "starts")
    spans.lengths = numbers(lengths, cells.rows, "lengths")
    return spans


cdef CRagged ragged_of(CCells cells, const int64_t[::1] offsets, const int64_t[::1] starts) except *:
    cdef CRagged ragged
    if cells.rows < 0:
        raise ValueError(f"cells of {cells.rows} rows")
    ragged.offsets = numbers(offsets, cells.rows + 1, "offsets")
    ragged.starts = numbers(starts, cells.rows, "starts")
    return ragged


cdef const byte* bits_of(bytes bits, CCells cells, str name) except NULL:
    if len(bits) != cells.item:
        raise ValueError(f"{name} has {len(bits)} bytes, an item {cells.item}")
    return <const byte*> PyBytes_AS_STRING(bits)


cdef byte* items_of(const uint8_t[:, ::1] items, CCells cells, str name) except? NULL:
    if items.shape[0] != cells.rows or items.shape[1] != cells.item:
        raise ValueError(f"{name} is {items.shape[0]} x {items.shape[1]} bytes; there are {cells.rows} rows of items of {cells.item}")
    return <byte*> &items[0, 0] if cells.rows else NULL


ctypedef cbool (*Finder)(const CCells&, const byte*, int64_t*, int64_t*) except + nogil
ctypedef cbool (*Valued)(const CCells&, const CSpans&, byte*) except + nogil
ctypedef cbool (*Proof)(const CCells&, const CSpans&) except + nogil


cdef found(Finder find, cells, bytes bits, str name):
    """Starts and lengths of spans, or None."""
    cdef CCells c = cells_of(cells)
    cdef const byte* item = bits_of(bits, c, name)
    starts = np.empty(max(c.rows, 0), np.int64)
    lengths = np.empty(max(c.rows, 0), np.int64)
    cdef int64_t[::1] s = starts, n = lengths
    cdef int64_t *to_s = &s[0] if c.rows > 0 else NULL, *to_n = &n[0] if c.rows > 0 else NULL
    cdef cbool good
    with nogil:
        good = find(c, item, to_s, to_n)
    return (starts, lengths) if good else None


cdef valued(Valued look, cells, const int64_t[::1] starts, const int64_t[::1] lengths):
    """One item a row, or None."""
    cdef CCells c = cells_of(cells)
    cdef CSpans spans = spans_of(c, starts, lengths)
    values = np.empty((c.rows, c.item), np.uint8)
    cdef byte* to = items_of(values, c, "values")
    cdef cbool good
    with nogil:
        good = look(c, spans, to)
    return values if good else None


cdef proved(Proof proof, cells, const int64_t[::1] starts, const int64_t[::1] lengths):
    cdef CCells c = cells_of(cells)
    cdef CSpans spans = spans_of(c, starts, lengths)
    cdef cbool good
    with nogil:
        good = proof(c, spans)
    return good


def find_spans(cells, bytes one not None): return found(c_find_spans, cells, one, "one")


def trim(cells, bytes pad not None): return found(c_trim, cells, pad, "pad")


def outside_is(cells, const int64_t[::1] starts, const int64_t[::1] lengths, bytes pad not None):
    cdef CCells c = cells_of(cells)
    cdef CSpans spans = spans_of(c, starts, lengths)
    cdef const byte* bits = bits_of(pad, c, "pad")
    cdef cbool good
    with nogil:
        good = c_outside_is(c, spans, bits)
    return good


def inside_constant(cells, const int64_t[::1] starts, const int64_t[::1] lengths): return valued(c_inside_constant, cells, starts, lengths)


def last_hot(cells, const int64_t[::1] starts, const int64_t[::1] lengths): return valued(c_last_hot, cells, starts, lengths)


def is_positions(cells, const int64_t[::1] starts, const int64_t[::1] lengths): return proved(c_is_positions, cells, starts, lengths)


def is_arange(cells, const int64_t[::1] starts, const int64_t[::1] lengths): return proved(c_is_arange, cells, starts, lengths)


def rows_equal(a, b):
    cdef CCells left = cells_of(a), right = cells_of(b)
    cdef cbool good
    with nogil:
        good = c_rows_equal(left, right)
    return good


def all_equal(cells, bytes value not None):
    cdef CCells c = cells_of(cells)
    cdef const byte* bits = bits_of(value, c, "value")
    cdef cbool good
    with nogil:
        good = c_all_equal(c, bits)
    return good


def int_range(cells, cbool signed, const int64_t[::1] starts, const int64_t[::1] lengths):
    cdef CCells c = cells_of(cells)
    cdef CSpans spans = spans_of(c, starts, lengths)
    cdef uint64_t lo = 0, hi = 0
    cdef cbool some
    with nogil:
        some = mcr_int_range(c, signed, spans, &lo, &hi)
    if not some:
        return None
    if signed:
        return <int64_t> lo, <int64_t> hi
    return lo, hi


def pack(cells, const int64_t[::1] starts, const int64_t[::1] lengths, uintptr_t to):
    cdef CCells c = cells_of(cells)
    cdef CSpans spans = spans_of(c, starts, lengths)
    with nogil:
        c_pack(c, spans, mcr_bytes(to))


def pack_ints(cells, const int64_t[::1] starts, const int64_t[::1] lengths, uintptr_t to, int64_t to_item):
    cdef CCells c = cells_of(cells)
    cdef CSpans spans = spans_of(c, starts, lengths)
    with nogil:
        c_pack_ints(c, spans, mcr_bytes(to), to_item)


def pack_bits(cells, const int64_t[::1] starts, const int64_t[::1] lengths, uintptr_t to):
    cdef CCells c = cells_of(cells)
    cdef CSpans spans = spans_of(c, starts, lengths)
    with nogil:
        c_pack_bits(c, spans, mcr_bytes(to))


def gather(uintptr_t source, const int64_t[::1] starts, const int64_t[::1] nbytes, uintptr_t to):
    cdef int64_t n = starts.shape[0]
    cdef const int64_t *first = numbers(starts, n, "starts"), *size = numbers(nbytes, n, "nbytes")
    with nogil:
        c_gather(mcr_bytes(source), first, size, n, mcr_bytes(to))


def unpack(uintptr_t values, const int64_t[::1] offsets, const int64_t[::1] starts, cells, bytes pad not None):
    cdef CCells c = cells_of(cells)
    cdef CRagged ragged = ragged_of(c, offsets, starts)
    cdef const byte* bits = bits_of(pad, c, "pad")
    with nogil:
        c_unpack(mcr_bytes(values), ragged, c, bits)


def unpack_ints(uintptr_t values, int64_t from_item, cbool from_signed, const int64_t[::1] offsets, const int64_t[::1] starts, cells,
                bytes pad not None):
    cdef CCells c = cells_of(cells)
    cdef CRagged ragged = ragged_of(c, offsets, starts)
    cdef const byte* bits = bits_of(pad, c, "pad")
    with nogil:
        c_unpack_ints(mcr_bytes(values), from_item, from_signed, ragged, c, bits)


def unpack_bits(uintptr_t values, int64_t bit_offset, const int64_t[::1] offsets, const int64_t[::1] starts, cells, bytes one not None,
                bytes zero not None, bytes pad not None):
    cdef CCells c = cells_of(cells)
    cdef CRagged ragged = ragged_of(c, offsets, starts)
    cdef const byte *ones = bits_of(one, c, "one"), *zeros = bits_of(zero, c, "zero"), *pads = bits_of(pad, c, "pad")
    with nogil:
        c_unpack_bits(mcr_bytes(values), bit_offset, ragged, c, ones, zeros, pads)


def fill_spans(cells, const int64_t[::1] starts, const int64_t[::1] lengths, const uint8_t[:, ::1] inside, bytes outside not None):
    cdef CCells c = cells_of(cells)
    cdef CSpans spans = spans_of(c, starts, lengths)
    cdef const byte *items = items_of(inside, c, "inside"), *bits = bits_of(outside, c, "outside")
    with nogil:
        c_fill_spans(c, spans, items, bits)


def fill_last(cells, const int64_t[::1] starts, const int64_t[::1] lengths, const uint8_t[:, ::1] values):
    cdef CCells c = cells_of(cells)
    cdef CSpans spans = spans_of(c, starts, lengths)
    cdef const byte* items = items_of(values, c, "values")
    with nogil:
        c_fill_last(c, spans, items)


def fill_positions(cells, const int64_t[::1] starts, const int64_t[::1] lengths):
    cdef CCells c = cells_of(cells)
    cdef CSpans spans = spans_of(c, starts, lengths)
    with nogil:
        c_fill_positions(c, spans)


def set_cores(unsigned cores):
    """How many cores there shall be, for tests; 0 for what the machine has."""
    c_set_cores(cores)


def kept(cbool release=False):
    """Bytes that were given back and are kept for the next `Pages`; `release` unmaps them."""
    return c_kept(release)


cdef class Pages:
    """Memory of undefined contents in huge pages, through the buffer protocol; given back when the last view of it dies."""

    cdef CPages* pages
    cdef Py_ssize_t nbytes

    def __cinit__(self, size_t nbytes):
        self.pages = new CPages(nbytes)
        self.nbytes = nbytes

    def __dealloc__(self):
        del self.pages

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.pages.data(), self.nbytes, 0, flags)
