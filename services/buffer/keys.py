"""Names of the buffer's keys in Redis.

Invariants: every key of a run starts with ``hr:{run}:`` (the braces are literal), so that a run lives in one
cluster slot; run and book ids cannot contain a character that would break a key apart.
"""

from __future__ import annotations

import re

from services.runtime.errors import InvalidInput
from services.runtime.home import RUN_ID

TRAIN = "train"
BOOK = re.compile(r"[a-z][a-z0-9_-]{0,31}(/[A-Za-z0-9._-]{1,64})?")


def prefix(run: str) -> str:
    """``hr:{run}:``; raises InvalidInput when ``run`` is no run id."""
    if not RUN_ID.fullmatch(run):
        raise InvalidInput(f"{run!r} is no run id", where="run")
    return f"hr:{{{run}}}:"


def checked_book(book: str) -> str:
    """``book`` itself; raises InvalidInput when it is no name of a book."""
    if not BOOK.fullmatch(book):
        raise InvalidInput(f"{book!r} is no book", where="book", do="Use 'train' or 'validation/<step>'.")
    return book


def assignment(stack: str) -> str:
    """What the gym workers of a stack are to do; the only key that belongs to no run."""
    return f"hr:stack:{{{stack}}}:assignment"


def config(run: str) -> str:
    """Budgets, admission rules, epoch and ledger sequence of a run."""
    return f"{prefix(run)}cfg"


def counters(run: str, book: str) -> str:
    """The cached counts of a book."""
    return f"{prefix(run)}n:{book}"


def group(run: str, book: str, ordinal: int) -> str:
    """A group's record."""
    return f"{prefix(run)}g:{book}:{ordinal}"


def prompt(run: str, book: str, ordinal: int) -> str:
    """A group's shared prompt: token ids, int32 little-endian."""
    return f"{prefix(run)}p:{book}:{ordinal}"


def payload(run: str, book: str, ordinal: int, sample: int) -> str:
    """A sample's payload (see :mod:`services.buffer.payload`)."""
    return f"{prefix(run)}t:{book}:{ordinal}:{sample}"


def step(run: str, book: str, number: int) -> str:
    """The groups of a target step, score = ordinal."""
    return f"{prefix(run)}step:{book}:{number}"
