"""Who may share cached prefixes with whom."""

from __future__ import annotations

import hashlib
import secrets
from typing import Literal

from serving.request import Request

PrefixCacheScope = Literal["shared", "tenant"]


class PrefixSalts:
    """The salt that a request's chain of hashes starts from. Requests of different salts share nothing.

    scope: "shared": all requests of one `cache_salt` trust each other. "tenant": only those of one tenant do; its name
    enters keyed by a secret of this process, so that whoever knows the names of others, and may choose a salt of his
    own, still cannot make their hashes. The tenant's part has a fixed size, so no `cache_salt` reaches into it.
    """

    def __init__(self, scope: PrefixCacheScope):
        self._secret = secrets.token_bytes(32) if scope == "tenant" else None

    def salt(self, request: Request, regime: bytes) -> bytes:
        """regime: what K/V depend on beside tokens, without '/'."""
        tenant = b""
        if self._secret is not None:
            tenant = hashlib.blake2b(request.context.tenant.encode(), key=self._secret, digest_size=16).digest()
        return regime + b"/" + tenant + request.cache_salt
