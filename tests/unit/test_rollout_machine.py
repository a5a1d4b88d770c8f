"""The books of a `RolloutBuffer` under calls in any order, against what can be said without knowing how they are kept."""

from __future__ import annotations

import json
import pickle
from collections import Counter

import numpy as np
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rollout_parcels import parcel

from mooncake_ray.errors import LeaseLostError
from mooncake_ray.rollout.books import Books as Kept
from mooncake_ray.rollout.ledger import Ledger
from mooncake_ray.rollout.records import NoRoom, Want
from mooncake_ray.rollout.settings import BufferSettings

WHO = st.sampled_from(["one", "two", "three"])


class Books(RuleBasedStateMachine):
    """Keeps for itself what was brought, given, and learned; and of no group where it is."""

    @initialize(
        group_size=st.integers(1, 3),
        staleness=st.none() | st.integers(0, 3),
        stale=st.sampled_from(["drop", "return"]),
        consumption=st.sampled_from(["exactly-once", "at-least-once"]),
        order=st.sampled_from(["fifo", "oldest", "newest", "priority"]),
        capacity=st.none() | st.integers(4, 8),
        replay=st.sampled_from([0, 500]),
    )
    def begin(self, group_size, staleness, stale, consumption, order, capacity, replay):
        self.settings = BufferSettings(
            group_size, staleness, stale, order, consumption, capacity, replay_bytes=replay, lease_s=10.0, filters=(_even,)
        )
        self.ledger = Ledger(self.settings)
        self.now, self.version, self.uids, self.steps = 0.0, 0, 0, 0
        self.tickets: dict[int, tuple[str, dict[str, int]]] = {}  # who, and how many samples are to come of each group
        self.parcels: set[str] = set()  # stored, and not told to be over
        self.drafts: dict[int, object] = {}
        self.committed: Counter[tuple[str, int]] = Counter()  # samples, by where they lie
        self.gone: set[str] = set()  # groups that were given to a step and committed
        self.lost: set[str] = set()

    def _uid(self) -> str:
        self.uids += 1
        return f"g{self.uids}"

    def _parcel(self, uids):
        versions = [max(0, self.version - age) for age in np.random.default_rng(len(self.parcels)).integers(0, 3, len(uids))]
        brought = parcel(uids, version=versions, tokens=[1 + i % 7 for i in range(len(uids))], tags={"reward": np.arange(len(uids))})
        self.parcels.add(brought.id)
        return brought

    @rule(count=st.integers(1, 3))
    def bring(self, count):
        brought = self._parcel([self._uid() for _ in range(count)] * self.settings.group_size)
        if isinstance(self.ledger.production.put(brought.id, brought), NoRoom):
            self.parcels.remove(brought.id)

    @rule(who=WHO, count=st.integers(1, 3))
    def reserve(self, who, count):
        uids = [self._uid() for _ in range(count)]
        ticket = self.ledger.production.reserve(uids[0], who, uids, self.now)
        if not isinstance(ticket, NoRoom):
            self.tickets[ticket] = who, dict.fromkeys(uids, self.settings.group_size)

    @rule(who=WHO, most=st.integers(1, 3))
    def resume(self, who, most):
        if (found := self.ledger.production.resume(self._uid(), who, most, self.now)) is not None:
            ticket, works = found
            self.tickets[ticket] = who, {work.uid: self.settings.group_size for work in works}
            assert all(name in self.parcels for work in works for name, _ in work.rows), "what is to be gone on with can be read"

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), some=st.booleans(), park=st.booleans())
    def bring_what_was_reserved(self, data, some, park):
        ticket = data.draw(st.sampled_from(sorted(self.tickets)))
        _, due = self.tickets[ticket]
        uid = data.draw(st.sampled_from(sorted(due)))
        samples = max(1, due[uid] - 1) if some or park else due[uid]
        brought = self._parcel([uid] * samples)
        try:
            if park:
                self.ledger.production.park(brought.id, brought, ticket)
            else:
                assert not isinstance(self.ledger.production.put(brought.id, brought, ticket), NoRoom)
        except LeaseLostError:
            self.parcels.remove(brought.id)
            due.pop(uid)
        else:
            due[uid] -= samples
            if park or not due[uid]:
                del due[uid]
        if not due:
            del self.tickets[ticket]

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), cancel=st.booleans())
    def end_ticket(self, data, cancel):
        ticket = data.draw(st.sampled_from(sorted(self.tickets)))
        del self.tickets[ticket]
        (self.ledger.production.cancel if cancel else self.ledger.production.give_back)(ticket)

    @rule(ahead=st.integers(0, 2), groups=st.integers(1, 3), replay=st.integers(0, 2), who=WHO)
    def take(self, ahead, groups, replay, who):
        self.version += ahead
        want = Want(groups, replay=replay)
        draft = self.ledger.consumption.take(self.steps, self.version, want, who, self.now)
        if draft is None:
            return
        assert len(draft.fresh) == groups and len(draft.replayed) <= replay
        for group in draft.fresh:
            assert group.size == self.settings.group_size and group.uid not in self.gone and _even(group)
            if self.settings.max_staleness is not None:
                assert self.version - group.oldest <= self.settings.max_staleness
        assert self.ledger.consumption.take(self.steps, self.version, want, who, self.now) is draft
        self.drafts[self.steps] = draft
        self.steps += 1

    @precondition(lambda self: self.drafts)
    @rule(data=st.data(), commit=st.booleans())
    def end_step(self, data, commit):
        step = data.draw(st.sampled_from(sorted(self.drafts)))
        draft = self.drafts.pop(step)
        if not commit:
            self.ledger.consumption.give_up(step, draft.attempt)
            return
        try:
            self.ledger.consumption.commit(step, draft.attempt)
        except LeaseLostError:
            return
        for group in draft.fresh:
            self.gone.add(group.uid)
            self.committed.update((name, row) for name, rows in group.rows for row in rows.tolist())

    @rule(seconds=st.sampled_from([1.0, 11.0]))
    def time_passes(self, seconds):
        self.now += seconds
        self.ledger.end(*self.ledger.overdue(self.now))

    @rule(who=WHO)
    def somebody_dies(self, who):
        self.ledger.end(*self.ledger.left_by(who))

    @precondition(lambda self: self.parcels)
    @rule(data=st.data())
    def a_parcel_is_lost(self, data):
        name = data.draw(st.sampled_from(sorted(self.parcels)))
        self.ledger.lost([name])
        told = self.ledger.retired()
        assert name in told
        self.parcels -= set(told)

    @rule()
    def a_copy_takes_over(self):
        self.ledger = pickle.loads(pickle.dumps(self.ledger))
        for step in self.drafts:
            self.drafts[step] = self._same(step)

    @rule()
    def a_snapshot_takes_over(self):
        """Nobody of the life before is there any more."""
        self.ledger.take_back()
        plain = json.dumps(Kept.of(self.ledger).to_json())
        before, self.ledger = self.ledger.stats(), Kept.from_json(json.loads(plain)).ledger(self.settings)
        assert self.ledger.stats() == before
        assert json.dumps(Kept.of(self.ledger).to_json()) == plain
        self.tickets, self.drafts = {}, {}
        self.parcels &= set(self.ledger.stock.holdings)

    def _same(self, step):
        taken = self.ledger.consumption._taken.get(step)
        return self.drafts[step] if taken is None else taken.draft

    @invariant()
    def nothing_is_learned_from_twice(self):
        assert all(n == 1 for n in self.committed.values())

    @invariant()
    def what_is_needed_is_there(self):
        told = self.ledger.retired()
        assert len(set(told)) == len(told)
        assert set(told) <= self.parcels, "told twice, or never stored"
        self.parcels -= set(told)
        for step, draft in self.drafts.items():
            if self._same(step) is draft and step in self.ledger.consumption._taken:
                assert all(name in self.parcels for group in draft.groups for name, _ in group.rows)
        found = self.ledger.stats()
        assert found["parcels"] == len(self.parcels), "what nobody needs is kept, or the other way round"
        assert found["groups_making"] + found["groups_queued"] + found["groups_taken"] == self.ledger.stock.on_their_way
        if self.settings.capacity_groups is not None:
            assert self.ledger.stock.on_their_way <= self.settings.capacity_groups
        assert found["replay_bytes"] <= self.settings.replay_bytes

    def teardown(self):
        """When all that is under way has ended, nothing is left."""
        if not hasattr(self, "ledger"):
            return
        for step, taken in list(self.ledger.consumption._taken.items()):
            self.ledger.consumption.commit(step, taken.draft.attempt)
        for ticket in self.tickets:
            self.ledger.production.cancel(ticket)
        self.ledger.close()
        want, found = Want(1), True
        while found:  # what is queued
            draft = self.ledger.consumption.take(self.steps, self.version, want, "end", self.now)
            found = draft is not None and draft.groups
            if found:
                self.ledger.consumption.commit(self.steps, draft.attempt)
            self.steps += 1
        while (found := self.ledger.production.resume(self._uid(), "end", 1, self.now)) is not None:
            self.ledger.production.cancel(found[0])
        for group in [self.ledger.consumption.replay.remove(n) for n in list(self.ledger.consumption.replay._groups)]:
            self.ledger.stock.holdings.let_go(group)
        left = self.ledger.stats()
        assert left["groups_making"] == left["parcels"] == 0, left
        assert left["bytes"] == 0, left


def _even(group) -> bool:
    return int(group.uid[1:]) % 5 != 0


TestBooks = Books.TestCase
TestBooks.settings = hypothesis_settings(max_examples=60, stateful_step_count=40, deadline=None)
