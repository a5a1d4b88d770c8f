"""Exports what the pool does through `ray.util.metrics`, and so through Ray's own Prometheus endpoint on every node.

Each process exports what it counted itself. What belongs to the node (how full its pool is) is exported by one process, which the broker
names; what a node's service does, by the process that the service runs in. One thread a session does it all, every
`Config.metrics_interval_s` seconds; where something happens it is only counted.

Prometheus has these names with `ray_` before them, and `_total` behind those of counters.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ray.util.metrics import Counter, Gauge, Histogram

from mooncake_ray import counters
from mooncake_ray.errors import StoreError
from mooncake_ray.snapshot import Snapshot

__all__ = ["COUNTERS", "GAUGES", "HISTOGRAMS", "SERVICE_GAUGES", "Exporter", "start"]

logger = logging.getLogger("mooncake_ray")

BUCKETS_S = [50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0]
_LOOK_EVERY_S = 0.5  # whether the session is over
_ASK_EVERY = 6  # rounds between questions to the broker, where another process is the one that it names
_A_WAIT_S = 0.01  # a create that takes longer has waited for room

HISTOGRAMS = {
    "mooncake_ray_put_seconds": ("put", "Time to get room in the pool, copy the tensors of one value there, and publish them"),
    "mooncake_ray_get_seconds": ("get", "Time to pin and map one pool object"),
    "mooncake_ray_weights_publish_seconds": ("publish", "Time in which all trainer ranks published a version of the weights"),
    "mooncake_ray_weights_stage_seconds": ("stage", "Time in which all engines got a version beside what they served"),
    "mooncake_ray_weights_pause_seconds": ("pause", "The longest that an engine's rank was paused for a version"),
    "mooncake_ray_remote_get_seconds": ("remote", "Time to get one object, or parts of one, from another node's pool"),
}
COUNTERS = {  # name → (what this process counts, description, tag)
    "mooncake_ray_puts": ("routed", "Values whose tensors went to the pool", ()),
    "mooncake_ray_gets": ("opened", "Values read from the pool", ()),
    "mooncake_ray_put_bytes": ("bytes_copied", "Bytes copied into the pool", ()),
    "mooncake_ray_passed_on_bytes": ("bytes_passed_on", "Bytes that were in the pool already, and were passed on without a copy", ()),
    "mooncake_ray_batch_written_bytes": ("batch_bytes_written", "Bytes of batches that were stored column by column", ()),
    "mooncake_ray_batch_read_bytes": ("batch_bytes_read", "Bytes of columns that were read out of stored batches", ()),
    "mooncake_ray_fallbacks": ("fallbacks:", "Values that Ray's own object store took, by reason", ("reason",)),
    "mooncake_ray_put_waits": ("waits", f"Puts that waited for room for more than {_A_WAIT_S * 1000:.0f} ms", ()),
    "mooncake_ray_put_wait_seconds": ("waited_s", "Time that these puts waited", ()),
    "mooncake_ray_replicas": ("replicas", "Objects that this node's service brought from other nodes", ()),
    "mooncake_ray_remote_read_bytes": ("remote_bytes_read", "Bytes that this node's service read from other nodes", ()),
    "mooncake_ray_remote_retries": ("remote_retries", "Reads from other nodes that were tried again after an error", ()),
    "mooncake_ray_relayed": ("relayed", "Objects that were read from another reader instead of their home", ()),
    "mooncake_ray_relays_lost": ("relays_lost", "Such readers that failed meanwhile", ()),
    "mooncake_ray_remote_sent_bytes": ("service:bytes_sent", "Bytes that this node's service sent to other nodes by its streams", ()),
    "mooncake_ray_peers_refused": ("service:refused", "Connections to this node's service that were refused", ()),
    "mooncake_ray_weights_syncs": ("weights_syncs:", "Versions of weights that engines were brought to, by mode", ("mode",)),
    "mooncake_ray_weights_failures": ("weights_failures:", "Versions that did not get to any engine, by error", ("error",)),
    "mooncake_ray_weights_fallbacks": ("weights_fallbacks", "Modes that failed before another one did it", ()),
    "mooncake_ray_weights_engines_lost": ("weights_lost", "Engines that died, or failed while they applied a version", ()),
    "mooncake_ray_weights_staged_bytes": ("weights_bytes", "Bytes that engines staged, or of the patches where those were", ()),
    "mooncake_ray_reaped": ("reaped:", "Taken back from processes that died, by kind (sessions, leases, pins)", ("kind",)),
}
GAUGES = {  # name → (field or property of Snapshot, description)
    "mooncake_ray_pool_capacity_bytes": ("capacity_bytes", "Size of the node's pool"),
    "mooncake_ray_pool_used_bytes": ("used_bytes", "Bytes of the pool that objects take"),
    "mooncake_ray_pool_populated_bytes": ("populated_bytes", "Memory that the pool has taken from the machine"),
    "mooncake_ray_pool_pinned_bytes": ("pinned_bytes", "Bytes of objects that a process has mapped"),
    "mooncake_ray_pool_spilled_bytes": ("spilled_bytes", "Bytes of objects that are on disk only"),
    "mooncake_ray_pool_objects": ("objects", "Objects that can be read"),
    "mooncake_ray_pool_pins": ("pins", "Mapped objects, counted once for each view"),
    "mooncake_ray_pool_leases": ("leases", "Objects that are being written"),
    "mooncake_ray_pool_waiting": ("waiting", "Requests that wait: for room, or for an object"),
}
SERVICE_GAUGES = {  # name → (number of `transfer.engine.Engine.report`, description)
    "mooncake_ray_peer_sessions": ("sessions", "Other nodes that are connected to this node's service"),
    "mooncake_ray_peer_connections": ("connections", "Their connections"),
    "mooncake_ray_peer_pins": ("pins", "Objects that they are reading"),
}


class Exporter:
    """Metrics of one process in one Ray session (`objects.session.Session`). Its thread ends with the session."""

    def __init__(self, session: Any, interval_s: float) -> None:
        self.session, self.interval_s = session, interval_s
        tags = ("NodeId",)
        node = {"NodeId": session.worker.current_node_id.hex()}
        self._counters = {name: Counter(name, text, (*tags, *own)).set_default_tags(node) for name, (_, text, own) in COUNTERS.items()}
        self._histograms = {name: Histogram(name, text, BUCKETS_S, tags).set_default_tags(node) for name, (_, text) in HISTOGRAMS.items()}
        self._gauges = {name: Gauge(name, text, tags).set_default_tags(node) for name, (_, text) in (GAUGES | SERVICE_GAUGES).items()}
        self.service: Callable[[], Mapping[str, Any]] | None = None
        """In the process of a node service: its report."""
        self._exported: dict[str, float] = dict(counters.snapshot())  # what another session counted is not this one's
        self._totals: dict[str, float] = {}  # counted here: waits, and what the broker reaped
        self._rounds = self._next_question = 0
        counters.timing(True)
        self.thread = threading.Thread(target=self._run, name="mooncake_ray.metrics", daemon=True)

    def flush(self) -> None:
        """Exports what happened since the last call."""
        for name, (kind, _) in HISTOGRAMS.items():
            for seconds in counters.take(kind):
                self._histograms[name].observe(seconds)
        waits = [seconds for seconds in counters.take("room") if seconds > _A_WAIT_S]
        self._add("waits", len(waits))
        self._add("waited_s", sum(waits))
        if self._rounds >= self._next_question and (client := self.session.client).usable:
            self._export_node(client.session, Snapshot.parse(client.stats()))
        self._rounds += 1
        if self.service is not None:
            self._export_service(self.service())
        totals = {**counters.snapshot(), **self._totals}
        for name, (counted, _, tags) in COUNTERS.items():
            for key in [k for k in totals if k == counted or (tags and k.startswith(counted))]:
                if (more := totals[key] - self._exported.get(key, 0)) > 0:
                    self._exported[key] = totals[key]
                    self._counters[name].inc(more, dict.fromkeys(tags, key.removeprefix(counted)))

    def _export_node(self, me: int, snapshot: Snapshot) -> None:
        self._next_question = self._rounds + (1 if snapshot.first_listener in (0, me) else _ASK_EVERY)
        if snapshot.first_listener == me:
            for name, (field, _) in GAUGES.items():
                self._gauges[name].set(getattr(snapshot, field))
            for kind in ("sessions", "leases", "pins"):
                self._total(f"reaped:{kind}", getattr(snapshot, f"reaped_{kind}"))

    def _export_service(self, report: Mapping[str, Any]) -> None:
        for name, (number, _) in SERVICE_GAUGES.items():
            self._gauges[name].set(report[number])
        for number in ("bytes_sent", "refused"):
            self._total(f"service:{number}", report[number])

    def _total(self, name: str, total: float) -> None:
        self._totals[name] = total
        if total < self._exported.get(name, 0):  # of another broker, or engine, which begins anew
            self._exported[name] = 0

    def _add(self, name: str, n: float) -> None:
        self._totals[name] = self._totals.get(name, 0) + n

    def _run(self) -> None:
        due = time.monotonic()  # at once: a session shorter than the interval is seen too
        while not self.session.over:
            if time.monotonic() >= due:
                try:
                    self.flush()
                except (StoreError, RuntimeError, ValueError, OSError):  # such as a broker that died: there will be another
                    logger.debug("mooncake_ray: metrics were not exported; trying again", exc_info=True)
                due = time.monotonic() + self.interval_s
            time.sleep(min(_LOOK_EVERY_S, self.interval_s))


def start(session: Any, interval_s: float) -> Exporter | None:
    """Exports this process's metrics every `interval_s` seconds until the session is over. 0: not at all."""
    if not interval_s:
        return None
    exporter = Exporter(session, interval_s)
    exporter.thread.start()
    return exporter
