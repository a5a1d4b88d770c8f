"""What a broker might say of a pool, for tests of those who read it."""

from __future__ import annotations

import json

MIB = 1 << 20

STATS = {
    "capacity_bytes": 1024 * MIB,
    "populated_bytes": 512 * MIB,
    "used_bytes": 256 * MIB,
    "inline_bytes": 0,
    "free_pages": 65536,
    "objects": 4,
    "removed_but_pinned": 0,
    "pinned_bytes": 160 * MIB,
    "leases": 1,
    "pins": 4,
    "claims": 3,
    "claims_unanswered": 0,
    "orphans": 0,
    "puts": 10,
    "gets": 20,
    "bytes_put": 1 << 30,
    "reaped_sessions": 1,
    "reaped_leases": 2,
    "reaped_pins": 3,
    "orphans_dropped": 0,
    "spilled_bytes": 64 * MIB,
    "spilled_objects": 1,
    "disk_bytes": 96 * MIB,
    "clean_bytes": 32 * MIB,
    "spill_written_bytes": 96 * MIB,
    "spill_read_bytes": 0,
    "served_from_disk": 2,
    "spill_error": "",
    "spill_dir": "/tmp/mooncake_ray-0/session_1",
    "arenas": [
        {
            "index": 0,
            "size_bytes": 1024 * MIB,
            "populated_bytes": 512 * MIB,
            "used_bytes": 256 * MIB,
            "largest_free_bytes": 200 * MIB,
            "huge_pages": "4k",
            "numa_node": -1,
        }
    ],
    "waiting_creates": 1,
    "waiting_gets": 0,
    "waiting_waits": 2,
    "oldest_wait_s": 3.5,
    "groups": [{"name": "01000000", "resident_bytes": 256 * MIB, "quota_bytes": 512 * MIB}],
    "uptime_s": 3700.0,
    "generation": 1,
    "protocol": 3,
    "pid": 4000,
    "first_listener": 11,
    "sessions": [
        {
            "session": 11,
            "pid": 4001,
            "label": "train.py",
            "listens": True,
            "leases": 0,
            "pins": 2,
            "claims": 2,
            "group": "01000000",
            "age_s": 3600.0,
            "leased_bytes": 0,
            "pinned_bytes": 128 * MIB,
            "owned_bytes": 192 * MIB,
        },
        {
            "session": 12,
            "pid": 4002,
            "label": "rollout",
            "listens": True,
            "leases": 1,
            "pins": 2,
            "claims": 1,
            "group": "01000000",
            "age_s": 120.0,
            "leased_bytes": 8 * MIB,
            "pinned_bytes": 160 * MIB,
            "owned_bytes": 32 * MIB,
        },
    ],
}


def row(id: int, mib: int, state: str, age_s: float, **fields) -> dict:
    plain = {
        "id": f"{id:032x}",
        "size": mib * MIB,
        "state": state,
        "clean": False,
        "age_s": age_s,
        "creator": 12,
        "creator_pid": 4002,
        "creator_label": "rollout",
        "group": "01000000",
        "note": "",
        "pins": [],
        "claims": [],
    }
    return {**plain, **fields}


def claim(kind: str, owner: int) -> dict:
    return {"kind": kind, "key": "ab" * 28, "owner": owner}


ROWS = [
    row(
        1,
        128,
        "resident",
        700.0,
        note="put at train.py:31 in main",
        pins=[{"session": 11, "count": 2}, {"session": 12, "count": 1}],
        claims=[claim("token", 11)],
    ),
    row(2, 64, "spilled", 5000.0, note="put at train.py:31 in main", claims=[claim("token", 11)]),
    row(3, 32, "resident", 30.0, pins=[{"session": 12, "count": 1}], claims=[claim("self", 12), claim("token", 11)]),
    row(4, 8, "leased", 0.5),
    row(5, 1, "resident", 2.0, claims=[claim("return", 0)]),
]

STATS_TEXT = json.dumps(STATS)
INSPECT_TEXT = json.dumps({**STATS, "object_rows": ROWS})


def with_changes(**changes) -> str:
    """What `stats` might say of a pool that differs in some fields."""
    return json.dumps({**STATS, **changes})
