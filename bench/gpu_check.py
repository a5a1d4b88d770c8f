"""Everything that needs a CUDA device, in one go: `python -m bench.gpu_check [NAME …]`.

Prints a JSON object for each check, and one at the end. Exit status 1 if a check fails, 2 if there is no device. Takes some minutes, and 11 GiB
of memory on the host, 5 GiB on the device.
"""

from __future__ import annotations

import json
import pickle
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

GIB = 1 << 30
POOL_BYTES = 5 * GIB
RUNS = 5

Check = Callable[[Any], dict[str, Any]]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


class Failed(Exception):
    """What a check found."""


def require(condition: object, what: str) -> None:
    if not condition:
        raise Failed(what)


def new_store() -> Any:
    import secrets

    from mooncake_ray.config import Config
    from mooncake_ray.store import Store

    settings = Config(capacity_bytes=POOL_BYTES, prefault_bytes=POOL_BYTES, linger_s=0.2, spill_dir="off")
    return Store(f"gpu-check-{secrets.token_hex(4)}", settings)


def populated(store: Any) -> Any:
    end = time.monotonic() + 120
    while store.stats()["populated_bytes"] < POOL_BYTES:
        require(time.monotonic() < end, "the pool is not populated after 120 s")
        time.sleep(0.05)
    return store


def same(a: Any, b: Any) -> bool:
    import torch

    if (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device):
        return False
    raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*raw)


def layouts(dtype: Any) -> Iterator[tuple[str, Any]]:
    import torch

    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (64 * 96 * 4 * dtype.itemsize,), dtype=torch.uint8, device="cuda")
    whole = raw.view(dtype).view(64, 96, 4)
    yield "row-major", whole
    yield "permuted", whole.permute(2, 0, 1)
    yield "strided", whole[::2, 1::3]
    yield "offset", whole[5:]
    yield "expanded", whole[:1].expand(7, 96, 4)


@check
def bits(store: Any) -> dict[str, Any]:
    """Every dtype and layout comes back, to the device and to the host."""
    import torch

    names = "float32 float64 float16 bfloat16 float8_e4m3fn float8_e5m2 bool complex64 complex128 "
    names += "int8 int16 int32 int64 uint8 uint16 uint32 uint64"
    done = 0
    for name in names.split():
        for layout, tensor in layouts(getattr(torch, name)):
            key = store.put({"t": tensor, "host": torch.arange(1000)})
            require(same(store.get(key)["t"], tensor), f"{name} {layout}: other bits, or another place")
            require(same(store.get(key, device="cpu")["t"], tensor.cpu()), f"{name} {layout}: other bits on the CPU")
            moved = store.get(key, device="cuda:0")
            require(moved["host"].is_cuda and int(moved["host"].sum()) == 499500, f"{name} {layout}: a tensor of the host on the device")
            store.free([key])
            done += 1
    leaf = torch.ones(1000, device="cuda", requires_grad=True)
    require(store.get(store.put(leaf)).requires_grad, "requires_grad is lost")
    require(same(store.get(store.put(torch.nn.Parameter(leaf.detach()))), leaf), "a Parameter")
    return {"tensors": done}


@check
def placement(store: Any) -> dict[str, Any]:
    """A device that is not there is PyTorch's own error."""
    import torch

    tensor = torch.ones(5000, device="cuda")
    key = store.put(tensor)
    missing = f"cuda:{torch.cuda.device_count()}"
    original, torch.serialization.location_tag = torch.serialization.location_tag, lambda storage: missing
    try:
        blob = pickle.dumps(tensor.cpu())
    finally:
        torch.serialization.location_tag = original
    said = []
    for load in (lambda: pickle.loads(blob), lambda: store.get(key, device=missing)):
        try:
            load()
        except RuntimeError as e:
            said.append(str(e))
    require(len(said) == 2 and said[0] == said[1], f"not the same error: {said}")
    return {"devices": torch.cuda.device_count(), "error": said[0][:80]}


@check
def registration(store: Any) -> dict[str, Any]:
    """What registering costs, and that all of what is used is registered and given back."""
    import torch

    from mooncake_ray.store import devices

    store.put(torch.zeros(1 << 20, device="cuda"))  # whatever is done once
    known = devices.registrations(store.client)
    require(known.nbytes > 0, "nothing is registered")
    tensor = torch.zeros(GIB, dtype=torch.uint8, device="cuda")
    began, before = time.perf_counter(), known.nbytes
    keys = [store.put(tensor)]
    first, registered = time.perf_counter() - began, known.nbytes - before
    began = time.perf_counter()
    store.free(keys)
    keys = [store.put(tensor)]
    second = time.perf_counter() - began
    store.free(keys)
    (index, _, _, nbytes, _), *_ = store.client.arenas()
    piece = known.pieces(index, 0, 4096)[0]
    known.done()
    require(torch.from_numpy(piece).is_pinned(), "PyTorch does not see that the memory is pinned")
    cost = (first - second) / (registered / GIB) if registered else None
    return {"registered_gib": registered / GIB, "s_per_gib": cost, "arena_gib": nbytes / GIB}


@check
def refusal(store: Any) -> dict[str, Any]:
    """A refused registration is an error of ours, and not of whatever PyTorch does next."""
    import torch

    from mooncake_ray.errors import RegistrationError
    from mooncake_ray.store import devices

    store.put(torch.zeros(1 << 20, device="cuda"))
    _, address, *_ = store.client.arenas()[0]
    here = devices.backend()
    try:
        here.register(address, 4096)  # a second time
    except RegistrationError as e:
        code = e.errno
    else:
        raise Failed("memory could be registered twice")
    require(int((torch.ones(1000, device="cuda") * 2).sum()) == 2000, "PyTorch computes otherwise")
    return {"cuda_error": code}


@check
def bandwidth(store: Any) -> dict[str, Any]:
    """A tensor of 1 GiB: registered memory against memory that is not."""
    import torch

    from mooncake_ray.store import devices

    def times(store: Any) -> dict[str, float]:
        tensor = torch.randint(0, 256, (GIB,), dtype=torch.uint8, device="cuda")
        puts, gets = [], []
        for _ in range(RUNS + 1):
            torch.cuda.synchronize()
            began = time.perf_counter()
            key = store.put(tensor)
            puts.append(time.perf_counter() - began)
            began = time.perf_counter()
            out = store.get(key)
            gets.append(time.perf_counter() - began)
            require(torch.equal(out, tensor), "other bits")
            store.free([key])
            del out
        return {"put_gb_s": GIB / 1e9 / statistics.median(puts[1:]), "get_gb_s": GIB / 1e9 / statistics.median(gets[1:])}

    pinned = times(store)
    other = populated(new_store())
    refused = devices.Registrations(other.client, devices.backend())
    refused._refused = True
    devices._registrations[id(other.client)] = refused
    pageable = times(other)
    other.close()
    host, target = torch.empty(GIB, dtype=torch.uint8, pin_memory=True), torch.empty(GIB, dtype=torch.uint8, device="cuda")
    plain = []
    for _ in range(RUNS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(host)
        plain.append(time.perf_counter() - began)
    best = GIB / 1e9 / statistics.median(plain)
    require(pinned["get_gb_s"] > pageable["get_gb_s"], f"registered memory is no faster: {pinned}, {pageable}")
    return {"registered": pinned, "pageable": pageable, "pytorch_pinned_to_device_gb_s": best}


@check
def order(store: Any) -> dict[str, Any]:
    """Copies come after what was computed before, and before what is computed after, on any stream and without a wait of the caller's."""
    import torch

    stream = torch.cuda.Stream()
    work = torch.randn(4096, 4096, device="cuda")
    for where in (torch.cuda.current_stream(), stream):
        for i in range(20):
            with torch.cuda.stream(where):
                tensor = torch.zeros(4 << 20, device="cuda")
                for _ in range(10):
                    work = work @ work * 1e-4
                tensor.fill_(i)
                key = store.put(tensor)
                tensor.fill_(-1)
                out = store.get(key)
                total = (out == i).all()
                store.free([key])
            require(bool(total), f"round {i}: not what was put")
    return {"rounds": 40}


@check
def threads(store: Any) -> dict[str, Any]:
    """Threads with streams of their own."""
    import torch

    failures: list[str] = []

    def run(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(30):
                tensor = torch.full((1 << 18,), seed * 1000 + i, device="cuda")
                key = store.put([tensor, torch.full((5000,), i)])
                out = store.get(key, device="cuda:0")
                if not (bool((out[0] == tensor).all()) and bool((out[1] == i).all())):
                    failures.append(f"thread {seed}, round {i}")
                store.free([key])

    all_threads = [threading.Thread(target=run, args=(n,)) for n in range(6)]
    for thread in all_threads:
        thread.start()
    for thread in all_threads:
        thread.join(120)
    require(not any(t.is_alive() for t in all_threads), "a thread hangs")
    require(not failures, f"other bits: {failures[:3]}")
    return {"threads": len(all_threads)}


@check
def many(store: Any) -> dict[str, Any]:
    """1000 tensors of 64 KiB in one value."""
    import torch

    value = [torch.full((16384,), float(i), device="cuda") for i in range(1000)]
    puts, gets = [], []
    for _ in range(RUNS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        key = store.put(value)
        puts.append(time.perf_counter() - began)
        began = time.perf_counter()
        out = store.get(key)
        gets.append(time.perf_counter() - began)
        require(all(torch.equal(a, b) for a, b in zip(out, value, strict=True)), "other bits")
        store.free([key])
    return {"put_ms": statistics.median(puts) * 1e3, "get_ms": statistics.median(gets) * 1e3}


@check
def cupy(store: Any) -> dict[str, Any]:
    """CuPy's arrays, where it is installed."""
    try:
        import cupy
    except ImportError as e:
        return {"skipped": str(e)}
    array = cupy.arange(1 << 20, dtype="f4").reshape(1024, 1024)
    for one in (array, array.T, array[::2, ::3]):
        out = store.get(store.put(one))
        require(type(out) is cupy.ndarray and bool((out == one).all()), "not what was put")
    return {"version": cupy.__version__}


@check
def gpudirect(store: Any) -> dict[str, Any]:
    """Whether device memory can be exported to a network card; where it can be, a tensor's is."""
    import os

    import torch

    from mooncake_ray.store import gpudirect

    if why := gpudirect.unsupported():
        return {"skipped": why}
    tensor = torch.ones(8 << 20, device="cuda")
    fd = gpudirect.export(*gpudirect.span(tensor.data_ptr(), tensor.nbytes))
    kind = os.readlink(f"/proc/self/fd/{fd}")
    os.close(fd)
    return {"exported": kind}


def main(names: list[str]) -> int:
    import torch

    if unknown := set(names) - CHECKS.keys():
        print(f"no such check: {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print(json.dumps({"check": "device", "ok": False, "why": "torch.cuda.is_available() is False"}))
        return 2
    print(json.dumps({"check": "device", "ok": True, "name": torch.cuda.get_device_name(), "torch": torch.__version__}), flush=True)
    failed = []
    store = populated(new_store())
    for name in names or CHECKS:
        began = time.perf_counter()
        try:
            found = {"ok": True, **CHECKS[name](store)}
        except Exception as e:  # each check for itself
            failed.append(name)
            found = {
                "ok": False,
                "why": f"{type(e).__name__}: {e}",
                "trace": "" if isinstance(e, Failed) else traceback.format_exc()[-1500:],
            }
        print(json.dumps({"check": name, **found, "seconds": round(time.perf_counter() - began, 2)}), flush=True)
    store.close()
    print(json.dumps({"check": "all", "ok": not failed, "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
