"""Named actors, namespaces, and actors that no handle keeps alive. (Jobs of their own: see test_jobs.)"""

from __future__ import annotations

import gc

import ray
import ray.util

from oracle_cases.flavour import remote
from oracle_cases.helpers import churn, gone, kind_of
from oracle_cases.payloads import array, floats
from oracle_cases.registry import case
from oracle_cases.remotes import Keeper


@remote
def make_detached(name, value):
    """The actor outlives the task that made it, and that task's worker."""
    actor = Keeper.options(name=name, lifetime="detached").remote(value)
    ray.get(actor.context.remote())


@remote
def use_named(name, tensor):
    actor = ray.get_actor(name)
    return ray.get([actor.read.remote(), actor.scale.remote(tensor, 2)])


@case
def detached_actor_without_handles():
    Keeper.options(name="detached-one", lifetime="detached").remote([floats(), array()])
    gc.collect()
    churn(2)
    actor = ray.get_actor("detached-one")
    kept, seen = ray.get(actor.read.remote()), ray.get(use_named.remote("detached-one", floats(1)))
    ray.kill(actor)
    return [kept, seen, gone(actor), kind_of(ray.get_actor, "detached-one")]


@case
def detached_actor_made_by_a_task():
    ray.get(make_detached.remote("detached-by-task", floats()))
    churn(2)
    actor = ray.get_actor("detached-by-task")
    return [ray.get(actor.read.remote()), ray.get(actor.scale.remote(ray.put(floats(2)), 2)), ray.kill(actor)]


@case
def named_actor_in_another_namespace():
    options = {"name": "in-a-namespace", "namespace": "oracle", "lifetime": "detached"}
    first = Keeper.options(**options, get_if_exists=True).remote(floats())
    again = Keeper.options(**options, get_if_exists=True).remote(floats(1))
    found = ray.get_actor("in-a-namespace", namespace="oracle")
    values = ray.get([actor.read.remote() for actor in (first, again, found)])
    taken = kind_of(Keeper.options(**options).remote, floats(2))
    names = [entry for entry in ray.util.list_named_actors(all_namespaces=True) if entry["namespace"] == "oracle"]
    return [values, taken, names, kind_of(ray.get_actor, "in-a-namespace"), ray.kill(first)]


@case
def handle_passed_on_keeps_the_actor():
    actor, other = Keeper.remote(floats()), Keeper.remote()
    ray.get(other.keep.remote([actor]))
    del actor
    gc.collect()
    churn(2)
    (handle,) = ray.get(other.read.remote())
    return ray.get([handle.read.remote(), handle.scale.remote(floats(1), 2)])


@case
def actor_ends_with_its_last_handle():
    actor = Keeper.options(name="last-handle").remote(floats())
    kept = actor.scale.remote(floats(1), 2)
    ray.wait([kept])
    del actor
    gc.collect()
    while not isinstance(kind_of(ray.get_actor, "last-handle"), list):
        pass
    return ray.get(kept)
