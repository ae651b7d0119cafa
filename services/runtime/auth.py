"""The bearer token of a stack: one secret that every service asks for and every client sends.

Invariants
- It comes from ``HEADRACE_TOKEN_FILE``, else from ``HEADRACE_TOKEN``, and is the same for all services. Child
  processes inherit it by environment (those for other people's code do not); it never stands in arguments,
  logs, traces, recipes or error texts.
- With a token set, every call needs it, on loopback too; health alone answers without. Without one, a service
  listens on loopback only (:mod:`services.runtime.settings`).
- Tokens are compared in constant time.
"""

from __future__ import annotations

import hmac
import os
import stat
from functools import lru_cache
from pathlib import Path

from pydantic import SecretStr

from services.runtime.errors import InvalidInput, Unauthenticated

TOKEN_KEY = "HEADRACE_TOKEN"  # noqa: S105 (the name of a variable)
FILE_KEY = "HEADRACE_TOKEN_FILE"
KEYS = (TOKEN_KEY, FILE_KEY)
MIN_LENGTH = 16
MAX_LENGTH = 4096
HEADER = "authorization"
_SCHEME = "Bearer "


def token() -> SecretStr | None:
    """This process's token, None without one; raises InvalidInput that names the key when it cannot be used.

    A file is read once in a process's life.
    """
    return _read(os.environ.get(TOKEN_KEY, ""), os.environ.get(FILE_KEY, ""))


def header_value() -> str:
    """What a client puts into the header ``authorization``; empty without a token."""
    found = token()
    return "" if found is None else _SCHEME + found.get_secret_value()


def call_headers() -> tuple[tuple[str, str], ...]:
    """The token as gRPC metadata; empty without one."""
    value = header_value()
    return ((HEADER, value),) if value else ()


def check(expected: SecretStr | None, header: str | bytes | None, *, where: str) -> None:
    """Raise Unauthenticated unless ``header`` carries ``expected``; without a token everybody may call."""
    if expected is None:
        return
    if not header:
        raise _refused("The call carries no token", where)
    sent = header.encode() if isinstance(header, str) else header
    wanted = expected.get_secret_value().encode()
    scheme, _, value = sent.partition(b" ")
    if not hmac.compare_digest(value.strip(), wanted) or scheme.lower() != b"bearer":
        raise _refused("The call carries a wrong token", where)


def environment_without() -> dict[str, str]:
    """This process's environment for a child that runs other people's code and calls no service."""
    return {key: value for key, value in os.environ.items() if key not in KEYS}


def doubts() -> list[str]:
    """What is not wrong but should be known about the token, a line each; for the log at the start."""
    path = os.environ.get(FILE_KEY, "")
    if path and Path(path).stat().st_mode & stat.S_IROTH:
        return [f"{FILE_KEY} names a file that every user of this machine may read; chmod 600 it"]
    return []


def _refused(what: str, where: str) -> Unauthenticated:
    return Unauthenticated(what, where=where, do=f"Set {TOKEN_KEY} or {FILE_KEY} to the stack's token.")


@lru_cache(maxsize=4)
def _read(value: str, path: str) -> SecretStr | None:
    if path:
        return _checked(_of_file(Path(path)), FILE_KEY)
    return _checked(value.strip(), TOKEN_KEY) if value else None


def _of_file(path: Path) -> str:
    try:
        writable = path.stat().st_mode & stat.S_IWOTH
        text = path.read_text(encoding="ascii", errors="replace") if not writable else ""
    except OSError as exc:
        raise InvalidInput(f"Cannot read the token's file: {exc.strerror}", where=FILE_KEY) from exc
    if writable:
        raise InvalidInput(
            "Every user of this machine may write the token's file", where=FILE_KEY, do="chmod 600 it."
        )
    return text.strip()


def _checked(found: str, key: str) -> SecretStr:
    if not MIN_LENGTH <= len(found) <= MAX_LENGTH:
        raise InvalidInput(
            f"The token has {len(found)} characters; it needs {MIN_LENGTH} to {MAX_LENGTH}",
            where=key,
            do="`openssl rand -hex 32` makes one.",
        )
    if not found.isascii() or not found.isprintable() or " " in found:
        raise InvalidInput("The token must be printable ASCII without spaces", where=key)
    return SecretStr(found)
