"""`Traffic`: what a plan moves over which link between hosts, and how long that takes at least."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mooncake_ray.weights.delivery import Delivery
from mooncake_ray.weights.publication import Publication
from mooncake_ray.weights.topology import Topology

__all__ = ["Prediction", "Speeds", "Traffic", "traffic_of"]


@dataclass(frozen=True)
class Speeds:
    """Bytes a second."""

    nic: float
    """Of a network device, in each direction."""
    host: float
    """That a host's ranks copy in memory, all together."""


@dataclass(frozen=True)
class Prediction:
    """Seconds, if nothing but the slowest link or host counts."""

    publish_s: float
    """Until every trainer's host has its copy in the pool. Training waits for this."""
    move_s: float
    """Until every engine's rank has all of it, as publication, reads and relays overlap."""
    bound_by: str
    """What takes that long: the host, and in which direction."""
    floor_s: float
    """What `move_s` would be if every engine host only received each byte that it wants once, and nothing else limited it."""
    apply_s: float
    """From the pool into the engines' own memory. Engines pause for this."""


@dataclass(frozen=True, eq=False)
class Traffic:
    """Bytes of one version, first of full size. Hosts in rows send, those in columns receive."""

    sources: tuple[str, ...]
    """Hosts of the source's ranks, sorted."""
    targets: tuple[str, ...]
    """Hosts of the target's ranks, sorted."""
    read: np.ndarray
    """int64 (sources, targets): read from the publication. Where both are one host, in its memory."""
    relay: np.ndarray
    """int64 (targets, targets): got from another engine's host that has read it; nothing on the diagonal."""
    published: np.ndarray
    """int64 (sources): copied into the pool of each."""
    applied: np.ndarray
    """int64 (targets): copied out of the pool of each, by all its ranks."""
    wanted: np.ndarray
    """int64 (targets): bytes that each has to have, each once."""
    sent: np.ndarray
    """float64 (network devices): what each sends to other hosts."""
    received: np.ndarray
    """float64 (network devices)."""
    device_host: tuple[str, ...]
    """The host of each network device."""

    @property
    def leaving(self) -> int:
        """Bytes that are read from the publication."""
        return int(self.read.sum())

    def matrix(self) -> tuple[tuple[str, ...], np.ndarray]:
        """(all hosts that send, int64 (those, targets)): reads and relays together."""
        hosts = tuple(sorted({*self.sources, *self.targets}))
        out = np.zeros((len(hosts), len(self.targets)), np.int64)
        out[[hosts.index(h) for h in self.sources]] += self.read
        out[[hosts.index(h) for h in self.targets]] += self.relay
        return hosts, out

    def predict(self, speeds: Speeds) -> Prediction:
        """How long it takes with links and memory of these speeds."""
        bounds = [(float(self.sent[i]) / speeds.nic, f"what {h} sends") for i, h in enumerate(self.device_host)]
        bounds += [(float(self.received[i]) / speeds.nic, f"what {h} receives") for i, h in enumerate(self.device_host)]
        local = {h: 0.0 for h in (*self.sources, *self.targets)}
        for i, host in enumerate(self.sources):
            local[host] += float(self.published[i])
        for i, host in enumerate(self.targets):
            local[host] += float(self.wanted[i])
        bounds += [(nbytes / speeds.host, f"memory of {h}") for h, nbytes in local.items()]
        move_s, bound_by = max(bounds, default=(0.0, "nothing"))
        devices = {h: self.device_host.count(h) for h in self.targets}
        floor = max((float(w) / (speeds.nic * devices[h]) for w, h in zip(self.wanted, self.targets, strict=True)), default=0.0)
        published, applied = (float(a.max(initial=0)) / speeds.host for a in (self.published, self.applied))
        return Prediction(published, move_s, bound_by, floor, applied)


def traffic_of(publication: Publication, delivery: Delivery, topology: Topology) -> Traffic:
    """What a plan moves. A unit that leaves its leader's host goes to each other host once, and to its ranks in that host's memory."""
    from_host, sources = topology.hosts_of(publication.ranks)
    to_host, targets = topology.hosts_of(delivery.ranks)
    device, devices = topology.nics_of((*publication.ranks, *delivery.ranks))
    device_host = [""] * devices
    for rank, at in zip((*publication.ranks, *delivery.ranks), device.tolist(), strict=True):
        device_host[at] = topology.host(rank)
    from_device, to_device = device[: len(publication.ranks)], device[len(publication.ranks) :]
    sent, received = np.zeros(devices), np.zeros(devices)

    unit = delivery.unit[delivery.op_box]
    owner, leader = publication.owner[delivery.op_region], delivery.leader[unit]
    read = np.zeros((len(sources), len(targets)), np.int64)
    np.add.at(read, (from_host[owner], to_host[leader]), delivery.op_nbytes)
    apart = np.array(sources, object)[from_host[owner]] != np.array(targets, object)[to_host[leader]]
    np.add.at(sent, from_device[owner[apart]], delivery.op_nbytes[apart])
    np.add.at(received, to_device[leader[apart]], delivery.op_nbytes[apart])

    nbytes = np.bincount(delivery.unit, delivery.nbytes, minlength=delivery.units)
    relay = np.zeros((len(targets), len(targets)), np.int64)
    applied, wanted = np.zeros(len(targets), np.int64), np.zeros(len(targets), np.int64)
    for number in range(len(delivery.sets)):
        members = delivery.sets[number]
        mine = delivery.unit_set == number
        led = np.bincount(delivery.leader[mine], nbytes[mine], minlength=len(delivery.ranks))[members]
        hosts, first = np.unique(to_host[members], return_inverse=True)
        each = np.bincount(first)
        np.add.at(applied, to_host[members], int(led.sum()))
        wanted[hosts] += int(led.sum())
        by_host = np.bincount(first, led)
        others = by_host[:, None] * (1 - np.eye(len(hosts)))
        relay[np.ix_(hosts, hosts)] += others.astype(np.int64)
        np.add.at(sent, to_device[members], led * (len(hosts) - 1))
        np.add.at(received, to_device[members], ((by_host.sum() - by_host) / each)[first])
    return Traffic(
        sources,
        targets,
        read,
        relay,
        np.bincount(from_host[publication.owner], publication.nbytes, minlength=len(sources)).astype(np.int64),
        applied,
        wanted,
        sent,
        received,
        tuple(device_host),
    )
