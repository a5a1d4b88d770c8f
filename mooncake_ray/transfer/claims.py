"""Claims on objects of one node that somebody on another node answers for.

What a task returns belongs to the process that called it, wherever that is, and what an async actor returned lives on after it, for whoever
refers to it. The broker that has such an object asks its own node's processes whose it is, and in the end its engine, which is what this is
for: it asks the engines of other nodes, who inquire at their brokers. One that finds the owner says so at once, and once more when the claim
is over.

An engine that is asked answers by a record of its own, as the owner may take its time. So both ends keep in mind what is open; where an engine
is lost, the others are asked again.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from mooncake_ray._native import pool
from mooncake_ray.transfer.directory import Endpoint
from mooncake_ray.transfer.peers import Peers
from mooncake_ray.transfer.post import Post

__all__ = ["SUBJECT", "Claims"]

logger = logging.getLogger("mooncake_ray")

SUBJECT = "claims"
"""Name of the exchange by which engines send letters about claims."""
_RECORD = struct.Struct("<II28s")  # answer (0: a question), kind, key
_HEAD = struct.Struct("<B")  # bytes of the sender's endpoint, which follows
_KINDS = (pool.KIND_RETURN, pool.KIND_TOKEN)
_ANSWERS = (0, pool.ANSWER_HELD, pool.ANSWER_ENDED, pool.ANSWER_NOBODY)
_CALLER = slice(8, 24)  # of a task's ID: its actor and job, whose other returns belong to the same caller most likely
_HINTS = 1 << 12  # callers remembered
_ORPHANS = 1 << 16  # claims that nobody answers for, which engines are asked about that are not there yet, …
_ORPHAN_S = 60.0  # … for so long
_LOOK_S = 2.0

Claim = tuple[int, bytes]  # kind and key


@dataclass
class _Open:
    """A claim on objects of this node that others were asked about."""

    waiting: set[Endpoint]
    """Who has not answered."""
    asked: set[Endpoint]
    holders: set[Endpoint] = field(default_factory=set)
    adopted: bool = False
    """The engine answers for it to the broker."""


class Claims:
    """Thread-safe; no call waits for the network."""

    def __init__(self, client: pool.Client, peers: Peers) -> None:
        self._client, self._peers, self._others = client, peers, peers.directory.others
        head = _HEAD.pack(len(peers.me)) + peers.me.encode()
        self._post = Post(peers, SUBJECT, lambda records: head + b"".join(records))
        self._lock = threading.RLock()
        self._open: dict[Claim, _Open] = {}
        self._orphans: OrderedDict[Claim, tuple[float, set[Endpoint]]] = OrderedDict()  # since when, and who was asked
        self._hints: OrderedDict[bytes, Endpoint] = OrderedDict()
        self._inquiries: dict[Claim, set[Endpoint]] = {}  # for whom the broker of this node was asked
        self._closed = threading.Event()
        self._looker: threading.Thread | None = None

    # ---- what the broker says

    def asked(self, kind: int, key: bytes) -> None:
        """Nobody on this node answers for that claim."""
        with self._lock:
            others = set(self._others())
            likely = self._hints.get(key[_CALLER])
            self._ask((kind, key), _Open(set(), set()), {likely} if likely in others else others)

    def answered(self, answer: int, kind: int, key: bytes) -> None:
        """To an inquiry."""
        with self._lock:
            if answer == pool.ANSWER_HELD:
                to = self._inquiries.get((kind, key), set())
            else:
                to = self._inquiries.pop((kind, key), set())
            for endpoint in to:
                self._post.send(endpoint, _RECORD.pack(answer, kind, key))

    # ---- what other engines say

    def receive(self, letter: bytes) -> None:
        """Raises ValueError for what is none."""
        (length,) = _HEAD.unpack_from(letter)
        sender = Endpoint.parse(letter[_HEAD.size : _HEAD.size + length].decode())
        records = list(_RECORD.iter_unpack(letter[_HEAD.size + length :]))
        if unknown := [r for r in records if r[0] not in _ANSWERS or r[1] not in _KINDS]:
            raise ValueError(f"a record about claims makes no sense: {unknown[0]!r}")
        with self._lock:
            for answer, kind, key in records:
                if answer:
                    self._said(sender, (kind, key), answer)
                    continue
                self._inquiries.setdefault((kind, key), set()).add(sender)
                self._client.inquire(kind, key)

    def lost(self, endpoint: Endpoint) -> None:
        """That engine is no more. If its node lives, another one is in its place."""
        with self._lock:
            for claim, state in list(self._open.items()):
                if endpoint in state.holders or endpoint in state.waiting:
                    state.asked.discard(endpoint)
                    self._said(endpoint, claim, pool.ANSWER_NOBODY)
            for asking in self._inquiries.values():
                asking.discard(endpoint)

    def count(self) -> int:
        """Claims that other nodes answer for."""
        with self._lock:
            return sum(state.adopted for state in self._open.values())

    def inquiries(self) -> int:
        """Claims of other nodes that processes of this one were asked about, and are not over."""
        with self._lock:
            return len(self._inquiries)

    def close(self) -> None:
        self._closed.set()
        self._post.close()

    # ---- what becomes of a claim

    def _ask(self, claim: Claim, state: _Open, whom: set[Endpoint]) -> None:
        state.asked |= whom
        state.waiting |= whom
        self._open[claim] = state
        for endpoint in whom:
            self._post.send(endpoint, _RECORD.pack(0, *claim))
            self._peers.of(endpoint).watch()
        self._settle(claim, state)

    def _said(self, sender: Endpoint, claim: Claim, answer: int) -> None:
        state = self._open.get(claim)
        if state is None:
            if answer == pool.ANSWER_NOBODY or (orphan := self._orphans.pop(claim, None)) is None:
                return  # it is settled
            state = self._open[claim] = _Open(set(), orphan[1])
        state.waiting.discard(sender)
        if answer == pool.ANSWER_HELD:
            state.holders.add(sender)
            self._remember(claim, sender)
            if not state.adopted:
                state.adopted = True
                self._client.adopt(*claim)
            return
        held = sender in state.holders
        state.holders.discard(sender)
        if answer == pool.ANSWER_ENDED and claim[0] == pool.KIND_RETURN:  # its one owner says so
            del self._open[claim]
            if state.adopted:
                self._client.unclaim(*claim)
            else:
                self._client.disown(*claim, True)
            return
        if held and claim[0] == pool.KIND_TOKEN:  # others may refer to it by now
            state.asked = {sender}
        self._settle(claim, state)

    def _settle(self, claim: Claim, state: _Open) -> None:
        """Asks on, or gives up when nobody is left."""
        if state.waiting or state.holders:
            return
        if rest := set(self._others()) - state.asked:
            self._ask(claim, state, rest)
            return
        del self._open[claim]
        if state.adopted:
            self._client.unclaim(*claim)
            return
        self._client.disown(*claim, False)
        self._orphans[claim] = time.monotonic(), state.asked
        if len(self._orphans) > _ORPHANS:
            self._orphans.popitem(last=False)
        if self._looker is None:
            self._looker = threading.Thread(target=self._look, name="mooncake_ray.claims", daemon=True)
            self._looker.start()

    def _remember(self, claim: Claim, owner: Endpoint) -> None:
        self._hints[claim[1][_CALLER]] = owner
        self._hints.move_to_end(claim[1][_CALLER])
        if len(self._hints) > _HINTS:
            self._hints.popitem(last=False)

    def _look(self) -> None:
        """Asks engines that are new about the orphans."""
        while not self._closed.wait(_LOOK_S):
            others = set(self._others())
            with self._lock:
                for claim, (since, asked) in list(self._orphans.items()):
                    if time.monotonic() > since + _ORPHAN_S:
                        del self._orphans[claim]
                        continue
                    for endpoint in others - asked:
                        asked.add(endpoint)
                        self._post.send(endpoint, _RECORD.pack(0, *claim))
                if not self._orphans:
                    self._looker = None
                    return
