"""The plan of a version: what is published (of the source alone), what is delivered (of that and the target), and its reads."""

from __future__ import annotations

from mooncake_ray.weights.delivery import Delivery, deliver_plan
from mooncake_ray.weights.division import divide
from mooncake_ray.weights.lowering import Reads, lower
from mooncake_ray.weights.planner import Planner
from mooncake_ray.weights.publication import Publication, publish_plan
from mooncake_ray.weights.topology import Topology

__all__ = ["Delivery", "Planner", "Publication", "Reads", "Topology", "deliver_plan", "divide", "lower", "publish_plan"]
