# cython: language_level=3, boundscheck=False, wraparound=False
"""Dicts with the same keys to columns, and back. Private. The GIL is held, and no Python code runs in between."""
from cpython.dict cimport PyDict_Copy, PyDict_Next, PyDict_SetItem, PyDict_Size
from cpython.object cimport Py_EQ, PyObject, PyObject_RichCompareBool


cdef bint same(object a, object b):
    """Whether two keys are one key, type and bits. Strings, bytes and ints of the exact type are compared, everything else must be the object."""
    if a is b:
        return True
    kind = type(a)
    if kind is not type(b) or (kind is not str and kind is not int and kind is not bytes):
        return False
    return PyObject_RichCompareBool(a, b, Py_EQ)


def columns(list values not None):
    """The keys of exact dicts, and for each a list of the values; None where they do not all have the same keys in the same order."""
    cdef Py_ssize_t n = len(values), width, row, at, place
    cdef PyObject *key
    cdef PyObject *value
    if n and type(values[0]) is not dict:
        raise TypeError(f"row 0 is a {type(values[0]).__name__}, not a dict")
    cdef list keys = list(values[0]) if n else []
    width = len(keys)
    cdef list result = [[None] * n for _ in range(width)]
    for row in range(n):
        item = values[row]
        if type(item) is not dict:
            raise TypeError(f"row {row} is a {type(item).__name__}, not a dict")
        if PyDict_Size(item) != width:
            return None
        at = place = 0
        while PyDict_Next(item, &at, &key, &value):
            if place >= width or not same(<object> key, keys[place]):
                return None
            (<list> result[place])[row] = <object> value
            place += 1
    return keys, result


def dicts(list keys not None, list columns not None, Py_ssize_t n):
    """`n` new dicts with these keys, which are hashable and all different (ValueError), of the values in the columns, one for each key."""
    cdef dict template = dict.fromkeys(keys)
    cdef Py_ssize_t width = len(keys), row, place
    if len(template) != width or len(columns) != width:
        raise ValueError(f"{len(template)} different keys, {width} keys, and {len(columns)} columns")
    for column in columns:
        if type(column) is not list or len(<list> column) != n:
            raise ValueError(f"a column is no list of {n} values")
    cdef list result = [None] * n
    for row in range(n):
        item = PyDict_Copy(template)
        for place in range(width):
            PyDict_SetItem(item, keys[place], (<list> columns[place])[row])
        result[row] = item
    return result
