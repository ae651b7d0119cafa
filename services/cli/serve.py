"""``headrace serve NAME``: become one service.

Settings that are not given default to loopback and the ports of the table in docs/architecture.md, so that
services started by hand find each other.
"""

from __future__ import annotations

import difflib
import importlib
import os

from services.cli.roster import SERVICES, Service
from services.runtime.errors import InvalidInput
from services.runtime.ports import ReservedPort
from services.runtime.settings import is_loopback, split_address


def serve_command(name: str) -> int:
    """Serve ``name`` until SIGTERM; its exit status."""
    service = SERVICES.get(name)
    if service is None:
        near = difflib.get_close_matches(name, SERVICES, n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(sorted(SERVICES))}."
        raise InvalidInput(f"There is no service {name!r}", do=hint)
    for key, value in default_environment(service).items():
        os.environ.setdefault(key, value)
    _check_port(service)
    module = importlib.import_module(service.module)
    status = module.main()
    return int(status)


def _check_port(service: Service) -> None:
    """Say that the port is taken before anything is loaded; a broken LISTEN is the settings' to refuse."""
    try:
        host, port = split_address(os.environ[f"{service.prefix}LISTEN"])
    except ValueError:
        return
    handed_over = f"{service.prefix}PORT_HANDED_OVER" in os.environ
    if port and not handed_over and is_loopback(host):
        ReservedPort.explicit(host, port).close()


def default_environment(service: Service) -> dict[str, str]:
    """Where ``service`` listens and looks for its peers unless told otherwise."""
    found = {f"{service.prefix}LISTEN": f"127.0.0.1:{service.port}"}
    for peer in service.peers:
        found[f"{service.prefix}{peer.upper()}"] = f"127.0.0.1:{SERVICES[peer].port}"
    return found
