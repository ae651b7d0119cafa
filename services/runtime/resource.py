"""Who a span or a metric comes from."""

from __future__ import annotations

import os
import socket

from opentelemetry.sdk.resources import OTELResourceDetector, Resource


def resource(service: str) -> Resource:
    """``service.name``, instance and namespace; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win."""
    own = Resource(
        {
            "service.name": service,
            "service.namespace": "headrace",
            "service.instance.id": f"{socket.gethostname()}-{os.getpid()}",
        }
    )
    return own.merge(OTELResourceDetector().detect())
