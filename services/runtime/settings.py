"""Typed settings of a service process.

Invariants
- Every service has an environment prefix of its own, ``HEADRACE_<SERVICE>_``; a key with that prefix that is
  no setting is refused with the nearest known one (a typo must not be ignored in silence).
- A service listens on loopback; elsewhere only with a token (:mod:`services.runtime.auth`).
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import socket
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from services.runtime import auth
from services.runtime.errors import InvalidInput
from services.runtime.home import Home, default_home


class ServiceSettings(BaseSettings):
    """Base of every service's settings; subclasses set ``model_config = service_config("NAME")``."""

    model_config = SettingsConfigDict(env_prefix="HEADRACE_SERVICE_", extra="forbid", frozen=True)

    listen: str = "127.0.0.1:0"
    """HOST:PORT; port 0 takes a free one. Beyond loopback a token is required."""
    advertise: str = ""
    """Host under which others reach a service that listens on all interfaces; empty: this machine's name."""
    ready_file: Path | None = None
    """Written once the service answers: JSON with ``address`` and ``pid``."""
    port_handed_over: bool = False
    """The supervisor holds the port (see :mod:`services.runtime.ports`)."""
    home: Path = Field(default_factory=default_home)
    metrics_listen: str = ""
    """HOST:PORT of the Prometheus scrape endpoint; empty for none. Beyond loopback a token is required."""
    log_level: str = "info"
    log_file: Path | None = None
    drain_seconds: float = Field(default=10.0, ge=0, le=3600)

    @field_validator("listen")
    @classmethod
    def _not_open(cls, value: str) -> str:
        return checked_listen(value)

    @field_validator("metrics_listen")
    @classmethod
    def _metrics_not_open(cls, value: str) -> str:
        return checked_listen(value) if value else ""

    @field_validator("log_level")
    @classmethod
    def _known_level(cls, value: str) -> str:
        if value.lower() not in ("debug", "info", "warning", "error"):
            raise ValueError("must be debug, info, warning or error")
        return value.lower()

    def reachable(self, address: str) -> str:
        """``address`` as others reach it: a wildcard host becomes ``advertise`` or this machine's name."""
        host, port = split_address(address)
        if not is_wildcard(host):
            return address
        name = self.advertise or socket.gethostname()
        return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"

    @property
    def paths(self) -> Home:
        """The layout of ``home``."""
        return Home(self.home)

    @classmethod
    def load(cls, **values: Any) -> Self:
        """Settings from ``values`` over the environment; raises InvalidInput with one clear line."""
        refuse_unknown_env(cls)
        auth.token()  # one that cannot be used ends the start here, with its own words
        try:
            return cls(**{key: value for key, value in values.items() if value is not None})
        except ValidationError as exc:
            raise _invalid(cls, exc) from exc


def service_config(service: str) -> SettingsConfigDict:
    """Configuration of one service's settings class: prefix ``HEADRACE_<SERVICE>_``, nested by ``__``."""
    return SettingsConfigDict(
        env_prefix=f"HEADRACE_{service.upper()}_", env_nested_delimiter="__", extra="forbid", frozen=True
    )


def split_address(address: str) -> tuple[str, int]:
    """HOST and PORT of ``HOST:PORT``; raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def checked_listen(address: str) -> str:
    """``address`` where a server may listen: on loopback, elsewhere only with a token; raises ValueError."""
    host, _ = split_address(address)
    if not is_loopback(host) and auth.token() is None:
        raise ValueError(
            f"{host} is not a loopback address and there is no token; "
            f"set {auth.TOKEN_KEY} or {auth.FILE_KEY}, or use 127.0.0.1"
        )
    return address


def is_wildcard(host: str) -> bool:
    """Whether ``host`` means every interface."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether ``host`` is this machine's loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def refuse_unknown_env(cls: type[ServiceSettings]) -> None:
    """Raise InvalidInput for an environment key that has the class's prefix and is no setting of it."""
    prefix = str(cls.model_config.get("env_prefix", "")).upper()
    known = {prefix + name.upper() for name in cls.model_fields}
    for key in sorted(os.environ):
        if not key.upper().startswith(prefix) or key.upper().split("__")[0] in known:
            continue
        near = difflib.get_close_matches(key.upper(), known, n=1, cutoff=0.0)
        raise InvalidInput(
            f"Unknown environment key {key}",
            where="environment",
            do=f"Did you mean {near[0]}?" if near else "Unset it.",
            reason="UNKNOWN_KEY",
        )


def _invalid(cls: type[ServiceSettings], exc: ValidationError) -> InvalidInput:
    first = exc.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, cls.model_fields, n=1, cutoff=0.0)
        return InvalidInput(f"Unknown setting {name}", do=f"Did you mean {near[0]}?", reason="UNKNOWN_KEY")
    text = str(first["msg"]).removeprefix("Value error, ")
    prefix = cls.model_config.get("env_prefix", "")
    return InvalidInput(f"Setting {name} is wrong: {text}", where=f"{prefix}{name.upper()}")
