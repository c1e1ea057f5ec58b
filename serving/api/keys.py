"""API keys: the same rule at every door."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence


class ApiKeys:
    """Keys of which a call must bring one; without any, every call may pass."""

    def __init__(self, keys: Sequence[str]):
        self._digests = [_digest(key.encode()) for key in keys]

    def accept(self, authorizations: Sequence[bytes]) -> bool:
        """Whether the values of a call's `authorization` headers are one, `Bearer KEY`, with a known key."""
        if not self._digests:
            return True
        if len(authorizations) != 1:
            return False
        scheme, _, key = authorizations[0].partition(b" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them, whichever fits
        return scheme.lower() == b"bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
