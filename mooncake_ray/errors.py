"""Every error this package raises.

    MooncakeRayError
    ├─ StoreError
    │  ├─ ObjectNotFoundError (KeyError)      no object of that id was ever seen, or it was freed
    │  ├─ ObjectLostError                     the bytes are gone although a ref to them exists
    │  ├─ StoreFullError (MemoryError)        no room before the deadline; says who holds what
    │  ├─ GetTimeoutError (TimeoutError)      not there before the deadline
    │  ├─ LeaseLostError                      rows of a catalog that were taken are not this consumer's any more
    │  ├─ BrokerDiedError (ConnectionError)   this node's broker is gone or cannot be started
    │  ├─ BrokerMismatchError (ConnectionError)  what serves the pool is of another version, or another user's
    │  └─ CorruptBlockError (ValueError)      the bytes of a stored batch are not what was written
    ├─ SchemaError (TypeError)                fields of a batch disagree
    └─ ConfigError (ValueError)               a setting is out of range, or two settings exclude each other

Each also inherits the builtin a caller would expect. Messages carry the number and the limit.
"""

from __future__ import annotations

__all__ = [
    "BrokerDiedError",
    "BrokerMismatchError",
    "ConfigError",
    "CorruptBlockError",
    "GetTimeoutError",
    "LeaseLostError",
    "MooncakeRayError",
    "ObjectLostError",
    "ObjectNotFoundError",
    "SchemaError",
    "StoreError",
    "StoreFullError",
]


class MooncakeRayError(Exception):
    """Base of all errors of this package."""


class StoreError(MooncakeRayError):
    """Base of the errors of the object store."""


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


class SchemaError(MooncakeRayError, TypeError):
    """Fields of a batch disagree with each other or with their schema."""


class ConfigError(MooncakeRayError, ValueError):
    """A setting is out of range, or settings exclude each other."""
