"""The buffer: what a book waits for, and the dead letters."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel

from protos.headrace.v1 import buffer_pb2, types_pb2
from services.gateway.requests import Book, RunId, ThePeers
from services.gateway.routes.runs import Counts, counts
from services.gateway.wire import seconds, word

router = APIRouter(tags=["buffer"])


class Progress(BaseModel):
    """Counts of one book now."""

    book: str
    groups: Counts
    samples: Counts
    groups_by_state: dict[str, int]
    samples_queued: int
    samples_claimed: int
    samples_done: int
    redeliveries: int
    duplicates: int


class DeadLetter(BaseModel):
    """A sample that used up its tries."""

    book: str
    group: int
    sample: int
    attempt: int
    outcome: str
    message: str
    at: float | None


class DeadLetters(BaseModel):
    """Newest first."""

    letters: list[DeadLetter]


@router.get("/runs/{run}/progress")
async def progress(run: RunId, peers: ThePeers, book: Book = "train") -> Progress:
    """How far a book is."""
    found = await peers.buffer.Progress(buffer_pb2.ProgressRequest(run=run, book=book))
    return Progress(
        book=book, groups=counts(found.groups), samples=counts(found.samples),
        groups_by_state=dict(found.groups_by_state), samples_queued=found.samples_queued,
        samples_claimed=found.samples_claimed, samples_done=found.samples_done,
        redeliveries=found.redeliveries, duplicates=found.duplicates,
    )  # fmt: skip


@router.get("/runs/{run}/dead-letters")
async def dead_letters(
    run: RunId, peers: ThePeers, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> DeadLetters:
    """Samples that nobody will try again."""
    found = await peers.buffer.ListDeadLetters(buffer_pb2.ListDeadLettersRequest(run=run, limit=limit))
    return DeadLetters(letters=[_letter(letter) for letter in found.letters])


def _letter(found: buffer_pb2.DeadLetter) -> DeadLetter:
    key = found.ref.key
    return DeadLetter(
        book=key.book, group=key.group, sample=key.sample, attempt=found.ref.attempt, message=found.message,
        outcome=word(types_pb2.Outcome, found.outcome, "OUTCOME_"), at=seconds(found.at_ns),
    )  # fmt: skip
