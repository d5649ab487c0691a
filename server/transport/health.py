"""gRPC's own health service on the devices' port: SERVING while rounds may run.

``grpc.health.v1.Health/Check`` for the services "" and "headwater.Stream", as load balancers and
``grpc_health_probe`` ask. NOT_SERVING once the server drains or closes; a pause does not change it,
as the devices stay. With TLS the asker needs a certificate as any device does. ``Watch`` is not
served: it would hold a stream open for each asker.
"""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from headwater.common.transport.limits import METHOD

SERVICE = "grpc.health.v1.Health"
KNOWN = ("", METHOD.split("/")[1])


class HealthService:
    """Says whether the server takes part in rounds."""

    def __init__(self) -> None:
        self.is_serving = True

    def rpc_handler(self) -> Any:
        """Return the handler to add to a grpc.aio server."""
        check = grpc.unary_unary_rpc_method_handler(
            self._check,
            request_deserializer=HealthCheckRequest.FromString,
            response_serializer=HealthCheckResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Check": check})

    async def _check(self, request: HealthCheckRequest, context: Any) -> HealthCheckResponse:
        if request.service not in KNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service here")
        status = HealthCheckResponse.SERVING if self.is_serving else HealthCheckResponse.NOT_SERVING
        return HealthCheckResponse(status=status)
