"""Framing: whatever the cuts, the same messages; whatever the bytes, a BackendError at worst."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.core.errors import BackendError
from springtide.core.wire.workers import FrameDecoder
from springtide.serving.frames import (
    MAX_FRAME_BYTES,
    Answered,
    BatchOutcome,
    Ping,
    Predict,
    Question,
    Reply,
    encode_frame,
)

QUESTIONS = st.lists(
    st.builds(Predict, batch_id=st.integers(0, 2**40), calls=st.lists(st.binary(max_size=40), max_size=3).map(tuple))
    | st.builds(Ping, nonce=st.integers(0, 100)),
    max_size=5,
)


@given(QUESTIONS, st.integers(1, 50))
def test_cuts_do_not_matter(questions, size):
    stream = b"".join(encode_frame(question) for question in questions)
    reader: FrameDecoder[Question] = FrameDecoder(Question, MAX_FRAME_BYTES)
    received = [each for start in range(0, len(stream), size) for each in reader.feed(stream[start : start + size])]
    assert received == questions


@given(st.binary(max_size=200))
def test_garbage_is_a_backend_error(data):
    try:
        FrameDecoder(Reply, MAX_FRAME_BYTES).feed(data)
    except BackendError:
        pass


def test_oversize_frames_are_refused_on_both_sides():
    with pytest.raises(BackendError, match="limit"):
        encode_frame(Answered(batch_id=1, outcomes=(BatchOutcome("ok", b"x" * MAX_FRAME_BYTES),)))
    with pytest.raises(BackendError, match="limit"):
        FrameDecoder(Reply, MAX_FRAME_BYTES).feed((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
