"""Commands on their way from gRPC handlers to the main thread, and the snapshot that goes back.

Invariants
- One command runs at a time, on the main thread, in the order of arrival; the queue is bounded.
- A command whose caller has gone before it began is not begun.
- The snapshot is replaced as a whole, never changed, so that any thread may read it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

from protos.headrace.v1 import trainer_pb2
from services.runtime.errors import Cancelled, Exhausted

QUEUE_COMMANDS = 16
POLL_SECONDS = 0.2
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Command:
    name: str
    action: Callable[[], Any]
    future: Future[Any]
    context: Context


class Commands:
    """The queue, and who is busy with what."""

    def __init__(self) -> None:
        self._queue: queue.Queue[_Command] = queue.Queue(QUEUE_COMMANDS)
        self._closed = threading.Event()
        self.busy_with = "starting"

    def submit(self, name: str, action: Callable[[], Result]) -> Future[Result]:
        """Queue ``action`` for the main thread, in the caller's context. Raises Exhausted when full."""
        future: Future[Result] = Future()
        try:
            self._queue.put_nowait(_Command(name, action, future, copy_context()))
        except queue.Full as exc:
            raise Exhausted(
                f"{QUEUE_COMMANDS} commands wait already", where=f"Trainer.{name}", do="Try again later."
            ) from exc
        return future

    def close(self) -> None:
        """End :meth:`run` after the command in progress; any thread."""
        self._closed.set()

    def run(self) -> None:
        """Execute commands on this thread until :meth:`close`."""
        while not self._closed.is_set():
            self.busy_with = ""
            try:
                command = self._queue.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
            self._execute(command)
        self._cancel_rest()

    def _execute(self, command: _Command) -> None:
        if not command.future.set_running_or_notify_cancel():
            return
        self.busy_with = command.name
        try:
            command.future.set_result(command.context.run(command.action))
        except BaseException as exc:  # noqa: BLE001 (it belongs to the caller, whatever it is)
            command.future.set_exception(exc)

    def _cancel_rest(self) -> None:
        while True:
            try:
                command = self._queue.get_nowait()
            except queue.Empty:
                return
            if command.future.set_running_or_notify_cancel():
                command.future.set_exception(Cancelled("The trainer stops", where=f"Trainer.{command.name}"))


class Snapshot:
    """The trainer's state as the main thread last told it."""

    def __init__(self, process: str) -> None:
        self.process = process
        self._state = trainer_pb2.TrainerState(process=process)

    def publish(self, state: trainer_pb2.TrainerState) -> None:
        """Replace the state; ``state`` must not be changed afterwards."""
        self._state = state

    def read(self, busy_with: str) -> trainer_pb2.TrainerState:
        """A copy of the state."""
        state = trainer_pb2.TrainerState()
        state.CopyFrom(self._state)
        state.busy_with = busy_with
        return state
