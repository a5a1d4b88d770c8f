"""The books of a `RolloutBuffer`, call by call."""

from __future__ import annotations

import copy
import pickle
from itertools import count

import numpy as np
import pytest
from rollout_parcels import parcel

from mooncake_ray.errors import ConfigError, LeaseLostError, SchemaError, StaleVersionError, StoreError, StoreFullError
from mooncake_ray.rollout.group import Parcel
from mooncake_ray.rollout.ledger import Ledger
from mooncake_ray.rollout.records import Brought, Draft, NoRoom, Want, rows_of
from mooncake_ray.rollout.settings import BufferSettings


def books(**settings) -> Ledger:
    return Ledger(BufferSettings(**settings))


def put(ledger: Ledger, uids, ticket=None, **more) -> Brought | NoRoom:
    brought = parcel(uids, **more)
    return ledger.production.put(brought.id, brought, ticket)


def take(ledger: Ledger, step: int, groups: int, version: int = 0, now: float = 0.0, who: str = "learner", **want) -> Draft | None:
    return ledger.consumption.take(step, version, Want(groups, **want), who, now)


def reserve(ledger: Ledger, uids, now: float = 0.0, who: str = "worker") -> int | NoRoom:
    return ledger.production.reserve(f"reserve-{next(_operations)}", who, uids, now)


def resume(ledger: Ledger, most: int = 9, now: float = 0.0, who: str = "worker"):
    return ledger.production.resume(f"resume-{next(_operations)}", who, most, now)


def expire(ledger: Ledger, now: float) -> int:
    return ledger.end(*ledger.overdue(now))


def drop(ledger: Ledger, who: str) -> int:
    return ledger.end(*ledger.left_by(who))


_operations = count()


def uids(draft: Draft | None) -> list[str] | None:
    return None if draft is None else [group.uid for group in draft.groups]


def test_only_whole_groups_are_learned_from():
    ledger = books(group_size=3)
    ticket = reserve(ledger, "abc")
    assert put(ledger, ["a", "b", "a"], ticket) == Brought(3, 0, 0)
    assert take(ledger, 0, 1) is None
    assert put(ledger, ["b", "b", "c"], ticket) == Brought(3, 1, 0)
    assert uids(draft := take(ledger, 0, 1)) == ["b"]
    assert [rows.tolist() for _, rows in draft.groups[0].rows] == [[1], [0, 1]]
    with pytest.raises(SchemaError, match="group 'a' has 2 of 3 samples, and 2 more"):
        put(ledger, ["a", "a"], ticket)
    assert put(ledger, ["a"], ticket) == Brought(1, 1, 0), "what is refused changes nothing"
    for uid in "ab":
        with pytest.raises(SchemaError, match=f"'{uid}' is on its way already"):
            put(ledger, [uid] * 3)
    with pytest.raises(SchemaError, match="group 'e' has 2 of 3 samples: without a ticket they come at once"):
        put(ledger, ["d"] * 3 + ["e"] * 2)
    assert put(ledger, ["d"] * 3) == Brought(3, 1, 0)


@pytest.mark.parametrize(
    ("order", "expected"), [("fifo", "abcd"), ("oldest", "bdac"), ("newest", "cabd"), ("priority", "dbca")], ids=lambda x: x
)
def test_order(order, expected):
    ledger = books(order=order)
    for uid, version, priority in (("a", 5, 0.0), ("b", 3, 2.0), ("c", 6, 1.0), ("d", 3, 9.0)):
        put(ledger, [uid], version=version, priority=np.array([priority]))
    assert uids(take(ledger, 0, 4, version=6)) == list(expected)


def test_a_step_has_the_same_for_all_who_ask_until_it_is_committed():
    ledger = books()
    put(ledger, "abcd")
    draft = take(ledger, 7, 2)
    assert take(ledger, 7, 2, who="another") is draft and uids(take(ledger, 8, 2)) == ["c", "d"]
    with pytest.raises(ConfigError, match="step 7 was taken with"):
        take(ledger, 7, 1)
    assert ledger.consumption.commit(7, draft.attempt) == ledger.consumption.commit(7, draft.attempt) == 2
    with pytest.raises(StaleVersionError, match="step 7 is committed"):
        take(ledger, 7, 2)
    with pytest.raises(StaleVersionError, match="step 7 is committed"):
        ledger.consumption.give_up(7, draft.attempt)
    with pytest.raises(LeaseLostError, match="step 9"):
        ledger.consumption.commit(9, 1)


def test_what_is_given_up_has_its_place_again():
    ledger = books()
    put(ledger, "abc")
    first = take(ledger, 0, 2)
    ledger.consumption.give_up(0, first.attempt)
    again = take(ledger, 0, 3)
    assert uids(again) == ["a", "b", "c"] and again.attempt != first.attempt
    with pytest.raises(LeaseLostError, match=f"step 0 has not got what it had in attempt {first.attempt}"):
        ledger.consumption.commit(0, first.attempt)


def test_no_group_is_too_old():
    ledger = books(max_staleness=2)
    for version in range(5):
        put(ledger, [f"v{version}"], version=version)
    assert uids(take(ledger, 0, 3, version=4)) == ["v2", "v3", "v4"]
    assert ledger.stats()["groups_stale"] == 2 and ledger.stock.on_their_way == 3
    with pytest.raises(StaleVersionError, match="wants to train version 3, and version 4 is trained already"):
        take(ledger, 1, 1, version=3)
    put(ledger, ["late"], version=1)
    assert ledger.stats()["groups_stale"] == 3 and take(ledger, 1, 1, version=4) is None


def test_the_oldest_token_of_a_group_counts():
    ledger = books(max_staleness=1, group_size=2)
    put(ledger, ["a", "a", "b", "b"], version=[3, 1, 2, 3])
    assert uids(take(ledger, 0, 1, version=3)) == ["b"]


def test_what_is_too_old_is_returned():
    ledger = books(max_staleness=0, stale="return", capacity_groups=2)
    put(ledger, "ab", version=0)
    ledger.advance(1)
    assert ledger.stock.on_their_way == 0
    ticket, works = resume(ledger)
    assert [(w.uid, w.reason, len(w.rows)) for w in works] == [("a", "stale", 1), ("b", "stale", 1)]
    assert isinstance(put(ledger, "c"), NoRoom), "they are on their way again"
    assert put(ledger, "ab", ticket, version=1) == Brought(2, 2, 0)
    assert len(ledger.retired()) == 1 and uids(take(ledger, 0, 2, version=1)) == ["a", "b"]


def test_room():
    ledger = books(capacity_groups=3, group_size=2)
    ticket = reserve(ledger, ["a", "b"])
    put(ledger, ["c", "c"])
    refused = reserve(ledger, ["d"])
    assert str(refused) == "3 of 3 groups are on their way, and 1 more wanted"
    put(ledger, ["a", "a"], ticket)
    draft = take(ledger, 0, 2)
    assert isinstance(put(ledger, ["d", "d"]), NoRoom), "what is being learned from is on its way"
    ledger.consumption.commit(0, draft.attempt)
    assert put(ledger, ["d", "d"]) == Brought(2, 1, 0)
    with pytest.raises(StoreFullError, match="4 groups at once never fit into a buffer of 3 groups"):
        reserve(ledger, "efgh")
    assert str(books(capacity_bytes=150).production.put("x", parcel("a", nbytes=100))) == str(Brought(1, 1, 0))


def test_room_in_bytes():
    ledger = books(capacity_bytes=250)
    put(ledger, "ab", nbytes=200)
    assert str(put(ledger, "c", nbytes=100)) == "200 of 250 bytes are used, and 100 more wanted"
    ticket = reserve(ledger, ["d"])
    assert isinstance(ticket, int)
    assert put(ledger, "d", ticket, nbytes=300) == Brought(1, 1, 0), "who has a ticket does not wait"
    assert isinstance(reserve(ledger, ["e"]), NoRoom)
    with pytest.raises(StoreFullError, match="251 bytes"):
        put(ledger, "f", nbytes=251)


def test_tickets():
    ledger = books(group_size=2, lease_s=10)
    ticket = reserve(ledger, ["a", "b", "c"])
    with pytest.raises(SchemaError, match="'a' is on its way already"):
        put(ledger, ["a", "a"])
    with pytest.raises(LeaseLostError, match=f"'x' is not of ticket {ticket}"):
        put(ledger, ["x"], ticket)
    with pytest.raises(SchemaError, match="'a' is on its way already"):
        reserve(ledger, ["a"])
    put(ledger, ["a", "a", "b"], ticket)
    assert ledger.production.renewed(ticket, 5.0)
    assert expire(ledger, 14.0) == 0
    assert expire(ledger, 15.0) == 1 and ledger.stock.on_their_way == 1
    with pytest.raises(LeaseLostError, match=f"ticket {ticket} has ended"):
        put(ledger, ["b"], ticket)
    again, works = resume(ledger, 1, 20.0, "another")
    assert [(w.uid, w.reason, len(w.rows)) for w in works] == [("b", "orphaned", 1)]
    last, works = resume(ledger, 9, 20.0, "another")
    assert [(w.uid, w.reason, len(w.rows)) for w in works] == [("c", "orphaned", 0)]
    assert put(ledger, ["b", "b", "c", "c"][:2], again) == Brought(2, 1, 0)
    ledger.production.cancel(last)
    assert uids(take(ledger, 0, 2)) == ["a", "b"] and ledger.stock.on_their_way == 2
    assert resume(ledger, 1, 20.0, "another") is None


def test_partial_groups_go_on_under_newer_weights():
    ledger = books(group_size=2, max_staleness=3)
    ticket = reserve(ledger, ["a", "b"])
    half = parcel(["a", "a"], version=[0, 1], nbytes=64)
    assert ledger.production.park("park", half, ticket) == ledger.production.park("park", half, ticket)
    again, (work,) = resume(ledger, who="another")
    assert (work.uid, work.reason, work.oldest) == ("a", "partial", 0) and work.rows[0][0] == half.id
    assert drop(ledger, "another") == 1, "what there was of it is not lost with who goes on with it"
    again, (work,) = resume(ledger, who="third")
    assert work.rows[0][0] == half.id and not ledger.retired()
    put(ledger, ["a", "a"], again, version=0)
    assert ledger.retired() == [half.id] and uids(take(ledger, 0, 1, version=3)) == ["a"]


def test_what_is_partial_and_too_old_is_made_anew():
    ledger = books(max_staleness=1)
    ticket = reserve(ledger, ["a"])
    ledger.production.park("park", half := parcel(["a"], version=0), ticket)
    ledger.advance(2)
    _, (work,) = resume(ledger)
    assert (work.reason, work.rows) == ("stale", ()) and ledger.retired() == [half.id]


def test_a_retry_changes_nothing():
    ledger = books(group_size=2)
    brought = parcel(["a", "a"])
    for _ in range(3):
        assert ledger.production.put("first", brought) == Brought(2, 1, 0)
    assert ledger.stats()["samples_put"] == 2


def test_filters():
    ledger = books(group_size=2, filters=(_differs,), capacity_groups=2)
    rewards = np.array([1.0, 1.0, 0.0, 1.0])
    assert put(ledger, ["a", "a", "b", "b"], tags={"reward": rewards}) == Brought(4, 1, 1)
    assert uids(take(ledger, 0, 1)) == ["b"] and ledger.stock.on_their_way == 1
    ticket = reserve(ledger, ["a"])  # it may be made again
    put(ledger, ["a"], ticket, tags={"reward": rewards[:1]})
    with pytest.raises(SchemaError, match="have tags"):
        put(ledger, ["a"], ticket)


def _differs(group) -> bool:
    return bool(np.ptp(group.tags["reward"]) > 0)


def test_tokens_limit_a_step():
    ledger = books()
    put(ledger, "abcd", tokens=[60, 30, 20, 500])
    assert uids(take(ledger, 0, 4, tokens=100)) == ["a", "b"]
    assert uids(take(ledger, 1, 4, tokens=100)) == ["c"]
    assert uids(take(ledger, 2, 1, tokens=100)) == ["d"], "one may have more by itself"


def test_shares_are_balanced_and_are_all():
    ledger = books(group_size=4)
    rng = np.random.default_rng(1)
    for n in range(16):
        ticket = reserve(ledger, [f"g{n}"])
        put(ledger, [f"g{n}"] * 3, ticket, tokens=rng.integers(1, 1000, 3))
        put(ledger, [f"g{n}"], ticket, tokens=rng.integers(1, 1000, 1))
    draft = take(ledger, 0, 16)
    shares = [draft.share(rank, 4) for rank in range(4)]
    tokens = [sum(group.tokens[rows].sum() for group, rows in share) for share in shares]
    assert max(tokens) < 1.1 * min(tokens)
    assert [sum(len(rows) for _, rows in share) for share in shares] == [16] * 4
    lie = [(name, row) for share in shares for name, rows in rows_of(share) for row in rows.tolist()]
    assert sorted(lie) == sorted((name, row) for group in draft.groups for name, rows in group.rows for row in rows.tolist())
    with pytest.raises(ConfigError, match="64 samples for 65 ranks"):
        draft.share(0, 65)
    with pytest.raises(ConfigError, match="no rank 4 of 4"):
        draft.share(4, 4)


def test_at_least_once_gives_to_others_what_nobody_is_heard_of():
    ledger = books(consumption="at-least-once", lease_s=10)
    put(ledger, "ab")
    first = take(ledger, 0, 2, now=0.0)
    assert expire(ledger, 9.0) == 0 and expire(ledger, 10.0) == 1
    second = take(ledger, 1, 2, now=11.0, who="another")
    assert uids(second) == uids(first)
    take(ledger, 1, 2, now=12.0, who="third")
    assert drop(ledger, "another") == 0, "the third has it, too"
    assert drop(ledger, "third") == 1
    with pytest.raises(LeaseLostError):
        ledger.consumption.commit(0, first.attempt)


def test_exactly_once_waits_for_the_learner():
    ledger = books(lease_s=10)
    put(ledger, "ab")
    first = take(ledger, 0, 2)
    assert expire(ledger, 1e9) == drop(ledger, "learner") == 0
    assert take(ledger, 0, 2, now=2e9, who="again") is first


def test_closed():
    ledger = books(group_size=2)
    ticket = reserve(ledger, "ab")
    put(ledger, ["a", "a", "b"], ticket)
    ledger.close()
    with pytest.raises(StoreError, match="the buffer is closed"):
        put(ledger, ["c", "c"])
    with pytest.raises(StoreError, match="the buffer is closed"):
        reserve(ledger, ["c"])
    assert take(ledger, 0, 5) is None, "one is being made"
    put(ledger, ["b"], ticket)
    assert uids(take(ledger, 0, 5)) == ["a", "b"]
    assert uids(take(ledger, 1, 5)) == []


def test_replay():
    ledger = books(replay_bytes=300, seed=3)
    for n in range(5):
        put(ledger, [f"g{n}"], nbytes=100, version=n)
        draft = take(ledger, n, 1, version=n)
        ledger.consumption.commit(n, draft.attempt, {draft.fresh[0].number: float(n)})
    assert len(ledger.retired()) == 2 and ledger.stats()["replay_bytes"] == 300
    put(ledger, ["new"], version=4)
    draft = take(ledger, 9, 1, version=4, replay=2)
    assert uids(draft)[0] == "new" and len(draft.replayed) == 2 and {g.uid for g in draft.replayed} <= {"g2", "g3", "g4"}
    for n in range(20, 23):  # what is drawn stays readable, though the replay is full of others
        put(ledger, [f"g{n}"], nbytes=100, version=4)
        ledger.consumption.commit(n, take(ledger, n, 1, version=4).attempt)
    used = {name for group in draft.groups for name, _ in group.rows}
    assert not used & set(ledger.retired())
    ledger.consumption.commit(9, draft.attempt)
    assert len(ledger.retired()) == 3 and ledger.stats()["groups_replayed"] == 2
    put(ledger, ["newer"], version=9)
    assert take(ledger, 30, 1, version=9, replay=3, replay_staleness=4).replayed == ()


def test_draws_follow_their_weights():
    from mooncake_ray.rollout.group import Group
    from mooncake_ray.rollout.replay import Replay

    replay, random = Replay(1000), np.random.default_rng(0)
    for n in range(8):
        replay.add(Group(f"g{n}", n, tokens=np.ones(1, np.int64), priority=100.0 if n == 2 else 1.0, nbytes=1))
    drawn = {how: np.bincount([replay.draw(1, how, random)[0].number for _ in range(4000)], minlength=8) / 4000 for how in _DRAWS}
    assert np.abs(drawn["uniform"] - 1 / 8).max() < 0.03
    weights = np.where(np.arange(8) == 2, 100.0, 1.0) ** 0.6
    assert np.abs(drawn["prioritised"] - weights / weights.sum()).max() < 0.03
    weights = 0.5 ** np.arange(7, -1, -1)
    assert np.abs(drawn["recency"] - weights / weights.sum()).max() < 0.03


_DRAWS = ("uniform", "prioritised", "recency")


def test_lost():
    ledger = books(replay_bytes=1000)
    first, second, third = parcel("ab"), parcel("c"), parcel("d")
    for p in (first, second, third):
        ledger.production.put(p.id, p)
    done = take(ledger, 0, 1)
    ledger.consumption.commit(0, done.attempt)  # "a" is in the replay now
    draft = take(ledger, 1, 2)
    assert uids(draft) == ["b", "c"]
    ledger.lost([first.id])
    assert ledger.retired() == [first.id] and ledger.stats()["groups_in_replay"] == 0
    with pytest.raises(LeaseLostError, match="step 1 has not got what it had"):
        ledger.consumption.commit(1, draft.attempt)
    assert uids(take(ledger, 1, 2)) == ["c", "d"]
    _, (work,) = resume(ledger)
    assert (work.uid, work.reason, work.rows) == ("b", "lost", ())


def test_a_learner_begins_again_from_older_weights():
    ledger = books()
    put(ledger, "abcde")
    for step in range(3):
        ledger.consumption.commit(step, take(ledger, step, 1).attempt)
    under_way = take(ledger, 3, 1)
    assert ledger.consumption.rewind(2) == 1
    assert uids(take(ledger, 2, 1)) == ["d"], "it was given up"
    with pytest.raises(LeaseLostError):
        ledger.consumption.commit(3, under_way.attempt)
    with pytest.raises(StaleVersionError):
        take(ledger, 1, 1)


def test_what_a_learner_learns_of_staleness():
    ledger = books(group_size=2)
    put(ledger, ["a", "a", "b", "b", "c", "c"], version=[3, 1, 3, 3, 1, 1])
    ledger.consumption.commit(0, take(ledger, 0, 3, version=3).attempt)
    assert ledger.consumption.staleness == {2: 2, 0: 1}


def test_a_copy_goes_on_alike():
    """What a restarted buffer is made of."""
    ledger = books(group_size=2, replay_bytes=500, max_staleness=2)
    ticket = reserve(ledger, "bc")
    put(ledger, ["b"], ticket)
    put(ledger, ["a", "a"])
    ledger.consumption.commit(0, take(ledger, 0, 1).attempt)
    twins = [ledger, pickle.loads(pickle.dumps(ledger)), copy.deepcopy(ledger)]
    more = parcel(["b", "c", "c"], version=1)
    drafts = []
    for twin in twins:
        twin.production.put("more", more, ticket)
        drafts.append(twin.consumption.take(1, 2, Want(2, replay=1), "learner", 1.0))
    assert len({str(uids(d)) for d in drafts}) == 1 and len({str(t.stats()) for t in twins}) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"group_size": 0},
        {"max_staleness": -1},
        {"capacity_groups": 0},
        {"capacity_bytes": True},
        {"replay_bytes": -1},
        {"lease_s": 0},
        {"stale": "keep"},
        {"order": "random"},
        {"consumption": "at-most-once"},
    ],
)
def test_settings_are_checked(wrong):
    with pytest.raises(ConfigError):
        BufferSettings(**wrong)


@pytest.mark.parametrize("wrong", [{"groups": 0}, {"groups": 1, "tokens": 0}, {"groups": 1, "replay": -1}, {"groups": 1, "draw": "best"}])
def test_wants_are_checked(wrong):
    with pytest.raises(ConfigError):
        Want(**wrong)


def test_parcels_are_checked():
    one = np.ones(1, np.int64)
    for wrong, why in (
        (([], one[:0], one[:0], 1), "at least one sample"),
        ((["a"], np.ones(2, np.int64), one, 1), r"tokens has shape \(2,\), and there are 1"),
        ((["a"], one, -one, 1), "versions must be integers that are not negative"),
        ((["a"], one.astype(float), one, 1), "tokens must be integers"),
        (([""], one, one, 1), "a uid is a text"),
        ((["a"], one, one, 1, np.array([np.nan])), "priorities must be finite"),
        ((["a"], one, one, 1, None, {"reward": np.ones(3)}), r"reward has shape \(3,\)"),
    ):
        with pytest.raises(SchemaError, match=why):
            Parcel("p", *wrong)
