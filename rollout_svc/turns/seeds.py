"""The sampling seed of a turn.

Invariant: it is a function of run seed, group, sample and turn alone, never of the attempt, the engine or
the batch, so that a repeated turn samples the same tokens. The function is part of the contract: changing it
changes every run.

A turn that an in-flight update made the engine give up is continued from its exact ids with the seed of
(turn, continuation): a fresh draw, not the tokens that the unbroken turn would have had.
"""

from __future__ import annotations

import hashlib
import struct

_FIELDS = struct.Struct("<QQII")
_AGAIN = struct.Struct("<QI")


def turn_seed(run_seed: int, group: int, sample: int, turn: int) -> int:
    """A seed in [0, 2^63)."""
    digest = hashlib.blake2b(
        _FIELDS.pack(run_seed, group, sample, turn), digest_size=8, person=b"headrace-turn"
    ).digest()
    return int.from_bytes(digest, "little") >> 1


def continuation_seed(seed: int, continuation: int) -> int:
    """The seed of a turn's ``continuation``-th piece; the first, 0, has the turn's own ``seed``."""
    if not continuation:
        return seed
    digest = hashlib.blake2b(
        _AGAIN.pack(seed, continuation), digest_size=8, person=b"headrace-again"
    ).digest()
    return int.from_bytes(digest, "little") >> 1
