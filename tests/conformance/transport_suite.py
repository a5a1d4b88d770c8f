"""What every transport must do. A test class inherits `TransportSuite` and says which transport it is, and what it cannot be asked for."""

from __future__ import annotations

import errno
import mmap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from peer_program import MIB, pattern
from remote import OtherPeer

from mooncake_ray.config import Config
from mooncake_ray.errors import PeerLostError, RegistrationError, TransportError
from mooncake_ray.transport import Connection, Memory, Peer, Transport, get_transport

TIMEOUT_S = 150.0
SHORT_S = 2.0
GUARD = 0xA5


class Target:
    """Memory that reads go into. What no read may touch keeps its guard bytes."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        self.bytes[:] = GUARD
        self.address = self.bytes.ctypes.data
        self.nbytes = nbytes

    def expect(self, ranges: np.ndarray, *, touched: bool = True) -> None:
        """The ranges hold what the peer has there (after an error: anything), and all else is as it was."""
        mine = np.zeros(self.nbytes, bool)
        for region, offset, local, nbytes in ranges.tolist():
            at = slice(local - self.address, local - self.address + nbytes)
            mine[at] = True
            if touched:
                np.testing.assert_array_equal(self.bytes[at], pattern(region, nbytes, offset))
        assert (self.bytes[~mine] == GUARD).all(), "bytes outside of the ranges were written"


def table(*rows: tuple[int, int, int, int]) -> np.ndarray:
    return np.array(rows, np.uint64).reshape(-1, 4)


def own_peer(test: Any) -> Any:
    """For a test that changes or ends its peer; the others share one."""
    test.own_peer = True
    return test


class TransportSuite:
    """Inherit, set `name`, and override what differs."""

    name: ClassVar[str]
    out_of_process: ClassVar[bool] = True
    serves_when_stopped: ClassVar[bool] = False
    """Whether the memory of a stopped process can still be read: nobody there has to do anything."""
    finds_regions_itself: ClassVar[bool] = True
    """Whether a connection can read what was registered after it was made, without asking the peer what it has by now."""
    checks_ranges_itself: ClassVar[bool] = True
    """Whether a range that is wrong leaves the connection usable."""

    def make_peer(self) -> Any:
        return OtherPeer(self.name)

    def make_transport(self) -> Transport:
        return get_transport(self.name)(Config(), "127.0.0.1")

    def connect(self, transport: Transport, peer: Peer) -> Connection:
        return transport.connect(peer, TIMEOUT_S)

    @pytest.fixture(scope="class", autouse=True)  # so it is there before what looks for what a test leaves behind
    def shared_remote(self, request: pytest.FixtureRequest) -> Iterator[Any]:
        if not self.out_of_process:
            yield None
            return
        remote = request.cls().make_peer()
        yield remote
        remote.close()

    @pytest.fixture
    def remote(self, request: pytest.FixtureRequest) -> Iterator[Any]:
        if self.out_of_process and not getattr(request.function, "own_peer", False):
            yield request.getfixturevalue("shared_remote")
            return
        remote = self.make_peer()
        yield remote
        remote.close()

    @pytest.fixture
    def target(self) -> Target:
        return Target(40 * MIB)

    @pytest.fixture
    def transport(self, target: Target) -> Iterator[Transport]:
        why = get_transport(self.name).unavailable(Config())
        assert not why, why
        transport = self.make_transport()
        transport.register(Memory(0, target.address, target.nbytes))
        yield transport
        transport.close()

    @pytest.fixture
    def connection(self, transport: Transport, remote: Any) -> Iterator[Connection]:
        connection = self.connect(transport, remote.peer())
        yield connection
        connection.close()

    def test_has_the_shape_of_a_transport(self, transport, connection):
        assert isinstance(transport, Transport)
        assert isinstance(connection, Connection)

    @pytest.mark.parametrize("nbytes", [1, 7, 64, 4095, 4096, 65537, MIB, 16 * MIB])
    @pytest.mark.parametrize("at", [0, 1, 4099])
    def test_one_range(self, connection, target, nbytes, at):
        ranges = table((0, at * 3, target.address + at, nbytes))
        connection.read(ranges, TIMEOUT_S)
        target.expect(ranges)

    def test_the_last_bytes_of_a_region(self, connection, target, remote):
        size = remote.sizes[1]
        ranges = table((1, size - 5, target.address + 3, 5))
        connection.read(ranges, TIMEOUT_S)
        target.expect(ranges)

    def test_nothing_to_read(self, connection, target, remote):
        connection.read(np.empty((0, 4), np.uint64), TIMEOUT_S)
        connection.read(table((0, 0, target.address, 0), (1, remote.sizes[1], target.address, 0)), TIMEOUT_S)
        target.expect(table())

    def test_many_ranges_of_all_sizes_from_several_regions(self, connection, target, remote):
        rng = np.random.default_rng(7)
        rows, at = [], 5
        for nbytes in rng.choice([0, 1, 100, 5000, 70_000, 600_000], 120).tolist():
            region = int(rng.integers(0, 2))
            rows.append((region, int(rng.integers(0, remote.sizes[region] - nbytes + 1)), target.address + at, nbytes))
            at += nbytes + int(rng.integers(1, 50))
        assert at < target.nbytes
        ranges = table(*rng.permutation(rows).tolist())
        connection.read(ranges, TIMEOUT_S)
        target.expect(ranges)

    def test_thousands_of_small_ranges(self, connection, target):
        n = 10_000
        i = np.arange(n, dtype=np.uint64)
        ranges = np.stack([i % np.uint64(2), i * np.uint64(1531), target.address + i * np.uint64(200), np.full(n, 133, np.uint64)], axis=1)
        ranges = np.ascontiguousarray(ranges.astype(np.uint64))
        connection.read(ranges, TIMEOUT_S)
        target.expect(ranges)

    @own_peer
    def test_regions_that_came_later(self, transport, target, remote):
        """At either end."""

        def redescribe() -> Any:
            asked.append(1)
            return peer.redescribe()

        asked: list[int] = []
        peer = remote.peer()
        connection, unasked = (self.connect(transport, replace(peer, redescribe=r)) for r in (redescribe, None))
        late, here = remote.grow(), Target(2 * MIB)
        transport.register(Memory(1, here.address, here.nbytes))
        ranges = table((late, 11, target.address + 1, 3 * MIB), (0, 5, target.address + 4 * MIB, 99))
        into_late = table((late, 4096, here.address + 5, MIB), (0, 7, here.address + MIB + 9, 1000))
        for known in (ranges, into_late):
            connection.read(known, TIMEOUT_S)
        target.expect(ranges)
        here.expect(into_late)
        assert len(asked) == (0 if self.finds_regions_itself else 1)
        if not self.finds_regions_itself:
            with pytest.raises(TransportError) as refused:
                unasked.read(ranges, TIMEOUT_S)
            assert refused.value.errno == errno.EINVAL
        target.bytes[:] = GUARD
        ranges = ranges if self.finds_regions_itself else ranges[1:]
        unasked.read(ranges, TIMEOUT_S)
        target.expect(ranges)

    @own_peer
    def test_a_peer_that_cannot_be_asked_what_it_has(self, transport, target, remote):
        def redescribe() -> Any:
            raise PeerLostError("nobody answers", "describe", errno.ECONNRESET)

        connection = self.connect(transport, replace(remote.peer(), redescribe=redescribe))
        late, good = remote.grow(), table((0, 5, target.address, 99))
        if not self.finds_regions_itself:
            with pytest.raises(PeerLostError, match="nobody answers"):
                connection.read(table((late, 0, target.address, 8)), TIMEOUT_S)
            assert not connection.closed
        connection.read(good, TIMEOUT_S)
        target.expect(good)

    def test_threads_share_a_connection(self, connection, target):
        def read(i: int) -> None:
            try:
                barrier.wait(TIMEOUT_S)
                for k in range(len(parts[i])):
                    connection.read(parts[i][k : k + 1], TIMEOUT_S)
            except BaseException as e:
                errors.append(e)

        errors: list[BaseException] = []
        barrier = threading.Barrier(6)
        parts = [table(*((k % 2, i * 999 + k, target.address + (i * 12 + k) * 500_003, 500_000) for k in range(12))) for i in range(6)]
        threads = [threading.Thread(target=read, args=(i,)) for i in range(6)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(TIMEOUT_S)
        assert not errors
        target.expect(np.concatenate(parts))

    @pytest.mark.parametrize(
        "bad",
        [
            pytest.param(lambda size: (0, size - 3, 4), id="over the end"),
            pytest.param(lambda size: (0, size, 1), id="behind the end"),
            pytest.param(lambda size: (0, size + 5000, 8), id="far behind the end"),
            pytest.param(lambda size: (0, 2**64 - 4, 8), id="wraps around"),
            pytest.param(lambda size: (77, 0, 8), id="no such region"),
        ],
    )
    def test_a_wrong_range_is_refused(self, transport, connection, target, remote, bad):
        region, offset, nbytes = bad(remote.sizes[0])
        good = (0, 0, target.address + 1000, 500)
        ranges = table(good, (region, offset, target.address + 2000, nbytes))
        with pytest.raises(TransportError) as refused:
            connection.read(ranges, TIMEOUT_S)
        assert refused.value.errno == errno.EINVAL
        target.expect(ranges, touched=False)
        if not self.checks_ranges_itself:
            connection = self.connect(transport, remote.peer())
        connection.read(table(good), TIMEOUT_S)
        target.expect(table(good))

    @pytest.mark.parametrize(
        ("bad", "error"),
        [
            (np.zeros((1, 4), np.int64), TypeError),
            ([(0, 0, 0, 0)], TypeError),
            (np.zeros((1, 3), np.uint64), ValueError),
            (np.zeros(4, np.uint64), ValueError),
            (np.zeros((4, 2), np.uint64).T, ValueError),
        ],
    )
    def test_what_is_no_table_of_ranges(self, connection, bad, error):
        with pytest.raises(error):
            connection.read(bad, TIMEOUT_S)

    def test_a_region_twice(self, transport, target):
        with pytest.raises(RegistrationError):
            transport.register(Memory(0, target.address, target.nbytes))

    def test_memory_of_a_device_that_cannot_be_registered(self, transport, target):
        """There is no such device here, whether or not the transport could take its memory."""
        with pytest.raises(RegistrationError, match="4096 bytes of CUDA device 99") as refused:
            transport.register(Memory(5, target.address, 4096, device=99))
        assert refused.value.errno == errno.EOPNOTSUPP
        other = Target(4096)
        transport.register(Memory(5, other.address, 4096))

    def test_connect_again(self, transport, target, remote):
        for i in range(5):
            connection = self.connect(transport, remote.peer())
            ranges = table((1, i, target.address, 70_000))
            connection.read(ranges, TIMEOUT_S)
            target.expect(ranges)
            connection.close()
            connection.close()
            with pytest.raises(TransportError):
                connection.read(ranges, TIMEOUT_S)

    def test_two_connections_at_once(self, transport, target, remote):
        one, other = (self.connect(transport, remote.peer()) for _ in range(2))
        one.close()
        ranges = table((0, 1, target.address, 100))
        other.read(ranges, TIMEOUT_S)
        target.expect(ranges)
        other.close()

    @own_peer
    def test_a_dead_peer(self, transport, connection, target, remote):
        ranges = table((0, 0, target.address, 1000))
        connection.read(ranges, TIMEOUT_S)
        assert not connection.closed
        remote.kill()
        start = time.monotonic()
        with pytest.raises(PeerLostError):
            connection.read(ranges, TIMEOUT_S)
        assert time.monotonic() - start < TIMEOUT_S
        assert connection.closed
        target.expect(ranges, touched=False)
        with pytest.raises(TransportError):
            self.connect(transport, remote.peer()).read(ranges, TIMEOUT_S)

    @own_peer
    def test_a_stopped_peer(self, connection, target, remote):
        if not self.out_of_process:
            pytest.skip("the peer is this process")
        ranges = table((0, 3, target.address, 1000))
        connection.read(ranges, TIMEOUT_S)
        remote.stop()
        if self.serves_when_stopped:
            connection.read(ranges, SHORT_S)
            target.expect(ranges)
            return
        with pytest.raises(TransportError) as late:
            connection.read(ranges, SHORT_S)
        assert late.value.errno == errno.ETIMEDOUT
        held = target.bytes.copy()
        remote.resume()  # what was under way goes on, and must not come to where others may have put something by now
        target.bytes[:] = GUARD
        del held
        remote.grow()  # it has answered: it runs
        target.expect(table())

    def test_close_while_reading(self, connection, target):
        def read() -> None:
            started.set()
            try:
                for _ in range(10_000):
                    connection.read(ranges, TIMEOUT_S)
            except TransportError:
                ended.set()

        started, ended = threading.Event(), threading.Event()
        ranges = table((0, 0, target.address, 16 * MIB))
        thread = threading.Thread(target=read)
        thread.start()
        assert started.wait(TIMEOUT_S)
        connection.close()
        target.bytes[:] = GUARD  # nothing is under way any more
        thread.join(TIMEOUT_S)
        assert ended.is_set()
        target.expect(table())

    def test_close_the_transport(self, transport, connection, target, remote):
        ranges = table((0, 0, target.address, 100))
        connection.read(ranges, TIMEOUT_S)
        transport.close()
        transport.close()
        with pytest.raises(TransportError):
            connection.read(ranges, TIMEOUT_S)
        with pytest.raises(TransportError):
            transport.connect(remote.peer(), TIMEOUT_S)

    def test_a_description_of_nonsense(self, transport, remote):
        for nonsense in ({}, {"regions": 3}, {"pid": "x", "broker": 5, "target": None, "regions": {"x": [1]}}):
            with pytest.raises(TransportError):
                transport.connect(Peer("127.0.0.1", 1, nonsense), SHORT_S).read(table((0, 0, 1, 1)), SHORT_S)

    def test_exchanges_of_nonsense(self, transport):
        for nonsense in (b"", b"{", b"[]", b'{"qp": "x"}', bytes(range(256))):
            with pytest.raises(TransportError):
                transport.accept(1, nonsense)
        transport.ended(1)
        transport.ended(99)
