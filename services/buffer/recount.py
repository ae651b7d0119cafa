"""Two independent counts of the books: one from group records, one by replaying the ledger.

Invariants: neither count looks at the other's evidence or at the cached counters; every illegal transition
is a fault in words; in each count a group is in exactly one of trained, dropped and open.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from protos.headrace.v1 import buffer_pb2 as pb
from services.buffer.ledger import Event, Record

OPEN = ("open", "complete", "ready", "leased")
TRAINED = ("trained", "durable")
# kind -> (states it may start from, state it leads to)
_MOVES: dict[str, tuple[tuple[str, ...], str]] = {
    "complete": (("open",), "complete"),
    "admit": (("complete",), "ready"),
    "lease": (("ready",), "leased"),
    "train": (("leased",), "trained"),
    "restore": (("leased", "trained"), "ready"),
    "durable": (("trained",), "durable"),
    "drop": (OPEN, "dropped"),
    "close": (OPEN, "dropped"),
}
_NOTES = ("append", "duplicate", "retry")


@dataclass(slots=True)
class Tally:
    """Counts of one book in one unit."""

    dispatched: int = 0
    trained: int = 0
    open: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def proto(self) -> pb.BookCounts:
        """As a message."""
        dropped = {reason: count for reason, count in self.dropped.items() if count}
        return pb.BookCounts(
            dispatched=self.dispatched, trained=self.trained, open=self.open, dropped=dropped
        )


@dataclass(slots=True)
class Book:
    """Counts of one book in groups and in samples."""

    groups: Tally = field(default_factory=Tally)
    samples: Tally = field(default_factory=Tally)

    def add(self, state: str, reason: str, samples: int, lost: Counter[str]) -> None:
        """Count one group of ``samples``, some of them lost one by one."""
        left = samples - lost.total()
        self.samples.dropped.update(lost)
        for tally, amount in ((self.groups, 1), (self.samples, left)):
            if state in OPEN:
                tally.open += amount
            elif state in TRAINED:
                tally.trained += amount
            elif state == "dropped":
                tally.dropped[reason] += amount
        self.groups.dispatched += 1
        self.samples.dispatched += samples


@dataclass(slots=True)
class Replayed:
    """One group after the events so far."""

    book: str
    group: int
    samples: int
    step: int
    state: str = "open"
    reason: str = ""
    appended: int = 0
    trained_step: int | None = None
    lost: Counter[str] = field(default_factory=Counter)

    @property
    def usable(self) -> int:
        """Samples that were not lost one by one."""
        return self.samples - self.lost.total()


class Replay:
    """The ledger as a state machine for each group; faults are (book, text)."""

    def __init__(self) -> None:
        self.groups: dict[tuple[str, int], Replayed] = {}
        self.faults: list[tuple[str, str]] = []

    def run(self, events: Iterable[Event]) -> None:
        """Apply ``events`` in order; a gap in their sequence is a fault."""
        expected = 1
        for event in events:
            if event.seq != expected:
                self._fault(event, f"the ledger jumps from event {expected - 1} to {event.seq}")
            expected = event.seq + 1
            self._apply(event)

    def books(self) -> dict[str, Book]:
        """Counts by book."""
        books: dict[str, Book] = defaultdict(Book)
        for group in self.groups.values():
            books[group.book].add(group.state, group.reason, group.samples, group.lost)
        return books

    def _apply(self, event: Event) -> None:
        group = self.groups.get((event.book, event.group))
        if event.kind == "dispatch":
            if group is not None:
                self._fault(event, f"group {event.group} was dispatched twice")
            fresh = Replayed(event.book, event.group, event.samples, event.step)
            self.groups[event.book, event.group] = fresh
        elif group is None:
            self._fault(event, f"group {event.group} has a {event.kind} without a dispatch")
        elif event.kind in _MOVES:
            self._move(group, event)
        elif event.kind == "lose":
            self._lose(group, event)
        elif event.kind == "swap":
            self._swap(group, event)
        elif event.kind == "append":
            self._append(group, event)
        elif event.kind not in _NOTES:
            self._fault(event, f"group {event.group} has an event of unknown kind {event.kind!r}")

    def _move(self, group: Replayed, event: Event) -> None:
        sources, target = _MOVES[event.kind]
        if event.kind == "train" and group.trained_step is not None:
            first = group.trained_step
            self._fault(
                event, f"group {event.group} was trained at step {first} and again at step {event.step}"
            )
        elif group.state not in sources:
            self._fault(event, f"group {event.group} has a {event.kind} while it is {group.state}")
        if event.samples != group.usable:
            text = (
                f"group {event.group} has a {event.kind} of {event.samples} samples, it holds {group.usable}"
            )
            self._fault(event, text)
        if event.step != group.step:
            text = f"group {event.group} of step {group.step} has a {event.kind} at step {event.step}"
            self._fault(event, text)
        group.state = target
        if target == "dropped":
            group.reason = event.reason
        if event.kind in ("train", "restore"):
            group.trained_step = event.step if event.kind == "train" else None

    def _lose(self, group: Replayed, event: Event) -> None:
        if group.state != "open" or group.usable < event.samples:
            self._fault(event, f"group {event.group} lost a sample while it is {group.state}")
        group.lost[event.reason] += event.samples

    def _swap(self, group: Replayed, event: Event) -> None:
        if group.state not in OPEN or event.reason != str(group.step):
            text = f"group {event.group} of step {group.step}, {group.state}, moves from step {event.reason}"
            self._fault(event, text)
        group.step = event.step

    def _append(self, group: Replayed, event: Event) -> None:
        group.appended += event.samples
        if group.state != "open" or group.appended > group.usable:
            self._fault(event, f"group {event.group} took a trajectory too many while it is {group.state}")

    def _fault(self, event: Event, text: str) -> None:
        self.faults.append((event.book, f"{text} (event {event.seq})"))


def books_of_records(records: Iterable[Record]) -> dict[str, Book]:
    """Counts by book, from records alone."""
    books: dict[str, Book] = defaultdict(Book)
    for record in records:
        books[record.book].add(record.state, record.reason, record.samples, Counter(record.lost))
    return books
