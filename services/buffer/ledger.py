"""The evidence of an audit: group records and ledger events, from Redis or from a sealed file.

Invariants
- Reading from Redis needs no quiet run: what changes meanwhile is read again, at the end in one atomic look.
- A sealed file is JSON lines: a header, every event in order, every record, and a footer with counts and the
  SHA-256 of all lines before it. It appears whole or not at all.
- Reading never repairs: what is odd is kept and said in ``faults``.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from services.buffer import keys
from services.buffer.transitions import Transitions
from services.runtime.errors import NotFound
from services.runtime.home import write_atomic
from services.runtime.redis_errors import translated

FORMAT = 1
_CHUNK = 2000
_SEPARATOR = b"\x1f"


@dataclass(frozen=True, slots=True)
class Event:
    """One transition, as the ledger has it."""

    seq: int
    at_ns: int
    kind: str
    book: str
    group: int
    samples: int
    step: int
    reason: str = ""
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """One group, as its record has it: ``states`` counts samples, ``lost`` those given up, by reason."""

    book: str
    group: int
    state: str
    samples: int
    step: int
    left: int
    reason: str = ""
    trained_step: int | None = None
    states: dict[str, int] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Evidence:
    """All of it. ``last`` is the sequence number that the ledger must end with."""

    run: str
    source: str
    last: int
    events: list[Event]
    records: list[Record]
    faults: list[str] = field(default_factory=list)


async def read_store(redis: Redis, run: str) -> Evidence:
    """The evidence in Redis; raises NotFound when there is no such run."""
    with translated("audit"):
        start = await redis.hget(keys.config(run), "seq")
        if start is None and not await redis.exists(keys.config(run)):
            raise NotFound(f"There are no books of run {run}", where="audit")
        do = Transitions(redis)
        raw = await _scan_records(do, run)
        lines = await _read_lines(do, run, int(start or 0))
        _, last, later, touched = await do.call(run, "snapshot", int(start or 0))
    for book, ordinal, text in zip(touched[::3], touched[1::3], touched[2::3], strict=True):
        raw[book.decode(), int(ordinal)] = text
    faults: list[str] = []
    records = _records(raw, faults)
    return Evidence(run, "store", last, [_event(line) for line in lines + later], records, faults)


async def seal(redis: Redis, run: str, path: Path) -> int:
    """Write the run's evidence to ``path``; returns the number of events. Repeating it replaces the file."""
    evidence = await read_store(redis, run)
    await asyncio.to_thread(write_evidence, evidence, path)
    return len(evidence.events)


def read_file(path: Path) -> Evidence:
    """The evidence in a sealed file; raises NotFound when there is none."""
    if not path.is_file():
        raise NotFound("There is no sealed ledger", where=str(path), do="Audit the run from its store.")
    evidence = Evidence("", "sealed ledger", 0, [], [])
    lines = path.read_bytes().splitlines(keepends=True)
    _check_seal(lines, evidence)
    for number, line in enumerate(lines, start=1):
        try:
            _take_line(json.loads(line), evidence)
        except (ValueError, TypeError, KeyError) as exc:
            evidence.faults.append(f"line {number} cannot be read: {exc}")
    return evidence


async def _scan_records(do: Transitions, run: str) -> dict[tuple[str, int], bytes]:
    found: dict[tuple[str, int], bytes] = {}
    lead = f"{keys.prefix(run)}g:"
    cursor = 0
    while True:
        reply: Any = await do.redis.scan(cursor, match=f"{lead}*", count=_CHUNK)
        cursor, names = reply
        parts = [name.decode().removeprefix(lead).rpartition(":") for name in names]
        args = [part for book, _, ordinal in parts for part in (book, ordinal)]
        _, *texts = await do.call(run, "records", *args)
        for (book, _, ordinal), text in zip(parts, texts, strict=True):
            found[book, int(ordinal)] = text
        if not cursor:
            return found


async def _read_lines(do: Transitions, run: str, through: int) -> list[bytes]:
    lines: list[bytes] = []
    start = 0
    while True:
        _, *chunk = await do.call(run, "entries", start, through, _CHUNK)
        lines += chunk
        if len(chunk) < _CHUNK:
            return lines
        start = int(chunk[-1].split(_SEPARATOR)[0]) + 1


def _event(line: bytes) -> Event:
    seq, at, kind, book, group, samples, step, reason, epoch = line.decode().split("\x1f")
    return Event(
        seq=int(seq),
        at_ns=int(at),
        kind=kind,
        book=book,
        group=int(group),
        samples=int(samples),
        step=int(step),
        reason=reason,
        epoch=int(epoch) if epoch else None,
    )


def _records(raw: Mapping[tuple[str, int], bytes], faults: list[str]) -> list[Record]:
    records = []
    for (book, group), text in sorted(raw.items()):
        try:
            records.append(_record(book, group, *text.decode().split("\x1f")))
        except (TypeError, ValueError) as exc:
            faults.append(f"record of group {group} in {book} cannot be read: {exc}")
    return records


def _record(
    book: str,
    group: int,
    state: str,
    size: str,
    step: str,
    left: str,
    reason: str,
    trained: str,
    *samples: str,
) -> Record:
    if "" in samples[::2]:
        raise ValueError("a sample has no state")
    return Record(
        book=book,
        group=group,
        state=state,
        samples=int(size),
        step=int(step),
        left=int(left),
        reason=reason,
        trained_step=int(trained) if trained else None,
        states=dict(Counter(samples[::2])),
        lost=dict(Counter(why for what, why in zip(samples[::2], samples[1::2], strict=True) if what == "x")),
    )


def write_evidence(evidence: Evidence, path: Path) -> None:
    """Seal ``evidence`` to ``path``, replacing what is there."""
    rows: list[Mapping[str, Any]] = [{"ledger": FORMAT, "run": evidence.run, "last": evidence.last}]
    rows += [{"event": _plain(event)} for event in evidence.events]
    rows += [{"record": _plain(record)} for record in evidence.records]
    rows += [{"fault": fault} for fault in evidence.faults]
    body = b"".join(_line(row) for row in rows)
    footer = {"events": len(evidence.events), "records": len(evidence.records), "sha256": _digest([body])}
    write_atomic(path, body + _line({"seal": footer}))


def _plain(item: Event | Record) -> dict[str, Any]:
    # Not dataclasses.asdict: it copies deeply, which for 100,000 events takes seconds.
    return {name: getattr(item, name) for name in item.__slots__}


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _check_seal(lines: Sequence[bytes], evidence: Evidence) -> None:
    try:
        footer = json.loads(lines[-1])["seal"]["sha256"]
    except (IndexError, ValueError, KeyError, TypeError):
        evidence.faults.append("the ledger ends without a seal: it was cut")
        return
    if footer != _digest(lines[:-1]):
        evidence.faults.append("the ledger does not match its seal: it was changed")


def _take_line(row: Mapping[str, Any], evidence: Evidence) -> None:
    (kind,) = {"ledger", "event", "record", "fault", "seal"} & row.keys()
    match kind:
        case "ledger":
            evidence.run, evidence.last = str(row["run"]), int(row["last"])
        case "event":
            evidence.events.append(Event(**row["event"]))
        case "record":
            evidence.records.append(Record(**row["record"]))
        case "fault":
            evidence.faults.append(str(row["fault"]))
