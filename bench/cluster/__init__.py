"""Several nodes on one machine, for tests and benches."""

from bench.cluster.netns import Host, Link, Network, NetworkError, unavailable
from bench.cluster.nodes import Cluster, ClusterError

__all__ = ["Cluster", "ClusterError", "Host", "Link", "Network", "NetworkError", "unavailable"]
