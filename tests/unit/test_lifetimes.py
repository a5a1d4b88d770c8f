"""The bookkeeping of claims, against a Ray and a broker that say what the test wants. (The real ones: tests/integration/test_lifetime.py.)"""

from __future__ import annotations

import pytest
import ray

from mooncake_ray._native import pool
from mooncake_ray.objects import lifetime
from mooncake_ray.objects.lifetime import Lifetimes


class Client:
    def __init__(self):
        self.said = []

    def adopt(self, kind, key):
        self.said.append(("adopt", kind, key))

    def disown(self, kind, key, mine):
        self.said.append(("disown", kind, key, mine))

    def unclaim(self, kind, key):
        self.said.append(("unclaim", kind, key))

    def take(self):
        said, self.said = self.said, []
        return said


class CoreWorker:
    def __init__(self):
        self.table = {}
        self.callbacks = {}

    def get_all_reference_counts(self):
        return self.table

    def add_object_out_of_scope_callback(self, ref, gone):
        self.callbacks[ref.binary()] = gone
        return True

    def peek_next_object_id_binary(self, ref):
        return self.next_id


class Worker:
    connected = True

    def __init__(self):
        self.core_worker = CoreWorker()


TASK = b"t" * 24
KIND = pool.KIND_RETURN


def object_id(n, task=TASK):
    return task + n.to_bytes(4, "little")


def row(id):
    return id.hex().encode()


@pytest.fixture
def kit():
    return Lifetimes(Client(), Worker(), lambda: None)


def answers(kit, key):
    kit._answer(KIND, key)
    kit._next_look = 0
    kit._look()
    return kit.client.take()


def test_a_return_whose_ref_lives_is_adopted_until_it_is_gone(kit):
    table, key = kit.worker.core_worker.table, object_id(1)
    table[row(key)] = {}
    kit.submitted(ray.ObjectRef(key), "f", False)
    assert answers(kit, key) == [("adopt", KIND, key)]
    table.clear()
    kit._next_look = 0
    kit._look()
    assert kit.client.take() == [("unclaim", KIND, key)]


def test_the_second_call_of_a_routing_function_is_registered(kit):
    first, second = object_id(1), object_id(1, b"u" * 24)
    kit.worker.core_worker.table[row(first)] = {}
    kit.submitted(ray.ObjectRef(first), "f", False)
    answers(kit, first)
    kit.submitted(ray.ObjectRef(second), "f", False)
    assert answers(kit, second) == [("adopt", KIND, second)]
    kit.worker.core_worker.callbacks[second](second)
    assert kit.client.take() == [("unclaim", KIND, second)]


def test_a_registered_return_that_went_before_the_question(kit):
    kit._routing_functions.add("f")
    key = object_id(1)
    kit.submitted(ray.ObjectRef(key), "f", False)
    kit.worker.core_worker.callbacks[key](key)
    assert kit.client.take() == []
    assert answers(kit, key) == [("disown", KIND, key, True)]


def test_a_return_nobody_kept_is_known_as_ours(kit):
    key = object_id(1)
    kit.submitted(ray.ObjectRef(key), "f", False)
    assert answers(kit, key) == [("disown", KIND, key, True)]


def test_a_task_of_somebody_else(kit):
    assert answers(kit, object_id(1)) == [("disown", KIND, object_id(1), False)]


def test_the_question_may_come_before_remote_returns(kit):
    key = object_id(1)
    with kit.submitting():
        assert answers(kit, key) == []
        kit.worker.core_worker.table[row(key)] = {}
        kit.submitted(ray.ObjectRef(key), "f", False)
    kit._look()
    assert kit.client.take() == [("adopt", KIND, key)]


def test_a_later_submission_does_not_hold_the_answer_up(kit):
    key = object_id(1)
    with kit.submitting():
        assert answers(kit, key) == []
    with kit.submitting():
        kit._look()
        assert kit.client.take() == [("disown", KIND, key, False)]


def test_items_of_a_stream_wait_for_their_reader(kit):
    class Generator:
        _generator_ref = ray.ObjectRef(object_id(1))

    generator, key = Generator(), object_id(3)  # third item: object 4
    kit._submissions[TASK] = lifetime._Submission("g", generator=lambda: generator)
    core = kit.worker.core_worker
    core.next_id = object_id(2)
    assert answers(kit, key) == []
    core.next_id = object_id(5)
    core.table[row(object_id(4))] = {}
    kit._next_look = 0
    kit._look()
    assert kit.client.take() == [("adopt", KIND, key)]
    core.table.clear()
    kit._next_look = 0
    kit._look()
    assert kit.client.take() == [("unclaim", KIND, key)]


def test_an_abandoned_stream(kit):
    kit._submissions[TASK] = lifetime._Submission("g", generator=lambda: None)
    assert answers(kit, object_id(3)) == [("disown", KIND, object_id(3), True)]


def test_a_token_of_a_dead_owner(kit):
    token = object_id(9)
    kit._answer(pool.KIND_TOKEN, token)
    assert kit.client.take() == [("disown", pool.KIND_TOKEN, token, False)]
    kit.worker.core_worker.table[row(token)] = {}
    kit._answer(pool.KIND_TOKEN, token)
    assert kit.client.take() == [("adopt", pool.KIND_TOKEN, token)]


def test_submissions_are_forgotten_by_facts(kit, monkeypatch):
    monkeypatch.setattr(lifetime, "_SUBMISSIONS", 10)
    kit._remembered = 10
    alive = object_id(1, b"a" * 24)
    kit.worker.core_worker.table[row(alive)] = {}
    kit.submitted(ray.ObjectRef(alive), "f", False)
    for i in range(30):
        kit.submitted(ray.ObjectRef(object_id(1, bytes([i]) * 24)), "f", False)
    assert len(kit._submissions) <= 11 and alive[:24] in kit._submissions
