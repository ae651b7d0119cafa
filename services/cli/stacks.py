"""Which stacks are up, as other commands see them.

Invariant: a board is believed while its lock is held; otherwise its writer is dead, and so are its processes
(death signals and the sweeper see to that).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from services.cli.board import FAILED, read_board
from services.runtime.errors import InvalidInput, NotFound
from services.runtime.home import Home
from services.runtime.locks import FileLock

DEFAULT_STACK = "default"
DEFAULT_CONTROLLER = "127.0.0.1:7000"


@dataclass(frozen=True, slots=True)
class Seen:
    """One stack: of ``headrace up``, or of a ``headrace run``. ``state`` is dead when its supervisor is."""

    name: str
    kind: Literal["up", "run"]
    state: str
    root: Path
    board: dict[str, Any]

    @property
    def live(self) -> bool:
        """Whether its supervisor lives."""
        return self.state not in ("dead", FAILED)

    def address(self, service: str) -> str | None:
        """HOST:PORT of the first process of ``service``."""
        rows = self.board["processes"]
        return next((str(row["address"]) for row in rows if row["service"] == service), None)


def seen_stack(home: Home, name: str) -> Seen | None:
    """The stack ``name`` of ``headrace up``; None when it was never up or has been taken down."""
    paths = home.stack(name)
    board = read_board(paths.board)
    if board is None:
        return None
    state = board["state"] if is_held(paths.lock) or board["state"] == FAILED else "dead"
    return Seen(name, "up", state, paths.root, board)


def stacks(home: Home) -> Iterator[Seen]:
    """Stacks of ``headrace up`` with a board, then those of live runs."""
    for name in home.stack_names():
        if (seen := seen_stack(home, name)) is not None:
            yield seen
    for run in home.run_ids():
        root = home.run(run).root
        board = read_board(root / "board.json") if (root / "board.json").exists() else None
        if board is not None and is_held(root / "run.lock"):
            yield Seen(run, "run", board["state"], root, board)


def live_stack(home: Home, name: str) -> Seen:
    """The stack ``name``, which must be up; raises NotFound."""
    seen = seen_stack(home, name)
    if seen is None or not seen.live:
        raise NotFound(f"No stack {name!r} is up", where=str(home.stacks), do="Start it with `headrace up`.")
    return seen


def controller_address(address: str | None, stack: str | None) -> str:
    """The controller to talk to: as given, else that of the stack, else the default port's."""
    if address is not None and stack is not None:
        raise InvalidInput("Give --address or --stack, not both")
    if address is not None:
        return address
    from services.runtime.home import default_home

    home = Home(default_home())
    if stack is not None:
        return live_stack(home, stack).address("controller") or DEFAULT_CONTROLLER
    seen = seen_stack(home, DEFAULT_STACK)
    found = seen.address("controller") if seen is not None and seen.live else None
    return found or DEFAULT_CONTROLLER


def is_held(lock: Path) -> bool:
    """Whether somebody holds ``lock``."""
    if not lock.exists():
        return False
    with FileLock(lock) as mine:
        return not mine.try_lock()
