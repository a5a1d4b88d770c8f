"""Every error this package raises.

    MooncakeRayError
    ├─ StoreError
    │  ├─ ObjectNotFoundError (KeyError)      no object of that id was ever seen, or it was freed
    │  ├─ ObjectExistsError (ValueError)      there is an object of that id, or it was freed and is still read
    │  ├─ ObjectLostError                     the bytes are gone although a ref to them exists
    │  ├─ StoreFullError (MemoryError)        no room before the deadline; says who holds what
    │  ├─ GetTimeoutError (TimeoutError)      not there before the deadline
    │  ├─ LeaseLostError                      rows of a catalog that were taken are not this consumer's any more
    │  ├─ BrokerDiedError (ConnectionError)   this node's broker is gone or cannot be started
    │  ├─ BrokerMismatchError (ConnectionError)  what serves the pool is of another version, or another user's
    │  └─ CorruptBlockError (ValueError)      the bytes of a stored batch are not what was written
    ├─ TransportError (OSError)               bytes could not be moved between nodes; `op`, `errno`, `peer` say which step, why, whose
    │  ├─ RegistrationError                   the device refuses to register memory
    │  ├─ PeerLostError (ConnectionError)     another node's engine is gone, unreachable, or talks nonsense
    │  ├─ PeerRefusedError (PermissionError)  one of the two ends does not know the other's secret
    │  └─ TransportUnavailableError           the transport that is asked for cannot be used between these nodes
    ├─ WeightSyncError                        a version of the weights did not get where it should
    │  ├─ PlanError (ValueError)              bytes no source has, that two write, or of names only one side knows; names the tensors
    │  ├─ StaleVersionError                   a version, or a message of an update, that something newer has replaced
    │  ├─ DeltaBaseError                      a delta is against a version that is not what the receiver has
    │  ├─ ChecksumError                       weights that arrived are not the ones that were sent
    │  ├─ EnginePausedError                   a request that came, or ran, while the engine was paused for new weights: send it again
    │  ├─ EnginePoisonedError                 the engine's weights are of no version, and it serves nothing until they are restored whole
    │  ├─ SyncTimeoutError (TimeoutError)     not done before the deadline; says who was waited for
    │  ├─ SyncAbortedError                    an update ended before it was whole; what was served before is served on
    │  └─ SnapshotError                       a snapshot is not whole, or not what is asked of it; what was there before is there still
    │     └─ SnapshotNotFoundError (FileNotFoundError)  there is no snapshot of that version, or none at all
    ├─ LearnerLostError                       a learner rank of a loop died, does not answer, or lost what it was to learn from
    ├─ SchemaError (TypeError)                fields of a batch disagree
    └─ ConfigError (ValueError)               a setting is out of range, or two settings exclude each other

Each also inherits the builtin a caller would expect. Messages carry the number and the limit.
"""

from __future__ import annotations

__all__ = [
    "BrokerDiedError",
    "BrokerMismatchError",
    "ChecksumError",
    "ConfigError",
    "CorruptBlockError",
    "DeltaBaseError",
    "EnginePausedError",
    "EnginePoisonedError",
    "GetTimeoutError",
    "LearnerLostError",
    "LeaseLostError",
    "MooncakeRayError",
    "ObjectExistsError",
    "ObjectLostError",
    "ObjectNotFoundError",
    "PeerLostError",
    "PeerRefusedError",
    "PlanError",
    "RegistrationError",
    "SchemaError",
    "SnapshotError",
    "SnapshotNotFoundError",
    "StaleVersionError",
    "StoreError",
    "StoreFullError",
    "SyncAbortedError",
    "SyncTimeoutError",
    "TransportError",
    "TransportUnavailableError",
    "WeightSyncError",
]


class MooncakeRayError(Exception):
    """Base of all errors of this package."""


class StoreError(MooncakeRayError):
    """Base of the errors of the object store."""


class ObjectExistsError(StoreError, ValueError):
    """An object of that id is in the pool already; one that was removed stays until its last reader lets go."""


class ObjectNotFoundError(StoreError, KeyError):
    """No object of that id is in the pool."""

    # KeyError shows its argument's repr; these messages are sentences.
    __str__ = Exception.__str__


class ObjectLostError(StoreError):
    """The object existed and its bytes are gone (its owner died, or it was freed explicitly)."""


class StoreFullError(StoreError, MemoryError):
    """No room for an allocation before its deadline."""


class GetTimeoutError(StoreError, TimeoutError):
    """An object was not available before the deadline."""


class LeaseLostError(StoreError):
    """Rows that were taken from a catalog are not this consumer's any more: it was too late, or thought dead. Others may have them."""


class BrokerDiedError(StoreError, ConnectionError):
    """The node's broker is gone, or could not be started or reached."""


class BrokerMismatchError(StoreError, ConnectionError):
    """What serves the pool's name must not be talked to: a broker of another version of this package, or another user's process."""


class CorruptBlockError(StoreError, ValueError):
    """The bytes of a stored batch are truncated, damaged, or of another version. Says which field where it can be told."""


class TransportError(MooncakeRayError, OSError):
    """Bytes could not be moved between nodes.

    Attributes:
        op: What failed, as the native call or the request names it ("connect", "pin", "ibv_reg_mr"); "" where it is not one step.
        errno: Why, if the kernel or the device said so (ETIMEDOUT: the deadline is over); else 0.
        peer: Whose engine it was, "host:port"; "" where it is this node's own doing.
    """

    def __init__(self, message: str = "", op: str = "", errno: int = 0, peer: str = "") -> None:
        super().__init__(message)
        self.op, self.errno, self.peer = op, errno, peer

    # OSError shows errno and strerror; these messages are sentences.
    __str__ = Exception.__str__

    def __reduce__(self):
        return type(self), (*self.args, self.op, self.errno, self.peer), self.__dict__


class RegistrationError(TransportError):
    """The device refuses to register memory."""


class PeerLostError(TransportError, ConnectionError):
    """Another node's engine is gone, cannot be reached, or answers what the protocol does not allow."""


class PeerRefusedError(TransportError, PermissionError):
    """Authentication failed: one of the two ends does not know the other's secret, or the versions differ."""


class TransportUnavailableError(TransportError):
    """The transport that is asked for cannot be used here, or not between these two nodes. Says why, for either end."""


class WeightSyncError(MooncakeRayError):
    """Base of the errors of the weight plane."""


class PlanError(WeightSyncError, ValueError):
    """Source and target do not fit: bytes that nobody has, or that would be written twice, names that only one side knows, layouts that
    disagree. Names the first few tensors, and says how many there are."""


class StaleVersionError(WeightSyncError):
    """A version that is not newer than the current one, or a message of an update that was superseded."""


class DeltaBaseError(WeightSyncError):
    """A delta starts from another version than the one the receiver holds, or that version's weights are not what they should be."""


class ChecksumError(WeightSyncError):
    """Weights arrived that are not the ones that were sent."""


class EnginePausedError(WeightSyncError):
    """A request that came while the engine was paused for new weights, or that the pause ended. It can be sent again."""


class EnginePoisonedError(WeightSyncError):
    """An update failed after it began to write: the engine's weights are a mixture. It serves nothing until all of them are written anew."""


class SyncTimeoutError(WeightSyncError, TimeoutError):
    """A step of an update was not done before its deadline. Says which, and by whom."""


class SyncAbortedError(WeightSyncError):
    """An update ended before every engine could have it. What they served before, they serve on."""


class SnapshotError(WeightSyncError):
    """A snapshot on a disk is not whole, or not what is asked of it. Snapshots that were there before are there still."""


class SnapshotNotFoundError(SnapshotError, FileNotFoundError):
    """There is no snapshot of that version, or none at all."""

    # OSError shows errno and strerror; these messages are sentences.
    __str__ = Exception.__str__


class LearnerLostError(MooncakeRayError):
    """A learner rank of a loop died, does not answer, or lost what it was to learn from: what the ranks have is of no step. The cause says
    which."""


class SchemaError(MooncakeRayError, TypeError):
    """Fields of a batch disagree with each other or with their schema."""


class ConfigError(MooncakeRayError, ValueError):
    """A setting is out of range, or settings exclude each other."""
