"""`mooncake-ray memory`: one row an object, as `ray memory` has it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict

from mooncake_ray.cli import model, pools
from mooncake_ray.cli.status import no_such_pool
from mooncake_ray.cli.text import UNITS, age, count, size, table
from mooncake_ray.snapshot import ObjectRow, Snapshot

__all__ = ["add", "lines"]

_COMMAND = "mooncake-ray memory"
_NO_NOTE = "-"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = commands.add_parser("memory", help="one row an object", description="Lists the objects in the pools of this user on this node.")
    p.add_argument("--scope", metavar="NAME", help="only this pool")
    p.add_argument("--sort", choices=("size", "age"), default="size", help="largest or oldest first (default: size)")
    p.add_argument("--group-by", choices=("owner", "note", "state"), help="in groups, each with its total")
    p.add_argument("--limit", type=int, metavar="N", help="at most so many rows a pool, or a group (totals count all)")
    p.add_argument("--units", choices=("auto", *UNITS), default="auto", help="for sizes (default: auto)")
    p.add_argument("--json", action="store_true", help="one JSON document, sizes in bytes")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    readings = [r for r in (pools.read(pool, _COMMAND) for pool in pools.listed(args.scope)) if r is not None]
    code = 0
    shown, documents = [], []
    for r in readings:
        if r.error:
            print(f"mooncake-ray: pool {r.pool.scope}: {r.error}", file=sys.stderr)
            code = 1
        s = r.snapshot
        if s is None:  # or nobody is connected
            continue
        shown.append(
            "\n".join(
                [f"pool {r.pool.scope}", *(f"  {line}".rstrip() for line in lines(s, args.sort, args.group_by, args.limit, args.units))]
            )
        )
        rows = _sorted(s, args.sort)[: args.limit]
        documents.append(
            {
                "scope": r.pool.scope,
                "objects": len(s.object_rows),
                "bytes": sum(row.size for row in s.object_rows),
                "rows": [{**asdict(row), "owner": model.owner(s, row)} for row in rows],
            }
        )
    if args.json:
        print(json.dumps({"pools": documents}, indent=2))
    elif shown or not code:
        print("\n\n".join(shown) or no_such_pool(args.scope))
    return code


def lines(s: Snapshot, sort: str, group_by: str | None, limit: int | None, units: str) -> list[str]:
    """The table of a pool's objects, whole or in groups."""
    rows = _sorted(s, sort)
    out = []
    if group_by is None:
        out += _rows(s, rows, limit, units)
    else:
        key = _keys(s)[group_by]
        for total in model.totals(rows, key):
            of_it = [row for row in rows if key(row) == total.name]
            out += [f"{total.name}: {count(total.objects, 'object')}, {size(total.bytes, units)}"]
            out += [f"  {line}" for line in _rows(s, of_it, limit, units)] + [""]
    pinned = sum(row.size for row in rows if row.pins)
    return [
        *out,
        f"total: {count(len(rows), 'object')}, {size(sum(row.size for row in rows), units)}, of which {size(pinned, units)} pinned",
    ]


def _keys(s: Snapshot) -> dict[str, Callable[[ObjectRow], str]]:
    return {"owner": lambda row: model.owner(s, row), "note": lambda row: row.note or _NO_NOTE, "state": lambda row: row.state}


def _sorted(s: Snapshot, sort: str) -> list[ObjectRow]:
    return sorted(s.object_rows, key=lambda row: (-(row.size if sort == "size" else row.age_s), row.id))


def _rows(s: Snapshot, rows: list[ObjectRow], limit: int | None, units: str) -> list[str]:
    shown = rows if limit is None else rows[:limit]
    cells = [
        (
            row.id,
            size(row.size, units),
            row.state,
            age(row.age_s),
            model.owner(s, row),
            ",".join(sorted({c.kind for c in row.claims})) or "-",
            str(sum(p.count for p in row.pins)),
            row.note or _NO_NOTE,
        )
        for row in shown
    ]
    out = table(("OBJECT", "SIZE", "STATE", "AGE", "OWNER", "CLAIMS", "PINS", "WHERE"), cells, right=(1, 3, 6)) if cells else []
    return out + ([f"and {count(len(rows) - len(shown), 'object')} more (--limit)"] if len(shown) < len(rows) else [])
