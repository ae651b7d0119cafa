"""Which row a draw ordinal stands for.

Invariants
- Ordinal g is row ``permutation(seed, epoch)[g mod N]`` with epoch = g div N; without shuffling it is row
  g mod N. The mapping depends on seed and file content alone, hence is the same after every restart.
- A file that changed under a run is refused by its fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from protos.headrace.v1 import types_pb2
from services.runtime.errors import InvalidInput

AGENT_TYPE = "responses_api_agents"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a Gym JSONL file, as it stands there."""

    json: str
    source: str


class RowFile:
    """The rows of one data file, in memory."""

    def __init__(self, path: Path, *, limit: int | None = None) -> None:
        if not path.is_file():
            raise InvalidInput(f"Data file {path} does not exist", do="Check data.train and data.validation.")
        raw = path.read_bytes()
        self.path = path
        self.fingerprint = hashlib.sha256(raw).hexdigest()
        lines = raw.decode("utf-8").splitlines()
        numbered = [(i, line) for i, line in enumerate(lines, start=1) if line.strip()]
        self._rows = [Row(line, f"{path.name}:{i}") for i, line in numbered[:limit]]
        if not self._rows:
            raise InvalidInput(f"Data file {path} has no rows")

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Row:
        """Row ``index`` of the file, from 0."""
        return self._rows[index]


class Draws:
    """Rows by draw ordinal."""

    def __init__(self, rows: RowFile, *, seed: int, shuffle: bool) -> None:
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._order: npt.NDArray[np.int64] = np.arange(len(rows))

    def row(self, ordinal: int) -> Row:
        """The row of draw ``ordinal`` (from 0)."""
        epoch, position = divmod(ordinal, len(self._rows))
        if self._shuffle and epoch != self._epoch:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(len(self._rows))
            self._epoch = epoch
        return self._rows.row(int(self._order[position]))


def agent_of(row: Row, default: str | None, *, supervised: bool) -> types_pb2.AgentRef:
    """The agent that drives ``row``: its own ``agent_ref``, else ``default``."""
    ref = None if supervised else json.loads(row.json).get("agent_ref")
    if isinstance(ref, dict) and ref.get("name"):
        return types_pb2.AgentRef(type=str(ref.get("type", AGENT_TYPE)), name=str(ref["name"]))
    name = default or ("supervised" if supervised else "single_turn")
    return types_pb2.AgentRef(type=AGENT_TYPE, name=name)
