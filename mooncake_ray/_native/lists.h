// Numbers out of Python lists, and back. The GIL is held throughout, and no Python code runs between looking at a list and at its items.
//
// Many items are looked at by several threads, while the one that has the GIL works along and waits for them: nobody can change a list or let
// go of an item meanwhile. They read only, and count no references; what needs a function of Python's is left to the thread with the GIL.
#pragma once
#include <Python.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>
#include <type_traits>
#include <vector>

#include "parallel.h"

namespace mcr_lists {

enum : unsigned { kNone = 1, kBool = 2, kInt = 4, kFloat = 8, kStr = 16, kBytes = 32, kList = 64, kTuple = 128, kDict = 256, kOther = 512 };

inline unsigned kind_of(PyObject* o) {
  const PyTypeObject* t = Py_TYPE(o);
  if (t == &PyLong_Type) return kInt;
  if (t == &PyFloat_Type) return kFloat;
  if (t == &PyUnicode_Type) return kStr;
  if (t == &PyList_Type) return kList;
  if (t == &PyDict_Type) return kDict;
  if (t == &PyBool_Type) return kBool;
  if (o == Py_None) return kNone;
  if (t == &PyTuple_Type) return kTuple;
  if (t == &PyBytes_Type) return kBytes;
  return kOther;
}

// The items of an exact list or tuple, borrowed.
struct Items {
  PyObject* const* at;
  Py_ssize_t n;
};

inline bool items_of(PyObject* o, Items* out) {
  if (PyList_CheckExact(o))
    *out = {reinterpret_cast<PyListObject*>(o)->ob_item, PyList_GET_SIZE(o)};
  else if (PyTuple_CheckExact(o))
    *out = {reinterpret_cast<PyTupleObject*>(o)->ob_item, PyTuple_GET_SIZE(o)};
  else
    return false;
  return true;
}

constexpr Py_ssize_t kAhead = 24;  // objects: what memory delivers while so many are looked at

inline void prefetch(const Items& items, Py_ssize_t i) {
  if (i + kAhead < items.n) __builtin_prefetch(items.at[i + kAhead]);
}

// Of an exact int: whether it is one of those that are read here, and its value. A quick way for most: those of less than 60 bits, or from
// Python 3.12 on, where it is asked for them, those of one digit.
inline bool small_int(PyObject* o, int64_t* value) {
  auto* v = reinterpret_cast<PyLongObject*>(o);
#if PY_VERSION_HEX >= 0x030C0000
  if (!PyUnstable_Long_IsCompact(v)) return false;
  *value = PyUnstable_Long_CompactValue(v);
#else
  const Py_ssize_t size = Py_SIZE(v);  // digits, negative for a negative int
  if (size_t(size + 1) <= 2) {
    *value = int64_t(size) * int64_t(v->ob_digit[0]);
    return true;
  }
  if (size != 2 && size != -2) return false;
  static_assert(2 * PyLong_SHIFT < 64);
  const int64_t most = int64_t(v->ob_digit[1]) << PyLong_SHIFT | int64_t(v->ob_digit[0]);
  *value = size < 0 ? -most : most;
#endif
  return true;
}

// Of any exact int: what 64 bits can hold of it.
enum class Held { kSigned, kUnsigned, kNot };  // in an int64_t, else in a uint64_t, else not
inline Held any_int(PyObject* o, uint64_t* bits) {
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(o, &overflow);
  *bits = uint64_t(value);
  if (!overflow) return Held::kSigned;
  if (overflow < 0) return Held::kNot;
  *bits = PyLong_AsUnsignedLongLong(o);
  if (*bits != ~uint64_t{0} || !PyErr_Occurred()) return Held::kUnsigned;
  PyErr_Clear();
  return Held::kNot;
}

struct Scan {
  unsigned flags = 0;
  Py_ssize_t items = 0;
  // Of the ints in an int64_t; of those beyond, in a uint64_t; and whether there are others.
  int64_t lo = std::numeric_limits<int64_t>::max(), hi = std::numeric_limits<int64_t>::min();
  uint64_t beyond_lo = std::numeric_limits<uint64_t>::max(), beyond_hi = 0;
  bool outside = false;
  bool fits_float32 = true;
  bool alone = true;      // this thread has the GIL
  bool deferred = false;  // an int was met that only such a thread can look at: nothing of this holds

  bool some() const { return lo <= hi; }
  bool some_beyond() const { return beyond_hi > 0; }

  void wide(PyObject* o) {
    uint64_t bits;
    const Held held = any_int(o, &bits);
    if (held == Held::kSigned) {
      lo = std::min(lo, int64_t(bits));
      hi = std::max(hi, int64_t(bits));
    } else if (held == Held::kUnsigned) {
      beyond_lo = std::min(beyond_lo, bits);
      beyond_hi = std::max(beyond_hi, bits);
    } else {
      outside = true;
    }
  }

  void look(const Items& list) {
    items += list.n;
    for (Py_ssize_t i = 0; i < list.n;) {  // runs of one type
      PyObject* o = list.at[i];
      if (PyLong_CheckExact(o)) {
        flags |= kInt;
        int64_t least = lo, most = hi;
        do {
          prefetch(list, i);
          int64_t value;
          if (small_int(o, &value)) {
            least = std::min(least, value);
            most = std::max(most, value);
          } else if (alone) {
            wide(o);
          } else {
            deferred = true;
            return;
          }
        } while (++i < list.n && PyLong_CheckExact(o = list.at[i]));
        lo = std::min(lo, least);
        hi = std::max(hi, most);
      } else if (PyFloat_CheckExact(o)) {
        flags |= kFloat;
        uint64_t differ = 0;
        do {
          prefetch(list, i);
          const double value = PyFloat_AS_DOUBLE(o);
          differ |= std::bit_cast<uint64_t>(double(float(value))) ^ std::bit_cast<uint64_t>(value);
        } while (++i < list.n && PyFloat_CheckExact(o = list.at[i]));
        fits_float32 &= !differ;
      } else {
        flags |= kind_of(o);
        ++i;
      }
    }
  }
};

inline void merge(const Scan& part, Scan* all) {
  all->flags |= part.flags;
  all->items += part.items;
  all->lo = std::min(all->lo, part.lo);
  all->hi = std::max(all->hi, part.hi);
  all->fits_float32 &= part.fits_float32;
}

// What went wrong with which item of which row; row -1 where lists are not nested.
struct Fault {
  enum What { kNothing, kNotAList, kRowsChanged, kNotThatType, kTooLarge, kTooMany, kTooFew } what = kNothing;
  Py_ssize_t row = -1, item = -1;
};

// f(items, row) -> bool for the items, or for those of each row.
template <class F>
Fault over_lists(PyObject* rows, bool nested, F&& f) {
  Items outer;
  if (!items_of(rows, &outer)) return {Fault::kNotAList};
  if (!nested) {
    f(outer, -1);
    return {};
  }
  for (Py_ssize_t r = 0; r < outer.n; ++r) {
    if (r + 2 < outer.n) __builtin_prefetch(outer.at[r + 2]);
    Items next, items;
    if (r + 1 < outer.n && items_of(outer.at[r + 1], &next) && next.n) __builtin_prefetch(next.at);
    if (!items_of(outer.at[r], &items)) return {Fault::kNotAList, r};
    if (!f(items, r)) break;
  }
  return {};
}

inline unsigned kinds(PyObject* values, Fault* fault) {
  unsigned flags = 0;
  *fault = over_lists(values, false, [&](const Items& list, Py_ssize_t) {
    for (Py_ssize_t i = 0; i < list.n; ++i) prefetch(list, i), flags |= kind_of(list.at[i]);
    return true;
  });
  return flags;
}

inline Py_ssize_t many_items = 1 << 18;  // from which on several threads pay; each takes about an eighth of that at a time

// Rows in pieces of about as many items: row `first[i]` is the first of piece i, whose items begin at `at[i]` of all.
struct Pieces {
  std::vector<Py_ssize_t> first{0}, at{0};

  explicit Pieces(const Items& rows) {
    const Py_ssize_t piece = std::max<Py_ssize_t>(1, many_items / 8);
    for (Py_ssize_t r = 0, items = 0; r < rows.n; ++r) {
      if (r + 2 < rows.n) __builtin_prefetch(rows.at[r + 2]);
      Items row;
      if (!items_of(rows.at[r], &row)) {
        first = {0};
        return;
      }
      items += row.n;
      if (items - at.back() >= piece || r + 1 == rows.n) first.push_back(r + 1), at.push_back(items);
    }
  }
  bool many() const { return first.size() > 2 && at.back() >= many_items; }

  // f(first row, row after the last, items before) -> bool for every piece, on several threads; whether all returned true.
  template <class F>
  bool each(F&& f) const {
    const size_t bytes = size_t(at.back()) * 32;  // of the objects, about
    return mcr::parallel(first.size() - 1, mcr::threads_for(bytes), [&](size_t i) { return f(first[i], first[i + 1], at[i]); });
  }
};

// lengths: room for `rows_n` rows, if nested.
inline Fault scan(PyObject* rows, bool nested, int64_t* lengths, Py_ssize_t rows_n, Scan* result) {
  Items outer;
  if (!items_of(rows, &outer)) return {Fault::kNotAList};
  if (nested && outer.n != rows_n) return {Fault::kRowsChanged};
  if (nested) {
    const Pieces pieces(outer);
    std::mutex mutex;
    Scan all;
    const auto look = [&](Py_ssize_t r, Py_ssize_t end, Py_ssize_t) {
      Scan mine;
      mine.alone = false;
      for (Items row; r < end && !mine.deferred && items_of(outer.at[r], &row); ++r) lengths[r] = row.n, mine.look(row);
      const std::lock_guard lock(mutex);
      merge(mine, &all);
      return !mine.deferred;
    };
    if (pieces.many() && pieces.each(look)) return *result = all, Fault{};
  }
  return over_lists(rows, nested, [&](const Items& list, Py_ssize_t row) {
    if (nested) lengths[row] = list.n;
    result->look(list);
    return true;
  });
}

// Copies items while there is room for them. put(object, where, whether this thread has the GIL) -> Fault::What.
template <class T, class F>
Fault into(PyObject* rows, bool nested, T* to, Py_ssize_t room, F&& put) {
  Items outer;
  if (nested && items_of(rows, &outer)) {
    const Pieces pieces(outer);
    const auto copy = [&](Py_ssize_t r, Py_ssize_t end, Py_ssize_t before) {
      T* at = to + before;
      for (Items row; r < end && items_of(outer.at[r], &row); at += row.n, ++r)
        for (Py_ssize_t i = 0; i < row.n; ++i) {
          prefetch(row, i);
          if (put(row.at[i], at + i, false) != Fault::kNothing) [[unlikely]] return false;
        }
      return true;
    };
    if (pieces.many() && pieces.at.back() == room && pieces.each(copy)) return {};
  }
  Fault fault;  // else one after the other, which tells what is wrong where
  T* const end = to + room;
  const Fault shape = over_lists(rows, nested, [&](const Items& list, Py_ssize_t row) {
    if (list.n > end - to) return fault = {Fault::kTooMany, row, -1}, false;
    for (Py_ssize_t i = 0; i < list.n; ++i) {
      prefetch(list, i);
      if (const auto what = put(list.at[i], to + i, true); what != Fault::kNothing) [[unlikely]]
        return fault = {what, row, i}, false;
    }
    to += list.n;
    return true;
  });
  if (shape.what != Fault::kNothing) return shape;
  if (fault.what == Fault::kNothing && to != end) return {Fault::kTooFew};
  return fault;
}

template <class T>
Fault ints_as(PyObject* rows, bool nested, void* to, Py_ssize_t room) {
  return into(rows, nested, static_cast<T*>(to), room, [](PyObject* o, T* at, bool alone) {
    if (!PyLong_CheckExact(o)) return Fault::kNotThatType;
    int64_t value;
    if (small_int(o, &value)) [[likely]] {
      const T narrow = T(value);
      std::memcpy(at, &narrow, sizeof narrow);
      return int64_t(narrow) == value && (std::is_signed_v<T> || value >= 0) ? Fault::kNothing : Fault::kTooLarge;
    }
    if (!alone) return Fault::kTooLarge;
    uint64_t bits;
    const Held held = any_int(o, &bits);
    const T narrow = T(bits);
    std::memcpy(at, &narrow, sizeof narrow);
    if (held == Held::kSigned)
      return int64_t(narrow) == int64_t(bits) && (std::is_signed_v<T> || int64_t(bits) >= 0) ? Fault::kNothing : Fault::kTooLarge;
    return held == Held::kUnsigned && std::is_unsigned_v<T> && uint64_t(narrow) == bits ? Fault::kNothing : Fault::kTooLarge;
  });
}

template <class T>
Fault floats_as(PyObject* rows, bool nested, void* to, Py_ssize_t room) {
  return into(rows, nested, static_cast<T*>(to), room, [](PyObject* o, T* at, bool) {
    if (!PyFloat_CheckExact(o)) return Fault::kNotThatType;
    const T value = T(PyFloat_AS_DOUBLE(o));
    std::memcpy(at, &value, sizeof value);
    return Fault::kNothing;
  });
}

inline Fault bools_into(PyObject* rows, bool nested, void* to, Py_ssize_t room) {
  return into(rows, nested, static_cast<uint8_t*>(to), room, [](PyObject* o, uint8_t* at, bool) {
    *at = o == Py_True;
    return o == Py_True || o == Py_False ? Fault::kNothing : Fault::kNotThatType;
  });
}

// f(T{}, is_signed) for the integer type.
template <class F>
auto with_int(int64_t item, bool is_signed, F&& f) {
  switch (item * 2 + is_signed) {
    case 2: return f(uint8_t{});
    case 3: return f(int8_t{});
    case 4: return f(uint16_t{});
    case 5: return f(int16_t{});
    case 8: return f(uint32_t{});
    case 9: return f(int32_t{});
    case 16: return f(uint64_t{});
    default: return f(int64_t{});
  }
}

inline Fault ints_into(PyObject* rows, bool nested, void* to, Py_ssize_t room, int64_t item, bool is_signed) {
  return with_int(item, is_signed, [&](auto type) { return ints_as<decltype(type)>(rows, nested, to, room); });
}

inline Fault floats_into(PyObject* rows, bool nested, void* to, Py_ssize_t room, int64_t item) {
  return item == 4 ? floats_as<float>(rows, nested, to, room) : floats_as<double>(rows, nested, to, room);
}

// ---- and back

// A list or tuple of the values first … first + n - 1, each made by make(index), which returns a new reference.
template <class F>
PyObject* build(int64_t first, int64_t n, bool as_tuple, F&& make) {
  PyObject* result = as_tuple ? PyTuple_New(n) : PyList_New(n);
  if (!result) return nullptr;
  PyObject** to = as_tuple ? reinterpret_cast<PyTupleObject*>(result)->ob_item : reinterpret_cast<PyListObject*>(result)->ob_item;
  for (int64_t i = 0; i < n; ++i)
    if (!(to[i] = make(first + i))) {
      Py_DECREF(result);
      return nullptr;
    }
  return result;
}

// No garbage collection while new containers are made, of which none can be garbage; else it looks at all of them again and again, which
// takes ten times as long as making them. Nobody sees that it is off, as the GIL is held and no Python code runs.
struct Uncollected {
  const int was = PyGC_Disable();
  Uncollected() = default;
  ~Uncollected() {
    if (was) PyGC_Enable();
  }
  Uncollected(const Uncollected&) = delete;
  Uncollected& operator=(const Uncollected&) = delete;
};

// offsets: rows + 1, checked; or nullptr for one list of `count` values.
template <class F>
PyObject* build_rows(const int64_t* offsets, int64_t count, bool as_tuple, F&& make) {
  if (!offsets) return build(0, count, as_tuple, make);
  const Uncollected uncollected;
  PyObject* result = PyList_New(count);
  if (!result) return nullptr;
  for (int64_t r = 0; r < count; ++r) {
    PyObject* row = build(offsets[r], offsets[r + 1] - offsets[r], as_tuple, make);
    if (!row) {
      Py_DECREF(result);
      return nullptr;
    }
    PyList_SET_ITEM(result, r, row);
  }
  return result;
}

template <class T>
T load(const void* from, int64_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(from) + i * int64_t(sizeof(T)), sizeof value);
  return value;
}

// Ints made of late, by value: token ids repeat, and a reference to an int costs a tenth of a new one. As Python does with those below 257.
class RecentInts {
 public:
  explicit RecentInts(int64_t count) : entries_(count < kPays ? nullptr : static_cast<Entry*>(PyMem_Calloc(kEntries, sizeof(Entry)))) {}
  ~RecentInts() {
    if (!entries_) return;
    for (size_t i = 0; i < kEntries; ++i) Py_XDECREF(entries_[i].made);
    PyMem_Free(entries_);
  }
  RecentInts(const RecentInts&) = delete;
  RecentInts& operator=(const RecentInts&) = delete;

  // A new reference.
  PyObject* get(int64_t value) {
    if (!entries_ || (value >= -5 && value <= 256)) return PyLong_FromLongLong(value);
    Entry& entry = entries_[uint64_t(value) * 0x9E3779B97F4A7C15 >> (64 - kBits)];
    if (entry.value != value || !entry.made) [[unlikely]] {
      PyObject* made = PyLong_FromLongLong(value);
      if (!made) return nullptr;
      Py_XDECREF(entry.made);
      entry = {value, made};
    }
    Py_INCREF(entry.made);
    return entry.made;
  }

 private:
  static constexpr int kBits = 14;  // 256 KiB: they stay in a core's own cache
  static constexpr size_t kEntries = size_t{1} << kBits;
  static constexpr int64_t kPays = 4 * kEntries;
  struct Entry {
    int64_t value;
    PyObject* made;
  };
  Entry* entries_;  // nullptr also where there was no memory for them
};

inline PyObject* ints_from(const void* from, int64_t item, bool is_signed, const int64_t* offsets, int64_t count, bool as_tuple) {
  return with_int(item, is_signed, [&](auto type) {
    using T = decltype(type);
    RecentInts recent(offsets ? offsets[count] - offsets[0] : count);
    return build_rows(offsets, count, as_tuple, [&](int64_t i) {
      const T value = load<T>(from, i);
      if constexpr (sizeof(T) == 1) return PyLong_FromLong(value);
      if (std::is_same_v<T, uint64_t> && int64_t(value) < 0) return PyLong_FromUnsignedLongLong(value);
      return recent.get(int64_t(value));
    });
  });
}

inline PyObject* floats_from(const void* from, int64_t item, const int64_t* offsets, int64_t count, bool as_tuple) {
  if (item == 4) return build_rows(offsets, count, as_tuple, [from](int64_t i) { return PyFloat_FromDouble(double(load<float>(from, i))); });
  return build_rows(offsets, count, as_tuple, [from](int64_t i) { return PyFloat_FromDouble(load<double>(from, i)); });
}

inline PyObject* bools_from(const void* from, const int64_t* offsets, int64_t count, bool as_tuple) {
  return build_rows(offsets, count, as_tuple, [from](int64_t i) { return PyBool_FromLong(load<uint8_t>(from, i)); });
}

}  // namespace mcr_lists
