from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refit_bridge.checksum import BLOCK_WORDS, checksum

BLOCK_BYTES = BLOCK_WORDS * 4


@given(st.binary(min_size=1, max_size=300), st.data())
@settings(max_examples=150, deadline=None)
def test_any_changed_bit_is_seen(data: bytes, draw: st.DataObject):
    at, bit = draw.draw(st.integers(0, len(data) - 1)), draw.draw(st.integers(0, 7))
    changed = bytearray(data)
    changed[at] ^= 1 << bit
    assert checksum(data) != checksum(changed)


def test_length_counts_even_where_the_bytes_are_zero():
    sums = {checksum(bytes(n)) for n in (*range(20), BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1)}
    assert len(sums) == 23


@pytest.mark.parametrize("distance", [1, 2, 7, BLOCK_WORDS, 3 * BLOCK_WORDS - 1])
def test_swapped_words_are_seen_even_if_they_differ_in_one_sign(distance: int):
    words = np.random.default_rng(0).integers(0, 2**32, 4 * BLOCK_WORDS, dtype=np.uint32)
    words[distance] = words[0] ^ np.uint32(1 << 31)
    swapped = words.copy()
    swapped[[0, distance]] = swapped[[distance, 0]]
    assert checksum(words) != checksum(swapped)


def test_swapped_blocks_are_seen():
    data = np.random.default_rng(1).bytes(2 * BLOCK_BYTES)
    assert checksum(data) != checksum(data[BLOCK_BYTES:] + data[:BLOCK_BYTES])


def test_the_value_never_changes():
    # Sender and receiver may run different releases.
    assert checksum(b"") == 0x1C77BF2C7682B399
    assert checksum(bytes(range(256)) * 3) == 0xCC001BB2D2E69CFA


def test_torch_and_numpy_views_agree():
    torch = pytest.importorskip("torch")
    tensor = torch.arange(1001, dtype=torch.float32).to(torch.bfloat16)
    raw = tensor.view(torch.uint8).numpy()
    assert checksum(raw) == checksum(raw.tobytes())
