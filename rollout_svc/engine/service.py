"""Entry point of ``headrace serve engine``: the host."""

from __future__ import annotations

from rollout_svc.engine.host import EngineHost
from rollout_svc.engine.settings import EngineSettings
from services.runtime.ports import ReservedPort
from services.runtime.service import serve
from services.runtime.settings import split_address


def main() -> int:
    """Serve until told to stop; the exit status."""
    settings = EngineSettings.load()
    host, port = split_address(settings.listen)
    if port:
        return serve(EngineHost(settings), settings)
    # The host registers its own address, so it has to know its port before it listens.
    with ReservedPort.free(host) as reserved:
        settings = settings.model_copy(update={"listen": reserved.address, "port_handed_over": True})
        return serve(EngineHost(settings), settings)


if __name__ == "__main__":
    raise SystemExit(main())
