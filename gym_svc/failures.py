"""How a sample that ended without a trajectory is reported.

Invariants: every failure has one outcome of the contract, and none of them carries a reward; what another
attempt may cure (a service away, a deadline, a lost engine) is infrastructure, what the row or its
environment causes is an environment error.
"""

from __future__ import annotations

from protos.headrace.v1 import types_pb2
from services.runtime.errors import Corrupt, HeadraceError, InvalidInput, NotFound, Unsupported

MAX_MESSAGE = 500

INFRASTRUCTURE = types_pb2.OUTCOME_INFRASTRUCTURE_ERROR
ENVIRONMENT = types_pb2.OUTCOME_ENVIRONMENT_ERROR
VERIFIER = types_pb2.OUTCOME_VERIFIER_ERROR
# The same input would be refused again.
_DATA = (InvalidInput, NotFound, Unsupported)


class SampleError(Exception):
    """A sample ended with ``outcome`` instead of a trajectory."""

    def __init__(self, outcome: types_pb2.Outcome.ValueType, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.message = message[:MAX_MESSAGE]


def failed_call(exc: HeadraceError, what: str) -> SampleError:
    """A call to rollout or reward that failed for good."""
    outcome = ENVIRONMENT if isinstance(exc, _DATA) else INFRASTRUCTURE
    return SampleError(outcome, f"{what}: {exc}")


def failed_environment(exc: Exception, what: str) -> SampleError:
    """An environment that raised: its own fault, unless it says that something else was away."""
    infrastructure = isinstance(exc, HeadraceError) and not isinstance(exc, (*_DATA, Corrupt))
    return SampleError(
        INFRASTRUCTURE if infrastructure else ENVIRONMENT, f"{what}: {type(exc).__name__}: {exc}"
    )
