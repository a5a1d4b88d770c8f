"""Ray's decorator; ours in its place where the run is about decorated code."""

from __future__ import annotations

import os

import ray

import mooncake_ray

DECORATED = os.environ.get("ORACLE_MODE") == "decorated"

remote = mooncake_ray.remote if DECORATED else ray.remote


def above(made):
    """Our decorator on what `@ray.remote` made."""
    return mooncake_ray.remote(made) if DECORATED else made


def below(target):
    """Our decorator on a function, a class or a single method, which then meets `@ray.remote` or `@ray.method`."""
    return mooncake_ray.remote(target) if DECORATED else target
