"""Messages of a WebSocket as bytes that are cut anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.serving.socket_messages import BadMessage, MessageReader, SocketMessage, close_message

MESSAGES = st.one_of(
    st.builds(SocketMessage, st.just("text"), st.text().map(str.encode)),
    st.builds(SocketMessage, st.just("bytes"), st.binary()),
    st.builds(close_message, st.integers(0, 4999), st.text(max_size=80)),
)


@given(st.lists(MESSAGES), st.integers(1, 20))
def test_they_come_out_as_they_went_in_wherever_the_bytes_are_cut(messages, step):
    sent, reader = b"".join(message.encode() for message in messages), MessageReader()
    assert sum(message.num_bytes for message in messages) == len(sent)
    found = [message for at in range(0, len(sent), step) for message in reader.feed(sent[at : at + step])]
    assert found == messages


@pytest.mark.parametrize("sent", [b"x\0\0\0\0", b"t\xff\xff\xff\xff", b"c\0\0\0\1x"])
def test_other_bytes_are_refused(sent):
    with pytest.raises(BadMessage):
        MessageReader().feed(sent)


def test_a_long_reason_is_cut_between_characters():
    assert close_message(1000, "ä" * 100).body == ("ä" * 61).encode()
