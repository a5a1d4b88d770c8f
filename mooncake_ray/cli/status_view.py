"""A pool's state as lines of text, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from mooncake_ray.cli import model
from mooncake_ray.cli.pools import Reading
from mooncake_ray.cli.text import age, bar, count, size, table
from mooncake_ray.snapshot import Snapshot

__all__ = ["as_json", "fill_line", "lines", "service_lines"]


def lines(reading: Reading, most_objects: int) -> list[str]:
    """Everything about one pool. At most `most_objects` objects are named."""
    pool, s = reading.pool, reading.snapshot
    if reading.error:
        return [f"pool {pool.scope}", f"  does not answer: {reading.error}"]
    if s is None:
        return [f"pool {pool.scope}", "  idle: nobody is connected, so it will end"]
    about = [f"pid {s.pid}", f"up {age(s.uptime_s)}"]
    about += [f"restarted {count(s.generation, 'time')}"] if s.generation else []
    out = [f"pool {pool.scope}  ({', '.join(about)})"]
    out += _fill(s)
    out += _waiting(s)
    out += _section("node service", _service(reading))
    out += _section("arenas", _arenas(s))
    out += _section("groups", _groups(s))
    out += _section("sessions", _sessions(s, reading.observer))
    out += _section("objects by owner", _totals("OWNER", model.by_owner(s)))
    out += _section("objects by age", _ages(s))
    out += _section("pinned objects", _pinned(s, most_objects))
    return out


def as_json(reading: Reading) -> dict[str, Any]:
    """What the broker said, with what is concluded from it."""
    pool, s = reading.pool, reading.snapshot
    head: dict[str, Any] = {"scope": pool.scope, "name": pool.name, "connections": pool.connections, "error": reading.error or None}
    if s is None:
        return {**head, "stats": None}
    return {
        **head,
        "service": reading.service,
        "service_error": reading.service_error or None,
        "stats": json.loads(reading.text),
        "by_owner": [asdict(t) for t in model.by_owner(s)],
        "by_age": [asdict(t) for t in model.by_age(s)],
    }


def _fill(s: Snapshot) -> list[str]:
    out = [
        f"  {fill_line(s)}",
        f"  {count(s.objects, 'object')}, {count(s.leases, 'lease')}, {count(s.pins, 'pin')} ({size(s.pinned_bytes)}), "
        f"{count(s.claims, 'claim')}" + (f" ({s.claims_unanswered} unanswered)" if s.claims_unanswered else ""),
    ]
    if s.removed_but_pinned or s.orphans:
        out.append(f"  {s.removed_but_pinned} removed but pinned, {s.orphans} kept although nobody answers for them")
    if s.spill_dir or s.spilled_objects:
        out.append(
            f"  spill: {size(s.spilled_bytes)} in {count(s.spilled_objects, 'object')} on disk only, "
            f"{size(s.disk_bytes)} of disk in {s.spill_dir}; {size(s.clean_bytes)} in memory can be dropped at once"
        )
    if s.spill_error:
        out.append(f"  spill error: {s.spill_error}")
    if s.reaped_sessions:
        out.append(
            f"  taken back from {count(s.reaped_sessions, 'process', 'processes')} that died: "
            f"{count(s.reaped_leases, 'lease')}, {count(s.reaped_pins, 'pin')}"
        )
    return out


def fill_line(s: Snapshot) -> str:
    """How full a pool is."""
    share = 100 * s.used_bytes / s.capacity_bytes if s.capacity_bytes else 0
    return (
        f"{bar(s.used_bytes, s.capacity_bytes)} {share:.0f} %: {size(s.used_bytes)} of {size(s.capacity_bytes)} used, "
        f"{size(s.populated_bytes)} populated"
    )


def _waiting(s: Snapshot) -> list[str]:
    who = [
        f"{n} for {what}"
        for n, what in ((s.waiting_creates, "room"), (s.waiting_gets, "an object"), (s.waiting_waits, "one of several objects"))
        if n
    ]
    return [f"  waiting: {', '.join(who)}; the oldest for {age(s.oldest_wait_s)}"] if who else []


def _section(title: str, body: list[str]) -> list[str]:
    return ["", f"  {title}", *(f"    {line}" for line in body)] if body else []


def _service(reading: Reading) -> list[str]:
    if reading.service is None:
        return [f"does not answer: {reading.service_error}"] if reading.service_error else ["none: other nodes cannot read this pool"]
    return service_lines(reading.service)


def service_lines(r: Mapping[str, Any]) -> list[str]:
    """A node service's report."""
    out = [
        f"serves at {r['endpoint']}: {count(r['sessions'], 'peer session')} by {count(r['connections'], 'connection')}, "
        f"{count(r['pins'], 'pin')}, {count(r['requests'], 'request')}, {size(r['bytes_sent'])} sent by its streams"
        + (f", {count(r['refused'], 'connection')} refused" if r["refused"] else ""),
        f"brought here: {count(r['replicas'], 'object')}, {size(r['remote_bytes_read'])} read by its transports, "
        f"{count(r['relayed'], 'object')} from other readers, {count(r['remote_retries'] + r['relays_lost'], 'retry', 'retries')}",
        f"offers {', '.join(r['transports'])}",
        *(f"does without {name}: {why}" for name, why in sorted(r["without"].items())),
    ]
    rows = [(endpoint, transport or "-") for endpoint, transport in sorted(r["peers"].items())]
    return out + (table(("PEER", "READ BY"), rows) if rows else [])


def _arenas(s: Snapshot) -> list[str]:
    rows = [
        (
            str(a.index),
            size(a.used_bytes),
            size(a.populated_bytes),
            size(a.size_bytes),
            size(a.largest_free_bytes),
            a.huge_pages,
            "-" if a.numa_node < 0 else str(a.numa_node),
        )
        for a in s.arenas
    ]
    return table(("ARENA", "USED", "POPULATED", "SIZE", "LARGEST FREE", "PAGES", "NUMA"), rows, right=(1, 2, 3, 4)) if rows else []


def _groups(s: Snapshot) -> list[str]:
    rows = [
        (g.name or "-", size(g.resident_bytes), size(g.quota_bytes) if g.quota_bytes else "none")
        for g in s.groups
        if g.name or g.resident_bytes
    ]
    return table(("GROUP", "RESIDENT", "QUOTA"), rows, right=(1, 2)) if rows else []


def _sessions(s: Snapshot, observer: int) -> list[str]:
    def amount(n: int, nbytes: int) -> str:
        return f"{n} ({size(nbytes)})" if nbytes else str(n)

    rows = [
        (
            str(x.pid),
            x.label,
            x.group or "-",
            age(x.age_s),
            amount(x.leases, x.leased_bytes),
            amount(x.pins, x.pinned_bytes),
            amount(x.claims, x.owned_bytes),
        )
        for x in s.sessions
        if x.session != observer
    ]
    return table(("PID", "LABEL", "GROUP", "AGE", "LEASES", "PINS", "OWNS"), rows, right=(0, 3)) if rows else []


def _totals(head: str, found: list[model.Total]) -> list[str]:
    return table((head, "OBJECTS", "BYTES"), [(t.name, str(t.objects), size(t.bytes)) for t in found], right=(1, 2)) if found else []


def _ages(s: Snapshot) -> list[str]:
    found = model.by_age(s)
    most = max(t.bytes for t in found)
    rows = [(t.name, str(t.objects), size(t.bytes), bar(t.bytes, most, 20)) for t in found]
    return table(("AGE", "OBJECTS", "BYTES", ""), rows, right=(1, 2)) if s.object_rows else []


def _pinned(s: Snapshot, most: int) -> list[str]:
    found = model.pinned(s)
    rows = [(row.id, size(row.size), row.state, age(row.age_s), model.pinners(s, row)) for row in found[:most]]
    out = table(("OBJECT", "SIZE", "STATE", "AGE", "PINNED BY"), rows, right=(1, 3)) if rows else []
    return out + ([f"and {len(found) - most} more (--objects)"] if rows and len(found) > most else [])
