"""The admin routes that pin prefixes and take pins back: their request and their answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from configs.server import ServerConfig
from serving.api.fields import Text, TokenIds, short
from serving.api.schema import salt_digest
from serving.api.service import Service
from serving.request import DEFAULT_TENANT, RequestContext, RequestError, shown

FIELDS = ("prompt", "tenant", "cache_salt")


@dataclass(frozen=True, kw_only=True)
class PinCall:
    prompt: str | tuple[int, ...]  # text, or token ids such as /tokenize gives for messages
    tenant: str = DEFAULT_TENANT  # whose requests find the prefix, where the cache is each tenant's own
    cache_salt: bytes = b""


def parse_pin(body: object, config: ServerConfig) -> PinCall:
    """The call that a body of /pin_prefix or /unpin_prefix asks for. Raises RequestError."""
    if not isinstance(body, Mapping):
        raise RequestError("body", f"must be a JSON object, got {shown(body)}")
    for name in body:
        if name not in FIELDS:
            raise RequestError(short(name), f"is not a field here; known are {', '.join(FIELDS)}")
    prompt, tenant, salt = (body.get(name) for name in FIELDS)
    if prompt is None:
        raise RequestError("prompt", "is missing")
    kind = Text(config.max_body_bytes) if isinstance(prompt, str) else TokenIds(config.max_body_bytes, 1)
    if tenant is not None:
        tenant = RequestContext(tenant=tenant).tenant
    if salt is not None:
        salt = Text(config.max_id_chars).read("cache_salt", salt)
    return PinCall(prompt=kind.read("prompt", prompt), tenant=tenant or DEFAULT_TENANT, cache_salt=salt_digest(salt))


async def pin(service: Service, call: PinCall) -> dict[str, Any]:
    engine = service.engine
    return {"num_pages": await engine.pin_prefix(call.prompt, tenant=call.tenant, cache_salt=call.cache_salt)}


async def unpin(service: Service, call: PinCall) -> dict[str, Any]:
    engine = service.engine
    return {"num_pages": await engine.unpin_prefix(call.prompt, tenant=call.tenant, cache_salt=call.cache_salt)}
