"""Refs and tensors in closures and classes, and refs that travel as somebody's bytes."""

from __future__ import annotations

import gc

import ray
import ray.cloudpickle
from oracle_outcome import described

from oracle_cases.flavour import remote
from oracle_cases.helpers import churn, round_trip
from oracle_cases.payloads import Sample, array, floats
from oracle_cases.registry import case
from oracle_cases.remotes import async_keeper, keeper, same, scale


@remote(num_cpus=0)
class Reader:
    """Gets refs that came as bytes, at once or later."""

    def load(self, pickled):
        self.loaded = ray.cloudpickle.loads(pickled)

    def read(self):
        return ray.get(self.loaded)

    def dump_put(self, seed):
        """The object is this actor's own."""
        return ray.cloudpickle.dumps(ray.put(floats(seed)))

    def dump_call(self, seed):
        return ray.cloudpickle.dumps(scale.remote(floats(seed), 2))


@case
def class_captures_refs_and_tensors():
    refs, tensor, returned = [ray.put(floats()), ray.put(array())], floats(2), scale.remote(floats(3), 2)

    @remote(num_cpus=0)
    class Capturing:
        attribute = refs

        def read(self, default=returned):
            return ray.get(refs), ray.get(self.attribute), ray.get(default), described(tensor), tensor + 1

    actor = Capturing.remote()
    refs = returned = None
    gc.collect()
    churn(2)
    return [ray.get(actor.read.remote()), ray.get(Capturing.remote().read.remote([ray.put(floats(4))]))]


@case
def function_captures_another_function():
    refs, factor = [ray.put(floats())], floats(1)

    @remote
    def inner(k):
        return ray.get(refs[0]) * factor * k

    @remote
    def outer(k):
        return ray.get([inner.remote(k), inner.remote(k + 1)])

    return ray.get(outer.remote(2))


@case
def function_captures_actor_and_results():
    actor, got = keeper(), round_trip([floats(), array()])

    @remote
    def use(k):
        return ray.get(actor.scale.remote(got[0], k)), got[1]

    return ray.get(use.remote(3))


@case
def captured_ref_outlives_its_name():
    captured = ray.put(floats())

    @remote
    def use():
        return ray.get(captured)

    first = ray.get(use.remote())
    captured = None
    gc.collect()
    churn(4)
    return [first, ray.get(use.remote())]


@case
def default_argument_is_a_ref():
    default = ray.put(floats())

    @remote
    def use(refs=(default,), *, k=2):
        return ray.get(refs[0]) * k

    return ray.get([use.remote(), use.remote([ray.put(floats(1))], k=3)])


@case
def ref_as_bytes_read_later_by_an_actor():
    readers = [Reader.remote(), Reader.remote()]
    refs = [ray.put(floats()), scale.remote(floats(1), 2)]
    pickled = ray.cloudpickle.dumps(refs)
    ray.get([reader.load.remote(pickled) for reader in readers])
    del refs
    gc.collect()
    churn(2)
    return [ray.get([reader.read.remote() for reader in readers]), ray.get(ray.cloudpickle.loads(pickled))]


@case
def ref_as_bytes_from_an_actor():
    maker, reader = Reader.remote(), Reader.remote()
    pickles = ray.get([maker.dump_put.remote(1), maker.dump_call.remote(2)])
    churn(2)
    refs = [ray.cloudpickle.loads(pickled) for pickled in pickles]
    ray.get(reader.load.remote(pickles[0]))
    return [ray.get(refs), ray.get(reader.read.remote()), ray.get(same.remote(refs[1]))]


@case
def ref_as_bytes_in_a_put():
    """As some frameworks do: an object pickled by hand, refs and all, then put as bytes."""
    pickled = ray.cloudpickle.dumps({"sample": Sample(floats(), array()), "refs": [ray.put(floats(1))]})
    loaded = ray.cloudpickle.loads(round_trip(pickled))
    return [loaded, ray.get(loaded["refs"])]


# Refs in containers in the store ----------------------------------------------------------------


@case
def put_of_containers_of_refs():
    refs = [ray.put(floats()), scale.remote(floats(1), 2), ray.put([ray.put(array())])]
    outer = ray.put({"refs": refs, "sample": Sample(refs[0], array(1), [refs[1]]), "tensor": floats(3)})
    del refs
    gc.collect()
    churn(2)
    got = ray.get(outer)
    return [got, ray.get(got["refs"]), ray.get(got["sample"].prompt), ray.get(ray.get(got["refs"][2])[0])]


@case
def put_of_many_refs():
    outer = ray.put([ray.put(floats(i, (64, 1024))) for i in range(20)])
    gc.collect()
    churn(2)
    return ray.get([*ray.get(outer), *ray.get(same.remote([outer]))[:1]])


@case
def refs_in_refs_in_refs():
    ref = ray.put(floats())
    for i in range(5):
        ref = ray.put([ref, floats(i)])
    gc.collect()
    churn(2)
    seen, got = [], ray.get(same.remote(ref))
    while isinstance(got, list):
        seen.append(got[1])
        got = ray.get(got[0])
    return [seen, got]


@case
def container_of_refs_kept_by_actors():
    refs = [ray.put(floats(i)) for i in range(3)]
    outer = ray.put({"refs": refs})
    ray.get([keeper().keep.remote([outer]), async_keeper().keep.remote(refs)])
    del refs, outer
    gc.collect()
    churn(2)
    kept = ray.get(keeper().read_inner.remote())
    return [ray.get(kept["refs"]), ray.get(ray.get(async_keeper().read.remote()))]
