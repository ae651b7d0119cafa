"""The proof that the books balance: dispatched = trained + dropped (by reason) + open, in groups and samples.

Invariants: records and ledger are counted apart and must agree group by group and in total; dispatched is
taken from the ledger and the rest from the records, so that a lost record or event shows; no group is
trained at two steps, net of restores; every imbalance is a sentence. The cached counters are not evidence.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from redis.asyncio import Redis

from protos.headrace.v1 import buffer_pb2 as pb
from protos.headrace.v1 import runs_pb2 as runs
from services.buffer.ledger import Evidence, Record, read_file, read_store, seal
from services.buffer.recount import OPEN, TRAINED, Book, Replay, Replayed, books_of_records

__all__ = ["audit", "audit_file", "audit_store", "seal"]


async def audit_store(redis: Redis, run: str) -> runs.AuditResponse:
    """Audit ``run`` from Redis; works on a run in progress. Raises NotFound when there are no books of it."""
    return audit(await read_store(redis, run))


def audit_file(path: Path) -> runs.AuditResponse:
    """Audit a run from its sealed ledger. Raises NotFound when there is none."""
    return audit(read_file(path))


def audit(evidence: Evidence) -> runs.AuditResponse:
    """The verdict on ``evidence``."""
    replay = Replay()
    replay.run(evidence.events)
    faults = [("", text) for text in evidence.faults]
    faults += replay.faults
    faults += _ledger_end(evidence)
    faults += _compare_groups(evidence, replay)
    recorded, replayed = books_of_records(evidence.records), replay.books()
    names = sorted(recorded.keys() | replayed.keys())
    for name in names:
        faults += [(name, text) for text in _compare_books(recorded[name], replayed[name])]
    return runs.AuditResponse(
        run=evidence.run,
        balanced=not faults,
        books=[_book_audit(name, recorded[name]) for name in names],
        imbalances=[runs.Imbalance(book=book, text=text) for book, text in faults],
        source=evidence.source,
        events=len(evidence.events),
    )


def _ledger_end(evidence: Evidence) -> Iterator[tuple[str, str]]:
    found = evidence.events[-1].seq if evidence.events else 0
    if found != evidence.last:
        yield "", f"the ledger ends at event {found}, {evidence.last} were written"


def _compare_groups(evidence: Evidence, replay: Replay) -> Iterator[tuple[str, str]]:
    records = {(record.book, record.group): record for record in evidence.records}
    for where, group in replay.groups.items():
        record = records.get(where)
        if record is None:
            yield group.book, f"group {group.group} is in the ledger and has no record"
        else:
            yield from ((group.book, text) for text in (*_compare(record, group), *_inner(record)))
    for book, ordinal in records:
        if (book, ordinal) not in replay.groups:
            yield book, f"group {ordinal} has a record and is not in the ledger"


def _compare(record: Record, group: Replayed) -> Iterator[str]:
    pairs = {
        "state": (record.state, group.state),
        "samples": (record.samples, group.samples),
        "target step": (record.step, group.step),
        "reason": (record.reason, group.reason),
        "trained step": (record.trained_step, group.trained_step),
        "lost samples": (record.lost, dict(group.lost)),
        "trajectories": (record.states.get("d", 0), group.appended),
    }
    for name, (in_record, in_ledger) in pairs.items():
        if in_record != in_ledger:
            yield f"group {record.group}: {name} is {in_record} in its record, {in_ledger} in the ledger"


def _inner(record: Record) -> Iterator[str]:
    """A record must agree with itself."""
    if record.state not in (*OPEN, *TRAINED, "dropped"):
        yield f"group {record.group} is in the unknown state {record.state!r}"
    unfinished = record.states.get("q", 0) + record.states.get("c", 0)
    if unfinished != record.left:
        yield f"group {record.group} says that {record.left} samples are to come, {unfinished} are"
    if unfinished and record.state in (*OPEN[1:], *TRAINED):
        yield f"group {record.group} is {record.state} with {unfinished} unfinished samples"
    if sum(record.states.values()) != record.samples or set(record.states) - set("qcdx"):
        yield f"group {record.group} has samples in unknown states: {record.states}"


def _compare_books(recorded: Book, replayed: Book) -> Iterator[str]:
    for unit in ("groups", "samples"):
        store, ledger = getattr(recorded, unit), getattr(replayed, unit)
        dropped = store.dropped.total()
        if ledger.dispatched != store.trained + dropped + store.open:
            yield (
                f"{ledger.dispatched} {unit} dispatched, but {store.trained} trained + {dropped} dropped"
                f" + {store.open} open = {store.trained + dropped + store.open}"
            )
        if store.proto() != ledger.proto():
            in_records, in_ledger = _text(store.proto()), _text(ledger.proto())
            yield f"{unit} in the records ({in_records}) differ from the ledger ({in_ledger})"


def _text(counts: pb.BookCounts) -> str:
    dropped = ", ".join(f"{reason} {count}" for reason, count in sorted(counts.dropped.items())) or "none"
    return f"dispatched {counts.dispatched}, trained {counts.trained}, open {counts.open}, dropped: {dropped}"


def _book_audit(name: str, book: Book) -> runs.BookAudit:
    return runs.BookAudit(book=name, groups=book.groups.proto(), samples=book.samples.proto())
