"""What an address means to gRPC: HOST:PORT, several with commas between, or a DNS name with several records.

Invariants
- One literal address is passed on as it is, with gRPC's default policy: the common case costs nothing extra.
- Literal addresses together, and all records of one name, are one target under gRPC's ``round_robin``: it
  keeps a connection to each, sends calls over those that are up, and takes back what returns within a second.
- Different names are targets of their own (see :mod:`services.runtime.spread`).
"""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

from services.runtime.errors import InvalidInput

ROUND_ROBIN = ("grpc.lb_policy_name", "round_robin")
# A name is looked up again when a connection ends; the default waits half a minute between two look-ups.
_LOOK_UP = ("grpc.dns_min_time_between_resolutions_ms", 2000)


class TargetOf(NamedTuple):
    """A gRPC target and the channel options that it needs."""

    name: str
    options: tuple[tuple[str, str | int], ...] = ()


def targets(address: str) -> list[TargetOf]:
    """The targets of ``address``; raises InvalidInput when it is empty."""
    parts = [part for part in (part.strip() for part in address.split(",")) if part]
    if not parts:
        raise InvalidInput("An address is empty", where=repr(address), do="Give HOST:PORT.")
    if len(parts) == 1:
        return [_one(parts[0])]
    names = [_one(part) for part in parts if not _scheme(part)]
    literals = {scheme: [part for part in parts if _scheme(part) == scheme] for scheme in ("ipv4", "ipv6")}
    together = [
        TargetOf(f"{scheme}:{','.join(found)}", (ROUND_ROBIN,)) for scheme, found in literals.items() if found
    ]
    return together + names


def _one(part: str) -> TargetOf:
    host = part.rpartition(":")[0]
    if host == "localhost" or _scheme(part):
        return TargetOf(part)
    name = part if "://" in part else f"dns:///{part}"
    return TargetOf(name, (ROUND_ROBIN, _LOOK_UP))


def _scheme(part: str) -> str:
    """``ipv4`` or ``ipv6`` of a literal HOST:PORT, empty for a name."""
    try:
        return f"ipv{ipaddress.ip_address(part.rpartition(':')[0].strip('[]')).version}"
    except ValueError:
        return ""
