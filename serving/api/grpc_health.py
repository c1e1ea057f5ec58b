"""grpc.health.v1: "" is alive, and each service is ready or not, as the Service says at that moment."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from google.rpc import code_pb2
from grpc_health.v1 import health_pb2

from serving.api.errors import UnavailableError
from serving.api.grpc_calls import Call, Method
from serving.api.grpc_errors import GrpcError
from serving.api.service import Service

DESCRIPTOR = health_pb2.DESCRIPTOR.services_by_name["Health"]
WATCH_S = 0.2  # between two looks for those who watch
MAX_WATCHING = 256  # they need no key


class Health:
    """Methods of the health service about `names` (of services that need the engine)."""

    def __init__(self, service: Service, names: Sequence[str]):
        self._service, self._names = service, frozenset(names)
        self._num_watching = 0

    def methods(self) -> dict[str, Method]:
        return {"Check": self._check, "Watch": self._watch}

    def _status(self, name: str) -> Any:
        if name == "":
            is_well = not self._service.is_dead
        elif name in self._names:
            try:
                self._service.check_ready()
                is_well = True
            except UnavailableError:
                is_well = False
        else:
            return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        return health_pb2.HealthCheckResponse.SERVING if is_well else health_pb2.HealthCheckResponse.NOT_SERVING

    async def _check(self, data: bytes, call: Call) -> health_pb2.HealthCheckResponse:
        status = self._status(await call.read(data, lambda request: request.service))
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            raise GrpcError(code_pb2.NOT_FOUND, "there is no service of this name here")
        return health_pb2.HealthCheckResponse(status=status)

    async def _watch(self, data: bytes, call: Call) -> None:
        name = await call.read(data, lambda request: request.service)
        if self._num_watching >= MAX_WATCHING:
            raise GrpcError(code_pb2.RESOURCE_EXHAUSTED, f"{MAX_WATCHING} watch already: use Check")
        self._num_watching += 1
        try:
            last = None
            while True:
                status = self._status(name)
                if status != last:
                    await call.send(health_pb2.HealthCheckResponse(status=status))
                    last = status
                await asyncio.sleep(WATCH_S)
        finally:
            self._num_watching -= 1
