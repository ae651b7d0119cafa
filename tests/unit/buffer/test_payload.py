"""What may enter the books, and that it comes back as it was."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from protos.headrace.v1 import buffer_pb2 as pb
from protos.headrace.v1 import types_pb2 as types
from services.buffer import payload
from services.runtime.errors import Corrupt
from tests.unit.buffer.world import PROMPT, RUN, trajectory

WORK = pb.Work(key=types.SampleKey(run=RUN, book="train", group=1), attempt=1)


def column(t: types.Trajectory, name: str) -> types.Column:
    return next(c for c in t.columns if c.name == name)


def values(t: types.Trajectory, name: str, dtype: str, new: list[float]) -> None:
    column(t, name).data = np.array(new, dtype).tobytes()


def supervised() -> types.Trajectory:
    t = trajectory(WORK, reward=None)
    t.segments[1].source = types.SEGMENT_SOURCE_ENVIRONMENT
    values(t, "logprobs", "<f4", [0] * 7)
    values(t, "versions", "<i4", [-1] * 7)
    return t


def test_a_sound_trajectory_passes_with_its_counts() -> None:
    facts = payload.check(trajectory(WORK, version=3))
    assert (facts.tokens, facts.prompt_tokens, facts.sampled_tokens, facts.lowest_version) == (7, 4, 3, 3)
    assert payload.check(supervised()).lowest_version is None


# fmt: off
FAULTS: dict[str, tuple[Callable[[types.Trajectory], object], str]] = {
    "column missing": (lambda t: t.columns.pop(), "mask is missing"),
    "column twice": (lambda t: t.columns.add().CopyFrom(t.columns[0]), "same name"),
    "short column": (lambda t: setattr(column(t, "mask"), "data", b"\0"), "mask has 1 bytes"),
    "other length": (lambda t: column(t, "mask").shape.__setitem__(0, 6), "do not cover the same tokens"),
    "wrong dtype": (lambda t: setattr(column(t, "ids"), "dtype", types.DTYPE_INT64), "DTYPE_INT32"),
    "no dtype": (lambda t: t.columns.add(name="x", shape=[7], data=b"0123456"), "no known dtype"),
    "gap": (lambda t: setattr(t.segments[1], "start", 5), "segment 1 starts at 5"),
    "too short": (lambda t: setattr(t.segments[1], "length", 2), "cover 6 of 7"),
    "no source": (lambda t: setattr(t.segments[1], "source", 0), "no source"),
    "negative id": (lambda t: values(t, "ids", "<i4", [1, 2, 3, 4, 5, 6, -7]), "negative token"),
    "logprob on prompt": (lambda t: values(t, "logprobs", "<f4", [-1] * 7), "logprobs is not 0"),
    "version on prompt": (lambda t: values(t, "versions", "<i4", [0] * 7), "versions is not -1"),
    "mask on prompt": (lambda t: values(t, "mask", "u1", [1, 0, 0, 0, 1, 1, 1]), "mask is not 0"),
    "mask of two": (lambda t: values(t, "mask", "u1", [0, 0, 0, 0, 2, 1, 1]), "other than 0 and 1"),
    "nan": (lambda t: values(t, "logprobs", "<f4", [0, 0, 0, 0, -1, float("nan"), -1]), "finite"),
    "infinite": (lambda t: values(t, "logprobs", "<f4", [0, 0, 0, 0, -1, float("-inf"), -1]), "finite"),
    "above 0": (lambda t: values(t, "logprobs", "<f4", [0, 0, 0, 0, -1, 0.01, -1]), "above 0"),
    "no version": (lambda t: values(t, "versions", "<i4", [-1, -1, -1, -1, 0, -1, 0]), "no policy version"),
    "unnamed version": (lambda t: values(t, "versions", "<i4", [-1, -1, -1, -1, 0, 4, 0]), r"\[0, 4\]"),
    "no reward": (lambda t: t.ClearField("reward"), "needs a reward"),
    "nan reward": (lambda t: setattr(t.reward, "value", float("nan")), "reward is nan"),
    "other stage": (lambda t: t.reward.stages.add(name="scale", value=0.5), "last stage 0.5"),
    "failure": (lambda t: setattr(t, "outcome", types.OUTCOME_CANCELLED), "CANCELLED is no outcome"),
}
# fmt: on


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_trajectory_is_refused_in_words(name: str) -> None:
    change, words = FAULTS[name]
    broken = trajectory(WORK)
    change(broken)
    with pytest.raises(payload.InvalidTrajectory, match=words):
        payload.check(broken)


def test_supervised_data_must_mark_what_to_train_on() -> None:
    broken = supervised()
    values(broken, "mask", "u1", [0] * 7)
    with pytest.raises(payload.InvalidTrajectory, match="no token is marked"):
        payload.check(broken)


def test_rounding_above_zero_is_tolerated() -> None:
    t = trajectory(WORK)
    values(t, "logprobs", "<f4", [0, 0, 0, 0, -1, 5e-5, -1])
    assert payload.check(t).sampled_tokens == 3


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:2], (9, 9, 9, 9), ()])
def test_a_payload_comes_back_byte_for_byte(prompt: tuple[int, ...]) -> None:
    t = trajectory(WORK)
    t.columns.add(name="experts", dtype=types.DTYPE_INT16, shape=[7, 2], data=bytes(range(28)))
    before = types.Trajectory.FromString(t.SerializeToString())
    stored = np.array(prompt, "<i4").tobytes()
    packed = payload.pack(t, stored)
    assert payload.unpack(packed, stored) == before
    assert types.Trajectory.FromString(bytes(payload.serialised(packed, stored))) == before


def test_a_short_prompt_of_a_long_answer_is_kept_and_handed_on_as_it_is() -> None:
    t = trajectory(WORK, sampled=range(11, 111))
    whole = t.SerializeToString()
    prompt = payload.prompt_of(t, payload.check(t))
    packed = payload.pack(t, prompt)
    assert bytes(payload.serialised(packed, None)) == whole
    assert payload.unpack(packed, None).SerializeToString() == whole


def test_an_unusual_prompt_fill_is_kept() -> None:
    t = trajectory(WORK)
    values(t, "logprobs", "<f4", [-0.0, 0, 0, 0, -1, -1, -1])
    before = types.Trajectory.FromString(t.SerializeToString())
    prompt = payload.prompt_of(t, payload.check(t))
    assert payload.unpack(payload.pack(t, prompt), prompt) == before


def test_a_long_prompt_is_stored_without() -> None:
    t = trajectory(WORK, prompt=range(1000))
    prompt = payload.prompt_of(t, payload.check(t))
    assert len(payload.pack(t, prompt)) < 400


def test_another_prompt_than_the_one_left_out_is_corrupt() -> None:
    t = trajectory(WORK)
    packed = payload.pack(t, np.array(PROMPT, "<i4").tobytes())
    with pytest.raises(Corrupt):
        payload.unpack(packed, None)
