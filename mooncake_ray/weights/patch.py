"""Patches: what changed in one published object between two versions, in about a byte for each changed element of trained weights.

A patch is a head (versions, the object's layout by its digest, which regions changed at all), an index of segments, and the coded segments. A
segment is at most 2^21 adjacent elements of a region, of whole rows where these are not longer; it can be fetched and applied by itself. What is
coded is a step for each changed element: new - old of its bits as an unsigned integer, modulo its size. So every bit pattern of every dtype
comes back as it was, the steps of successive patches add up, and a patch can be taken back. Steps and the distances between them are entropy
coded; a segment of which most changed is coded densely. Bytes are the same in the pool, on disk and over HTTP.
"""

from __future__ import annotations

from mooncake_ray.weights.encoding import Classing, encode, merge
from mooncake_ray.weights.patch_data import Patch
from mooncake_ray.weights.patch_index import HEAD_BYTES
from mooncake_ray.weights.patching import Change, Part, apply, check, revert
from mooncake_ray.weights.regions import Regions

__all__ = ["HEAD_BYTES", "Change", "Classing", "Part", "Patch", "Regions", "apply", "check", "encode", "merge", "revert"]
