"""Addresses that are good for one thing, for a while: what the control plane sends clients to the data port with. Pure."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from urllib.parse import parse_qs, quote, unquote, urlsplit

from mooncake_ray.errors import ConfigError
from mooncake_ray.serve.problems import Problem

__all__ = ["Signer"]

_SECRET_BYTES = 32
_METHODS = {"HEAD": "GET"}  # who may get may look


class Signer:
    """Makes and checks them, with a secret that only it knows. Thread-safe."""

    def __init__(self, secret: bytes | None = None) -> None:
        """`secret`: at least 16 bytes; by default a new one."""
        if secret is not None and len(secret) < 16:
            raise ConfigError(f"a secret must have at least 16 bytes, got {len(secret)}")
        self._secret = secret or secrets.token_bytes(_SECRET_BYTES)

    def sign(self, method: str, path: str, expires: int) -> str:
        """The address, from its path on, by which a method may be used on a path (not quoted) until `expires` (seconds of Unix time)."""
        return f"{quote(path)}?expires={expires}&signature={self._signature(method, path, expires)}"

    def check(self, method: str, target: str, now: float) -> str:
        """The path, not quoted, of an address that was signed.

        Raises:
            Problem: 403: it was not signed here, or is over; 400: it is no address.
        """
        try:
            parts = urlsplit(target)
        except ValueError as e:
            raise Problem(400, "bad-request", f"the target is no address: {e}") from None
        query = parse_qs(parts.query)
        path = unquote(parts.path)
        expires, signature = query.get("expires", [""])[0], query.get("signature", [""])[0]
        if not (expires.isascii() and expires.isdigit() and len(expires) < 20):
            raise Problem(403, "not-signed", "the address has no signature: ask the endpoint for one")
        due = self._signature(_METHODS.get(method, method), path, int(expires))
        if not hmac.compare_digest(due.encode(), signature.encode()):
            raise Problem(403, "not-signed", "the address was not signed by this replica: ask the endpoint for another")
        if now > int(expires):
            raise Problem(403, "expired", f"the address was good until {expires}, and it is {now:.0f}: ask the endpoint for another")
        return path

    def _signature(self, method: str, path: str, expires: int) -> str:
        return hmac.new(self._secret, f"{method}\n{path}\n{expires}".encode(), hashlib.sha256).hexdigest()
