"""`Consumption`: what learners ask of a buffer's books."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mooncake_ray.errors import ConfigError, LeaseLostError, StaleVersionError
from mooncake_ray.rollout.group import Group
from mooncake_ray.rollout.memory import remember
from mooncake_ray.rollout.records import Draft, Want
from mooncake_ray.rollout.replay import Replay
from mooncake_ray.rollout.stock import Stock

__all__ = ["Consumption"]


@dataclass(slots=True)
class _Taken:
    draft: Draft
    want: Want
    deadline: float
    consumers: set[str] = field(default_factory=set)


class Consumption:
    """Not thread-safe. What a call refuses, it leaves as it was."""

    def __init__(self, stock: Stock) -> None:
        self._stock = stock
        self.replay = Replay(stock.settings.replay_bytes)
        self.staleness: dict[int, int] = {}
        """How many groups were learned from, by how many versions old their oldest token was."""
        self.last_attempt = 0
        self.committed: OrderedDict[int, int] = OrderedDict()
        """Steps, with how many samples. The last one was committed last."""
        self._taken: dict[int, _Taken] = {}

    def take(self, step: int, version: int, want: Want, consumer: str, now: float) -> Draft | None:
        """What a step learns from. Asked again, the same; until it is committed or given up.

        Args:
            version: of the weights that the step changes: groups are no older than `max_staleness` of it.

        Returns:
            None: there is not enough by now. A draft without groups, of which nothing is remembered: no more come.

        Raises:
            ConfigError: the step was asked for otherwise before.
            StaleVersionError: it is committed; or weights of a newer version are trained.
        """
        if step in self.committed:
            raise StaleVersionError(f"step {step} is committed: what it learned from is not given again")
        if (taken := self._taken.get(step)) is not None:
            if (taken.want, taken.draft.version) != (want, version):
                raise ConfigError(f"step {step} was taken with {taken.want} of version {taken.draft.version}, now {want} of {version}")
            taken.consumers.add(consumer)
            taken.deadline = now + self._stock.settings.lease_s
            return taken.draft
        if version < self._stock.version:
            raise StaleVersionError(f"step {step} wants to train version {version}, and version {self._stock.version} is trained already")
        self._stock.advance(version)
        fresh = self._first(want)
        if len(fresh) < want.groups and not self._is_enough(fresh, want):
            return None
        if not fresh:
            return Draft(step, version, 0, ())
        self.last_attempt += 1
        for group in fresh:
            self._stock.queue.remove(group)
        least = None if want.replay_staleness is None else version - want.replay_staleness
        random = np.random.default_rng([self._stock.settings.seed, self.last_attempt])
        replayed = self.replay.draw(want.replay, want.draw, random, least=least) if want.replay else []
        for group in replayed:
            self._stock.holdings.hold(group)
        draft = Draft(step, version, self.last_attempt, tuple(fresh), tuple(replayed))
        self._taken[step] = _Taken(draft, want, now + self._stock.settings.lease_s, {consumer})
        return draft

    def commit(self, step: int, attempt: int, priorities: Mapping[int, float] | None = None) -> int:
        """The step has learned. Returns how many samples; a second time the same.

        Args:
            priorities: that groups of the step have from now on in the replay, by number.

        Raises:
            LeaseLostError: what the step had may have been given to others: it is unknown, was given up, or some of it was lost.
        """
        if step in self.committed:
            return self.committed[step]
        draft = self._of(step, attempt).draft
        del self._taken[step]
        for group in draft.fresh:
            age = draft.version - group.oldest
            self.staleness[age] = self.staleness.get(age, 0) + 1
            self._stock.remove(group.uid)
            self._stock.nbytes -= group.nbytes
            for gone in self.replay.add(group):
                self._stock.holdings.let_go(gone)
        for group in draft.replayed:
            self._stock.holdings.let_go(group)
        self.replay.prioritise(priorities or {})
        self._stock.totals.groups_trained += len(draft.fresh)
        self._stock.totals.groups_replayed += len(draft.replayed)
        self._stock.totals.samples_trained += draft.samples
        self._stock.totals.tokens_trained += sum(int(group.tokens.sum()) for group in draft.groups)
        remember(self.committed, step, draft.samples)
        return draft.samples

    def give_up(self, step: int, attempt: int) -> None:
        """The step has not learned, and will not: its groups are for others. Nothing happens if it has not got them any more.

        Raises:
            StaleVersionError: it is committed.
        """
        if step in self.committed:
            raise StaleVersionError(f"step {step} is committed")
        if (draft := self.draft(step)) is not None and draft.attempt == attempt:
            self.put_back(step)

    def rewind(self, step: int) -> int:
        """The learner begins again with that step, from weights that it had before: this and later ones were not made. Returns how many
        steps that were committed are forgotten; their groups are not given again."""
        for taken in [taken for taken in self._taken if taken >= step]:
            self.put_back(taken)
        forgotten = [committed for committed in self.committed if committed >= step]
        for committed in forgotten:
            del self.committed[committed]
        return len(forgotten)

    def steps(self) -> list[int]:
        """That have something, and are not committed."""
        return list(self._taken)

    def overdue(self, now: float) -> list[int]:
        """Steps whose deadline has passed."""
        return [step for step, taken in self._taken.items() if taken.deadline <= now]

    def left_by(self, consumer: str) -> list[int]:
        """Notes that a consumer is gone. Returns the steps that nobody has now."""
        for taken in self._taken.values():
            taken.consumers.discard(consumer)
        return [step for step, taken in self._taken.items() if not taken.consumers]

    def be_patient(self, now: float) -> None:
        for taken in self._taken.values():
            taken.deadline = now + self._stock.settings.lease_s

    def draft(self, step: int) -> Draft | None:
        """What a step has."""
        return self._taken[step].draft if step in self._taken else None

    def renewed(self, step: int, attempt: int, now: float) -> bool:
        """Whether the step has still got what it had in that attempt; if so, for the whole time from now on."""
        taken = self._taken.get(step)
        if taken is None or taken.draft.attempt != attempt:
            return False
        taken.deadline = now + self._stock.settings.lease_s
        return True

    def consumers(self) -> set[str]:
        """Those that have steps."""
        return {consumer for taken in self._taken.values() for consumer in taken.consumers}

    def __len__(self) -> int:
        """Steps that are taken."""
        return len(self._taken)

    @property
    def groups(self) -> int:
        """That steps have, and that were not learned from before."""
        return sum(len(taken.draft.fresh) for taken in self._taken.values())

    def lost(self, gone: Collection[str]) -> None:
        """These parcels: steps that have some get something else when they ask again."""
        for step in [step for step, taken in self._taken.items() if any(group.uses(gone) for group in taken.draft.groups)]:
            self.put_back(step)
        for group in self.replay.using(gone):
            self.replay.remove(group.number)
            self._stock.holdings.let_go(group)

    def _first(self, want: Want) -> list[Group]:
        """Groups of the queue, in its order, until there are enough of them or of their tokens."""
        out: list[Group] = []
        tokens = 0
        for group in self._stock.queue:
            tokens += int(group.tokens.sum())
            if len(out) == want.groups or (out and want.tokens is not None and tokens > want.tokens):
                break
            out.append(group)
        return out

    def _is_enough(self, fresh: Sequence[Group], want: Want) -> bool:
        """Fewer groups than were asked for: because of their tokens, or because no more come."""
        if len(fresh) < len(self._stock.queue):
            return True
        made = self._stock.on_their_way - len(self._stock.queue) - self.groups
        may_come = made or self._stock.waiting or (self._taken and self._stock.settings.consumption == "at-least-once")
        return self._stock.closed and not may_come

    def _of(self, step: int, attempt: int) -> _Taken:
        taken = self._taken.get(step)
        if taken is None or taken.draft.attempt != attempt:
            raise LeaseLostError(f"step {step} has not got what it had in attempt {attempt} any more: others may have it")
        return taken

    def put_back(self, step: int) -> None:
        """Puts what a step has back in its place."""
        draft = self._taken.pop(step).draft
        for group in draft.fresh:
            self._stock.queue.add(group)
        for group in draft.replayed:
            self._stock.holdings.let_go(group)
        self._stock.sweep()
