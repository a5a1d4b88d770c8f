"""The books of a catalog against a model that looks at every row each time, and the cases that people care about."""

from __future__ import annotations

import pickle
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mooncake_ray.data.catalog import Lease, Ledger, NoRoom, Publication, Published, Where
from mooncake_ray.errors import LeaseLostError, SchemaError, StoreError, StoreFullError

LEASE_S = 10.0


def publish(ledger, operation, keys, fields=("x",), *, partition="p", fragment=None, nbytes=0, tags=(), **flags):
    kinds = fields if isinstance(fields, dict) else dict.fromkeys(fields, "float32")
    what = Publication(partition, [*keys], kinds, fragment or f"f-{operation}", nbytes, tags, **flags)
    return ledger.publish(operation, what)


def keys_of(lease):
    return None if lease is None else [row.key for row in lease.rows]


# ---- a model: a list of rows, looked through from the beginning every time


class Model:
    def __init__(self, groups, capacity):
        self.groups, self.capacity = groups, capacity
        self.rows = []  # dicts in the order of publication
        self.partitions = []  # in the order of their first row, while they have rows
        self.closed, self.leases, self.done, self.acked = set(), {}, {}, {}

    def find(self, partition, key):
        return next((r for r in self.rows if (r["partition"], r["key"]) == (partition, key)), None)

    def publish(self, operation, partition, keys, fields, fragment, tags, overwrite, create):
        if operation in self.done:
            return self.done[operation]
        found = [self.find(partition, key) for key in keys]
        new = found.count(None)
        twice = not overwrite and any(r and set(fields) & set(r["at"]) for r in found)
        wrong = {SchemaError} if len(set(keys)) < len(keys) or (new and not create) or twice else set()
        wrong |= {StoreError} if new and partition in self.closed else set()
        if wrong:
            return tuple(wrong)  # any of these
        if new > self.capacity:
            return StoreFullError
        if new and len(self.rows) + new > self.capacity:
            return NoRoom
        for n, key in enumerate(keys):
            row = self.find(partition, key)
            if row is None:
                row = {"partition": partition, "key": key, "at": {}, "tags": {}, "state": dict.fromkeys(self.groups, "free")}
                self.rows.append(row)
                if partition not in self.partitions:
                    self.partitions.append(partition)
            row["at"] |= dict.fromkeys(fields, (fragment, n))
            row["tags"] |= tags
        self.done[operation] = (new, len(keys) - new)
        return self.done[operation]

    def swept(self):
        self.rows = [r for r in self.rows if any(s != "acknowledged" for s in r["state"].values())]
        self.partitions = [p for p in self.partitions if any(r["partition"] == p for r in self.rows)]

    def take(self, number, group, consumer, now, fields, partitions, least, most, version):
        asked = self.partitions if partitions is None else partitions
        closed = partitions is not None and all(p in self.closed for p in partitions)
        rows = [r for p in asked for r in self.rows if r["partition"] == p and r["tags"].get("version", -1) >= version]
        free = [r for r in rows if r["state"][group] == "free"]
        wanted = fields
        if fields is None:
            wanted = list(free[0]["at"]) if free else []
        ready = [r for r in free if all(f in r["at"] for f in wanted)]
        if len(ready) < least:
            unready = fields is not None and len(ready) < len(free)
            away = any(isinstance(r["state"][group], int) for r in rows)
            if not closed or unready or (away and not ready):
                return None
        chosen = ready[:most]
        for r in chosen:
            r["state"][group] = number
        if chosen:
            self.leases[number] = {"group": group, "consumer": consumer, "deadline": now + LEASE_S, "rows": chosen}
        return [(r["partition"], r["key"], {f: r["at"][f] for f in wanted}, dict(r["tags"])) for r in chosen]

    def end(self, number, state):
        lease = self.leases.pop(number)
        mine = [r for r in lease["rows"] if r["state"][lease["group"]] == number]
        for r in mine:
            r["state"][lease["group"]] = state
        self.swept()
        return len(mine)

    def drop(self, partition):
        gone = [r for r in self.rows if r["partition"] == partition]
        for r in gone:
            r["state"] = dict.fromkeys(self.groups, "gone")
        self.rows = [r for r in self.rows if r["partition"] != partition]
        self.partitions = [p for p in self.partitions if p != partition]
        self.closed.discard(partition)
        return len(gone)


PARTITIONS = st.sampled_from(["p", "q"])
FIELDS = st.sampled_from([["x"], ["y"], ["x", "y"]])
KEYS = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=4, unique=True)
GROUPS = st.sampled_from(["train", "eval"])
CONSUMERS = st.sampled_from(["a", "b"])


class Comparison(RuleBasedStateMachine):
    @initialize(capacity=st.sampled_from([3, 6, 12]))
    def begin(self, capacity):
        self.ledger = Ledger(("train", "eval"), capacity_rows=capacity, lease_s=LEASE_S)
        self.model = Model(("train", "eval"), capacity)
        self.now, self.fragments, self.retired, self.operations, self.lease_numbers = 0.0, [], [], [], []

    def same(self, expected, call):
        """Both refuse, or both answer the same."""
        if expected in (StoreFullError, LeaseLostError) or (isinstance(expected, tuple) and isinstance(expected[0], type)):
            with pytest.raises(expected):
                call()
            return None
        answer = call()
        if expected is NoRoom:
            assert isinstance(answer, NoRoom)
        elif isinstance(answer, Published):
            assert (answer.new, answer.known) == expected
        else:
            assert answer == expected
        return answer

    def publish_both(self, arguments):
        operation, partition, keys, fields, tags, overwrite, create = arguments
        fragment = f"f{len(self.fragments)}"
        self.fragments.append(fragment)
        expected = self.model.publish(operation, partition, keys, fields, fragment, tags, overwrite, create)
        kinds = dict.fromkeys(fields, "float32")
        what = Publication(partition, keys, kinds, fragment, 1, tags, overwrite, create)
        self.same(expected, lambda: self.ledger.publish(operation, what))

    @rule(
        partition=PARTITIONS,
        keys=KEYS | KEYS | st.lists(st.sampled_from("abcd"), max_size=5),
        fields=FIELDS,
        tags=st.fixed_dictionaries({}, optional={"version": st.integers(0, 3)}),
        overwrite=st.booleans(),
        create=st.sampled_from([True, True, True, False]),
    )
    def publish(self, partition, keys, fields, tags, overwrite, create):
        arguments = (f"op{len(self.operations)}", partition, keys, fields, tags, overwrite, create)
        self.operations.append(arguments)
        self.publish_both(arguments)

    @precondition(lambda self: self.operations)
    @rule(data=st.data())
    def publish_again(self, data):
        """A retry, whether it was refused before or not."""
        self.publish_both(data.draw(st.sampled_from(self.operations)))

    @rule(
        group=GROUPS,
        consumer=CONSUMERS,
        fields=st.none() | FIELDS,
        partitions=st.sampled_from([None, ["p"], ["q"], ["q", "p"]]),
        least=st.sampled_from([1, 1, 2, 4]),
        more=st.none() | st.integers(0, 3),
        version=st.sampled_from([-1, -1, 1, 2]),
    )
    def take(self, group, consumer, fields, partitions, least, more, version):
        most = None if more is None else least + more
        number = max(self.lease_numbers, default=0) + 1
        expected = self.model.take(number, group, consumer, self.now, fields, partitions, least, most, version)
        where = Where.of({"version": {">=": version}}) if version >= 0 else Where()
        lease = self.ledger.take(group, consumer, self.now, fields=fields, partitions=partitions, at_least=least, at_most=most, where=where)
        assert (lease is None) == (expected is None)
        if lease is None:
            return
        assert [(r.partition, r.key, dict(r.at), dict(r.tags)) for r in lease.rows] == expected
        assert lease.id == (number if expected else 0)
        if expected:
            self.lease_numbers.append(number)

    @precondition(lambda self: self.lease_numbers)
    @rule(data=st.data(), how=st.sampled_from(["ack", "release", "renew"]))
    def end(self, data, how):
        number = data.draw(st.sampled_from(self.lease_numbers))
        if how == "ack":
            if number in self.model.leases:
                self.model.acked[number] = self.model.end(number, "acknowledged")
            self.same(self.model.acked.get(number, LeaseLostError), lambda: self.ledger.ack(number))
        elif how == "release":
            expected = self.model.end(number, "free") if number in self.model.leases else 0
            self.same(expected, lambda: self.ledger.release(number))
        elif number in self.model.leases:
            self.model.leases[number]["deadline"] = self.now + LEASE_S
            assert self.ledger.renew(number, self.now) == self.now + LEASE_S
        else:
            self.same(LeaseLostError, lambda: self.ledger.renew(number, self.now))

    @rule(passed=st.floats(0, 8))
    def time_passes(self, passed):
        self.now += passed
        late = [n for n, lease in self.model.leases.items() if lease["deadline"] <= self.now]
        assert self.ledger.expire(self.now) == sum(self.model.end(n, "free") for n in late)

    @rule(consumer=CONSUMERS)
    def consumer_dies(self, consumer):
        its = [n for n, lease in self.model.leases.items() if lease["consumer"] == consumer]
        assert self.ledger.drop_consumer(consumer) == sum(self.model.end(n, "free") for n in its)

    @rule(partition=PARTITIONS)
    def close(self, partition):
        self.model.closed.add(partition)
        self.ledger.close(partition)

    @rule(partition=PARTITIONS)
    def drop(self, partition):
        assert self.ledger.drop(partition) == self.model.drop(partition)

    @invariant()
    def same_rows(self):
        if not hasattr(self, "ledger"):
            return
        listed = {(r.partition, r.key): (dict(r.tags), set(r.fields), dict(r.states)) for r in self.ledger.list()}
        rows = {(r["partition"], r["key"]): r for r in self.model.rows}
        named = {
            at: (r["tags"], set(r["at"]), {g: "leased" if isinstance(s, int) else s for g, s in r["state"].items()})
            for at, r in rows.items()
        }
        assert listed == named
        for partition in ("p", "q"):
            assert [r.key for r in self.ledger.list(partition)] == [r["key"] for r in self.model.rows if r["partition"] == partition]

    @invariant()
    def fragments_go_with_their_last_field(self):
        if not hasattr(self, "ledger"):
            return
        used = {fragment for r in self.model.rows for fragment, _ in r["at"].values()}
        self.retired += self.ledger.retired()
        assert len(set(self.retired)) == len(self.retired) and not used & set(self.retired)
        stats = self.ledger.stats()
        assert stats["fragments"] == stats["bytes"] == len(used)
        assert stats["rows"] == len(self.model.rows) and stats["leases"] == len(self.model.leases)
        assert stats["rows_leased"] == sum(isinstance(s, int) for r in self.model.rows for s in r["state"].values())


Comparison.TestCase.settings = settings(
    max_examples=300, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
TestComparison = Comparison.TestCase


# ---- cases


def test_rows_are_taken_when_their_fields_are_there():
    ledger = Ledger()
    publish(ledger, "rollout", "abc", ["tokens"])
    assert ledger.take("train", "t", 0, fields=["tokens", "reward"]) is None
    publish(ledger, "reward", "ca", ["reward"])
    lease = ledger.take("train", "t", 0, fields=["reward", "tokens"])
    assert keys_of(lease) == ["a", "c"]
    assert [dict(row.at) for row in lease.rows] == [
        {"reward": ("f-reward", 1), "tokens": ("f-rollout", 0)},
        {"reward": ("f-reward", 0), "tokens": ("f-rollout", 2)},
    ]
    assert ledger.take("train", "t", 0, fields=["tokens", "reward"]) is None


def test_a_row_goes_when_every_group_has_acknowledged_it():
    ledger = Ledger(("train", "eval"))
    publish(ledger, "o", "ab")
    first, second = (ledger.take(group, "c", 0) for group in ledger.groups)
    ledger.ack(first.id)
    assert ledger.stats()["rows"] == 2 and not ledger.retired()
    ledger.ack(second.id)
    assert ledger.stats()["rows"] == 0 and ledger.retired() == ["f-o"] and ledger.retired() == []


def test_an_acknowledged_row_may_come_again_as_a_new_one():
    ledger = Ledger()
    publish(ledger, "o", "a")
    ledger.ack(ledger.take("train", "c", 0).id)
    with pytest.raises(SchemaError, match=r"partition 'p' has no row 'a': it was never published, or has gone"):
        publish(ledger, "late", "a", ["reward"], create=False)
    assert publish(ledger, "o2", "a") == Published(1, 0)


def test_a_late_acknowledgement_is_told():
    ledger = Ledger(lease_s=5)
    publish(ledger, "o", "ab")
    lease = ledger.take("train", "slow", 0)
    assert ledger.expire(4.9) == 0
    ledger.renew(lease.id, 4.9)
    assert ledger.expire(9.8) == 0 and ledger.expire(9.9) == 2
    with pytest.raises(LeaseLostError, match=r"lease 1 of 2 rows has ended \(past its deadline\)"):
        ledger.ack(lease.id)
    assert ledger.release(lease.id) == 0
    assert keys_of(ledger.take("train", "other", 10)) == ["a", "b"]


def test_released_rows_are_in_their_old_places():
    ledger = Ledger()
    publish(ledger, "o", "abcdef")
    first = ledger.take("train", "c", 0, at_most=2)
    ledger.take("train", "c", 0, at_most=2)
    ledger.release(first.id)
    assert keys_of(ledger.take("train", "c", 0)) == ["a", "b", "e", "f"]


@pytest.mark.parametrize("what", ["fields", "keys"])
def test_one_name_for_two_operations(what):
    ledger = Ledger()
    publish(ledger, "o", "ab")
    with pytest.raises(SchemaError, match="operation 'o' was done before with other keys or fields"):
        publish(ledger, "o", "ac" if what == "keys" else "ab", ["x"] if what == "keys" else ["y"], fragment="g")


def test_new_rows_wait_for_room_and_further_fields_do_not():
    ledger = Ledger(capacity_rows=3, capacity_bytes=100)
    publish(ledger, "o", "ab", nbytes=60)
    assert publish(ledger, "many", "cd", nbytes=10) == NoRoom(2, 2, 3, 10, 60, 100)
    refused = publish(ledger, "large", "c", nbytes=41)
    assert str(refused) == "2 of 3 rows are used, and 1 more wanted; 60 of 100 bytes are used, and 41 more wanted"
    assert publish(ledger, "more", "ab", ["y"], nbytes=90) == Published(0, 2)
    assert ledger.stats()["bytes"] == 150
    ledger.ack(ledger.take("train", "c", 0, fields=["y"]).id)
    assert publish(ledger, "many", "cd", nbytes=10) == Published(2, 0)


@pytest.mark.parametrize(("keys", "nbytes", "message"), [("abc", 1, "3 rows .* of 2 rows"), ("a", 101, "101 bytes .* of 100 bytes")])
def test_what_never_fits_is_refused_at_once(keys, nbytes, message):
    ledger = Ledger(capacity_rows=2, capacity_bytes=100)
    with pytest.raises(StoreFullError, match=message):
        publish(ledger, "o", keys, nbytes=nbytes)


def test_what_is_left_of_a_closed_partition():
    ledger = Ledger()
    publish(ledger, "o", "abcde")
    first = ledger.take("train", "c", 0, partitions=["p"], at_least=3, at_most=3)
    assert ledger.take("train", "d", 0, partitions=["p"], at_least=3) is None
    ledger.close("p")
    with pytest.raises(StoreError, match="partition 'p' is closed, and row 'f' would be new"):
        publish(ledger, "o2", "f")
    second = ledger.take("train", "d", 0, partitions=["p"], at_least=3)
    assert keys_of(second) == ["d", "e"]
    assert ledger.take("train", "d", 0, partitions=["p"], at_least=3) is None  # the first three may come back
    ledger.ack(second.id)
    ledger.release(first.id)
    again = ledger.take("train", "d", 0, partitions=["p"], at_least=3)
    assert keys_of(again) == ["a", "b", "c"]
    ledger.ack(again.id)
    over = ledger.take("train", "d", 0, partitions=["p"], at_least=3)
    assert isinstance(over, Lease) and over.rows == () and over.id == 0


def test_a_closed_partition_waits_for_fields():
    ledger = Ledger()
    publish(ledger, "o", "ab", ["tokens"])
    publish(ledger, "r", "a", ["reward"])
    ledger.close(None)
    wanted = {"fields": ["tokens", "reward"], "at_least": 2}
    assert ledger.take("train", "c", 0, **wanted) is None
    publish(ledger, "r2", "b", ["reward"])
    assert keys_of(ledger.take("train", "c", 0, **wanted)) == ["a", "b"]


def test_rows_that_fail_the_condition_are_not_waited_for():
    ledger = Ledger()
    publish(ledger, "o", "ab", tags=[{"version": 1}, {"version": 2}])
    ledger.close("p")
    wanted = {"partitions": ["p"], "where": Where.of({"version": {">=": 2}}), "at_least": 2}
    assert keys_of(ledger.take("train", "c", 0, **wanted)) == ["b"]


def test_a_dropped_partition_takes_its_rows_out_of_leases():
    ledger = Ledger()
    publish(ledger, "o", "ab", partition="p")
    publish(ledger, "o2", "c", partition="q")
    lease = ledger.take("train", "c", 0)
    assert [(row.partition, row.key) for row in lease.rows] == [("p", "a"), ("p", "b"), ("q", "c")]
    assert ledger.drop("p") == 2 and ledger.drop("p") == 0
    assert ledger.retired() == ["f-o"]
    assert ledger.ack(lease.id) == 1


def test_overwriting_lets_go_of_what_was_there():
    ledger = Ledger()
    publish(ledger, "o", "ab")
    lease = ledger.take("train", "c", 0, at_most=1)
    with pytest.raises(SchemaError, match=r"row 'a' of partition 'p' has field 'x' already; pass overwrite=True"):
        publish(ledger, "o2", "ab")
    publish(ledger, "o3", "a", overwrite=True)
    assert ledger.retired() == []
    publish(ledger, "o4", "b", overwrite=True)
    assert ledger.retired() == ["f-o"]
    assert lease.rows[0].at["x"] == ("f-o", 0)


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ("key 'a' is there twice", {"keys": "aba", "fields": ["y"]}),
        ("key 3 is a int", {"keys": ["b", 3]}),
        (r"field 'x' is int64 in what is published, and float32 in the catalog", {"keys": "z", "fields": {"x": "int64"}}),
        (r"tag 'group' is a list", {"keys": "z", "tags": {"group": [1]}}),
        (r"there are tags for 1 rows, and 2 keys", {"keys": "yz", "tags": [{}]}),
        (r"has no row 'z', and a new one needs a field", {"keys": "az", "fields": ()}),
    ],
)
def test_what_is_refused_changes_nothing(message, what):
    ledger = Ledger()
    publish(ledger, "o", "a")
    before = (ledger.list(), ledger.stats())
    with pytest.raises(SchemaError, match=message):
        publish(ledger, "o2", **what)
    assert (ledger.list(), ledger.stats()) == before


def test_tags_alone():
    ledger = Ledger()
    publish(ledger, "o", "ab", tags={"status": "new"})
    publish(ledger, "t", "b", (), tags={"status": "scored"})
    assert keys_of(ledger.take("train", "c", 0, where=Where.of({"status": "scored"}))) == ["b"]


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ({"n": 2}, [2]),
        ({"n": {"!=": 2}}, [1, 3]),
        ({"n": {">": 1, "<=": 3}}, [2, 3]),
        ({"n": {"in": [1, 3]}}, [1, 3]),
        ({"n": {"not in": (1, 3)}}, [2]),
        ({"n": {">=": 1}, "text": "no"}, []),
        ({"missing": {"!=": 1}}, []),
    ],
)
def test_conditions(condition, expected):
    where = pickle.loads(pickle.dumps(Where.of(condition)))
    assert [n for n in (1, 2, 3) if where.holds({"n": n, "text": "yes"})] == expected


def test_conditions_that_cannot_be():
    with pytest.raises(ValueError, match="operator '=>'"):
        Where.of({"n": {"=>": 1}})
    with pytest.raises(ValueError, match="takes a list, got int"):
        Where.of({"n": {"in": 1}})
    with pytest.raises(SchemaError, match="tag 'n' of a row is 'a', which '<' cannot compare with 3"):
        Where.of({"n": {"<": 3}}).holds({"n": "a"})


@pytest.mark.parametrize("bad", [{"groups": ()}, {"groups": ("a", "a")}, {"capacity_rows": 0}, {"capacity_bytes": -1}, {"lease_s": 0}])
def test_settings_out_of_range(bad):
    with pytest.raises(ValueError, match="must be"):
        Ledger(**bad)


def test_questions_that_cannot_be():
    ledger = Ledger()
    with pytest.raises(ValueError, match=r"there is no group 'x'; the groups are \['train'\]"):
        ledger.take("x", "c", 0)
    with pytest.raises(ValueError, match="at_least must be positive and not more than at_most, got 3 and 2"):
        ledger.take("train", "c", 0, at_least=3, at_most=2)
    with pytest.raises(LeaseLostError, match=r"lease 9 .*unknown"):
        ledger.ack(9)


def test_many_small_takes_stay_fast():
    """Rows that wait are looked at once each, not once for each take: 20000 rows would take minutes otherwise."""
    ledger = Ledger()
    rows = 20000
    publish(ledger, "o", [str(n) for n in range(rows)])
    seen = Counter()
    for _ in range(rows):
        lease = ledger.take("train", "c", 0, fields=["x"], at_most=1)
        seen.update(keys_of(lease))
        ledger.ack(lease.id)
    assert len(seen) == rows and ledger.stats()["rows"] == 0
