"""What `GET /v1/overview` answers. Times are in seconds; those named `..._s` count back from `time` unless they say otherwise."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from mooncake_ray.sync.report import Phase, What

__all__ = ["Group", "Node", "Outcome", "Overview", "Pin", "Receiver", "ReceiverState", "Shortfall", "Trainers", "Transfer", "Version"]

ReceiverState = Literal["serving", "paused", "joined", "poisoned", "incomplete", "gone", "left"]
"""As `sync.messages.State`; `incomplete`: some of its ranks are not there; `gone`: none is; `left`: none is, and by their own will."""


class Trainers(BaseModel):
    ranks: int = Field(description="That have joined.")
    world: int = Field(description="That there are when all have; 0: not known, as none has.")
    hosts: list[str]


class Receiver(BaseModel):
    """An engine of the group."""

    name: str
    state: ReceiverState
    why: str = Field(description="It is gone, if it is; else empty.")
    version: int | None = Field(description="That it serves; null: none. Of one that is not there: that it served.")
    behind: int | None = Field(description="Versions published after that one; null: it is not there.")
    stale_s: float | None = Field(description="The first of these was published; 0: it has the newest; null: not known.")
    since_s: float | None = Field(description="It has had its version, or is not there; null: not known.")
    silent_s: float = Field(description="Its rank that has been silent for the longest time was heard of.")
    ranks: int = Field(description="That have joined.")
    world: int
    hosts: list[str]


class Transfer(BaseModel):
    """An update that is under way."""

    what: What
    version: int
    mode: str = Field(description="That it goes by; empty: not chosen yet.")
    phase: Phase
    receivers: list[str]
    moved_bytes: int
    total_bytes: int = Field(description="0: not known yet.")
    bytes_per_s: float | None = Field(description="On average since staging began; null: it has not.")
    seconds: float = Field(description="That it has taken.")


class Outcome(BaseModel):
    """An update that is over."""

    what: What
    version: int
    mode: str
    error: str = Field(description="Why it failed; empty: it did not.")
    ago_s: float
    seconds: float = Field(description="That it took.")
    pause_s: float = Field(description="The longest that a rank of an engine was paused.")
    nbytes: int = Field(description="That were staged, each once.")
    receivers: list[str] = Field(description="That have it because of this.")
    lost: dict[str, str] = Field(description="Receivers that have not, and why.")
    fallbacks: list[str] = Field(description="Modes that were tried before, and why they failed.")


class Group(BaseModel):
    """A `WeightSyncGroup`."""

    name: str
    version: int | None = Field(description="The last one that engines were brought to.")
    published: int | None = Field(description="The last one that trainers have published.")
    behind: int = Field(description="That the receiver is which is furthest behind.")
    stale_s: float | None = Field(description="The greatest of the receivers'; 0: all have the newest; null: not known.")
    trainers: Trainers
    receivers: list[Receiver]
    transfers: list[Transfer]
    outcomes: list[Outcome] = Field(description="The last ones, newest first.")


class Pin(BaseModel):
    """What keeps a version in the store."""

    name: str = Field(description="Of the pin, or of who holds the lease.")
    left_s: float | None = Field(description="Until the lease is over; null: it is none.")


class Version(BaseModel):
    version: int
    nbytes: int | None = Field(description="Of one copy; of its files, where it is stored. null: not known.")
    age_s: float | None = Field(description="It was published, or stored; null: not known.")
    places: list[Literal["pool", "store", "deltas"]] = Field(
        description="Where it is: with the trainers, whole in the endpoint's store, by deltas there; or nowhere any more."
    )
    pins: list[Pin]
    readers: int = Field(description="That read it from the answering replica now.")
    receivers: list[str] = Field(description="That serve it.")


class Node(BaseModel):
    """A node of the Ray cluster, and its pool."""

    host: str
    node: str = Field(description="Ray's ID of it; of one, where several share a pool.")
    error: str = Field(description="Why nothing is known of its pool; else empty.")
    capacity_bytes: int = 0
    used_bytes: int = 0
    pinned_bytes: int = Field(0, description="Of those that are used: by processes, now.")
    clean_bytes: int = Field(0, description="Of those that are used: also on disk, so that they can be dropped at once.")
    spilled_bytes: int = Field(0, description="On disk only.")
    objects: int = 0
    processes: int = Field(0, description="That use it.")
    waiting: int = Field(0, description="Requests that wait for room or for an object.")
    spill_error: str = ""


class Shortfall(BaseModel):
    """What could not be looked at just now: what is shown of it is old, or missing."""

    what: Literal["group", "store", "nodes"]
    why: str
    age_s: float | None = Field(description="Of what is shown instead; null: nothing is.")


class Overview(BaseModel):
    """All of it at a glance."""

    time: float = Field(description="Of this answer, by the endpoint's clock: seconds since 1970.")
    replica: str = Field(description="That answers.")
    group: Group | None = Field(description="null: the endpoint has none, or it has never answered.")
    versions: list[Version] = Field(description="Newest first.")
    nodes: list[Node]
    shortfalls: list[Shortfall]
