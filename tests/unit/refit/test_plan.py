from __future__ import annotations

import pytest

from refit_bridge.plan import (
    TensorSpec,
    check_same,
    check_unique,
    chunks_by_bytes,
    plan_hash,
    version_digest,
)  # fmt: skip
from services.runtime.errors import InvalidInput, Refused

A = TensorSpec("a", "float32", (2, 3))
B = TensorSpec("b", "bfloat16", (4,))
SCALAR = TensorSpec("s", "int64", ())


def test_specs_survive_the_wire():
    for spec in (A, B, SCALAR):
        assert TensorSpec.from_proto(spec.to_proto()) == spec
    assert (A.nbytes, B.nbytes, SCALAR.nbytes) == (24, 8, 8)


def test_a_dtype_that_cannot_travel_is_refused_by_name():
    with pytest.raises(InvalidInput, match="float8_e4m3fn"):
        TensorSpec("x", "float8_e4m3fn", (1,)).to_proto()


def test_the_hash_knows_names_types_and_shapes_but_not_the_order():
    assert plan_hash([A, B]) == plan_hash([B, A])
    others = [
        TensorSpec("a2", "float32", (2, 3)),
        TensorSpec("a", "float16", (2, 3)),
        TensorSpec("a", "float32", (3, 2)),
    ]  # fmt: skip
    assert len({plan_hash([other, B]) for other in [A, *others]}) == 4


def test_the_digest_follows_the_bytes():
    assert version_digest([A, B], [1, 2]) == version_digest([B, A], [2, 1])
    assert version_digest([A, B], [1, 2]) != version_digest([A, B], [2, 1])


def test_many_missing_names_are_counted():
    specs = [TensorSpec(f"t{i}", "int8", (1,)) for i in range(20)]
    with pytest.raises(Refused, match=r"missing t0, .*t7 and 12 more"):
        check_same(specs, [])


def test_a_name_that_occurs_twice_is_refused():
    with pytest.raises(Refused, match="a occurs twice"):
        check_unique([A, B, A])


def test_chunks_keep_the_order_and_the_limit():
    specs = [TensorSpec(f"t{i}", "uint8", (size,)) for i, size in enumerate((4, 4, 20, 3, 7))]
    chunks = chunks_by_bytes(specs, 10)
    assert [[spec.name for spec in chunk] for chunk in chunks] == [["t0", "t1"], ["t2"], ["t3", "t4"]]
    assert chunks_by_bytes([], 10) == []
