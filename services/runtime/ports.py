"""A port that a service keeps across its restarts.

Invariant: the reservation is a bound socket that never listens, with SO_REUSEPORT but (where possible)
without SO_REUSEADDR, which would let anybody bind beside a socket that does not listen.
The service binds the same port with SO_REUSEPORT and listens; the kernel hands connections only to
listeners, and no stranger (another user, or a socket without SO_REUSEPORT) can take the port meanwhile.
"""

from __future__ import annotations

import errno
import socket
from typing import Self

from services.runtime.errors import InvalidInput


class ReservedPort:
    """Holds ``host:port`` until closed."""

    def __init__(self, held: socket.socket) -> None:
        self._socket = held
        self.host: str = held.getsockname()[0]
        self.port: int = held.getsockname()[1]

    @classmethod
    def free(cls, host: str = "127.0.0.1") -> ReservedPort:
        """Reserve a port that the kernel chooses."""
        return cls(_bind(host, 0, socket.SO_REUSEPORT))

    @classmethod
    def explicit(cls, host: str, port: int) -> ReservedPort:
        """Reserve ``port``; raises InvalidInput when something listens on it already."""
        # A probe without SO_REUSEPORT first: with it, binding beside another Headrace would succeed.
        _bind(host, port, socket.SO_REUSEADDR).close()
        try:
            return cls(_bind(host, port, socket.SO_REUSEPORT))
        except InvalidInput:
            # Only connections of a former server that linger in TIME_WAIT are in the way.
            return cls(_bind(host, port, socket.SO_REUSEADDR, socket.SO_REUSEPORT))

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def close(self) -> None:
        """Give the port up; idempotent."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def port_in_use(host: str, port: int) -> InvalidInput:
    """The one error for a port that is taken."""
    return InvalidInput(
        f"Port {port} is in use",
        where=f"{host}:{port}",
        do="Stop what listens there, or choose another port (0 takes a free one).",
        reason="PORT_IN_USE",
    )


def _bind(host: str, port: int, *options: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        for option in options:
            bound.setsockopt(socket.SOL_SOCKET, option, 1)
        bound.bind((host, port))
    except OSError as exc:
        bound.close()
        if exc.errno == errno.EADDRINUSE:
            raise port_in_use(host, port) from exc
        raise InvalidInput(f"Cannot bind: {exc.strerror}", where=f"{host}:{port}") from exc
    return bound
