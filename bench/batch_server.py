"""`python -m bench.batch_server KIND BYTES`: puts and gets the batches of `workloads`, of which none has more than BYTES. See `batch`."""

from __future__ import annotations

import gc
import pickle
import sys
from collections.abc import Callable
from typing import Any

from bench import payloads, serving, workloads
from bench.subjects import Ray, Roundtrips, timed, until_empty

__all__ = ["SUBJECTS"]

SUBJECTS = {
    "plain": ("ray-verl", "ray-lists"),
    "mooncake": ("mooncake",),
    "transferqueue": ("transferqueue",),
    "local": ("pickle5",),
    "pool": ("pool", "pool-padded", "pool-lists"),
}
"""Which subjects each kind of process holds."""

_BESIDE_BYTES = 1 << 30  # that stores have above the largest batch


class _Ray(Roundtrips, Ray):
    """`ray.put` and `ray.get`: a verl batch as verl pickles it by default, or lists as Ray does."""

    def __init__(self) -> None:
        Ray.__init__(self, actors=None)

    def stored(self) -> int:
        """Bytes: the size of Ray's object."""
        from ray.experimental import get_object_locations

        handles = [self.put(self.value)]
        nbytes = get_object_locations(handles)[handles[0]]["object_size"]
        self.drop(handles)
        return nbytes


class _Pickle(Roundtrips):
    """`pickle`, protocol 5, in one process: what serialising alone costs."""

    def put(self, value: Any) -> Any:
        return pickle.dumps(value, protocol=5)

    def get(self, handle: Any) -> Any:
        return pickle.loads(handle)

    def drop(self, handles: list[Any]) -> None:
        handles.clear()

    def stored(self) -> int:
        return len(self.put(self.value))


class _Pool(Roundtrips):
    """Batches as refs that know rows and columns, with every column there in one of its forms when `get` returns."""

    def __init__(self, form: str) -> None:
        import mooncake_ray

        self._form, self._pool = form, mooncake_ray

    def put(self, value: Any) -> Any:
        return self._pool.put_batch(value)

    def get(self, handle: Any) -> Any:
        return self._pool.get(handle, form=self._form)

    def drop(self, handles: list[Any]) -> None:
        handles.clear()
        until_empty(self._pool.pool_stats)

    def check(self) -> None:
        """In the form that it was put in, whatever form is timed."""
        handles = [self.put(self.value)]
        got = self._pool.get(handles[0], form="as-put")
        assert payloads.same(got, self.value), "pool: what came back is not what went in"
        got = self.get(handles[0])
        columns = got if isinstance(got, dict) else {**got.batch, **got.non_tensor_batch}
        short = [name for name, column in columns.items() if len(column) != len(handles[0])]
        assert not short, f"pool: columns {short} came back without all {len(handles[0])} rows"
        del got, columns
        self.drop(handles)

    def stored(self) -> int:
        """Bytes of the block."""
        handles = [self.put(self.value)]
        nbytes = handles[0].nbytes
        self.drop(handles)
        return nbytes


class _Server:
    """Holds the subjects of one kind. A batch is made once for all of them, and only in the form that they take."""

    def __init__(self, kind: str, largest_bytes: int) -> None:
        store = largest_bytes + largest_bytes // 4 + _BESIDE_BYTES
        self._ray = kind in ("plain", "pool")
        if self._ray:
            serving.start_ray(store if kind == "pool" else 0, store)
        self.held = {name: _make(name, store) for name in SUBJECTS[kind]}
        self._values: dict[str, Any] = {}
        self._workload = ""

    def load(self, subject: str, workload: str, lists: bool) -> None:
        """Gives a subject its batch, and checks that what comes back is what went in.

        Args:
            lists: In Python lists instead of padded, if the subject takes both.
        """
        form = "lists" if lists or subject == "ray-lists" else "padded"
        if workload != self._workload:
            for other in self.held.values():
                other.load(None)
            self._values.clear()
            self._workload = workload
        gc.unfreeze()
        if form not in self._values:
            self._values[form] = getattr(workloads, form)(workloads.build(workload))
        self.held[subject].load(self._values[form])
        self.held[subject].check()
        gc.collect()
        gc.freeze()  # so that the collection before each timing is a short one

    def stored(self, subject: str) -> int:
        return self.held[subject].stored()

    def time(self, subject: str) -> dict[str, float]:
        """One put and one get."""
        return timed(self.held[subject].roundtrip, 1)[0]

    def close(self) -> None:
        for subject in self.held.values():
            subject.close()
        if self._ray:
            import ray

            ray.shutdown()


def _make(name: str, store_bytes: int) -> Roundtrips:
    def mooncake() -> Roundtrips:
        from bench.mooncake_peer import Mooncake

        return Mooncake(store_bytes)

    def transferqueue() -> Roundtrips:
        from bench.transferqueue_peer import TransferQueue

        return TransferQueue(_BESIDE_BYTES)  # Ray's store holds none of its data

    made: dict[str, Callable[[], Roundtrips]] = {
        "ray-verl": _Ray,
        "ray-lists": _Ray,
        "mooncake": mooncake,
        "transferqueue": transferqueue,
        "pickle5": _Pickle,
        "pool": lambda: _Pool("ragged"),
        "pool-padded": lambda: _Pool("as-put"),
        "pool-lists": lambda: _Pool("as-put"),
    }
    return made[name]()


if __name__ == "__main__":
    if sys.argv[1] == "mooncake":
        from bench.mooncake_peer import enter_own_network

        enter_own_network()
    serving.serve(lambda: _Server(sys.argv[1], int(sys.argv[2])))
