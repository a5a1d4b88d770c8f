"""Metrics on Ray's own Prometheus endpoint, of two clusters one after the other in one process."""

from __future__ import annotations

import json

import pytest
from conftest import run_script

pytest.importorskip("opentelemetry.exporter.prometheus", reason="ray[default] exports metrics, plain ray does not")

PROGRAM = """
import json, socket, threading, time, urllib.request
import numpy as np, ray, mooncake_ray
from conftest import ray_init, until

def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]

def scrape(port):
    try:
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=100).read().decode()
    except OSError:
        return {}
    sums = {}
    for line in text.splitlines():
        if line.startswith("ray_mooncake_ray_") and "_bucket" not in line:
            name, _, rest = line.partition("{")
            for tag in ('reason="', 'kind="'):
                if tag in rest:
                    name += ":" + rest.partition(tag)[2].partition('"')[0]
            sums[name.removeprefix("ray_mooncake_ray_")] = sums.get(name.removeprefix("ray_mooncake_ray_"), 0) + float(line.split()[-1])
    return sums

def expect(port, **wanted):
    def there():
        found = scrape(port)
        return all(found.get(name.replace("__", ":")) == value for name, value in wanted.items())
    end = time.monotonic() + 200
    while not there():
        assert time.monotonic() < end, (wanted, scrape(port))
        time.sleep(0.1)

@ray.remote
class Reader:
    def read(self, batch):
        return float(batch["x"].sum())

mooncake_ray.install(capacity_bytes=64 << 20, prefault_bytes=64 << 20, metrics_interval_s=0.2)
for _ in range(2):
    port = free_port()
    ray_init(num_cpus=2, _metrics_export_port=port, _system_config={"metrics_report_interval_ms": 1000})
    reader = Reader.remote()
    ref = ray.put({"x": np.ones(1 << 17)})
    assert [ray.get(reader.read.remote(ref)) for _ in range(3)] == [1 << 17] * 3
    expect(port, puts_total=1, gets_total=3, put_bytes_total=1 << 20, put_seconds_count=1, get_seconds_count=3,
           pool_capacity_bytes=64 << 20, pool_objects=1, pool_leases=0, pool_used_bytes=1 << 20)
    large = ray.put({"x": np.ones(10 << 20)})  # more than there is: Ray's own
    expect(port, puts_total=1, fallbacks_total__StoreFullError=1)
    del ref, large
    expect(port, pool_objects=0, pool_used_bytes=0)
    ray.kill(reader)
    until(lambda: scrape(port).get("reaped_total:sessions", 0) >= 1, "a session that was taken back")
    ray.shutdown()
    until(lambda: not any(t.name.startswith("mooncake_ray") for t in threading.enumerate()), "the end of every thread")
print(json.dumps("done"))
"""


def test_metrics_move_and_end_with_the_session():
    assert json.loads(run_script(PROGRAM, timeout=280).stdout.splitlines()[-1]) == "done"
