# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=False
# distutils: language=c++
"""Numbers out of Python lists into memory, and back: types, values and bits as they were. Private.

Only exact types count: a bool is not an int, a subclass is `OTHER`. `rows` is a list or tuple of the values themselves, or where `nested`
of lists and tuples of values. The GIL is held. Addresses are plain integers; the caller answers for what is there.
"""
from collections import namedtuple

from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libcpp cimport bool as cbool

import numpy as np

NONE, BOOL, INT, FLOAT, STR, BYTES, LIST, TUPLE, DICT, OTHER = (1 << i for i in range(10))

Scan = namedtuple("Scan", ["flags", "items", "lengths", "lo", "hi", "fits_float32"])
Scan.__doc__ = """What is in the lists.

flags: which kinds of items there are. items: how many. lengths: of each row, int64 (rows,); None if not nested.
lo, hi: least and largest int; 0, -1 if there is none; None, None if one lies outside [-2**63, 2**64).
fits_float32: every float is the same, bit for bit, after it was a float32 (True if there is none).
"""

cdef extern from "lists.h" namespace "mcr_lists":
    cdef enum What "mcr_lists::Fault::What":
        kNothing "mcr_lists::Fault::kNothing"
        kNotAList "mcr_lists::Fault::kNotAList"
        kRowsChanged "mcr_lists::Fault::kRowsChanged"
        kNotThatType "mcr_lists::Fault::kNotThatType"
        kTooLarge "mcr_lists::Fault::kTooLarge"
        kTooMany "mcr_lists::Fault::kTooMany"
        kTooFew "mcr_lists::Fault::kTooFew"
    cdef cppclass Fault:
        What what
        Py_ssize_t row, item
    cdef cppclass CScan "mcr_lists::Scan":
        unsigned flags
        Py_ssize_t items
        int64_t lo, hi
        uint64_t beyond_lo, beyond_hi
        cbool outside, fits_float32
        cbool some()
        cbool some_beyond()
    Py_ssize_t c_many_items "mcr_lists::many_items"
    unsigned c_kinds "mcr_lists::kinds"(object values, Fault* fault)
    Fault c_scan "mcr_lists::scan"(object rows, cbool nested, int64_t* lengths, Py_ssize_t n, CScan* result)
    Fault c_ints_into "mcr_lists::ints_into"(object rows, cbool nested, void* to, Py_ssize_t room, int64_t item, cbool is_signed)
    Fault c_floats_into "mcr_lists::floats_into"(object rows, cbool nested, void* to, Py_ssize_t room, int64_t item)
    Fault c_bools_into "mcr_lists::bools_into"(object rows, cbool nested, void* to, Py_ssize_t room)
    object c_ints_from "mcr_lists::ints_from"(const void* at, int64_t item, cbool is_signed, const int64_t* offsets, int64_t count,
                                              cbool as_tuple)
    object c_floats_from "mcr_lists::floats_from"(const void* at, int64_t item, const int64_t* offsets, int64_t count, cbool as_tuple)
    object c_bools_from "mcr_lists::bools_from"(const void* at, const int64_t* offsets, int64_t count, cbool as_tuple)


cdef int refuse(Fault fault, str expected) except -1:
    """Raises what the fault is about."""
    where = f"item {fault.item}" if fault.row < 0 else f"row {fault.row}" if fault.item < 0 else f"row {fault.row}, item {fault.item}"
    if fault.what == kNotAList:
        raise TypeError(f"{'row ' + str(fault.row) if fault.row >= 0 else 'what'} is neither a list nor a tuple")
    if fault.what == kNotThatType:
        raise TypeError(f"{where} is not {expected}")
    if fault.what == kTooLarge:
        raise OverflowError(f"{where} does not fit {expected}")
    if fault.what == kRowsChanged or fault.what == kTooMany or fault.what == kTooFew:
        raise ValueError("there are other items than there is room for: the lists were changed meanwhile")
    return 0


def kinds(values):
    """Which kinds of items a list or tuple has: NONE | BOOL | …. TypeError if it is neither."""
    cdef Fault fault
    cdef unsigned flags = c_kinds(values, &fault)
    refuse(fault, "")
    return flags


def set_many(Py_ssize_t items):
    """From how many items on several threads look at nested lists; for tests. Returns what it was."""
    global c_many_items
    before = c_many_items
    c_many_items = items
    return before


def scan(rows, cbool nested):
    """A `Scan`, in one pass. TypeError where a row is neither a list nor a tuple."""
    if type(rows) is not list and type(rows) is not tuple:
        raise TypeError(f"{type(rows).__name__} is neither a list nor a tuple")
    cdef Py_ssize_t n = len(rows) if nested else 0
    lengths = np.empty(n, np.int64)
    cdef int64_t[::1] view = lengths
    cdef CScan found
    refuse(c_scan(rows, nested, &view[0] if n else NULL, n, &found), "")
    lo, hi = 0, -1
    if found.outside:
        lo = hi = None
    elif found.some() or found.some_beyond():
        lo = found.lo if found.some() else found.beyond_lo
        hi = found.beyond_hi if found.some_beyond() else found.hi
    return Scan(found.flags, found.items, lengths if nested else None, lo, hi, found.fits_float32)


def ints_into(rows, cbool nested, uintptr_t to, int64_t item, cbool signed, Py_ssize_t room):
    """Writes the ints, as integers of 1, 2, 4 or 8 bytes, to the address `to`.

    room: how many there are (`Scan.items`); ValueError if there are more or fewer. TypeError for what is not an int, OverflowError for one that
    does not fit; the memory is then written in part.
    """
    if item != 1 and item != 2 and item != 4 and item != 8:
        raise ValueError(f"an integer of {item} bytes; 1, 2, 4 or 8 were expected")
    refuse(c_ints_into(rows, nested, <void*> to, room, item, signed), f"an {'' if signed else 'unsigned '}int of {item} bytes")


def floats_into(rows, cbool nested, uintptr_t to, int64_t item, Py_ssize_t room):
    """Writes the floats, as float32 (item 4, rounded) or float64 (item 8). Otherwise as `ints_into`."""
    if item != 4 and item != 8:
        raise ValueError(f"a float of {item} bytes; 4 or 8 were expected")
    refuse(c_floats_into(rows, nested, <void*> to, room, item), "a float")


def bools_into(rows, cbool nested, uintptr_t to, Py_ssize_t room):
    """Writes the bools, a byte each. Otherwise as `ints_into`."""
    refuse(c_bools_into(rows, nested, <void*> to, room), "a bool")


cdef const int64_t* offsets_of(const int64_t[::1] offsets, int64_t* count) except? NULL:
    """Checks them. NULL for no offsets, and `count` values; otherwise sets `count` to that of the rows."""
    cdef Py_ssize_t i
    if offsets is None:
        if count[0] < 0:
            raise ValueError("neither offsets nor a count")
        return NULL
    if offsets.shape[0] < 1 or offsets[0] < 0:
        raise ValueError("offsets begin with a number that is not negative")
    for i in range(offsets.shape[0] - 1):
        if offsets[i + 1] < offsets[i]:
            raise ValueError(f"offset {i + 1} is less than the one before it")
    count[0] = offsets.shape[0] - 1
    return &offsets[0]


def ints_from(uintptr_t address, int64_t item, cbool signed, const int64_t[::1] offsets, cbool as_tuple, int64_t count=-1):
    """A list of lists (or tuples) of ints: row r has the integers offsets[r] … offsets[r + 1] - 1 at the address.

    Without offsets one list (or tuple) of the first `count` integers.
    """
    if item != 1 and item != 2 and item != 4 and item != 8:
        raise ValueError(f"an integer of {item} bytes; 1, 2, 4 or 8 were expected")
    cdef const int64_t* at = offsets_of(offsets, &count)
    return c_ints_from(<const void*> address, item, signed, at, count, as_tuple)


def floats_from(uintptr_t address, int64_t item, const int64_t[::1] offsets, cbool as_tuple, int64_t count=-1):
    """As `ints_from`, of float32 (item 4) or float64 (item 8)."""
    if item != 4 and item != 8:
        raise ValueError(f"a float of {item} bytes; 4 or 8 were expected")
    cdef const int64_t* at = offsets_of(offsets, &count)
    return c_floats_from(<const void*> address, item, at, count, as_tuple)


def bools_from(uintptr_t address, const int64_t[::1] offsets, cbool as_tuple, int64_t count=-1):
    """As `ints_from`, of bytes that are 0 or not."""
    cdef const int64_t* at = offsets_of(offsets, &count)
    return c_bools_from(<const void*> address, at, count, as_tuple)
