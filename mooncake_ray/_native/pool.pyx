# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=False
# distutils: language=c++
"""`Client`, `Lease`, `Pin`: the pool as seen by one process.

Object ids are 16 bytes, claim keys up to 28. Addresses are plain integers and are checked against the lease they go into. Every call that
talks to the broker or copies releases the GIL. A `Lease` or a `Pin` keeps its client alive, and gives its memory back when it dies.
"""
cimport cython
from cpython.buffer cimport PyBuffer_FillInfo, PyBUF_SIMPLE, PyObject_GetBuffer, PyBuffer_Release
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from cpython.bytes cimport PyBytes_FromStringAndSize, PyBytes_AS_STRING
from cpython.ref cimport PyObject, Py_INCREF
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset
from libcpp cimport bool as cbool
from libcpp.memory cimport shared_ptr
from libcpp.optional cimport optional
from libcpp.string cimport string
from libcpp.utility cimport move
from libcpp.vector cimport vector

from mooncake_ray import errors as _errors


cdef extern from "raise.h":
    void mcr_raise()
    PyObject* mcr_broker_died, *mcr_broker_mismatch

cdef extern from "pool/wire.h" namespace "mcr" nogil:
    const size_t kInlineMax
    const size_t kMaxIds
    cdef cppclass ObjectId:
        uint64_t hi, lo
    cdef cppclass ClaimKey:
        uint32_t kind
        uint8_t bytes[28]
    cdef enum class Status(uint16_t):
        kOk
        kFull
        kTooLarge
        kExists
        kMissing
        kTimeout
        kInline
        kBad
        kLost
        kDamaged

cdef extern from "pool/copy.h" namespace "mcr" nogil:
    cdef cppclass Segment:
        void* to "to"
        const void* from_ "from"
        size_t bytes

cdef extern from * nogil:
    """
    #include <span>
    #include "pool/copy.h"
    #include "pool/client.h"
    static inline mcr::Segment mcr_segment(void* to, const void* from, size_t n) {
      return {static_cast<std::byte*>(to), static_cast<const std::byte*>(from), n};
    }
    static inline void mcr_copy(const std::vector<mcr::Segment>& s, unsigned threads) { mcr::copy_segments(s, threads); }
    static inline mcr::Status mcr_create(mcr::Client& c, mcr::ObjectId id, size_t n, int64_t timeout, void** where, std::string* why,
                                         const std::string& note, mcr::Client::Place* at) {
      std::byte* p = nullptr;
      auto a = c.create(id, n, timeout, &p, note, at);
      *where = p;
      *why = std::move(a.text);
      return a.status;
    }
    static inline mcr::Status mcr_grow(mcr::Client& c, uint64_t n, std::string* why) {
      auto a = c.grow(n);
      *why = std::move(a.text);
      return a.status;
    }
    static inline bool mcr_locate(mcr::Client& c, const void* p, size_t n, mcr::ObjectId* id, uint64_t* offset) {
      auto at = c.locate(p, n);
      if (at) *id = at->id, *offset = at->offset;
      return at.has_value();
    }
    """
    Segment mcr_segment(void* to, const void* from_, size_t n)
    void mcr_copy(const vector[Segment]& s, unsigned threads) except +mcr_raise
    Status mcr_create(CClient& c, ObjectId id, size_t n, int64_t timeout, void** where, string* why, const string& note, Place* at) except +mcr_raise
    Status mcr_grow(CClient& c, uint64_t n, string* why) except +mcr_raise
    cbool mcr_locate(CClient& c, const void* p, size_t n, ObjectId* id, uint64_t* offset) except +mcr_raise

cdef extern from "pool/client.h" namespace "mcr" nogil:
    cdef cppclass Place "mcr::Client::Place":
        uint32_t arena
        uint64_t offset
    cdef cppclass ArenaInfo "mcr::Client::ArenaInfo":
        uint32_t index
        void* rw
        const void* ro
        size_t bytes
        int ro_fd
    cdef cppclass CView "mcr::View":
        cbool in_arena(uint32_t* arena, uint64_t* offset)
        const void* data()
        size_t size()
        cbool writable()
        void reset()
    cdef cppclass CClient "mcr::Client":
        @staticmethod
        shared_ptr[CClient] connect(const string& name, const string& label, const string& group, const CClient* before) except +mcr_raise
        @staticmethod
        size_t live_everywhere()
        uint64_t session()
        uint64_t capacity()
        const uint8_t* pool_id()
        cbool usable()
        ObjectId new_id()
        Status seal(ObjectId id, const ClaimKey& key, cbool handover, const vector[ObjectId]& also) except +mcr_raise
        Status put_inline(ObjectId id, const void* data, size_t n, const ClaimKey& key, cbool handover) except +mcr_raise
        Status get(ObjectId id, int64_t timeout_ns, cbool writable, CView* out) except +mcr_raise
        string wait(const vector[ObjectId]& ids, size_t want, int64_t timeout_ns) except +mcr_raise
        string stats() except +mcr_raise
        string inspect() except +mcr_raise
        void abort(ObjectId id) noexcept
        void unclaim(const ClaimKey& key) noexcept
        void adopt(const ClaimKey& key) noexcept
        void disown(const ClaimKey& key, cbool mine) noexcept
        void remove(const vector[ObjectId]& ids) noexcept
        void watch(const vector[ObjectId]& ids) noexcept
        vector[ArenaInfo] map_arenas() except +mcr_raise
        void inquire(const ClaimKey& key) noexcept
        void listen(cbool last) except +mcr_raise
        cbool next_event(int timeout_ms, ClaimKey* key) except +mcr_raise
        size_t live()
        void close()

cdef extern from "Python.h":
    int PyErr_CheckSignals() noexcept  # as Cython declares it, its exception would end in the function that calls it

cdef extern from * nogil:
    """static inline void mcr_set_interrupt(bool (*f)()) { mcr::Client::interrupted = f; }"""
    void mcr_set_interrupt(cbool (*f)() noexcept)

cdef cbool _interrupted() noexcept with gil:
    return PyErr_CheckSignals() != 0  # leaves the exception set; mcr_raise lets it pass

mcr_set_interrupt(_interrupted)
Py_INCREF(_errors.BrokerDiedError)
mcr_broker_died = <PyObject*>_errors.BrokerDiedError
Py_INCREF(_errors.BrokerMismatchError)
mcr_broker_mismatch = <PyObject*>_errors.BrokerMismatchError

INLINE_MAX = kInlineMax  # bytes


def live_handles():
    """Leases and pins of this process, over all its clients."""
    return CClient.live_everywhere()


KIND_TOKEN, KIND_RETURN, KIND_SELF, KIND_REPLICA, KIND_GONE = 1, 2, 3, 4, 5
ANSWER_HELD, ANSWER_ENDED, ANSWER_NOBODY, ANSWERS = 0x100, 0x200, 0x300, 0xf00
_KEY_BYTES = 28


cdef ObjectId _id(bytes raw) except *:
    cdef ObjectId i
    if len(raw) != sizeof(ObjectId):
        raise ValueError(f"an object id has {sizeof(ObjectId)} bytes, got {len(raw)}")
    memcpy(&i, PyBytes_AS_STRING(raw), sizeof(ObjectId))
    return i

cdef bytes _raw(ObjectId i):
    return PyBytes_FromStringAndSize(<char*>&i, sizeof(ObjectId))

cdef vector[ObjectId] _ids(ids) except *:
    cdef vector[ObjectId] out
    for raw in ids:
        out.push_back(_id(raw))
    return out

cdef ClaimKey _key(uint32_t kind, bytes raw) except *:
    cdef ClaimKey k
    if len(raw) > _KEY_BYTES:
        raise ValueError(f"a claim key has at most {_KEY_BYTES} bytes, got {len(raw)}")
    k.kind = kind
    memset(k.bytes, 0, _KEY_BYTES)
    memcpy(k.bytes, PyBytes_AS_STRING(raw), len(raw))
    return k

cdef int64_t _ns(timeout_s) except? -2:
    if timeout_s is None:
        return -1
    if timeout_s < 0:
        raise ValueError(f"timeout_s must be >= 0 or None, got {timeout_s}")
    return <int64_t>(min(timeout_s, 1e9) * 1e9)

cdef object _refuse(Status s, bytes id, str what):
    if s == Status.kMissing:
        return _errors.ObjectNotFoundError(f"{what}: no object {id.hex()} in this pool (freed, or never here)")
    if s == Status.kLost:
        return _errors.ObjectLostError(f"{what}: object {id.hex()} was lost when its broker died (or it was freed before)")
    if s == Status.kDamaged:
        return _errors.ObjectLostError(f"{what}: object {id.hex()} was spilled, and cannot be read back from the disk")
    if s == Status.kExists:
        return _errors.ObjectExistsError(f"{what}: an object {id.hex()} exists already")
    if s == Status.kTimeout:
        return _errors.GetTimeoutError(f"{what}: object {id.hex()} is still being written")
    return _errors.StoreError(f"{what}: the broker refused the request for object {id.hex()} (status {<int>s})")


cdef void _drop_shared(object capsule) noexcept:
    cdef shared_ptr[CClient]* shared = <shared_ptr[CClient]*>PyCapsule_GetPointer(capsule, "mcr::Client")
    with nogil:
        del shared


cdef class Client:
    """One process's session with its node's broker. Thread-safe. In a forked child every call raises BrokerDiedError."""
    cdef shared_ptr[CClient] c

    def __init__(self):
        raise TypeError("use Client.connect(name, label)")

    @staticmethod
    def connect(str name, str label, str group="", Client before=None):
        """Opens a session with the broker that serves `name`.

        Args:
            group: Whose quota counts for what this session puts.
            before: This process's client of a broker that died. What was spilled for it is its own again, if the new broker found it.

        Raises:
            BrokerDiedError: none does.
            BrokerMismatchError: it is of another version, or another user's.
        """
        cdef Client self = Client.__new__(Client)
        cdef string n = name.encode(), l = label.encode("ascii", "replace"), g = group.encode("ascii", "replace")
        cdef const CClient* dead = NULL
        if before is not None:
            dead = before.c.get()
        with nogil:
            self.c = CClient.connect(n, l, g, dead)
        return self

    @property
    def session(self): return self.c.get().session()
    @property
    def capacity(self):
        """Bytes of the pool when fully populated."""
        return self.c.get().capacity()
    @property
    def pool_id(self):
        """16 bytes that no other pool has."""
        return (<char*>self.c.get().pool_id())[:16]
    @property
    def usable(self): return self.c.get().usable()
    @property
    def live(self):
        """Leases and pins of this process."""
        return self.c.get().live()

    def shared(self):
        """A capsule of the native client, for this package's other native modules."""
        return PyCapsule_New(new shared_ptr[CClient](self.c), "mcr::Client", _drop_shared)

    def new_id(self):
        return _raw(self.c.get().new_id())

    def create(self, bytes id, size_t nbytes, timeout_s=None, str note=""):
        """Leases `nbytes` writable bytes as object `id`; waits its turn for at most `timeout_s` seconds (None: for ever).

        `note` says where it was put from, to whoever looks; the first 256 bytes of it are kept.

        Raises StoreFullError at the deadline, or at once for more than the pool's capacity."""
        cdef ObjectId oid = _id(id)
        cdef int64_t ns = _ns(timeout_s)
        cdef void* where
        cdef string why, n = note.encode("ascii", "replace")
        cdef Place at
        cdef Status s
        with nogil:
            s = mcr_create(self.c.get()[0], oid, nbytes, ns, &where, &why, n, &at)
        if s == Status.kFull or s == Status.kTooLarge:
            waited = "larger than the pool" if s == Status.kTooLarge else f"no room within {timeout_s} s"
            raise _errors.StoreFullError(f"{waited}: {(<bytes>why).decode()}")
        if s != Status.kOk:
            raise _refuse(s, id, "create")
        cdef Lease lease = Lease.__new__(Lease)
        lease.client = self
        lease.oid = oid
        lease.where = <uint8_t*>where
        lease.nbytes = nbytes
        lease.arena = at.arena
        lease.offset = at.offset
        lease.open = True
        return lease

    def put_inline(self, bytes id, data, uint32_t kind, bytes key, bint handover=False):
        """Stores at most INLINE_MAX bytes in the broker itself."""
        cdef Py_buffer b
        cdef ClaimKey k = _key(kind, key)
        cdef ObjectId oid = _id(id)
        cdef Status s
        PyObject_GetBuffer(data, &b, PyBUF_SIMPLE)
        try:
            with nogil:
                s = self.c.get().put_inline(oid, b.buf, b.len, k, handover)
        finally:
            PyBuffer_Release(&b)
        if s == Status.kFull:
            raise _errors.StoreFullError("the broker's budget for inline objects is used up")
        if s != Status.kOk:
            raise _refuse(s, id, "put")

    def claim(self, ids, uint32_t kind, bytes key, bint handover=False):
        """Binds sealed objects that this process has pinned to a further claim."""
        cdef vector[ObjectId] also = _ids(ids)
        cdef ClaimKey k = _key(kind, key)
        cdef ObjectId nothing_to_seal
        cdef Status s
        with nogil:
            s = self.c.get().seal(nothing_to_seal, k, handover, also)
        if s != Status.kOk:
            raise _refuse(s, ids[0] if ids else b"", "claim")

    def get(self, bytes id, timeout_s=0, bint writable=False):
        """Pins an object and maps it: read-only and shared, or (`writable`) copy-on-write and private to the returned Pin.

        Raises ObjectNotFoundError, or GetTimeoutError if it is not sealed within `timeout_s` seconds."""
        cdef Pin pin = Pin.__new__(Pin)
        cdef ObjectId oid = _id(id)
        cdef int64_t ns = _ns(timeout_s)
        cdef Status s
        with nogil:
            s = self.c.get().get(oid, ns, writable, &pin.view)
        if s != Status.kOk:
            raise _refuse(s, id, "get")
        pin.client = self
        pin.oid = oid
        return pin

    def wait(self, ids, size_t want, timeout_s=None):
        """Returns a list of bools, an id each, once `want` of them can be read or the deadline is over."""
        cdef vector[ObjectId] v = _ids(ids)
        cdef int64_t ns = _ns(timeout_s)
        cdef string ready
        with nogil:
            ready = self.c.get().wait(v, want, ns)
        return [bool(b) for b in <bytes>ready]

    def unclaim(self, uint32_t kind, bytes key):
        cdef ClaimKey k = _key(kind, key)
        with nogil:
            self.c.get().unclaim(k)

    def adopt(self, uint32_t kind, bytes key):
        cdef ClaimKey k = _key(kind, key)
        with nogil:
            self.c.get().adopt(k)

    def disown(self, uint32_t kind, bytes key, bint mine):
        cdef ClaimKey k = _key(kind, key)
        with nogil:
            self.c.get().disown(k, mine)

    def remove(self, ids):
        """Frees objects now, whatever claims them; a pinned one when its last pin is released."""
        cdef vector[ObjectId] v = _ids(ids)
        with nogil:
            self.c.get().remove(v)

    def watch(self, ids):
        """From now on `next_event` tells, as `(KIND_GONE, id)`, when one of these objects ceases to exist; at once, if it does not exist now."""
        cdef vector[ObjectId] v = _ids(ids)
        with nogil:
            self.c.get().watch(v)

    def arenas(self):
        """Maps the pool's arenas, as many as there are now, whole.

        Returns `[(number, address read-write, address read-only, nbytes, descriptor read-only)]`, valid until the client is closed. A number is
        never used again, and what is mapped stays where it is."""
        cdef vector[ArenaInfo] all
        with nogil:
            all = self.c.get().map_arenas()
        return [(a.index, <uintptr_t>a.rw, <uintptr_t>a.ro, a.bytes, a.ro_fd) for a in all]

    def inquire(self, uint32_t kind, bytes key):
        """Asks which of the other sessions answers for a claim (KIND_RETURN or KIND_TOKEN) at another broker. `next_event` tells: of kind
        `ANSWER_NOBODY | kind`; or `ANSWER_HELD | kind`, and in the end `ANSWER_ENDED | kind`; or, where it is over already, that at once."""
        cdef ClaimKey k = _key(kind, key)
        with nogil:
            self.c.get().inquire(k)

    def listen(self, bint last=False):
        """Opens the event channel: from now on this session can be asked about claims, with `last` about those that nobody else answers for.
        One thread must then call next_event."""
        with nogil:
            self.c.get().listen(last)

    def next_event(self, timeout_s=None):
        """The next question `(kind, key)`, or None after `timeout_s` seconds. Raises BrokerDiedError when the session is over.

        Of kind KIND_GONE it is no question, but tells that the object whose id the key begins with ceased to exist; with an ANSWER in its kind
        it is one to `inquire`."""
        cdef ClaimKey k
        cdef int ms = -1 if timeout_s is None else <int>(timeout_s * 1000)
        cdef cbool some
        with nogil:
            some = self.c.get().next_event(ms, &k)
        return (k.kind, (<char*>k.bytes)[:_KEY_BYTES]) if some else None

    def locate(self, uintptr_t address, size_t nbytes):
        """`(object id, offset)` if the bytes at `address` lie in one pinned object and still are what the pool has; else None."""
        cdef ObjectId oid
        cdef uint64_t offset
        cdef cbool found
        with nogil:
            found = mcr_locate(self.c.get()[0], <void*>address, nbytes, &oid, &offset)
        return (_raw(oid), offset) if found else None

    def stats(self):
        """The broker's state as JSON text."""
        cdef string s
        with nogil:
            s = self.c.get().stats()
        return (<bytes>s).decode()

    def inspect(self):
        """The broker's state as JSON text, with a row an object. Takes time in proportion to their number."""
        cdef string s
        with nogil:
            s = self.c.get().inspect()
        return (<bytes>s).decode()

    def grow(self, uint64_t nbytes):
        """Lets the pool have that many bytes; it never shrinks. Raises StoreFullError for more than the machine has."""
        cdef string why
        cdef Status s
        with nogil:
            s = mcr_grow(self.c.get()[0], nbytes, &why)
        if s != Status.kOk:
            raise _errors.StoreFullError((<bytes>why).decode())

    def close(self):
        """Ends the session, once the last lease and pin of this process are gone. Idempotent."""
        with nogil:
            self.c.get().close()


@cython.no_gc  # refers to its client only; a collector that cleared that first would leave nothing to give the memory back to
cdef class Lease:
    """Writable bytes that nobody else sees until seal(). Dropped unsealed, the memory goes back."""
    cdef Client client
    cdef ObjectId oid
    cdef uint8_t* where
    cdef readonly size_t nbytes
    cdef readonly uint32_t arena  # number of the arena that it lies in, and
    cdef readonly uint64_t offset  # where, in bytes
    cdef bint open
    cdef size_t exports  # buffers that could still write

    @property
    def id(self): return _raw(self.oid)

    @property
    def address(self): return <uintptr_t>self.where

    def __getbuffer__(self, Py_buffer* b, int flags):
        if not self.open:
            raise ValueError("this lease is sealed or given back")
        PyBuffer_FillInfo(b, self, self.where, self.nbytes, 0, flags)
        self.exports += 1

    def __releasebuffer__(self, Py_buffer* b):
        self.exports -= 1

    cdef int _let_nobody_write(self) except -1:
        if self.exports:
            raise BufferError(f"{self.exports} buffers of this lease live; release them (memoryview.release(), del array) first")
        return 0

    def copy(self, segments, unsigned threads=0):
        """Copies `[(offset, address, nbytes), …]` into the lease, with several threads where that pays. The caller keeps the sources."""
        cdef vector[Segment] v
        cdef size_t offset, n
        cdef uintptr_t address
        if not self.open:
            raise ValueError("this lease is sealed or given back")
        for offset, address, n in segments:
            if n > self.nbytes or offset > self.nbytes - n:
                raise ValueError(f"segment [{offset}, {offset + n}) exceeds the lease of {self.nbytes} bytes")
            v.push_back(mcr_segment(self.where + offset, <void*>address, n))
        with nogil:
            mcr_copy(v, threads)

    def seal(self, uint32_t kind, bytes key, bint handover=False, also=()):
        """Makes the object readable, claimed (with the pinned objects `also`) for `key`. The lease is closed.

        Raises BufferError while a buffer of it lives, through which the sealed object could be changed."""
        cdef ClaimKey k = _key(kind, key)
        cdef vector[ObjectId] more = _ids(also)
        cdef Status s
        if not self.open:
            raise ValueError("this lease is sealed or given back")
        self._let_nobody_write()
        with nogil:
            s = self.client.c.get().seal(self.oid, k, handover, more)
        if s != Status.kOk:
            raise _refuse(s, self.id, "seal")
        self.open = False

    def abort(self):
        """Gives the memory back. Idempotent. Raises BufferError while a buffer of it lives."""
        if self.open:
            self._let_nobody_write()
            self.open = False
            self.client.c.get().abort(self.oid)

    def __dealloc__(self):
        if self.open:
            self.client.c.get().abort(self.oid)


@cython.no_gc
cdef class Pin:
    """Readable bytes of a sealed object. The memory stays valid, and the object in the pool, until this dies."""
    cdef Client client
    cdef ObjectId oid
    cdef CView view
    cdef object __weakref__

    @property
    def id(self): return _raw(self.oid)
    @property
    def nbytes(self): return self.view.size()
    @property
    def address(self): return <uintptr_t>self.view.data()
    @property
    def writable(self): return self.view.writable()

    @property
    def place(self):
        """`(number of the arena, offset in it)`; None where the bytes are copies, or not in an arena."""
        cdef uint32_t arena
        cdef uint64_t offset
        return (arena, offset) if self.view.in_arena(&arena, &offset) else None

    def __len__(self): return self.view.size()

    def __getbuffer__(self, Py_buffer* b, int flags):
        PyBuffer_FillInfo(b, self, <void*>self.view.data(), self.view.size(), not self.view.writable(), flags)


def copy(const uint64_t[:, ::1] moves not None, unsigned threads=0):
    """Copies memory to memory: a row is `(to, from, nbytes)`, addresses of this process, which the caller vouches for.

    Several threads (0: as many as there are cores) where there is enough for them. Not atomic; nothing may overlap. Releases the GIL."""
    cdef vector[Segment] v
    cdef Py_ssize_t i
    if moves.shape[1] != 3:
        raise ValueError(f"moves must have 3 columns, got {moves.shape[1]}")
    with nogil:
        v.reserve(moves.shape[0])
        for i in range(moves.shape[0]):
            v.push_back(mcr_segment(<void*><uintptr_t>moves[i, 0], <void*><uintptr_t>moves[i, 1], moves[i, 2]))
        mcr_copy(v, threads)
