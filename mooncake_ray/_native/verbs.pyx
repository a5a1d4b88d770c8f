# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=False
# distutils: language=c++
"""`Rails`, `Responder`, `Reader`: RDMA reads, straight on libibverbs, which is looked for when it is first needed.

Ports are `(device, port, gid_index)`. Everything that waits, pins memory or reads releases the GIL. In a forked child every call raises.
"""
from cpython.ref cimport PyObject, Py_INCREF
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport shared_ptr, unique_ptr
from libcpp.string cimport string
from libcpp.utility cimport move
from libcpp.vector cimport vector

from mooncake_ray import errors as _errors


cdef extern from *:
    """
    #include <Python.h>
    #include <cstring>
    #include <span>
    #include "verbs/reader.h"
    inline PyObject* mcr_verbs_failed = nullptr;  // called with what went wrong; sets the exception
    inline void mcr_verbs_raise() {
      try {
        throw;
      } catch (const mcr::verbs::Interrupted&) {
        if (!PyErr_Occurred()) PyErr_SetNone(PyExc_KeyboardInterrupt);
      } catch (const mcr::verbs::Error& e) {
        PyObject* made = PyObject_CallFunction(mcr_verbs_failed, "issi", int(e.failure), e.what(), e.op.c_str(), e.code);
        if (made) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made)), made);
        Py_XDECREF(made);
      } catch (const std::system_error& e) {
        PyObject* made = PyObject_CallFunction(mcr_verbs_failed, "issi", 0, e.what(), "", e.code().value());
        if (made) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made)), made);
        Py_XDECREF(made);
      } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
      } catch (const std::out_of_range& e) {
        PyErr_SetString(PyExc_IndexError, e.what());
      } catch (const std::exception& e) {
        PyErr_SetString(PyExc_RuntimeError, e.what());
      }
    }
    static inline void mcr_gid(mcr::verbs::Gid& to, const char* from) { std::memcpy(to.data(), from, to.size()); }
    static inline const mcr::verbs::Rail& mcr_rail(const mcr::verbs::Rails& r, size_t i) { return r[i]; }
    static inline void mcr_read(mcr::verbs::Reader& r, const uint64_t* table, size_t rows, int64_t timeout, bool (*interrupted)()) {
      static_assert(sizeof(mcr::verbs::Range) == 32);
      r.read({reinterpret_cast<const mcr::verbs::Range*>(table), rows}, timeout, interrupted);
    }
    """
    void mcr_verbs_raise()
    PyObject* mcr_verbs_failed

cdef extern from "verbs/library.h" namespace "mcr::verbs" nogil:
    void library() except +mcr_verbs_raise

cdef extern from "verbs/plan.h" namespace "mcr::verbs" nogil:
    cdef cppclass Piece:
        uint64_t address, bytes
        vector[uint32_t] keys
        uint64_t near
    cdef cppclass Region:
        uint64_t address, bytes
        vector[Piece] pieces
    cdef cppclass CRegions "mcr::verbs::Regions":
        Region& operator[](uint64_t)

cdef extern from "verbs/rails.h" namespace "mcr::verbs" nogil:
    cdef cppclass Gid:
        const uint8_t* data()
    cdef cppclass PortName:
        string device
        uint8_t port
        int gid_index
    cdef cppclass Port:
        PortName name
        cbool ethernet
        uint16_t lid
        Gid gid
        int mtu
        uint32_t reads_out, reads_in, max_message
        uint64_t max_registration
    cdef cppclass Rail:
        Port port
    cdef cppclass CRails "mcr::verbs::Rails":
        @staticmethod
        shared_ptr[CRails] open(const vector[PortName]& ports) except +mcr_verbs_raise
        size_t size()
        vector[uint32_t] add(uint64_t address, uint64_t n, uint64_t near) except +mcr_verbs_raise
        vector[uint32_t] add_dmabuf(int file, uint64_t offset, uint64_t address, uint64_t n, uint64_t near) except +mcr_verbs_raise
        void remove(uint64_t address) except +mcr_verbs_raise
    int c_memory_node "mcr::verbs::memory_node"(uint64_t address)
    vector[string] c_device_names "mcr::verbs::device_names"() except +mcr_verbs_raise

cdef extern from "verbs/queues.h" namespace "mcr::verbs" nogil:
    cdef cppclass End:
        uint32_t number, first_packet
    cdef cppclass FarPort:
        cbool ethernet
        uint16_t lid
        Gid gid
        int mtu
        uint32_t reads_out, reads_in
    cdef cppclass Manner:
        uint8_t timeout, retries, traffic_class, service_level
    cdef cppclass CResponder "mcr::verbs::Responder":
        CResponder(shared_ptr[CRails] rails, vector[size_t] on) except +mcr_verbs_raise
        vector[End] ends()
        void connect(size_t queue, const FarPort& far, End end, const Manner& manner) except +mcr_verbs_raise

cdef extern from "verbs/reader.h" namespace "mcr::verbs" nogil:
    cdef cppclass CReader "mcr::verbs::Reader":
        CReader(shared_ptr[CRails] rails, vector[size_t] on, const Manner& manner) except +mcr_verbs_raise
        vector[End] ends()
        void connect(size_t queue, const FarPort& far, End end, size_t key) except +mcr_verbs_raise
        void set_regions(CRegions regions) except +mcr_verbs_raise
        void close() except +mcr_verbs_raise
        string why_closed()
        vector[uint64_t] bytes_read()

cdef extern from * nogil:
    void mcr_gid(Gid& to, const char* from_)
    const Rail& mcr_rail(const CRails& r, size_t i)
    void mcr_read(CReader& r, const uint64_t* table, size_t rows, int64_t timeout, cbool (*interrupted)() noexcept) except +mcr_verbs_raise

cdef extern from "Python.h":
    int PyErr_CheckSignals() noexcept  # as Cython declares it, its exception would end in the function that calls it

cdef cbool _interrupted() noexcept with gil:
    return PyErr_CheckSignals() != 0  # leaves the exception set; mcr_verbs_raise lets it pass


_KINDS = (_errors.TransportError, _errors.RegistrationError, _errors.PeerLostError, _errors.TransportUnavailableError)

def _failed(int failure, str text, str op, int code):
    return _KINDS[failure](text, op, code)

Py_INCREF(_failed)
mcr_verbs_failed = <PyObject*>_failed


def load():
    """Finds libibverbs. Raises TransportUnavailableError, with the reason."""
    with nogil:
        library()


def device_names():
    """Of the RDMA devices that can be opened here. Raises TransportUnavailableError where there is no libibverbs."""
    cdef vector[string] names
    with nogil:
        names = c_device_names()
    return [(<bytes>n).decode() for n in names]


def memory_node(uint64_t address):
    """The NUMA node that the memory at an address is bound to, or prefers. -1: none, or several. Touches no page."""
    return c_memory_node(address)


cdef uint64_t _set(rails) except? 0:
    """Of rails, by number; None: all. Those from 64 on are in every set."""
    if rails is None:
        return <uint64_t>-1
    cdef uint64_t out = 0
    for rail in rails:
        if rail < 0:
            raise ValueError(f"there is no rail {rail}")
        if rail < 64:
            out |= <uint64_t>1 << <int>rail
    return out


cdef vector[size_t] _on(rails, size_t size) except *:
    cdef vector[size_t] out
    for rail in rails:
        if not 0 <= rail < size:
            raise IndexError(f"there is no rail {rail}; there are {size}")
        out.push_back(rail)
    return out

cdef FarPort _far(port) except *:
    cdef FarPort far
    cdef bytes gid = bytes.fromhex(port["gid"])
    if len(gid) != 16:
        raise ValueError(f"a GID has 16 bytes, got {len(gid)}")
    mcr_gid(far.gid, gid)
    far.ethernet, far.lid, far.mtu = port["ethernet"], port["lid"], port["mtu"]
    far.reads_out, far.reads_in = port["reads_out"], port["reads_in"]
    if not 1 <= far.mtu <= 5:
        raise ValueError(f"an MTU is 1 to 5, got {far.mtu}")
    return far

cdef End _end(end) except *:
    cdef End out
    out.number, out.first_packet = end
    if out.number >= 1 << 24 or out.first_packet >= 1 << 24:
        raise ValueError(f"queue pairs and packets have 24 bits, got {end}")
    return out

cdef Manner _manner(manner) except *:
    cdef Manner out
    out.timeout, out.retries, out.traffic_class, out.service_level = manner
    return out

cdef list _ends(vector[End] ends):
    return [(e.number, e.first_packet) for e in ends]


cdef class Rails:
    """Open ports, and the memory that is registered with all of them. Thread-safe. Lives as long as a reader or responder of it does."""
    cdef shared_ptr[CRails] c

    def __init__(self, ports):
        """Opens `(device, port, gid_index)` each. Raises TransportUnavailableError for one that is not there, or not up."""
        cdef vector[PortName] names
        cdef PortName name
        for device, port, gid_index in ports:
            name.device = device.encode()
            name.port = port
            name.gid_index = gid_index
            names.push_back(name)
        with nogil:
            self.c = CRails.open(names)

    def __len__(self): return self.c.get().size()

    def ports(self):
        """A dict a port: what a peer must know, and `max_message` and `max_registration` in bytes."""
        cdef const Port* p
        out = []
        for i in range(self.c.get().size()):
            p = &mcr_rail(self.c.get()[0], i).port
            out.append({
                "name": (<bytes>p.name.device).decode(), "port": p.name.port, "ethernet": p.ethernet, "lid": p.lid,
                "gid": (<const char*>p.gid.data())[:16].hex(), "mtu": p.mtu, "reads_out": p.reads_out, "reads_in": p.reads_in,
                "max_message": p.max_message, "max_registration": p.max_registration,
            })
        return out

    def register(self, uint64_t address, uint64_t nbytes, near=None):
        """Pins that memory and lets peers read it. `near`: the rails that are near to it (None: all), which then read into it. Returns the
        keys for peers, one a rail. Raises RegistrationError."""
        cdef vector[uint32_t] keys
        cdef uint64_t rails = _set(near)
        with nogil:
            keys = self.c.get().add(address, nbytes, rails)
        return keys

    def register_dmabuf(self, int fd, uint64_t offset, uint64_t address, uint64_t nbytes, near=None):
        """Like `register`, for another device's memory, which begins at `offset` of that dma-buf. Borrows the descriptor."""
        cdef vector[uint32_t] keys
        cdef uint64_t rails = _set(near)
        with nogil:
            keys = self.c.get().add_dmabuf(fd, offset, address, nbytes, rails)
        return keys

    def unregister(self, uint64_t address):
        """Takes back one `register`, of memory that no peer was told of. Does nothing for what was not registered."""
        with nogil:
            self.c.get().remove(address)


cdef class Responder:
    """Queue pairs that answer the reads of one peer. `on`: for each, its rail. Gone with the object."""
    cdef unique_ptr[CResponder] c

    def __init__(self, Rails rails not None, on):
        cdef vector[size_t] where = _on(on, len(rails))
        with nogil:
            self.c.reset(new CResponder(rails.c, where))

    def ends(self):
        """`(number, first packet)` of each."""
        return _ends(self.c.get().ends())

    def connect(self, size_t queue, port, end, manner):
        """Leads one queue pair to `end` at the far `port` (as `Rails.ports` describes it)."""
        cdef FarPort far = _far(port)
        cdef End e = _end(end)
        cdef Manner m = _manner(manner)
        with nogil:
            self.c.get().connect(queue, far, e, m)


cdef class Reader:
    """Queue pairs that read from one peer. `on`: for each, its rail. Thread-safe; one read at a time."""
    cdef unique_ptr[CReader] c

    def __init__(self, Rails rails not None, on, manner):
        """`manner`: timeout (4.096 us * 2**timeout), retries, traffic class, service level."""
        cdef vector[size_t] where = _on(on, len(rails))
        cdef Manner m = _manner(manner)
        with nogil:
            self.c.reset(new CReader(rails.c, where, m))

    def ends(self):
        return _ends(self.c.get().ends())

    def connect(self, size_t queue, port, end, size_t key):
        """Leads one queue pair to `end` at the far `port`; `key`: which of a piece's keys is for it."""
        cdef FarPort far = _far(port)
        cdef End e = _end(end)
        with nogil:
            self.c.get().connect(queue, far, e, key)

    def set_regions(self, regions, size_t keys):
        """What the peer has: `{region: (address, nbytes, [(address, nbytes, keys), ...], near)}`, with so many keys a piece, and the numbers
        of the peer's rails that are near to it."""
        cdef CRegions all
        cdef Region region
        cdef Piece piece
        for number, (address, nbytes, pieces, near) in regions.items():
            region.address, region.bytes = address, nbytes
            piece.near = _set(near)
            region.pieces.clear()
            end = address
            for at, n, rkeys in pieces:
                if at != end or n <= 0 or len(rkeys) != keys:
                    raise ValueError(f"region {number}: {n} bytes at {at:#x} with {len(rkeys)} keys, after {end:#x}, of {keys} rails")
                piece.address, piece.bytes, piece.keys = at, n, rkeys
                region.pieces.push_back(piece)
                end = at + n
            if end != address + nbytes:
                raise ValueError(f"region {number}: pieces of {end - address} bytes make a region of {nbytes}")
            (&all[<uint64_t>number])[0] = region
        with nogil:
            self.c.get().set_regions(move(all))

    def read(self, const uint64_t[:, ::1] ranges not None, double timeout_s):
        """Rows: region, offset, local address, nbytes. Raises TransportError, PeerLostError, KeyboardInterrupt; then, unless it was the
        EINVAL of a wrong range or the end of waiting for its turn, the reader is closed, and nothing comes to the local memory any more."""
        if ranges.shape[1] != 4:
            raise ValueError(f"a range has 4 numbers, got {ranges.shape[1]}")
        cdef int64_t ns = <int64_t>(min(max(timeout_s, 0.0), 1e9) * 1e9)
        if not ranges.shape[0]:
            return
        with nogil:
            mcr_read(self.c.get()[0], &ranges[0, 0], ranges.shape[0], ns, _interrupted)

    @property
    def why_closed(self):
        """"" while it is open."""
        return (<bytes>self.c.get().why_closed()).decode()

    def bytes_read(self):
        """Of each queue pair, so far."""
        return self.c.get().bytes_read()

    def close(self):
        """A read under way ends with TransportError (ECANCELED); waits for it."""
        with nogil:
            self.c.get().close()
