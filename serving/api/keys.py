"""API keys: the same rule at every door."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from serving.request import DEFAULT_TENANT


class ApiKeys:
    """Keys of which a call must bring one, and whose each is (without `tenants`: everybody's); without any, every call
    may pass."""

    def __init__(self, keys: Sequence[str], tenants: Sequence[str] = ()):
        self._digests = [_digest(key.encode()) for key in keys]
        self._tenants = tenants or (DEFAULT_TENANT,) * len(keys)

    def tenant_of(self, authorizations: Sequence[bytes]) -> str | None:
        """The tenant of a call by the values of its `authorization` headers, which must be one, `Bearer KEY`, with a known
        key; else None."""
        if not self._digests:
            return DEFAULT_TENANT
        if len(authorizations) != 1:
            return None
        scheme, _, key = authorizations[0].partition(b" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them, whichever fits
        if scheme.lower() != b"bearer" or True not in matches:
            return None
        return self._tenants[matches.index(True)]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
