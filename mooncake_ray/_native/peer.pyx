# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=False
# distutils: language=c++
"""`Server` and `Link`: pins and bytes of one node's pool for the engine of another, over authenticated TCP.

Whoever knows the secret may read everything in the pool, and nobody may write. Nothing is encrypted. All calls release the GIL.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.pycapsule cimport PyCapsule_GetPointer
from cpython.ref cimport PyObject, Py_INCREF
from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy
from libcpp cimport bool as cbool
from libcpp.memory cimport shared_ptr, unique_ptr
from libcpp.string cimport string
from libcpp.utility cimport move
from libcpp.vector cimport vector

from mooncake_ray import errors as _errors


cdef extern from "raise_peer.h":
    void mcr_raise_peer()
    PyObject* mcr_peer_errors[3]
    PyObject* mcr_broker_died, *mcr_broker_mismatch

cdef extern from "pool/client.h" namespace "mcr" nogil:
    cdef cppclass ObjectId:
        uint64_t hi, lo
    cdef cppclass Place "mcr::Client::Place":
        uint32_t arena
        uint64_t offset
    cdef cppclass CClient "mcr::Client":
        pass

cdef extern from "<string_view>" namespace "std" nogil:
    cdef cppclass string_view:
        const char* data()
        size_t size()

cdef extern from "peer/link.h" namespace "mcr::peer" nogil:
    cdef enum class Code(uint16_t):
        kOk
        kInline
        kNotYet
        kMissing
        kLost
    cdef cppclass Pinned:
        Code code
        uint64_t region, offset, size, available
        string_view inlined
        string source
    cdef cppclass Piece:
        uint64_t region, offset, local, bytes
    cdef cppclass LinkOptions "mcr::peer::Link::Options":
        string session, me, source_address
        cbool events
        int64_t timeout_ns
    cdef cppclass CLink "mcr::peer::Link":
        @staticmethod
        unique_ptr[CLink] connect(const string& host, uint16_t port, const string& secret, const LinkOptions& o) except +mcr_raise_peer
        const string& pool_id()
        const string& peer()
        string describe(int64_t timeout_ns) except +mcr_raise_peer
        vector[Pinned] pin(const vector[ObjectId]& ids, int64_t timeout_ns, const string& bad, cbool inlined, cbool kept) except +mcr_raise_peer
        uint64_t wait(ObjectId id, uint64_t beyond, int64_t timeout_ns) except +mcr_raise_peer
        cbool unpin(const vector[ObjectId]& ids, int64_t timeout_ns, cbool kept) except +mcr_raise_peer
        string exchange(const string& transport, const string& blob, int64_t timeout_ns) except +mcr_raise_peer
        cbool next_event(int64_t timeout_ns, ObjectId* id) except +mcr_raise_peer
        void close()
        cbool closed()

cdef extern from "peer/server.h" namespace "mcr::peer" nogil:
    cdef enum class ZeroCopy "mcr::peer::Server::Options::ZeroCopy":
        kNever
        kWhereItIs
    cdef cppclass ServerOptions "mcr::peer::Server::Options":
        unsigned threads
        ZeroCopy zero_copy
    cdef cppclass Ask "mcr::peer::Server::Ask":
        uint64_t session
        string transport, blob
    cdef cppclass Stats "mcr::peer::Server::Stats":
        uint64_t connections, sessions, pins, bytes_sent, refused, requests, offers, replicas, bytes_lent
    cdef cppclass CServer "mcr::peer::Server":
        CServer(shared_ptr[CClient] client, const string& host, uint16_t port, string secret, ServerOptions o) except +mcr_raise_peer
        uint16_t port()
        void describe(string text) except +mcr_raise_peer
        void offer(ObjectId id, Place at, uint64_t n) except +mcr_raise_peer
        void progress(ObjectId id, uint64_t n) except +mcr_raise_peer
        void retract(ObjectId id) except +mcr_raise_peer
        void gone(ObjectId id) except +mcr_raise_peer
        cbool next_request(int64_t timeout_ns, Ask* ask) except +mcr_raise_peer
        void answer(uint64_t session, const string& blob) except +mcr_raise_peer
        Stats stats() except +mcr_raise_peer
        void close()

cdef extern from * nogil:
    """
    static inline void mcr_read(const std::vector<mcr::peer::Link*>& links, const uint64_t* rows, size_t n, int64_t timeout,
                                bool (*tell)(void*, uint64_t), void* told, uint64_t step) {
      std::vector<mcr::peer::Piece> pieces(n);
      for (size_t i = 0; i < n; ++i) pieces[i] = {rows[4 * i], rows[4 * i + 1], rows[4 * i + 2], rows[4 * i + 3]};
      const mcr::peer::Reached reached{[&](uint64_t bytes) { return tell(told, bytes); }, step};
      mcr::peer::read_striped(links, pieces, timeout, told ? &reached : nullptr);
    }
    static inline void mcr_set_interrupt(bool (*f)()) { mcr::Client::interrupted = f; }
    """
    void mcr_read(const vector[CLink*]& links, const uint64_t* rows, size_t n, int64_t timeout, cbool (*tell)(void*, uint64_t) noexcept,
                  void* told, uint64_t step) except +mcr_raise_peer
    void mcr_set_interrupt(cbool (*f)() noexcept)

cdef extern from "Python.h":
    int PyErr_CheckSignals() noexcept

cdef cbool _interrupted() noexcept with gil:
    return PyErr_CheckSignals() != 0  # leaves the exception set; mcr_raise lets it pass

mcr_set_interrupt(_interrupted)
for _i, _e in enumerate((_errors.PeerLostError, _errors.PeerRefusedError, _errors.TransportError)):
    Py_INCREF(_e)
    mcr_peer_errors[<int>_i] = <PyObject*>_e
Py_INCREF(_errors.BrokerDiedError)
mcr_broker_died = <PyObject*>_errors.BrokerDiedError
Py_INCREF(_errors.BrokerMismatchError)
mcr_broker_mismatch = <PyObject*>_errors.BrokerMismatchError

COPIES = 1 << 32
"""Regions from this number on are no arenas: only `Link.read` and `read_striped`, with links of the session that pinned, read them."""

_STATUS = ("ok", "inline", "not-yet", "missing", "lost")


cdef ObjectId _id(bytes raw) except *:
    cdef ObjectId i
    if len(raw) != sizeof(ObjectId):
        raise ValueError(f"an object id has {sizeof(ObjectId)} bytes, got {len(raw)}")
    memcpy(&i, PyBytes_AS_STRING(raw), sizeof(ObjectId))
    return i

cdef vector[ObjectId] _ids(ids) except *:
    cdef vector[ObjectId] out
    for raw in ids:
        out.push_back(_id(raw))
    return out

cdef int64_t _ns(timeout_s) except? -2:
    if not timeout_s >= 0:
        raise ValueError(f"timeout_s must be >= 0, got {timeout_s}")
    return <int64_t>(min(timeout_s, 1e9) * 1e9)

cdef uint16_t _port(port) except? 0:
    if not 0 <= port < 65536:
        raise ValueError(f"a port is less than 65536, got {port}")
    return <uint16_t>port

cdef const uint64_t* _rows(const uint64_t[:, ::1] ranges) except? NULL:
    if ranges.shape[1] != 4:
        raise ValueError(f"ranges must have 4 columns, got {ranges.shape[1]}")
    return &ranges[0, 0] if ranges.shape[0] else NULL


cdef class Server:
    """Serves the objects of one pool to peers. Thread-safe.

    Args:
        client: Of the pool, `pool.Client`. The server's own session with the broker is that client's.
        host: The one address to listen on. ValueError for one that stands for all.
        port: 0: any that is free; see `port`.
        secret: What peers must know.
        threads: Event loops.
        zero_copy: Large ranges go from the pool's memory to the network without a copy, where the kernel can do that: not to this machine itself.
    """
    cdef CServer* s
    cdef dict _offered  # leases of the offers: not given back while peers read them

    def __init__(self, client, str host, int port, bytes secret, *, unsigned threads=2, bint zero_copy=True):
        cdef ServerOptions o
        if self.s != NULL:
            raise RuntimeError("a server is initialised once")
        capsule = client.shared()
        cdef shared_ptr[CClient] c = (<shared_ptr[CClient]*>PyCapsule_GetPointer(capsule, "mcr::Client"))[0]
        cdef string h = host.encode(), key = secret
        cdef uint16_t p = _port(port)
        o.threads = threads
        o.zero_copy = ZeroCopy.kWhereItIs if zero_copy else ZeroCopy.kNever
        self._offered = {}
        with nogil:
            self.s = new CServer(c, h, p, key, o)

    def __dealloc__(self):
        cdef CServer* s = self.s
        if s != NULL:
            with nogil:
                del s

    @property
    def port(self): return self.s.port()

    def describe(self, bytes text):
        """What `Link.describe` returns from now on; at most 64 KiB. Also lets peers read arenas that came since."""
        cdef string t = text
        with nogil:
            self.s.describe(t)

    def offer(self, bytes id, lease):
        """Lets peers pin an object that is still being received into `lease` (pool.Lease). Nothing of it is there yet: see `progress`.
        Who reads what has not come waits for it, and after `retract` gets whatever is there: its `wait` or `unpin` then says that this is worth nothing.

        The lease is kept until `retract`; it must not be aborted before that."""
        cdef ObjectId oid = _id(id)
        cdef Place at
        cdef uint64_t n = lease.nbytes
        at.arena, at.offset = lease.arena, lease.offset
        self._offered[id] = lease
        with nogil:
            self.s.offer(oid, at, n)

    def progress(self, bytes id, uint64_t nbytes):
        """The first `nbytes` bytes are there. Never shrinks."""
        cdef ObjectId oid = _id(id)
        with nogil:
            self.s.progress(oid, nbytes)

    def retract(self, bytes id):
        """Ends an offer: after the lease was sealed (its readers' pins go on), or before it is aborted (they are lost). Idempotent."""
        cdef ObjectId oid = _id(id)
        with nogil:
            self.s.retract(oid)
        self._offered.pop(id, None)

    def gone(self, bytes id):
        """The object ceased to exist here: peers that keep a replica of it, and listen to events, are told."""
        cdef ObjectId oid = _id(id)
        with nogil:
            self.s.gone(oid)

    def next_request(self, timeout_s):
        """The next question of a peer `(session, transport, blob)`, to be answered in order; `(session, "", b"")`: it is over. None: nothing came."""
        cdef Ask a
        cdef int64_t ns = _ns(timeout_s)
        cdef cbool some
        with nogil:
            some = self.s.next_request(ns, &a)
        return (a.session, (<bytes>a.transport).decode(errors="replace"), <bytes>a.blob) if some else None

    def answer(self, uint64_t session, bytes blob):
        """Answers the oldest question of a session; at most 64 KiB. Nothing happens if the session is over."""
        cdef string b = blob
        with nogil:
            self.s.answer(session, b)

    def stats(self):
        """Numbers by name: connections, sessions, pins (objects), offers, replicas (elsewhere, of objects here); since the start bytes_sent,
        bytes_lent (of those, without a copy, or at least so meant), requests, refused (connections)."""
        cdef Stats s
        with nogil:
            s = self.s.stats()
        return {"connections": s.connections, "sessions": s.sessions, "pins": s.pins, "bytes_sent": s.bytes_sent, "bytes_lent": s.bytes_lent,
                "refused": s.refused, "requests": s.requests, "offers": s.offers, "replicas": s.replicas}

    def close(self):
        """Ends all connections and pins. Idempotent."""
        with nogil:
            self.s.close()
        self._offered.clear()


cdef class Link:
    """One connection to a peer's server. Threads take turns. After any error it is closed, but after EINVAL, EOPNOTSUPP and ValueError.

    Raises:
        PeerLostError: the connection ended, or what came makes no sense.
        TransportError: with `errno` ETIMEDOUT the deadline passed; EINVAL: the peer has no such range; EOPNOTSUPP: nobody answers there.
        ValueError: what is asked exceeds a limit.
    """
    cdef unique_ptr[CLink] l
    cdef readonly str peer
    cdef readonly bytes pool_id

    def __init__(self):
        raise TypeError("use Link.connect(host, port, secret, session)")

    @staticmethod
    def connect(str host, int port, bytes secret, bytes session, *, bint events=False, str me="", source_address=None, timeout_s=5.0):
        """Connects and authenticates, both ends to each other.

        Args:
            session: 16 bytes, the same for all links of this process to that peer. Pins live until the last of them is closed.
            events: This link is for `next_event` only.
            me: "host:port" of this process's own server; empty: no other peer is sent here.
            source_address: The local address to connect from.

        Raises:
            PeerRefusedError: one end's secret or version is another one.
            PeerLostError: nobody is there.
        """
        cdef LinkOptions o
        cdef string h = host.encode(), key = secret
        cdef uint16_t p = _port(port)
        cdef Link self = Link.__new__(Link)
        o.session = session
        o.me = me.encode()
        o.source_address = (source_address or "").encode()
        o.events = events
        o.timeout_ns = _ns(timeout_s)
        with nogil:
            self.l = CLink.connect(h, p, key, o)
        cdef string pool_id = self.l.get().pool_id(), peer = self.l.get().peer()
        self.pool_id = <bytes>pool_id
        self.peer = (<bytes>peer).decode()
        return self

    def describe(self, timeout_s):
        """The peer's `Server.describe` text."""
        cdef int64_t ns = _ns(timeout_s)
        cdef string text
        with nogil:
            text = self.l.get().describe(ns)
        return <bytes>text

    def pin(self, ids, timeout_s, *, str bad_source="", bint inline=True, bint keep=False):
        """Pins objects at the peer, at most 4096.

        Args:
            bad_source: "host:port" that an earlier call named as source, and that failed: it is not named again.
            inline: Objects up to 64 KiB may come with the reply, and are not pinned then.
            keep: This process keeps a replica of each that comes inline, as `unpin(kept=True)` would say: no more calls are needed for those.
                What is pinned is not kept by this.

        Returns:
            An id each `(status, region, offset, nbytes, available, bytes or None, source)`. Status: "ok"; "inline": the bytes are there;
            "not-yet": unsealed; "missing"; "lost". `available` < `nbytes`: it is still being received there, see `wait`. A region from COPIES
            on is in no arena. `source`: "host:port" of the peer to read it from; "": this one.
        """
        cdef vector[ObjectId] v = _ids(ids)
        cdef int64_t ns = _ns(timeout_s)
        cdef string bad = bad_source.encode()
        cdef vector[Pinned] all
        cdef size_t i
        with nogil:
            all = self.l.get().pin(v, ns, bad, inline, keep)
        out = []
        for i in range(all.size()):
            out.append((_STATUS[<int>all[i].code], all[i].region, all[i].offset, all[i].size, all[i].available,
                        PyBytes_FromStringAndSize(all[i].inlined.data(), all[i].inlined.size()) if all[i].code == Code.kInline else None,
                        (<bytes>all[i].source).decode(errors="replace")))
        return out

    def wait(self, bytes id, uint64_t beyond, timeout_s):
        """How many bytes from the start are there, once it is more than `beyond` or the time is over. PeerLostError if the peer gave it up."""
        cdef ObjectId oid = _id(id)
        cdef int64_t ns = _ns(timeout_s)
        cdef uint64_t n
        with nogil:
            n = self.l.get().wait(oid, beyond, ns)
        return n

    def unpin(self, ids, timeout_s, *, bint kept=False):
        """Ends one `pin` of each. True: all were pinned the whole time, so what was read meanwhile is what the objects hold.

        `kept`: this process has a replica of each now (also of such as came inline, which are not pinned): others may be sent to read it
        here, and `next_event` tells when the object is gone."""
        cdef vector[ObjectId] v = _ids(ids)
        cdef int64_t ns = _ns(timeout_s)
        cdef cbool all
        with nogil:
            all = self.l.get().unpin(v, ns, kept)
        return all

    def exchange(self, str transport, bytes blob, timeout_s):
        """Asks the peer's transport of that name; at most 64 KiB there and back."""
        cdef string t = transport.encode(), b = blob, answer
        cdef int64_t ns = _ns(timeout_s)
        with nogil:
            answer = self.l.get().exchange(t, b, ns)
        return <bytes>answer

    def read(self, const uint64_t[:, ::1] ranges not None, timeout_s):
        """Reads ranges, straight into memory: rows of region, offset, local address (the caller vouches for it), nbytes.

        Bytes that the peer is still receiving are waited for; when they are there, `wait` says whether they are the object's."""
        read_striped([self], ranges, timeout_s)

    def next_event(self, timeout_s):
        """Of a link for events: the id of an object that is gone at the peer, or None after that time."""
        cdef ObjectId oid
        cdef int64_t ns = _ns(timeout_s)
        cdef cbool some
        with nogil:
            some = self.l.get().next_event(ns, &oid)
        return PyBytes_FromStringAndSize(<char*>&oid, sizeof(ObjectId)) if some else None

    def close(self):
        """Idempotent; a call under way in another thread fails."""
        if self.l.get() != NULL:
            self.l.get().close()

    @property
    def closed(self): return self.l.get() == NULL or self.l.get().closed()


cdef cbool _tell(void* told, uint64_t nbytes) noexcept with gil:
    reached, failures = <tuple>told
    try:
        reached(nbytes)
    except BaseException as e:
        failures.append(e)
    return not failures

def read_striped(links, const uint64_t[:, ::1] ranges not None, timeout_s, *, reached=None, uint64_t step=2 << 20):
    """Like `Link.read`, with several links to one peer at once, a thread each; they share the work as they get on.

    `reached(nbytes)`, if given, is called by this thread while the links go on: the first `nbytes` bytes of the ranges, in their order, are there.
    That is whenever it is at least `step` more than the last time, and not for the end. What it raises ends the read, and the links stay open."""
    cdef vector[CLink*] v
    cdef Link l
    cdef const uint64_t* rows = _rows(ranges)
    cdef size_t n = ranges.shape[0]
    cdef int64_t ns = _ns(timeout_s)
    failures = []
    call = (reached, failures)
    cdef void* told = NULL if reached is None else <void*>call
    all = list(links)  # alive until this returns
    for l in all:
        if l is None:
            raise TypeError("a link is None")
        v.push_back(l.l.get())
    with nogil:
        mcr_read(v, rows, n, ns, _tell, told, step)
    if failures:
        raise failures[0]
