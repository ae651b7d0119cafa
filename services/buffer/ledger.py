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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from services.buffer import keys
from services.buffer.transitions import Transitions
from services.runtime.errors import NotFound
from services.runtime.home import write_atomic
from services.runtime.redis_errors import translated

FORMAT = 1
_SCAN = 2000
_CHUNK = 2000
_SAMPLE_STATES = "qcdx"


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
        raw = await _scan_records(redis, run)
        entries = await _read_entries(redis, run, int(start or 0))
        _, last, later, touched = await Transitions(redis).call(run, "snapshot", int(start or 0))
    for book, ordinal, fields in touched:
        raw[book.decode(), int(ordinal)] = dict(zip(fields[::2], fields[1::2], strict=True))
    entries += [(entry, dict(zip(fields[::2], fields[1::2], strict=True))) for entry, fields in later]
    faults: list[str] = []
    records = _records(raw, faults)
    return Evidence(run, "store", last, [_event(*entry) for entry in entries], records, faults)


async def seal(redis: Redis, run: str, path: Path) -> int:
    """Write the run's evidence to ``path``; returns the number of events. Repeating it replaces the file."""
    evidence = await read_store(redis, run)
    await asyncio.to_thread(_write, evidence, path)
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


async def _scan_records(redis: Redis, run: str) -> dict[tuple[str, int], Mapping[bytes, bytes]]:
    found: dict[tuple[str, int], Mapping[bytes, bytes]] = {}
    lead = f"{keys.prefix(run)}g:"
    cursor = 0
    while True:
        reply: Any = await redis.scan(cursor, match=f"{lead}*", count=_SCAN)
        cursor, names = reply
        pipe = redis.pipeline(transaction=False)
        for name in names:
            pipe.hgetall(name)
        for name, fields in zip(names, await pipe.execute(), strict=True):
            book, _, ordinal = name.decode().removeprefix(lead).rpartition(":")
            found[book, int(ordinal)] = fields
        if not cursor:
            return found


async def _read_entries(redis: Redis, run: str, through: int) -> list[tuple[bytes, Mapping[bytes, bytes]]]:
    entries: list[tuple[bytes, Mapping[bytes, bytes]]] = []
    start = "-"
    while True:
        chunk: Any = await redis.xrange(f"{keys.prefix(run)}ledger", start, f"{through}-0", count=_CHUNK)
        entries += chunk
        if len(chunk) < _CHUNK:
            return entries
        start = f"({chunk[-1][0].decode()}"


def _event(entry: bytes, fields: Mapping[bytes, bytes]) -> Event:
    text = {name.decode(): value.decode() for name, value in fields.items()}
    return Event(
        seq=int(entry.split(b"-")[0]),
        at_ns=int(text["at"]),
        kind=text["k"],
        book=text["b"],
        group=int(text["g"]),
        samples=int(text["n"]),
        step=int(text["s"]),
        reason=text["r"],
        epoch=int(text["e"]) if text["e"] else None,
    )


def _records(raw: Mapping[tuple[str, int], Mapping[bytes, bytes]], faults: list[str]) -> list[Record]:
    records = []
    for (book, group), fields in sorted(raw.items()):
        try:
            records.append(_record(book, group, {name: fields[name] for name in fields}))
        except (KeyError, ValueError) as exc:
            faults.append(f"record of group {group} in {book} cannot be read: {exc!r}")
    return records


def _record(book: str, group: int, fields: Mapping[bytes, bytes]) -> Record:
    samples = int(fields[b"n"])
    states = dict.fromkeys(_SAMPLE_STATES, 0)
    lost: dict[str, int] = {}
    for i in range(samples):
        state = fields[b"s%d" % i].decode()
        states[state] = states.get(state, 0) + 1
        if state == "x":
            reason = fields[b"x%d" % i].decode()
            lost[reason] = lost.get(reason, 0) + 1
    trained = fields.get(b"ts")
    return Record(
        book=book,
        group=group,
        state=fields[b"state"].decode(),
        samples=samples,
        step=int(fields[b"step"]),
        left=int(fields[b"left"]),
        reason=fields.get(b"reason", b"").decode(),
        trained_step=None if trained is None else int(trained),
        states=states,
        lost=lost,
    )


def _write(evidence: Evidence, path: Path) -> None:
    rows: list[Mapping[str, Any]] = [{"ledger": FORMAT, "run": evidence.run, "last": evidence.last}]
    rows += [{"event": asdict(event)} for event in evidence.events]
    rows += [{"record": asdict(record)} for record in evidence.records]
    rows += [{"fault": fault} for fault in evidence.faults]
    body = b"".join(_line(row) for row in rows)
    footer = {"events": len(evidence.events), "records": len(evidence.records), "sha256": _digest([body])}
    write_atomic(path, body + _line({"seal": footer}))


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
